//! One point of the sweep: what is asked for, and what came out.

use std::panic::resume_unwind;
use std::sync::Barrier;
use std::time::Duration;

use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::cli::bench::cpu::CpuTime;
use crate::cli::bench::latency::Latency;
use crate::runtime::clock::Clock;
use crate::sys::allocations;
use crate::types::Timestamp;
use crate::verbs::Posts;

/// What one thread does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    /// Bytes of a block.
    pub(super) size: u32,
    /// Blocks that there are to be read.
    pub(super) count: u32,
    /// Blocks asked for at once.
    pub(super) batch: usize,
    /// Batches in flight.
    pub(super) depth: usize,
    /// Blocks that are next to each other on the holder and asked for in one batch, in no order.
    pub(super) run: u32,
    /// Whether neighbours may share a READ.
    pub(super) merge: bool,
    /// For how long.
    pub(super) time: Duration,
    /// What makes its order of blocks.
    pub(super) seed: u64,
}

/// What came of it.
#[derive(Debug, Clone)]
pub(super) struct Measured {
    /// From a batch's request to its last byte.
    pub(super) latency: Latency,
    /// Blocks that came from the holder.
    pub(super) blocks: u64,
    /// Blocks that were here already.
    pub(super) hits: u64,
    /// Blocks that were asked for again, because there was no room.
    pub(super) busy: u64,
    /// READs posted, and calls that gave a device some.
    pub(super) posts: Posts,
    /// From the first request to the last byte.
    pub(super) elapsed: Duration,
    /// Processor time of the threads that read, in that time.
    pub(super) cpu: CpuTime,
    /// Heap allocations of those threads, in that time.
    pub(super) allocations: u64,
}

impl Measured {
    pub(super) fn new() -> Result<Self, CliError> {
        Ok(Self {
            latency: Latency::new()?,
            blocks: 0,
            hits: 0,
            busy: 0,
            posts: Posts::default(),
            elapsed: Duration::ZERO,
            cpu: CpuTime::default(),
            allocations: 0,
        })
    }

    /// Replaces what was asked of the fabric by what its device was given between these, where it has one.
    pub(super) fn note_posts(&mut self, before: Option<Posts>, after: Option<Posts>) {
        if let (Some(before), Some(after)) = (before, after) {
            let works = after.works - before.works;
            self.posts = Posts { works, doorbells: after.doorbells - before.doorbells };
        }
    }

    /// Takes what another thread measured at the same time.
    fn add(&mut self, other: &Self) -> Result<(), CliError> {
        let Self { latency, blocks, hits, busy, posts, elapsed, cpu, allocations } = other;
        self.latency.add(latency)?;
        self.blocks += blocks;
        self.hits += hits;
        self.busy += busy;
        self.posts = [self.posts, *posts].into_iter().sum();
        self.elapsed = self.elapsed.max(*elapsed);
        self.cpu = self.cpu + *cpu;
        self.allocations += allocations;
        Ok(())
    }
}

/// The beginning of what is measured on a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Start {
    pub(super) at: Timestamp,
    cpu: CpuTime,
    allocations: u64,
}

impl Start {
    pub(super) fn now(clock: &Clock) -> Self {
        let (cpu, allocations) = (CpuTime::of_thread(), allocations::of_thread());
        Self { at: clock.now(), cpu, allocations }
    }

    /// Notes what the time until now took.
    pub(super) fn end(self, clock: &Clock, measured: &mut Measured) {
        measured.elapsed = clock.now().since(self.at);
        measured.allocations = allocations::of_thread() - self.allocations;
        measured.cpu = CpuTime::of_thread() - self.cpu;
    }
}

/// What reads, on a thread of its own.
pub(super) trait Subject: Send {
    fn measure(&mut self, load: &Load, bench: &Bench) -> Result<Measured, CliError>;
}

/// Runs all of them at once, each with its own order of blocks.
pub(super) fn together(
    subjects: &mut [Box<dyn Subject>],
    load: &Load,
    bench: &Bench,
) -> Result<Measured, CliError> {
    let barrier = &Barrier::new(subjects.len());
    let mut sum = Measured::new()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = subjects
            .iter_mut()
            .zip(load.seed..)
            .map(|(subject, seed)| {
                scope.spawn(move || {
                    barrier.wait();
                    subject.measure(&Load { seed, ..*load }, bench)
                })
            })
            .collect();
        let all: Vec<_> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect();
        all.into_iter().try_for_each(|measured| sum.add(&measured?))
    })?;
    Ok(sum)
}
