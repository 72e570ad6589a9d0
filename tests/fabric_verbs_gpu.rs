//! Memory of a GPU on a NIC: the rungs as real verbs take or refuse them. The GPU is the stand-in of
//! `ffi/`, the verbs are those of the device under test.
#![cfg(feature = "gpu")]
#![expect(clippy::unwrap_used, reason = "a test that meets the unexpected fails")]

#[allow(dead_code, unused_imports, unused_macros, reason = "only its helpers are used here")]
mod conformance;
#[allow(dead_code, reason = "only a part of it is used here")]
mod cuda_standin;
mod rdma;

use std::path::Path;
use std::sync::Arc;

use kvrail::cuda::{
    Context, CopyQueue, DeviceMemory, Driver, End as Place, HostRegistration, Piece,
};
use kvrail::fabric::{Access, Fabric, Region};
use kvrail::memory::{
    Climb, ExportRefused, ExportedRange, ForeignFabric, ForeignMemory, GpuDirect, Mapping, Rung,
};

use conformance::{End, Pair, Random, Read, span};
use cuda_standin::StandIn;
use rdma::{Verbs, device};

const BYTES: usize = 2 << 20;
const LEN: u64 = BYTES as u64;

/// `ibv_reg_mr` of what no page is behind.
const EFAULT: i32 = 14;

/// A GPU of the stand-in, with memory that a host's bytes are copied to and from.
struct Gpu {
    context: Arc<Context>,
    memory: Arc<DeviceMemory>,
}

impl Gpu {
    fn new(standin: &StandIn) -> Self {
        let driver = Driver::open(standin.library()).unwrap();
        let context = Context::primary(&driver.device(0).unwrap()).unwrap();
        let memory = DeviceMemory::allocate(&context.bind().unwrap(), LEN).unwrap();
        Self { context, memory }
    }

    fn foreign(&self) -> Arc<dyn ForeignMemory> {
        Arc::clone(&self.memory) as Arc<dyn ForeignMemory>
    }

    /// Copies to the GPU where there are bytes to write; answers what is there.
    fn exchange(&self, write: Option<&[u8]>) -> Vec<u8> {
        let bound = self.context.bind().unwrap();
        let mapping = Arc::new(Mapping::anonymous("kvrail-test", LEN).unwrap());
        let host = HostRegistration::new(&bound, &mapping).unwrap();
        let (host, device) = (Place::Host(host), Place::Device(Arc::clone(&self.memory)));
        let mut queue = CopyQueue::new(&bound, 1).unwrap();
        let whole = [Piece::contiguous(0, 0, LEN)];
        let ends = match write {
            Some(bytes) => {
                mapping.write(0, bytes).unwrap();
                (&host, &device)
            }
            None => (&device, &host),
        };
        queue.submit(&bound, ends, &whole, 0).unwrap();
        queue.drain(&bound, &mut Vec::new()).unwrap();
        let mut bytes = vec![0; BYTES];
        mapping.read(0, &mut bytes).unwrap();
        bytes
    }

    fn used(&self) -> u64 {
        let (free, total) = self.context.bind().unwrap().memory().unwrap();
        total - free
    }
}

fn register(
    end: &mut End<Verbs>,
    memory: &Arc<dyn ForeignMemory>,
    direct: GpuDirect,
) -> (Option<Region>, Climb) {
    end.fabric.register_foreign(memory, Access::RemoteRead, direct.direct()).unwrap()
}

#[test]
fn every_rung_that_is_refused_says_which_call_refused_it() {
    let (Some(_), Some(standin)) = (device(), StandIn::new()) else { return };
    let gpu = Gpu::new(&standin);
    let mut end = End::<Verbs>::new();
    let (region, climb) = register(&mut end, &gpu.foreign(), GpuDirect::Auto);
    assert!(region.is_none(), "neither dma-buf nor peermem: {climb:?}");
    assert!(climb.rungs.iter().all(|(_, rung)| *rung == Rung::Staging));
    let (dma_buf, peermem) = (climb.refused.first().unwrap(), climb.refused.get(1).unwrap());
    assert_eq!((dma_buf.rung, peermem.rung), (Rung::DmaBuf, Rung::Peermem));
    if Path::new("/dev/udmabuf").exists() {
        // A real buffer, really refused: SoftRoCE has no such registrations.
        assert!(dma_buf.call.starts_with("ibv_reg_dmabuf_mr"), "{dma_buf}");
        assert_eq!(dma_buf.errno, Some(libc::EOPNOTSUPP), "{dma_buf}");
    } else {
        assert!(dma_buf.call.contains("cuMemGetHandleForAddressRange"), "{dma_buf}");
    }
    assert!(peermem.call.starts_with("ibv_reg_mr"), "{peermem}");
    assert_eq!(peermem.errno, Some(EFAULT), "{peermem}");
    for (direct, tried) in
        [(GpuDirect::DmaBuf, 1), (GpuDirect::Peermem, 1), (GpuDirect::Staging, 0)]
    {
        let (region, climb) = register(&mut end, &gpu.foreign(), direct);
        assert!(region.is_none() && climb.refused.len() == tried, "{direct}: {climb:?}");
    }
    drop((region, end));
    let Gpu { context, memory } = gpu;
    drop(memory);
    let (free, total) = context.bind().unwrap().memory().unwrap();
    assert_eq!(free, total, "a refusal keeps nothing");
}

#[test]
fn a_device_whose_order_cannot_be_had_is_not_registered() {
    let (Some(_), Some(standin)) = (device(), StandIn::new()) else { return };
    standin.control("set registrable 1\nset flush_options 0");
    let gpu = Gpu::new(&standin);
    let (region, climb) = register(&mut End::new(), &gpu.foreign(), GpuDirect::Auto);
    assert!(region.is_none());
    assert!(climb.refused.iter().all(|it| it.call.contains("flush")), "{climb:?}");
}

#[test]
fn bytes_go_from_one_gpus_memory_into_another_ones_by_read() {
    let (Some(_), Some(standin)) = (device(), StandIn::new()) else { return };
    standin.control("set registrable 1");
    let (source, target) = (Gpu::new(&standin), Gpu::new(&standin));
    let mut pair = Pair::<Verbs>::new();
    let (from, climb) = register(&mut pair.b, &source.foreign(), GpuDirect::Auto);
    assert!(climb.is_direct(), "{climb:?}");
    assert!(climb.rungs.iter().all(|(_, rung)| *rung == Rung::Peermem));
    assert_eq!(climb.refused.len(), climb.rungs.len(), "each NIC refused a dma-buf first");
    let (into, _) = register(&mut pair.a, &target.foreign(), GpuDirect::Peermem);
    let (from, into) = (from.unwrap(), into.unwrap());
    let sent = Random::new(7).bytes(BYTES);
    source.exchange(Some(&sent));
    let len = 700_001;
    pair.post(&[Read::same(1, &from, &into, 13, len), Read::same(2, &from, &into, 1 << 20, 4096)]);
    pair.succeed(2);
    assert!(target.context.bind().unwrap().flush_writes().unwrap());
    let arrived = target.exchange(None);
    let (first, second) = (13..13 + len as usize, (1 << 20)..(1 << 20) + 4096);
    assert!(arrived.get(first.clone()) == sent.get(first));
    assert!(arrived.get(second.clone()) == sent.get(second));
    assert!(arrived.get(..13).unwrap().iter().all(|byte| *byte == 0), "nothing else was touched");
}

#[test]
fn registered_memory_stays_until_it_is_deregistered() {
    let (Some(_), Some(standin)) = (device(), StandIn::new()) else { return };
    standin.control("set registrable 1");
    let gpu = Gpu::new(&standin);
    let mut end = End::<Verbs>::new();
    let (region, _) = register(&mut end, &gpu.foreign(), GpuDirect::Peermem);
    let (again, _) = register(&mut end, &gpu.foreign(), GpuDirect::Peermem);
    let (region, again) = (region.unwrap(), again.unwrap());
    assert_ne!(region.rkey, again.rkey, "one memory, two regions");
    let other = Gpu::new(&standin);
    let Gpu { context: _, memory } = gpu;
    drop(memory);
    end.fabric.deregister(region.id);
    assert_eq!(other.used(), 2 * LEN, "the second registration holds it");
    end.fabric.deregister(again.id);
    assert_eq!(other.used(), LEN);
}

/// A part of a GPU's memory, as memory of its own.
#[derive(Debug)]
struct Part {
    whole: Arc<dyn ForeignMemory>,
    offset: u64,
    bytes: u64,
}

impl ForeignMemory for Part {
    fn address(&self) -> u64 {
        self.whole.address() + self.offset
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn pci(&self) -> Option<String> {
        self.whole.pci()
    }

    fn writable(&self) -> Result<(), ExportRefused> {
        self.whole.writable()
    }

    fn dma_buf(&self, offset: u64, len: u64) -> Result<ExportedRange, ExportRefused> {
        self.whole.dma_buf(self.offset + offset, len)
    }
}

/// Each registration has keys, bounds and an end of its own, whatever bytes they share.
#[test]
fn regions_that_share_bytes_do_not_know_of_each_other() {
    let (Some(_), Some(standin)) = (device(), StandIn::new()) else { return };
    standin.control("set registrable 1");
    let (source, target) = (Gpu::new(&standin), Gpu::new(&standin));
    let sent = Random::new(11).bytes(BYTES);
    source.exchange(Some(&sent));
    let part = |offset: u64, bytes: u64| -> Arc<dyn ForeignMemory> {
        Arc::new(Part { whole: source.foreign(), offset, bytes })
    };
    let mut pair = Pair::<Verbs>::new();
    let (into, _) = register(&mut pair.a, &target.foreign(), GpuDirect::Peermem);
    let into = into.unwrap();
    // The whole twice, its second half, and what lies across the middle but for the ends.
    let half = LEN / 2;
    let memories =
        [source.foreign(), source.foreign(), part(half, half), part(half - 4096, 8192 + 1)];
    let regions =
        memories.each_ref().map(|memory| register(&mut pair.b, memory, GpuDirect::Auto).0.unwrap());
    let starts = [0, 0, half, half - 4096];
    let mut at = 0_u64;
    // All of them, then the last ones alone, as the first ones end.
    for first in 0..regions.len() {
        for (region, start) in regions.iter().zip(starts).skip(first) {
            // The bytes at the middle, where all of them meet: each region counts from its own start.
            let remote = region.remote(half - start, 4097).unwrap();
            let into = vec![span(&into, at * 8192, 4097)];
            at += 1;
            pair.post(&[Read { slot: u32::try_from(at).unwrap(), remote, into }]);
            pair.succeed(usize::try_from(at).unwrap());
        }
        pair.b.fabric.deregister(regions.get(first).unwrap().id);
    }
    let arrived = target.exchange(None);
    let middle = BYTES / 2;
    for at in 0..usize::try_from(at).unwrap() {
        let read = arrived.get(at * 8192..at * 8192 + 4097);
        assert!(read == sent.get(middle..middle + 4097), "READ {at}");
    }
}
