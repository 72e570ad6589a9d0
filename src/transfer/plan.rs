//! From loans to READs: coalesce what is contiguous on the holder, split what is too long.
//!
//! Blocks are asked for in an order that says nothing about where they lie: the blocks of a prefix mostly
//! follow each other on the holder, those of several prefixes, or of a pool that has been in use for long,
//! lie anywhere. So the plan goes through a list by address, and neighbours share a READ wherever they
//! stand in the list; the bytes of each still land where its caller wants them.

use crate::fabric::{Capabilities, RegisteredSpan, RemoteSpan};

/// Where the spans of one block begin in the lists; they end where the next block's begin.
#[derive(Debug, Clone, Copy)]
struct Starts {
    remote: usize,
    local: usize,
}

/// Blocks to read: where the bytes of each lie on the holder, in order, and where they shall land. A
/// block in a pool is one span, one in a KV cache has a span for each of its segments. Kept and reused
/// by the caller, so that a list allocates nothing once the longest one has been seen.
#[derive(Debug, Default)]
pub struct ReadList {
    blocks: Vec<Starts>,
    remote: Vec<RemoteSpan>,
    local: Vec<RegisteredSpan>,
}

/// The two sides of a block do not have the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a block of {remote} bytes at its holder does not fit {local} bytes here")]
pub struct Uneven {
    /// Bytes on the holder.
    pub remote: u64,
    /// Bytes here.
    pub local: u64,
}

impl ReadList {
    /// Forgets the blocks, keeps the memory.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.remote.clear();
        self.local.clear();
    }

    /// Appends a block.
    ///
    /// # Errors
    /// [`Uneven`]; the list is unchanged then.
    pub fn push(
        &mut self,
        remote: impl IntoIterator<Item = RemoteSpan>,
        local: impl IntoIterator<Item = RegisteredSpan>,
    ) -> Result<(), Uneven> {
        let before = Starts { remote: self.remote.len(), local: self.local.len() };
        self.remote.extend(remote);
        self.local.extend(local);
        let (new_remote, new_local) = (self.remote.iter(), self.local.iter());
        let uneven = Uneven {
            remote: new_remote.skip(before.remote).map(|span| u64::from(span.len)).sum(),
            local: new_local.skip(before.local).map(|span| u64::from(span.len)).sum(),
        };
        if uneven.remote != uneven.local {
            self.remote.truncate(before.remote);
            self.local.truncate(before.local);
            return Err(uneven);
        }
        self.blocks.push(before);
        Ok(())
    }

    /// Blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether there is no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.remote.iter().map(|span| u64::from(span.len)).sum()
    }

    /// The two sides of a block.
    fn sides(&self, index: usize) -> (&[RemoteSpan], &[RegisteredSpan]) {
        let all = Starts { remote: self.remote.len(), local: self.local.len() };
        let from = self.blocks.get(index).copied().unwrap_or(all);
        let to = self.blocks.get(index + 1).copied().unwrap_or(all);
        let remote = self.remote.get(from.remote..to.remote).unwrap_or_default();
        (remote, self.local.get(from.local..to.local).unwrap_or_default())
    }

    /// Where a block begins on the holder.
    fn place(&self, index: usize) -> Option<(u32, u64)> {
        let at = self.blocks.get(index)?.remote;
        self.remote.get(at).map(|span| (span.rkey, span.address))
    }
}

/// One READ of a plan: the blocks `first_block..=last_block` in the plan's own order have bytes in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedRead {
    /// The holder's span.
    pub remote: RemoteSpan,
    /// How many of the plan's segments it fills, following those of the READ before it.
    pub segments: u16,
    /// The first block that it carries bytes of, a place in [`Plan::order`].
    pub first_block: u16,
    /// The last such block.
    pub last_block: u16,
}

/// The READs of a list of blocks. Kept and reused by the caller, so that a plan allocates nothing once
/// the longest one has been seen.
#[derive(Debug, Default)]
pub struct Plan {
    /// In the order in which they are to be posted.
    pub reads: Vec<PlannedRead>,
    /// Where their bytes go, READ by READ.
    pub segments: Vec<RegisteredSpan>,
    /// The blocks, as indices into the list, in the order of the READs that carry them.
    pub order: Vec<u16>,
}

impl Plan {
    /// Forgets the READs, keeps the memory.
    pub fn clear(&mut self) {
        self.reads.clear();
        self.segments.clear();
        self.order.clear();
    }

    /// The blocks that a READ of this plan carries bytes of, as indices into the list.
    pub fn blocks_of(&self, read: &PlannedRead) -> impl Iterator<Item = usize> {
        let places = usize::from(read.first_block)..=usize::from(read.last_block);
        self.order.get(places).unwrap_or_default().iter().map(|block| usize::from(*block))
    }

    /// Plans the READs of `list`, by their addresses on the holder; what was planned before is forgotten.
    ///
    /// A READ carries what lies in one piece on the holder, into as many pieces here as the fabric scatters
    /// over. Neighbours merge when the second span follows the first on the holder under the same key, as
    /// long as the READ stays within what the fabric takes. A holder places the blocks of one save next
    /// to each other. Destinations that are neighbours too share one segment. A block that lies in pieces
    /// on the holder takes a READ for each.
    pub fn make(&mut self, list: &ReadList, capabilities: &Capabilities) {
        self.clear();
        // At most LEND_BLOCKS_MAX blocks, which fits by the assertion in `limits`.
        self.order.extend((0..list.len()).map(|index| u16::try_from(index).unwrap_or(u16::MAX)));
        // In place, and n comparisons where the list is in order already.
        self.order.sort_unstable_by_key(|index| (list.place(usize::from(*index)), *index));
        for at in 0..self.order.len() {
            let Some(index) = self.order.get(at).copied() else { break };
            let at = u16::try_from(at).unwrap_or(u16::MAX);
            self.add(list.sides(usize::from(index)), at, capabilities);
        }
    }

    /// Plans one block, whose place in the order is `at`.
    fn add(
        &mut self,
        (remote, local): (&[RemoteSpan], &[RegisteredSpan]),
        at: u16,
        capabilities: &Capabilities,
    ) {
        let longest = capabilities.read_bytes.max(1);
        let (reads, segments) = (&mut self.reads, &mut self.segments);
        let mut spans = remote.iter().filter(|span| span.len > 0);
        let mut places = local.iter().copied().filter(|span| span.len > 0);
        let mut place = None;
        if spans.clone().next().is_none()
            && let Some(&remote) = remote.first()
        {
            // A READ of nothing: it asks whether the way is open, and fills no segment.
            let (first_block, last_block) = (at, at);
            reads.push(PlannedRead { remote, segments: 0, first_block, last_block });
        }
        let mut from = spans.next().copied();
        while let (Some(span), Some(into)) = (from, place.or_else(|| places.next())) {
            let len = span.len.min(into.len);
            let both = (RemoteSpan { len, ..span }, RegisteredSpan { len, ..into });
            let done = match extend(reads, segments, both, at, capabilities) {
                0 => start(reads, segments, both, at, longest),
                taken => taken,
            };
            let (address, offset) = (span.address + u64::from(done), into.offset + u64::from(done));
            from = match span.len - done {
                0 => spans.next().copied(),
                len => Some(RemoteSpan { address, len, ..span }),
            };
            let left = into.len - done;
            place = (left > 0).then_some(RegisteredSpan { offset, len: left, ..into });
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
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use std::time::Duration;

    use crate::fabric::RegionId;

    fn capabilities(segments: usize, read_bytes: u32) -> Capabilities {
        Capabilities {
            transport: "test",
            reads_outstanding: 8,
            segments,
            read_bytes,
            windows: 0,
            opening: Duration::ZERO,
        }
    }

    /// A block of one span on either side.
    type Block = (RemoteSpan, RegisteredSpan);

    fn block(address: u64, offset: u64, len: u32) -> Block {
        (RemoteSpan { rkey: 7, address, len }, RegisteredSpan { region: RegionId(0), offset, len })
    }

    fn listed(blocks: &[Block]) -> ReadList {
        let mut list = ReadList::default();
        blocks.iter().for_each(|(remote, local)| list.push([*remote], [*local]).unwrap());
        list
    }

    fn planned(list: &ReadList, caps: &Capabilities) -> (Vec<PlannedRead>, Vec<RegisteredSpan>) {
        let mut plan = Plan::default();
        plan.make(list, caps);
        (plan.reads, plan.segments)
    }

    #[test]
    fn neighbours_become_one_read() {
        let blocks = [block(0, 1000, 10), block(10, 0, 10), block(20, 10, 10)];
        let (reads, segments) = planned(&listed(&blocks), &capabilities(16, 1 << 20));
        assert_eq!(reads.len(), 1);
        assert_eq!(reads[0].remote, RemoteSpan { rkey: 7, address: 0, len: 30 });
        assert_eq!((reads[0].first_block, reads[0].last_block), (0, 2));
        assert_eq!(segments.len(), 2, "the last two destinations are neighbours too");
    }

    #[test]
    fn neighbours_share_a_read_in_whatever_order_they_are_asked_for() {
        let blocks = [30, 100, 10, 110, 20, 0].map(|at| block(at, 1000 + 5 * at, 10));
        let mut plan = Plan::default();
        plan.make(&listed(&blocks), &capabilities(16, 1 << 20));
        let spans: Vec<_> =
            plan.reads.iter().map(|it| (it.remote.address, it.remote.len)).collect();
        assert_eq!(spans, [(0, 40), (100, 20)]);
        let carried: Vec<Vec<_>> =
            plan.reads.iter().map(|read| plan.blocks_of(read).collect()).collect();
        assert_eq!(carried, [vec![5, 2, 4, 0], vec![1, 3]]);
        let offsets: Vec<_> = plan.segments.iter().map(|segment| segment.offset).collect();
        assert_eq!(offsets, [1000, 1050, 1100, 1150, 1500, 1550]);
    }

    #[test]
    fn another_key_or_a_gap_begins_a_read() {
        let mut other_key = block(10, 10, 10);
        other_key.0.rkey = 8;
        let reads = |blocks: &[Block]| planned(&listed(blocks), &capabilities(16, 100)).0.len();
        assert_eq!(reads(&[block(0, 0, 10), other_key]), 2);
        assert_eq!(reads(&[block(0, 0, 10), block(11, 10, 10)]), 2);
    }

    #[test]
    fn a_long_block_is_split() {
        let (reads, _) = planned(&listed(&[block(0, 0, 25)]), &capabilities(16, 10));
        assert_eq!(reads.iter().map(|read| read.remote.len).collect::<Vec<_>>(), [10, 10, 5]);
    }

    #[test]
    fn a_read_keeps_within_the_segments_of_the_fabric() {
        let blocks: Vec<_> = (0..5).map(|i| block(i * 10, i * 100, 10)).collect();
        let (reads, _) = planned(&listed(&blocks), &capabilities(2, 1000));
        assert_eq!(reads.iter().map(|read| read.segments).collect::<Vec<_>>(), [2, 2, 1]);
    }

    #[test]
    fn one_read_scatters_over_as_many_segments_as_the_fabric_takes() {
        // A block of ten layers, in one piece on the holder and in ten here.
        let mut list = ReadList::default();
        let place =
            |layer: u64| RegisteredSpan { region: RegionId(1), offset: layer * 1000, len: 64 };
        list.push([RemoteSpan { rkey: 7, address: 0, len: 640 }], (0..10).map(place)).unwrap();
        let (reads, segments) = planned(&list, &capabilities(4, 1 << 20));
        let shape: Vec<_> = reads.iter().map(|read| (read.remote.len, read.segments)).collect();
        assert_eq!(shape, [(256, 4), (256, 4), (128, 2)]);
        assert_eq!(segments, (0..10).map(place).collect::<Vec<_>>());
        assert!(reads.iter().all(|read| (read.first_block, read.last_block) == (0, 0)));
    }

    #[test]
    fn sides_of_different_lengths_are_refused_and_leave_nothing() {
        let mut list = listed(&[block(0, 0, 10)]);
        let (remote, local) = block(10, 10, 10);
        let uneven = Uneven { remote: 10, local: 20 };
        assert_eq!(list.push([remote], [local; 2]), Err(uneven));
        assert_eq!((list.len(), list.bytes()), (1, 10));
        list.push([remote; 2], [local; 2]).unwrap();
        let (_, segments) = planned(&list, &capabilities(16, 100));
        assert_eq!(segments.iter().map(|span| span.len).sum::<u32>(), 30);
    }

    #[test]
    fn a_read_of_nothing_is_one_read_without_segments() {
        let (remote, local) = block(5, 0, 0);
        let (reads, segments) = planned(&listed(&[(remote, local)]), &capabilities(4, 100));
        assert_eq!((reads.len(), segments.len()), (1, 0));
        assert_eq!((reads[0].remote, reads[0].segments), (remote, 0));
    }

    /// Cuts `len` bytes from `at` on into pieces, with gaps where the seed has them.
    fn pieces(at: &mut u64, len: u32, seed: &[(u32, u64)]) -> Vec<(u64, u32)> {
        let (mut left, mut out) = (len, Vec::new());
        for &(size, gap) in seed.iter().cycle() {
            if left == 0 {
                break;
            }
            let size = size.min(left);
            out.push((*at, size));
            *at += u64::from(size) + gap;
            left -= size;
        }
        out
    }

    proptest! {
        /// Byte by byte, the plan moves each block's bytes to its destination, once, whatever pieces
        /// the two sides have and in whatever order they are asked for; a READ carries the blocks that
        /// it says, and none that lie apart.
        #[test]
        fn a_plan_moves_each_byte_once(
            lens in prop::collection::vec((1_u32..60, 0_u64..2, any::<u32>()), 0..12),
            remote in prop::collection::vec((1_u32..40, 0_u64..3), 1..5),
            local in prop::collection::vec((1_u32..40, 0_u64..3), 1..5),
            max_segments in 1_usize..4,
            read_bytes in 1_u32..50,
        ) {
            let (mut address, mut offset) = (0, 10_000);
            let mut blocks = Vec::new();
            for (len, gap, turn) in lens {
                let (from, into) = (pieces(&mut address, len, &remote), pieces(&mut offset, len, &local));
                address += gap;
                blocks.push((turn, from, into));
            }
            blocks.sort_by_key(|(turn, ..)| *turn);
            let bytes = |side: &[(u64, u32)]| -> Vec<u64> {
                side.iter().flat_map(|(at, len)| *at..*at + u64::from(*len)).collect()
            };
            // By byte on the holder: where it goes, and whose it is.
            let (mut list, mut want) = (ReadList::default(), BTreeMap::new());
            for (index, (_, from, into)) in blocks.iter().enumerate() {
                let places = bytes(into).into_iter().map(|place| (place, index));
                want.extend(bytes(from).into_iter().zip(places));
                let from = from.iter().map(|&(at, len)| block(at, 0, len).0);
                list.push(from, into.iter().map(|&(at, len)| block(0, at, len).1)).unwrap();
            }
            let mut plan = Plan::default();
            plan.make(&list, &capabilities(max_segments, read_bytes));
            let mut rest = plan.segments.iter();
            for read in &plan.reads {
                prop_assert!(read.remote.len <= read_bytes && read.remote.len > 0);
                prop_assert!(usize::from(read.segments) <= max_segments);
                let mut from = read.remote.address;
                let mut carried = BTreeSet::new();
                for segment in rest.by_ref().take(usize::from(read.segments)) {
                    for byte in 0..u64::from(segment.len) {
                        let moved = want.remove(&from);
                        let (place, block) = moved.expect("a byte is asked for, and moved once");
                        prop_assert_eq!(place, segment.offset + byte);
                        carried.insert(block);
                        from += 1;
                    }
                }
                prop_assert_eq!(from, read.remote.address + u64::from(read.remote.len));
                prop_assert_eq!(carried, plan.blocks_of(read).collect::<BTreeSet<_>>());
            }
            prop_assert!(want.is_empty(), "not moved: {want:?}");
        }

        /// The order in which blocks are asked for makes no READ more.
        #[test]
        fn any_order_takes_as_few_reads_as_the_order_of_addresses(
            runs in prop::collection::vec((1_u64..9, 1_u64..3), 1..8),
            turns in prop::collection::vec(any::<u32>(), 64),
        ) {
            let (mut at, mut blocks) = (0, Vec::new());
            for (run, gap) in runs {
                blocks.extend((at..at + run).map(|place| (place * 16, 16)));
                at += run + gap;
            }
            let reads = |blocks: &[(u64, u32)]| {
                let mut list = ReadList::default();
                for ((address, len), slot) in blocks.iter().zip(0..) {
                    let (remote, local) = block(*address, slot * 16, *len);
                    list.push([remote], [local]).unwrap();
                }
                let reads = planned(&list, &capabilities(64, 1 << 20)).0;
                reads.iter().map(|read| read.remote).collect::<Vec<_>>()
            };
            let sorted = reads(&blocks);
            let mut shuffled: Vec<_> = turns.iter().zip(blocks).collect();
            shuffled.sort_by_key(|(turn, _)| **turn);
            let shuffled: Vec<_> = shuffled.into_iter().map(|(_, block)| block).collect();
            prop_assert_eq!(reads(&shuffled), sorted);
        }
    }
}
