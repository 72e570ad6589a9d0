//! Bare READs: the plan, the in-flight table and the fabric, as a fetch uses them, without lease, store
//! or checksum.

use std::sync::Arc;
use std::time::Duration;

use super::blocks::order;
use super::control::Served;
use super::fabric::Wire;
use super::row::{Load, Measured, Start, Subject};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::fabric::{
    Access, ConnectionId, EventBatch, FabricEvent, ReadBatch, Region, RegisteredSpan,
};
use crate::memory::HostPool;
use crate::runtime::clock::Clock;
use crate::transfer::{FinishedBlock, ReadList, TransferId, Transfers};
use crate::types::Timestamp;

/// How long a poll waits.
const WAIT: Duration = Duration::from_millis(20);

/// The longest that a connection, or a batch, may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// One connection, and what is in flight on it.
pub(super) struct Reader<F> {
    fabric: F,
    connection: ConnectionId,
    local: Region,
    served: Served,
    transfers: Transfers<()>,
    list: ReadList,
    posts: ReadBatch,
    events: EventBatch,
    finished: Vec<FinishedBlock<()>>,
    clock: Clock,
}

/// A batch that is being read.
struct Running {
    id: TransferId,
    begun: Timestamp,
    slot: u64,
}

impl<F: Wire> Reader<F> {
    /// Connects to what the holder serves.
    pub(super) fn connect(
        mut fabric: F,
        pool: &Arc<HostPool>,
        served: Served,
    ) -> Result<Self, CliError> {
        let clock = Clock::start();
        let local = fabric.register(Arc::clone(pool.mapping()), Access::Local);
        let local = local.map_err(CliError::failed)?;
        let connection = fabric.connect(&served.endpoint()).map_err(CliError::failed)?;
        let mut events = EventBatch::default();
        let end = clock.now() + PATIENCE;
        loop {
            events.clear();
            fabric.poll(&mut events, WAIT).map_err(CliError::failed)?;
            // The holder says so once we may read.
            if events.events.iter().any(|event| matches!(event, FabricEvent::Message { .. })) {
                break;
            }
            let closed = events.events.iter().find_map(|event| match event {
                FabricEvent::Closed { reason, .. } => Some(format!("it closed: {reason:?}")),
                _ => None,
            });
            let late = (clock.now() >= end).then(|| "it took too long".to_owned());
            if let Some(why) = closed.or(late) {
                let to = served.address;
                return Err(CliError::failed(format!("no connection to {to}: {why}")));
            }
        }
        fabric.admit(connection).map_err(CliError::failed)?;
        Ok(Self {
            transfers: Transfers::new(fabric.capabilities()),
            fabric,
            connection,
            local,
            served,
            list: ReadList::default(),
            posts: ReadBatch::default(),
            events,
            finished: Vec::new(),
            clock,
        })
    }

    fn begin(
        &mut self,
        load: &Load,
        slot: u64,
        numbers: &mut impl Iterator<Item = u32>,
    ) -> Running {
        let begun = self.clock.now();
        let (served, region, size) = (self.served, self.local.id, load.size);
        let first = slot * u64::from(size) * load.batch as u64;
        self.list.clear();
        for (at, number) in numbers.take(load.batch).enumerate() {
            let remote = served.span(u64::from(number) * u64::from(size), size);
            let offset = first + at as u64 * u64::from(size);
            let local = RegisteredSpan { region, offset, len: size };
            // Both sides have the length `size`.
            self.list.push([remote], [local]).ok();
        }
        let blocks = std::iter::repeat_n((), self.list.len());
        let id = self.transfers.begin(self.connection, begun + PATIENCE, &self.list, blocks);
        Running { id, begun, slot }
    }

    fn post(&mut self, measured: &mut Measured) -> Result<(), CliError> {
        while let Some(connection) = self.transfers.poll_post(&mut self.posts) {
            measured.posts.works += self.posts.works.len() as u64;
            self.fabric.post(connection, &self.posts).map_err(CliError::failed)?;
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<(), CliError> {
        self.events.clear();
        self.fabric.poll(&mut self.events, WAIT).map_err(CliError::failed)?;
        let now = self.clock.now();
        for event in &self.events.events {
            match event {
                FabricEvent::Completed(completion) => {
                    let is_ours = self.transfers.handle_completion(completion, now);
                    if !is_ours {
                        return Err(CliError::failed("a completion matches no READ"));
                    }
                }
                FabricEvent::Closed { reason, .. } => {
                    return Err(CliError::failed(format!("the holder is gone: {reason:?}")));
                }
                _ => {}
            }
        }
        if self.transfers.poll_timeout().is_some_and(|end| end <= now) {
            return Err(CliError::failed("a batch took more than 10 s"));
        }
        Ok(())
    }
}

impl<F: Wire> Subject for Reader<F> {
    /// Keeps `load.depth` batches in flight until the time is over, then waits for their end.
    fn measure(&mut self, load: &Load, bench: &Bench) -> Result<Measured, CliError> {
        let count = self.served.len / u64::from(load.size);
        let order =
            order(u32::try_from(count).unwrap_or(u32::MAX), load.run, load.batch, load.seed);
        let mut numbers = order.iter().cycle().copied();
        let mut measured = Measured::new()?;
        let mut running = Vec::with_capacity(load.depth);
        let mut capabilities = self.fabric.capabilities();
        if !load.merge {
            capabilities.read_bytes = capabilities.read_bytes.min(load.size);
        }
        self.transfers = Transfers::new(capabilities);
        let posted = self.fabric.posts();
        let start = Start::now(&self.clock);
        let end = start.at + load.time;
        for slot in 0..load.depth as u64 {
            running.push(self.begin(load, slot, &mut numbers));
        }
        while !running.is_empty() {
            self.post(&mut measured)?;
            self.poll()?;
            while let Some(done) = self.transfers.poll_finished(&mut self.finished) {
                let now = self.clock.now();
                if let Some(block) = self.finished.iter().find(|block| block.outcome.is_err()) {
                    let why = format!("a READ failed: {:?}", block.outcome);
                    return Err(CliError::failed(why));
                }
                measured.blocks += self.finished.len() as u64;
                self.finished.clear();
                let Some(at) = running.iter().position(|batch| batch.id == done.id) else {
                    continue;
                };
                let Running { begun, slot, .. } = running.swap_remove(at);
                measured.latency.record(now.since(begun));
                if now < end && !bench.is_interrupted() {
                    running.push(self.begin(load, slot, &mut numbers));
                }
            }
        }
        start.end(&self.clock, &mut measured);
        measured.note_posts(posted, self.fabric.posts());
        Ok(measured)
    }
}
