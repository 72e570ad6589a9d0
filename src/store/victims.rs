//! Victims: the search through the lists, the claim, and the guard that says whether the search was
//! still true when the claim was made. And removals, which need none of that.

use arrayvec::ArrayVec;

use super::claims::{Owned, Ticket};
use super::fault::{self, Fault};
use super::index::{Bucket, Index};
use super::log::{List, Oldest, Placed};
use super::resident::{Evicted, RemoveError};
use super::slots::Slot;
use super::table::Table;
use super::word::{Flag, State, Word};
use crate::limits;
use crate::policy::ListHead;
use crate::sync::{Apart, Cell, Shared};
use crate::types::{EvictionRank, MemoryKind, PolicyKind, ResidentId};

/// For each kind of memory the ranks that ever had a list, one bit each, and above them the count of
/// raises.
#[derive(Debug)]
pub(super) struct Guard {
    host: Apart<Cell>,
    device: Apart<Cell>,
    engine: Apart<Cell>,
}

/// Victims that are read ahead together: a processor has ten to twenty misses under way at a time.
const AHEAD: usize = 32;

/// How far ahead of a victim its chain is read: of chains with one slot on average, one in fifty has
/// more before its last.
const CHAIN_WARMED: usize = 3;

/// One raise.
const RAISE: u64 = 1 << 32;

impl Guard {
    pub(super) fn new() -> Self {
        let first = || Apart(Cell::new(1 << EvictionRank::FIRST.get()));
        Self { host: first(), device: first(), engine: first() }
    }

    fn of(&self, kind: MemoryKind) -> &Cell {
        match kind {
            MemoryKind::Host => &self.host,
            MemoryKind::Device => &self.device,
            MemoryKind::Engine => &self.engine,
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

    /// Reads what the next `max` victims of a list need, and no more, so that their cache misses
    /// overlap: in an old list slots are in no order that a processor could foresee. Answers of how
    /// many victims, [`AHEAD`] at most.
    pub(super) fn warm_victims(&self, list: List, max: usize) -> usize {
        let mut chains: ArrayVec<(Bucket, u32), AHEAD> = ArrayVec::new();
        let max = max.min(AHEAD);
        for chunk in self.logs.upcoming(list) {
            chunk.iter().for_each(|placed| self.slots.warm(placed.slot));
            for Placed { slot, position, .. } in chunk {
                let Some(entry) = self.at(slot).filter(|_| chains.len() < max) else {
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
                    chains.push((chain, slot));
                }
            }
            if chains.len() == max {
                break;
            }
        }
        self.warm_chains(&chains);
        chains.len()
    }

    /// Reads what stands before each slot in its chain. A victim came early, so most stand behind all
    /// that came since.
    fn warm_chains(&self, chains: &[(Bucket, u32)]) {
        let first = |&(chain, victim)| Some((self.index.first(chain)?, victim));
        let mut before: ArrayVec<(u32, u32), AHEAD> = chains.iter().filter_map(first).collect();
        for _ in 0..CHAIN_WARMED {
            before.retain(|&mut (slot, victim)| slot != victim);
            before.iter().for_each(|&(slot, _)| self.slots.warm(slot));
            let next = |&(slot, victim)| Some((Index::next(&self.slots, slot)?, victim));
            before = before.iter().filter_map(next).collect();
        }
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
                return self.take_out(entry, oldest.slot, oldest.word);
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

    /// Takes out the resident that `id` means. Its word, with no pin, names its place in a list, and so
    /// never comes back once the resident has left that place: the exchange is of what was looked at.
    pub(super) fn remove(&self, id: ResidentId, claim: &Owned<'_>) -> Result<Evicted, RemoveError> {
        let entry = self.at(id.slot).ok_or(RemoveError::Gone)?;
        loop {
            let word = self.resolve(id).ok_or(RemoveError::Gone)?;
            if word.pins() > 0 {
                return Err(RemoveError::Pinned);
            }
            // Nobody asks what an evicted slot's ticket says; it makes the word one that never was.
            let gone = Word::ticket(State::Evicted, claim.say(word.0, 0));
            if fault::is(Fault::RemovalUnexchanged) {
                entry.set(gone);
            } else if !entry.replace(word, gone) {
                continue;
            }
            return self.take_out(entry, id.slot, word).ok_or(RemoveError::Gone);
        }
    }

    /// Empties the slot of a resident that is gone, whose ticket the caller holds; `word` was its last.
    fn take_out(&self, entry: Slot<'_>, slot: u32, word: Word) -> Option<Evicted> {
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
