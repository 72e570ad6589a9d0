//! Nodes of a simulated network, each with its peers, store and pool, for tests here and in
//! `tests/simulation`.

mod landing;
pub(crate) mod ledger;
mod member;

use std::sync::{LazyLock, Mutex};
use std::time::Duration;

pub(crate) use landing::TestLanding;
#[allow(unused_imports, reason = "simulations hold no blocks in pieces")]
pub(crate) use landing::{LAYOUT, cache_tensor};
pub(crate) use member::Member;

use super::krate::event::{Event, EventSink};
use super::krate::health::BreakerConfig;
use super::krate::lease::LeaseConfig;
use super::krate::peer::{FetchId, FetchOutcome, Fetched, PeerConfig, Pressure, RequesterConfig};
use super::krate::sim::{SimConfig, SimEndpoint, SimNetwork};
use super::krate::types::{BlockHash, BlockKey, Namespace, NodeId, RequesterId, Scope, Timestamp};

/// Bytes of a block, by its name: never two blocks alike, always the same for one name.
pub(crate) fn bytes_of(block: u16) -> Vec<u8> {
    // Compared after every round, so those of the names that a cluster uses are made once.
    static MADE: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| (0..64).map(make_bytes).collect());
    MADE.get(usize::from(block)).cloned().unwrap_or_else(|| make_bytes(block))
}

/// The first name of a block that may lie in pieces, and the length of such blocks.
pub(crate) const STRIDED: u16 = 1000;
pub(crate) const STRIDED_BYTES: usize = 512;

fn make_bytes(block: u16) -> Vec<u8> {
    // Blocks that may lie in pieces have a length that layouts allow.
    let len = if block >= STRIDED { STRIDED_BYTES } else { odd_len(block) };
    let mut state = u64::from(block) * 0x9e37_79b9 + 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| next()).collect()
}

fn odd_len(block: u16) -> usize {
    200 + usize::from(block % 7) * 64 + usize::from(block % 3)
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

/// What a cluster's nodes are made of.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) seed: u64,
    pub(crate) network: SimConfig,
    pub(crate) peers: PeerConfig,
    pub(crate) pool_bytes: u64,
    pub(crate) residents: u32,
    pub(crate) noise: Noise,
}

/// What happens to the messages of connections that are up, out of 1,000. Their order is the
/// fabric's promise.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Noise {
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
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
        let (pressure, breaker) = (Pressure::default(), BreakerConfig::default());
        let peers = PeerConfig { lease, requester, pressure, breaker };
        let network = SimConfig::default();
        let noise = Noise::default();
        let (pool_bytes, residents) = (64 << 10, 64);
        Self { seed: 1, network, peers, pool_bytes, residents, noise }
    }
}

/// Nodes 0, 1, … of one network. A dead one is `None`.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) network: SimNetwork,
    pub(crate) shape: Shape,
    pub(crate) nodes: Vec<Option<Member>>,
    /// Until when a node's thread stands still, while the network does not.
    paused: Vec<Timestamp>,
    lives: u64,
}

impl Cluster {
    pub(crate) fn new(nodes: usize, shape: Shape) -> Self {
        let network = SimNetwork::new(shape.seed, shape.network.clone());
        let mut cluster = Self { network, shape, nodes: Vec::new(), paused: Vec::new(), lives: 0 };
        for at in 0..nodes {
            cluster.nodes.push(None);
            cluster.paused.push(Timestamp::ZERO);
            cluster.start(at);
        }
        cluster
    }

    pub(crate) fn start(&mut self, at: usize) {
        self.lives += 1;
        self.paused[at] = Timestamp::ZERO;
        self.nodes[at] = Some(Member::new(&self.network, &self.shape, at, self.lives));
    }

    /// The node's process is gone, with all that it held.
    pub(crate) fn crash(&mut self, at: usize) {
        self.nodes[at] = None;
    }

    /// The node's thread stands still for so long.
    pub(crate) fn pause(&mut self, at: usize, span: Duration) {
        self.paused[at] = self.now() + span;
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
        for at in 0..self.nodes.len() {
            if self.paused[at] > now {
                continue;
            }
            if let Some(node) = &mut self.nodes[at] {
                node.carry_out(now);
                node.listen(now);
                // Another thread may evict now, before any connection that must go is closed.
                self.check_exposed();
                self.node_mut(at).carry_out(now);
            }
        }
    }

    /// When something happens next, in the network or by a deadline.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        let deadlines =
            self.nodes.iter().zip(&self.paused).filter_map(|(node, paused)| {
                Some(node.as_ref()?.peers.poll_timeout()?.max(*paused))
            });
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
        let mut pinned_at = vec![None; self.nodes.len()];
        for span in self.network.exposed() {
            let at = usize::try_from(span.holder.0).unwrap();
            let Some(node) = &self.nodes[at] else { continue };
            if !node.landing.lends_from(span.region) {
                continue;
            }
            let pinned = pinned_at[at].get_or_insert_with(|| node.pinned());
            let (mut from, end) = (span.offset, span.offset + u64::from(span.len));
            for (offset, len) in pinned.iter().copied() {
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
