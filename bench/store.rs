//! The store against the same ranks under one mutex: both in one run, alternating, medians of 7.
//!
//! `cargo bench --bench store`, optionally followed by `-- OPERATIONS`. What counts are the ratios:
//! other work on the machine moves the nanoseconds of both.
//!
//! - mix: 90 % hits of a Zipf distribution (skew 0.99) with pin and unpin, inserted where missing,
//!   and 10 % insertions of fresh blocks, each with the eviction that it needs
//! - touch: hits of one and of 32
//! - commit: batches of 64, pinned before
//! - lend: the latency of a batch of 64 pins, while a reclaimer, one of the threads, evicts and inserts
//!   without pause. A lender gives way after each lend, as a thread that serves requests does when it
//!   waits for the next one. Lenders that never wait would have more of their lends than one in a
//!   thousand interrupted by the end of a time slice, and measure that slice: 4 ms, with any store.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a measurement reads the clock and prints; a failure in it may panic"
)]

mod contender;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use contender::Mutexed;
use kvrail::event::Discard;
use kvrail::policy::{Origin, Policy};
use kvrail::store::{
    Committed, Evicted, Found, InsertError, Payload, PinError, Store, StoreConfig, UnpinError,
};
use kvrail::types::{BlockHash, BlockKey, Extent, NamespaceId, PoolId, RequesterIndex, ResidentId};

const RUNS: usize = 7;
const SKEW: f64 = 0.99;

/// What both of them do.
trait Ranks: Sync {
    fn build(capacity: u32) -> Self;
    fn insert(&self, key: BlockKey, payload: Payload, pinned: bool) -> Result<Found, InsertError>;
    fn pin_batch(&self, keys: &[BlockKey], out: &mut Vec<Result<Found, PinError>>);
    fn hit_batch(&self, keys: &[BlockKey], pin: bool, out: &mut Vec<Result<Found, PinError>>);
    fn unpin_batch(&self, ids: &[ResidentId]) -> usize;
    fn commit_batch(&self, ids: &[ResidentId], out: &mut Vec<Result<Committed, UnpinError>>);
    fn evict_batch(&self, max: usize, out: &mut Vec<Evicted>) -> usize;
}

fn config(capacity: u32) -> StoreConfig {
    StoreConfig { capacity, policy: Policy::default() }
}

const REQUESTER: RequesterIndex = RequesterIndex(3);

impl Ranks for Store {
    fn build(capacity: u32) -> Self {
        Self::new(config(capacity), Arc::new(Discard)).unwrap()
    }
    fn insert(&self, key: BlockKey, payload: Payload, pinned: bool) -> Result<Found, InsertError> {
        self.insert(key, payload, Origin::Saved { owners: None }, pinned)
    }
    fn pin_batch(&self, keys: &[BlockKey], out: &mut Vec<Result<Found, PinError>>) {
        self.pin_batch(keys, out);
    }
    fn hit_batch(&self, keys: &[BlockKey], pin: bool, out: &mut Vec<Result<Found, PinError>>) {
        self.hit_batch(keys, pin, out);
    }
    fn unpin_batch(&self, ids: &[ResidentId]) -> usize {
        self.unpin_batch(ids)
    }
    fn commit_batch(&self, ids: &[ResidentId], out: &mut Vec<Result<Committed, UnpinError>>) {
        self.commit_batch(ids, REQUESTER, out);
    }
    fn evict_batch(&self, max: usize, out: &mut Vec<Evicted>) -> usize {
        self.evict_batch(max, out)
    }
}

impl Ranks for Mutexed {
    fn build(capacity: u32) -> Self {
        Self::new(config(capacity))
    }
    fn insert(&self, key: BlockKey, payload: Payload, pinned: bool) -> Result<Found, InsertError> {
        self.insert(key, payload, pinned)
    }
    fn pin_batch(&self, keys: &[BlockKey], out: &mut Vec<Result<Found, PinError>>) {
        self.pin_batch(keys, out);
    }
    fn hit_batch(&self, keys: &[BlockKey], pin: bool, out: &mut Vec<Result<Found, PinError>>) {
        self.hit_batch(keys, pin, out);
    }
    fn unpin_batch(&self, ids: &[ResidentId]) -> usize {
        self.unpin_batch(ids)
    }
    fn commit_batch(&self, ids: &[ResidentId], out: &mut Vec<Result<Committed, UnpinError>>) {
        self.commit_batch(ids, REQUESTER, out);
    }
    fn evict_batch(&self, max: usize, out: &mut Vec<Evicted>) -> usize {
        self.evict_batch(max, out)
    }
}

fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&bytes).unwrap() }
}

fn payload(number: u64) -> Payload {
    let extent = Extent { pool: PoolId(0), offset: number * 64, len: 64 };
    Payload { extent, checksum: number }
}

fn filled<R: Ranks>(entries: u32) -> R {
    let ranks = R::build(entries);
    for number in 0..u64::from(entries) {
        ranks.insert(key(number), payload(number), false).unwrap();
    }
    ranks
}

/// Numbers below `entries`, the small ones often, spread over all of them by a multiplication.
fn zipf(entries: u32, count: usize, seed: u64) -> Vec<u64> {
    let (n, mut state) = (f64::from(entries), seed);
    let zeta: f64 = (1..=entries).map(|rank| f64::from(rank).powf(-SKEW)).sum();
    let two = 1.0 + 2_f64.powf(-SKEW);
    let eta = (1.0 - (2.0 / n).powf(1.0 - SKEW)) / (1.0 - two / zeta);
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let uniform = f64::from((state >> 32) as u32) / f64::from(u32::MAX);
        let rank = match uniform * zeta {
            low if low < 1.0 => 0,
            low if low < two => 1,
            _ => (n * (eta * uniform - eta + 1.0).powf(1.0 / (1.0 - SKEW))) as u64,
        };
        rank.wrapping_mul(0x9e37_79b9_7f4a_7c15) % u64::from(entries)
    };
    (0..count).map(|_| draw()).collect()
}

/// Runs `work` on so many threads at once and answers the nanoseconds of one of its operations.
fn timed(threads: usize, operations: usize, work: impl Fn(usize) + Sync) -> f64 {
    let (barrier, work) = (&Barrier::new(threads), &work);
    let run = move |thread| {
        barrier.wait();
        let start = Instant::now();
        work(thread);
        start.elapsed().as_secs_f64() * 1e9 / operations as f64
    };
    let total: f64 = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    total / threads as f64
}

fn mix<R: Ranks>(entries: u32, traces: &[Vec<u64>]) -> f64 {
    let ranks: R = filled(entries);
    timed(traces.len(), traces[0].len(), |thread| {
        let (mut out, mut victims, mut fresh) = (Vec::new(), Vec::new(), 1 << (40 + thread));
        for (at, number) in traces[thread].iter().enumerate() {
            let mut wanted = key(*number);
            if at % 10 == 9 {
                fresh += 1;
                wanted = key(fresh);
            }
            let id = loop {
                ranks.hit_batch(&[wanted], true, &mut out);
                if let Some(Ok(found)) = out.first() {
                    break found.id;
                }
                match ranks.insert(wanted, payload(at as u64), true) {
                    Ok(found) => break found.id,
                    Err(InsertError::Full) => drop(ranks.evict_batch(1, &mut victims)),
                    Err(InsertError::AlreadyResident(_)) => {}
                }
                victims.clear();
            };
            assert_eq!(ranks.unpin_batch(&[id]), 0);
        }
    })
}

fn touch<R: Ranks>(entries: u32, traces: &[Vec<u64>], batch: usize) -> f64 {
    let ranks: R = filled(entries);
    timed(traces.len(), traces[0].len(), |thread| {
        let (mut out, mut keys) = (Vec::new(), Vec::new());
        for numbers in traces[thread].chunks(batch) {
            keys.clear();
            keys.extend(numbers.iter().map(|number| key(*number)));
            ranks.hit_batch(&keys, false, &mut out);
        }
    })
}

fn commit<R: Ranks>(entries: u32, traces: &[Vec<u64>]) -> f64 {
    let ranks: R = filled(entries);
    timed(traces.len(), traces[0].len(), |thread| {
        let (mut out, mut keys, mut commits) = (Vec::new(), Vec::new(), Vec::new());
        for numbers in traces[thread].chunks(64) {
            keys.clear();
            keys.extend(numbers.iter().map(|number| key(*number)));
            ranks.pin_batch(&keys, &mut out);
            let ids: Vec<ResidentId> = out.iter().map(|found| found.unwrap().id).collect();
            ranks.commit_batch(&ids, &mut commits);
        }
    })
}

/// The 99th and the 99.9th percentile of a lend, in microseconds, with one lender per trace.
fn lend<R: Ranks>(entries: u32, traces: &[Vec<u64>]) -> [f64; 2] {
    let (ranks, stop) = (&filled::<R>(entries), &AtomicBool::new(false));
    let reclaim = move || {
        let (mut victims, mut fresh) = (Vec::new(), 1 << 50);
        while !stop.load(Ordering::Relaxed) {
            victims.clear();
            ranks.evict_batch(512, &mut victims);
            for victim in &victims {
                fresh += 1;
                let next = if fresh % 2 == 0 { victim.key } else { key(fresh) };
                // Full or there already: another victim will make room.
                ranks.insert(next, victim.payload, false).ok();
            }
        }
    };
    let lend = move |trace: &[u64]| {
        let (mut out, mut times) = (Vec::new(), Vec::new());
        for numbers in trace.chunks(64) {
            let keys: Vec<BlockKey> = numbers.iter().map(|number| key(*number)).collect();
            let start = Instant::now();
            ranks.pin_batch(&keys, &mut out);
            times.push(start.elapsed().as_secs_f64() * 1e6);
            let ids: Vec<ResidentId> = out.iter().flatten().map(|found| found.id).collect();
            assert_eq!(ranks.unpin_batch(&ids), 0);
            std::thread::yield_now();
        }
        times
    };
    let mut times: Vec<f64> = std::thread::scope(|scope| {
        scope.spawn(reclaim);
        let all: Vec<_> = traces.iter().map(|trace| scope.spawn(move || lend(trace))).collect();
        let times = all.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        stop.store(true, Ordering::Relaxed);
        times
    });
    times.sort_by(f64::total_cmp);
    [0.99, 0.999].map(|part| times[(times.len() as f64 * part) as usize])
}

/// Medians of both, and their ratio, from runs that alternate.
fn compare(
    name: &str,
    unit: &str,
    mut free: impl FnMut() -> f64,
    mut mutexed: impl FnMut() -> f64,
) {
    let runs: Vec<[f64; 2]> = (0..RUNS).map(|_| [free(), mutexed()]).collect();
    let [ours, theirs] = [0, 1].map(|of| {
        let mut all: Vec<f64> = runs.iter().map(|run| run[of]).collect();
        all.sort_by(f64::total_cmp);
        all[RUNS / 2]
    });
    let ratio = ours / theirs;
    println!("{name:32} {ours:9.0} {theirs:9.0} {unit}  {ratio:5.2}");
}

fn main() {
    let argument = std::env::args().skip(1).find_map(|text| text.parse().ok());
    let operations: usize = argument.unwrap_or(500_000);
    println!("{:32} {:>9} {:>9}      ratio", "", "store", "mutexed");
    for entries in [100_000, 1_000_000] {
        for threads in [1, 2, 8] {
            let traces: Vec<Vec<u64>> =
                (1..=threads).map(|t| zipf(entries, operations, t)).collect();
            let name = |what: &str| format!("{what}, {entries}, {threads} threads");
            let (free, mutexed) =
                (|| mix::<Store>(entries, &traces), || mix::<Mutexed>(entries, &traces));
            compare(&name("mix"), "ns", free, mutexed);
            for batch in [1, 32] {
                let free = || touch::<Store>(entries, &traces, batch);
                let mutexed = || touch::<Mutexed>(entries, &traces, batch);
                compare(&name(&format!("touch by {batch}")), "ns", free, mutexed);
            }
            let (free, mutexed) =
                (|| commit::<Store>(entries, &traces), || commit::<Mutexed>(entries, &traces));
            compare(&name("commit by 64"), "ns", free, mutexed);
            let lenders = &traces[1..];
            for (at, part) in ["p99", "p99.9"].into_iter().enumerate() {
                if lenders.is_empty() {
                    continue;
                }
                let free = || lend::<Store>(entries, lenders)[at];
                let mutexed = || lend::<Mutexed>(entries, lenders)[at];
                compare(&name(&format!("lend {part}, reclaim")), "us", free, mutexed);
            }
        }
    }
}
