//! READs that were accepted and cannot be posted yet, in order: the key of the first one's region is
//! asked for, or the queues are full because READs were cut into many parts.

use std::collections::VecDeque;

use arrayvec::ArrayVec;

use crate::fabric::{ReadWork, RegisteredSpan, WrId};
use crate::limits::READ_SEGMENTS_MAX;

/// The local spans of one READ.
pub(super) type Spans = ArrayVec<RegisteredSpan, READ_SEGMENTS_MAX>;

/// The READs. Their number is bounded with those outstanding; the memory is kept and reused.
#[derive(Debug, Default)]
pub(super) struct Parked {
    works: VecDeque<ReadWork>,
    spans: VecDeque<RegisteredSpan>,
    /// READs that have left.
    left: u64,
    /// The key that the peer was asked for and has not answered.
    pub(super) asked: Option<u32>,
}

impl Parked {
    pub(super) fn is_empty(&self) -> bool {
        self.works.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.works.len()
    }

    /// The number of the first READ, or of the next one.
    pub(super) fn first(&self) -> u64 {
        self.left
    }

    /// The number that the next READ will get.
    pub(super) fn next(&self) -> u64 {
        self.left + self.works.len() as u64
    }

    /// Appends a READ with its spans.
    pub(super) fn push(&mut self, work: &ReadWork, spans: &[RegisteredSpan]) {
        self.works.push_back(*work);
        self.spans.extend(spans);
    }

    /// The first READ.
    pub(super) fn front(&self) -> Option<(ReadWork, Spans)> {
        let work = *self.works.front()?;
        let spans = self.spans.iter().take(usize::from(work.segments));
        // No more than fit: the fabric has checked.
        Some((work, spans.take(READ_SEGMENTS_MAX).copied().collect()))
    }

    /// Takes the first READ out.
    pub(super) fn pop(&mut self) {
        if let Some(work) = self.works.pop_front() {
            self.spans.drain(..usize::from(work.segments).min(self.spans.len()));
            self.left += 1;
        }
    }

    /// All READs, which will not be posted.
    pub(super) fn into_reads(self) -> impl Iterator<Item = WrId> {
        self.works.into_iter().map(|work| work.wr_id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::{RegionId, RemoteSpan};

    #[test]
    fn reads_keep_their_order_and_their_spans() {
        let mut parked = Parked::default();
        let span = |offset| RegisteredSpan { region: RegionId(0), offset, len: 1 };
        for slot in 0..4_u16 {
            let spans: Vec<_> = (0..slot).map(|at| span(u64::from(10 * slot + at))).collect();
            let remote = RemoteSpan { rkey: 1, address: 0, len: slot.into() };
            let wr_id = WrId { slot: slot.into(), generation: 0 };
            parked.push(&ReadWork { wr_id, remote, segments: slot }, &spans);
        }
        for slot in 0..3_u16 {
            let (work, spans) = parked.front().unwrap();
            assert_eq!((work.wr_id.slot, work.segments), (slot.into(), slot));
            let offsets: Vec<u64> = spans.iter().map(|span| span.offset).collect();
            assert_eq!(offsets, (0..slot).map(|at| u64::from(10 * slot + at)).collect::<Vec<_>>());
            parked.pop();
        }
        assert_eq!((parked.len(), parked.first(), parked.next()), (1, 3, 4));
        assert_eq!(parked.into_reads().map(|id| id.slot).collect::<Vec<_>>(), [3]);
    }
}
