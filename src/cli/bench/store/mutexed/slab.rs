//! The sequential store: slots, the index over them, the lists through them, the counts of them.
//!
//! Every change of a slot's word goes through [`Slab::set`], which keeps lists and counts in step
//! with it. So the rules "pinned: in no list" and "last unpin: newest of its rank" are written once.

use std::fmt;

use super::index::Index;
use super::lists::Lists;
use super::requesters::Requesters;
use super::word::{Flag, Word};
use crate::policy::{Origin, Policy, RankEvent};
use crate::store::{
    Committed, Evicted, Found, InsertError, Payload, PinError, StoreConfig, StoreStats, UnpinError,
};
use crate::types::{BlockKey, EvictionRank, RequesterIndex, ResidentId};

/// A rank before and after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) from: EvictionRank,
    pub(super) to: EvictionRank,
}

/// What a placement does with a resident that stays in the list it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recency {
    /// It becomes the newest.
    Touch,
    /// It keeps its place.
    Keep,
}

struct Slot {
    word: Word,
    key: BlockKey,
    payload: Payload,
    requesters: Requesters,
}

/// With 16 bytes of links, 12 at most of index and 4 of free list: what `StoreConfig` promises.
const _: () = assert!(size_of::<Slot>() <= 120);

impl Slot {
    fn id(&self, slot: u32) -> ResidentId {
        let generation = self.word.generation();
        ResidentId { slot, generation }
    }

    fn found(&self, slot: u32) -> Found {
        Found { id: self.id(slot), payload: self.payload, rank: self.word.rank() }
    }
}

pub(super) struct Slab {
    policy: Policy,
    /// Slots used so far. The vector's capacity is the store's: it never reallocates, and memory
    /// that no resident ever used stays untouched.
    slots: Vec<Slot>,
    /// Vacant ones among them.
    free: Vec<u32>,
    index: Index,
    lists: Lists,
    stats: StoreStats,
}

impl Slab {
    /// `config` was checked by the caller.
    pub(super) fn new(config: StoreConfig) -> Self {
        Self {
            policy: config.policy,
            slots: Vec::with_capacity(config.capacity as usize),
            free: Vec::with_capacity(config.capacity as usize),
            index: Index::new(config.capacity),
            lists: Lists::new(config.capacity),
            stats: StoreStats {
                capacity: config.capacity,
                residents: 0,
                pinned: 0,
                bytes: 0,
                by_rank: [0; _],
                max_rank: None,
            },
        }
    }

    fn at(&self, slot: u32) -> Option<&Slot> {
        self.slots.get(slot as usize)
    }

    fn locate(&self, key: &BlockKey) -> Option<u32> {
        self.index.find(key, |slot| self.at(slot).is_some_and(|s| s.key == *key))
    }

    /// The word of the resident that `id` means, if that is still here.
    fn resolve(&self, id: ResidentId) -> Option<Word> {
        let word = self.at(id.slot)?.word;
        (word.has(Flag::Live) && word.generation() == id.generation).then_some(word)
    }

    /// Gives a slot its next word and brings lists and counts in step.
    fn set(&mut self, slot: u32, next: Word, recency: Recency) {
        let Some(entry) = self.slots.get_mut(slot as usize) else {
            return;
        };
        let old = std::mem::replace(&mut entry.word, next);
        let bytes = u64::from(entry.payload.extent.len);
        let stays = old.is_listed() && next.is_listed() && old.rank() == next.rank();
        if !stays || recency == Recency::Touch {
            if old.is_listed() {
                self.lists.remove(old.rank(), slot);
            }
            if next.is_listed() {
                self.lists.push_newest(next.rank(), slot);
            }
        }
        if old.has(Flag::Live) {
            self.stats.residents -= 1;
            self.stats.bytes -= bytes;
            self.stats.pinned -= u32::from(old.pins() > 0);
            if let Some(count) = self.stats.by_rank.get_mut(usize::from(old.rank().get())) {
                *count -= 1;
            }
        }
        if next.has(Flag::Live) {
            self.stats.residents += 1;
            self.stats.bytes += bytes;
            self.stats.pinned += u32::from(next.pins() > 0);
            if let Some(count) = self.stats.by_rank.get_mut(usize::from(next.rank().get())) {
                *count += 1;
            }
        }
    }

    /// The word after `event`, with the step that it made.
    fn after(&self, word: Word, event: RankEvent) -> (Word, Step) {
        let from = word.rank();
        let to = self.policy.transition(from, event);
        let next = word.with_rank(to);
        if self.policy.marks_rank(event) {
            (next.with(Flag::Marked), Step { from, to })
        } else {
            (next, Step { from, to })
        }
    }

    pub(super) fn insert(
        &mut self,
        key: BlockKey,
        payload: Payload,
        origin: Origin,
        pinned: bool,
    ) -> Result<Found, InsertError> {
        if let Some(found) = self.lookup(&key) {
            return Err(InsertError::AlreadyResident(found));
        }
        let slot = self.vacancy(key, payload).ok_or(InsertError::Full)?;
        let vacant = self.at(slot).ok_or(InsertError::Full)?.word;
        let mut word = vacant.occupied(self.policy.initial(origin));
        if matches!(origin, Origin::Fetched { .. }) {
            word = word.with(Flag::Fetched);
        }
        if pinned {
            word = word.pinned().unwrap_or(word);
        }
        self.index.insert(&key, slot);
        self.set(slot, word, Recency::Touch);
        Ok(self.at(slot).ok_or(InsertError::Full)?.found(slot))
    }

    /// A vacant slot that holds this key and payload from now on.
    fn vacancy(&mut self, key: BlockKey, payload: Payload) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            let entry = self.slots.get_mut(slot as usize)?;
            entry.key = key;
            entry.payload = payload;
            return Some(slot);
        }
        let slot = u32::try_from(self.slots.len()).ok()?;
        if slot >= self.stats.capacity {
            return None;
        }
        self.slots.push(Slot {
            word: Word::UNUSED,
            key,
            payload,
            requesters: Requesters::default(),
        });
        Some(slot)
    }

    pub(super) fn lookup(&self, key: &BlockKey) -> Option<Found> {
        let slot = self.locate(key)?;
        Some(self.at(slot)?.found(slot))
    }

    pub(super) fn pin(&mut self, key: &BlockKey) -> Result<Found, PinError> {
        let slot = self.locate(key).ok_or(PinError::NotFound)?;
        let word = self.at(slot).ok_or(PinError::NotFound)?.word;
        let next = word.pinned().ok_or(PinError::TooManyPins)?;
        self.set(slot, next, Recency::Keep);
        Ok(self.at(slot).ok_or(PinError::NotFound)?.found(slot))
    }

    pub(super) fn hit(&mut self, key: &BlockKey, pin: bool) -> Result<(Found, Step), PinError> {
        let slot = self.locate(key).ok_or(PinError::NotFound)?;
        let word = self.at(slot).ok_or(PinError::NotFound)?.word;
        let (mut next, step) = self.after(word, RankEvent::LocalHit);
        if pin {
            next = next.pinned().ok_or(PinError::TooManyPins)?;
        }
        self.set(slot, next, Recency::Touch);
        let found = self.at(slot).ok_or(PinError::NotFound)?.found(slot);
        Ok((found, step))
    }

    pub(super) fn unpin(&mut self, id: ResidentId) -> Result<(), UnpinError> {
        let word = self.resolve(id).ok_or(UnpinError::Stale)?;
        let next = word.unpinned().ok_or(UnpinError::NotPinned)?;
        self.set(id.slot, next, Recency::Keep);
        Ok(())
    }

    pub(super) fn commit(
        &mut self,
        id: ResidentId,
        requester: RequesterIndex,
    ) -> Result<(Committed, Option<Step>), UnpinError> {
        let word = self.resolve(id).ok_or(UnpinError::Stale)?;
        let unpinned = word.unpinned().ok_or(UnpinError::NotPinned)?;
        let (served, step) = self.after(unpinned, RankEvent::Served);
        let entry = self.slots.get_mut(id.slot as usize);
        let entry = entry.ok_or(UnpinError::Stale)?;
        if let Some(rank) = entry.requesters.answer(requester) {
            self.set(id.slot, unpinned, Recency::Keep);
            return Ok((Committed { rank, first: false }, None));
        }
        entry.requesters.record(requester, step.from);
        self.set(id.slot, served, Recency::Keep);
        let rank = step.from;
        Ok((Committed { rank, first: true }, Some(step)))
    }

    pub(super) fn evict(&mut self) -> Option<Evicted> {
        let rank = self.policy.victim(self.lists.heads())?;
        let slot = self.lists.oldest(rank)?;
        let entry = self.slots.get_mut(slot as usize)?;
        entry.requesters = Requesters::default();
        let victim = Evicted { key: entry.key, id: entry.id(slot), payload: entry.payload, rank };
        let next = entry.word.vacated();
        self.index.remove(&victim.key, slot);
        self.set(slot, next, Recency::Keep);
        self.free.push(slot);
        Some(victim)
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab")
            .field("policy", &self.policy)
            .field("lists", &self.lists)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}
