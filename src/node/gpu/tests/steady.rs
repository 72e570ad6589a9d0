//! What a block costs the data thread's tier once everything has grown: nothing of the heap. It lands, in
//! staging memory or where it stays; is copied and verified; takes the place of the oldest one; is copied
//! out, and lent.

use super::in_place::{BLOCKS, two_allocations};
use super::landing::Engine;
use super::*;
use crate::sys::allocations::of_thread;
use crate::types::ResidentId;

/// Rounds until everything has grown: more than each table holds. Then rounds that are counted.
const WARM: u32 = 64;
const COUNTED: u32 = 128;

/// What was asked of the heap in pieces of work, beside which a test asks for its own.
#[derive(Default)]
struct Asked(u64);

impl Asked {
    fn by<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let before = of_thread();
        let done = work();
        self.0 += of_thread() - before;
        done
    }

    /// Works until it says so.
    fn until(&mut self, mut work: impl FnMut() -> bool) {
        let deadline = Deadline::after(PATIENCE);
        while !self.by(&mut work) {
            assert!(deadline.pause(Duration::from_millis(1)), "not in time");
        }
    }
}

/// A block comes from a peer, and goes to another one.
fn pass(scene: &mut Scene, number: u8, (out, asked): (&mut Vec<Memory>, &mut Asked)) {
    asked.by(|| scene.landing.reserve(&[BLOCK], out));
    let mut memory = out.pop().expect("there is room");
    assert!(matches!(memory, Memory::Gpu(_)), "{memory:?}");
    scene.land(&memory, number);
    asked.until(|| scene.landing.settle(&mut memory) == Settled::Now);
    let sum = asked.by(|| scene.landing.checksum(&memory));
    assert_eq!(sum, checksum_bytes(&bytes(number)));
    let published =
        asked.by(|| scene.landing.publish(key(number), memory, sum, EvictionRank::FIRST));
    let Published::Stored(found) = published else { panic!("{published:?}") };
    asked.until(|| {
        scene.landing.look_again();
        scene.landing.prepare(&found)
    });
    assert!(asked.by(|| scene.landing.remote(&found.payload.extent)).is_some());
    assert_eq!(asked.by(|| scene.landing.pause_ms()), 0);
    asked.by(|| scene.residency.store.unpin(found.id)).unwrap();
}

#[test]
fn a_block_that_lands_and_is_lent_costs_no_allocation() {
    for direct in [false, true] {
        let Some(standin) = StandIn::new() else { return };
        let mut scene = Scene::new(&standin, direct);
        let mut out = Vec::with_capacity(1);
        let (mut growing, mut asked) = (Asked::default(), Asked::default());
        let mut numbers = (0..=u8::MAX).cycle();
        for _ in 0..WARM {
            pass(&mut scene, numbers.next().unwrap(), (&mut out, &mut growing));
        }
        // The pool is full long since: each block has a victim.
        assert_eq!(scene.residency.usage(MemoryKind::Device).used, GPU_POOL);
        for _ in 0..COUNTED {
            pass(&mut scene, numbers.next().unwrap(), (&mut out, &mut asked));
        }
        assert_eq!(asked.0, 0, "for {COUNTED} blocks, direct: {direct}");
        asked.by(|| drop(std::hint::black_box(Box::new(7_u64))));
        assert_eq!(asked.0, 1, "the count counts");
    }
}

/// A block comes from a peer to a place in an engine's layout, and the one before is taken back.
fn pass_in_place(
    (scene, engine): (&mut Scene, &mut Engine),
    before: Option<ResidentId>,
    (number, asked): (u8, &mut Asked),
) -> ResidentId {
    let block = u32::from(number) % BLOCKS;
    let mut memory = asked.by(|| engine.arrive(scene, block));
    let sum = engine.land(scene, (&memory, number));
    asked.until(|| {
        scene.landing.look_again();
        scene.landing.settle(&mut memory) == Settled::Now
    });
    assert_eq!(asked.by(|| scene.landing.checksum(&memory)), sum);
    let published =
        asked.by(|| scene.landing.publish(key(number), memory, sum, EvictionRank::FIRST));
    let Published::Stored(found) = published else { panic!("{published:?}") };
    asked.by(|| scene.residency.store.unpin(found.id)).unwrap();
    if let Some(before) = before {
        asked.by(|| scene.residency.store.remove(before)).unwrap();
    }
    found.id
}

#[test]
fn a_block_that_lands_in_a_layout_costs_no_allocation() {
    let Some(standin) = StandIn::new() else { return };
    let mut scene = Scene::new(&standin, false);
    let mut engine = Engine::serve(&mut scene, two_allocations());
    let (mut growing, mut asked) = (Asked::default(), Asked::default());
    let (mut numbers, mut before) = ((0..=u8::MAX).cycle(), None);
    for round in 0..WARM + COUNTED {
        let asked = if round < WARM { &mut growing } else { &mut asked };
        let number = (numbers.next().unwrap(), asked);
        before = Some(pass_in_place((&mut scene, &mut engine), before, number));
    }
    assert_eq!(asked.0, 0, "for {COUNTED} blocks");
}
