//! Staging: slots, the copies that own them, and what an exhausted ring answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::cuda::{Bound, Context, DeviceMemory, Staging, StagingCopy};

use crate::context;
use crate::cuda_standin::StandIn;

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
