//! Linearizability: thousands of short histories of real threads on tiny stores, each one explained
//! by the oracle or the test fails with its seed.
//!
//! After its threads are done, a history goes on in one thread: every block is looked up, every pin
//! is given back and the store is drained, so that pins, ranks and the whole order of every list
//! are answers too, and a wrong one cannot hide.
//!
//! `KVRAIL_HISTORIES` in the environment of the build (it is read by the compiler) sets another
//! number of histories per policy.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use super::StoreConfig;
use super::history::{History, Step};
use super::oracle::{Answer, Operation, Oracle};
use super::subject::Subject;
use crate::policy::{Origin, Policy};
use crate::types::{EvictionRank, PolicyKind, RequesterIndex, ResidentCause};

const THREADS: usize = 3;
const KEYS: u8 = 4;
/// Calls of each thread.
const CALLS: usize = 5;

/// Histories per policy; five policies.
const HISTORIES: u64 = match option_env!("KVRAIL_HISTORIES") {
    Some(text) => match u64::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("KVRAIL_HISTORIES is a number"),
    },
    None => 2_000,
};

/// A xorshift generator: the same calls for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }

    fn key(&mut self) -> u8 {
        u8::try_from(self.below(u64::from(KEYS))).unwrap()
    }

    fn keys(&mut self) -> Vec<u8> {
        (0..=self.below(3)).map(|_| self.key()).collect()
    }

    fn half(&mut self) -> bool {
        self.below(2) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::try_from(self.below(u64::try_from(choices.len()).unwrap())).unwrap()]
    }
}

/// One thread's part of a history.
struct Caller<'a> {
    subject: Subject,
    random: Random,
    clock: &'a AtomicU64,
    /// The next admission's serial number: no two callers share one.
    serial: u64,
    steps: Vec<Step>,
}

impl Caller<'_> {
    fn call(&mut self, operation: Operation) -> Vec<Answer> {
        let called = self.clock.fetch_add(1, Ordering::SeqCst);
        self.give_way();
        let answers = self.subject.apply(&operation);
        self.give_way();
        let returned = self.clock.fetch_add(1, Ordering::SeqCst);
        self.steps.push(Step { operation, answers: answers.clone(), called, returned });
        answers
    }

    /// Lets other threads run inside of this call's interval, now and then: on a busy machine a
    /// whole history would fit one time slice, and nothing would overlap.
    fn give_way(&mut self) {
        if self.random.below(3) == 0 {
            thread::yield_now();
        }
    }

    /// An admission that this caller knows the id of: the pins of others are fair game, too.
    fn admission(&mut self) -> u64 {
        let met: Vec<u64> = self.subject.met().collect();
        let newest = met.len().saturating_sub(4);
        if met.is_empty() { 0 } else { self.random.of(&met[newest..]) }
    }

    fn operation(&mut self) -> Operation {
        let random = &mut self.random;
        let requester = RequesterIndex(random.of(&[0, 1, 48, 60]));
        match random.below(16) {
            0..3 => {
                self.serial += 1;
                let source = EvictionRank::clamped(random.of(&[1, 2, 31]));
                let fetched = Origin::Fetched { source };
                let origin = random.of(&[Origin::Saved { owners: None }, fetched]);
                let (key, pinned) = (random.key(), random.half());
                Operation::Insert { key, serial: self.serial, origin, pinned }
            }
            3 => Operation::Pin { key: random.key() },
            4 => Operation::PinBatch { keys: random.keys() },
            5..8 => Operation::HitBatch { keys: random.keys(), pin: random.half() },
            8 => Operation::Unpin { serial: self.admission() },
            9 => Operation::UnpinBatch { serials: vec![self.admission(), self.admission()] },
            10..12 => Operation::Commit { serial: self.admission(), requester },
            12 => {
                let serials = vec![self.admission(), self.admission()];
                Operation::CommitBatch { serials, requester }
            }
            13 => match random.below(4) {
                0 => Operation::Lookup { key: random.key() },
                1 => Operation::OwnerHint { key: random.key(), owners: 4 },
                2 => Operation::FinishedSending { key: random.key() },
                _ => {
                    let cause = random.of(&ResidentCause::ALL);
                    Operation::AlreadyResident { key: random.key(), cause }
                }
            },
            14 => Operation::EvictBatch { max: 2 },
            _ => Operation::Evict,
        }
    }

    /// Shows all that is in the store, and empties it.
    fn drain(&mut self) {
        (0..KEYS).for_each(|key| drop(self.call(Operation::Lookup { key })));
        let met: Vec<u64> = self.subject.met().collect();
        for serial in met {
            while self.call(Operation::Unpin { serial }) == [Answer::Unpinned] {}
        }
        while !self.call(Operation::Evict).is_empty() {}
    }
}

/// Records one history and the state that it started from.
fn record(config: StoreConfig, seed: u64) -> (Oracle, History) {
    let (clock, ready) = (&AtomicU64::new(0), &AtomicUsize::new(0));
    let mut random = Random(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let caller = |subject: Subject, random: &mut Random, at: u64| {
        let (random, steps) = (Random(random.below(u64::MAX) | 1), Vec::new());
        Caller { subject, random, clock, serial: 100 * at, steps }
    };
    let mut first = caller(Subject::new(config), &mut random, 0);
    let mut start = Oracle::new(config);
    for _ in 0..6 {
        let operation = first.operation();
        let expected = start.apply(&operation);
        assert_eq!(first.call(operation), expected, "before any thread started");
    }
    first.steps.clear();
    let callers: Vec<Caller<'_>> =
        (1..).take(THREADS).map(|at| caller(first.subject.share(), &mut random, at)).collect();
    let mut threads: Vec<Caller<'_>> = thread::scope(|scope| {
        let spawned: Vec<_> = callers
            .into_iter()
            .map(|mut caller| {
                scope.spawn(move || {
                    ready.fetch_add(1, Ordering::SeqCst);
                    while ready.load(Ordering::SeqCst) < THREADS {
                        thread::yield_now();
                    }
                    for _ in 0..CALLS {
                        let operation = caller.operation();
                        caller.call(operation);
                    }
                    caller
                })
            })
            .collect();
        spawned.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for thread in &threads {
        first.subject.meet_all(&thread.subject);
    }
    first.drain();
    first.subject.sum.assert_explains(&first.subject.store);
    threads.push(first);
    (start, History::new(threads.into_iter().map(|caller| caller.steps).collect()))
}

fn check(policy: Policy) {
    let run: u64 = getrandom::u64().unwrap() >> 16;
    let mut overlapping = 0;
    for number in 0..HISTORIES {
        let seed = run + number;
        let capacity = if number % 2 == 0 { 2 } else { 3 };
        let (start, history) = record(StoreConfig { capacity, policy }, seed);
        overlapping += u64::from(history.overlaps());
        assert!(
            history.is_explained_from(&start),
            "{policy:?}, capacity {capacity}, seed {seed}: no order explains\n{start:?}\n{history:#?}"
        );
    }
    // A history whose calls all came one after the other proves nothing about threads.
    assert!(overlapping * 2 > HISTORIES, "only {overlapping} of {HISTORIES} histories overlap");
}

#[test]
fn histories_of_the_rank_policy_have_a_sequential_explanation() {
    check(Policy::default());
}

#[test]
fn histories_without_hit_promotion_have_a_sequential_explanation() {
    check(Policy { hit_promotion: false, ..Policy::default() });
}

#[test]
fn histories_of_the_other_policies_have_a_sequential_explanation() {
    for kind in [PolicyKind::Segmented, PolicyKind::Aged, PolicyKind::Lru] {
        check(Policy { kind, ..Policy::default() });
    }
}
