//! A store as its tests drive it: operations of the oracle go in, answers of the oracle come out.
//! Ids are checked on the way, and the events are added up.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::oracle::{Answer, Operation, Oracle, key, payload};
use super::{
    Committed, Evicted, Found, InsertError, PinError, RemoveError, Store, StoreConfig, UnpinError,
};
use crate::event::{Event, EventSink};
use crate::types::{BlockKey, EvictionRank, Generation, ResidentId};

/// What the events say that the sum of all residents' ranks must be.
#[derive(Debug, Default)]
pub(super) struct RankSum(AtomicI64);

impl EventSink for RankSum {
    fn emit(&self, event: Event) {
        let of = |rank: EvictionRank| i64::from(rank.get());
        let change = match event {
            Event::Inserted { rank, .. } => of(rank),
            Event::RankMoved { from, to } => of(to) - of(from),
            Event::Evicted { rank, .. } | Event::Removed { rank, .. } => -of(rank),
            _ => 0,
        };
        self.0.fetch_add(change, Ordering::Relaxed);
    }
}

impl RankSum {
    pub(super) fn assert_explains(&self, store: &Store) {
        let stats = store.stats();
        let ranks = (0_i64..).zip(stats.by_rank);
        let sum: i64 = ranks.map(|(rank, count)| rank * i64::from(count)).sum();
        assert_eq!(self.0.load(Ordering::Relaxed), sum);
    }
}

/// A store, the serial numbers of its admissions, and the ids that it gave them.
pub(super) struct Subject {
    pub(super) store: Arc<Store>,
    pub(super) sum: Arc<RankSum>,
    ids: BTreeMap<u64, ResidentId>,
}

impl Subject {
    pub(super) fn new(config: StoreConfig) -> Self {
        let sum = Arc::new(RankSum::default());
        let store = Arc::new(Store::new(config, sum.clone()).unwrap());
        Self { store, sum, ids: BTreeMap::new() }
    }

    /// The same store for another thread, which starts with the ids that this one has met.
    pub(super) fn share(&self) -> Self {
        Self { store: self.store.clone(), sum: self.sum.clone(), ids: self.ids.clone() }
    }

    /// The admissions whose ids were met.
    pub(super) fn met(&self) -> impl Iterator<Item = u64> + '_ {
        self.ids.keys().copied()
    }

    /// Meets what another thread met.
    pub(super) fn meet_all(&mut self, other: &Self) {
        for (serial, id) in &other.ids {
            self.meet(*serial, *id);
        }
    }

    /// An id belongs to one admission and an admission to one id, for ever.
    fn meet(&mut self, serial: u64, id: ResidentId) -> u64 {
        let known = *self.ids.entry(serial).or_insert(id);
        assert_eq!(known, id, "the id of admission {serial} changed");
        let others = self.ids.iter().filter(|(_, other)| **other == id);
        assert_eq!(others.count(), 1, "{id:?} names two admissions");
        serial
    }

    fn found(&mut self, found: Found) -> (u64, EvictionRank) {
        let serial = self.meet(found.payload.checksum, found.id);
        assert_eq!(found.payload, payload(serial));
        (serial, found.rank)
    }

    fn pinned(&mut self, result: Result<Found, PinError>) -> Answer {
        match result {
            Ok(found) => {
                let (serial, rank) = self.found(found);
                Answer::Found { serial, rank }
            }
            Err(PinError::NotFound) => Answer::NotFound,
            Err(PinError::TooManyPins) => Answer::TooManyPins,
        }
    }

    fn evicted(&mut self, evicted: Evicted) -> Answer {
        let serial = self.meet(evicted.payload.checksum, evicted.id);
        assert_eq!(evicted.payload, payload(serial));
        let key = *evicted.key.hash.as_bytes().first().unwrap();
        let rank = evicted.rank;
        Answer::Evicted { key, serial, rank }
    }

    fn id(&self, serial: u64) -> ResidentId {
        self.ids.get(&serial).copied().unwrap_or(ResidentId { slot: 0, generation: Generation(0) })
    }

    fn batch(&mut self, keys: &[u8], ask: impl Fn(&Store, &[BlockKey], &mut Batch)) -> Vec<Answer> {
        let keys: Vec<BlockKey> = keys.iter().map(|number| key(*number)).collect();
        // What a caller left in the buffer must not matter.
        let mut out = vec![Err(PinError::TooManyPins)];
        ask(&self.store, &keys, &mut out);
        out.into_iter().map(|result| self.pinned(result)).collect()
    }

    pub(super) fn apply(&mut self, operation: &Operation) -> Vec<Answer> {
        let one = match operation {
            Operation::Insert { key: number, serial, origin, pinned } => {
                let payload = payload(*serial);
                match self.store.insert(key(*number), payload, *origin, *pinned) {
                    Err(InsertError::AlreadyResident(found)) => {
                        let (serial, rank) = self.found(found);
                        Answer::AlreadyResident { serial, rank }
                    }
                    Err(InsertError::Full) => Answer::Full,
                    Ok(found) => self.pinned(Ok(found)),
                }
            }
            Operation::Lookup { key: number } => self.lookup(*number),
            Operation::Pin { key: number } => self.pinned(self.store.pin(&key(*number))),
            Operation::PinBatch { keys } => return self.batch(keys, Store::pin_batch),
            Operation::HitBatch { keys, pin } => {
                return self.batch(keys, |store, keys, out| store.hit_batch(keys, *pin, out));
            }
            Operation::Unpin { serial } => match self.store.unpin(self.id(*serial)) {
                Ok(()) => Answer::Unpinned,
                Err(error) => refused(error),
            },
            Operation::UnpinBatch { serials } => {
                let ids: Vec<ResidentId> = serials.iter().map(|serial| self.id(*serial)).collect();
                Answer::Refused(self.store.unpin_batch(&ids))
            }
            Operation::Commit { serial, requester } => {
                committed(self.store.commit(self.id(*serial), *requester))
            }
            Operation::CommitBatch { serials, requester } => {
                let ids: Vec<ResidentId> = serials.iter().map(|serial| self.id(*serial)).collect();
                let mut out = vec![Err(UnpinError::Stale)];
                self.store.commit_batch(&ids, *requester, &mut out);
                return out.into_iter().map(committed).collect();
            }
            Operation::AlreadyResident { key: number, cause } => {
                let found = self.store.already_resident(&key(*number), *cause);
                self.pinned(found.ok_or(PinError::NotFound))
            }
            Operation::FinishedSending { key: number } => {
                said(self.store.finished_sending(&key(*number)))
            }
            Operation::OwnerHint { key: number, owners } => {
                said(self.store.owner_hint(&key(*number), *owners))
            }
            Operation::Remove { serial } => match self.store.remove(self.id(*serial)) {
                Ok(removed) => self.evicted(removed),
                Err(RemoveError::Pinned) => Answer::Pinned,
                Err(RemoveError::Gone) => Answer::Stale,
            },
            Operation::Evict(kind) => {
                let victim = self.store.evict(*kind);
                return victim.map(|victim| self.evicted(victim)).into_iter().collect();
            }
            Operation::EvictBatch { kind, max } => {
                let mut out = Vec::new();
                assert_eq!(self.store.evict_batch(*kind, *max, &mut out), out.len());
                return out.into_iter().map(|victim| self.evicted(victim)).collect();
            }
        };
        vec![one]
    }

    fn lookup(&mut self, number: u8) -> Answer {
        let found = self.store.lookup(&key(number));
        self.pinned(found.ok_or(PinError::NotFound))
    }

    /// The list of residents, walked in steps of two slots, is what the oracle holds.
    pub(super) fn assert_lists(&self, oracle: &Oracle) {
        let (mut views, mut cursor) = (Vec::new(), Some(0));
        while let Some(at) = cursor {
            cursor = self.store.list(at, 2, &mut views);
        }
        assert_eq!(views.len(), oracle.residents().len());
        for view in views {
            let expected = &oracle.residents()[view.key.hash.as_bytes().first().unwrap()];
            assert_eq!(view.payload, payload(expected.serial));
            assert_eq!(view.id, self.id(expected.serial));
            let served = u32::try_from(expected.served.len()).unwrap();
            assert_eq!(
                (view.rank, view.pins, view.requesters),
                (expected.rank, expected.pins, served)
            );
        }
    }
}

type Batch = Vec<Result<Found, PinError>>;

fn refused(error: UnpinError) -> Answer {
    match error {
        UnpinError::Stale => Answer::Stale,
        UnpinError::NotPinned => Answer::NotPinned,
    }
}

fn committed(result: Result<Committed, UnpinError>) -> Answer {
    match result {
        Ok(Committed { rank, first }) => Answer::Committed { rank, first },
        Err(error) => refused(error),
    }
}

fn said(answer: Option<bool>) -> Answer {
    answer.map_or(Answer::NotFound, Answer::Said)
}
