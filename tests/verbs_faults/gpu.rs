//! The device goes away while a GPU's memory is registered with it. The GPU is the stand-in of `ffi/`.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::cuda::{Context, DeviceMemory, Driver};
use kvrail::fabric::{Access, EventBatch, Fabric, FabricEvent, Region};
use kvrail::memory::{ForeignMemory, GpuDirect};

use crate::conformance::{End, Pair};
use crate::cuda_standin::StandIn;
use crate::interface::netdev;
use crate::rdma::{Verbs, device};
use crate::{BLOCKS, BYTES, many, run};

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
    let name = device().unwrap();
    standin.control("set registrable 1");
    let driver = Driver::open(standin.library()).unwrap();
    let context = Context::primary(&driver.device(0).unwrap()).unwrap();
    let mut pair = Pair::<Verbs>::new();
    let (remote, local) = (registered(&mut pair.b, &context), registered(&mut pair.a, &context));
    let taken = used(&context);
    assert!(taken >= 2 * BYTES as u64);
    let at_a = pair.at_a;
    pair.post(&many(&remote, &local));
    let mut removal = Command::new("rdma").args(["link", "delete", name]).spawn().unwrap();
    let start = Instant::now();
    let mut events = EventBatch::default();
    let (mut completed, mut closed) = (0, false);
    while !closed {
        assert!(start.elapsed() < Duration::from_secs(20), "{completed} completions");
        assert_eq!(used(&context), taken, "let go while READs may land in it");
        events.clear();
        pair.a.fabric.poll(&mut events, Duration::from_millis(1)).ok();
        for event in &events.events {
            match event {
                FabricEvent::Completed(_) => completed += 1,
                FabricEvent::Closed { connection, .. } if *connection == at_a => closed = true,
                _ => {}
            }
        }
        if completed == BLOCKS || start.elapsed() > Duration::from_secs(5) {
            pair.a.fabric.close(at_a);
        }
    }
    assert_eq!(completed, BLOCKS, "each READ ends once");
    drop(pair);
    assert_eq!(used(&context), 0, "a registration holds it still");
    let mut waited = 0;
    while removal.try_wait().unwrap().is_none() {
        assert!(waited < 1000, "the removal waits for somebody");
        waited += 1;
        run("sleep", &["0.01"]);
    }
    run("rdma", &["link", "add", name, "type", "rxe", "netdev", &netdev]);
    let mut pair = Pair::<Verbs>::new();
    let (remote, local) = (registered(&mut pair.b, &context), registered(&mut pair.a, &context));
    pair.post(&many(&remote, &local));
    pair.succeed(BLOCKS as usize);
}
