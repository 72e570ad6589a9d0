//! Blocks in an engine's memory on this GPU that no card reaches.

use super::*;
use crate::cuda::DeviceMemory;
use crate::layout::{AllocationId, BlockId, KvSplit, Layout, Tensor};
use crate::memory::Claims;
use crate::protocol::door::MemorySource;
use crate::runtime::door::Imported;
use crate::runtime::in_place::{InPlace, ServedLayout};
use crate::store::Payload;
use crate::types::Extent;

pub(super) const POOL: PoolId = PoolId::of_layout(5).unwrap();
pub(super) const ALLOCATION: u64 = 1 << 20;
pub(super) const BLOCKS: u32 = 8;
/// What its blocks are said to be in all.
const OPENED: u64 = 50_000;

/// What gathers a block, by this process.
pub(super) fn gathered(standin: &StandIn) -> u64 {
    standin.calls("cuMemcpy2DAsync_v2") + standin.calls("cuMemcpyDtoHAsync_v2")
}

pub(super) const HELD: &str = "cuMemcpy2DAsync_v2 hold 1\ncuMemcpyDtoHAsync_v2 hold 1";

/// Three layers with K and V in one allocation, two of another kind in another one.
pub(super) fn two_allocations() -> Vec<Tensor> {
    let first = Tensor {
        allocation: AllocationId(0),
        offset: 4096,
        layers: 3,
        layer_stride: 64 << 10,
        kv: KvSplit::Split { stride: 32 << 10 },
        block_stride: 1040,
        segment_bytes: 1024,
    };
    let second = Tensor {
        allocation: AllocationId(1),
        offset: 0,
        layers: 2,
        layer_stride: 128 << 10,
        kv: KvSplit::Fused,
        block_stride: 2048,
        segment_bytes: 2048,
    };
    vec![first, second]
}

/// Forty tensors far apart, which take a copy each.
pub(super) fn forty_tensors() -> Vec<Tensor> {
    let tensor = |at: u64| Tensor {
        allocation: AllocationId(0),
        offset: (at * 7 % 40) * (16 << 10),
        layers: 1,
        layer_stride: 0,
        kv: KvSplit::Fused,
        block_stride: 256,
        segment_bytes: 128,
    };
    (0..40).map(tensor).collect()
}

pub(super) fn byte_at(allocation: u16, offset: u64) -> u8 {
    let mixed = offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56;
    u8::try_from(mixed).unwrap() ^ u8::try_from(allocation).unwrap()
}

/// An engine's allocation, as the engine has it, and as the node does.
pub(super) fn allocation(
    scene: &Scene,
    number: u16,
) -> (Arc<DeviceMemory>, Arc<dyn crate::memory::EngineMemory>) {
    let bound = scene.context.bind().unwrap();
    let cache = DeviceMemory::allocate(&bound, ALLOCATION).unwrap();
    let mapping = Arc::new(Mapping::anonymous("kvrail-test", ALLOCATION).unwrap());
    let bytes: Vec<u8> = (0..ALLOCATION).map(|offset| byte_at(number, offset)).collect();
    mapping.write(0, &bytes).unwrap();
    let host = End::Host(HostRegistration::new(&bound, &mapping).unwrap());
    let device = End::Device(Arc::clone(&cache));
    let mut queue = CopyQueue::new(&bound, 1).unwrap();
    let whole = [Piece::contiguous(0, 0, ALLOCATION)];
    queue.submit(&bound, (&host, &device), &whole, 0).unwrap();
    queue.drain(&bound, &mut Vec::new()).unwrap();
    let file = cache.export(&bound).unwrap();
    let devices = EngineDevices::sharing(Arc::clone(&scene.context), Arc::new([]), None);
    let device = DeviceUuid(scene.context.device().attributes().uuid);
    let source = MemorySource::CudaShareable { device };
    let nobody = (&Claims::default(), &Arc::default());
    let imported = devices.import((&source, cache.len()), Some(file), nobody).unwrap();
    (cache, imported)
}

/// An engine has published its blocks; what is in each.
fn published(scene: &mut Scene, tensors: Vec<Tensor>) -> Vec<(Found, Vec<u8>)> {
    let layout = Layout::new(tensors, BLOCKS, |_| Some(ALLOCATION)).unwrap();
    let memory = [0, 1].map(|number| allocation(scene, number).1).to_vec();
    let blocks = (0..BLOCKS).map(BlockId);
    let of = |block: BlockId| {
        let bytes = layout.segments(block).flat_map(|segment| {
            let offsets = segment.offset..segment.offset + u64::from(segment.len);
            offsets.map(move |offset| byte_at(segment.allocation.0, offset))
        });
        let bytes: Vec<u8> = bytes.collect();
        let len = u32::try_from(bytes.len()).unwrap();
        let extent = Extent { pool: POOL, offset: block.0.into(), len };
        let payload = Payload { extent, checksum: checksum_bytes(&bytes) };
        let (key, origin) = (key(u8::try_from(block.0).unwrap()), Origin::Saved { owners: None });
        // As pinned as a lend has it.
        (scene.residency.store.insert(key, payload, origin, true).unwrap(), bytes)
    };
    let found = blocks.map(of).collect();
    let lies = Arc::new(Imported { layout, memory });
    scene.landing.serve(ServedLayout {
        pool: POOL,
        number: 1,
        blocks: BLOCKS,
        bytes: OPENED,
        regions: Vec::new(),
        tensors: Vec::new(),
        in_host_memory: false,
        lies,
        places: Vec::new(),
    });
    found
}

/// What a peer reads of a block, once it is ready.
fn lent(scene: &mut Scene, found: &Found) -> Vec<u8> {
    let deadline = Deadline::after(PATIENCE);
    scene.landing.look_again();
    while !scene.landing.prepare(found) {
        assert!(deadline.pause(Duration::from_millis(1)), "not in time");
    }
    let place = scene.landing.remote(&found.payload.extent);
    let Some(crate::protocol::Place::Span(span)) = place else { panic!("{place:?}") };
    assert_eq!((span.rkey, span.len), (3, found.payload.extent.len));
    let mut bytes = vec![0; span.len as usize];
    scene.leaving.read(span.address, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_block_in_pieces_is_gathered_once_and_lent_in_one() {
    let Some(standin) = StandIn::new() else { return };
    // Whether cards reach the pool says nothing of an engine's memory.
    for direct in [false, true] {
        let mut scene = Scene::new(&standin, direct);
        let blocks = published(&mut scene, two_allocations());
        let waits = standin.calls("cuStreamSynchronize");
        for (found, bytes) in &blocks {
            assert!(lent(&mut scene, found) == *bytes, "{found:?}");
        }
        let copied = gathered(&standin);
        for (found, bytes) in &blocks {
            assert!(lent(&mut scene, found) == *bytes, "{found:?}");
        }
        assert_eq!(gathered(&standin), copied, "the next reader finds the copy there");
        assert_eq!(standin.calls("cuStreamSynchronize"), waits, "the data thread does not wait");
    }
}

#[test]
fn a_block_that_is_being_copied_does_not_go() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let blocks = published(&mut scene, two_allocations());
    let ((copied, bytes), (other, _)) = (&blocks[2], &blocks[3]);
    assert!(scene.landing.lets_go(copied.id));
    standin.control(HELD);
    for _ in 0..10 {
        assert!(!scene.landing.prepare(copied), "lent before its copy had ended");
        assert!(scene.landing.remote(&copied.payload.extent).is_none());
        assert!(!scene.landing.lets_go(copied.id));
        assert!(scene.landing.lets_go(other.id));
    }
    standin.control("");
    let deadline = Deadline::after(PATIENCE);
    while !scene.landing.lets_go(copied.id) {
        assert!(deadline.pause(Duration::from_millis(1)), "not in time");
    }
    assert!(lent(&mut scene, copied) == *bytes);
}

#[test]
fn the_data_thread_begins_a_bounded_number_of_copies_at_once() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let blocks = published(&mut scene, forty_tensors());
    standin.control(HELD);
    let mut expected = gathered(&standin);
    for begun in [4, 4, 0] {
        scene.landing.look_again();
        for (found, _) in &blocks {
            assert!(!scene.landing.prepare(found));
        }
        // The fourth of them uses up the 128 calls.
        expected += begun * 40;
        assert_eq!(gathered(&standin), expected);
    }
    standin.control("");
    for (found, bytes) in &blocks {
        assert!(lent(&mut scene, found) == *bytes, "{found:?}");
    }
}

#[test]
fn a_lost_gpu_lends_nothing_of_an_engine_and_keeps_nothing() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let blocks = published(&mut scene, two_allocations());
    lent(&mut scene, &blocks[0].0);
    standin.control("cuMemcpy2DAsync_v2 fail 719\ncuMemcpyDtoHAsync_v2 fail 719");
    for (found, _) in &blocks[1..] {
        assert!(scene.landing.prepare(found), "there is nothing to wait for");
    }
    assert!(scene.residency.device_is_lost());
    for (found, _) in &blocks {
        assert!(scene.landing.remote(&found.payload.extent).is_none());
        assert!(scene.landing.lets_go(found.id));
    }
    assert_eq!(scene.landing.pause_ms(), 0);
    standin.control("");
}

#[test]
fn the_copy_of_an_earlier_block_in_the_same_place_is_not_lent() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let blocks = published(&mut scene, forty_tensors());
    let (earlier, bytes) = &blocks[7];
    assert!(lent(&mut scene, earlier) == *bytes);
    let store = Arc::clone(&scene.residency.store);
    store.unpin(earlier.id).unwrap();
    store.remove(earlier.id).unwrap();
    let (key, origin) = (key(100), Origin::Saved { owners: None });
    let later = store.insert(key, earlier.payload, origin, true).unwrap();
    assert_eq!(later.id.slot, earlier.id.slot, "what the copy is kept for looks like it is in use");
    // All calls of this turn go to other blocks.
    scene.landing.look_again();
    for (found, _) in &blocks[..4] {
        scene.landing.prepare(found);
    }
    let copied = gathered(&standin);
    assert!(!scene.landing.prepare(&later), "there is no copy of it");
    assert!(lent(&mut scene, &later) == *bytes);
    assert_eq!(gathered(&standin), copied + 40);
}

#[test]
fn what_an_engine_has_opened_may_be_lent_as_long_as_it_is_open() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let closed = scene.landing.lendable().unwrap();
    published(&mut scene, two_allocations());
    for (grows, quota) in [(false, 0), (true, OPENED / 2)] {
        scene.landing.quota_grows = grows;
        let (marks, in_place_quota) = scene.landing.lendable().unwrap();
        assert_eq!((marks.high_own_bytes, in_place_quota), (closed.0.high_own_bytes, quota));
        assert!(marks.high_bytes > closed.0.high_bytes, "{marks:?}");
    }
    scene.landing.forget(POOL);
    assert_eq!(scene.landing.lendable().unwrap(), closed);
}
