//! The store against its oracle: random operations on tiny stores, every answer compared, the
//! structure checked after each, and the whole eviction order at the end.
//!
//! `PROPTEST_CASES` raises the number of sequences; a failure prints its seed and the shrunk
//! sequence, and `PROPTEST_RNG_SEED` runs the same ones again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::oracle::{Answer, Operation, Oracle, key, payload};
use super::{Committed, Evicted, Found, InsertError, PinError, Store, StoreConfig, UnpinError};
use crate::event::{Event, EventSink};
use crate::policy::{Origin, Policy};
use crate::sync::lock;
use crate::types::{
    BlockKey, EvictionRank, Generation, PolicyKind, RequesterIndex, ResidentCause, ResidentId,
};

/// Sequences per policy: five policies make more than 10,000.
const SEQUENCES: u32 = 2_200;
const KEYS: u8 = 8;

/// What the events say that the sum of all residents' ranks must be.
#[derive(Debug, Default)]
pub(super) struct RankSum(AtomicI64);

impl EventSink for RankSum {
    fn emit(&self, event: Event) {
        let of = |rank: EvictionRank| i64::from(rank.get());
        let change = match event {
            Event::Inserted { rank, .. } => of(rank),
            Event::RankMoved { from, to } => of(to) - of(from),
            Event::Evicted { rank, .. } => -of(rank),
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
struct Subject {
    store: Store,
    sum: Arc<RankSum>,
    ids: BTreeMap<u64, ResidentId>,
}

impl Subject {
    fn new(config: StoreConfig) -> Self {
        let sum = Arc::new(RankSum::default());
        Self { store: Store::new(config, sum.clone()).unwrap(), sum, ids: BTreeMap::new() }
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

    fn apply(&mut self, operation: &Operation) -> Vec<Answer> {
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
            Operation::Evict => {
                let victim = self.store.evict();
                return victim.map(|victim| self.evicted(victim)).into_iter().collect();
            }
            Operation::EvictBatch { max } => {
                let mut out = Vec::new();
                assert_eq!(self.store.evict_batch(*max, &mut out), out.len());
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
    fn assert_lists(&self, oracle: &Oracle) {
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

fn any_rank() -> impl Strategy<Value = EvictionRank> {
    prop_oneof![4 => 1_u32..5, 1 => 28_u32..32].prop_map(EvictionRank::clamped)
}

fn any_origin() -> impl Strategy<Value = Origin> {
    prop_oneof![
        proptest::option::of(0_u32..5).prop_map(|owners| Origin::Saved { owners }),
        any_rank().prop_map(|source| Origin::Fetched { source }),
    ]
}

/// Around the end of the inline set and at both ends of the range.
fn any_requester() -> impl Strategy<Value = RequesterIndex> {
    select(vec![0, 1, 11, 12, 47, 48, 49, 4095]).prop_map(RequesterIndex)
}

/// A choice among the admissions so far, which [`Sequence`] turns into a serial number.
fn any_choice() -> impl Strategy<Value = u64> {
    0_u64..64
}

fn any_operation() -> impl Strategy<Value = Operation> {
    let any_key = || 0..KEYS;
    let keys = || prop::collection::vec(0..KEYS, 0..5);
    let choices = || prop::collection::vec(any_choice(), 0..5);
    prop_oneof![
        8 => (any_key(), any_origin(), any::<bool>()).prop_map(|(key, origin, pinned)| {
            let serial = 0;
            Operation::Insert { key, serial, origin, pinned }
        }),
        1 => any_key().prop_map(|key| Operation::Lookup { key }),
        3 => any_key().prop_map(|key| Operation::Pin { key }),
        2 => keys().prop_map(|keys| Operation::PinBatch { keys }),
        4 => (keys(), any::<bool>()).prop_map(|(keys, pin)| Operation::HitBatch { keys, pin }),
        4 => any_choice().prop_map(|serial| Operation::Unpin { serial }),
        2 => choices().prop_map(|serials| Operation::UnpinBatch { serials }),
        5 => (any_choice(), any_requester())
            .prop_map(|(serial, requester)| Operation::Commit { serial, requester }),
        2 => (choices(), any_requester())
            .prop_map(|(serials, requester)| Operation::CommitBatch { serials, requester }),
        2 => (any_key(), select(ResidentCause::ALL.to_vec()))
            .prop_map(|(key, cause)| Operation::AlreadyResident { key, cause }),
        2 => any_key().prop_map(|key| Operation::FinishedSending { key }),
        2 => (any_key(), 0_u32..5).prop_map(|(key, owners)| Operation::OwnerHint { key, owners }),
        3 => Just(Operation::Evict),
        1 => (0_usize..4).prop_map(|max| Operation::EvictBatch { max }),
    ]
}

/// Fills in what an operation can only know as the sequence runs: fresh serial numbers, and which
/// admission is meant. Half of the choices mean one that holds a pin; the others may be stale.
struct Sequence {
    admissions: u64,
}

impl Sequence {
    fn resolve(&mut self, operation: &Operation, oracle: &Oracle) -> Operation {
        let mut operation = operation.clone();
        match &mut operation {
            Operation::Insert { serial, .. } => {
                self.admissions += 1;
                *serial = self.admissions;
            }
            Operation::Unpin { serial } | Operation::Commit { serial, .. } => {
                *serial = self.choose(*serial, oracle);
            }
            Operation::UnpinBatch { serials } | Operation::CommitBatch { serials, .. } => {
                for serial in serials {
                    *serial = self.choose(*serial, oracle);
                }
            }
            _ => {}
        }
        operation
    }

    fn choose(&self, choice: u64, oracle: &Oracle) -> u64 {
        let pinned = oracle.residents().values().filter(|r| r.pins > 0);
        let pinned: Vec<u64> = pinned.map(|r| r.serial).collect();
        let (half, at) = (choice % 2, choice / 2);
        if half == 0 && !pinned.is_empty() {
            pinned[usize::try_from(at).unwrap() % pinned.len()]
        } else {
            self.admissions.saturating_sub(at % 8)
        }
    }
}

fn run(config: StoreConfig, operations: &[Operation]) -> Result<(), TestCaseError> {
    let mut subject = Subject::new(config);
    let mut oracle = Oracle::new(config);
    let mut sequence = Sequence { admissions: 0 };
    let mut step = |subject: &mut Subject, oracle: &mut Oracle, operation: &Operation| {
        let operation = sequence.resolve(operation, oracle);
        let expected = oracle.apply(&operation);
        prop_assert_eq!(subject.apply(&operation), expected.clone(), "{:?}", operation);
        lock(&subject.store.slab).check();
        Ok(expected)
    };
    for operation in operations {
        step(&mut subject, &mut oracle, operation)?;
        subject.sum.assert_explains(&subject.store);
    }
    subject.assert_lists(&oracle);
    while oracle.residents().values().any(|resident| resident.pins > 0) {
        step(&mut subject, &mut oracle, &Operation::Unpin { serial: 0 })?;
    }
    while !step(&mut subject, &mut oracle, &Operation::Evict)?.is_empty() {}
    prop_assert_eq!(subject.store.stats().residents, 0);
    subject.sum.assert_explains(&subject.store);
    Ok(())
}

fn compare(policy: Policy) {
    let mut config = Config::default();
    let seed = match config.rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => getrandom::u64().unwrap(),
    };
    config.rng_seed = RngSeed::Fixed(seed);
    config.cases = config.cases.max(SEQUENCES);
    config.failure_persistence = None;
    let sequences = (2_u32..7, prop::collection::vec(any_operation(), 1..60));
    let outcome = TestRunner::new(config).run(&sequences, |(capacity, operations)| {
        run(StoreConfig { capacity, policy }, &operations)
    });
    if let Err(error) = outcome {
        panic!("{policy:?}, PROPTEST_RNG_SEED={seed}: {error}");
    }
}

fn compare_kind(kind: PolicyKind) {
    compare(Policy { kind, ..Policy::default() });
}

#[test]
fn the_rank_policy_is_what_its_oracle_says() {
    compare_kind(PolicyKind::Rank);
}

#[test]
fn the_rank_policy_without_hit_promotion_is_what_its_oracle_says() {
    compare(Policy { hit_promotion: false, ..Policy::default() });
}

#[test]
fn the_segmented_policy_is_what_its_oracle_says() {
    compare_kind(PolicyKind::Segmented);
}

#[test]
fn the_aged_policy_is_what_its_oracle_says() {
    compare_kind(PolicyKind::Aged);
}

#[test]
fn the_lru_policy_is_what_its_oracle_says() {
    compare_kind(PolicyKind::Lru);
}
