//! Records what threads do to a store, for the search for an explanation: programs of fixed or of
//! random calls, on real threads that give way to each other now and then, or under shuttle.
//!
//! After its threads are done, a history goes on in one thread: every block is looked up, every pin
//! is given back and the store is drained, so that pins, ranks and the whole order of every list
//! are answers too, and a wrong one cannot hide.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::StoreConfig;
use super::fault::{self, Fault};
use super::history::{History, Step};
use super::oracle::{Answer, IN_ENGINE, ON_DEVICE, Operation, Oracle, kind_of};
use super::subject::Subject;
use crate::policy::Origin;
use crate::sync::{limit_accesses, set_interference, thread};
use crate::types::{EvictionRank, MemoryKind, RequesterIndex, ResidentCause};

const KEYS: u8 = 4;

/// Accesses to shared cells of one thread in one history: a thousand times what it takes.
const ACCESSES: u64 = 1_000_000;

/// Where admissions lie, and victims are taken from: mostly in one memory, so that they meet.
const PLACES: [u64; 6] = [0, 0, 0, 0, ON_DEVICE, IN_ENGINE];

/// A xorshift generator: the same calls for the same seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, bound: u64) -> u64 {
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
        match random.below(17) {
            0..3 => {
                self.serial += 1;
                let source = EvictionRank::clamped(random.of(&[1, 2, 31]));
                let fetched = Origin::Fetched { source };
                let origin = random.of(&[Origin::Saved { owners: None }, fetched]);
                let (key, pinned) = (random.key(), random.half());
                let serial = self.serial | random.of(&PLACES);
                Operation::Insert { key, serial, origin, pinned }
            }
            3 => Operation::Pin { key: random.key() },
            4 => Operation::PinBatch { keys: random.keys() },
            5..8 => Operation::HitBatch { keys: random.keys(), pin: random.half() },
            8 => Operation::Unpin { serial: self.admission() },
            9 => Operation::UnpinBatch { serials: vec![self.admission()] },
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
            14 => Operation::Remove { serial: self.admission() },
            15 => Operation::EvictBatch { kind: kind_of(random.of(&PLACES)), max: 2 },
            _ => Operation::Evict(kind_of(random.of(&PLACES))),
        }
    }

    /// Shows all that is in the store, and empties it.
    fn drain(&mut self) {
        (0..KEYS).for_each(|key| drop(self.call(Operation::Lookup { key })));
        let met: Vec<u64> = self.subject.met().collect();
        for serial in met {
            while self.call(Operation::Unpin { serial }) == [Answer::Unpinned] {}
        }
        for kind in MemoryKind::ALL {
            while !self.call(Operation::Evict(kind)).is_empty() {}
        }
    }
}

/// What one thread does.
#[derive(Debug, Clone)]
pub(super) enum Program {
    /// So many calls, chosen as it goes.
    Random(usize),
    /// These. Admissions before the threads start have the serial numbers from 1 on.
    Fixed(Vec<Operation>),
}

/// What a history is of.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) config: StoreConfig,
    pub(super) before: Program,
    pub(super) threads: Vec<Program>,
    pub(super) seed: u64,
    pub(super) fault: Option<Fault>,
}

impl Caller<'_> {
    fn run(&mut self, program: &Program, mut each: impl FnMut(&Operation, &[Answer])) {
        let (count, fixed) = match program {
            Program::Random(count) => (*count, [].as_slice()),
            Program::Fixed(operations) => (operations.len(), operations.as_slice()),
        };
        for at in 0..count {
            let operation = fixed.get(at).cloned().unwrap_or_else(|| self.operation());
            let answers = self.call(operation.clone());
            each(&operation, &answers);
        }
    }
}

/// Records one history and the state that it started from.
pub(super) fn record(plan: &Plan) -> (Oracle, History) {
    limit_accesses(ACCESSES);
    let (clock, ready) = (&AtomicU64::new(0), &AtomicUsize::new(0));
    let mut random = Random(plan.seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let caller = |subject: Subject, random: &mut Random, at: u64| {
        let (random, steps) = (Random(random.below(u64::MAX) | 1), Vec::new());
        Caller { subject, random, clock, serial: 100 * at, steps }
    };
    let mut first = caller(Subject::new(plan.config), &mut random, 0);
    let mut start = Oracle::new(plan.config);
    first.run(&plan.before, |operation, answers| {
        assert_eq!(start.apply(operation), answers, "{operation:?}, before any thread started");
    });
    first.steps.clear();
    let count = plan.threads.len();
    let mut threads: Vec<Caller<'_>> = thread::scope(|scope| {
        let callers: Vec<_> = (1..)
            .zip(&plan.threads)
            .map(|(at, program)| (caller(first.subject.share(), &mut random, at), program))
            .collect();
        let mut spawned = Vec::new();
        for (mut caller, program) in callers {
            spawned.push(scope.spawn(move || {
                fault::set(plan.fault);
                limit_accesses(ACCESSES);
                start_together(ready, count, &mut caller.random);
                caller.run(program, |_, _| {});
                caller
            }));
        }
        spawned.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for thread in &threads {
        first.subject.meet_all(&thread.subject);
    }
    first.subject.store.table.check();
    first.drain();
    first.subject.sum.assert_explains(&first.subject.store);
    threads.push(first);
    (start, History::new(threads.into_iter().map(|caller| caller.steps).collect()))
}

/// A real thread waits for the others, so that their calls overlap; a model checker needs no such
/// thing, and has its own idea of who runs when.
fn start_together(ready: &AtomicUsize, count: usize, random: &mut Random) {
    if cfg!(shuttle) {
        return;
    }
    set_interference(random.below(u64::MAX) | 1);
    ready.fetch_add(1, Ordering::SeqCst);
    while ready.load(Ordering::SeqCst) < count {
        thread::yield_now();
    }
}
