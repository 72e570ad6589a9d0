//! Whole gets: what an engine asks of its node, through the local door and the store, for blocks that
//! another node holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::blocks::{BENCH, hashes, order};
use super::control::FilledNode;
use super::fabric::{DeviceArgs, Transport};
use super::row::{Load, Measured, Subject};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::cli::bench::cpu::CpuTime;
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
    /// Blocks that its clients have asked for, together: they go through one order of blocks, since one
    /// that read after another would find its blocks here.
    asked: AtomicUsize,
    _cluster: Cluster,
}

impl Reader {
    pub(super) fn start(
        holder: &FilledNode,
        (transport, device): (Transport, &DeviceArgs),
        (pool, streams): (u64, usize),
    ) -> Result<Self, CliError> {
        let cluster = Cluster::new(std::env::current_exe().map_err(CliError::failed)?)?;
        let (pool, streams) = (pool.to_string(), streams.to_string());
        let mut arguments = vec!["--pool", &pool, "--streams", &streams, "--log", "warn"];
        arguments.extend(["--transport", transport.as_str()]);
        let device = device.arguments();
        arguments.extend(device.iter().map(String::as_str));
        let node = cluster.node("bench-reader", holder.registry, &arguments)?;
        Ok(Self { node, asked: AtomicUsize::new(0), _cluster: cluster })
    }

    pub(super) fn cpu(&self) -> Result<CpuTime, CliError> {
        CpuTime::of(self.node.id())
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
        let client = self.0.node.client()?;
        let namespace: Namespace =
            format!("{BENCH}{}", load.size).parse().map_err(CliError::failed)?;
        let (hashes, clock) = (hashes(load.size, load.count), Clock::start());
        let order = order(load.count, load.run, ORDER);
        let next = || -> Vec<BlockHash> {
            let first = self.0.asked.fetch_add(load.batch, Ordering::Relaxed);
            let numbers = order.iter().cycle().skip(first % order.len().max(1)).take(load.batch);
            numbers.filter_map(|at| hashes.get(*at as usize).copied()).collect()
        };
        let (mut measured, mut patience) = (Measured::new()?, Deadline::after(PATIENCE));
        // Not timed: the connection is made for the first one.
        let mut start = None;
        loop {
            let begun = clock.now();
            let is_over = start.is_some_and(|start| begun >= start + load.time);
            if is_over || bench.is_interrupted() {
                break;
            }
            match ask(&client, &namespace, &next(), &clock, &mut measured)? {
                Got::Busy if patience.pause(PAUSE) => {}
                Got::Busy => {
                    return Err(CliError::failed("the node had no room for a batch for long"));
                }
                Got::Blocks { .. } if start.is_none() => {
                    start = Some(clock.now());
                    measured = Measured::new()?;
                }
                Got::Blocks { time } => {
                    measured.latency.record(time);
                    patience = Deadline::after(PATIENCE);
                }
            }
        }
        measured.elapsed = clock.now().since(start.unwrap_or_default());
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
            Acquired::Busy => busy += 1,
            Acquired::NotFound | Acquired::Failed => {
                return Err(CliError::failed(format!("a block did not come: {block:?}")));
            }
        }
    }
    measured.busy += busy;
    Ok(if busy > 0 { Got::Busy } else { Got::Blocks { time } })
}
