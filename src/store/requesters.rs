//! Who was served one resident, and the rank that each got: the exact memory behind "once per
//! (block, requester, resident)" and behind the same answer to a repeat.
//!
//! The first [`INLINE`] requesters of a node have five bits each in a line of the slot: the rank that
//! was given, or 0 for "not served". Each word of them carries the low bits of the tenancy: what an
//! earlier one left counts as nothing. The line is written when the resident is first served, and
//! emptied when it goes, so where nothing is ever served it costs no memory. Later requesters go to a list of cells of 16
//! bytes that all residents share. Exactness has no fixed bound below one entry per requester, so
//! this is the one place where the store allocates after its construction; cells are reused, and
//! [`crate::limits::REQUESTERS_MAX`] bounds them to 64 KiB per resident.
//!
//! A set changes only while a ticket in the slot's word says that it does (`claims`).

use crate::sync::{Cell, Shared};
use crate::types::{EvictionRank, RequesterIndex};

const RANK_BITS: u32 = 5;
const PER_WORD: u16 = 8;
const WORDS: usize = 7;
const TENANCY_AT: u32 = RANK_BITS * PER_WORD as u32;
const TENANCY_MASK: u64 = u64::MAX >> TENANCY_AT;

/// Requesters without overflow.
const INLINE: u16 = 56;

const _: () = {
    assert!(INLINE as usize == PER_WORD as usize * WORDS);
    assert!((crate::limits::RANK_MAX as u32) < 1 << RANK_BITS);
};

/// Most cells of one list: a walk that is longer has lost its way in cells that were reused.
const LIST_MAX: usize = 1 << 16;
/// No cell; one is named by its index and one.
const END: u64 = 0;
const CELL_MASK: u64 = u32::MAX as u64;

/// Cells of a set: a cache line.
pub(super) const CELLS: usize = WORDS + 1;

/// The set of one slot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Requesters<'a> {
    inline: &'a [Cell; WORDS],
    /// The first cell of the list, and the tenancy in the upper half.
    overflow: &'a Cell,
}

/// One entry of the overflow.
#[derive(Debug)]
struct Entry {
    /// Requester and rank.
    said: Cell,
    next: Cell,
}

/// The cells of all lists.
#[derive(Debug)]
pub(super) struct Overflow {
    entries: boxcar::Vec<Entry>,
    /// The first free one and a count of changes in the upper half.
    free: Cell,
}

fn place(requester: RequesterIndex) -> Option<(usize, u32)> {
    (requester.0 < INLINE).then(|| {
        let word = usize::from(requester.0 / PER_WORD);
        (word, u32::from(requester.0 % PER_WORD) * RANK_BITS)
    })
}

fn rank_in(bits: u64) -> Option<EvictionRank> {
    let value = u32::try_from(bits & ((1 << RANK_BITS) - 1)).ok()?;
    (value > 0).then(|| EvictionRank::clamped(value))
}

impl Overflow {
    pub(super) fn new() -> Self {
        Self { entries: boxcar::Vec::new(), free: Cell::new(END) }
    }

    fn entry(&self, at: u64) -> Option<&Entry> {
        self.entries.get(usize::try_from(at.checked_sub(1)?).ok()?)
    }

    fn take(&self, said: u64, next: u64) -> u64 {
        loop {
            let top = self.free.get();
            let Some(entry) = self.entry(top & CELL_MASK) else {
                let entry = Entry { said: Cell::new(said), next: Cell::new(next) };
                return self.entries.push(entry) as u64 + 1;
            };
            let below = entry.next.get();
            if self.free.replace(top, ((top >> 32) + 1) << 32 | below) {
                entry.said.publish(said);
                entry.next.publish(next);
                return top & CELL_MASK;
            }
        }
    }

    fn give_back(&self, at: u64) {
        let Some(entry) = self.entry(at) else {
            return;
        };
        loop {
            let top = self.free.get();
            entry.next.publish(top & CELL_MASK);
            if self.free.replace(top, ((top >> 32) + 1) << 32 | at) {
                return;
            }
        }
    }
}

impl Overflow {
    /// Frees a list that nobody leads to any more.
    fn give_all_back(&self, head: u64) {
        let mut at = head & CELL_MASK;
        while let Some(entry) = self.entry(at) {
            let next = entry.next.get();
            self.give_back(at);
            at = next;
        }
    }
}

impl<'a> Requesters<'a> {
    pub(super) fn new([inline @ .., overflow]: &'a [Cell; CELLS]) -> Self {
        Self { inline, overflow }
    }

    /// Reads, and no more.
    pub(super) fn warm(self) {
        self.overflow.get();
    }

    /// Empties the set at the end of a tenancy. The caller owns the slot.
    ///
    /// A helper of a ticket that is over may still add something. Nobody takes it for more than it
    /// is, because it names its tenancy, and it goes with the next one.
    pub(super) fn release(self, overflow: &Overflow) {
        for word in self.inline.iter().filter(|word| word.get() != 0) {
            word.publish(0);
        }
        let mut head = self.overflow.get();
        while head != 0 && !self.overflow.replace(head, 0) {
            head = self.overflow.get();
        }
        overflow.give_all_back(head);
    }

    /// The rank that `requester` got when it was first served. True of a tenancy where the slot's
    /// word is the same before and after.
    pub(super) fn answer(
        self,
        tenancy: u32,
        requester: RequesterIndex,
        overflow: &Overflow,
    ) -> Option<EvictionRank> {
        let Some((word, bit)) = place(requester) else {
            return listed(self.head(tenancy), overflow)
                .find(|said| said >> RANK_BITS == u64::from(requester.0))
                .and_then(rank_in);
        };
        rank_in(of_tenancy(self.inline.get(word)?.get(), tenancy)? >> bit)
    }

    /// The first cell of this tenancy's list.
    fn head(self, tenancy: u32) -> u64 {
        let head = self.overflow.get();
        if head >> 32 == u64::from(tenancy) { head & CELL_MASK } else { END }
    }

    /// Remembers that `requester` got `rank`, unless it is remembered already. `current` says
    /// whether the ticket under which this happens still holds: if so, what is there of another
    /// tenancy is of an earlier one.
    pub(super) fn record(
        self,
        tenancy: u32,
        given: (RequesterIndex, EvictionRank),
        overflow: &Overflow,
        current: impl Fn() -> bool,
    ) {
        let (requester, rank) = given;
        let Some((word, bit)) = place(requester) else {
            return self.record_overflow(tenancy, given, overflow, current);
        };
        let Some(cell) = self.inline.get(word) else {
            return;
        };
        loop {
            let before = cell.get();
            let ranks = of_tenancy(before, tenancy).unwrap_or(0);
            if rank_in(ranks >> bit).is_some() || !current() {
                return;
            }
            let tag = u64::from(tenancy) << TENANCY_AT;
            if cell.replace(before, tag | ranks | u64::from(rank.get()) << bit) {
                return;
            }
        }
    }

    fn record_overflow(
        self,
        tenancy: u32,
        (requester, rank): (RequesterIndex, EvictionRank),
        overflow: &Overflow,
        current: impl Fn() -> bool,
    ) {
        loop {
            let head = self.overflow.get();
            let own = head >> 32 == u64::from(tenancy);
            let first = if own { head & CELL_MASK } else { END };
            let known = |said: u64| said >> RANK_BITS == u64::from(requester.0);
            if listed(first, overflow).any(known) || !current() {
                return;
            }
            let said = u64::from(requester.0) << RANK_BITS | u64::from(rank.get());
            let at = overflow.take(said, first);
            if self.overflow.replace(head, u64::from(tenancy) << 32 | at) {
                if !own {
                    overflow.give_all_back(head);
                }
                return;
            }
            overflow.give_back(at);
        }
    }

    /// How many requesters were served.
    pub(super) fn count(self, tenancy: u32, overflow: &Overflow) -> u32 {
        let served = |at| self.answer(tenancy, RequesterIndex(at), overflow).is_some();
        let inline = (0..INLINE).filter(|&at| served(at)).count();
        let overflow = listed(self.head(tenancy), overflow).count();
        u32::try_from(inline + overflow).unwrap_or(u32::MAX)
    }
}

/// The ranks in an inline word, if it is of this tenancy.
fn of_tenancy(word: u64, tenancy: u32) -> Option<u64> {
    let own = word >> TENANCY_AT == u64::from(tenancy) & TENANCY_MASK;
    own.then_some(word & ((1 << TENANCY_AT) - 1))
}

fn listed(head: u64, overflow: &Overflow) -> impl Iterator<Item = u64> + '_ {
    let mut at = head & CELL_MASK;
    std::iter::from_fn(move || {
        let entry = overflow.entry(at)?;
        at = entry.next.get();
        Some(entry.said.get())
    })
    .take(LIST_MAX)
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::limits;

    #[test]
    fn every_requester_keeps_its_first_answer() {
        let cells = std::array::from_fn(|_| Cell::new(0));
        let (set, overflow) = (Requesters::new(&cells), Overflow::new());
        let rank = |at: u16| EvictionRank::clamped(u32::from(at) % 31 + 1);
        let last = u16::try_from(limits::REQUESTERS_MAX - 1).unwrap();
        for tenancy in [1, 2] {
            for at in (0..=last).rev() {
                let requester = RequesterIndex(at);
                assert_eq!(set.answer(tenancy, requester, &overflow), None, "{at}");
                set.record(tenancy, (requester, rank(at)), &overflow, || true);
                set.record(tenancy, (requester, EvictionRank::FIRST), &overflow, || true);
                set.record(tenancy - 1, (requester, rank(1)), &overflow, || false);
            }
            for at in 0..=last {
                assert_eq!(
                    set.answer(tenancy, RequesterIndex(at), &overflow),
                    Some(rank(at)),
                    "{at}"
                );
            }
            assert_eq!(set.count(tenancy, &overflow), u32::from(last) + 1);
            assert_eq!(set.count(tenancy + 1, &overflow), 0, "the next tenancy starts empty");
            set.release(&overflow);
            assert_eq!(set.count(tenancy, &overflow), 0);
        }
        assert_eq!(overflow.entries.count(), usize::from(last + 1 - INLINE), "cells are reused");
    }

    #[test]
    fn only_a_requester_beyond_the_inline_ones_allocates() {
        let cells = std::array::from_fn(|_| Cell::new(0));
        let (set, overflow) = (Requesters::new(&cells), Overflow::new());
        for at in 0..INLINE {
            set.record(1, (RequesterIndex(at), EvictionRank::LAST), &overflow, || true);
        }
        assert_eq!(overflow.entries.count(), 0);
        set.record(1, (RequesterIndex(INLINE), EvictionRank::LAST), &overflow, || true);
        assert_eq!(overflow.entries.count(), 1);
    }
}
