//! The values that settings take, each with the sentence that refuses nonsense.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use super::ConfigError;
use super::layers::read_short;
use crate::verbs::NicPair;

const UNITS: [(&str, u64); 8] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
];

/// A number of bytes as people write it: `512MiB`, `30GiB`, `1GB`, `4096`. Whole numbers only, so
/// that no size depends on rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, unit) = UNITS
            .iter()
            .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
            .unwrap_or((text.strip_suffix('B').unwrap_or(text), 1));
        let digits = digits.trim_end();
        let whole = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let count = whole.then(|| digits.parse::<u64>().ok()).flatten();
        let Some(count) = count else {
            return Err(format!(
                "a size is a whole number of bytes with an optional KiB, MiB, GiB, TiB, KB, MB, \
                 GB or TB, such as 512MiB; got {text:?}"
            ));
        };
        count
            .checked_mul(unit)
            .map(Self)
            .ok_or_else(|| format!("{text:?} is more bytes than 64 bits can count"))
    }
}

impl fmt::Display for Size {
    /// Exact: the largest binary unit that divides it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, unit) = UNITS
            .iter()
            .take(4)
            .find(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit))
            .unwrap_or(&("B", 1));
        write!(f, "{}{name}", self.0 / unit)
    }
}

/// One memory pool: its size, and the NUMA node that its pages come from where one is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSpec {
    /// Bytes.
    pub size: Size,
    /// The NUMA node, as `/sys/devices/system/node` numbers it.
    pub numa: Option<u32>,
}

impl PoolSpec {
    /// Smallest pool, bytes: below it the bookkeeping outweighs the payload.
    pub const BYTES_MIN: u64 = 64 << 10;
}

impl FromStr for PoolSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (size, options) =
            text.split_once('@').map_or((text, None), |(size, options)| (size, Some(options)));
        let size = size.parse::<Size>()?;
        if size.0 < Self::BYTES_MIN {
            return Err(format!("a pool has at least {}, got {text:?}", Size(Self::BYTES_MIN)));
        }
        let numa = options
            .map(|options| {
                options.strip_prefix("numa=").and_then(|node| node.parse().ok()).ok_or_else(|| {
                    format!("after @ a pool takes numa=NODE, as in 30GiB@numa=1; got {text:?}")
                })
            })
            .transpose()?;
        Ok(Self { size, numa })
    }
}

/// The size of the pages that back the pools, where the host's default will not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HugePages {
    /// 2 MiB pages.
    Mib2,
    /// 1 GiB pages.
    Gib1,
}

impl HugePages {
    /// Bytes of one page.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Mib2 => 2 << 20,
            Self::Gib1 => 1 << 30,
        }
    }
}

impl FromStr for HugePages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "2MiB" => Ok(Self::Mib2),
            "1GiB" => Ok(Self::Gib1),
            _ => Err(format!("huge pages are 2MiB or 1GiB, got {text:?}")),
        }
    }
}

/// `host:port`, where the host is a name, an IPv4 address or an IPv6 address in brackets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostPort(String);

impl HostPort {
    /// The text, as the registry and peers get it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it names no host in particular (`0.0.0.0`, `[::]`), so that nobody can connect to it.
    #[must_use]
    pub fn is_unspecified(&self) -> bool {
        self.0.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_unspecified())
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> Self {
        Self(address.to_string())
    }
}

impl FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let good = text.rsplit_once(':').is_some_and(|(host, port)| {
            let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
            let host_fits = bare.map_or_else(
                || !host.is_empty() && !host.contains([':', '/', '@']),
                |host| host.parse::<std::net::Ipv6Addr>().is_ok(),
            );
            let spaces = host.contains(|c: char| c.is_whitespace() || c.is_control());
            host_fits && !spaces && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
        if good {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!(
                "an address is host:port with a port from 1 to 65535, as in node7:7070 or \
                 [fd00::7]:7070; got {text:?}"
            ))
        }
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where the registry is: `http://host:port` for `kvrail registry`, or `redis://host:port` for a Redis
/// or Valkey server, of which a cluster's may be several, separated by commas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryUrl {
    text: String,
    redis: Vec<String>,
}

impl RegistryUrl {
    /// The URL.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The addresses of Redis or Valkey servers; none where it is `kvrail registry`.
    #[must_use]
    pub fn redis_servers(&self) -> &[String] {
        &self.redis
    }
}

impl FromStr for RegistryUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || {
            format!(
                "a registry is http://host:port, or redis://host:port of a Redis or Valkey server \
                 (several of a cluster: redis://host:port,host:port), as in http://head:7071; got \
                 {text:?}"
            )
        };
        let (scheme, rest) = text.split_once("://").ok_or_else(refused)?;
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let addresses: Result<Vec<HostPort>, _> = rest.split(',').map(str::parse).collect();
        let addresses = addresses.map_err(|_bad_address| refused())?;
        let text = format!("{scheme}://{rest}");
        match (scheme, addresses.len()) {
            ("http", 1) => Ok(Self { text, redis: Vec::new() }),
            ("redis", _) => {
                Ok(Self { text, redis: addresses.iter().map(ToString::to_string).collect() })
            }
            _ => Err(refused()),
        }
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Permission bits of a socket file, octal in text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl FromStr for SocketMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        u32::from_str_radix(text, 8)
            .ok()
            .filter(|mode| *mode <= 0o777 && !text.starts_with('+'))
            .map(Self)
            .ok_or_else(|| {
                format!("a mode is three octal digits, such as 600 or 660; got {text:?}")
            })
    }
}

/// A share of a whole, 1 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u8);

impl Percent {
    /// That many percent, or the nearest that exists.
    #[must_use]
    pub fn clamped(value: u8) -> Self {
        Self(value.clamp(1, 100))
    }

    /// The number, 1 to 100.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.strip_suffix('%').unwrap_or(text);
        digits
            .parse()
            .ok()
            .filter(|value| (1..=100).contains(value))
            .map(Self)
            .ok_or_else(|| format!("a share is a whole percentage from 1 to 100; got {text:?}"))
    }
}

/// What every member of a cluster knows and nobody else: peers prove it when they connect. Printed
/// nowhere, not even by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterSecret(Vec<u8>);

impl ClusterSecret {
    /// Shortest secret, bytes: 128 bits, so that it cannot be guessed.
    pub const BYTES_MIN: usize = 16;
    /// Longest secret, bytes: what is longer is the wrong file.
    pub const BYTES_MAX: usize = 4096;

    /// The file's bytes without the white space around them.
    ///
    /// # Errors
    /// [`ConfigError::Unreadable`], or [`ConfigError::Value`] for a length outside 16 to 4096 bytes.
    pub fn read(path: PathBuf) -> Result<Self, ConfigError> {
        const SETTING: &str = "--cluster-secret-file";
        let bytes = read_short(SETTING, &path)?;
        let secret = bytes.trim_ascii();
        if !(Self::BYTES_MIN..=Self::BYTES_MAX).contains(&secret.len()) {
            return Err(ConfigError::Value {
                origin: SETTING.to_owned(),
                reason: format!(
                    "a secret has {} to {} bytes, {} has {}",
                    Self::BYTES_MIN,
                    Self::BYTES_MAX,
                    path.display(),
                    secret.len()
                ),
            });
        }
        Ok(Self(secret.to_vec()))
    }

    /// The secret.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for ClusterSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterSecret(..)")
    }
}

/// What every kvrail process has, whatever it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessConfig {
    /// Where `/metrics` and `/health` answer; `None` for nowhere.
    pub metrics_listen: Option<SocketAddr>,
    /// A filter of `tracing-subscriber`, known to parse.
    pub log: String,
    /// A file that gets one JSON line once the process serves.
    pub ready_file: Option<PathBuf>,
    /// The parent with which the process ends.
    pub parent_death: Option<u32>,
}

/// A time span such as `10s`, `1500ms` or `2m 30s`; not zero.
///
/// # Errors
/// The sentence that refuses `text`.
pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).ok().filter(|span| !span.is_zero()).ok_or_else(|| {
        format!("a time is a number above 0 with its unit, such as 10s or 1500ms; got {text:?}")
    })
}

/// An address to listen on or to connect to, without a name to look up.
///
/// # Errors
/// The sentence that refuses `text`.
pub fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_no_address| {
        format!(
            "an address here is IP:PORT, as in 10.0.0.7:7070, 0.0.0.0:7070 or [::]:7070; got {text:?}"
        )
    })
}

/// Hashes a second, at least one.
pub(super) fn rate(text: &str) -> Result<u32, String> {
    let refused = || format!("a rate is a whole number a second, such as 200000; got {text:?}");
    text.parse().ok().filter(|rate| *rate > 0).ok_or_else(refused)
}

/// The name of an RDMA device, as the kernel lets it be.
pub(super) fn device_name(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "_-.:".contains(c);
    match text {
        "" => Err("an RDMA device has a name, such as mlx5_0".to_owned()),
        name if name.len() < 64 && name.chars().all(good) => Ok(name.to_owned()),
        _ => Err(format!("{text:?} is no name of an RDMA device; mlx5_0 would be one")),
    }
}

/// A device of ours and one of a peer.
pub(super) fn nic_pair(text: &str) -> Result<NicPair, String> {
    let refused = || format!("a pair is OURS=THEIRS, such as mlx5_0=mlx5_2; got {text:?}");
    let (ours, theirs) = text.split_once('=').ok_or_else(refused)?;
    Ok(NicPair { ours: device_name(ours)?, theirs: device_name(theirs)? })
}

/// A filter that `tracing-subscriber` takes. It would take a level with a slip of the pen for the name of a
/// target, and log nothing: a target so needs its level.
pub(super) fn log_filter(text: &str) -> Result<String, String> {
    let refused = |why: &str| {
        format!(
            "a log filter is a level (off, error, warn, info, debug, trace) or target=level,…; got \
             {text:?}{why}"
        )
    };
    let is_clear = |one: &str| {
        one.contains(['=', '[']) || (!one.is_empty() && one.parse::<LevelFilter>().is_ok())
    };
    if !text.split(',').map(str::trim).all(is_clear) {
        return Err(refused(""));
    }
    EnvFilter::try_new(text)
        .map(|_filter| text.to_owned())
        .map_err(|error| refused(&format!(": {error}")))
}
