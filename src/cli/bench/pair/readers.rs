//! Clients of the reading node, on a thread each, that ask for one batch after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{BLOCK_BYTES, Outcome, Pair, Sample, blocks, namespace};
use crate::cli::CliError;
use crate::client::{Acquired, Client, ClientError};
use crate::protocol::door::{BlockOrigin, Source};
use crate::runtime::clock::Clock;
use crate::runtime::deadline::Deadline;
use crate::sync::{Mutex, lock};
use crate::types::{BlockHash, Namespace, Timestamp};

/// How long a client leaves a node alone that gave it no blocks, unless that asks for more.
const PAUSE: Duration = Duration::from_millis(1);

/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(2);

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    samples: Mutex<Vec<Sample>>,
    /// Blocks asked for so far, by all together: they go through one order, or one would find here what
    /// another one has read.
    asked: AtomicUsize,
}

/// Reads that go on until this is dropped.
#[derive(Debug)]
pub(in crate::cli::bench) struct Readers {
    shared: Arc<Shared>,
    clock: Clock,
    threads: Vec<JoinHandle<Result<(), CliError>>>,
}

impl Readers {
    pub(in crate::cli::bench) fn start(pair: &Pair) -> Result<Self, CliError> {
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            samples: Mutex::new(Vec::new()),
            asked: AtomicUsize::new(0),
        });
        let (clock, batch) = (Clock::start(), usize::from(pair.args().batch));
        let mut readers = Self { shared, clock, threads: Vec::new() };
        for _ in 0..pair.args().depth {
            let client = pair.reader.client()?;
            let shared = Arc::clone(&readers.shared);
            let work = move || read(&client, batch, clock, &shared);
            let thread = std::thread::Builder::new().name("reader".into()).spawn(work);
            readers.threads.push(thread.map_err(CliError::failed)?);
        }
        Ok(readers)
    }

    /// The time of the samples.
    pub(in crate::cli::bench) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// All reads that have ended, in no order.
    pub(in crate::cli::bench) fn samples(&self) -> Vec<Sample> {
        lock(&self.shared.samples).clone()
    }

    /// The read that ended last.
    pub(in crate::cli::bench) fn latest(&self) -> Option<Sample> {
        lock(&self.shared.samples).last().copied()
    }

    /// The first end of a read that `is_it`, if it comes in time and nobody asks to end before.
    pub(in crate::cli::bench) fn first(
        &self,
        within: Duration,
        interrupted: &dyn Fn() -> bool,
        is_it: impl Fn(&Sample) -> bool,
    ) -> Result<Option<Sample>, CliError> {
        let (deadline, mut seen) = (Deadline::after(within), 0);
        loop {
            if self.threads.iter().any(JoinHandle::is_finished) {
                return Err(CliError::failed("a reader's client ended: the reading node is gone"));
            }
            let samples = lock(&self.shared.samples);
            let found = samples.iter().skip(seen).find(|sample| is_it(sample)).copied();
            seen = samples.len();
            drop(samples);
            if found.is_some() || interrupted() || !deadline.pause(LOOK) {
                return Ok(found);
            }
        }
    }

    /// Ends the reads and answers all of them.
    pub(in crate::cli::bench) fn end(mut self) -> Result<Vec<Sample>, CliError> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(self.samples())
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // What went wrong before is told already.
            drop(thread.join());
        }
    }
}

fn read(client: &Client, batch: usize, clock: Clock, shared: &Shared) -> Result<(), CliError> {
    let (namespace, blocks) = (namespace()?, blocks());
    while !shared.stop.load(Ordering::Relaxed) {
        let first = shared.asked.fetch_add(batch, Ordering::Relaxed);
        let numbers: Vec<usize> = (first..first + batch).map(|at| at % blocks.len()).collect();
        let hashes: Vec<BlockHash> =
            numbers.iter().filter_map(|at| blocks.get(*at)).copied().collect();
        let begun = clock.now();
        let (outcome, pause) = read_one(client, &namespace, &hashes, &numbers)?;
        let ended = clock.now();
        lock(&shared.samples).push(Sample { begun, ended, outcome });
        if let Some(pause) = pause {
            // The loop looks whether it is to end.
            let _more = Deadline::after(pause).pause(pause);
        }
    }
    Ok(())
}

/// One read, and how long to wait after it.
fn read_one(
    client: &Client,
    namespace: &Namespace,
    hashes: &[BlockHash],
    numbers: &[usize],
) -> Result<(Outcome, Option<Duration>), CliError> {
    let mut outcome = Outcome::default();
    let got = match client.acquire(namespace, hashes, Source::Anywhere) {
        Ok(got) => got,
        Err(error) => {
            let pause = error.backpressure().ok_or(error)?;
            outcome.busy = hashes.len() as u64;
            return Ok((outcome, Some(pause.max(PAUSE))));
        }
    };
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    for (block, number) in got.iter().zip(numbers) {
        match block {
            Acquired::Ready(held) => {
                let is_right = match held.read_into(&mut bytes) {
                    Ok(()) => bytes.starts_with(&(*number as u64).to_le_bytes()),
                    Err(ClientError::Checksum { .. }) => false,
                    Err(error) => return Err(error.into()),
                };
                let count = match (is_right, held.origin()) {
                    (false, _) => &mut outcome.wrong,
                    (true, BlockOrigin::Fetched) => &mut outcome.fetched,
                    (true, _) => &mut outcome.hits,
                };
                *count += 1;
            }
            Acquired::NotFound => outcome.not_found += 1,
            Acquired::Busy(_) => outcome.busy += 1,
            Acquired::Failed => outcome.failed += 1,
        }
    }
    let pause = (!outcome.is_good()).then_some(PAUSE);
    Ok((outcome, pause))
}
