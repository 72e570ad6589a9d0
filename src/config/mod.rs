//! Settings that the commands of the local door need.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

const UNITS: [(&str, u64); 4] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
];

/// A number of bytes as people write it: `512MiB`, `4096`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
            .unwrap_or((text, 1));
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(unit))
            .map(Self)
            .ok_or_else(|| format!("a size is a number of bytes such as 512MiB; got {text:?}"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, unit) = UNITS
            .iter()
            .find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit))
            .unwrap_or(&("B", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

/// The local door's path for a client that was given none: `KVRAIL_SOCKET`, else
/// `$XDG_RUNTIME_DIR/kvrail.sock`, else `/run/kvrail.sock`.
#[must_use]
#[expect(
    clippy::disallowed_methods,
    reason = "the configuration is where the environment is read"
)]
pub fn default_socket() -> PathBuf {
    std::env::var_os("KVRAIL_SOCKET").map_or_else(
        || {
            std::env::var_os("XDG_RUNTIME_DIR")
                .map_or_else(|| PathBuf::from("/run"), PathBuf::from)
                .join("kvrail.sock")
        },
        PathBuf::from,
    )
}
