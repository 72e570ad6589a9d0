//! One running node.

use std::sync::Arc;
use std::time::Duration;

use super::super::krate::event::EventSink;
use super::super::krate::fabric::{Access, EventBatch, Fabric, FabricEvent, ReadBatch, width};
use super::super::krate::limits::{PROBE_BYTES, WIDEN_LOOK};
use super::super::krate::memory::{HostPool, PoolOptions};
use super::super::krate::peer::{
    FetchId, FetchRequest, Fetched, LocalNode, Output, Peers, Wish, WithdrawalId,
};
use super::super::krate::policy::Policy;
use super::super::krate::protocol::{Kind, RegionEntry, SecretKey, kind_of};
use super::super::krate::sim::{Random, SimEndpoint, SimFabric, SimNetwork};
use super::super::krate::store::{ResidentView, Store, StoreConfig};
use super::super::krate::types::{Extent, NodeEpoch, PoolId, Timestamp};
use super::landing::TestLanding;
use super::ledger::Ledger;
use super::{Log, Noise, Shape, block_of, bytes_of, endpoint, key_of, node_id, requester_id};

/// One running node.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) fabric: SimFabric,
    pub(crate) peers: Peers<TestLanding>,
    pub(crate) landing: TestLanding,
    pub(crate) log: Arc<Log>,
    pub(crate) fetched: Vec<Fetched>,
    /// Withdrawals that were asked for, and those that are over.
    pub(crate) withdrawals: u64,
    pub(crate) withdrawn: Vec<WithdrawalId>,
    events: EventBatch,
    reads: ReadBatch,
    next_fetch: u64,
    /// Whether its fabric knows that connections could be wider; and whether it says so where it is not true.
    pub(crate) sees_lacks: bool,
    pub(crate) hopes: bool,
    /// When it is looked next which connections could be wider.
    next_widen: Timestamp,
    pub(crate) noise: Noise,
    chance: Random,
    /// Messages that were lost or sent twice.
    pub(crate) lost: u64,
    pub(crate) repeated: u64,
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
        // Last, as peers know it: what they read to find out whether the way here is open.
        let probes = PoolOptions { bytes: PROBE_BYTES.into(), ..options };
        let page = HostPool::create(&probes).unwrap();
        let page = fabric.register(Arc::clone(page.mapping()), Access::RemoteRead).unwrap();
        let log = Arc::new(Log::default());
        let sink: Arc<dyn EventSink> = Arc::clone(&log) as _;
        let config = StoreConfig { capacity: shape.residents, policy: Policy::default() };
        let store = Arc::new(Store::new(config, Arc::clone(&sink)).unwrap());
        let local = local(vec![RegionEntry::from(&region), RegionEntry::from(&page)]);
        let (capabilities, residents) = (fabric.capabilities(), Arc::clone(&store));
        let peers = Peers::new(local, shape.peers, capabilities, residents, sink).unwrap();
        let ledger = Arc::new(Ledger::new(Arc::clone(&store)));
        let landing = TestLanding::new(store, pool, region, ledger);
        let (events, reads) = (EventBatch::default(), ReadBatch::default());
        let chance = Random::new(shape.seed ^ (u64::from(at.0) << 32));
        Self {
            fabric,
            peers,
            landing,
            log,
            fetched: Vec::new(),
            withdrawals: 0,
            withdrawn: Vec::new(),
            events,
            reads,
            next_fetch: 1,
            sees_lacks: true,
            hopes: false,
            next_widen: network.now(),
            noise: shape.noise,
            chance,
            lost: 0,
            repeated: 0,
        }
    }

    /// The first half of a data thread's round: what happened.
    pub(crate) fn listen(&mut self, now: Timestamp) {
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
        if self.next_widen <= now {
            self.next_widen = now + WIDEN_LOOK;
            let fabric = &self.fabric;
            let (sees, hopes) = (self.sees_lacks, self.hopes);
            self.peers.widen(|on| hopes || sees && !fabric.lacks(on).is_empty(), now);
        }
        if self.peers.poll_timeout().is_some_and(|deadline| deadline <= now) {
            self.peers.handle_timeout(&mut self.landing, now);
        }
    }

    /// The other half: what is to be done about it.
    pub(crate) fn carry_out(&mut self, now: Timestamp) {
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
        self.withdrawn.extend(std::iter::from_fn(|| self.peers.poll_withdrawn()));
    }

    fn carry_out_one(&mut self, output: Output, now: Timestamp) {
        match output {
            Output::Connect { node } => {
                let to = endpoint(usize::from(node.0[0]) - 1);
                let result = self.fabric.connect(&to).map_err(|error| error.scope());
                self.peers.handle_connecting(node, result, now);
            }
            Output::Compare { connection, than } => {
                let [new, old] = [connection, than].map(|on| width(&self.fabric.rails(on)));
                self.peers.handle_compared(connection, new > old);
            }
            Output::Admit { connection } => drop(self.fabric.admit(connection)),
            Output::Send { connection, start, end } => {
                for _ in 0..self.copies(start, end) {
                    let bytes = self.peers.message(start, end);
                    if let Err(error) = self.fabric.send(connection, bytes) {
                        self.peers.handle_send_refused(connection, error.scope());
                    }
                }
            }
            Output::Grant { connection, window, span, start, end } => {
                let key = self.fabric.grant(connection, window, &span).unwrap();
                self.peers.handle_granted(&span, (start, end), key);
            }
            Output::Revoke { connection, window } => {
                self.fabric.revoke(connection, window).unwrap();
            }
            Output::Close { connection } => self.fabric.close(connection),
        }
    }

    /// How many times a message is sent: once, but for the noise.
    fn copies(&mut self, start: usize, end: usize) -> usize {
        let kind = kind_of(self.peers.message(start, end)).unwrap();
        if matches!(
            kind,
            Kind::Hello
                | Kind::Beside
                | Kind::Welcome
                | Kind::Confirm
                | Kind::Reject
                | Kind::Goodbye
        ) {
            return 1;
        }
        let draw = self.chance.below(1000);
        if draw < self.noise.lost {
            self.lost += 1;
            0
        } else if draw < self.noise.lost + self.noise.repeated {
            self.repeated += 1;
            2
        } else {
            1
        }
    }

    pub(crate) fn fetch(&mut self, from: usize, blocks: &[u16], now: Timestamp) -> FetchId {
        self.fetch_into(from, (blocks, Vec::new()), now)
    }

    /// Fetches blocks that shall land in these places.
    pub(crate) fn fetch_into(
        &mut self,
        from: usize,
        (blocks, places): (&[u16], Vec<Extent>),
        now: Timestamp,
    ) -> FetchId {
        let id = FetchId(self.next_fetch);
        self.next_fetch += 1;
        let hashes = blocks.iter().map(|block| key_of(*block).hash).collect();
        let wish = Wish { namespace: key_of(0).namespace, hashes, places };
        self.peers.fetch(FetchRequest { id, node: node_id(from), wish }, now);
        id
    }

    /// Takes blocks back, those of them that are here.
    pub(crate) fn withdraw(&mut self, id: u64, blocks: &[u16], now: Timestamp) {
        self.withdrawals += 1;
        let ids = blocks.iter().filter_map(|block| Some(self.view(*block)?.id)).collect();
        self.peers.withdraw(WithdrawalId(id), ids, &mut self.landing, now);
    }

    pub(crate) fn residents(&self) -> Vec<ResidentView> {
        let mut views = Vec::new();
        let mut cursor = Some(0);
        while let Some(at) = cursor {
            cursor = self.landing.store.list(at, 64, &mut views);
        }
        views
    }

    /// Where pinned residents lie, by offset: the start and the length of each.
    pub(crate) fn pinned(&self) -> Vec<(u64, u32)> {
        let pinned = self.residents().into_iter().filter(|view| view.pins > 0);
        let extents = pinned.flat_map(|view| self.landing.pieces(view.payload.extent));
        let mut extents: Vec<_> = extents.collect();
        extents.sort_unstable();
        extents
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
        let mut bytes = Vec::new();
        for (offset, len) in self.landing.pieces(view.payload.extent) {
            let before = bytes.len();
            bytes.resize(before + len as usize, 0);
            self.landing.pool.mapping().read(offset, &mut bytes[before..]).unwrap();
        }
        bytes == bytes_of(block_of(&view.key))
    }

    /// Changes a resident's bytes behind the store's back.
    pub(crate) fn corrupt(&self, block: u16) {
        let view = self.view(block).unwrap();
        self.landing.pool.write(view.payload.extent, 1, b"corrupted").unwrap();
    }
}
