//! The store against its oracle: random operations on tiny stores, every answer compared, the
//! structure checked after each, and the whole eviction order at the end.
//!
//! `PROPTEST_CASES` raises the number of sequences; a failure prints its seed and the shrunk
//! sequence, and `PROPTEST_RNG_SEED` runs the same ones again.

use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use super::StoreConfig;
use super::oracle::{IN_ENGINE, ON_DEVICE, Operation, Oracle};
use super::subject::Subject;
use crate::policy::{Origin, Policy};
use crate::types::{EvictionRank, MemoryKind, PolicyKind, RequesterIndex, ResidentCause};

/// Sequences per policy; five policies.
const SEQUENCES: u32 = 10_000;
const KEYS: u8 = 8;

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

fn any_kind() -> impl Strategy<Value = MemoryKind> {
    select(MemoryKind::ALL.to_vec())
}

fn any_operation() -> impl Strategy<Value = Operation> {
    let any_key = || 0..KEYS;
    let keys = || prop::collection::vec(0..KEYS, 0..5);
    let choices = || prop::collection::vec(any_choice(), 0..5);
    prop_oneof![
        8 => (any_key(), any_origin(), any::<bool>(), select(vec![0, ON_DEVICE, IN_ENGINE]))
            .prop_map(|(key, origin, pinned, serial)| {
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
        2 => any_choice().prop_map(|serial| Operation::Remove { serial }),
        3 => any_kind().prop_map(Operation::Evict),
        1 => (any_kind(), 0_usize..4)
            .prop_map(|(kind, max)| Operation::EvictBatch { kind, max }),
    ]
}

/// Fills in what an operation can only know as the sequence runs: fresh serial numbers, and which
/// admission is meant. Half of the choices mean one that holds a pin; the others may be stale.
struct Sequence {
    admissions: Vec<u64>,
}

impl Sequence {
    fn resolve(&mut self, operation: &Operation, oracle: &Oracle) -> Operation {
        let mut operation = operation.clone();
        match &mut operation {
            Operation::Insert { serial, .. } => {
                *serial |= self.admissions.len() as u64 + 1;
                self.admissions.push(*serial);
            }
            Operation::Unpin { serial }
            | Operation::Commit { serial, .. }
            | Operation::Remove { serial } => {
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
            let latest = self.admissions.iter().rev();
            latest.copied().nth(usize::try_from(at % 8).unwrap()).unwrap_or(0)
        }
    }
}

fn run(config: StoreConfig, operations: &[Operation]) -> Result<(), TestCaseError> {
    let mut subject = Subject::new(config);
    let mut oracle = Oracle::new(config);
    let mut sequence = Sequence { admissions: Vec::new() };
    let mut step = |subject: &mut Subject, oracle: &mut Oracle, operation: &Operation| {
        let operation = sequence.resolve(operation, oracle);
        let expected = oracle.apply(&operation);
        prop_assert_eq!(subject.apply(&operation), expected.clone(), "{:?}", operation);
        subject.store.table.check();
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
    for kind in MemoryKind::ALL {
        while !step(&mut subject, &mut oracle, &Operation::Evict(kind))?.is_empty() {}
    }
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
