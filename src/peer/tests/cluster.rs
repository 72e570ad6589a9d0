//! Nodes of a simulated network, each with its peers, store and pool, for tests here and in
//! `tests/simulation`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::krate::event::{Event, EventSink};
use super::krate::fabric::{
    Access, EventBatch, Fabric, FabricEvent, ReadBatch, Region, RegisteredSpan, RemoteSpan,
};
use super::krate::lease::LeaseConfig;
use super::krate::memory::{HostPool, PoolOptions, Reservation};
use super::krate::peer::{
    FetchId, FetchOutcome, FetchRequest, Fetched, Landing, LocalNode, Output, PeerConfig, Peers,
    Published, RequesterConfig,
};
use super::krate::policy::{Origin, Policy};
use super::krate::protocol::{RegionEntry, SecretKey};
use super::krate::sim::{SimConfig, SimEndpoint, SimFabric, SimNetwork};
use super::krate::store::{Evicted, InsertError, Payload, ResidentView, Store, StoreConfig};
use super::krate::types::{
    BlockHash, BlockKey, EvictionRank, Extent, Namespace, NodeEpoch, NodeId, PoolId, RequesterId,
    ResidentCause, Scope, Timestamp,
};

/// Bytes of a block, by its name: never two blocks alike, always the same for one name.
pub(crate) fn bytes_of(block: u16) -> Vec<u8> {
    let len = 200 + usize::from(block % 7) * 64 + usize::from(block % 3);
    let mut state = u64::from(block) * 0x9e37_79b9 + 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| next()).collect()
}

pub(crate) fn key_of(block: u16) -> BlockKey {
    let namespace = "test".parse::<Namespace>().unwrap().id();
    BlockKey { namespace, hash: BlockHash::new(&block.to_be_bytes()).unwrap() }
}

pub(crate) fn block_of(key: &BlockKey) -> u16 {
    u16::from_be_bytes(key.hash.as_bytes().try_into().unwrap())
}

pub(crate) fn node_id(at: usize) -> NodeId {
    NodeId([u8::try_from(at + 1).unwrap(); 16])
}

pub(crate) fn requester_id(at: usize) -> RequesterId {
    format!("node-{at}").parse().unwrap()
}

pub(crate) fn endpoint(at: usize) -> SimEndpoint {
    SimEndpoint(u32::try_from(at).unwrap())
}

/// Keeps every event.
#[derive(Debug, Default)]
pub(crate) struct Log(Mutex<Vec<Event>>);

impl EventSink for Log {
    fn emit(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Log {
    pub(crate) fn count(&self, which: impl Fn(&Event) -> bool) -> usize {
        self.0.lock().unwrap().iter().filter(|event| which(event)).count()
    }
}

/// Extents that the peer core owns as destinations, by offset.
type Owned = Rc<RefCell<BTreeMap<u64, u32>>>;

/// A destination. What is given back is overwritten at once, as its next tenant would.
#[derive(Debug)]
pub(crate) struct Destination {
    reservation: Option<Reservation>,
    owned: Owned,
}

impl Destination {
    fn extent(&self) -> Extent {
        self.reservation.as_ref().unwrap().extent()
    }

    /// The extent is a resident's from here on.
    fn hand_over(mut self) {
        if let Some(reservation) = self.reservation.take() {
            self.forget(reservation.extent());
            let _resident = reservation.into_extent();
        }
    }

    fn forget(&self, extent: Extent) {
        self.owned.borrow_mut().remove(&extent.offset);
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        if let Some(reservation) = self.reservation.take() {
            let extent = reservation.extent();
            self.forget(extent);
            scribble(reservation.pool(), extent);
        }
    }
}

fn scribble(pool: &HostPool, extent: Extent) {
    pool.write(extent, 0, &vec![0xee; extent.len as usize]).unwrap();
}

/// A node's memory and residents.
#[derive(Debug)]
pub(crate) struct TestLanding {
    pub(crate) store: Arc<Store>,
    pub(crate) pool: Arc<HostPool>,
    region: Region,
    owned: Owned,
    /// Residents that were evicted.
    pub(crate) evicted: u64,
    /// Requesters that those had been served to.
    pub(crate) readers_of_evicted: u64,
    pub(crate) pause_ms: u32,
}

impl TestLanding {
    /// Evicts one resident; its memory is overwritten and given back.
    pub(crate) fn evict(&mut self) -> Option<BlockKey> {
        let mut before = Vec::new();
        self.store.list(0, u32::MAX, &mut before);
        let Evicted { key, payload, id, .. } = self.store.evict()?;
        let victim = before.iter().find(|view| view.id == id).unwrap();
        self.readers_of_evicted += u64::from(victim.requesters);
        scribble(&self.pool, payload.extent);
        self.pool.release(payload.extent).unwrap();
        self.evicted += 1;
        Some(key)
    }

    fn place(&mut self, len: u32) -> Option<Reservation> {
        loop {
            match self.pool.reserve(&[len]) {
                Ok(mut one) => return one.pop(),
                Err(_full) => self.evict()?,
            };
        }
    }

    /// Saves a block as a local engine does. `false` where every resident is pinned.
    pub(crate) fn save(&mut self, block: u16) -> bool {
        let bytes = bytes_of(block);
        let Some(reservation) = self.place(u32::try_from(bytes.len()).unwrap()) else {
            return false;
        };
        self.pool.write(reservation.extent(), 0, &bytes).unwrap();
        let checksum = self.pool.checksum(reservation.extent()).unwrap();
        let payload = Payload { extent: reservation.extent(), checksum };
        let origin = Origin::Saved { owners: None };
        match self.store.insert(key_of(block), payload, origin, false) {
            Ok(_) => {
                let _resident = reservation.into_extent();
            }
            Err(InsertError::AlreadyResident(_)) => {
                self.store.already_resident(&key_of(block), ResidentCause::PartialHit);
            }
            Err(InsertError::Full) => return false,
        }
        true
    }

    /// Whether the fabric may write here on behalf of a fetch.
    fn owns(&self, span: &RegisteredSpan) -> bool {
        let end = span.offset + u64::from(span.len);
        let owned = self.owned.borrow();
        // A span may cover destinations that are neighbours.
        let mut at = span.offset;
        while at < end {
            let Some((start, len)) = owned.range(..=at).next_back() else {
                return false;
            };
            let next = start + u64::from(*len);
            if next <= at {
                return false;
            }
            at = next;
        }
        true
    }
}

impl Landing for TestLanding {
    type Memory = Destination;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Destination>) {
        for size in sizes {
            let Some(reservation) = self.place(*size) else {
                return;
            };
            self.owned.borrow_mut().insert(reservation.extent().offset, *size);
            let owned = Rc::clone(&self.owned);
            out.push(Destination { reservation: Some(reservation), owned });
        }
    }

    fn span(&self, memory: &Destination) -> RegisteredSpan {
        let Extent { offset, len, .. } = memory.extent();
        RegisteredSpan { region: self.region.id, offset, len }
    }

    fn checksum(&self, memory: &Destination) -> u64 {
        self.pool.checksum(memory.extent()).unwrap()
    }

    fn publish(
        &mut self,
        key: BlockKey,
        memory: Destination,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published {
        let payload = Payload { extent: memory.extent(), checksum };
        loop {
            match self.store.insert(key, payload, Origin::Fetched { source: rank }, true) {
                Ok(found) => {
                    memory.hand_over();
                    return Published::Stored(found);
                }
                Err(InsertError::AlreadyResident(_)) => {
                    let found = self.store.pin(&key).unwrap();
                    self.store.already_resident(&key, ResidentCause::PeerFetch);
                    return Published::AlreadyResident(found);
                }
                Err(InsertError::Full) if self.evict().is_some() => {}
                Err(InsertError::Full) => return Published::Full,
            }
        }
    }

    fn remote(&self, extent: &Extent) -> Option<RemoteSpan> {
        self.region.remote(extent.offset, extent.len)
    }

    fn pause_ms(&self) -> u32 {
        self.pause_ms
    }
}

/// What a cluster's nodes are made of.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) seed: u64,
    pub(crate) network: SimConfig,
    pub(crate) peers: PeerConfig,
    pub(crate) pool_bytes: u64,
    pub(crate) residents: u32,
}

impl Default for Shape {
    fn default() -> Self {
        let lease = LeaseConfig {
            ttl: Duration::from_secs(1),
            leases_per_requester: 64,
            bytes_per_requester: 1 << 20,
            leases_total: 256,
        };
        let requester = RequesterConfig {
            lease_margin: Duration::from_millis(100),
            transfer_timeout: Duration::from_secs(3),
            answer_timeout: Duration::from_secs(2),
        };
        let peers = PeerConfig { lease, requester };
        let network = SimConfig::default();
        Self { seed: 1, network, peers, pool_bytes: 64 << 10, residents: 64 }
    }
}

/// One running node.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) fabric: SimFabric,
    pub(crate) peers: Peers<TestLanding>,
    pub(crate) landing: TestLanding,
    pub(crate) log: Arc<Log>,
    pub(crate) fetched: Vec<Fetched>,
    events: EventBatch,
    reads: ReadBatch,
    next_fetch: u64,
}

impl Member {
    pub(crate) fn new(network: &SimNetwork, shape: &Shape, at: usize, life: u64) -> Self {
        let secret = SecretKey::derive(b"secret");
        Self::of(network, shape, endpoint(at), |regions| LocalNode {
            node: node_id(at),
            epoch: NodeEpoch(life),
            requester: requester_id(at),
            secret,
            regions,
            nonce_seed: [u8::try_from(life % 251).unwrap(); 32],
        })
    }

    pub(crate) fn of(
        network: &SimNetwork,
        shape: &Shape,
        at: SimEndpoint,
        local: impl FnOnce(Vec<RegionEntry>) -> LocalNode,
    ) -> Self {
        let mut fabric = network.fabric(at);
        let options = PoolOptions {
            id: PoolId(0),
            bytes: shape.pool_bytes,
            huge_pages: None,
            lock: false,
            numa_node: None,
        };
        let pool = HostPool::create(&options).unwrap();
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead).unwrap();
        let log = Arc::new(Log::default());
        let sink: Arc<dyn EventSink> = Arc::clone(&log) as _;
        let config = StoreConfig { capacity: shape.residents, policy: Policy::default() };
        let store = Arc::new(Store::new(config, Arc::clone(&sink)).unwrap());
        let local = local(vec![RegionEntry::from(&region)]);
        let (capabilities, residents) = (fabric.capabilities(), Arc::clone(&store));
        let peers = Peers::new(local, shape.peers, capabilities, residents, sink).unwrap();
        let landing = TestLanding {
            store,
            pool,
            region,
            owned: Owned::default(),
            evicted: 0,
            readers_of_evicted: 0,
            pause_ms: 0,
        };
        let (events, reads) = (EventBatch::default(), ReadBatch::default());
        Self { fabric, peers, landing, log, fetched: Vec::new(), events, reads, next_fetch: 1 }
    }

    /// One round, as the data thread makes it.
    pub(crate) fn turn(&mut self, now: Timestamp) {
        self.carry_out(now);
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        self.fabric.poll(&mut events, Duration::ZERO).unwrap();
        for event in &events.events {
            let bytes = match *event {
                FabricEvent::Message { start, end, .. } => events.message(start, end),
                _ => &[],
            };
            self.peers.handle_event(*event, bytes, &mut self.landing, now);
        }
        self.events = events;
        if self.peers.poll_timeout().is_some_and(|deadline| deadline <= now) {
            self.peers.handle_timeout(&mut self.landing, now);
        }
        self.carry_out(now);
    }

    fn carry_out(&mut self, now: Timestamp) {
        while let Some(output) = self.peers.poll_output() {
            self.carry_out_one(output, now);
        }
        while let Some(connection) = self.peers.poll_post(&mut self.reads) {
            if let Err(error) = self.fabric.post(connection, &self.reads) {
                self.peers.handle_post_refused(connection, &self.reads, error.scope());
            }
        }
        while let Some(fetched) = self.peers.poll_fetched() {
            self.fetched.push(fetched);
        }
    }

    fn carry_out_one(&mut self, output: Output, now: Timestamp) {
        match output {
            Output::Connect { node } => {
                let to = endpoint(usize::from(node.0[0]) - 1);
                let result = self.fabric.connect(&to).map_err(|error| error.scope());
                self.peers.handle_connecting(node, result, now);
            }
            Output::Admit { connection } => drop(self.fabric.admit(connection)),
            Output::Send { connection, start, end } => {
                let bytes = self.peers.message(start, end);
                if let Err(error) = self.fabric.send(connection, bytes) {
                    self.peers.handle_send_refused(connection, error.scope());
                }
            }
            Output::Close { connection } => self.fabric.close(connection),
        }
    }

    pub(crate) fn fetch(&mut self, from: usize, blocks: &[u16], now: Timestamp) -> FetchId {
        let id = FetchId(self.next_fetch);
        self.next_fetch += 1;
        let hashes = blocks.iter().map(|block| key_of(*block).hash).collect();
        let (node, namespace) = (node_id(from), key_of(0).namespace);
        self.peers.fetch(FetchRequest { id, node, namespace, hashes }, now);
        id
    }

    pub(crate) fn residents(&self) -> Vec<ResidentView> {
        let mut views = Vec::new();
        let mut cursor = Some(0);
        while let Some(at) = cursor {
            cursor = self.landing.store.list(at, 64, &mut views);
        }
        views
    }

    pub(crate) fn view(&self, block: u16) -> Option<ResidentView> {
        self.residents().into_iter().find(|view| view.key == key_of(block))
    }

    /// The rank of a block that is here; 0 for one that is not.
    pub(crate) fn rank(&self, block: u16) -> u8 {
        self.view(block).map_or(0, |view| view.rank.get())
    }

    pub(crate) fn pins(&self, block: u16) -> u16 {
        self.view(block).map_or(0, |view| view.pins)
    }

    pub(crate) fn leases(&self) -> u64 {
        self.peers.lease_usage().map(|usage| usage.usage.leases).sum()
    }

    /// Whether a resident's bytes are those of its key.
    pub(crate) fn holds_true_bytes(&self, view: &ResidentView) -> bool {
        let mut bytes = vec![0; view.payload.extent.len as usize];
        self.landing.pool.read(view.payload.extent, 0, &mut bytes).unwrap();
        bytes == bytes_of(block_of(&view.key))
    }

    /// Changes a resident's bytes behind the store's back.
    pub(crate) fn corrupt(&self, block: u16) {
        let view = self.view(block).unwrap();
        self.landing.pool.write(view.payload.extent, 1, b"corrupted").unwrap();
    }
}

/// Nodes 0, 1, … of one network. A dead one is `None`.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) network: SimNetwork,
    pub(crate) shape: Shape,
    pub(crate) nodes: Vec<Option<Member>>,
    lives: u64,
}

impl Cluster {
    pub(crate) fn new(nodes: usize, shape: Shape) -> Self {
        let network = SimNetwork::new(shape.seed, shape.network.clone());
        let mut cluster = Self { network, shape, nodes: Vec::new(), lives: 0 };
        for at in 0..nodes {
            cluster.nodes.push(None);
            cluster.start(at);
        }
        cluster
    }

    pub(crate) fn start(&mut self, at: usize) {
        self.lives += 1;
        self.nodes[at] = Some(Member::new(&self.network, &self.shape, at, self.lives));
    }

    /// The node's process is gone, with all that it held.
    pub(crate) fn crash(&mut self, at: usize) {
        self.nodes[at] = None;
    }

    pub(crate) fn node(&self, at: usize) -> &Member {
        self.nodes[at].as_ref().unwrap()
    }

    pub(crate) fn node_mut(&mut self, at: usize) -> &mut Member {
        self.nodes[at].as_mut().unwrap()
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.network.now()
    }

    pub(crate) fn save(&mut self, at: usize, blocks: &[u16]) {
        for block in blocks {
            assert!(self.node_mut(at).landing.save(*block));
        }
    }

    pub(crate) fn begin_fetch(&mut self, at: usize, from: usize, blocks: &[u16]) -> FetchId {
        let now = self.now();
        self.node_mut(at).fetch(from, blocks, now)
    }

    /// Every node makes a round.
    pub(crate) fn turn(&mut self) {
        let now = self.now();
        for node in self.nodes.iter_mut().flatten() {
            node.turn(now);
        }
    }

    /// When something happens next, in the network or by a deadline.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        let deadlines = self.nodes.iter().flatten().filter_map(|node| node.peers.poll_timeout());
        deadlines.chain(self.network.next_event()).min()
    }

    /// Rounds until `done`, which must come within so much time.
    pub(crate) fn run_until(&mut self, within: Duration, done: impl Fn(&Self) -> bool) {
        let limit = self.now() + within;
        let mut idle = 0;
        loop {
            self.turn();
            self.check();
            if done(self) {
                return;
            }
            let next = self.next().unwrap_or(limit);
            idle = if next <= self.now() { idle + 1 } else { 0 };
            assert!(idle < 1000, "a deadline in the past keeps the nodes spinning at {next:?}");
            assert!(self.now() < limit, "not done within {within:?}");
            self.network.advance_to(next.min(limit));
        }
    }

    pub(crate) fn run_for(&mut self, span: Duration) {
        let end = self.now() + span;
        self.run_until(span + Duration::from_nanos(1), |cluster| cluster.now() >= end);
    }

    /// Rounds until the fetch is over; it is handed out with its pins.
    pub(crate) fn finish(&mut self, at: usize, id: FetchId) -> Fetched {
        let over = |fetched: &Fetched| fetched.id == id;
        self.run_until(Duration::from_secs(30), |cluster| {
            cluster.node(at).fetched.iter().any(over)
        });
        let fetched = &mut self.node_mut(at).fetched;
        let found = fetched.iter().position(over).unwrap();
        fetched.remove(found)
    }

    /// A whole fetch. What it made ready is unpinned again.
    pub(crate) fn fetch(&mut self, at: usize, from: usize, blocks: &[u16]) -> Vec<FetchOutcome> {
        let id = self.begin_fetch(at, from, blocks);
        let fetched = self.finish(at, id);
        self.node(at).peers.release(&fetched);
        fetched.outcomes
    }

    /// The rules that hold between any two rounds.
    pub(crate) fn check(&self) {
        for (at, node) in self.nodes.iter().enumerate() {
            let Some(node) = node else { continue };
            for span in self.network.landing(endpoint(at)) {
                assert!(
                    node.landing.owns(&span),
                    "invariant 1: node {at} let go of {span:?} while a READ may land there"
                );
            }
            for view in node.residents() {
                let block = block_of(&view.key);
                assert!(node.holds_true_bytes(&view), "node {at}: wrong bytes in block {block}");
            }
        }
        self.check_exposed();
    }

    /// Invariant 2: what a READ can still read is pinned.
    fn check_exposed(&self) {
        for span in self.network.exposed() {
            let at = usize::try_from(span.holder.0).unwrap();
            let Some(node) = &self.nodes[at] else { continue };
            let mut pinned: Vec<_> = node
                .residents()
                .into_iter()
                .filter(|view| view.pins > 0)
                .map(|view| (view.payload.extent.offset, view.payload.extent.len))
                .collect();
            pinned.sort_unstable();
            let (mut from, end) = (span.offset, span.offset + u64::from(span.len));
            for (offset, len) in pinned {
                if offset <= from && from < offset + u64::from(len) {
                    from = offset + u64::from(len);
                }
            }
            assert!(from >= end, "invariant 2: node {at} serves {span:?}, which is not pinned");
        }
    }
}

pub(crate) fn is_ready(outcome: &FetchOutcome) -> bool {
    matches!(outcome, FetchOutcome::Ready { .. })
}

pub(crate) fn is_failed(outcome: &FetchOutcome, by: Scope) -> bool {
    *outcome == FetchOutcome::Failed(by)
}
