//! The state of one slot in one 64-bit word: whatever must change in one step is in it.
//!
//! ```text
//! bits   0..3   state
//!        3..15  pins, 0..=PINS_MAX
//!       15..20  rank, 1..=31
//!       20      fetched: a peer sent it; an owner hint never moves it
//!       21      marked: an event has marked its rank; see `Policy::marks_rank`
//!       22      finished: `finished_sending` was counted
//!       23      fresh: the tag is the slot's generation; else it is the position in a log
//!       24      served: its requesters are not empty
//!       25..64  tag, 39 bits: makes the word one that this slot never had before
//! ```
//!
//! In the states `Serving`, `Claimed` and `Evicted` a word holds a [`Ticket`] instead, which is
//! unique as well; the word that it took the place of is in the ticket's claim.
//!
//! A word is a value: each operation computes the next word from the one it read.

use super::claims::Ticket;
use crate::limits;
use crate::types::EvictionRank;

const PINS_AT: u32 = 3;
const PINS_BITS: u64 = limits::PINS_MAX as u64;
const RANK_AT: u32 = 15;
const RANK_BITS: u64 = 0x1f;
const TAG_AT: u32 = 25;
const STATE_BITS: u64 = 0x7;

/// Bits of a position: so many placements, and the same slot at the same place of one log could
/// repeat a word. At a million placements a second that is six days within one operation.
pub(super) const TAG_BITS: u32 = u64::BITS - TAG_AT;

const _: () = {
    assert!(limits::RANK_MAX as u64 == RANK_BITS);
    assert!((limits::PINS_MAX as u64 + 1).is_power_of_two());
    assert!(PINS_BITS << PINS_AT < 1 << RANK_AT);
};

/// Where a slot is in the life of a tenancy. See the module's diagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum State {
    /// No tenant, or one that is being written by the thread that owns the slot.
    Free = 0,
    /// Linked or about to be; whoever finds it by its key takes it on to the next state.
    Arriving = 1,
    /// Pinned: in no log. Not pinned: in the log of its rank, at the position that is the tag.
    Live = 2,
    /// To be appended to the log of its rank by whoever meets it.
    Placing = 3,
    /// A commit is under way, which whoever meets it finishes.
    Serving = 4,
    /// Chosen as a victim, if no resident was raised meanwhile; whoever meets it decides.
    Claimed = 5,
    /// Gone; the thread that holds the ticket takes it out.
    Evicted = 6,
}

/// A yes-or-no fact about a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Flag {
    Fetched = 1 << 20,
    Marked = 1 << 21,
    Finished = 1 << 22,
    Fresh = 1 << 23,
    Served = 1 << 24,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(pub(super) u64);

impl Word {
    /// A slot without a tenant.
    pub(super) const FREE: Self = Self(0);

    /// The first word of a tenancy.
    pub(super) fn arriving(generation: u32, rank: EvictionRank) -> Self {
        Self(u64::from(generation) << TAG_AT | State::Arriving as u64)
            .with(Flag::Fresh)
            .with_rank(rank)
    }

    pub(super) fn ticket(state: State, ticket: Ticket) -> Self {
        Self(ticket.bits() << PINS_AT | state as u64)
    }

    /// The ticket of a word in one of the states that have one.
    pub(super) fn as_ticket(self) -> Ticket {
        Ticket::from_bits(self.0 >> PINS_AT)
    }

    pub(super) fn state(self) -> State {
        match self.0 & STATE_BITS {
            1 => State::Arriving,
            2 => State::Live,
            3 => State::Placing,
            4 => State::Serving,
            5 => State::Claimed,
            6 => State::Evicted,
            _ => State::Free,
        }
    }

    pub(super) fn with_state(self, state: State) -> Self {
        Self(self.0 & !STATE_BITS | state as u64)
    }

    /// This word, once the resident was appended at `position`.
    pub(super) fn placed_at(self, position: u64) -> Self {
        let rest = self.0 & ((1 << TAG_AT) - 1) & !(Flag::Fresh as u64);
        Self(rest | position << TAG_AT).with_state(State::Live)
    }

    /// Whether this is a word of a resident in a log, at `position`.
    pub(super) fn is_at(self, position: u64) -> bool {
        self.state() == State::Live
            && self.pins() == 0
            && !self.has(Flag::Fresh)
            && self.0 >> TAG_AT == position
    }

    /// Whether this is a word of a resident in the log of `rank`, at a place before `position`: one
    /// that a touch which has appended there may still exchange. Positions come round, so "before" is
    /// the shorter way. (2^38 of them are three days at a million placements a second; so long a
    /// resident would have to lie untouched, to be missed by a sweep within its next touch.)
    pub(super) fn is_before(self, rank: EvictionRank, position: u64) -> bool {
        let ahead = position.wrapping_sub(self.0 >> TAG_AT) & ((1 << TAG_BITS) - 1);
        self.state() == State::Live
            && self.pins() == 0
            && !self.has(Flag::Fresh)
            && self.rank() == rank
            && ahead >> (TAG_BITS - 1) == 0
    }

    /// Whether somebody's operation on it is under way, which anybody may finish.
    pub(super) fn is_pending(self) -> bool {
        matches!(self.state(), State::Placing | State::Serving | State::Claimed)
    }

    pub(super) fn generation(self) -> Option<u32> {
        self.has(Flag::Fresh).then(|| u32::try_from(self.0 >> TAG_AT).unwrap_or(u32::MAX))
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
        (self.pins() < limits::PINS_MAX).then(|| Self(self.0 + (1 << PINS_AT)))
    }

    /// One pin fewer; `None` where there is none.
    pub(super) fn unpinned(self) -> Option<Self> {
        (self.pins() > 0).then(|| Self(self.0 - (1 << PINS_AT)))
    }

    pub(super) fn has(self, flag: Flag) -> bool {
        self.0 & flag as u64 != 0
    }

    pub(super) fn with(self, flag: Flag) -> Self {
        Self(self.0 | flag as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: [Flag; 5] =
        [Flag::Fetched, Flag::Marked, Flag::Finished, Flag::Fresh, Flag::Served];
    const STATES: [State; 7] = [
        State::Free,
        State::Arriving,
        State::Live,
        State::Placing,
        State::Serving,
        State::Claimed,
        State::Evicted,
    ];

    #[test]
    fn fields_do_not_disturb_each_other() {
        let full = FLAGS.into_iter().fold(Word::arriving(u32::MAX, EvictionRank::LAST), Word::with);
        let full = (0..limits::PINS_MAX).fold(full, |word, _| word.pinned().unwrap());
        for state in STATES {
            let word = full.with_state(state);
            assert_eq!((word.state(), word.rank(), word.pins()), (state, EvictionRank::LAST, 4095));
            assert_eq!(word.generation(), Some(u32::MAX));
            assert_eq!(FLAGS.map(|flag| word.has(flag)), [true; 5]);
            let low = word.with_rank(EvictionRank::FIRST).unpinned().unwrap();
            assert_eq!((low.state(), low.rank().get(), low.pins()), (state, 1, 4094));
        }
        let position = (1 << TAG_BITS) - 1;
        let placed = Word::FREE.with_rank(EvictionRank::LAST).placed_at(position);
        assert!(placed.is_at(position) && !placed.is_at(position - 1));
        assert!(placed.is_before(EvictionRank::LAST, 0), "positions come round");
        assert!(!placed.is_before(EvictionRank::LAST, position - 1));
        assert!(!placed.is_before(EvictionRank::FIRST, 0), "another log");
        assert!(!placed.pinned().unwrap().is_at(position), "pinned: in no list");
        assert!(!placed.with(Flag::Fresh).is_at(position), "a generation is no position");
        assert_eq!((placed.rank(), placed.generation()), (EvictionRank::LAST, None));
    }

    #[test]
    fn pins_end_at_their_bounds_without_overflow() {
        let none = Word::arriving(1, EvictionRank::FIRST);
        assert_eq!(none.unpinned(), None);
        let full = (0..limits::PINS_MAX).fold(none, |word, _| word.pinned().unwrap());
        assert_eq!(full.pinned(), None);
        assert_eq!(full.rank(), EvictionRank::FIRST);
    }
}
