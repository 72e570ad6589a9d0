//! What a contender does while it is measured.
//!
//! - mix: 90 % reads of a Zipf distribution with pin and unpin, inserted where missing, and 10 %
//!   inserts of fresh blocks, each with the eviction that it needs
//! - touch: hits of the same distribution, one at a time and in batches
//! - commit: transfers that end, in batches, each block for a requester that is new to it
//! - lend and pin: the latency of a batch, and of a block by itself, that peers ask for while one
//!   thread evicts and inserts without pause
//! - reclaim: the oldest blocks evicted at once
//!
//! One filled contender takes all of them in this order, so the later ones find ranks and gaps as
//! the earlier ones left them.

use std::panic::resume_unwind;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use super::contender::{Contender, Ranked};
use super::measure::Measure;
use super::zipf::{Random, key, payload};
use crate::cli::CliError;
use crate::cli::bench::latency::Latency;
use crate::runtime::clock::Clock;
use crate::types::{BlockKey, RequesterIndex};

/// Blocks of one lend and of one commit.
pub(super) const BATCH: usize = 64;

/// Hits of one batch.
pub(super) const TOUCHES: usize = 32;

/// Blocks that the reclaimer evicts and inserts at a time.
const STORM: usize = 512;

/// Victims of one reclaim.
pub(super) const VICTIMS: usize = 10_000;

/// Requesters that a resident counts without a list of them.
const REQUESTERS: u16 = 48;

/// Every so many operations of the mix one inserts a fresh block.
const FRESH_EVERY: usize = 10;

/// One in so many of the oldest blocks is not pinned.
const FREE_EVERY: usize = 10;

/// Numbers from here on are of fresh blocks.
const FRESH: u64 = 1 << 40;

/// What one round asks of each contender.
#[derive(Debug)]
pub struct Load {
    /// Blocks that it holds.
    pub(super) entries: u32,
    /// The order in which they are inserted.
    pub(super) order: Vec<u32>,
    /// By thread: the numbers that it asks for.
    pub(super) traces: Vec<Vec<u32>>,
}

/// What came out.
pub type Numbers = Vec<(Measure, f64)>;

/// One round of a contender without ranks.
pub(super) fn plain<C: Contender>(load: &Load) -> Result<Numbers, CliError> {
    let subject = filled::<C>(load.entries, &load.order)?;
    let mut numbers = vec![(Measure::Mix, mix(&subject, load))];
    storms(&subject, load, &mut numbers)?;
    Ok(numbers)
}

/// One round of a contender with ranks.
pub(super) fn ranked<C: Ranked>(load: &Load) -> Result<Numbers, CliError> {
    let subject = filled::<C>(load.entries, &load.order)?;
    let mut numbers = vec![(Measure::Mix, mix(&subject, load))];
    numbers.push((Measure::Touch, touch(&subject, load, 1)));
    numbers.push((Measure::TouchBatch, touch(&subject, load, TOUCHES)));
    numbers.push((Measure::Commit, commit(&subject, load)));
    storms(&subject, load, &mut numbers)?;
    Ok(numbers)
}

pub(super) fn filled<C: Contender>(entries: u32, order: &[u32]) -> Result<C, CliError> {
    let subject = C::new(entries)?;
    let mut hand = C::Hand::default();
    for number in order {
        let number = u64::from(*number);
        if let Some(pin) = subject.insert(&mut hand, &key(number), payload(number)) {
            subject.release(pin);
        }
    }
    Ok(subject)
}

pub(super) fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| resume_unwind(panic))
}

/// Runs `work` for each thread at once; nanoseconds of one of its operations, of which it answers
/// the number.
fn timed(threads: usize, work: impl Fn(usize) -> usize + Sync) -> f64 {
    let (barrier, clock, work) = (&Barrier::new(threads), Clock::start(), &work);
    let run = move |thread| {
        barrier.wait();
        let start = clock.now();
        let operations = work(thread);
        nanos_each(clock.now().since(start), operations)
    };
    let total: f64 = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        all.into_iter().map(joined).sum()
    });
    total / threads as f64
}

fn nanos_each(time: Duration, operations: usize) -> f64 {
    time.as_secs_f64() * 1e9 / operations.max(1) as f64
}

fn trace(load: &Load, thread: usize) -> &[u32] {
    load.traces.get(thread).map_or(&[], Vec::as_slice)
}

pub(super) fn mix<C: Contender>(subject: &C, load: &Load) -> f64 {
    timed(load.traces.len(), |thread| {
        let (mut hand, mut fresh) = (C::Hand::default(), FRESH << (1 + thread));
        for (at, number) in trace(load, thread).iter().enumerate() {
            let mut wanted = u64::from(*number);
            if at % FRESH_EVERY == FRESH_EVERY - 1 {
                fresh += 1;
                wanted = fresh;
            }
            if let Some(pin) = read_through(subject, &mut hand, wanted) {
                subject.release(pin);
            }
        }
        trace(load, thread).len()
    })
}

/// A hit, or an insert where it is missing.
fn read_through<C: Contender>(subject: &C, hand: &mut C::Hand, number: u64) -> Option<C::Pin> {
    let key = key(number);
    subject.read(hand, &key).or_else(|| subject.insert(hand, &key, payload(number)))
}

fn keys(numbers: &[u32], out: &mut Vec<BlockKey>) {
    out.clear();
    out.extend(numbers.iter().map(|number| key(u64::from(*number))));
}

pub(super) fn touch<C: Ranked>(subject: &C, load: &Load, batch: usize) -> f64 {
    timed(load.traces.len(), |thread| {
        let (mut hand, mut batched) = (C::Hand::default(), Vec::new());
        for numbers in trace(load, thread).chunks(batch) {
            keys(numbers, &mut batched);
            subject.touch(&mut hand, &batched);
        }
        trace(load, thread).len()
    })
}

/// Nanoseconds of a block in a commit; the pins that it ends are not counted.
fn commit<C: Ranked>(subject: &C, load: &Load) -> f64 {
    let (threads, clock) = (load.traces.len(), Clock::start());
    let share = load.order.len().div_ceil(threads);
    let work = |part: &[u32], operations: usize| {
        let (mut hand, mut batched, mut pins) = (C::Hand::default(), Vec::new(), Vec::new());
        let (mut time, mut blocks) = (Duration::ZERO, 0);
        for pass in 0..REQUESTERS {
            for numbers in part.chunks(BATCH) {
                if blocks >= operations {
                    return nanos_each(time, blocks);
                }
                keys(numbers, &mut batched);
                subject.lend(&mut hand, &batched, &mut pins);
                blocks += pins.len();
                let start = clock.now();
                subject.commit(&mut hand, &mut pins, RequesterIndex(pass));
                time += clock.now().since(start);
            }
        }
        nanos_each(time, blocks)
    };
    let work = &work;
    let total: f64 = std::thread::scope(|scope| {
        let all: Vec<_> = load
            .order
            .chunks(share)
            .zip(&load.traces)
            .map(|(part, trace)| scope.spawn(move || work(part, trace.len())))
            .collect();
        all.into_iter().map(joined).sum()
    });
    total / threads as f64
}

/// The latencies beside a reclaimer. One of the threads is the reclaimer, so one alone has none.
fn storms<C: Contender>(subject: &C, load: &Load, numbers: &mut Numbers) -> Result<(), CliError> {
    if load.traces.len() < 2 {
        return Ok(());
    }
    let lend = storm(subject, load, BATCH)?;
    numbers.extend(Measure::LEND.into_iter().zip(lend.percentiles()));
    let pin = storm(subject, load, 1)?;
    numbers.extend(Measure::PIN.into_iter().zip(pin.percentiles()));
    Ok(())
}

fn storm<C: Contender>(subject: &C, load: &Load, batch: usize) -> Result<Latency, CliError> {
    let (stop, clock) = (&AtomicBool::new(false), Clock::start());
    let lend = |numbers: &[u32]| -> Result<Latency, CliError> {
        let (mut hand, mut batched, mut pins) = (C::Hand::default(), Vec::new(), Vec::new());
        let mut times = Latency::new()?;
        for numbers in numbers.chunks(batch) {
            keys(numbers, &mut batched);
            let start = clock.now();
            subject.lend(&mut hand, &batched, &mut pins);
            times.record(clock.now().since(start));
            subject.give_back(&mut pins);
            // A thread that serves requests gives way when it waits for the next one. Lenders that
            // never wait would have more of their lends than one in a thousand interrupted by the end
            // of a time slice, and measure that: 4 ms, with any store.
            std::thread::yield_now();
        }
        Ok(times)
    };
    let lend = &lend;
    std::thread::scope(|scope: &Scope<'_, '_>| {
        scope.spawn(|| reclaim_without_pause(subject, load.entries, stop));
        let lenders: Vec<_> =
            load.traces.iter().skip(1).map(|numbers| scope.spawn(move || lend(numbers))).collect();
        let all: Vec<_> = lenders.into_iter().map(joined).collect();
        stop.store(true, Ordering::Relaxed);
        let mut sum = Latency::new()?;
        for times in all {
            sum.add(&times?)?;
        }
        Ok(sum)
    })
}

/// Evicts, and inserts as many: fresh blocks and, in turn, any of those that readers ask for.
fn reclaim_without_pause<C: Contender>(subject: &C, entries: u32, stop: &AtomicBool) {
    let (mut hand, mut random, mut fresh) = (C::Hand::default(), Random::new(3), FRESH);
    while !stop.load(Ordering::Relaxed) {
        subject.reclaim(&mut hand, STORM);
        for at in 0..STORM {
            fresh += 1;
            let number = if at % 2 == 0 { fresh } else { u64::from(random.below(entries)) };
            if let Some(pin) = subject.insert(&mut hand, &key(number), payload(number)) {
                subject.release(pin);
            }
        }
    }
}

/// Nanoseconds of one victim out of so many entries, of which, where `pinned`, all but one in
/// [`FREE_EVERY`] are pinned. `None` for what evicts when it likes.
pub(super) fn reclaim<C: Contender>(
    entries: u32,
    order: &[u32],
    pinned: bool,
) -> Result<Option<f64>, CliError> {
    let subject = filled::<C>(entries, order)?;
    let (mut hand, mut batched, mut pins) = (C::Hand::default(), Vec::new(), Vec::new());
    if pinned {
        for numbers in order.chunks(FREE_EVERY) {
            keys(numbers.get(1..).unwrap_or_default(), &mut batched);
            subject.lend(&mut hand, &batched, &mut pins);
        }
    }
    let clock = Clock::start();
    let start = clock.now();
    let Some(victims) = subject.reclaim(&mut hand, VICTIMS) else {
        return Ok(None);
    };
    let time = clock.now().since(start);
    subject.give_back(&mut pins);
    Ok(Some(nanos_each(time, victims)))
}
