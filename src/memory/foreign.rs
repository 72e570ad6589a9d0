//! Memory of another driver's device, as a network card meets it: a range of pointers that the CPU
//! does not touch, and where that driver exports it, a dma-buf.
//!
//! There are three ways for a card's bytes into such memory. They are tried in the order of [`Rung`],
//! for each region and each card, and each that is refused is remembered with the call that refused
//! it: which way was taken, and why, is never a secret.

use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use crate::sys::pci::Nearness;

/// A way for a card's bytes into a device's memory, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rung {
    /// The device's driver exports the memory, the card's driver takes it over.
    DmaBuf,
    /// The card's driver asks the device's driver for what is behind a pointer, by a kernel module
    /// that knows both.
    Peermem,
    /// The card writes to pinned host memory, and the device copies from there.
    Staging,
}

impl Rung {
    /// All of them, in their order.
    pub const ALL: [Self; 3] = [Self::DmaBuf, Self::Peermem, Self::Staging];

    /// The name that output uses.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DmaBuf => "dma-buf",
            Self::Peermem => "peermem",
            Self::Staging => "staging",
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Which rungs may be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GpuDirect {
    /// The first that works.
    #[default]
    Auto,
    /// A dma-buf, else staging.
    DmaBuf,
    /// The pointer itself, else staging.
    Peermem,
    /// Staging.
    Staging,
    /// Not staging: the node does not start on it.
    Require,
}

impl GpuDirect {
    /// All choices.
    pub const ALL: [Self; 5] =
        [Self::Auto, Self::DmaBuf, Self::Peermem, Self::Staging, Self::Require];

    /// The name that settings use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::DmaBuf => "dmabuf",
            Self::Peermem => "peermem",
            Self::Staging => "staging",
            Self::Require => "require",
        }
    }

    /// The direct rungs to try, in order. Staging is what remains.
    #[must_use]
    pub const fn direct(self) -> &'static [Rung] {
        match self {
            Self::Auto | Self::Require => &[Rung::DmaBuf, Rung::Peermem],
            Self::DmaBuf => &[Rung::DmaBuf],
            Self::Peermem => &[Rung::Peermem],
            Self::Staging => &[],
        }
    }
}

impl fmt::Display for GpuDirect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for GpuDirect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.as_str() == text);
        found.ok_or_else(|| {
            format!("GPU-direct is one of auto, dmabuf, peermem, staging, require; got {text:?}")
        })
    }
}

/// A rung that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RungRefused {
    /// Which.
    pub rung: Rung,
    /// The card.
    pub nic: String,
    /// The call that refused it, with what it was about.
    pub call: String,
    /// The system's error number, where it has one.
    pub errno: Option<i32>,
    /// What was answered, in words.
    pub why: String,
}

impl fmt::Display for RungRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}: {}: {}", self.rung, self.nic, self.call, self.why)?;
        match self.errno {
            Some(errno) => write!(f, " (errno {errno})"),
            None => Ok(()),
        }
    }
}

/// A call of the device's driver that was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportRefused {
    /// The call.
    pub call: String,
    /// The driver's answer.
    pub why: String,
}

/// A range as a dma-buf.
#[derive(Debug)]
pub struct ExportedRange {
    /// The buffer; to be closed once it is registered.
    pub fd: OwnedFd,
    /// Where the range begins in it, bytes.
    pub offset: u64,
    /// What was not as wished, and went otherwise.
    pub note: Option<ExportRefused>,
}

/// Memory of another driver's device. It lives as long as anyone holds it.
pub trait ForeignMemory: fmt::Debug + Send + Sync {
    /// The pointer of its first byte, which only drivers understand.
    fn address(&self) -> u64;

    /// Its length in bytes, at least 1.
    fn bytes(&self) -> u64;

    /// The device's place on the PCI bus, as sysfs names it: `0000:3b:00.0`; `None` where it has none.
    fn pci(&self) -> Option<String>;

    /// Whether what a card writes can be made visible to the device.
    ///
    /// # Errors
    /// Why not: no card may write to it then.
    fn writable(&self) -> Result<(), ExportRefused>;

    /// `len` bytes at `offset` as a dma-buf.
    ///
    /// # Errors
    /// What the device's driver answers.
    fn dma_buf(&self, offset: u64, len: u64) -> Result<ExportedRange, ExportRefused>;
}

/// How a range came to be registered with each card.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Climb {
    /// For each card, the rung that it is on.
    pub rungs: Vec<(String, Rung)>,
    /// What was refused before, in the order tried.
    pub refused: Vec<RungRefused>,
    /// Each card, and whether it is among those nearest to the memory's device. READs take these where
    /// cards reach the memory itself; staging memory, which is the host's, is as near to all.
    pub near: Vec<(String, Nearness)>,
}

impl Climb {
    /// Whether all cards reach the memory itself. One that does not makes all stage: a READ may take
    /// any of them.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        !self.rungs.is_empty() && self.rungs.iter().all(|(_, rung)| *rung != Rung::Staging)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_parsed_and_name_their_rungs() {
        for choice in GpuDirect::ALL {
            assert_eq!(choice.to_string().parse(), Ok(choice));
            assert!(choice.direct().is_sorted());
            assert!(!choice.direct().contains(&Rung::Staging));
        }
        let refused = "direct".parse::<GpuDirect>().unwrap_err();
        assert!(refused.contains("auto, dmabuf, peermem, staging, require"), "{refused}");
    }

    #[test]
    fn a_climb_is_direct_where_every_card_is() {
        let on = |rungs: &[Rung]| Climb {
            rungs: rungs.iter().map(|rung| ("nic".to_owned(), *rung)).collect(),
            ..Climb::default()
        };
        assert!(on(&[Rung::DmaBuf, Rung::Peermem]).is_direct());
        assert!(!on(&[Rung::DmaBuf, Rung::Staging]).is_direct());
        assert!(!on(&[]).is_direct(), "without a card there is no way");
    }

    #[test]
    fn a_refusal_names_the_call_and_the_error_number() {
        let refused = RungRefused {
            rung: Rung::Peermem,
            nic: "mlx5_0".to_owned(),
            call: "ibv_reg_mr of 4096 bytes".to_owned(),
            errno: Some(14),
            why: "Bad address".to_owned(),
        };
        let said = refused.to_string();
        assert_eq!(said, "peermem on mlx5_0: ibv_reg_mr of 4096 bytes: Bad address (errno 14)");
    }
}
