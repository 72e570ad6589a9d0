//! Eviction ranks and the names of what moves them.

use std::fmt;
use std::str::FromStr;

use crate::limits;

/// How soon a resident goes under memory pressure: 1 is kept longest, 31 goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EvictionRank(u8);

impl EvictionRank {
    /// Kept longest.
    pub const FIRST: Self = Self(1);
    /// Goes first; beyond so many readers of one block the order among them is noise.
    pub const LAST: Self = Self(limits::RANK_MAX);

    /// The rank nearest to `value` that exists.
    #[must_use]
    pub const fn clamped(value: u32) -> Self {
        if value < 1 {
            Self::FIRST
        } else if value > limits::RANK_MAX as u32 {
            Self::LAST
        } else {
            // In range by the two comparisons above.
            #[expect(clippy::cast_possible_truncation, reason = "1..=RANK_MAX fits a byte")]
            Self(value as u8)
        }
    }

    /// The rank as a number, 1 to 31.
    #[must_use]
    pub const fn get(self) -> u8 {
        self.0
    }

    /// One step sooner to go, or the same at the end of the scale.
    #[must_use]
    pub const fn raised(self) -> Self {
        Self::clamped(self.0 as u32 + 1)
    }

    /// One step longer to stay, or the same at rank 1.
    #[must_use]
    pub const fn lowered(self) -> Self {
        Self::clamped(self.0 as u32 - 1)
    }

    /// All ranks, 1 first.
    pub fn all() -> impl DoubleEndedIterator<Item = Self> {
        (1..=limits::RANK_MAX).map(Self)
    }
}

impl fmt::Display for EvictionRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which pair of rank transitions and victim order a store runs (DESIGN §5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PolicyKind {
    /// One rank step per reader; the highest rank goes first.
    #[default]
    Rank,
    /// Two segments: saved here (hot), fetched (cold).
    Segmented,
    /// Three classes weighted by age.
    Aged,
    /// One list.
    Lru,
}

impl PolicyKind {
    /// All policies.
    pub const ALL: [Self; 4] = [Self::Rank, Self::Segmented, Self::Aged, Self::Lru];

    /// The name that configuration and output use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Rank => "rank",
            Self::Segmented => "segmented",
            Self::Aged => "aged",
            Self::Lru => "lru",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PolicyKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| {
            format!("an eviction policy is one of rank, segmented, aged, lru; got {text:?}")
        })
    }
}

/// Why a block that was about to be stored is already resident. The three causes mean different
/// things about how many replicas there are, so they are counted, and treated, apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResidentCause {
    /// A peer fetch, or a save after a pull by the engine, found it here: one replica fewer than
    /// the rank expected. The rank recovers.
    PeerFetch,
    /// A batch of which a part was resident already. The rank recovers.
    PartialHit,
    /// Two saves of one block at once: says nothing about replicas. The rank stays.
    DuplicateSave,
}

impl ResidentCause {
    /// All causes.
    pub const ALL: [Self; 3] = [Self::PeerFetch, Self::PartialHit, Self::DuplicateSave];

    /// The name that metrics use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::PeerFetch => "peer_fetch",
            Self::PartialHit => "partial_hit",
            Self::DuplicateSave => "duplicate_save",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_stay_within_their_scale() {
        assert_eq!(EvictionRank::FIRST.lowered(), EvictionRank::FIRST);
        assert_eq!(EvictionRank::LAST.raised(), EvictionRank::LAST);
        assert_eq!(EvictionRank::clamped(0).get(), 1);
        assert_eq!(EvictionRank::clamped(400).get(), 31);
        assert_eq!(EvictionRank::all().count(), 31);
    }

    #[test]
    fn a_policy_survives_its_text_form() {
        for kind in PolicyKind::ALL {
            assert_eq!(kind.to_string().parse::<PolicyKind>(), Ok(kind));
        }
        assert!("fifo".parse::<PolicyKind>().is_err());
    }
}
