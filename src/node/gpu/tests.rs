//! The tier on the stand-in driver: blocks that land, are served, are evicted, and a GPU that is lost.
//! What is called, and in which order, is the driver's own log.

#[path = "../../../tests/cuda_standin/mod.rs"]
#[expect(dead_code, reason = "the tests of the room use more of it")]
mod cuda_standin;

mod in_place;
mod landing;
mod steady;

use std::time::Duration;

use super::*;
use crate::cuda::{CopyQueue, End, Piece};
use crate::event::Discard;
use crate::fabric::{Region, RegionId};
use crate::memory::{Climb, GpuDirect, Mapping, PoolOptions, Watermarks, checksum_bytes};
use crate::node::landing::{Memory, NodeLanding};
use crate::node::residency::{Admitted, DevicePool};
use crate::peer::{Landing, Published, Settled};
use crate::policy::{Origin, Policy};
use crate::runtime::clock::Clock;
use crate::runtime::deadline::Deadline;
use crate::runtime::reclaim::{Reclaim, Reclaimed};
use crate::store::{Found, Store, StoreConfig};
use crate::types::{BlockHash, BlockKey, EvictionRank, MemoryKind, NamespaceId, Scope};
use cuda_standin::StandIn;

/// A fourth of a host pool, an eighth of the GPU's.
const BLOCK: u32 = 256 << 10;
const HOST_POOL: u64 = 4 * BLOCK as u64;
const GPU_POOL: u64 = 8 * BLOCK as u64;

const PATIENCE: Duration = Duration::from_secs(60);

struct Scene {
    landing: NodeLanding,
    residency: Arc<Residency>,
    context: Arc<Context>,
    pool: Arc<GpuPool>,
    arriving: Arc<Mapping>,
    leaving: Arc<Mapping>,
}

fn region(id: u16, len: u64) -> Region {
    Region { id: RegionId(id), rkey: u32::from(id), address: 0, len }
}

fn key(number: u8) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&[number]).unwrap() }
}

fn bytes(number: u8) -> Vec<u8> {
    let mut bytes = vec![number; BLOCK as usize];
    bytes[0] = number.wrapping_add(1);
    bytes
}

impl Scene {
    /// A node's memory, with room for two blocks in each direction of staging. Where `direct`, cards
    /// reach the pool; a card's work is done by copies here.
    fn new(standin: &StandIn, direct: bool) -> Self {
        Self::with_marks(standin, direct, Watermarks::new(1000, 900).unwrap())
    }

    fn with_marks(standin: &StandIn, direct: bool, marks: Watermarks) -> Self {
        let page = PoolOptions {
            id: PoolId(0),
            bytes: HOST_POOL,
            huge_pages: None,
            lock: false,
            numa_node: None,
        };
        let pools = vec![HostPool::create(&page).unwrap()];
        let options = GpuOptions {
            ordinal: 0,
            pool_bytes: GPU_POOL,
            direct: GpuDirect::Auto,
            staging_bytes: 2 * u64::from(BLOCK),
        };
        let gpu = Gpu::open(&options, Some(&standin.library()), &pools).unwrap();
        let config = StoreConfig { capacity: 32, policy: Policy::default() };
        let store = Arc::new(Store::new(config, Arc::new(Discard)).unwrap());
        let device = Some(DevicePool::new(gpu.uuid(), gpu.pool()));
        let (clock, sink) = (Clock::start(), Arc::new(Discard));
        let residency = Arc::new(Residency::new(store, (pools, device), marks, clock, sink));
        let regions = GpuRegions {
            direct: direct.then(|| region(1, GPU_POOL)),
            climb: Climb::default(),
            arriving: region(2, 2 * u64::from(BLOCK)),
            leaving: region(3, 2 * u64::from(BLOCK)),
        };
        let (context, pool) = (Arc::clone(&gpu.context), Arc::clone(&gpu.pool));
        let GpuMemory { arriving, leaving, .. } = gpu.memory();
        let landing = NodeLanding {
            residency: Arc::clone(&residency),
            regions: Vec::new(),
            tier: Some(gpu.into_tier(&regions, Arc::clone(&residency))),
            reserved: Vec::new(),
            layouts: std::collections::BTreeMap::new(),
            marks: (1, (100, 100)),
            quota_grows: false,
        };
        Self { landing, residency, context, pool, arriving, leaving }
    }

    /// What lies in the GPU's pool at this place, and where bytes are given, is put there before.
    fn exchange(&self, offset: u64, write: Option<&[u8]>) -> Vec<u8> {
        let bound = self.context.bind().unwrap();
        let mapping = Arc::new(Mapping::anonymous("kvrail-test", BLOCK.into()).unwrap());
        let host = HostRegistration::new(&bound, &mapping).unwrap();
        let (host, device) = (End::Host(host), End::Device(Arc::clone(self.pool.memory())));
        let mut queue = CopyQueue::new(&bound, 1).unwrap();
        if let Some(bytes) = write {
            mapping.write(0, bytes).unwrap();
            let piece = Piece::contiguous(0, offset, BLOCK.into());
            queue.submit(&bound, (&host, &device), &[piece], 0).unwrap();
        } else {
            let piece = Piece::contiguous(offset, 0, BLOCK.into());
            queue.submit(&bound, (&device, &host), &[piece], 0).unwrap();
        }
        queue.drain(&bound, &mut Vec::new()).unwrap();
        let mut bytes = vec![0; BLOCK as usize];
        mapping.read(0, &mut bytes).unwrap();
        bytes
    }

    fn reserve(&mut self) -> Memory {
        let mut out = Vec::new();
        self.landing.reserve(&[BLOCK], &mut out);
        out.pop().expect("there is room")
    }

    /// A card's READ into memory for a block.
    fn land(&mut self, memory: &Memory, number: u8) {
        let span = self.landing.spans(memory).next().unwrap();
        assert_eq!(span.len, BLOCK);
        match span.region {
            RegionId(1) => drop(self.exchange(span.offset, Some(&bytes(number)))),
            RegionId(2) => self.arriving.write(span.offset, &bytes(number)).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    fn settle(&mut self, memory: &mut Memory) -> Settled {
        let deadline = Deadline::after(PATIENCE);
        loop {
            match self.landing.settle(memory) {
                Settled::Later => assert!(deadline.pause(Duration::from_millis(1)), "not in time"),
                settled => return settled,
            }
        }
    }

    /// A block comes from a peer, all the way; nobody waits for it.
    fn fetch(&mut self, number: u8) -> Found {
        let mut memory = self.reserve();
        assert!(matches!(memory, Memory::Gpu(_)), "it lands in the GPU's memory");
        self.land(&memory, number);
        assert_eq!(self.settle(&mut memory), Settled::Now);
        self.publish(memory, number)
    }

    /// What has settled is told of, and let go.
    fn publish(&mut self, memory: Memory, number: u8) -> Found {
        let sum = self.landing.checksum(&memory);
        assert_eq!(sum, checksum_bytes(&bytes(number)));
        match self.landing.publish(key(number), memory, sum, EvictionRank::FIRST) {
            Published::Stored(found) => {
                self.residency.store.unpin(found.id).unwrap();
                found
            }
            other => panic!("{other:?}"),
        }
    }

    /// A local engine saves a block in host memory.
    fn save(&self, number: u8) {
        let memory = self.residency.reserve(&[BLOCK]).unwrap().pop().unwrap();
        let saved = self.residency.admit(key(number), memory, 0, Origin::Saved { owners: None });
        assert!(matches!(saved, Admitted::Stored(_)), "{saved:?}");
    }

    fn here(&self, numbers: impl IntoIterator<Item = u8>) -> Vec<u8> {
        let is_here = |number: &u8| self.residency.store.lookup(&key(*number)).is_some();
        numbers.into_iter().filter(is_here).collect()
    }

    /// What a peer reads of a block, once it is ready.
    fn lent(&mut self, number: u8) -> Option<Vec<u8>> {
        let found = self.residency.store.pin(&key(number)).unwrap();
        let deadline = Deadline::after(PATIENCE);
        self.landing.look_again();
        while !self.landing.prepare(&found) {
            assert!(self.landing.remote(&found.payload.extent).is_none(), "not before it is ready");
            assert!(deadline.pause(Duration::from_millis(1)), "not in time");
        }
        let place = self.landing.remote(&found.payload.extent);
        self.residency.store.unpin(found.id).unwrap();
        let crate::protocol::Place::Span(span) = place? else { panic!("{place:?}") };
        if span.rkey == 1 {
            return Some(self.exchange(span.address, None));
        }
        let mut bytes = vec![0; BLOCK as usize];
        self.leaving.read(span.address, &mut bytes).unwrap();
        Some(bytes)
    }
}

/// Where a call stands in the log for the first time.
fn first(log: &[String], line: &str) -> usize {
    let at = log.iter().position(|logged| logged == line);
    at.unwrap_or_else(|| panic!("no {line:?} in {log:?}"))
}

#[test]
fn a_staged_block_is_told_of_behind_its_copy_and_lent_behind_another() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    standin.control("cuMemcpyHtoDAsync_v2 hold 1\ncuMemcpyDtoHAsync_v2 hold 1");
    standin.log();
    let waits = standin.calls("cuStreamSynchronize");
    let mut memory = scene.reserve();
    scene.land(&memory, 1);
    for _ in 0..10 {
        assert_eq!(scene.landing.settle(&mut memory), Settled::Later, "its copy is under way");
    }
    standin.control("");
    assert_eq!(scene.settle(&mut memory), Settled::Now);
    let found = scene.publish(memory, 1);
    assert_eq!(standin.calls("cuStreamSynchronize"), waits, "the data thread does not wait");
    assert_eq!(found.payload.extent.pool, PoolId::GPU);
    let log = standin.logged();
    assert!(log.iter().all(|line| !line.contains("Flush")), "no card wrote there");
    assert!(log.iter().any(|line| line == "ran cuMemcpyHtoDAsync_v2"), "told of before: {log:?}");
    assert!(scene.exchange(found.payload.extent.offset, None) == bytes(1));

    standin.control("cuMemcpyDtoHAsync_v2 hold 1");
    let waits = standin.calls("cuStreamSynchronize");
    let pinned = scene.residency.store.pin(&key(1)).unwrap();
    for _ in 0..10 {
        assert!(!scene.landing.prepare(&pinned), "lent before its copy had ended");
        assert!(scene.landing.remote(&pinned.payload.extent).is_none());
    }
    standin.control("");
    assert!(scene.lent(1) == Some(bytes(1)));
    scene.residency.store.unpin(pinned.id).unwrap();
    assert_eq!(standin.calls("cuStreamSynchronize"), waits);
    // The next reader finds the copy there.
    let copies = standin.calls("cuMemcpyDtoHAsync_v2");
    assert!(scene.lent(1) == Some(bytes(1)));
    assert_eq!(standin.calls("cuMemcpyDtoHAsync_v2"), copies);
}

#[test]
fn what_a_card_wrote_is_flushed_where_the_device_does_not_order_it() {
    // By the attribute GPU_DIRECT_RDMA_WRITES_ORDERING: none, for the owner, for all devices.
    for (ordering, flushes) in [(0, 1), (100, 0), (200, 0)] {
        let Some(standin) = StandIn::new() else { return };
        standin.control(&format!("set ordering {ordering}"));
        let mut scene = Scene::new(&standin, true);
        standin.log();
        let found = scene.fetch(7);
        let log = standin.logged();
        let flush = "call cuFlushGPUDirectRDMAWrites";
        assert_eq!(log.iter().filter(|line| *line == flush).count(), flushes, "{ordering}");
        let looked_at = first(&log, "call cuMemcpyDtoHAsync_v2");
        assert!(flushes == 0 || first(&log, flush) < looked_at, "{log:?}");
        assert!(first(&log, "ran cuMemcpyDtoHAsync_v2") > looked_at);
        assert!(scene.lent(7) == Some(bytes(7)), "cards read it where it is");
        assert_eq!(found.payload.extent.pool, PoolId::GPU);
    }
}

#[test]
fn memory_that_cards_reach_keeps_synchronous_operations_synchronous() {
    let Some(standin) = StandIn::new() else { return };
    standin.log();
    let _scene = Scene::new(&standin, true);
    let log = standin.logged();
    let (mapped, kept) =
        (first(&log, "call cuMemSetAccess"), first(&log, "call cuPointerSetAttribute"));
    assert!(mapped < kept, "SYNC_MEMOPS before anybody is told of the memory: {log:?}");
    assert!(log.iter().skip(kept).all(|line| line != "call cuMemMap"), "{log:?}");
}

#[test]
fn a_copy_that_is_refused_fails_its_block_and_nothing_else() {
    for (direct, call) in [
        (false, "cuMemcpyHtoDAsync_v2"),
        (true, "cuFlushGPUDirectRDMAWrites"),
        (true, "cuMemcpyDtoHAsync_v2"),
    ] {
        let Some(standin) = StandIn::new() else { return };
        let mut scene = Scene::new(&standin, direct);
        let mut memory = scene.reserve();
        scene.land(&memory, 1);
        standin.control(&format!("{call} fail 801"));
        assert_eq!(scene.settle(&mut memory), Settled::Never(Scope::Local), "{call}");
        drop(memory);
        standin.control("");
        assert!(!scene.residency.device_is_lost());
        scene.fetch(2);
        if !direct {
            standin.control("cuMemcpyDtoHAsync_v2 fail 801");
            assert_eq!(scene.lent(2), None);
            standin.control("");
            assert!(scene.lent(2) == Some(bytes(2)), "the next lend tries again");
        }
        assert_eq!(scene.residency.usage(MemoryKind::Device).used, u64::from(BLOCK));
    }
}

#[test]
fn an_extent_is_its_copys_until_that_has_ended() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let used = |scene: &Scene| scene.residency.usage(MemoryKind::Device).used;
    standin.control("cuMemcpyHtoDAsync_v2 hold 1");
    let mut memory = scene.reserve();
    scene.land(&memory, 1);
    assert_eq!(scene.landing.settle(&mut memory), Settled::Later);
    // A reader that has given up takes nothing from under the copy.
    drop(memory);
    assert_eq!(used(&scene), u64::from(BLOCK));
    standin.control("");
    scene.fetch(2);
    assert_eq!(used(&scene), u64::from(BLOCK), "the first one's came back with its copy's end");
}

#[test]
fn a_lost_gpu_takes_its_residents_along_and_leaves_the_others() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    for number in 0..3 {
        scene.save(number);
        scene.fetch(10 + number);
    }
    let pinned = scene.residency.store.pin(&key(12)).unwrap();
    let (mut first, mut second) = (scene.reserve(), scene.reserve());
    scene.land(&first, 20);
    scene.land(&second, 21);
    // In the middle of a transfer: one of its blocks is being copied, the other one has landed.
    standin.control("cuMemcpyHtoDAsync_v2 lose 719\ncuMemcpyHtoDAsync_v2 hold 1");
    assert_eq!(scene.landing.settle(&mut first), Settled::Later);
    standin.control("");
    assert_eq!(scene.settle(&mut first), Settled::Never(Scope::Local));
    assert_eq!(scene.settle(&mut second), Settled::Never(Scope::Local));
    drop((first, second));
    assert!(scene.residency.device_is_lost());
    assert!(!scene.residency.lose_device(), "it is said once");
    while scene.residency.reclaim() == Reclaimed::Some {}
    assert_eq!(scene.here(0..30), [0, 1, 2, 12], "but for what is pinned");
    assert!(scene.landing.remote(&pinned.payload.extent).is_none(), "it is not lent any more");
    scene.residency.store.unpin(pinned.id).unwrap();
    scene.residency.reclaim();
    assert_eq!(scene.here(0..30), [0, 1, 2]);
    // What arrives from now on lands in host memory, and what had settled is not told of.
    let memory = scene.reserve();
    assert!(matches!(memory, Memory::Host(_)), "{memory:?}");
}

#[test]
fn a_block_that_had_settled_when_the_gpu_was_lost_is_not_told_of() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let mut memory = scene.reserve();
    scene.land(&memory, 1);
    assert_eq!(scene.settle(&mut memory), Settled::Now);
    scene.residency.lose_device();
    let published = scene.landing.publish(key(1), memory, 0, EvictionRank::FIRST);
    assert!(matches!(published, Published::Full), "{published:?}");
    assert_eq!(scene.residency.usage(MemoryKind::Device).used, 0);
}

#[test]
fn each_memory_evicts_its_own_residents() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    (0..4).for_each(|number| scene.save(number));
    // Three more than fit: the GPU's oldest ones go, and none of the host's, which is full as well.
    for number in 10..21 {
        scene.fetch(number);
    }
    assert_eq!(scene.here(0..30), [0, 1, 2, 3, 13, 14, 15, 16, 17, 18, 19, 20]);
    // And the other way round.
    (4..6).for_each(|number| scene.save(number));
    assert_eq!(scene.here(0..30), [2, 3, 4, 5, 13, 14, 15, 16, 17, 18, 19, 20]);
    // What is pinned on the GPU stays, and what finds no room there lands in host memory.
    let pins: Vec<_> =
        (13..21).map(|number| scene.residency.store.pin(&key(number)).unwrap().id).collect();
    let memory = scene.reserve();
    assert!(matches!(memory, Memory::Host(_)), "{memory:?}");
    assert_eq!(scene.here(13..21).len(), 8);
    assert_eq!(scene.residency.store.unpin_batch(&pins), 0);
}

#[test]
fn the_reclaimer_keeps_room_in_each_memory() {
    let Some(standin) = StandIn::new() else { return };
    let marks = Watermarks::new(800, 500).unwrap();
    let mut scene = Scene::with_marks(&standin, false, marks);
    (0..2).for_each(|number| scene.save(number));
    for number in 10..17 {
        scene.fetch(number);
    }
    // The host's is half full, the GPU's above the mark.
    while scene.residency.reclaim() == Reclaimed::Some {}
    assert_eq!(scene.here(0..30), [0, 1, 13, 14, 15, 16]);
    (2..4).for_each(|number| scene.save(number));
    while scene.residency.reclaim() == Reclaimed::Some {}
    assert_eq!(scene.here(0..30), [2, 3, 13, 14, 15, 16]);
}

#[test]
fn staging_that_is_exhausted_answers_at_once_and_recovers() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    scene.fetch(1);
    scene.fetch(2);
    scene.fetch(3);
    let (first, second) = (scene.reserve(), scene.reserve());
    assert!(matches!((&first, &second), (Memory::Gpu(_), Memory::Gpu(_))));
    let third = scene.reserve();
    assert!(matches!(third, Memory::Host(_)), "it lands in host memory: {third:?}");
    drop((first, second, third));
    assert!(matches!(scene.reserve(), Memory::Gpu(_)));
    // Lends wait for the copies of others as long as somebody reads those.
    let found: Vec<Found> =
        (1..4).map(|number| scene.residency.store.pin(&key(number)).unwrap()).collect();
    let deadline = Deadline::after(PATIENCE);
    while !(scene.landing.prepare(&found[0]) & scene.landing.prepare(&found[1])) {
        assert!(deadline.pause(Duration::from_millis(1)), "not in time");
    }
    assert_eq!(scene.landing.pause_ms(), 0);
    for _ in 0..10 {
        assert!(!scene.landing.prepare(&found[2]), "both places are taken");
    }
    assert!(scene.landing.pause_ms() > 0, "readers are told to hold back");
    assert!(scene.landing.remote(&found[2].payload.extent).is_none());
    scene.residency.store.unpin(found[0].id).unwrap();
    while !scene.landing.prepare(&found[2]) {
        assert!(deadline.pause(Duration::from_millis(1)), "the place of what nobody reads is free");
    }
    assert!(scene.landing.remote(&found[2].payload.extent).is_some());
    assert!(scene.landing.remote(&found[0].payload.extent).is_none(), "its copy is gone");
    assert_eq!(scene.landing.pause_ms(), 0);
}
