//! Who was served one resident, and the rank that each got: the exact memory behind "once per
//! (block, requester, resident)" and behind the same answer to a repeat.
//!
//! The first [`INLINE`] requesters of a node lie in the slot, five bits each: the rank that was
//! given, or 0 for "not served". Each word of them carries the low bits of the tenancy, so that an
//! exchange that was meant for an earlier one fails. Later requesters go to a list of cells of 16
//! bytes that all residents share. Exactness has no fixed bound below one entry per requester, so
//! this is the one place where the store allocates after its construction; cells are reused, and
//! [`crate::limits::REQUESTERS_MAX`] bounds them to 64 KiB per resident.
//!
//! A set changes only while a ticket in the slot's word says that it does (`claims`).

use crate::sync::{Cell, Shared};
use crate::types::{EvictionRank, RequesterIndex};

const RANK_BITS: u32 = 5;
const PER_WORD: u16 = 8;
const WORDS: usize = 6;
const TENANCY_AT: u32 = RANK_BITS * PER_WORD as u32;
const TENANCY_MASK: u64 = u64::MAX >> TENANCY_AT;

/// Requesters without overflow.
const INLINE: u16 = 48;

const _: () = {
    assert!(INLINE as usize == PER_WORD as usize * WORDS);
    assert!((crate::limits::RANK_MAX as u32) < 1 << RANK_BITS);
};

/// Most cells of one list: a walk that is longer has lost its way in cells that were reused.
const LIST_MAX: usize = 1 << 16;
/// No cell; one is named by its index and one.
const END: u64 = 0;
const CELL_MASK: u64 = u32::MAX as u64;

/// Cells of a set in its slot.
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

impl<'a> Requesters<'a> {
    pub(super) fn new([inline @ .., overflow]: &'a [Cell; CELLS]) -> Self {
        Self { inline, overflow }
    }

    /// Nobody, from this tenancy's start on. The caller owns the slot.
    pub(super) fn clear(self, tenancy: u32, overflow: &Overflow) {
        for word in self.inline {
            word.publish(u64::from(tenancy) << TENANCY_AT);
        }
        self.restart(u64::from(tenancy) << 32 | END, overflow);
    }

    /// Gives the cells of the list back, under the same tenancy. The caller owns the slot.
    pub(super) fn release(self, overflow: &Overflow) {
        self.restart(self.overflow.get() & !CELL_MASK, overflow);
    }

    /// An exchange, because a helper of a ticket that is over may still add a cell.
    fn restart(self, empty: u64, overflow: &Overflow) {
        let mut head = self.overflow.get();
        while !self.overflow.replace(head, empty) {
            head = self.overflow.get();
        }
        let mut at = head & CELL_MASK;
        while let Some(entry) = overflow.entry(at) {
            let next = entry.next.get();
            overflow.give_back(at);
            at = next;
        }
    }

    /// The rank that `requester` got when it was first served. True of a tenancy where the slot's
    /// word is the same before and after.
    pub(super) fn answer(
        self,
        requester: RequesterIndex,
        overflow: &Overflow,
    ) -> Option<EvictionRank> {
        let Some((word, bit)) = place(requester) else {
            return listed(self.overflow.get(), overflow)
                .find(|said| said >> RANK_BITS == u64::from(requester.0))
                .and_then(rank_in);
        };
        rank_in(self.inline.get(word)?.get() >> bit)
    }

    /// Remembers that `requester` got `rank`, unless it is remembered already. `current` says
    /// whether the ticket under which this happens still holds.
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
            let other = before >> TENANCY_AT != u64::from(tenancy) & TENANCY_MASK;
            if other || rank_in(before >> bit).is_some() || !current() {
                return;
            }
            if cell.replace(before, before | u64::from(rank.get()) << bit) {
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
            let known = |said: u64| said >> RANK_BITS == u64::from(requester.0);
            let listed = listed(head, overflow).any(known);
            if head >> 32 != u64::from(tenancy) || listed || !current() {
                return;
            }
            let said = u64::from(requester.0) << RANK_BITS | u64::from(rank.get());
            let at = overflow.take(said, head & CELL_MASK);
            if self.overflow.replace(head, u64::from(tenancy) << 32 | at) {
                return;
            }
            overflow.give_back(at);
        }
    }

    /// How many requesters were served.
    pub(super) fn count(self, overflow: &Overflow) -> u32 {
        let inline = (0..INLINE).filter(|&at| self.answer(RequesterIndex(at), overflow).is_some());
        let overflow = listed(self.overflow.get(), overflow).count();
        u32::try_from(inline.count() + overflow).unwrap_or(u32::MAX)
    }
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
            set.clear(tenancy, &overflow);
            for at in (0..=last).rev() {
                let requester = RequesterIndex(at);
                assert_eq!(set.answer(requester, &overflow), None, "{at}");
                set.record(tenancy, (requester, rank(at)), &overflow, || true);
                set.record(tenancy, (requester, EvictionRank::FIRST), &overflow, || true);
                set.record(tenancy + 1, (RequesterIndex(at + 1), rank(1)), &overflow, || true);
            }
            for at in 0..=last {
                assert_eq!(set.answer(RequesterIndex(at), &overflow), Some(rank(at)), "{at}");
            }
            assert_eq!(set.count(&overflow), u32::from(last) + 1);
        }
        assert_eq!(overflow.entries.count(), usize::from(last + 1 - INLINE), "cells are reused");
    }

    #[test]
    fn only_a_requester_beyond_the_inline_ones_allocates() {
        let cells = std::array::from_fn(|_| Cell::new(0));
        let (set, overflow) = (Requesters::new(&cells), Overflow::new());
        set.clear(1, &overflow);
        for at in 0..INLINE {
            set.record(1, (RequesterIndex(at), EvictionRank::LAST), &overflow, || true);
        }
        assert_eq!(overflow.entries.count(), 0);
        set.record(1, (RequesterIndex(INLINE), EvictionRank::LAST), &overflow, || true);
        assert_eq!(overflow.entries.count(), 1);
    }
}
