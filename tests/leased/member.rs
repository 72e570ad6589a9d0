//! A data thread with all that a node's has: handshake, leases, store, READs, checksums, landing,
//! completions.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use kvrail::event::EventSink;
use kvrail::fabric::{Access, Fabric, Region, RegisteredSpan};
use kvrail::health::BreakerConfig;
use kvrail::lease::LeaseConfig;
use kvrail::memory::{ForeignFabric, HostPool, PoolOptions, Reservation};
use kvrail::peer::{
    FetchOutcome, Landing, LocalNode, PeerConfig, Peers, Pressure, Published, RequesterConfig, Wish,
};
use kvrail::policy::{Origin, Policy};
use kvrail::protocol::{Place, RegionEntry, SecretKey};
use kvrail::runtime::clock::Clock;
use kvrail::runtime::data::{self, DataHandle, DataJoin};
use kvrail::runtime::in_place::InPlace;
use kvrail::store::{Payload, Store, StoreConfig};
use kvrail::types::{BlockHash, BlockKey, EvictionRank, Extent, NamespaceId, NodeId, PoolId};

const NAMESPACE: NamespaceId = NamespaceId(7);

/// Looks on while a data thread works, on that thread.
pub(crate) trait Watch: Send + 'static {
    /// The thread asks for memory for a block that it reads, or where one lies that it lends.
    fn asked(&self) {}

    /// A block that it has read is visible: what the holder had to say of it is here.
    fn published(&self) {}
}

/// One pool, and the residents in it.
struct Memory<W> {
    store: Arc<Store>,
    pool: Arc<HostPool>,
    region: Region,
    watch: W,
}

impl<W: Watch> InPlace for Memory<W> {}

impl<W: Watch> Landing for Memory<W> {
    type Memory = Reservation;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Reservation>) {
        self.watch.asked();
        self.pool.reserve_into(sizes, out).unwrap();
    }

    fn spans(&self, memory: &Reservation) -> impl Iterator<Item = RegisteredSpan> {
        let Extent { offset, len, .. } = memory.extent();
        std::iter::once(RegisteredSpan { region: self.region.id, offset, len })
    }

    fn checksum(&self, memory: &Reservation) -> u64 {
        self.pool.checksum(memory.extent()).unwrap()
    }

    fn publish(
        &mut self,
        key: BlockKey,
        memory: Reservation,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published {
        let payload = Payload { extent: memory.into_extent(), checksum };
        let origin = Origin::Fetched { source: rank };
        let found = self.store.insert(key, payload, origin, true).unwrap();
        self.watch.published();
        Published::Stored(found)
    }

    fn remote(&self, extent: &Extent) -> Option<Place> {
        self.watch.asked();
        self.region.remote(extent.offset, extent.len).map(Place::Span)
    }

    fn pause_ms(&self) -> u32 {
        0
    }
}

/// How many blocks one of them has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks {
    /// From the start: the first so many.
    pub(crate) held: u32,
    /// At most.
    pub(crate) most: u32,
    /// Bytes of each.
    pub(crate) size: u32,
}

/// A data thread, and what it works on.
pub(crate) struct Member<E> {
    pub(crate) handle: DataHandle<E>,
    thread: DataJoin,
    store: Arc<Store>,
}

impl<E: Clone + Send + 'static> Member<E> {
    /// One that runs, with its blocks. Within a tokio runtime.
    pub(crate) fn new<F>(
        mut fabric: F,
        node: NodeId,
        blocks: Blocks,
        sink: Arc<dyn EventSink>,
        watch: impl Watch,
    ) -> Self
    where
        F: ForeignFabric + Fabric<Endpoint = E> + Send + 'static,
    {
        let Blocks { held, most, size } = blocks;
        let options = PoolOptions {
            id: PoolId(0),
            bytes: u64::from(most) * u64::from(size) + (1 << 20),
            huge_pages: None,
            lock: false,
            numa_node: None,
        };
        let pool = HostPool::create(&options).unwrap();
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead).unwrap();
        let config = StoreConfig { capacity: most, policy: Policy::default() };
        let store = Arc::new(Store::new(config, Arc::clone(&sink)).unwrap());
        for block in 0..held {
            let memory = pool.reserve(&[size]).unwrap().pop().unwrap();
            let checksum = pool.checksum(memory.extent()).unwrap();
            let payload = Payload { extent: memory.into_extent(), checksum };
            let key = BlockKey { namespace: NAMESPACE, hash: hash(block) };
            store.insert(key, payload, Origin::Saved { owners: None }, false).unwrap();
        }
        let clock = Clock::start();
        let local = LocalNode {
            node,
            epoch: clock.epoch(),
            requester: format!("node-{node}").parse().unwrap(),
            secret: SecretKey::derive(b""),
            regions: vec![RegionEntry::from(&region)],
            nonce_seed: [node.0[0]; 32],
        };
        let second = Duration::from_secs(1);
        let peers = PeerConfig {
            lease: LeaseConfig::default(),
            requester: RequesterConfig {
                lease_margin: second,
                transfer_timeout: 20 * second,
                answer_timeout: 5 * second,
            },
            pressure: Pressure::default(),
            breaker: BreakerConfig::default(),
        };
        let capabilities = fabric.capabilities();
        let peers = Peers::new(local, peers, capabilities, Arc::clone(&store), sink).unwrap();
        let landing = Memory { store: Arc::clone(&store), pool, region, watch };
        let (handle, thread) = data::spawn(fabric, peers, landing, clock).unwrap();
        Self { handle, thread, store }
    }

    /// A wish for blocks of another one, all of which must come over the fabric. They are not held.
    pub(crate) fn fetch(
        &self,
        (node, endpoint): (NodeId, E),
        blocks: Range<u32>,
    ) -> impl Future<Output = ()> + Send + use<E> {
        let (handle, store) = (self.handle.clone(), Arc::clone(&self.store));
        let hashes: Vec<BlockHash> = blocks.map(hash).collect();
        async move {
            let count = hashes.len();
            let fetched =
                handle.fetch(node, endpoint, Wish::anywhere(NAMESPACE, hashes)).await.unwrap();
            assert_eq!(fetched.fetched.outcomes.len(), count);
            for outcome in fetched.fetched.outcomes {
                let FetchOutcome::Ready { found, fetched: true } = outcome else {
                    panic!("{outcome:?}");
                };
                store.unpin(found.id).unwrap();
            }
        }
    }

    pub(crate) fn stop(self) {
        self.handle.stop();
        self.thread.join().unwrap().unwrap();
    }
}

fn hash(block: u32) -> BlockHash {
    BlockHash::new(&block.to_le_bytes()).unwrap()
}
