//! Leased reads: lend, READ, checksum, completion and rank, by the peer core that a node runs, against a
//! real node. What arrives is not stored.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::blocks::{BENCH, hashes, order};
use super::control::FilledNode;
use super::fabric::Wire;
use super::row::{Load, Measured, Start, Subject};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::event::Discard;
use crate::fabric::{Access, EventBatch, FabricEvent, ReadBatch, Region, RegisteredSpan};
use crate::health::BreakerConfig;
use crate::lease::LeaseConfig;
use crate::memory::HostPool;
use crate::peer::{
    FetchId, FetchOutcome, FetchRequest, Landing, LocalNode, Output, PeerConfig, Peers, Pressure,
    Published, RequesterConfig, Wish,
};
use crate::policy::Policy;
use crate::protocol::{Place, SecretKey};
use crate::runtime::clock::Clock;
use crate::shm::PeerEndpoint;
use crate::store::{Found, Payload, Store, StoreConfig};
use crate::types::{
    BlockHash, BlockKey, EvictionRank, Extent, Generation, Namespace, NamespaceId, NodeId, PoolId,
    RequesterId, ResidentId, Timestamp,
};

/// How long a poll waits at most.
const WAIT: Duration = Duration::from_millis(20);

/// The longest that a holder may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Gives out the pool from front to back, over and over: what was landed is of no further use.
#[derive(Debug)]
struct Scratch {
    pool: Arc<HostPool>,
    region: Region,
    next: u64,
}

#[derive(Debug)]
struct Piece {
    offset: u64,
    len: u32,
}

impl Landing for Scratch {
    type Memory = Piece;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Piece>) {
        for len in sizes {
            if self.next + u64::from(*len) > self.region.len {
                self.next = 0;
            }
            out.push(Piece { offset: self.next, len: *len });
            self.next += u64::from(*len);
        }
    }

    fn spans(&self, memory: &Piece) -> impl Iterator<Item = RegisteredSpan> {
        let (region, offset, len) = (self.region.id, memory.offset, memory.len);
        std::iter::once(RegisteredSpan { region, offset, len })
    }

    fn checksum(&self, memory: &Piece) -> u64 {
        let len = u64::from(memory.len);
        self.pool.mapping().checksum(memory.offset, len).unwrap_or_default()
    }

    fn publish(
        &mut self,
        _key: BlockKey,
        memory: Piece,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published {
        let extent = Extent { pool: PoolId(0), offset: memory.offset, len: memory.len };
        let id = ResidentId { slot: 0, generation: Generation(1) };
        Published::Stored(Found { id, payload: Payload { extent, checksum }, rank })
    }

    fn remote(&self, _extent: &Extent) -> Option<Place> {
        None
    }

    fn pause_ms(&self) -> u32 {
        0
    }
}

/// A requester without a node around it.
pub(super) struct Reader<F: Wire> {
    fabric: F,
    peers: Peers<Scratch>,
    landing: Scratch,
    endpoint: PeerEndpoint<SocketAddr>,
    posts: ReadBatch,
    events: EventBatch,
    clock: Clock,
    next: u64,
}

impl<F: Wire> Reader<F> {
    /// With READs of at most `longest` bytes, where not as many as the fabric takes.
    pub(super) fn new(
        mut fabric: F,
        pool: &Arc<HostPool>,
        holder: &FilledNode,
        longest: Option<u32>,
    ) -> Result<Self, CliError> {
        let clock = Clock::start();
        let region = fabric.register(Arc::clone(pool.mapping()), Access::Local);
        let region = region.map_err(CliError::failed)?;
        let mut random = [0; 48];
        getrandom::fill(&mut random).map_err(CliError::failed)?;
        let (mut id, mut nonce_seed) = ([0; 16], [0; 32]);
        id.iter_mut().chain(&mut nonce_seed).zip(random).for_each(|(to, byte)| *to = byte);
        let node = NodeId(id);
        let name = format!("bench-{node}");
        let local = LocalNode {
            node,
            epoch: clock.epoch(),
            requester: name.parse::<RequesterId>().map_err(CliError::failed)?,
            secret: SecretKey::derive(&[]),
            regions: Vec::new(),
            nonce_seed,
        };
        let config = PeerConfig {
            lease: LeaseConfig::default(),
            requester: RequesterConfig {
                lease_margin: Duration::from_secs(1),
                transfer_timeout: Duration::from_secs(30),
                answer_timeout: ANSWER_TIMEOUT,
            },
            pressure: Pressure::default(),
            breaker: BreakerConfig::default(),
        };
        let store = StoreConfig { capacity: 1, policy: Policy::default() };
        let store = Arc::new(Store::new(store, Arc::new(Discard)).map_err(CliError::failed)?);
        let mut capabilities = fabric.capabilities();
        capabilities.read_bytes = capabilities.read_bytes.min(longest.unwrap_or(u32::MAX));
        let peers = Peers::new(local, config, capabilities, store, Arc::new(Discard));
        Ok(Self {
            peers: peers.map_err(CliError::failed)?,
            fabric,
            landing: Scratch { pool: Arc::clone(pool), region, next: 0 },
            endpoint: holder.endpoint(),
            posts: ReadBatch::default(),
            events: EventBatch::default(),
            clock,
            next: 0,
        })
    }

    fn fetch(
        &mut self,
        namespace: NamespaceId,
        hashes: Vec<BlockHash>,
        running: &mut BTreeMap<FetchId, Timestamp>,
    ) {
        let (id, now) = (FetchId(self.next), self.clock.now());
        self.next += 1;
        running.insert(id, now);
        let (node, wish) = (self.endpoint.node, Wish::anywhere(namespace, hashes));
        self.peers.fetch(FetchRequest { id, node, wish }, now);
    }

    /// Goes on until a fetch is over.
    fn finish_one(
        &mut self,
        running: &mut BTreeMap<FetchId, Timestamp>,
        measured: &mut Measured,
    ) -> Result<(), CliError> {
        loop {
            self.carry_out(measured)?;
            if let Some(fetched) = self.peers.poll_fetched() {
                let ready = |it: &&FetchOutcome| matches!(it, FetchOutcome::Ready { .. });
                measured.blocks += fetched.outcomes.iter().filter(ready).count() as u64;
                if let Some(bad) = fetched.outcomes.iter().find(|it| !ready(it)) {
                    return Err(CliError::failed(format!("a block did not come: {bad:?}")));
                }
                if let Some(begun) = running.remove(&fetched.id) {
                    measured.latency.record(self.clock.now().since(begun));
                }
                return Ok(());
            }
            self.events.clear();
            self.fabric.poll(&mut self.events, WAIT).map_err(CliError::failed)?;
            let now = self.clock.now();
            for event in &self.events.events {
                let bytes = match *event {
                    FabricEvent::Message { start, end, .. } => self.events.message(start, end),
                    _ => &[],
                };
                self.peers.handle_event(*event, bytes, &mut self.landing, now);
            }
            if self.peers.poll_timeout().is_some_and(|deadline| deadline <= now) {
                self.peers.handle_timeout(&mut self.landing, now);
            }
        }
    }

    /// Does what the peers ask for, until they ask for nothing.
    fn carry_out(&mut self, measured: &mut Measured) -> Result<(), CliError> {
        while self.peers.has_output() {
            while let Some(output) = self.peers.poll_output() {
                self.carry_out_one(output);
            }
        }
        while let Some(connection) = self.peers.poll_post(&mut self.posts) {
            measured.posts.works += self.posts.works.len() as u64;
            self.fabric.post(connection, &self.posts).map_err(CliError::failed)?;
        }
        Ok(())
    }

    fn carry_out_one(&mut self, output: Output) {
        match output {
            Output::Connect { node } => {
                let made = self.fabric.connect(&self.endpoint).map_err(|error| error.scope());
                self.peers.handle_connecting(node, made, self.clock.now());
            }
            // A connection that closed meanwhile says so by its own event.
            Output::Admit { connection } => {
                self.fabric.admit(connection).ok();
            }
            Output::Send { connection, start, end } => {
                let sent = self.fabric.send(connection, self.peers.message(start, end));
                if let Err(error) = sent {
                    self.peers.handle_send_refused(connection, error.scope());
                }
            }
            // This end lends nothing, so there are no keys to give or to end.
            Output::Grant { .. } | Output::Revoke { .. } => {}
            Output::Close { connection } => self.fabric.close(connection),
            // Nothing is made wider here.
            Output::Compare { connection, .. } => self.peers.handle_compared(connection, false),
        }
    }
}

impl<F: Wire> Subject for Reader<F> {
    /// Keeps `load.depth` leases in flight until the time is over, then waits for their end.
    fn measure(&mut self, load: &Load, bench: &Bench) -> Result<Measured, CliError> {
        let namespace: Namespace =
            format!("{BENCH}{}", load.size).parse().map_err(CliError::failed)?;
        let hashes = hashes(load.size, load.count);
        let order = order(load.count, load.run, load.batch, load.seed);
        let mut numbers = order.iter().cycle().filter_map(|at| hashes.get(*at as usize).copied());
        let mut next = || numbers.by_ref().take(load.batch).collect::<Vec<BlockHash>>();
        // Not timed: the connection is made for the first one.
        let mut nothing = Measured::new()?;
        let mut running = BTreeMap::new();
        self.fetch(namespace.id(), next(), &mut running);
        self.finish_one(&mut running, &mut nothing)?;

        let mut measured = Measured::new()?;
        let posted = self.fabric.posts();
        let start = Start::now(&self.clock);
        let end = start.at + load.time;
        for _ in 0..load.depth {
            self.fetch(namespace.id(), next(), &mut running);
        }
        while !running.is_empty() {
            self.finish_one(&mut running, &mut measured)?;
            if self.clock.now() < end && !bench.is_interrupted() {
                self.fetch(namespace.id(), next(), &mut running);
            }
        }
        start.end(&self.clock, &mut measured);
        measured.note_posts(posted, self.fabric.posts());
        Ok(measured)
    }
}
