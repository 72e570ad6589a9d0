//! Leased reads of one block: the requester's data thread asks the holder's for a loan, READs the
//! block, and compares its checksum. Two data threads with all that they have in a node, in one
//! process: handshake, leases, store, landing, the command's way to the thread.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvrail::event::{Event, EventSink};
use kvrail::fabric::{Access, Fabric, Region, RegisteredSpan};
use kvrail::health::BreakerConfig;
use kvrail::lease::LeaseConfig;
use kvrail::memory::{HostPool, PoolOptions, Reservation};
use kvrail::peer::{
    FetchOutcome, Landing, LocalNode, PeerConfig, Peers, Pressure, Published, RequesterConfig,
};
use kvrail::policy::{Origin, Policy};
use kvrail::protocol::{Place, RegionEntry, SecretKey};
use kvrail::runtime::clock::Clock;
use kvrail::runtime::data::{self, DataHandle, DataJoin};
use kvrail::store::{Payload, Store, StoreConfig};
use kvrail::types::{BlockHash, BlockKey, EvictionRank, Extent, NamespaceId, NodeId, PoolId};
use kvrail::verbs::VerbsFabric;

use crate::timed::{Detail, Mark, Marks, Timed, nanos};

const NAMESPACE: NamespaceId = NamespaceId(7);

/// Between two reads.
const PAUSE: Duration = Duration::from_micros(200);

/// When a reader's latest transfer was over: all bytes here and compared.
#[derive(Debug, Default)]
struct Stopwatch {
    nanos: AtomicU64,
}

impl EventSink for Stopwatch {
    fn emit(&self, event: Event) {
        if matches!(event, Event::TransferSucceeded { .. }) {
            self.nanos.store(nanos(), Ordering::Release);
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
        Published::Stored(self.store.insert(key, payload, origin, true).unwrap())
    }

    fn remote(&self, extent: &Extent) -> Option<Place> {
        self.region.remote(extent.offset, extent.len).map(Place::Span)
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
    marks: Marks,
}

impl Member {
    /// One that holds `blocks` blocks of `size` bytes, with room for as many more.
    fn new(
        mut fabric: VerbsFabric,
        number: u8,
        (blocks, size): (u32, u32),
        detail: Detail,
    ) -> Self {
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
        let (fabric, marks) = Timed::new(fabric, detail);
        let (handle, thread) = data::spawn(fabric, peers, landing, clock).unwrap();
        Self { handle, thread, address, watch, marks }
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

/// Of one read, microseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// From when the requester's data thread takes the fetch up to the READ's completion.
    pub(crate) leased: f64,
    /// From the caller's command, on another thread, until the block is compared.
    pub(crate) whole: f64,
    /// Its parts, where they were asked for.
    pub(crate) parts: Option<Parts>,
}

/// Of one read, microseconds. They follow each other without a gap.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// The requester's data thread takes the fetch up and prepares the lend.
    pub(crate) take_up: f64,
    /// It posts the lend.
    pub(crate) send: f64,
    /// Until the holder's data thread has it. Below 0 where that had it before the post returned.
    pub(crate) ask: f64,
    /// The holder pins, leases and prepares the answer.
    pub(crate) lend: f64,
    /// It posts the answer.
    pub(crate) reply: f64,
    /// Until the requester has it.
    pub(crate) answer: f64,
    /// The requester plans the READ.
    pub(crate) plan: f64,
    /// It posts it.
    pub(crate) post: f64,
    /// Until it has the READ's completion.
    pub(crate) read: f64,
}

fn first(marks: &[(u64, Mark)], after: u64, which: impl Fn(Mark) -> bool) -> Option<u64> {
    marks.iter().find(|(at, mark)| *at >= after && which(*mark)).map(|(at, _)| *at)
}

/// The end of the last poll before a moment.
fn polled(marks: &[(u64, Mark)], before: u64) -> Option<u64> {
    let polled = |(at, mark): &&(u64, Mark)| *at <= before && matches!(mark, Mark::Polled { .. });
    marks.iter().rev().find(polled).map(|(at, _)| *at)
}

fn between(from: u64, to: u64) -> f64 {
    (to as f64 - from as f64) / 1e3
}

fn is_landing(mark: Mark) -> bool {
    matches!(mark, Mark::Polled { completed: true, .. })
}

/// From when a fetch was taken up to its READ's completion. `None` where no poll had ended before.
fn leased(requester: &[(u64, Mark)]) -> Option<f64> {
    let sending = first(requester, 0, |mark| mark == Mark::Sending)?;
    let landed = first(requester, sending, is_landing)?;
    Some(between(polled(requester, sending)?, landed))
}

/// The parts of a leased read.
fn parts(requester: &[(u64, Mark)], holder: &[(u64, Mark)]) -> Option<Parts> {
    let sending = first(requester, 0, |mark| mark == Mark::Sending)?;
    let sent = first(requester, sending, |mark| mark == Mark::Sent)?;
    let taken = polled(requester, sending)?;
    let replying = first(holder, sending, |mark| mark == Mark::Sending)?;
    let replied = first(holder, replying, |mark| mark == Mark::Sent)?;
    let asked = polled(holder, replying)?;
    let posting = first(requester, sending, |mark| mark == Mark::Posting)?;
    let posted = first(requester, posting, |mark| mark == Mark::Posted)?;
    let answered = polled(requester, posting)?;
    let landed = first(requester, posted, is_landing)?;
    Some(Parts {
        take_up: between(taken, sending),
        send: between(sending, sent),
        ask: between(sent, asked),
        lend: between(asked, replying),
        reply: between(replying, replied),
        answer: between(replied, answered),
        plan: between(answered, posting),
        post: between(posting, posted),
        read: between(posted, landed),
    })
}

/// Times of single leased reads of `size` bytes, one after the other. What follows a read, the
/// completion and the holder's answer, is waited for and not counted.
pub(crate) fn latencies(
    holder: VerbsFabric,
    requester: VerbsFabric,
    (size, count): (u32, u32),
    in_parts: bool,
) -> Vec<Times> {
    let (ends, inner) =
        if in_parts { (Detail::All, Detail::All) } else { (Detail::Ends, Detail::None) };
    // It passes the data threads' answers on.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let entered = runtime.enter();
    let holder = Member::new(holder, 1, (count, size), inner);
    let requester = Member::new(requester, 2, (count, size), ends);
    drop(entered);
    let mut all = Vec::new();
    for block in 0..count {
        // The data threads come to rest, so that the fetch is taken up by a poll.
        std::thread::sleep(PAUSE);
        for marks in [&holder.marks, &requester.marks] {
            marks.lock().unwrap().clear();
        }
        let begun = nanos();
        let hashes = vec![hash(1, block)];
        let fetch = requester.handle.fetch(NodeId([1; 16]), holder.address, NAMESPACE, hashes);
        let fetched = runtime.block_on(fetch).unwrap();
        let outcome = fetched.fetched.outcomes.first();
        assert!(matches!(outcome, Some(FetchOutcome::Ready { fetched: true, .. })), "{outcome:?}");
        let ended = requester.watch.nanos.load(Ordering::Acquire);
        let mine = requester.marks.lock().unwrap().clone();
        let theirs = holder.marks.lock().unwrap().clone();
        // The first one brings the connection up.
        if let Some(leased) = leased(&mine).filter(|_| block > 0) {
            all.push(Times { leased, whole: between(begun, ended), parts: parts(&mine, &theirs) });
        }
    }
    requester.stop();
    holder.stop();
    all
}
