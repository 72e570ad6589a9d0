//! What staging costs: no allocation per block. The GPU is the stand-in of `ffi/`.
//!
//! Alone in its process, which counts its allocations.
#![cfg(feature = "gpu")]
#![expect(clippy::unwrap_used, reason = "a test that meets the unexpected fails")]

#[allow(dead_code, reason = "only a part of it is used here")]
mod cuda_standin;

use std::time::Duration;

use kvrail::cuda::{Bound, Context, DeviceMemory, Driver, Staging, StagingCopy};
use kvrail::runtime::deadline::Deadline;
use kvrail::sys::allocations::{Counting, of_thread};

use cuda_standin::StandIn;

#[global_allocator]
static COUNTING: Counting = Counting;

const BLOCK: u64 = 16 << 10;

/// Blocks that the ring holds, so that most wait for one before them.
const RING: u64 = 8;

/// Lets so many blocks through, both ways in turn.
fn stage(bound: &Bound<'_>, staging: &mut Staging<u64>, blocks: u64) {
    let deadline = Deadline::after(Duration::from_secs(60));
    let (mut begun, mut ended) = (0, 0);
    while ended < blocks {
        while begun < blocks
            && let Some(slot) = staging.take(BLOCK)
        {
            let way = match begun % 2 {
                0 => StagingCopy::ToDevice,
                _ => StagingCopy::FromDevice,
            };
            staging.begin(bound, way, (slot, begun % RING * BLOCK), begun).unwrap();
            begun += 1;
        }
        staging
            .poll(bound, |_slot, number| {
                assert_eq!(number, ended, "in the order begun");
                ended += 1;
            })
            .unwrap();
        assert!(deadline.remaining().is_some(), "{ended} of {blocks}");
    }
}

#[test]
fn a_staged_block_costs_no_allocation() {
    let Some(standin) = StandIn::new() else { return };
    let driver = Driver::open(standin.library()).unwrap();
    let context = Context::primary(&driver.device(0).unwrap()).unwrap();
    let bound = context.bind().unwrap();
    let memory = DeviceMemory::allocate(&bound, RING * BLOCK).unwrap();
    let mut staging = Staging::new(&bound, &memory, RING * BLOCK).unwrap();
    // Whatever grows has grown after the first rounds.
    stage(&bound, &mut staging, 64);
    let before = of_thread();
    stage(&bound, &mut staging, 1000);
    assert_eq!(of_thread() - before, 0, "allocations for 1000 blocks");
    // The count counts.
    drop(Box::new(7_u64));
    assert!(of_thread() > before);
}
