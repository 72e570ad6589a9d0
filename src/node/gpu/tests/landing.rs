//! Blocks from peers that land in an engine's memory on this GPU: they are brought together in staging
//! memory to be verified, and stay where they are.

use super::in_place::{
    ALLOCATION, BLOCKS, HELD, POOL, allocation, byte_at, forty_tensors, gathered, two_allocations,
};
use super::*;
use crate::layout::{BlockId, Layout, Tensor};
use crate::protocol::{Place, RegionEntry};
use crate::runtime::door::Imported;
use crate::runtime::in_place::{InPlace, ServedLayout};
use crate::types::Extent;

/// The regions of both allocations.
const LANDS: [RegionId; 2] = [RegionId(11), RegionId(12)];

/// An engine with a layout that cards reach.
pub(super) struct Engine {
    lies: Arc<Imported>,
    caches: [End; 2],
    /// What shall be in both.
    images: [Arc<HostRegistration>; 2],
    queue: CopyQueue,
}

impl Engine {
    pub(super) fn serve(scene: &mut Scene, tensors: Vec<Tensor>) -> Self {
        let layout = Layout::new(tensors, BLOCKS, |_| Some(ALLOCATION)).unwrap();
        let [first, second] = [0, 1].map(|number| allocation(scene, number));
        let bound = scene.context.bind().unwrap();
        let images = [0, 1].map(|_| {
            let image = Mapping::anonymous("kvrail-test", ALLOCATION).unwrap();
            HostRegistration::new(&bound, &Arc::new(image)).unwrap()
        });
        let queue = CopyQueue::new(&bound, 2).unwrap();
        drop(bound);
        let lies = Arc::new(Imported { layout, memory: vec![first.1, second.1] });
        scene.landing.serve(ServedLayout {
            pool: POOL,
            number: 1,
            blocks: BLOCKS,
            bytes: 0,
            regions: LANDS.map(|id| RegionEntry::from(&region(id.0, ALLOCATION))).to_vec(),
            tensors: Vec::new(),
            in_host_memory: false,
            lies: Arc::clone(&lies),
            places: LANDS.map(Some).to_vec(),
        });
        let caches = [first.0, second.0].map(End::Device);
        Self { lies, caches, images, queue }
    }

    fn place(&self, block: u32) -> Extent {
        Extent { pool: POOL, offset: block.into(), len: self.lies.layout.block_bytes() }
    }

    /// Memory for a block that arrives here.
    pub(super) fn arrive(&self, scene: &mut Scene, block: u32) -> Memory {
        scene.landing.land_at(&self.place(block)).expect("it can land there")
    }

    /// The READs of a card scatter a block; its checksum.
    pub(super) fn land(&mut self, scene: &Scene, (memory, number): (&Memory, u8)) -> u64 {
        let len = self.lies.layout.block_bytes();
        let bytes: Vec<u8> = (0..len).map(|at| byte_at(number.into(), u64::from(at) + 1)).collect();
        let mut rest = bytes.as_slice();
        for span in scene.landing.spans(memory) {
            let (now, later) = rest.split_at(span.len as usize);
            let image = LANDS.iter().position(|id| *id == span.region).expect("a region of it");
            self.images[image].mapping().write(span.offset, now).unwrap();
            rest = later;
        }
        assert!(rest.is_empty(), "its spans are as long as it is");
        self.write(scene);
        checksum_bytes(&bytes)
    }

    /// Writes all that is on the GPU.
    fn write(&mut self, scene: &Scene) {
        let bound = scene.context.bind().unwrap();
        for (cache, image) in self.caches.iter().zip(&self.images) {
            let host = End::Host(Arc::clone(image));
            let whole = [Piece::contiguous(0, 0, ALLOCATION)];
            self.queue.submit(&bound, (&host, cache), &whole, 0).unwrap();
        }
        self.queue.drain(&bound, &mut Vec::new()).unwrap();
    }

    /// Blocks that have landed, and their checksums.
    fn landed(&mut self, scene: &mut Scene, count: u32) -> Vec<(Memory, u64)> {
        let one = |block| {
            let memory = self.arrive(scene, block);
            let sum = self.land(scene, (&memory, u8::try_from(block).unwrap()));
            (memory, sum)
        };
        (0..count).map(one).collect()
    }
}

#[test]
fn a_block_that_landed_in_pieces_is_summed_up_behind_the_flush_and_published_there() {
    for (ordering, flushes) in [(0, 1), (100, 0)] {
        // Whether cards reach the pool says nothing of an engine's memory.
        for direct in [false, true] {
            let Some(standin) = StandIn::new() else { return };
            standin.control(&format!("set ordering {ordering}"));
            let mut scene = Scene::new(&standin, direct);
            let mut engine = Engine::serve(&mut scene, two_allocations());
            let mut memory = engine.arrive(&mut scene, 3);
            assert_eq!(scene.landing.spans(&memory).count(), 3 * 2 + 2);
            let sum = engine.land(&scene, (&memory, 7));
            standin.log();
            let waits = standin.calls("cuStreamSynchronize");
            assert_eq!(scene.settle(&mut memory), Settled::Now);
            assert_eq!(standin.calls("cuStreamSynchronize"), waits, "the data thread waits");
            assert_eq!(scene.landing.checksum(&memory), sum);
            let log = standin.logged();
            let flush = "call cuFlushGPUDirectRDMAWrites";
            assert_eq!(log.iter().filter(|line| *line == flush).count(), flushes, "{ordering}");
            let gather = log.iter().position(|line| line.starts_with("call cuMemcpy")).unwrap();
            assert!(flushes == 0 || first(&log, flush) < gather, "{log:?}");
            let published = scene.landing.publish(key(1), memory, sum, EvictionRank::FIRST);
            let Published::Stored(found) = published else { panic!("{published:?}") };
            assert_eq!(found.payload.extent, engine.place(3));
            let place = scene.landing.remote(&found.payload.extent);
            assert!(matches!(place, Some(Place::Block { layout: 1, block: BlockId(3), .. })));
            let used = [MemoryKind::Device, MemoryKind::Host].map(|it| scene.residency.usage(it));
            assert_eq!(used.map(|usage| usage.used), [0, 0], "no pool has a copy");
        }
    }
}

#[test]
fn wrong_bytes_in_any_piece_give_another_sum() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let mut engine = Engine::serve(&mut scene, two_allocations());
    let memory = engine.arrive(&mut scene, 5);
    let sum = engine.land(&scene, (&memory, 9));
    drop(memory);
    let memory = engine.arrive(&mut scene, 5);
    let spans: Vec<_> = scene.landing.spans(&memory).collect();
    drop(memory);
    for span in spans {
        let image = LANDS.iter().position(|id| *id == span.region).unwrap();
        let last = span.offset + u64::from(span.len) - 1;
        for equal in [false, true] {
            let mut byte = [0];
            engine.images[image].mapping().read(last, &mut byte).unwrap();
            engine.images[image].mapping().write(last, &[byte[0] ^ 1]).unwrap();
            engine.write(&scene);
            let mut memory = engine.arrive(&mut scene, 5);
            scene.landing.look_again();
            assert_eq!(scene.settle(&mut memory), Settled::Now);
            assert_eq!(scene.landing.checksum(&memory) == sum, equal, "{span:?}");
        }
    }
}

#[test]
fn the_data_thread_begins_to_look_at_a_bounded_number_of_blocks_at_once() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let mut engine = Engine::serve(&mut scene, forty_tensors());
    let mut blocks = engine.landed(&mut scene, BLOCKS);
    standin.control(HELD);
    let mut expected = gathered(&standin);
    for begun in [4, 4, 0] {
        scene.landing.look_again();
        for (memory, _) in &mut blocks {
            assert_eq!(scene.landing.settle(memory), Settled::Later);
        }
        // The fourth of them uses up the 128 calls.
        expected += begun * 40;
        assert_eq!(gathered(&standin), expected);
    }
    standin.control("");
    for (memory, sum) in &mut blocks {
        assert_eq!(scene.settle(memory), Settled::Now);
        assert_eq!(scene.landing.checksum(memory), *sum);
    }
}

#[test]
fn a_block_waits_for_staging_memory_and_then_goes_on() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let mut engine = Engine::serve(&mut scene, two_allocations());
    let (mut memory, sum) = engine.landed(&mut scene, 1).pop().unwrap();
    // Blocks for the pool land in staging memory: these two take all of it.
    let (taken, other) = (scene.reserve(), scene.reserve());
    let copied = gathered(&standin);
    for _ in 0..10 {
        scene.landing.look_again();
        assert_eq!(scene.landing.settle(&mut memory), Settled::Later);
    }
    assert_eq!(gathered(&standin), copied);
    drop(taken);
    assert_eq!(scene.settle(&mut memory), Settled::Now);
    assert_eq!(scene.landing.checksum(&memory), sum);
    drop(other);
}

#[test]
fn an_engines_memory_stays_until_a_copy_that_was_given_up_has_ended_and_then_goes() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let mut engine = Engine::serve(&mut scene, two_allocations());
    let mut blocks = engine.landed(&mut scene, 2);
    standin.control(HELD);
    for (memory, _) in &mut blocks {
        assert_eq!(scene.landing.settle(memory), Settled::Later);
    }
    // The fetch is given up, and its engine ends.
    drop(blocks);
    scene.landing.forget(POOL);
    let Engine { lies, .. } = engine;
    let lies = {
        let weak = Arc::downgrade(&lies);
        drop(lies);
        weak
    };
    for _ in 0..10 {
        scene.landing.look_again();
        assert!(lies.upgrade().is_some(), "it goes from under a copy");
    }
    standin.control("");
    // No other block ever lands here.
    let deadline = Deadline::after(PATIENCE);
    while lies.upgrade().is_some() {
        scene.landing.look_again();
        assert!(deadline.pause(Duration::from_millis(1)), "it is kept");
    }
}

#[test]
fn a_block_that_the_driver_does_not_look_at_fails_alone() {
    for (ordering, call) in
        [(0, "cuFlushGPUDirectRDMAWrites"), (0, "cuMemcpy2DAsync_v2"), (100, "cuEventRecord")]
    {
        let Some(standin) = StandIn::new() else { return };
        standin.control(&format!("set ordering {ordering}"));
        let mut scene = Scene::new(&standin, false);
        let mut engine = Engine::serve(&mut scene, two_allocations());
        let mut blocks = engine.landed(&mut scene, 3);
        let (mut refused, _) = blocks.remove(1);
        standin.control(&format!("set ordering {ordering}\n{call} fail 801"));
        assert_eq!(scene.settle(&mut refused), Settled::Never(Scope::Local), "{call}");
        drop(refused);
        standin.control(&format!("set ordering {ordering}"));
        assert!(!scene.residency.device_is_lost(), "{call}");
        for (memory, sum) in &mut blocks {
            assert_eq!(scene.settle(memory), Settled::Now, "{call}");
            assert_eq!(scene.landing.checksum(memory), *sum, "{call}");
        }
        // Its place can be used again.
        let mut again = engine.arrive(&mut scene, 1);
        let sum = engine.land(&scene, (&again, 77));
        assert_eq!(scene.settle(&mut again), Settled::Now);
        assert_eq!(scene.landing.checksum(&again), sum);
    }
}

#[test]
fn nothing_lands_in_the_memory_of_a_gpu_that_is_lost() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let mut engine = Engine::serve(&mut scene, two_allocations());
    let mut blocks = engine.landed(&mut scene, 3);
    assert_eq!(scene.settle(&mut blocks[0].0), Settled::Now);
    // One is being copied, the other one has landed, the first one is about to be published.
    standin.control(&format!("cuMemcpy2DAsync_v2 lose 719\n{HELD}"));
    assert_eq!(scene.landing.settle(&mut blocks[1].0), Settled::Later);
    standin.control("");
    assert_eq!(scene.settle(&mut blocks[1].0), Settled::Never(Scope::Local));
    assert_eq!(scene.settle(&mut blocks[2].0), Settled::Never(Scope::Local));
    assert!(scene.residency.device_is_lost());
    let (memory, sum) = blocks.remove(0);
    let published = scene.landing.publish(key(1), memory, sum, EvictionRank::FIRST);
    assert_eq!(published, Published::Full);
    assert!(scene.landing.land_at(&engine.place(4)).is_none());
    assert!(matches!(scene.reserve(), Memory::Host(_)), "the rest goes on");
}

#[test]
fn nothing_lands_where_no_card_reaches_or_nobody_is() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let engine = Engine::serve(&mut scene, two_allocations());
    let place = engine.place(0);
    assert!(scene.landing.land_at(&place).is_some());
    let tier = scene.landing.tier.take();
    assert!(scene.landing.land_at(&place).is_none(), "without a GPU nothing verifies it");
    scene.landing.tier = tier;
    scene.landing.forget(POOL);
    assert!(scene.landing.land_at(&place).is_none());
}
