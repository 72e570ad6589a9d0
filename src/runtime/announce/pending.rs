//! The changes that the registry has not answered yet: at most one per key, the latest state.
//!
//! Tickets number the calls of [`Pending::note`]. [`Pending::answered`] is the ticket up to which all
//! was answered, which is what a flush waits for.
//!
//! Over its bound the set forgets everything and is **dirty**: the node then registers afresh, which
//! voids what it had announced, and announces all of its residents. Nothing is dropped silently, and
//! a registry that is down for an hour costs a bounded amount of memory.

use std::collections::VecDeque;

use foldhash::fast::RandomState;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::types::BlockKey;

/// The latest state of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) key: BlockKey,
    /// Whether the node holds the block (else it no longer does).
    pub(super) resident: bool,
    ticket: u64,
}

impl Change {
    /// The order in which changes were noted.
    pub(super) const fn ticket(&self) -> u64 {
        self.ticket
    }
}

#[derive(Debug)]
pub(super) struct Pending {
    states: HashMap<BlockKey, (bool, u64), RandomState>,
    /// The keys of `states`, each once, in the order in which they get their turn.
    order: VecDeque<BlockKey>,
    max: usize,
    issued: u64,
    /// The first ticket of the batch in flight.
    in_flight: Option<u64>,
    dirty: bool,
    /// What was answered when the set became dirty; holds until all residents are announced.
    floor: Option<u64>,
    /// The ticket up to which somebody waits.
    wanted: u64,
}

impl Pending {
    pub(super) fn new(max: usize) -> Self {
        Self {
            states: HashMap::default(),
            order: VecDeque::new(),
            max,
            issued: 0,
            in_flight: None,
            dirty: false,
            floor: None,
            wanted: 0,
        }
    }

    /// Takes note of a key's state now.
    pub(super) fn note(&mut self, key: BlockKey, resident: bool) {
        self.issued += 1;
        if self.dirty {
            return;
        }
        let len = self.states.len();
        match self.states.entry(key) {
            Entry::Occupied(mut entry) => entry.get_mut().0 = resident,
            Entry::Vacant(entry) if len < self.max => {
                entry.insert((resident, self.issued));
                self.order.push_back(key);
            }
            Entry::Vacant(_) => {
                // Of the tickets before this one.
                self.issued -= 1;
                self.floor = Some(self.answered());
                self.issued += 1;
                self.dirty = true;
                self.states = HashMap::default();
                self.order = VecDeque::new();
            }
        }
    }

    /// The next changes, at most `max`, oldest first. They are in flight until [`Self::settle`].
    pub(super) fn take(&mut self, max: usize) -> Vec<Change> {
        let mut batch = Vec::with_capacity(max.min(self.order.len()));
        while batch.len() < max {
            let Some(key) = self.order.pop_front() else {
                break;
            };
            if let Some((resident, ticket)) = self.states.remove(&key) {
                batch.push(Change { key, resident, ticket });
            }
        }
        self.in_flight = batch.first().map(|change| change.ticket);
        batch
    }

    /// Ends the flight: what is `unanswered` goes back to the front, unless the key changed again.
    pub(super) fn settle(&mut self, unanswered: &[Change]) {
        self.in_flight = None;
        if self.dirty {
            return;
        }
        for change in unanswered.iter().rev() {
            if let Entry::Vacant(entry) = self.states.entry(change.key) {
                entry.insert((change.resident, change.ticket));
                self.order.push_front(change.key);
            }
        }
    }

    /// The ticket up to which everything was answered.
    pub(super) fn answered(&self) -> u64 {
        let first = self.order.front().and_then(|key| self.states.get(key));
        let outstanding = [self.in_flight, first.map(|(_, ticket)| *ticket)];
        let first = outstanding.into_iter().flatten().min();
        let answered = first.map_or(self.issued, |ticket| ticket - 1);
        self.floor.map_or(answered, |floor| floor.min(answered))
    }

    /// Asks for haste up to the last ticket; returns it.
    pub(super) fn hurry(&mut self) -> u64 {
        self.wanted = self.issued;
        self.issued
    }

    /// Whether somebody waits for what is queued.
    pub(super) fn in_a_hurry(&self) -> bool {
        self.answered() < self.wanted
    }

    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether changes were forgotten, so that the node must register afresh.
    pub(super) const fn is_dirty(&self) -> bool {
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
        let batch = pending.take(1);
        assert_eq!((batch[0].key, batch[0].resident), (key(1), false));
        pending.settle(&[]);
        assert_eq!(pending.answered(), 1);
        assert_eq!(pending.take(9).len(), 1);
        assert_eq!(pending.answered(), 1, "in flight is not answered");
        pending.settle(&[]);
        assert_eq!(pending.answered(), 3);
    }

    #[test]
    fn a_failed_batch_returns_unless_its_key_changed() {
        let mut pending = Pending::new(8);
        pending.note(key(1), true);
        pending.note(key(2), true);
        let batch = pending.take(9);
        pending.note(key(2), false);
        pending.settle(&batch);
        let states: Vec<_> = pending.take(9).iter().map(|c| (c.key, c.resident)).collect();
        assert_eq!(states, [(key(1), true), (key(2), false)]);
    }

    #[test]
    fn over_its_bound_it_forgets_and_answers_nothing_until_the_resync_ends() {
        let mut pending = Pending::new(2);
        pending.note(key(1), true);
        let batch = pending.take(1);
        pending.settle(&[]);
        assert_eq!((batch.len(), pending.answered()), (1, 1));
        for number in 2..6 {
            pending.note(key(number), true);
        }
        assert!(pending.is_dirty());
        assert_eq!((pending.len(), pending.answered()), (0, 1));
        pending.begin_resync();
        pending.note(key(7), false);
        pending.take(9);
        pending.settle(&[]);
        assert_eq!(pending.answered(), 1);
        pending.end_resync();
        assert_eq!(pending.answered(), 6);
    }

    proptest! {
        /// Whatever fails and whatever changes meanwhile, each key ends in its latest state.
        #[test]
        fn every_key_ends_in_its_latest_state(
            steps in prop::collection::vec((0u8..6, any::<bool>(), 0u8..4), 1..80)
        ) {
            let mut pending = Pending::new(64);
            let mut truth = HashMap::<_, _, RandomState>::default();
            let mut told = HashMap::<_, _, RandomState>::default();
            let mut flight: Option<Vec<Change>> = None;
            for (number, resident, action) in steps {
                match (action, flight.take()) {
                    (0, None) => flight = Some(pending.take(3)),
                    (1, Some(batch)) => pending.settle(&batch),
                    (2, Some(batch)) => {
                        for change in &batch {
                            told.insert(change.key, change.resident);
                        }
                        pending.settle(&[]);
                    }
                    (_, other) => {
                        flight = other;
                        truth.insert(key(number), resident);
                        pending.note(key(number), resident);
                    }
                }
            }
            if let Some(batch) = flight {
                pending.settle(&batch);
            }
            loop {
                let batch = pending.take(3);
                if batch.is_empty() {
                    break;
                }
                for change in &batch {
                    told.insert(change.key, change.resident);
                }
                pending.settle(&[]);
            }
            prop_assert_eq!(told, truth);
            prop_assert_eq!(pending.answered(), pending.issued);
        }
    }
}
