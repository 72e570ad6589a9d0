//! What the end of a node blocks.

use std::time::Duration;

use super::rates::{Batches, LEASE, identity, stamp};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::registry::{Batch, Directory, DirectoryOptions, Heartbeat, Presence, RegistryEpoch};
use crate::runtime::clock::Clock;
use crate::sys::clock::of_thread;

/// Steps of a sweep between two looks at whether it is done: a look passes all shards.
const STEPS: u32 = 64;

/// What the end of a node took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Death {
    /// Until nothing that it announced counts any more.
    pub(super) void: Duration,
    /// Steps of the sweep that then removed it.
    pub(super) steps: u32,
    /// The one of them that was longest on the clock. A step takes a shard's lock again and again, so that
    /// no call waits for all of it.
    pub(super) longest: Step,
    /// The most processor time that any of them took.
    pub(super) most_work: Duration,
}

/// What a step of a sweep took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Step {
    /// On the clock, with whatever else the processor did meanwhile.
    pub(super) time: Duration,
    /// Processor time of the thread that swept, page faults and the allocator's calls among it.
    pub(super) work: Duration,
}

impl Step {
    fn measure(directory: &Directory, clock: &Clock) -> Self {
        let (start, worked) = (clock.now(), of_thread());
        directory.sweep(start);
        let work = of_thread().saturating_sub(worked);
        Self { time: clock.now().since(start), work }
    }
}

impl Death {
    /// Ends a node that has announced all this; `None` where a signal came first.
    pub(super) fn measure(batches: &Batches, bench: &Bench) -> Result<Option<Self>, CliError> {
        let clock = Clock::start();
        // The node is silent while all this is announced.
        let options = DirectoryOptions { lease: LEASE, ..DirectoryOptions::default() };
        let directory = Directory::new(RegistryEpoch(1), options);
        let heartbeat = |presence| Heartbeat { presence, ..Heartbeat::default() };
        let beat = |presence| {
            let beat = directory.heartbeat(&identity(), heartbeat(presence), clock.now());
            beat.map_err(CliError::failed)
        };
        let number = beat(Presence::Afresh)?.registration.number;
        for (keys, sequence) in batches.iter().zip(1..) {
            if bench.is_interrupted() {
                return Ok(None);
            }
            let batch = Batch { stamp: stamp(number, sequence), keys };
            directory.announce(batch, clock.now()).map_err(CliError::failed)?;
        }
        let start = clock.now();
        beat(Presence::Leaving)?;
        let void = clock.now().since(start);
        let (mut steps, mut longest, mut most_work) = (0, Step::default(), Duration::ZERO);
        while directory.stats(clock.now()).owners > 0 {
            if bench.is_interrupted() {
                return Ok(None);
            }
            for _ in 0..STEPS {
                let step = Step::measure(&directory, &clock);
                most_work = most_work.max(step.work);
                if step.time > longest.time {
                    longest = step;
                }
            }
            steps += STEPS;
        }
        Ok(Some(Self { void, steps, longest, most_work }))
    }
}
