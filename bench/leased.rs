//! A whole leased read of one block: the requester's data thread asks the holder's for a loan, READs
//! the block, and compares its checksum. Two data threads with all that they have in a node, in one
//! process: handshake, leases, store, landing, the command's way to the thread.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvrail::event::{Event, EventSink};
use kvrail::fabric::{Access, Fabric, Region, RegisteredSpan, RemoteSpan};
use kvrail::health::BreakerConfig;
use kvrail::lease::LeaseConfig;
use kvrail::memory::{HostPool, PoolOptions, Reservation};
use kvrail::peer::{
    FetchOutcome, Landing, LocalNode, PeerConfig, Peers, Pressure, Published, RequesterConfig,
};
use kvrail::policy::{Origin, Policy};
use kvrail::protocol::{RegionEntry, SecretKey};
use kvrail::runtime::clock::Clock;
use kvrail::runtime::data::{self, DataHandle, DataJoin};
use kvrail::store::{Payload, Store, StoreConfig};
use kvrail::types::{BlockHash, BlockKey, EvictionRank, Extent, NamespaceId, NodeId, PoolId};
use kvrail::verbs::VerbsFabric;

const NAMESPACE: NamespaceId = NamespaceId(7);

/// When a reader's latest transfer was over: all bytes here and compared.
#[derive(Debug, Default)]
struct Stopwatch {
    origin: OnceLock<Instant>,
    nanos: AtomicU64,
}

impl Stopwatch {
    fn now(&self) -> u64 {
        let origin = self.origin.get_or_init(Instant::now);
        u64::try_from(origin.elapsed().as_nanos()).unwrap()
    }
}

impl EventSink for Stopwatch {
    fn emit(&self, event: Event) {
        if matches!(event, Event::TransferSucceeded { .. }) {
            self.nanos.store(self.now(), Ordering::Release);
        }
    }
}

/// One pool, and the residents in it.
#[derive(Debug)]
struct Memory {
    store: Arc<Store>,
    pool: Arc<HostPool>,
    region: Region,
}

impl Landing for Memory {
    type Memory = Reservation;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Reservation>) {
        self.pool.reserve_into(sizes, out).unwrap();
    }

    fn span(&self, memory: &Reservation) -> RegisteredSpan {
        let Extent { offset, len, .. } = memory.extent();
        RegisteredSpan { region: self.region.id, offset, len }
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
        Published::Stored(self.store.insert(key, payload, origin, true).unwrap())
    }

    fn remote(&self, extent: &Extent) -> Option<RemoteSpan> {
        self.region.remote(extent.offset, extent.len)
    }

    fn pause_ms(&self) -> u32 {
        0
    }
}

/// A node's data thread.
struct Member {
    handle: DataHandle<SocketAddr>,
    thread: DataJoin,
    address: SocketAddr,
    watch: Arc<Stopwatch>,
}

impl Member {
    /// One that holds `blocks` blocks of `size` bytes, with room for as many more.
    fn new(mut fabric: VerbsFabric, number: u8, (blocks, size): (u32, u32)) -> Self {
        let options = PoolOptions {
            id: PoolId(0),
            bytes: 2 * u64::from(blocks) * u64::from(size) + (1 << 20),
            huge_pages: None,
            lock: false,
            numa_node: None,
        };
        let pool = HostPool::create(&options).unwrap();
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead).unwrap();
        let watch = Arc::new(Stopwatch::default());
        let sink: Arc<dyn EventSink> = Arc::clone(&watch) as _;
        let config = StoreConfig { capacity: 2 * blocks + 8, policy: Policy::default() };
        let store = Arc::new(Store::new(config, Arc::clone(&sink)).unwrap());
        for block in 0..blocks {
            let memory = pool.reserve(&[size]).unwrap().pop().unwrap();
            pool.write(memory.extent(), 0, &vec![number; size as usize]).unwrap();
            let checksum = pool.checksum(memory.extent()).unwrap();
            let payload = Payload { extent: memory.into_extent(), checksum };
            let key = BlockKey { namespace: NAMESPACE, hash: hash(number, block) };
            store.insert(key, payload, Origin::Saved { owners: None }, false).unwrap();
        }
        let clock = Clock::start();
        let local = LocalNode {
            node: NodeId([number; 16]),
            epoch: clock.epoch(),
            requester: format!("node-{number}").parse().unwrap(),
            secret: SecretKey::derive(b""),
            regions: vec![RegionEntry::from(&region)],
            nonce_seed: [number; 32],
        };
        let requester = RequesterConfig {
            lease_margin: Duration::from_secs(1),
            transfer_timeout: Duration::from_secs(5),
            answer_timeout: Duration::from_secs(5),
        };
        let peers = PeerConfig {
            lease: LeaseConfig::default(),
            requester,
            pressure: Pressure::default(),
            breaker: BreakerConfig::default(),
        };
        let (capabilities, address) = (fabric.capabilities(), fabric.local_addr().unwrap());
        let peers = Peers::new(local, peers, capabilities, Arc::clone(&store), sink).unwrap();
        let landing = Memory { store, pool, region };
        let (handle, thread) = data::spawn(fabric, peers, landing, clock).unwrap();
        Self { handle, thread, address, watch }
    }

    fn stop(self) {
        self.handle.stop();
        self.thread.join().unwrap().unwrap();
    }
}

fn hash(number: u8, block: u32) -> BlockHash {
    let [a, b, c, d] = block.to_le_bytes();
    BlockHash::new(&[number, a, b, c, d]).unwrap()
}

/// Times of single leased reads of `size` bytes, one after the other, sorted: from the command to the
/// requester's data thread until the block is here and compared. What follows, the completion and the
/// holder's answer, is waited for and not counted.
pub(crate) fn latencies(
    holder: VerbsFabric,
    requester: VerbsFabric,
    size: u32,
    count: u32,
) -> Vec<Duration> {
    // It passes the data threads' answers on.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let entered = runtime.enter();
    let holder = Member::new(holder, 1, (count, size));
    let requester = Member::new(requester, 2, (count, size));
    drop(entered);
    let mut times = Vec::new();
    for block in 0..count {
        let begun = requester.watch.now();
        let hashes = vec![hash(1, block)];
        let fetch = requester.handle.fetch(NodeId([1; 16]), holder.address, NAMESPACE, hashes);
        let fetched = runtime.block_on(fetch).unwrap();
        let outcome = fetched.outcomes.first();
        assert!(matches!(outcome, Some(FetchOutcome::Ready { fetched: true, .. })), "{outcome:?}");
        let ended = requester.watch.nanos.load(Ordering::Acquire);
        times.push(Duration::from_nanos(ended - begun));
    }
    requester.stop();
    holder.stop();
    // The first one brought the connection up.
    times.remove(0);
    times.sort_unstable();
    times
}
