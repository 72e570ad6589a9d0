//! What the end of a node blocks.

use std::time::Duration;

use super::rates::{Batches, LEASE, identity, stamp};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::registry::{Batch, Directory, DirectoryOptions, Heartbeat, Presence, RegistryEpoch};
use crate::runtime::clock::Clock;

/// Steps of a sweep between two looks at whether it is done: a look passes all shards.
const STEPS: u32 = 64;

/// What the end of a node took.
#[derive(Debug, Clone, Copy)]
pub(super) struct Death {
    /// Until nothing that it announced counts any more.
    pub(super) void: Duration,
    /// Steps of the sweep that then removed it.
    pub(super) steps: u32,
    /// The longest of them, with the memory that it gave back to the system, which it does without a lock: no
    /// call waits for as long.
    pub(super) longest_step: Duration,
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
        let (mut steps, mut longest_step) = (0, Duration::ZERO);
        while directory.stats(clock.now()).owners > 0 {
            if bench.is_interrupted() {
                return Ok(None);
            }
            for _ in 0..STEPS {
                let start = clock.now();
                directory.sweep(start);
                longest_step = longest_step.max(clock.now().since(start));
            }
            steps += STEPS;
        }
        Ok(Some(Self { void, steps, longest_step }))
    }
}
