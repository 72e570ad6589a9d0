//! READs that succeed.

use kvrail::fabric::{Access, CompletionStatus, Fabric, FabricError, RemoteSpan};

use super::{Harness, Pair, Random, Read, batch, span};

pub(crate) fn a_read_scatters_over_its_segments_and_touches_nothing_else<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let source = Random::new(2).bytes(64 << 10);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0xee; 64 << 10], Access::Local);
    let segments = pair.a.fabric.capabilities().segments;
    let len = 1000;
    // From the region's end to its start, with gaps, so that order and bounds both show.
    let into: Vec<_> =
        (0..segments as u64).map(|part| span(&local, (60 << 10) - part * 2000, len)).collect();
    pair.post(&[Read {
        slot: 1,
        remote: remote.remote(17, len * segments as u32).unwrap(),
        into: into.clone(),
    }]);
    pair.succeed(1);
    let mut expected = vec![0xee; 64 << 10];
    for (part, span) in into.iter().enumerate() {
        let from = 17 + part * len as usize;
        let to = span.offset as usize;
        expected[to..to + len as usize].copy_from_slice(&source[from..from + len as usize]);
    }
    assert!(Pair::<H>::bytes(&memory, 0, 64 << 10) == expected);
}

pub(crate) fn the_longest_read_arrives_whole<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let len = pair.a.fabric.capabilities().read_bytes;
    let source = Random::new(3).bytes(len as usize);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0; len as usize], Access::Local);
    pair.post(&[Read::same(1, &remote, &local, 0, len)]);
    pair.succeed(1);
    assert!(Pair::<H>::bytes(&memory, 0, len as usize) == source);
}

pub(crate) fn a_read_of_nothing_succeeds_under_any_key<H: Harness>() {
    let mut pair = Pair::<H>::new();
    pair.post(&[Read {
        slot: 9,
        remote: RemoteSpan { rkey: 12_345, address: 1, len: 0 },
        into: vec![],
    }]);
    pair.succeed(1);
    assert!(pair.a.closed(pair.at_a).is_none());
}

pub(crate) fn thousands_of_small_reads_in_random_order<H: Harness>() {
    const BYTES: usize = 4 << 20;
    const CELL: u32 = 512;
    let mut pair = Pair::<H>::new();
    let mut random = Random::new(4);
    let source = random.bytes(BYTES);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0; BYTES], Access::Local);
    let cells = BYTES as u32 / CELL;
    let mut order: Vec<u32> = (0..cells).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    let (at_a, mut posted) = (pair.at_a, 0);
    while posted < order.len() {
        let count = 1 + random.below(300) as usize;
        let next = &order[posted..order.len().min(posted + count)];
        let reads: Vec<Read> = next
            .iter()
            .map(|cell| {
                // Odd lengths: a header is never where a power of two would have it.
                let len = CELL - cell % 3;
                Read::same(*cell, &remote, &local, u64::from(cell * CELL), len)
            })
            .collect();
        let reads = batch(&reads);
        pair.pump(|a, _| a.fabric.post(at_a, &reads).is_ok());
        posted += next.len();
    }
    pair.succeed(cells as usize);
    let mut slots: Vec<u32> = pair.a.completions(at_a).iter().map(|done| done.0).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..cells).collect::<Vec<_>>());
    let landed = Pair::<H>::bytes(&memory, 0, BYTES);
    for cell in 0..cells {
        let at = (cell * CELL) as usize;
        let len = (CELL - cell % 3) as usize;
        assert!(landed[at..at + len] == source[at..at + len], "cell {cell}");
        let gap = &landed[at + len..at + CELL as usize];
        assert!(gap.iter().all(|byte| *byte == 0), "behind cell {cell}");
    }
}

pub(crate) fn both_ends_read_from_each_other_at_once<H: Harness>() {
    const BLOCK: u32 = 1 << 20;
    const BLOCKS: u32 = 24;
    let mut pair = Pair::<H>::new();
    let bytes = (BLOCK * BLOCKS) as usize;
    let (from_a, from_b) = (Random::new(5).bytes(bytes), Random::new(6).bytes(bytes));
    let (a_holds, _) = pair.a.region(&from_a, Access::RemoteRead);
    let (b_holds, _) = pair.b.region(&from_b, Access::RemoteRead);
    let (a_lands, at_a) = pair.a.region(&vec![0; bytes], Access::Local);
    let (b_lands, at_b) = pair.b.region(&vec![0; bytes], Access::Local);
    let reads = |from, into| {
        let read = |block| Read::same(block, from, into, u64::from(block * BLOCK), BLOCK);
        batch(&(0..BLOCKS).map(read).collect::<Vec<_>>())
    };
    pair.a.fabric.post(pair.at_a, &reads(&b_holds, &a_lands)).unwrap();
    pair.b.fabric.post(pair.at_b, &reads(&a_holds, &b_lands)).unwrap();
    let (id_a, id_b) = (pair.at_a, pair.at_b);
    pair.pump(|a, b| {
        a.completions(id_a).len() == BLOCKS as usize && b.completions(id_b).len() == BLOCKS as usize
    });
    let good = |done: Vec<(u32, CompletionStatus)>| {
        done.iter().all(|done| done.1 == CompletionStatus::Success)
    };
    assert!(good(pair.a.completions(id_a)) && good(pair.b.completions(id_b)));
    assert!(Pair::<H>::bytes(&at_a, 0, bytes) == from_b);
    assert!(Pair::<H>::bytes(&at_b, 0, bytes) == from_a);
}

pub(crate) fn reads_of_a_holder_whose_own_data_is_stuck_succeed<H: Harness>() {
    const BLOCK: u32 = 1 << 20;
    const BLOCKS: u32 = 32;
    let mut pair = Pair::<H>::new();
    let bytes = (BLOCK * BLOCKS) as usize;
    let (from_a, from_b) = (Random::new(9).bytes(bytes), Random::new(10).bytes(bytes));
    let (a_holds, _) = pair.a.region(&from_a, Access::RemoteRead);
    let (b_holds, _) = pair.b.region(&from_b, Access::RemoteRead);
    let (a_lands, at_a) = pair.a.region(&vec![0; bytes], Access::Local);
    let (b_lands, at_b) = pair.b.region(&vec![0; bytes], Access::Local);
    let (id_a, id_b) = (pair.at_a, pair.at_b);
    let block = |slot, from, into| Read::same(slot, from, into, u64::from(slot * BLOCK), BLOCK - 5);
    let all: Vec<Read> = (0..BLOCKS).map(|slot| block(slot, &b_holds, &a_lands)).collect();
    pair.post(&all);
    pair.b.get_stuck();
    for slot in 0..BLOCKS {
        let one = batch(&[block(slot, &a_holds, &b_lands)]);
        pair.b.fabric.post(id_b, &one).unwrap();
        pair.pump(|a, b| {
            let done = b.completions(id_b).len() + a.completions(id_a).len();
            done > slot as usize
        });
    }
    pair.pump(|a, b| {
        a.completions(id_a).len() == BLOCKS as usize && b.completions(id_b).len() == BLOCKS as usize
    });
    for (memory, source) in [(at_a, from_b), (at_b, from_a)] {
        let landed = Pair::<H>::bytes(&memory, 0, bytes);
        for block in 0..BLOCKS as usize {
            let start = block * BLOCK as usize;
            let span = start..start + BLOCK as usize - 5;
            assert!(landed[span.clone()] == source[span], "block {block}");
        }
    }
}

pub(crate) fn reads_of_all_sizes_cross_in_both_directions<H: Harness>() {
    const BYTES: u64 = 2 << 20;
    const READS: u32 = 3000;
    let mut pair = Pair::<H>::new();
    let mut random = Random::new(7);
    let source = random.bytes(BYTES as usize);
    let (a_holds, _) = pair.a.region(&source, Access::RemoteRead);
    let (b_holds, _) = pair.b.region(&source, Access::RemoteRead);
    let zeros = vec![0; BYTES as usize];
    let (a_lands, at_a) = pair.a.region(&zeros, Access::Local);
    let (b_lands, at_b) = pair.b.region(&zeros, Access::Local);
    let (id_a, id_b) = (pair.at_a, pair.at_b);
    // Every byte is read many times over to the place that it has at the source, so what lands is
    // right exactly where it equals the source, and nowhere else may differ from zero.
    let mut covered = vec![false; BYTES as usize];
    let mut posted = 0;
    while posted < READS {
        let reads: Vec<(u32, u64, u32)> = (0..random.below(60))
            .map(|read| {
                let scale = random.below(17);
                let len = random.below(2 << scale);
                let offset = random.below(BYTES - len);
                covered[offset as usize..(offset + len) as usize].fill(true);
                (posted + read as u32, offset, len as u32)
            })
            .collect();
        posted += reads.len() as u32;
        let to = |from, into| {
            let one = |&(slot, offset, len): &_| Read::same(slot, from, into, offset, len);
            batch(&reads.iter().map(one).collect::<Vec<_>>())
        };
        let (of_a, of_b) = (to(&b_holds, &a_lands), to(&a_holds, &b_lands));
        pair.pump(|a, _| a.fabric.post(id_a, &of_a).is_ok());
        pair.pump(|_, b| b.fabric.post(id_b, &of_b).is_ok());
    }
    pair.pump(|a, b| {
        a.completions(id_a).len() == posted as usize && b.completions(id_b).len() == posted as usize
    });
    for memory in [at_a, at_b] {
        let landed = Pair::<H>::bytes(&memory, 0, BYTES as usize);
        let right = |at: usize| landed[at] == if covered[at] { source[at] } else { 0 };
        assert_eq!((0..BYTES as usize).position(|at| !right(at)), None);
    }
}

pub(crate) fn messages_pass_while_bulk_data_flows<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let block = pair.a.fabric.capabilities().read_bytes.min(4 << 20);
    let (remote, _) = pair.b.region(&vec![1; block as usize], Access::RemoteRead);
    let (local, _) = pair.a.region(&vec![0; block as usize], Access::Local);
    let reads: Vec<Read> =
        (0..64).map(|slot| Read::same(slot, &remote, &local, 0, block)).collect();
    pair.post(&reads);
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    for round in 0..4_u8 {
        pair.a.fabric.send(at_a, &[round]).unwrap();
        pair.pump(|_, b| b.messages(at_b).len() > usize::from(round));
    }
    let done = pair.a.completions(at_a).len();
    assert!(done < 64, "the messages waited for all of the data");
    pair.succeed(64);
}

pub(crate) fn posting_beyond_the_limit_posts_nothing<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let (remote, _) = pair.b.region(&[5; 64], Access::RemoteRead);
    let (local, _) = pair.a.region(&[0; 64], Access::Local);
    let limit = pair.a.fabric.capabilities().reads_outstanding;
    let read = |slot| Read::same(slot, &remote, &local, 0, 64);
    let most: Vec<Read> = (0..limit as u32).map(read).collect();
    pair.post(&most);
    let more = batch(&[read(5000)]);
    let refused = pair.a.fabric.post(pair.at_a, &more);
    assert!(matches!(refused, Err(FabricError::Full)), "{refused:?}");
    pair.succeed(limit);
    pair.post(&[read(5001)]);
    pair.succeed(limit + 1);
}
