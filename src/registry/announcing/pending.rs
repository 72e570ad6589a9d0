//! The changes that the registry has not answered yet: at most one per key, the latest state.
//!
//! Tickets number the calls of [`Pending::note`]. [`Pending::answered`] is the ticket up to which all
//! was answered, which is what a flush waits for.
//!
//! A key that is under way in a batch stays here, marked with the batch, until the batch is settled: a
//! change that comes meanwhile waits for that, so that no two batches under way share a key.
//!
//! Over its bound the set forgets everything and is **dirty**: the node then registers afresh, which
//! voids what it had announced, and announces all of its residents. Nothing is dropped silently, and
//! a registry that is down for an hour costs a bounded amount of memory.

use std::collections::VecDeque;

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry as MapEntry;

use crate::registry::Fingerprint;
use crate::registry::fault::{self, Fault};
use crate::types::BlockKey;

use super::partitions::PartitionSet;

/// The latest state of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) key: BlockKey,
    /// Whether the node holds the block (else it no longer does).
    pub(super) resident: bool,
    ticket: u64,
}

#[derive(Debug)]
struct Entry {
    resident: bool,
    ticket: u64,
    /// The batch that the key is in.
    flying: Option<u64>,
    /// Whether the state here is to be sent, behind that batch.
    queued: bool,
}

/// The set. It belongs to the one who tells the registry.
#[derive(Debug)]
pub struct Pending {
    entries: HashMap<BlockKey, Entry, RandomState>,
    /// The keys whose entries are queued, each once, by their tickets.
    order: VecDeque<BlockKey>,
    max: usize,
    issued: u64,
    /// The batches under way, each with its first ticket.
    flying: Vec<(u64, u64)>,
    dirty: bool,
    /// What was answered when the set became dirty; holds until all residents are announced.
    floor: Option<u64>,
    /// The ticket up to which somebody waits.
    wanted: u64,
}

impl Pending {
    /// An empty set of at most `max` changes that wait.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self {
            entries: HashMap::default(),
            order: VecDeque::new(),
            max,
            issued: 0,
            flying: Vec::new(),
            dirty: false,
            floor: None,
            wanted: 0,
        }
    }

    /// Takes note of a key's state now.
    pub fn note(&mut self, key: BlockKey, resident: bool) {
        self.issued += 1;
        if self.dirty {
            return;
        }
        let ticket = self.issued;
        let room = self.order.len() < self.max;
        match self.entries.entry(key) {
            MapEntry::Occupied(mut entry) if entry.get().queued => {
                entry.get_mut().resident = resident;
            }
            MapEntry::Occupied(mut entry) if room => {
                let entry = entry.get_mut();
                (entry.resident, entry.ticket, entry.queued) = (resident, ticket, true);
                self.order.push_back(key);
            }
            MapEntry::Vacant(entry) if room => {
                entry.insert(Entry { resident, ticket, flying: None, queued: true });
                self.order.push_back(key);
            }
            MapEntry::Occupied(_) | MapEntry::Vacant(_) => self.forget(),
        }
    }

    /// A change came that nobody could note.
    pub fn note_lost(&mut self) {
        self.issued += 1;
        if !self.dirty {
            self.forget();
        }
    }

    fn forget(&mut self) {
        // Of the tickets before the one that did not fit.
        self.issued -= 1;
        self.floor = Some(self.answered());
        self.issued += 1;
        self.dirty = !fault::is(Fault::OverflowUnmarked);
        self.entries = HashMap::default();
        self.order = VecDeque::new();
    }

    /// The next changes, at most `max`, oldest first: those to announce as batch `sequence`, those to
    /// withdraw as the batch behind it, or, where there is nothing to announce, as this one.
    pub(super) fn take(&mut self, sequence: u64, max: usize) -> (Vec<Change>, Vec<Change>) {
        let (mut announce, mut withdraw) = (Vec::new(), Vec::new());
        let mut behind = Vec::new();
        while announce.len() + withdraw.len() < max {
            let Some(key) = self.order.pop_front() else {
                break;
            };
            let Some(entry) = self.entries.get_mut(&key) else {
                continue;
            };
            if entry.flying.is_some() && !fault::is(Fault::KeyInTwoBatches) {
                behind.push(key);
                continue;
            }
            entry.queued = false;
            let change = Change { key, resident: entry.resident, ticket: entry.ticket };
            if entry.resident { &mut announce } else { &mut withdraw }.push(change);
        }
        behind.into_iter().rev().for_each(|key| self.order.push_front(key));
        self.fly(sequence, &announce);
        self.fly(if announce.is_empty() { sequence } else { sequence + 1 }, &withdraw);
        (announce, withdraw)
    }

    /// Makes residents as they were listed just now into a batch, but for those of which a change
    /// waits or is under way: that one knows better.
    pub(super) fn claim(&mut self, sequence: u64, listed: Vec<BlockKey>) -> Vec<Change> {
        let ticket = self.issued;
        let mut batch = Vec::with_capacity(listed.len());
        for key in listed {
            if fault::is(Fault::ListingKnowsBetter) {
                self.entries.remove(&key);
            }
            if let MapEntry::Vacant(entry) = self.entries.entry(key) {
                let flying = Some(sequence);
                entry.insert(Entry { resident: true, ticket, flying, queued: false });
                batch.push(Change { key, resident: true, ticket });
            }
        }
        self.fly(sequence, &batch);
        batch
    }

    fn fly(&mut self, sequence: u64, batch: &[Change]) {
        for change in batch {
            if let Some(entry) = self.entries.get_mut(&change.key) {
                entry.flying = Some(sequence);
            }
        }
        if let Some(first) = batch.iter().map(|change| change.ticket).min() {
            self.flying.push((sequence, first));
        }
    }

    /// Batch `sequence` is settled, and the registry knows it.
    pub(super) fn told(&mut self, sequence: u64, batch: &[Change]) {
        self.flying.retain(|(flying, _)| *flying != sequence);
        for change in batch {
            if let MapEntry::Occupied(mut entry) = self.entries.entry(change.key)
                && entry.get().flying == Some(sequence)
            {
                entry.get_mut().flying = None;
                if !entry.get().queued {
                    entry.remove();
                }
            }
        }
    }

    /// Batch `sequence` is settled, and the registry may not know it: what did not change since waits
    /// again, in its old place. Call [`Self::sort`] behind the last of several.
    pub(super) fn untold(&mut self, sequence: u64, batch: &[Change]) {
        self.flying.retain(|(flying, _)| *flying != sequence);
        for change in batch {
            let entry = self.entries.get_mut(&change.key);
            if let Some(entry) = entry.filter(|entry| entry.flying == Some(sequence)) {
                entry.flying = None;
                entry.ticket = change.ticket;
                if !entry.queued {
                    entry.queued = true;
                    self.order.push_front(change.key);
                }
            }
        }
    }

    /// Puts the queue into the order of its tickets again.
    pub(super) fn sort(&mut self) {
        let entries = &self.entries;
        let ticket = |key: &BlockKey| entries.get(key).map(|entry| entry.ticket);
        self.order.make_contiguous().sort_by_key(ticket);
    }

    /// The ticket up to which everything was answered.
    #[must_use]
    pub fn answered(&self) -> u64 {
        let first = self.order.front().and_then(|key| self.entries.get(key));
        let first = first.map(|entry| entry.ticket);
        let outstanding = self.flying.iter().map(|(_, ticket)| *ticket).chain(first).min();
        let answered = outstanding.map_or(self.issued, |ticket| ticket.saturating_sub(1));
        self.floor.map_or(answered, |floor| floor.min(answered))
    }

    /// Asks for haste up to the last ticket; returns it.
    pub fn hurry(&mut self) -> u64 {
        self.wanted = self.issued;
        self.issued
    }

    /// Whether somebody waits for what is queued.
    pub(super) fn in_a_hurry(&self) -> bool {
        self.answered() < self.wanted
    }

    /// Changes that wait for their turn.
    #[must_use]
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether no change waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The partitions of which something waits or is under way; `None` where there are more than
    /// `max` such keys.
    pub(super) fn partitions(&self, max: usize) -> Option<PartitionSet> {
        let keys = self.entries.keys();
        (self.entries.len() <= max)
            .then(|| keys.map(|key| Fingerprint::of(key).partition()).collect())
    }

    /// Whether changes were forgotten, so that the node must register afresh.
    #[must_use]
    pub const fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// All residents will be announced from here on: changes count again.
    pub(super) const fn begin_resync(&mut self) {
        self.dirty = false;
    }

    /// All residents have been announced.
    pub(super) const fn end_resync(&mut self) {
        if !self.dirty {
            self.floor = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::{BlockHash, NamespaceId};

    fn key(number: u8) -> BlockKey {
        BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&[number]).unwrap() }
    }

    #[test]
    fn the_latest_state_wins_and_keeps_its_turn() {
        let mut pending = Pending::new(8);
        pending.note(key(1), true);
        pending.note(key(2), true);
        pending.note(key(1), false);
        assert_eq!(pending.answered(), 0);
        let batch = take(&mut pending, 1, 1);
        assert_eq!((batch[0].key, batch[0].resident), (key(1), false));
        pending.told(1, &batch);
        assert_eq!(pending.answered(), 1);
        let batch = take(&mut pending, 2, 9);
        assert_eq!(batch.len(), 1);
        assert_eq!(pending.answered(), 1, "under way is not answered");
        pending.told(2, &batch);
        assert_eq!(pending.answered(), 3);
    }

    /// As the set's own, all in one batch.
    fn take(pending: &mut Pending, sequence: u64, max: usize) -> Vec<Change> {
        let (mut announce, mut withdraw) = pending.take(sequence, max);
        for change in &withdraw {
            pending.entries.get_mut(&change.key).unwrap().flying = Some(sequence);
        }
        for (flying, _) in &mut pending.flying {
            *flying = (*flying).min(sequence);
        }
        announce.append(&mut withdraw);
        announce.sort_by_key(|change| change.ticket);
        announce
    }

    fn states(batch: &[Change]) -> Vec<(BlockKey, bool)> {
        batch.iter().map(|change| (change.key, change.resident)).collect()
    }

    #[test]
    fn a_change_of_a_key_under_way_waits_for_it() {
        let mut pending = Pending::new(8);
        pending.note(key(1), true);
        let first = take(&mut pending, 1, 9);
        pending.note(key(1), false);
        pending.note(key(2), true);
        let second = take(&mut pending, 2, 9);
        assert_eq!(states(&second), [(key(2), true)]);
        assert_eq!(pending.claim(3, vec![key(1), key(2), key(3)]).len(), 1, "others know better");
        pending.told(2, &second);
        assert_eq!((pending.answered(), take(&mut pending, 4, 9).len()), (0, 0));
        pending.told(1, &first);
        assert_eq!(states(&take(&mut pending, 5, 9)), [(key(1), false)]);
    }

    #[test]
    fn failed_batches_return_in_their_order_unless_a_key_changed() {
        let mut pending = Pending::new(8);
        for number in 1..=4 {
            pending.note(key(number), true);
        }
        let (first, second) = (take(&mut pending, 1, 2), take(&mut pending, 2, 2));
        pending.note(key(2), false);
        pending.note(key(5), true);
        pending.untold(2, &second);
        pending.untold(1, &first);
        pending.sort();
        assert_eq!(pending.answered(), 0);
        let batch = take(&mut pending, 3, 9);
        let want = [(1, true), (2, false), (3, true), (4, true), (5, true)];
        assert_eq!(states(&batch), want.map(|(number, resident)| (key(number), resident)));
    }

    #[test]
    fn over_its_bound_it_forgets_and_answers_nothing_until_the_resync_ends() {
        let mut pending = Pending::new(2);
        pending.note(key(1), true);
        let batch = take(&mut pending, 1, 1);
        pending.told(1, &batch);
        assert_eq!((batch.len(), pending.answered()), (1, 1));
        pending.note(key(8), true);
        let forgotten = take(&mut pending, 2, 1);
        for number in 2..6 {
            pending.note(key(number), true);
        }
        assert!(pending.is_dirty());
        assert_eq!((pending.len(), pending.answered()), (0, 1));
        pending.begin_resync();
        pending.untold(2, &forgotten);
        assert_eq!(pending.len(), 0, "what was forgotten does not return");
        pending.note(key(7), false);
        let batch = take(&mut pending, 3, 9);
        pending.told(3, &batch);
        assert_eq!(pending.answered(), 1);
        pending.end_resync();
        assert_eq!(pending.answered(), 7);
    }

    proptest! {
        /// Whatever fails, in whatever order batches are settled, and whatever changes meanwhile: no
        /// two batches under way share a key, and each key ends in its latest state.
        #[test]
        fn every_key_ends_in_its_latest_state(
            steps in prop::collection::vec((0u8..6, any::<bool>(), 0u8..5), 1..80)
        ) {
            let mut pending = Pending::new(64);
            let mut truth = HashMap::<_, _, RandomState>::default();
            let mut told = HashMap::<_, _, RandomState>::default();
            let mut flights: Vec<(u64, Vec<Change>)> = Vec::new();
            let mut sequence = 0;
            let mut drain = vec![(0, true, 5); 40];
            drain.splice(0..0, steps);
            for (number, resident, action) in drain {
                match action {
                    0 | 5 if flights.len() < 3 => {
                        sequence += 1;
                        let batch = take(&mut pending, sequence, 3);
                        for change in &batch {
                            let shared = |other: &Change| other.key == change.key;
                            prop_assert!(!flights.iter().any(|(_, it)| it.iter().any(shared)));
                        }
                        flights.push((sequence, batch));
                    }
                    1 if !flights.is_empty() => {
                        let (sequence, batch) = flights.remove(usize::from(number) % flights.len());
                        pending.untold(sequence, &batch);
                        pending.sort();
                    }
                    0 | 2 | 5 if !flights.is_empty() => {
                        let (sequence, batch) = flights.remove(usize::from(number) % flights.len());
                        told.extend(batch.iter().map(|change| (change.key, change.resident)));
                        pending.told(sequence, &batch);
                    }
                    5 => {}
                    _ => {
                        truth.insert(key(number), resident);
                        pending.note(key(number), resident);
                    }
                }
            }
            for (sequence, batch) in flights {
                told.extend(batch.iter().map(|change| (change.key, change.resident)));
                pending.told(sequence, &batch);
            }
            prop_assert!(pending.entries.is_empty());
            prop_assert_eq!(told, truth);
            prop_assert_eq!(pending.answered(), pending.issued);
        }
    }
}
