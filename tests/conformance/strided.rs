//! READs of blocks that lie in pieces, at the holder, here, or at both: what the plan of a transfer
//! makes of two layouts, every fabric carries out.

use kvrail::fabric::{
    Access, CompletionStatus, Fabric, ReadBatch, ReadWork, Region, RegisteredSpan, RemoteSpan, WrId,
};
use kvrail::layout::{AllocationId, BlockId, KvSplit, Layout, Tensor};
use kvrail::transfer::{Plan, ReadList};

use super::{Harness, Pair, Random};

/// Bytes of every memory of these tests.
const BYTES: u64 = 256 << 10;

/// Blocks of every layout.
const BLOCKS: u32 = 8;

/// Logical bytes of a block, however it lies.
const BLOCK: u32 = 12 << 10;

/// Layouts of blocks of the same length, with segments of 12, 1 and 3 KiB, and of two lengths. None
/// fills its memory, so that what does not belong to it shows.
fn layouts() -> Vec<Layout> {
    let tensor = Tensor {
        allocation: AllocationId(0),
        offset: 4096,
        layers: 1,
        layer_stride: 0,
        kv: KvSplit::Fused,
        block_stride: u64::from(BLOCK) + 64,
        segment_bytes: BLOCK,
    };
    let split = |stride| KvSplit::Split { stride };
    let whole = vec![tensor];
    // [layers, 2, blocks, ...]: a block's segments lie far apart.
    let far = vec![Tensor {
        layers: 6,
        layer_stride: 24 << 10,
        kv: split(12 << 10),
        block_stride: 1040,
        segment_bytes: 1 << 10,
        ..tensor
    }];
    // [blocks, layers, 2, ...]: a block's segments are neighbours but for a gap behind each K.
    let near = vec![Tensor {
        layers: 2,
        layer_stride: 7 << 10,
        kv: split((3 << 10) + 16),
        block_stride: 16 << 10,
        segment_bytes: 3 << 10,
        ..tensor
    }];
    // Two kinds of layers.
    let kinds = vec![
        Tensor { segment_bytes: 8 << 10, block_stride: 8 << 10, ..tensor },
        Tensor {
            offset: 128 << 10,
            layers: 4,
            layer_stride: 9 << 10,
            block_stride: 1 << 10,
            segment_bytes: 1 << 10,
            ..tensor
        },
    ];
    let made = [whole, far, near, kinds]
        .into_iter()
        .map(|tensors| Layout::new(tensors, BLOCKS, |_| Some(BYTES)).unwrap());
    let made: Vec<Layout> = made.collect();
    assert!(made.iter().all(|layout| layout.block_bytes() == BLOCK));
    made
}

fn remote<'a>(
    layout: &'a Layout,
    block: u32,
    region: &'a Region,
) -> impl Iterator<Item = RemoteSpan> + 'a {
    layout.segments(BlockId(block)).map(|it| region.remote(it.offset, it.len).unwrap())
}

fn local<'a>(
    layout: &'a Layout,
    block: u32,
    region: &'a Region,
) -> impl Iterator<Item = RegisteredSpan> + 'a {
    layout.segments(BlockId(block)).map(|it| RegisteredSpan {
        region: region.id,
        offset: it.offset,
        len: it.len,
    })
}

/// The plan of a list as a fabric takes it.
fn planned<F: Fabric>(list: &ReadList, fabric: &F) -> ReadBatch {
    let (mut plan, mut batch) = (Plan::default(), ReadBatch::default());
    plan.make(list, &fabric.capabilities());
    batch.segments.append(&mut plan.segments);
    batch.works.extend((0..).zip(&plan.reads).map(|(slot, read)| ReadWork {
        wr_id: WrId { slot, generation: 7 },
        remote: read.remote,
        segments: read.segments,
    }));
    batch
}

pub(crate) fn blocks_are_read_between_any_two_layouts<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let source = Random::new(11).bytes(BYTES as usize);
    let (holds, _) = pair.b.region(&source, Access::RemoteRead);
    let layouts = layouts();
    let mut landed = Vec::new();
    for (from, into) in layouts.iter().flat_map(|it| layouts.iter().map(move |other| (it, other))) {
        let (lands, memory) = pair.a.region(&vec![0xee; BYTES as usize], Access::Local);
        let (mut list, mut expected) = (ReadList::default(), vec![0xee; BYTES as usize]);
        // Every block goes to another number; one stays out.
        for block in 0..BLOCKS - 1 {
            let to = (block + 3) % BLOCKS;
            list.push(remote(from, block, &holds), local(into, to, &lands)).unwrap();
            let mut bytes = from.segments(BlockId(block)).flat_map(|segment| {
                let start = segment.offset as usize;
                source[start..start + segment.len as usize].iter().copied()
            });
            for segment in into.segments(BlockId(to)) {
                let start = segment.offset as usize;
                let place = &mut expected[start..start + segment.len as usize];
                place.iter_mut().for_each(|byte| *byte = bytes.next().unwrap());
            }
        }
        let batch = planned(&list, &pair.a.fabric);
        let most = pair.a.fabric.capabilities().segments;
        assert!(batch.works.iter().all(|work| usize::from(work.segments) <= most));
        pair.a.fabric.post(pair.at_a, &batch).unwrap();
        pair.succeed(batch.works.len());
        pair.a.seen.clear();
        assert!(Pair::<H>::bytes(&memory, 0, BYTES as usize) == expected);
        pair.a.fabric.deregister(lands.id);
        landed.push(batch.works.len());
    }
    // A block in one piece at the holder takes as many READs as the scatter list is short of its
    // segments; in pieces at the holder, one for each.
    let scattered =
        12_usize.div_ceil(pair.a.fabric.capabilities().segments) * (BLOCKS as usize - 1);
    assert_eq!((landed[0], landed[1], landed[4]), (7, scattered, 84));
}

pub(crate) fn a_segment_that_leaves_its_region_is_refused_at_either_end<H: Harness>() {
    let far = &layouts()[1];
    // Up to the byte before the last one of the last block's last segment.
    let short = far.ranges().map(|(_, range)| range.end).max().unwrap() - 1;
    for (at_holder, at_reader, status) in [
        (short, BYTES, CompletionStatus::RemoteAccess),
        (BYTES, short, CompletionStatus::LocalProtection),
    ] {
        let mut pair = Pair::<H>::new();
        let (holds, _) = pair.b.region(&vec![5; at_holder as usize], Access::RemoteRead);
        let (lands, _) = pair.a.region(&vec![0; at_reader as usize], Access::Local);
        pair.warm_up(&holds, &lands);
        let whole = Region { len: BYTES, ..holds };
        let mut list = ReadList::default();
        list.push(remote(far, 0, &whole), local(far, 0, &lands)).unwrap();
        list.push(remote(far, BLOCKS - 1, &whole), local(far, BLOCKS - 1, &lands)).unwrap();
        let batch = planned(&list, &pair.a.fabric);
        pair.a.fabric.post(pair.at_a, &batch).ok();
        let (at_a, count) = (pair.at_a, batch.works.len());
        pair.pump(|a, _| a.completions(at_a).len() == count);
        let done = pair.a.completions(at_a);
        let last = (count as u32 - 1, status);
        assert!(done.contains(&last), "{done:?}");
        let others = done.iter().filter(|done| **done != last);
        let allowed = [CompletionStatus::Success, CompletionStatus::Flushed];
        assert!(others.clone().all(|done| allowed.contains(&done.1)), "{done:?}");
    }
}
