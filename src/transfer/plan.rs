//! From loans to READs: coalesce what is contiguous on the holder, split what is too long.

use crate::fabric::{Capabilities, RegisteredSpan, RemoteSpan};

/// One block to read: where it lies on the holder and where it shall land. The lengths are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRead {
    /// The holder's span.
    pub remote: RemoteSpan,
    /// The destination.
    pub local: RegisteredSpan,
}

/// One READ of a plan: the blocks `first_block..=last_block` in the plan's order have bytes in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedRead {
    /// The holder's span.
    pub remote: RemoteSpan,
    /// How many of the plan's segments it fills, following those of the READ before it.
    pub segments: u16,
    /// The first block that it carries bytes of, an index into the blocks given.
    pub first_block: u16,
    /// The last such block.
    pub last_block: u16,
}

/// Plans the READs of `blocks`, in order, into `reads` and `segments` (cleared first).
///
/// Neighbours merge when the second block follows the first on the holder under the same key, as
/// long as the READ stays within what the fabric takes. A holder places the blocks of one save next
/// to each other, so the blocks of a prefix mostly are neighbours. Destinations that are neighbours
/// too share one segment.
pub fn plan(
    blocks: &[BlockRead],
    capabilities: &Capabilities,
    reads: &mut Vec<PlannedRead>,
    segments: &mut Vec<RegisteredSpan>,
) {
    reads.clear();
    segments.clear();
    let longest = capabilities.read_bytes.max(1);
    for (index, block) in blocks.iter().enumerate() {
        // At most LEND_BLOCKS_MAX blocks, which fits by the assertion in `limits`.
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        if block.remote.len == 0 {
            // A READ of nothing: it asks whether the way is open, and fills no segment.
            let (remote, segments) = (block.remote, 0);
            reads.push(PlannedRead { remote, segments, first_block: index, last_block: index });
        }
        let mut done = 0;
        while done < block.remote.len {
            let rest = RemoteSpan {
                rkey: block.remote.rkey,
                address: block.remote.address + u64::from(done),
                len: block.remote.len - done,
            };
            let target = RegisteredSpan {
                region: block.local.region,
                offset: block.local.offset + u64::from(done),
                len: rest.len,
            };
            done += match extend(reads, segments, (rest, target), index, capabilities) {
                0 => start(reads, segments, (rest, target), index, longest),
                taken => taken,
            };
        }
    }
}

/// Adds as much as fits of a span to the last READ; the bytes added, 0 where it cannot grow.
fn extend(
    reads: &mut [PlannedRead],
    segments: &mut Vec<RegisteredSpan>,
    (remote, local): (RemoteSpan, RegisteredSpan),
    block: u16,
    capabilities: &Capabilities,
) -> u32 {
    let Some(read) = reads.last_mut() else {
        return 0;
    };
    let follows = read.remote.len > 0
        && read.remote.rkey == remote.rkey
        && read.remote.address + u64::from(read.remote.len) == remote.address;
    let room = capabilities.read_bytes.saturating_sub(read.remote.len).min(remote.len);
    if !follows || room == 0 {
        return 0;
    }
    match segments.last_mut() {
        Some(last)
            if last.region == local.region && last.offset + u64::from(last.len) == local.offset =>
        {
            last.len += room;
        }
        _ if usize::from(read.segments) < capabilities.segments => {
            segments.push(RegisteredSpan { len: room, ..local });
            read.segments += 1;
        }
        _ => return 0,
    }
    read.remote.len += room;
    read.last_block = block;
    room
}

/// Begins a READ with as much as fits of a span; the bytes that it takes.
fn start(
    reads: &mut Vec<PlannedRead>,
    segments: &mut Vec<RegisteredSpan>,
    (remote, local): (RemoteSpan, RegisteredSpan),
    block: u16,
    longest: u32,
) -> u32 {
    let len = remote.len.min(longest);
    reads.push(PlannedRead {
        remote: RemoteSpan { len, ..remote },
        segments: 1,
        first_block: block,
        last_block: block,
    });
    segments.push(RegisteredSpan { len, ..local });
    len
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::RegionId;
    use proptest::prelude::*;

    fn capabilities(segments: usize, read_bytes: u32) -> Capabilities {
        Capabilities { transport: "test", reads_outstanding: 8, segments, read_bytes, windows: 0 }
    }

    fn block(address: u64, offset: u64, len: u32) -> BlockRead {
        BlockRead {
            remote: RemoteSpan { rkey: 7, address, len },
            local: RegisteredSpan { region: RegionId(0), offset, len },
        }
    }

    fn planned(
        blocks: &[BlockRead],
        caps: &Capabilities,
    ) -> (Vec<PlannedRead>, Vec<RegisteredSpan>) {
        let (mut reads, mut segments) = (Vec::new(), Vec::new());
        plan(blocks, caps, &mut reads, &mut segments);
        (reads, segments)
    }

    #[test]
    fn neighbours_become_one_read() {
        let blocks = [block(0, 1000, 10), block(10, 0, 10), block(20, 10, 10)];
        let (reads, segments) = planned(&blocks, &capabilities(16, 1 << 20));
        assert_eq!(reads.len(), 1);
        assert_eq!(reads[0].remote, RemoteSpan { rkey: 7, address: 0, len: 30 });
        assert_eq!((reads[0].first_block, reads[0].last_block), (0, 2));
        assert_eq!(segments.len(), 2, "the last two destinations are neighbours too");
    }

    #[test]
    fn another_key_or_a_gap_begins_a_read() {
        let mut other_key = block(10, 10, 10);
        other_key.remote.rkey = 8;
        assert_eq!(planned(&[block(0, 0, 10), other_key], &capabilities(16, 100)).0.len(), 2);
        assert_eq!(
            planned(&[block(0, 0, 10), block(11, 10, 10)], &capabilities(16, 100)).0.len(),
            2
        );
    }

    #[test]
    fn a_long_block_is_split() {
        let (reads, _) = planned(&[block(0, 0, 25)], &capabilities(16, 10));
        assert_eq!(reads.iter().map(|read| read.remote.len).collect::<Vec<_>>(), [10, 10, 5]);
    }

    #[test]
    fn a_read_keeps_within_the_segments_of_the_fabric() {
        let blocks: Vec<_> = (0..5).map(|i| block(i * 10, i * 100, 10)).collect();
        let (reads, _) = planned(&blocks, &capabilities(2, 1000));
        assert_eq!(reads.iter().map(|read| read.segments).collect::<Vec<_>>(), [2, 2, 1]);
    }

    proptest! {
        /// Byte by byte, the plan moves each block's bytes to its destination, once.
        #[test]
        fn a_plan_moves_each_byte_once(
            parts in prop::collection::vec((0_u64..40, 1_u32..30, any::<bool>()), 0..20),
            max_segments in 1_usize..4,
            read_bytes in 1_u32..50,
        ) {
            let mut address = 0;
            let mut offset = 10_000;
            let blocks: Vec<_> = parts
                .iter()
                .map(|&(gap, len, local_gap)| {
                    address += if gap < 20 { 0 } else { gap };
                    offset += u64::from(local_gap) * 3;
                    let made = block(address, offset, len);
                    address += u64::from(len);
                    offset += u64::from(len);
                    made
                })
                .collect();
            let caps = capabilities(max_segments, read_bytes);
            let (reads, segments) = planned(&blocks, &caps);
            let mut want: Vec<(u64, u64)> = Vec::new();
            for block in &blocks {
                for byte in 0..u64::from(block.remote.len) {
                    want.push((block.remote.address + byte, block.local.offset + byte));
                }
            }
            let mut got = Vec::new();
            let mut rest = segments.iter();
            for read in &reads {
                prop_assert!(read.remote.len <= read_bytes && read.remote.len > 0);
                prop_assert!(usize::from(read.segments) <= max_segments);
                let mut from = read.remote.address;
                for segment in rest.by_ref().take(usize::from(read.segments)) {
                    for byte in 0..u64::from(segment.len) {
                        got.push((from, segment.offset + byte));
                        from += 1;
                    }
                }
                prop_assert_eq!(from, read.remote.address + u64::from(read.remote.len));
            }
            prop_assert_eq!(got, want);
        }
    }
}
