//! Victims: the search through the lists, the claim, and the guard that says whether the search was
//! still true when the claim was made.

use arrayvec::ArrayVec;

use super::claims::{Owned, Ticket};
use super::fault::{self, Fault};
use super::index::Bucket;
use super::log::{List, Oldest, Placed, UPCOMING};
use super::resident::Evicted;
use super::slots::Slot;
use super::table::Table;
use super::word::{Flag, State, Word};
use crate::limits;
use crate::policy::ListHead;
use crate::sync::{Apart, Cell, Shared};
use crate::types::{EvictionRank, MemoryKind, PolicyKind};

/// For each kind of memory the ranks that ever had a list, one bit each, and above them the count of
/// raises.
#[derive(Debug)]
pub(super) struct Guard {
    host: Apart<Cell>,
    device: Apart<Cell>,
}

/// One raise.
const RAISE: u64 = 1 << 32;

impl Guard {
    pub(super) fn new() -> Self {
        let first = || Apart(Cell::new(1 << EvictionRank::FIRST.get()));
        Self { host: first(), device: first() }
    }

    fn of(&self, kind: MemoryKind) -> &Cell {
        match kind {
            MemoryKind::Host => &self.host,
            MemoryKind::Device => &self.device,
        }
    }

    /// Says that a list other than the lowest got a member, so that no victim is taken by who has
    /// not seen it.
    pub(super) fn raise(&self, List { kind, rank }: List) {
        let count = if fault::is(Fault::RaiseUncounted) { 0 } else { RAISE };
        let cell = self.of(kind);
        let mut guard = cell.get();
        // A rank that is there stays there, and then the count, at the top, is all that changes.
        if guard >> rank.get() & 1 != 0 {
            cell.add(count);
            return;
        }
        while !cell.replace(guard, guard.wrapping_add(count) | 1 << rank.get()) {
            guard = cell.get();
        }
    }
}

impl Table {
    /// The policy's victim of this kind, as the lists are while `guard` holds.
    fn victim(&self, kind: MemoryKind, guard: u64) -> Option<Oldest> {
        let worth = |placed| self.settled_worth(placed);
        let ranks = EvictionRank::all().rev().filter(|rank| guard >> rank.get() & 1 != 0);
        let oldest = |rank| Some((rank, self.logs.oldest(List { kind, rank }, &worth)?));
        let mut heads: ArrayVec<(EvictionRank, Oldest), { limits::RANK_MAX as usize }> =
            ArrayVec::new();
        let chosen = self.policy.victim(ranks.filter_map(oldest).map(|head| {
            let (rank, age) = (head.0, head.1.age);
            heads.push(head);
            ListHead { rank, age }
        }))?;
        heads.into_iter().find_map(|(rank, oldest)| (rank == chosen).then_some(oldest))
    }

    /// Reads what the next victims of a list need, and no more, so that their cache misses overlap: in
    /// an old list slots are in no order that a processor could foresee. Goes a chunk of the log ahead;
    /// `warmed` and the answer say which chunk was the first one then.
    pub(super) fn warm_victims(&self, list: List, warmed: Option<u64>) -> Option<u64> {
        if warmed.is_some() && warmed == self.logs.head(list) {
            return warmed;
        }
        let (link, placed) = self.logs.upcoming(list, warmed.is_none())?;
        placed.iter().for_each(|placed| self.slots.warm(placed.slot));
        let mut chains: ArrayVec<Bucket, UPCOMING> = ArrayVec::new();
        for Placed { slot, position, .. } in placed {
            let Some(entry) = self.at(slot) else {
                continue;
            };
            let word = entry.word();
            if word.is_at(position) {
                self.slots.warm_payload(slot);
                if word.has(Flag::Served) {
                    self.slots.warm_requesters(slot);
                }
                let chain = self.index.bucket(&entry.key());
                self.index.first(chain);
                chains.push(chain);
            }
        }
        let neighbours = chains.into_iter().filter_map(|chain| self.index.first(chain));
        neighbours.for_each(|slot| self.slots.warm(slot));
        Some(link)
    }

    pub(super) fn evict(&self, kind: MemoryKind, claim: &Owned<'_>) -> Option<Evicted> {
        let cell = self.guard.of(kind);
        loop {
            let guard = cell.get();
            let Some(oldest) = self.victim(kind, guard) else {
                if cell.get() == guard {
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
                return self.take_out(entry, oldest);
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
        let guard = self.guard.of(entry.kind()).get();
        let next = if aged || guard == said.argument || fault::is(Fault::GuardUnread) {
            Word::ticket(State::Evicted, ticket)
        } else {
            Word(said.word)
        };
        entry.replace(mark, next);
    }

    /// Empties the slot of a victim whose ticket the caller holds.
    fn take_out(&self, entry: Slot<'_>, victim: Oldest) -> Option<Evicted> {
        let Oldest { slot, word, .. } = victim;
        let (key, payload) = (entry.key(), self.slots.payload(slot)?);
        let evicted = Evicted { key, id: self.id(slot), payload, rank: word.rank() };
        self.index.remove(&self.slots, self.index.bucket(&key), slot);
        // Of a resident that was never served they are empty, and where they lie is untouched memory.
        if word.has(Flag::Served) {
            self.slots.requesters(slot)?.release(&self.overflow);
        }
        self.vacate(slot, entry);
        Some(evicted)
    }
}
