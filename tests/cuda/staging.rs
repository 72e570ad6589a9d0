//! Staging: slots, the copies that own them, and what an exhausted ring answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::cuda::{Bound, Context, CopyQueue, DeviceMemory, End, Piece, Staging, StagingCopy};

use crate::cuda_standin::StandIn;
use crate::{context, host};

const LEN: u64 = 1 << 20;
const BLOCK: u64 = 128 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

struct Scene {
    context: Arc<Context>,
    staging: Staging<u64>,
}

impl Scene {
    fn new(standin: &StandIn) -> Self {
        let context = context(standin);
        let bound = context.bind().unwrap();
        let device = DeviceMemory::allocate(&bound, LEN).unwrap();
        let staging = Staging::new(&bound, &device, 2 * BLOCK).unwrap();
        drop(bound);
        Self { context, staging }
    }
}

/// Polls until so many copies have ended; what each owned, and the first byte of its slot.
#[expect(clippy::disallowed_methods, reason = "a deadline of a test")]
fn ended(staging: &mut Staging<u64>, bound: &Bound<'_>, count: usize) -> Vec<(u64, u8)> {
    let end = Instant::now() + PATIENCE;
    let mapping = Arc::clone(staging.mapping());
    let mut ended = Vec::new();
    while ended.len() < count {
        staging
            .poll(bound, |slot, owned| {
                let mut byte = [0];
                mapping.read(slot.offset(), &mut byte).unwrap();
                ended.push((owned, byte[0]));
            })
            .unwrap();
        assert!(Instant::now() < end, "{ended:?}");
        std::thread::yield_now();
    }
    ended
}

#[test]
fn blocks_go_through_a_ring_that_is_smaller_than_they_are_together() {
    let Some(standin) = StandIn::new() else { return };
    let Scene { context, mut staging } = Scene::new(&standin);
    let bound = context.bind().unwrap();
    standin.control("cuMemcpyHtoDAsync_v2 late 2");
    let blocks: Vec<u64> = (0..LEN / BLOCK).collect();
    for block in &blocks {
        let slot = match staging.take(BLOCK) {
            Some(slot) => slot,
            None => {
                ended(&mut staging, &bound, 1);
                staging.take(BLOCK).unwrap()
            }
        };
        let bytes = vec![u8::try_from(*block + 1).unwrap(); usize::try_from(BLOCK).unwrap()];
        staging.mapping().write(slot.offset(), &bytes).unwrap();
        staging.begin(&bound, StagingCopy::ToDevice, (slot, block * BLOCK), *block).unwrap();
    }
    let left = staging.in_flight();
    ended(&mut staging, &bound, left);
    for block in blocks {
        let slot = staging.take(BLOCK).unwrap();
        staging.begin(&bound, StagingCopy::FromDevice, (slot, block * BLOCK), block).unwrap();
        let back = ended(&mut staging, &bound, 1);
        assert_eq!(back, [(block, u8::try_from(block + 1).unwrap())]);
    }
    assert_eq!((staging.used(), standin.calls("cuStreamSynchronize")), (0, 0));
}

#[test]
fn an_exhausted_ring_answers_at_once_and_recovers() {
    let Some(standin) = StandIn::new() else { return };
    let Scene { context, mut staging } = Scene::new(&standin);
    let bound = context.bind().unwrap();
    standin.control("cuMemcpyHtoDAsync_v2 hold 1");
    let (first, second) = (staging.take(BLOCK).unwrap(), staging.take(BLOCK).unwrap());
    assert!(staging.take(1).is_none());
    assert!(staging.fits(2 * BLOCK) && !staging.fits(2 * BLOCK + 1));
    staging.begin(&bound, StagingCopy::ToDevice, (first, 0), 1).unwrap();
    staging.poll(&bound, |_, _| ()).unwrap();
    assert!(staging.take(1).is_none(), "the copy owns its slot");
    standin.control("");
    ended(&mut staging, &bound, 1);
    assert!(staging.take(BLOCK).is_some());
    drop(second);
    assert_eq!(staging.used(), 0, "a slot that nobody wants any more comes back");
}

#[test]
fn what_was_not_begun_is_handed_back() {
    let Some(standin) = StandIn::new() else { return };
    let Scene { context, mut staging } = Scene::new(&standin);
    let bound = context.bind().unwrap();
    let slot = staging.take(BLOCK).unwrap();
    let (error, back) =
        staging.begin(&bound, StagingCopy::ToDevice, (slot, 8 << 20), 5).unwrap_err();
    assert!(matches!(error, kvrail::cuda::CudaError::Bounds(_)), "{error}");
    assert_eq!(back.map(|(slot, owned)| (slot.len(), owned)), Some((BLOCK, 5)));
    assert_eq!((staging.used(), staging.in_flight()), (0, 0));
}

#[test]
fn a_lost_device_gives_nothing_back_before_the_end() {
    let Some(standin) = StandIn::new() else { return };
    let Scene { context, mut staging } = Scene::new(&standin);
    let bound = context.bind().unwrap();
    let slot = staging.take(BLOCK).unwrap();
    standin.control("* fail 700");
    let (error, back) = staging.begin(&bound, StagingCopy::ToDevice, (slot, 0), 9).unwrap_err();
    assert!(error.is_lost() && back.is_none(), "it may have begun: {error}");
    assert!(staging.poll(&bound, |_, _| ()).unwrap_err().is_lost());
    assert_eq!(staging.in_flight(), 1, "its slot is not taken again");
}

/// Device memory full of a byte.
fn filled(context: &Arc<Context>, byte: u8) -> Arc<DeviceMemory> {
    let bound = context.bind().unwrap();
    let (host, memory) = (host(context, LEN), DeviceMemory::allocate(&bound, LEN).unwrap());
    host.mapping().write(0, &vec![byte; usize::try_from(LEN).unwrap()]).unwrap();
    let ends = (End::Host(host), End::Device(Arc::clone(&memory)));
    let mut queue = CopyQueue::new(&bound, 1).unwrap();
    queue.submit(&bound, (&ends.0, &ends.1), &[Piece::contiguous(0, 0, LEN)], 0).unwrap();
    queue.drain(&bound, &mut Vec::new()).unwrap();
    memory
}

#[test]
fn rows_of_several_memories_are_gathered_in_one_slot_which_holds_them() {
    let Some(standin) = StandIn::new() else { return };
    let Scene { context, mut staging } = Scene::new(&standin);
    let bound = context.bind().unwrap();
    let (one, other) = (filled(&context, 1), filled(&context, 2));
    // Thirty-two bytes of each in turn, four times.
    let rows = Piece { from: 100, from_pitch: 1000, to: 0, to_pitch: 64, width: 32, rows: 4 };
    let between = Piece { from: 0, from_pitch: 512, to: 32, ..rows };
    let kept = Arc::downgrade(&other);
    standin.control("cuMemcpy2DAsync_v2 hold 1");
    // Not at the start of the ring, so that targets are seen to count from the slot.
    let (first, slot) = (staging.take(64).unwrap(), staging.take(256).unwrap());
    let at = slot.offset();
    let pieces = [(Arc::clone(&one), rows), (other, between)];
    staging.gather(&bound, slot, pieces.into_iter(), 7).unwrap();
    staging.poll(&bound, |_, _| panic!("it ended before its copies had")).unwrap();
    assert!(kept.upgrade().is_some(), "the copy holds what it reads");
    standin.control("");
    assert_eq!(ended(&mut staging, &bound, 1), [(7, 1)]);
    let mut bytes = [0; 256];
    staging.mapping().read(at, &mut bytes).unwrap();
    let expected: Vec<u8> = [[1; 32], [2; 32]].concat().repeat(4);
    assert_eq!(bytes.as_slice(), expected);
    assert!(kept.upgrade().is_none(), "and lets go of it then");
    drop(first);

    let slot = staging.take(256).unwrap();
    let beyond = Piece { to: 33, ..rows };
    let refused = staging.gather(&bound, slot, std::iter::once((one, beyond)), 8);
    let (error, back) = refused.unwrap_err();
    assert!(matches!(error, kvrail::cuda::CudaError::Bounds(_)), "{error}");
    assert_eq!(back.map(|(slot, owned)| (slot.len(), owned)), Some((256, 8)));
    assert_eq!((staging.used(), staging.in_flight()), (0, 0));
}
