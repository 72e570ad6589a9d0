//! Memory of another driver's device, as a network card meets it: a range of pointers that the CPU
//! does not touch, and where that driver exports it, a dma-buf.
//!
//! There are three ways for a card's bytes into such memory. They are tried in the order of [`Rung`],
//! for each region and each card, and each that is refused is remembered with the call that refused
//! it: which way was taken, and why, is never a secret.

use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;

use super::Mapping;
use crate::fabric::{Access, Fabric, FabricError, Region, RegionId};
use crate::protocol::door::stat::{GpuWayRefused, GpuWayStat};

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

impl From<&RungRefused> for GpuWayRefused {
    fn from(refused: &RungRefused) -> Self {
        Self {
            nic: refused.nic.clone(),
            rung: refused.rung.to_string(),
            call: refused.call.clone(),
            errno: refused.errno,
            why: refused.why.clone(),
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

/// Memory as a fabric registers it.
#[derive(Debug, Clone)]
pub enum Registrable {
    /// The host's.
    Host(Arc<Mapping>),
    /// Another driver's.
    Foreign(Arc<dyn ForeignMemory>),
}

/// Pins memory with a fabric's cards, on any thread, by the first of these rungs that each one takes where
/// it is another driver's. Nothing is pinned where one card takes none, or where there are no cards: the
/// climb says which, and why.
pub type Pinner<P> =
    Box<dyn Fn(&Registrable, &[Rung]) -> Result<(Option<P>, Climb), FabricError> + Send>;

/// A fabric that registers memory in two steps, of which one may be taken on another thread, and that may
/// have a way into memory of other drivers' devices.
///
/// To register memory is to pin its pages, and so takes as long as there are pages: too long for the
/// thread that polls a fabric at work.
pub trait ForeignFabric: Fabric<Memory = Mapping> {
    /// Memory that cards have pinned, and that nobody can name yet. Let go when dropped, which takes as
    /// long again.
    type Pinned: Send + 'static;

    /// What pins memory for [`Self::adopt`]. Its errors are those of [`Fabric::register`]; that a card
    /// refuses a rung is none.
    fn pinner(&self, access: Access) -> Pinner<Self::Pinned>;

    /// Makes a region of pinned memory, at once, and keeps it as [`Fabric::register`] does.
    ///
    /// # Errors
    /// [`FabricError::Limit`] beyond [`crate::limits::REGIONS_MAX`].
    fn adopt(&mut self, pinned: Self::Pinned) -> Result<Region, FabricError>;

    /// [`Fabric::deregister`], but for what takes as long as there are pages: that is done when the
    /// answer is dropped, and until then peers that know the region's key may read there.
    fn disown(&mut self, region: RegionId) -> Option<Self::Pinned>;

    /// Registers another driver's memory, in one step.
    ///
    /// # Errors
    /// As for [`Fabric::register`].
    fn register_foreign(
        &mut self,
        memory: &Arc<dyn ForeignMemory>,
        access: Access,
        rungs: &[Rung],
    ) -> Result<(Option<Region>, Climb), FabricError> {
        let pin = self.pinner(access);
        let (pinned, climb) = pin(&Registrable::Foreign(Arc::clone(memory)), rungs)?;
        let region = pinned.map(|pinned| self.adopt(pinned)).transpose()?;
        Ok((region, climb))
    }
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

    /// The way of each card, as it is told.
    pub fn ways(&self) -> impl Iterator<Item = GpuWayStat> + '_ {
        self.rungs.iter().map(|(nic, rung)| {
            let near = self.near.iter().find(|(other, _)| other == nic).map(|(_, near)| near);
            GpuWayStat {
                nic: nic.clone(),
                rung: rung.to_string(),
                near: near.is_some_and(|it| it.near),
                near_why: near.map(|it| it.why.clone()).unwrap_or_default(),
            }
        })
    }

    /// What was refused, in one sentence's part.
    #[must_use]
    pub fn why_not(&self) -> String {
        let refused: Vec<_> = self.refused.iter().map(ToString::to_string).collect();
        match refused.is_empty() {
            true => "no RDMA device is in use".to_owned(),
            false => refused.join("; "),
        }
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
