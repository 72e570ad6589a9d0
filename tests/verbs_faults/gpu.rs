//! The device goes away while a GPU's memory is registered with it. The GPU is the stand-in of `ffi/`.

use std::sync::Arc;

use kvrail::cuda::{Context, DeviceMemory, Driver};
use kvrail::fabric::{Access, Region};
use kvrail::memory::{ForeignFabric, ForeignMemory, GpuDirect};

use crate::conformance::{End, Pair};
use crate::cuda_standin::StandIn;
use crate::interface::{Removal, netdev};
use crate::rdma::Verbs;
use crate::{BLOCKS, BYTES, many};

/// A GPU's memory, registered at one end.
fn registered(end: &mut End<Verbs>, context: &Arc<Context>) -> Region {
    let memory = DeviceMemory::allocate(&context.bind().unwrap(), BYTES as u64).unwrap();
    let memory = memory as Arc<dyn ForeignMemory>;
    let rungs = GpuDirect::Peermem.direct();
    let (region, climb) = end.fabric.register_foreign(&memory, Access::RemoteRead, rungs).unwrap();
    assert!(region.is_some(), "{climb:?}");
    region.unwrap()
}

fn used(context: &Arc<Context>) -> u64 {
    let (free, total) = context.bind().unwrap().memory().unwrap();
    total - free
}

/// READs from GPU memory into GPU memory end once each when their device is removed; the memory stays
/// until its registrations have gone with the fabrics, comes back then, and a new device takes it.
#[test]
fn a_device_that_is_removed_gives_gpu_memory_back() {
    let (Some(netdev), Some(standin)) = (netdev(), StandIn::new()) else { return };
    standin.control("set registrable 1");
    let driver = Driver::open(standin.library()).unwrap();
    let context = Context::primary(&driver.device(0).unwrap()).unwrap();
    let mut pair = Pair::<Verbs>::new();
    let (remote, local) = (registered(&mut pair.b, &context), registered(&mut pair.a, &context));
    let taken = used(&context);
    assert!(taken >= 2 * BYTES as u64);
    pair.post(&many(&remote, &local));
    let removal = Removal::begin(&mut pair, |_| {
        assert_eq!(used(&context), taken, "let go while READs may land in it");
    });
    drop(pair);
    assert_eq!(used(&context), 0, "a registration holds it still");
    removal.end(&netdev);
    let mut pair = Pair::<Verbs>::new();
    let (remote, local) = (registered(&mut pair.b, &context), registered(&mut pair.a, &context));
    pair.post(&many(&remote, &local));
    pair.succeed(BLOCKS as usize);
}
