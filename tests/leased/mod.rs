//! Two data threads with all that a node's have, one of which reads what the other lends: handshake,
//! leases, store, READs, checksums, landing, completions. What each of them asks of the heap is counted
//! on the thread itself.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a harness of tests fails by panicking; the limit is small"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvrail::event::Discard;
use kvrail::fabric::{Access, Fabric, Region, RegisteredSpan};
use kvrail::health::BreakerConfig;
use kvrail::lease::LeaseConfig;
use kvrail::limits::ENDED_LEASES_MAX;
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
use kvrail::sys::allocations;
use kvrail::types::{BlockHash, BlockKey, EvictionRank, Extent, NamespaceId, NodeId, PoolId};

const NAMESPACE: NamespaceId = NamespaceId(7);
const BLOCK: u32 = 512;

/// Blocks of the longest lease that is measured, and of the shortest.
const LONG: u32 = 64;
const SHORT: u32 = 8;

/// Leases until all buffers have grown to what they need: a holder remembers its answers to so many,
/// and a bit. Then leases that are counted.
const WARM: u32 = ENDED_LEASES_MAX as u32 + 16;
const COUNTED: u32 = 32;

/// Blocks that one thread holds, or has room for.
const BLOCKS: u32 = LONG * (WARM + COUNTED) + SHORT * COUNTED;

/// One pool and the residents in it. It is asked on the data thread, of which it tells the count.
#[derive(Debug)]
struct Memory {
    store: Arc<Store>,
    pool: Arc<HostPool>,
    region: Region,
    allocations: Arc<AtomicU64>,
}

impl Memory {
    fn note(&self) {
        self.allocations.store(allocations::of_thread(), Ordering::Relaxed);
    }
}

impl InPlace for Memory {}

impl Landing for Memory {
    type Memory = Reservation;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Reservation>) {
        self.note();
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
        self.note();
        Published::Stored(found)
    }

    fn remote(&self, extent: &Extent) -> Option<Place> {
        self.note();
        self.region.remote(extent.offset, extent.len).map(Place::Span)
    }

    fn pause_ms(&self) -> u32 {
        0
    }
}

/// A data thread.
struct Member<E> {
    handle: DataHandle<E>,
    thread: DataJoin,
    store: Arc<Store>,
    allocations: Arc<AtomicU64>,
}

impl<E: Clone + Send + 'static> Member<E> {
    /// One that holds the first `blocks` blocks.
    fn new<F>(mut fabric: F, node: NodeId, blocks: u32) -> Self
    where
        F: ForeignFabric + Fabric<Endpoint = E> + Send + 'static,
    {
        let options = PoolOptions {
            id: PoolId(0),
            bytes: u64::from(BLOCKS + LONG) * u64::from(BLOCK) + (1 << 20),
            huge_pages: None,
            lock: false,
            numa_node: None,
        };
        let pool = HostPool::create(&options).unwrap();
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead).unwrap();
        let config = StoreConfig { capacity: BLOCKS + LONG, policy: Policy::default() };
        let store = Arc::new(Store::new(config, Arc::new(Discard)).unwrap());
        for block in 0..blocks {
            let memory = pool.reserve(&[BLOCK]).unwrap().pop().unwrap();
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
        let requester = RequesterConfig {
            lease_margin: second,
            transfer_timeout: 20 * second,
            answer_timeout: 5 * second,
        };
        let peers = PeerConfig {
            lease: LeaseConfig::default(),
            requester,
            pressure: Pressure::default(),
            breaker: BreakerConfig::default(),
        };
        let capabilities = fabric.capabilities();
        let sink = Arc::new(Discard);
        let peers = Peers::new(local, peers, capabilities, Arc::clone(&store), sink).unwrap();
        let allocations = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&allocations);
        let landing = Memory { store: Arc::clone(&store), pool, region, allocations: counted };
        let (handle, thread) = data::spawn(fabric, peers, landing, clock).unwrap();
        Self { handle, thread, store, allocations }
    }

    /// What the thread had allocated when its node's memory was last asked.
    fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    fn stop(self) {
        self.handle.stop();
        self.thread.join().unwrap().unwrap();
    }
}

fn hash(block: u32) -> BlockHash {
    BlockHash::new(&block.to_le_bytes()).unwrap()
}

/// Reads of one owner, one after the other.
struct Reader<'a, E> {
    holder: &'a Member<E>,
    requester: &'a Member<E>,
    to: (NodeId, E),
    runtime: &'a tokio::runtime::Runtime,
    next: u32,
}

impl<E: Clone + Send + 'static> Reader<'_, E> {
    /// Reads so many leases of so many blocks; what that made the holder's and the reader's thread
    /// allocate.
    fn read(&mut self, leases: u32, blocks: u32) -> (u64, u64) {
        let before = (self.holder.allocations(), self.requester.allocations());
        for _lease in 0..leases {
            let hashes = (self.next..self.next + blocks).map(hash).collect();
            self.next += blocks;
            let (node, endpoint) = self.to.clone();
            let wish = Wish::anywhere(NAMESPACE, hashes);
            let fetch = self.requester.handle.fetch(node, endpoint, wish);
            let fetched = self.runtime.block_on(fetch).unwrap();
            assert_eq!(fetched.fetched.outcomes.len(), blocks as usize);
            for outcome in fetched.fetched.outcomes {
                let FetchOutcome::Ready { found, fetched: true } = outcome else {
                    panic!("{outcome:?}");
                };
                self.requester.store.unpin(found.id).unwrap();
            }
        }
        let after = (self.holder.allocations(), self.requester.allocations());
        (after.0 - before.0, after.1 - before.1)
    }
}

/// Fails where a block costs an allocation on either end.
///
/// # Panics
/// Where it does.
pub(crate) fn a_leased_block_costs_no_allocation<F, E>(
    (holder, requester): (F, F),
    (nodes, endpoint): ((NodeId, NodeId), E),
) where
    F: ForeignFabric + Fabric<Endpoint = E> + Send + 'static,
    E: Clone + Send + 'static,
{
    // Passes the answers of both data threads on.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let entered = runtime.enter();
    let holder = Member::new(holder, nodes.0, BLOCKS);
    let requester = Member::new(requester, nodes.1, 0);
    drop(entered);
    let to = (nodes.0, endpoint);
    let runtime = &runtime;
    let mut reader = Reader { holder: &holder, requester: &requester, to, runtime, next: 0 };
    let grown = reader.read(WARM, LONG);
    assert!(grown.0 > 0 && grown.1 > 0, "a thread that begins allocates, and is counted");
    let long = reader.read(COUNTED, LONG);
    let short = reader.read(COUNTED, SHORT);
    // Less than one a lease: now and then one end is slow, and is asked whether it is there.
    let few = u64::from(COUNTED);
    assert!(long.0 < few, "the holder's: {} for {COUNTED} leases of {LONG} blocks", long.0);
    // A fetch has an answer and a list of its own, however long.
    let (long, short) = (long.1, short.1);
    assert!(
        long.abs_diff(short) < few,
        "{long} for {COUNTED} leases of {LONG} blocks, {short} of {SHORT}"
    );
    assert!(long <= u64::from(COUNTED * 8), "{long} for {COUNTED} fetches");
    requester.stop();
    holder.stop();
}
