//! The store under several threads: what must hold at the end, and while a pin is held.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

use super::oracle::{key, payload};
use super::subject::RankSum;
use super::{Committed, Found, Origin, Payload, Store, StoreConfig};
use crate::policy::Policy;
use crate::sync::{set_interference, suspend};
use crate::types::{
    BlockKey, Extent, MemoryKind, PolicyKind, PoolId, RequesterIndex, ResidentCause,
};

/// Steps of each thread; another number with `KVRAIL_STRESS_STEPS` in the environment of the build (a
/// million take one to two minutes for each policy).
const STEPS: u64 = match option_env!("KVRAIL_STRESS_STEPS") {
    Some(text) => match u64::from_str_radix(text, 10) {
        Ok(number) => number,
        Err(_) => panic!("KVRAIL_STRESS_STEPS is a number"),
    },
    None => 10_000,
};

const SAVED: Origin = Origin::Saved { owners: None };

fn store(capacity: u32, kind: PolicyKind, sink: Arc<RankSum>) -> Store {
    let policy = Policy { kind, ..Policy::default() };
    Store::new(StoreConfig { capacity, policy }, sink).unwrap()
}

#[test]
fn invariant_7_holds_where_threads_race_to_commit() {
    const THREADS: u16 = 4;
    for round in 0..200 {
        let store = store(1, PolicyKind::Rank, Arc::default());
        let id = store.insert(key(0), payload(0), SAVED, false).unwrap().id;
        // Two requesters, one inline and one beyond, each committed by every thread.
        let requesters = [RequesterIndex(3), RequesterIndex(100 + round)];
        store.pin_batch(&[key(0); 2 * THREADS as usize], &mut Vec::new());
        let (store, barrier) = (&store, &Barrier::new(usize::from(THREADS)));
        let given: Vec<(usize, Committed)> = thread::scope(|scope| {
            let run = move |thread: u16| {
                barrier.wait();
                let order = if thread.is_multiple_of(2) { [0, 1] } else { [1, 0] };
                order.map(|at| (at, store.commit(id, requesters[at]).unwrap()))
            };
            let threads: Vec<_> = (0..THREADS).map(|t| scope.spawn(move || run(t))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let mut ranks: Vec<u8> = (0..2)
            .map(|at| {
                let of = || given.iter().filter(|one| one.0 == at).map(|one| one.1);
                assert_eq!(of().filter(|one| one.first).count(), 1);
                let rank = of().next().unwrap().rank;
                assert!(of().all(|one| one.rank == rank), "every repeat gets the first answer");
                rank.get()
            })
            .collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [1, 2]);
        assert_eq!(store.lookup(&key(0)).unwrap().rank.get(), 3);
        assert_eq!(store.stats().pinned, 0);
    }
}

/// More than there are processors on the machines that run this.
const THREADS: usize = 6;

/// Who suspends itself until the others have got on, which they do only if nobody waits for it.
#[derive(Default)]
struct Suspensions {
    /// Steps of all threads.
    steps: AtomicU64,
    /// Threads that stand still, or are done.
    still: AtomicUsize,
    count: AtomicUsize,
}

impl Suspensions {
    fn suspend(&self) {
        let goal = self.steps.load(Ordering::Relaxed) + 50;
        let others = self.still.fetch_add(1, Ordering::Relaxed);
        // The last one that goes has nobody to wait for.
        if others + 1 < THREADS {
            self.count.fetch_add(1, Ordering::Relaxed);
            while self.steps.load(Ordering::Relaxed) < goal
                && self.still.load(Ordering::Relaxed) < THREADS
            {
                thread::yield_now();
            }
        }
        self.still.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Memory as a node has it: a cell per extent, which holds the serial number of the block in it.
struct Memory {
    cells: Vec<AtomicU64>,
    free: Mutex<Vec<u64>>,
    serials: AtomicU64,
    checked: AtomicUsize,
}

struct Worker<'a> {
    store: &'a Store,
    memory: &'a Memory,
    random: u64,
    pins: Vec<Found>,
}

impl Worker<'_> {
    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % below
    }

    fn key(&mut self) -> BlockKey {
        key(u8::try_from(self.random(48)).unwrap())
    }

    /// The memory of a pinned resident still holds what was inserted there.
    fn check(&self, pin: &Found) {
        let cell = usize::try_from(pin.payload.extent.offset).unwrap();
        let serial = self.memory.cells[cell].load(Ordering::Relaxed);
        assert_eq!(serial, pin.payload.checksum, "pinned memory was reused");
        self.memory.checked.fetch_add(1, Ordering::Relaxed);
    }

    fn release(&mut self, at: usize) {
        let pin = self.pins.swap_remove(at);
        self.check(&pin);
        if self.random(2) == 0 {
            let requester = RequesterIndex(u16::try_from(self.random(60)).unwrap());
            self.store.commit(pin.id, requester).unwrap();
        } else {
            self.store.unpin(pin.id).unwrap();
        }
    }

    fn evict(&mut self) {
        let mut out = Vec::new();
        let kind = MemoryKind::ALL[usize::try_from(self.random(3)).unwrap()];
        self.store.evict_batch(kind, 3, &mut out);
        for victim in out {
            assert_eq!(victim.payload.extent.pool.kind(), kind);
            self.free(&victim.payload);
        }
    }

    fn remove(&mut self) {
        let key = self.key();
        if let Some(found) = self.store.lookup(&key)
            && let Ok(removed) = self.store.remove(found.id)
        {
            assert_eq!((removed.id, removed.key, removed.payload), (found.id, key, found.payload));
            self.free(&removed.payload);
        }
    }

    /// Whoever took a resident out owns its memory now; nobody may have taken that before.
    fn free(&self, payload: &Payload) {
        let cell = payload.extent.offset;
        let held = &self.memory.cells[usize::try_from(cell).unwrap()];
        assert_eq!(held.swap(0, Ordering::Relaxed), payload.checksum);
        self.memory.free.lock().unwrap().push(cell);
    }

    fn insert(&mut self) {
        let cell = self.memory.free.lock().unwrap().pop();
        let Some(offset) = cell else {
            return self.evict();
        };
        let checksum = self.memory.serials.fetch_add(1, Ordering::Relaxed);
        let held = &self.memory.cells[usize::try_from(offset).unwrap()];
        held.store(checksum, Ordering::Relaxed);
        let pools = [PoolId(0), PoolId::GPU, PoolId::of_layout(7).unwrap()];
        let pool = pools[usize::try_from(offset % 3).unwrap()];
        let extent = Extent { pool, offset, len: 1 };
        let (key, pinned) = (self.key(), self.random(2) == 0);
        let payload = Payload { extent, checksum };
        match self.store.insert(key, payload, SAVED, pinned) {
            Ok(found) if pinned => self.pins.push(found),
            Ok(_) => {}
            Err(_) => {
                held.store(0, Ordering::Relaxed);
                self.memory.free.lock().unwrap().push(offset);
            }
        }
    }

    fn step(&mut self) {
        let held = u64::try_from(self.pins.len()).unwrap();
        match self.random(9) {
            0 | 1 => self.insert(),
            2 => self.evict(),
            3 if held < 6 => {
                let key = self.key();
                self.pins.extend(self.store.pin(&key));
            }
            4 if held < 6 => {
                let (keys, mut out) = ([self.key(), self.key(), self.key()], Vec::new());
                self.store.hit_batch(&keys, true, &mut out);
                self.pins.extend(out.into_iter().flatten());
            }
            5 => {
                let (key, owners) = (self.key(), u32::try_from(self.random(4)).unwrap());
                self.store.owner_hint(&key, owners);
                self.store.finished_sending(&key);
                self.store.already_resident(&key, ResidentCause::PeerFetch);
            }
            6 => self.remove(),
            _ if held > 0 => {
                let at = self.random(held);
                self.release(usize::try_from(at).unwrap());
            }
            _ => {}
        }
    }
}

fn stress(kind: PolicyKind) {
    const CAPACITY: u32 = 24;
    let sum = Arc::new(RankSum::default());
    let store = store(CAPACITY, kind, sum.clone());
    let memory = Memory {
        cells: (0..CAPACITY).map(|_| AtomicU64::new(0)).collect(),
        free: Mutex::new((0..u64::from(CAPACITY)).collect()),
        serials: AtomicU64::new(1),
        checked: AtomicUsize::new(0),
    };
    let suspensions = Arc::new(Suspensions::default());
    thread::scope(|scope| {
        for seed in (1..).take(THREADS) {
            let (store, memory, suspensions) = (&store, &memory, suspensions.clone());
            scope.spawn(move || {
                let random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed);
                let pins = Vec::new();
                let mut worker = Worker { store, memory, random, pins };
                set_interference(random);
                suspend({
                    let suspensions = suspensions.clone();
                    move || suspensions.suspend()
                });
                for _ in 0..STEPS {
                    worker.step();
                    suspensions.steps.fetch_add(1, Ordering::Relaxed);
                }
                while !worker.pins.is_empty() {
                    worker.release(0);
                }
                suspensions.still.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert!(suspensions.count.load(Ordering::Relaxed) > 100);
    assert!(memory.checked.load(Ordering::Relaxed) > 1_000);
    store.table.check();
    sum.assert_explains(&store);
    let stats = store.stats();
    assert_eq!(stats.pinned, 0, "every pin came back");
    let free = u32::try_from(memory.free.lock().unwrap().len()).unwrap();
    assert_eq!(stats.residents + free, CAPACITY, "every cell has one owner");
    let drain = |kind| store.evict_batch(kind, usize::MAX, &mut Vec::new());
    let drained = MemoryKind::ALL.map(drain).iter().sum::<usize>();
    assert_eq!(drained, usize::try_from(stats.residents).unwrap());
    sum.assert_explains(&store);
}

#[test]
fn threads_leave_every_pin_returned_and_every_slot_in_one_place() {
    PolicyKind::ALL.into_iter().for_each(stress);
}
