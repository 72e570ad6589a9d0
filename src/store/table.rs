//! The operations: each one reads a slot's word, computes the next one, and exchanges it.
//!
//! Every exchange of a live word goes through [`Table::change`], which says when a resident takes the
//! newest place of a list. So the rules "pinned: in no list" and "last unpin: newest of its rank"
//! are written once.

use std::fmt;
use std::ops::Range;

use arrayvec::ArrayVec;

use super::claims::Claims;
use super::fault::{self, Fault};
use super::index::{Bucket, Index, Walk};
use super::log::{List, Logs};
use super::requesters::Overflow;
use super::resident::{Found, InsertError, Payload, PinError, StoreConfig, UnpinError};
use super::slots::{KeyWords, Slot, Slots};
use super::victims::Guard;
use super::word::{Flag, State, Word};
use crate::policy::{Origin, Policy, RankEvent};
use crate::sync::FreeStack;
use crate::types::{BlockKey, EvictionRank, Generation, PolicyKind, ResidentId};

/// A rank before and after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) from: EvictionRank,
    pub(super) to: EvictionRank,
}

/// What a change does with a resident that stays in the list it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Recency {
    /// It becomes the newest.
    Touch,
    /// It keeps its place.
    Keep,
}

/// A key on its way through an operation: in the slots' form, and with its chain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sought {
    words: KeyWords,
    bucket: Bucket,
}

/// Members of a batch that are prepared together.
const GROUP: usize = 16;

pub(super) struct Table {
    pub(super) policy: Policy,
    pub(super) slots: Slots,
    pub(super) free: FreeStack,
    pub(super) index: Index,
    pub(super) logs: Logs,
    pub(super) claims: Claims,
    pub(super) overflow: Overflow,
    pub(super) guard: Guard,
}

impl Table {
    /// `config` was checked by the caller.
    pub(super) fn new(config: StoreConfig) -> Self {
        Self {
            policy: config.policy,
            slots: Slots::new(config.capacity),
            free: FreeStack::full(),
            index: Index::new(config.capacity),
            logs: Logs::new(config.capacity, config.policy.kind == PolicyKind::Aged),
            claims: Claims::new(),
            overflow: Overflow::new(),
            guard: Guard::new(),
        }
    }

    pub(super) fn addresses(&self) -> [Range<*const u8>; 3] {
        let [lines, payloads] = self.slots.addresses();
        [lines, payloads, self.index.addresses()]
    }

    pub(super) fn at(&self, slot: u32) -> Option<Slot<'_>> {
        self.slots.get(slot)
    }

    pub(super) fn id(&self, slot: u32) -> ResidentId {
        ResidentId { slot, generation: Generation(Index::generation(&self.slots, slot)) }
    }

    pub(super) fn seek(&self, key: &BlockKey) -> Sought {
        Sought { words: KeyWords::of(key), bucket: self.index.bucket(key) }
    }

    /// What is in a slot; true where the word is `word` before and after.
    fn found(&self, slot: u32, word: Word) -> Option<Found> {
        let payload = self.slots.payload(slot)?;
        Some(Found { id: self.id(slot), payload, rank: word.rank() })
    }

    /// The slot of a key and its word, or the chain that lacks it.
    fn find(&self, key: &Sought) -> Walk<(u32, Word)> {
        self.index.walk(&self.slots, key.bucket, |slot, generation| {
            let entry = self.at(slot)?;
            if !entry.holds(&key.words) {
                return None;
            }
            loop {
                let word = self.settled(slot);
                match word.state() {
                    State::Arriving if word.generation() == Some(generation) => {
                        self.pay(self.arrive(slot, word));
                    }
                    // The key is read between two looks at one word, which no other tenancy has.
                    State::Live => {
                        let held = entry.holds(&key.words);
                        if entry.word() == word {
                            return held.then_some((slot, word));
                        }
                    }
                    _ => return None,
                }
            }
        })
    }

    pub(super) fn locate(&self, key: &Sought) -> Option<(u32, Word)> {
        match self.find(key) {
            Walk::Stopped(found) => Some(found),
            Walk::End(_) => None,
        }
    }

    /// The word of a slot, if a resident is there, and what `read` reads while it is this word.
    pub(super) fn confirmed<R>(&self, slot: u32, read: impl Fn() -> R) -> Option<(Word, R)> {
        let entry = self.at(slot)?;
        loop {
            let word = self.settled(slot);
            if word.state() != State::Live {
                return None;
            }
            let result = read();
            if entry.word() == word {
                return Some((word, result));
            }
        }
    }

    /// The word of the resident that `id` means, if that is still here.
    pub(super) fn resolve(&self, id: ResidentId) -> Option<Word> {
        let (word, generation) =
            self.confirmed(id.slot, || Index::generation(&self.slots, id.slot))?;
        let same = generation == id.generation.0 || fault::is(Fault::GenerationUnchecked);
        same.then_some(word)
    }

    /// Where a resident with this next word, after that one, belongs: in a list anew, or not.
    pub(super) fn placing(before: Word, next: Word, recency: Recency) -> Word {
        let moves = before.pins() > 0 || before.rank() != next.rank();
        if next.pins() == 0 && (moves || recency == Recency::Touch) {
            next.with_state(State::Placing)
        } else {
            next
        }
    }

    /// Exchanges a live word and brings the lists in step; whether it was still that word.
    fn change(&self, slot: u32, before: Word, next: Word, recency: Recency) -> bool {
        let stays = before.pins() == 0 && next.pins() == 0 && before.rank() == next.rank();
        let touch = stays && recency == Recency::Touch;
        let unpin = fault::is(Fault::UnpinUnannounced) && before.pins() > 0 && next.pins() == 0;
        if touch || unpin {
            return self.touch(slot, before, next);
        }
        let next = Self::placing(before, next, recency);
        if next == before {
            // What the caller has read of the resident counts only while this is its word.
            let unseen = fault::is(Fault::UnchangedUnseen);
            return unseen || self.at(slot).is_some_and(|entry| entry.word() == before);
        }
        let changed = self.at(slot).is_some_and(|entry| entry.replace(before, next));
        if changed && next.state() == State::Placing && !fault::is(Fault::PlacementLeft) {
            self.pay(self.place(slot, next));
        }
        changed
    }

    /// Exchanges the word of a resident that becomes the newest of the list that it is in. Nobody can
    /// tell where it was in that list before it does; so it is appended first, and needs no
    /// announcement. If the word has changed meanwhile, the entry is garbage.
    fn touch(&self, slot: u32, before: Word, next: Word) -> bool {
        let Some(entry) = self.at(slot) else {
            return false;
        };
        let list = List { kind: entry.kind(), rank: next.rank() };
        let (position, debt) = self.append(list, slot);
        let touched = entry.replace(before, next.placed_at(position));
        self.pay(debt);
        touched
    }

    /// The word after `event`, with the step that it made.
    pub(super) fn after(&self, word: Word, event: RankEvent) -> (Word, Step) {
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
        &self,
        key: &BlockKey,
        payload: Payload,
        origin: Origin,
        pinned: bool,
    ) -> Result<Found, InsertError> {
        let key = self.seek(key);
        if let Some(found) = self.lookup(&key) {
            return Err(InsertError::AlreadyResident(found));
        }
        let slot = self.free.pop(|slot| self.slots.free_link(slot)).ok_or(InsertError::Full)?;
        let entry = self.at(slot).ok_or(InsertError::Full)?;
        let generation = Index::renew(&self.slots, slot);
        let mut word = Word::arriving(generation, self.policy.initial(origin));
        if matches!(origin, Origin::Fetched { .. }) {
            word = word.with(Flag::Fetched);
        }
        if pinned {
            word = word.pinned().unwrap_or(word);
        }
        self.slots.fill(slot, &key.words, payload);
        entry.set(word);
        loop {
            match self.find(&key) {
                Walk::Stopped((other, word)) => {
                    // Read before the word is seen again, or it may be of another tenancy.
                    let found = self.found(other, word);
                    if self.at(other).is_none_or(|entry| entry.word() != word) {
                        continue;
                    }
                    self.vacate(slot, entry);
                    return found.map_or(Err(InsertError::Full), |found| {
                        Err(InsertError::AlreadyResident(found))
                    });
                }
                Walk::End(head) => {
                    if self.index.insert(&self.slots, head, (slot, generation)) {
                        break;
                    }
                }
            }
        }
        self.pay(self.arrive(slot, word));
        let id = ResidentId { slot, generation: Generation(generation) };
        Ok(Found { id, payload, rank: word.rank() })
    }

    /// Gives a slot of the caller's back, which is in no chain.
    pub(super) fn vacate(&self, slot: u32, entry: Slot<'_>) {
        entry.set(Word::FREE);
        if let Some(below) = self.slots.free_link(slot) {
            self.free.push(slot, below);
        }
    }

    /// Does something for each of `keys`, whose cache misses overlap within a group.
    pub(super) fn each<'k>(
        &self,
        mut keys: impl ExactSizeIterator<Item = &'k BlockKey>,
        mut each: impl FnMut(&Sought),
    ) {
        if keys.len() == 1 {
            return keys.for_each(|key| each(&self.seek(key)));
        }
        let mut group: ArrayVec<Sought, GROUP> = ArrayVec::new();
        while keys.len() > 0 {
            group.clear();
            keys.by_ref().take(GROUP).for_each(|key| group.push(self.seek(key)));
            let first = |key: &Sought| self.index.first(key.bucket);
            let slots: ArrayVec<u32, GROUP> = group.iter().filter_map(first).collect();
            for slot in slots {
                self.slots.warm(slot);
                self.slots.warm_payload(slot);
            }
            group.iter().for_each(&mut each);
        }
    }

    /// Does something for each of `ids`. `warm` reads what that needs, so that the cache misses of a
    /// group overlap.
    pub(super) fn each_id<'k>(
        mut ids: impl ExactSizeIterator<Item = &'k ResidentId>,
        warm: impl Fn(u32),
        mut each: impl FnMut(ResidentId),
    ) {
        if ids.len() == 1 {
            return ids.for_each(|id| each(*id));
        }
        while ids.len() > 0 {
            let group: ArrayVec<ResidentId, GROUP> = ids.by_ref().take(GROUP).copied().collect();
            group.iter().for_each(|id| warm(id.slot));
            group.iter().for_each(|id| each(*id));
        }
    }

    pub(super) fn lookup(&self, key: &Sought) -> Option<Found> {
        loop {
            let (slot, word) = self.locate(key)?;
            let found = self.found(slot, word);
            if self.at(slot)?.word() == word {
                return found;
            }
        }
    }

    pub(super) fn pin(&self, key: &Sought) -> Result<Found, PinError> {
        loop {
            let (slot, word) = self.locate(key).ok_or(PinError::NotFound)?;
            let next = word.pinned().ok_or(PinError::TooManyPins)?;
            let found = self.found(slot, next).ok_or(PinError::NotFound)?;
            if self.change(slot, word, next, Recency::Keep) {
                return Ok(found);
            }
        }
    }

    pub(super) fn hit(&self, key: &Sought, pin: bool) -> Result<(Found, Step), PinError> {
        loop {
            let (slot, word) = self.locate(key).ok_or(PinError::NotFound)?;
            let (mut next, step) = self.after(word, RankEvent::LocalHit);
            if pin {
                next = next.pinned().ok_or(PinError::TooManyPins)?;
            }
            let found = self.found(slot, next).ok_or(PinError::NotFound)?;
            if self.change(slot, word, next, Recency::Touch) {
                return Ok((found, step));
            }
        }
    }

    pub(super) fn unpin(&self, id: ResidentId) -> Result<(), UnpinError> {
        loop {
            let word = self.resolve(id).ok_or(UnpinError::Stale)?;
            let next = word.unpinned().ok_or(UnpinError::NotPinned)?;
            if self.change(id.slot, word, next, Recency::Keep) {
                return Ok(());
            }
        }
    }

    /// A block that was about to be stored was found here, and one replica fewer exists than its
    /// rank expected.
    pub(super) fn recover(&self, key: &Sought) -> Option<(Found, Step)> {
        loop {
            let (slot, word) = self.locate(key)?;
            let (next, step) = self.after(word, RankEvent::AlreadyResident);
            let found = self.found(slot, next)?;
            if self.change(slot, word, next, Recency::Touch) {
                return Some((found, step));
            }
        }
    }

    /// Some(None) where it was counted before.
    pub(super) fn finished_sending(&self, key: &Sought) -> Option<Option<Step>> {
        loop {
            let (slot, word) = self.locate(key)?;
            if word.has(Flag::Finished) {
                return Some(None);
            }
            let (next, step) = self.after(word, RankEvent::FinishedSending);
            if self.change(slot, word, next.with(Flag::Finished), Recency::Keep) {
                return Some(Some(step));
            }
        }
    }

    /// Some(None) where the hint does not apply.
    pub(super) fn owner_hint(&self, key: &Sought, owners: u32) -> Option<Option<Step>> {
        loop {
            let (slot, word) = self.locate(key)?;
            let (fetched, marked) = (word.has(Flag::Fetched), word.has(Flag::Marked));
            if !self.policy.hint_applies(fetched, marked) {
                return Some(None);
            }
            let (next, step) = self.after(word, RankEvent::OwnerHint { owners });
            if self.change(slot, word, next, Recency::Keep) {
                return Some(Some(step));
            }
        }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("policy", &self.policy).finish_non_exhaustive()
    }
}
