//! Gets of blocks that the node holds: they are pinned through the local door, could be read in place,
//! and are let go of. No byte of them moves; what counts is what a client spends on it.

use std::sync::Arc;

use super::blocks::{BENCH, hashes, order};
use super::get::Reader;
use super::row::{Load, Measured, Start, Subject};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::client::Acquired;
use crate::protocol::door::Source;
use crate::runtime::clock::Clock;
use crate::types::{BlockHash, Namespace};

/// Where those of one size are. Nobody else has them.
pub(super) fn namespace(size: u32) -> Result<Namespace, CliError> {
    format!("{BENCH}resident-{size}").parse().map_err(CliError::failed)
}

/// One client of that node.
pub(super) struct Engine(pub(super) Arc<Reader>);

impl Subject for Engine {
    /// Asks for one batch after the other until the time is over.
    fn measure(&mut self, load: &Load, bench: &Bench) -> Result<Measured, CliError> {
        let (client, namespace) = (self.0.client()?, namespace(load.size)?);
        let hashes = hashes(load.size, load.count);
        let order = order(load.count, load.run, load.batch, load.seed);
        // Those of the front again behind the end, so that each batch is one slice.
        let numbers = order.iter().cycle().take(order.len() + load.batch);
        let turn: Vec<BlockHash> =
            numbers.filter_map(|at| hashes.get(*at as usize).copied()).collect();
        let mut at = 0;
        let (mut measured, clock) = (Measured::new()?, Clock::start());
        let start = Start::now(&clock);
        loop {
            let batch = turn.get(at..at + load.batch).unwrap_or_default();
            at = (at + load.batch) % order.len().max(1);
            let begun = clock.now();
            if begun >= start.at + load.time || bench.is_interrupted() {
                break;
            }
            let got = client.acquire(&namespace, batch, Source::Here)?;
            measured.latency.record(clock.now().since(begun));
            if let Some(bad) = got.iter().find(|it| !matches!(it, Acquired::Ready(_))) {
                return Err(CliError::failed(format!("a block is not there: {bad:?}")));
            }
            measured.blocks += got.len() as u64;
            // Here they are let go of, which is one call for all.
        }
        start.end(&clock, &mut measured);
        Ok(measured)
    }
}
