//! Victims: the search through the lists, the claim, and the guard that says whether the search was
//! still true when the claim was made.

use arrayvec::ArrayVec;

use super::claims::Ticket;
use super::fault::{self, Fault};
use super::log::Oldest;
use super::resident::Evicted;
use super::slots::Slot;
use super::table::Table;
use super::word::{State, Word};
use crate::limits;
use crate::policy::ListHead;
use crate::sync::{Cell, Shared};
use crate::types::{EvictionRank, PolicyKind};

/// The ranks that ever had a list, one bit each, and above them the count of raises.
#[derive(Debug)]
pub(super) struct Guard(Cell);

/// One raise.
const RAISE: u64 = 1 << 32;

impl Guard {
    pub(super) fn new() -> Self {
        Self(Cell::new(1 << EvictionRank::FIRST.get()))
    }

    /// Says that a list other than the lowest got a member, so that no victim is taken by who has
    /// not seen it.
    pub(super) fn raise(&self, rank: EvictionRank) {
        loop {
            let guard = self.0.get();
            let count = if fault::is(Fault::RaiseUncounted) { 0 } else { RAISE };
            let next = guard.wrapping_add(count) | 1 << rank.get();
            if self.0.replace(guard, next) {
                return;
            }
        }
    }
}

impl Table {
    /// The policy's victim, as the lists are while `guard` holds.
    fn victim(&self, guard: u64) -> Option<Oldest> {
        let worth = |slot, position| self.settled_worth(slot, position);
        let ranks = EvictionRank::all().rev().filter(|rank| guard >> rank.get() & 1 != 0);
        let oldest = |rank| Some((rank, self.logs.oldest(rank, &worth)?));
        let mut heads: ArrayVec<(EvictionRank, Oldest), { limits::RANK_MAX as usize }> =
            ArrayVec::new();
        let chosen = self.policy.victim(ranks.filter_map(oldest).map(|head| {
            let (rank, age) = (head.0, head.1.age);
            heads.push(head);
            ListHead { rank, age }
        }))?;
        heads.into_iter().find_map(|(rank, oldest)| (rank == chosen).then_some(oldest))
    }

    pub(super) fn evict(&self) -> Option<Evicted> {
        let claim = self.claims.take(0);
        loop {
            let guard = self.guard.0.get();
            let Some(oldest) = self.victim(guard) else {
                if self.guard.0.get() == guard {
                    return None;
                }
                continue;
            };
            let entry = self.at(oldest.slot)?;
            let ticket = claim.say(oldest.word.0, guard);
            if !entry.replace(oldest.word, Word::ticket(State::Claimed, ticket)) {
                continue;
            }
            self.judge(oldest.slot, ticket);
            if entry.word() == Word::ticket(State::Evicted, ticket) {
                return Some(self.take_out(entry, oldest));
            }
        }
    }

    /// Decides about a claimed victim: it goes if no resident was raised since its lists were seen.
    pub(super) fn judge(&self, slot: u32, ticket: Ticket) {
        let (Some(entry), Some(said)) = (self.at(slot), self.claims.read(ticket)) else {
            return;
        };
        let mark = Word::ticket(State::Claimed, ticket);
        if entry.word() != mark {
            return;
        }
        // The heads of an aged store are compared by ages that are coarse anyway.
        let aged = self.policy.kind == PolicyKind::Aged;
        let next = if aged || self.guard.0.get() == said.argument || fault::is(Fault::GuardUnread) {
            Word::ticket(State::Evicted, ticket)
        } else {
            Word(said.word)
        };
        entry.replace(mark, next);
    }

    /// Empties the slot of a victim whose ticket the caller holds.
    fn take_out(&self, entry: Slot<'_>, victim: Oldest) -> Evicted {
        let Oldest { slot, word, .. } = victim;
        let (key, payload) = (entry.key(), entry.payload());
        let evicted = Evicted { key, id: self.id(slot), payload, rank: word.rank() };
        self.index.remove(&key, slot);
        entry.requesters.release(&self.overflow);
        entry.set(Word::FREE);
        self.free.push(slot);
        evicted
    }
}
