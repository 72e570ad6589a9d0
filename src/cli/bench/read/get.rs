//! Whole gets: what an engine asks of its node, through the local door and the store, for blocks that
//! another node holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::blocks::{BENCH, SET_MAX, hashes, order};
use super::control::FilledNode;
use super::fabric::{DeviceArgs, Transport};
use super::hold::{METRICS, save};
use super::resident;
use super::row::{Load, Measured, Start, Subject};
use super::usage::Usage;
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::cli::cluster::{Cluster, Process};
use crate::client::{Acquired, Client};
use crate::protocol::door::{BlockOrigin, Source};
use crate::runtime::clock::Clock;
use crate::runtime::deadline::Deadline;
use crate::types::{BlockHash, Namespace};

/// What makes the order of blocks.
const ORDER: u64 = 1;

/// How long to leave a node alone that has no room.
const PAUSE: Duration = Duration::from_millis(1);

/// The longest that a node may have none.
const PATIENCE: Duration = Duration::from_secs(20);

/// The node that reads, as a child process. Its pool is smaller than the set of blocks that are read
/// in turn, so that each has been evicted when its turn comes again.
pub(super) struct Reader {
    node: Process,
    /// Bytes of its pool.
    pool: u64,
    /// Blocks that its clients have asked for, together: they go through one order of blocks, since one
    /// that read after another would find its blocks here.
    asked: AtomicUsize,
    _cluster: Cluster,
}

impl Reader {
    /// `keeps`: with room for all blocks that [`Self::save`] saves, where else few stay for long.
    pub(super) fn start(
        holder: &FilledNode,
        (transport, device): (Transport, &DeviceArgs),
        (pool, streams): (u64, usize),
        keeps: bool,
    ) -> Result<Self, CliError> {
        let cluster = Cluster::new(std::env::current_exe().map_err(CliError::failed)?)?;
        let (bytes, streams) = (pool.to_string(), streams.to_string());
        let mut arguments = vec!["--pool", &bytes, "--streams", &streams, "--log", "warn"];
        arguments.extend(["--metrics-listen", METRICS]);
        let capacity = (2 * SET_MAX).to_string();
        if keeps {
            arguments.extend(["--capacity", &capacity]);
        }
        arguments.extend(["--transport", transport.as_str()]);
        let device = device.arguments();
        arguments.extend(device.iter().map(String::as_str));
        let node = cluster.node("bench-reader", holder.registry, &arguments)?;
        Ok(Self { node, pool, asked: AtomicUsize::new(0), _cluster: cluster })
    }

    /// What the node has used so far; `start`: so that the difference to a later one is what a row took.
    pub(super) fn usage(&self, start: bool) -> Result<Usage, CliError> {
        if start { Usage::start_of(&self.node) } else { Usage::of(&self.node) }
    }

    pub(super) fn client(&self) -> Result<Client, CliError> {
        self.node.client()
    }

    /// Saves blocks of this size on it, as many as leave its pool half empty, so that none is evicted;
    /// answers how many.
    pub(super) fn save(&self, size: u32) -> Result<u32, CliError> {
        let count = u32::try_from(self.pool / 2 / u64::from(size)).unwrap_or(SET_MAX);
        let count = count.clamp(1, SET_MAX);
        save(&self.client()?, &resident::namespace(size)?, (size, count))?;
        Ok(count)
    }
}

/// One client of that node.
pub(super) struct Engine(pub(super) Arc<Reader>);

/// What one call brought.
enum Got {
    Blocks {
        time: Duration,
    },
    /// The node had no room for some of it.
    Busy,
}

impl Subject for Engine {
    /// Asks for one batch after the other until the time is over.
    fn measure(&mut self, load: &Load, bench: &Bench) -> Result<Measured, CliError> {
        let client = self.0.client()?;
        let namespace: Namespace =
            format!("{BENCH}{}", load.size).parse().map_err(CliError::failed)?;
        let (hashes, clock) = (hashes(load.size, load.count), Clock::start());
        let order = order(load.count, load.run, load.batch, ORDER);
        let next = || -> Vec<BlockHash> {
            let first = self.0.asked.fetch_add(load.batch, Ordering::Relaxed);
            let numbers = order.iter().cycle().skip(first % order.len().max(1)).take(load.batch);
            numbers.filter_map(|at| hashes.get(*at as usize).copied()).collect()
        };
        let (mut measured, mut patience) = (Measured::new()?, Deadline::after(PATIENCE));
        // Not timed: the connection is made for the first one.
        let mut start: Option<Start> = None;
        loop {
            let begun = clock.now();
            let is_over = start.is_some_and(|start| begun >= start.at + load.time);
            if is_over || bench.is_interrupted() {
                break;
            }
            match ask(&client, &namespace, &next(), &clock, &mut measured)? {
                Got::Busy if patience.pause(PAUSE) => {}
                Got::Busy => {
                    return Err(CliError::failed("the node had no room for a batch for long"));
                }
                Got::Blocks { .. } if start.is_none() => {
                    measured = Measured::new()?;
                    start = Some(Start::now(&clock));
                }
                Got::Blocks { time } => {
                    measured.latency.record(time);
                    patience = Deadline::after(PATIENCE);
                }
            }
        }
        if let Some(start) = start {
            start.end(&clock, &mut measured);
        }
        Ok(measured)
    }
}

fn ask(
    client: &Client,
    namespace: &Namespace,
    batch: &[BlockHash],
    clock: &Clock,
    measured: &mut Measured,
) -> Result<Got, CliError> {
    let begun = clock.now();
    let got = match client.acquire(namespace, batch, Source::Anywhere) {
        Ok(got) => got,
        Err(error) if error.backpressure().is_some() => {
            measured.busy += batch.len() as u64;
            return Ok(Got::Busy);
        }
        Err(error) => return Err(error.into()),
    };
    let time = clock.now().since(begun);
    let mut busy = 0;
    for block in &got {
        match block {
            Acquired::Ready(held) if held.origin() == BlockOrigin::Fetched => measured.blocks += 1,
            Acquired::Ready(_) => measured.hits += 1,
            Acquired::Busy(_) => busy += 1,
            Acquired::NotFound | Acquired::Failed => {
                return Err(CliError::failed(format!("a block did not come: {block:?}")));
            }
        }
    }
    measured.busy += busy;
    Ok(if busy > 0 { Got::Busy } else { Got::Blocks { time } })
}
