//! The state of one slot in one 64-bit word: whatever must change in one step is in it.
//!
//! ```text
//! bits   0..32  generation: the tenancy; changes at each eviction, never 0
//!       32..37  rank, 1..=31
//!       37..49  pins, 0..=PINS_MAX
//!       49      live: a resident is here
//!       50      fetched: a peer sent it; an owner hint never moves it
//!       51      marked: an event has marked its rank; see `Policy::marks_rank`
//! ```
//!
//! A word is a value: each operation computes the next word from the one it read.

use crate::limits;
use crate::types::{EvictionRank, Generation};

const RANK_AT: u32 = 32;
const RANK_BITS: u64 = 0x1f;
const PINS_AT: u32 = 37;
const PINS_BITS: u64 = limits::PINS_MAX as u64;
const PIN: u64 = 1 << PINS_AT;

const _: () = {
    assert!(limits::RANK_MAX as u64 == RANK_BITS);
    assert!((limits::PINS_MAX as u64 + 1).is_power_of_two());
    assert!(PINS_BITS << PINS_AT < Flag::Live as u64);
};

/// A yes-or-no fact about a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Flag {
    Live = 1 << 49,
    Fetched = 1 << 50,
    Marked = 1 << 51,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    /// A slot that never held a resident.
    pub(super) const UNUSED: Self = Self(1);

    /// The first word of a resident in this vacant slot.
    pub(super) fn occupied(self, rank: EvictionRank) -> Self {
        debug_assert!(!self.has(Flag::Live));
        Self(self.0 & u64::from(u32::MAX)).with_rank(rank).with(Flag::Live)
    }

    /// The word after this one's resident is gone: nothing but the next generation. 0 is left out,
    /// so that an id of zeros never matches.
    pub(super) fn vacated(self) -> Self {
        Self(u64::from(self.generation().0.wrapping_add(1).max(1)))
    }

    pub(super) fn generation(self) -> Generation {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the generation")]
        Generation(self.0 as u32)
    }

    pub(super) fn rank(self) -> EvictionRank {
        let bits = self.0 >> RANK_AT & RANK_BITS;
        EvictionRank::clamped(u32::try_from(bits).unwrap_or(u32::MAX))
    }

    pub(super) fn with_rank(self, rank: EvictionRank) -> Self {
        Self(self.0 & !(RANK_BITS << RANK_AT) | u64::from(rank.get()) << RANK_AT)
    }

    pub(super) fn pins(self) -> u16 {
        u16::try_from(self.0 >> PINS_AT & PINS_BITS).unwrap_or(u16::MAX)
    }

    /// One pin more; `None` at the limit.
    pub(super) fn pinned(self) -> Option<Self> {
        (self.pins() < limits::PINS_MAX).then(|| Self(self.0 + PIN))
    }

    /// One pin fewer; `None` where there is none.
    pub(super) fn unpinned(self) -> Option<Self> {
        (self.pins() > 0).then(|| Self(self.0 - PIN))
    }

    /// Whether this slot's resident is in the list of its rank: alive and not pinned.
    pub(super) fn is_listed(self) -> bool {
        self.has(Flag::Live) && self.pins() == 0
    }

    pub(super) fn has(self, flag: Flag) -> bool {
        self.0 & flag as u64 != 0
    }

    pub(super) fn with(self, flag: Flag) -> Self {
        Self(self.0 | flag as u64)
    }
}
