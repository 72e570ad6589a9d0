//! A data queue pair and its READs, in the order in which they were posted.
//!
//! A reliable connection completes its READs in order, so the completion of one READ is that of all
//! before it: only the last of a list, and one in [`SIGNAL_EVERY`], report their success. After an
//! error each READ reports for itself, signaled or not. A marker behind the last one ends the drain
//! where nothing that was outstanding would report.
//!
//! A READ that crosses the border of a registration is several work requests, posted one after the
//! other: the last one's completion is the READ's, or that of the first one that fails.

use std::collections::VecDeque;
use std::io;
use std::iter::Sum;

use super::device::Device;
use super::probe::PROBE_BYTES;
use super::wr_id::{Work, truncate};
use crate::fabric::{CompletionStatus, FabricError, RemoteSpan, WrId};
use crate::types::{Nic, Path};
use crate::verbs::{QueuePair, Segment, SendList, VerbsError};

/// Every so many READs of a list report their success, so that blocks at the start of a long list do
/// not wait for its end.
const SIGNAL_EVERY: usize = 16;

/// What the completion of a work request means for its READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tells {
    /// The READ's end.
    End,
    /// Nothing where it succeeds, since parts follow; else the READ's end.
    Failure,
    /// Nothing: an earlier part has failed.
    Nothing,
}

/// A work request in the queue.
#[derive(Debug, Clone, Copy)]
struct Posted {
    wr_id: WrId,
    bytes: u32,
    tells: Tells,
}

/// A work request to add: a READ, or a part of one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) wr_id: WrId,
    /// What to read, with the key and address as the peer's NIC knows them.
    pub(super) remote: RemoteSpan,
    /// Whether the READ ends with it.
    pub(super) last: bool,
}

/// Where a lane runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rail {
    /// Our NIC.
    pub(super) nic: u8,
    /// The peer's.
    pub(super) peer: u8,
    /// Longest READ that both ports carry, bytes.
    pub(super) longest: u32,
}

impl Rail {
    /// The path that it is, for those who judge paths.
    pub(super) const fn path(self) -> Path {
        Path { local: Nic(self.nic), remote: Nic(self.peer) }
    }
}

/// What queue pairs were given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Posts {
    /// Work requests: READs, and parts of those that one work request cannot carry.
    pub works: u64,
    /// Lists of them, each posted by one call.
    pub doorbells: u64,
}

impl Sum for Posts {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            works: sum.works + one.works,
            doorbells: sum.doorbells + one.doorbells,
        })
    }
}

/// One data queue pair.
#[derive(Debug)]
pub(super) struct Lane {
    index: u8,
    rail: Rail,
    /// Work requests that fit, beside the marker.
    depth: usize,
    /// `None` once it is destroyed: the device can touch nothing for it any more.
    pair: Option<QueuePair>,
    posted: VecDeque<Posted>,
    /// The number of the next work request.
    next: u64,
    doorbells: u64,
    /// READs whose end was not told yet.
    reads: usize,
    bytes: u64,
    list: SendList,
    /// Whether the last READ in the queue reports its success.
    signaled: bool,
}

impl Lane {
    /// A lane with room for `depth` work requests and a marker.
    pub(super) fn new(index: u8, pair: QueuePair, depth: usize) -> Self {
        Self {
            index,
            rail: Rail { nic: 0, peer: 0, longest: 0 },
            depth,
            pair: Some(pair),
            posted: VecDeque::with_capacity(depth),
            next: 0,
            doorbells: 0,
            reads: 0,
            bytes: 0,
            list: SendList::default(),
            signaled: true,
        }
    }

    pub(super) fn pair(&self) -> Option<&QueuePair> {
        self.pair.as_ref()
    }

    pub(super) fn rail(&self) -> Rail {
        self.rail
    }

    /// Lanes before it are gone. Nothing of its own is outstanding by its old number.
    pub(super) fn renumber(&mut self, index: u8) {
        self.index = index;
    }

    /// Waits for the peer's pattern.
    pub(super) fn await_probe(&self, device: &Device) -> Result<(), VerbsError> {
        let Some(pair) = &self.pair else { return Ok(()) };
        let id = Work::LaneReceive { lane: self.index }.encode();
        pair.post_receive(id, segment(device, PROBE_BYTES))
    }

    /// Sends the pattern.
    pub(super) fn send_probe(&mut self, device: &Device) -> Result<(), VerbsError> {
        let Some(pair) = &self.pair else { return Ok(()) };
        self.list.clear();
        let id = Work::LaneProbe { lane: self.index }.encode();
        self.list.send(id, std::iter::once(segment(device, 0)), false);
        let posted = pair.post_send(&mut self.list);
        self.list.clear();
        posted.map_err(|part| {
            let call = "ibv_post_send of a lane's probe".to_owned();
            let remedy = "the device may be going away";
            FabricError::Os { call, source: part.source, remedy }.into()
        })
    }

    /// Both ends agree where it runs.
    pub(super) fn set_rail(&mut self, rail: Rail) {
        self.rail = rail;
    }

    /// Work requests that fit into the queue.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Work requests in the queue.
    pub(super) fn outstanding(&self) -> usize {
        self.posted.len()
    }

    /// READs whose end was not told yet.
    pub(super) fn reads(&self) -> usize {
        self.reads
    }

    /// Whether all that is outstanding is a READ of no bytes.
    pub(super) fn reads_nothing(&self) -> bool {
        self.bytes == 0 && !self.posted.is_empty()
    }

    /// Bytes that outstanding READs read.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The number that the next work request will get.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// What it has posted so far.
    pub(super) fn posts(&self) -> Posts {
        Posts { works: self.next, doorbells: self.doorbells }
    }

    /// The number of the oldest work request outstanding, or of the next one.
    pub(super) fn oldest(&self) -> u64 {
        self.next - self.posted.len() as u64
    }

    /// Puts a READ, or a part of one, into the list.
    pub(super) fn add(&mut self, part: &Part, segments: impl Iterator<Item = Segment>) {
        let id = Work::Read { lane: self.index, number: self.next }.encode();
        let signaled = self.list.len() % SIGNAL_EVERY == SIGNAL_EVERY - 1;
        self.list.read(id, &part.remote, segments, signaled);
        let tells = if part.last { Tells::End } else { Tells::Failure };
        self.posted.push_back(Posted { wr_id: part.wr_id, bytes: part.remote.len, tells });
        self.next += 1;
        self.reads += usize::from(part.last);
        self.bytes += u64::from(part.remote.len);
    }

    /// Posts the list. Where the device refuses it, READs that were not posted, or not wholly, go to
    /// `refused`.
    pub(super) fn flush(&mut self, refused: &mut Vec<WrId>) -> Result<(), io::Error> {
        if self.list.is_empty() {
            return Ok(());
        }
        self.list.signal_last();
        self.signaled = true;
        self.doorbells += 1;
        let total = self.list.len();
        let outcome = match &self.pair {
            Some(pair) => pair.post_send(&mut self.list).map_err(|part| (part.posted, part.source)),
            None => Err((0, io::ErrorKind::NotConnected.into())),
        };
        self.list.clear();
        outcome.map_err(|(posted, source)| {
            let keep = self.posted.len().saturating_sub(total - posted);
            for one in self.posted.drain(keep..) {
                self.next -= 1;
                self.bytes -= u64::from(one.bytes);
                if one.tells == Tells::End {
                    refused.push(one.wr_id);
                    self.reads -= 1;
                }
            }
            // The first parts of a READ whose last one was refused: its end has been told.
            let torn = self.posted.iter_mut().rev().take_while(|one| one.tells == Tells::Failure);
            torn.for_each(|one| one.tells = Tells::Nothing);
            self.signaled = posted == 0;
            source
        })
    }

    /// The completion of a work request by its number: `each` gets the READs that end with it, those
    /// before it with success. `false` where no such work request is outstanding.
    pub(super) fn complete(
        &mut self,
        number: u64,
        status: CompletionStatus,
        mut each: impl FnMut(WrId, CompletionStatus),
    ) -> bool {
        let ahead = truncate(number.wrapping_sub(self.oldest()));
        if ahead >= self.posted.len() as u64 {
            return false;
        }
        for at in 0..=ahead {
            let Some(one) = self.posted.pop_front() else { break };
            self.bytes -= u64::from(one.bytes);
            let status = if at == ahead { status } else { CompletionStatus::Success };
            match one.tells {
                Tells::End => {}
                Tells::Failure if status != CompletionStatus::Success => self.hush(),
                Tells::Failure | Tells::Nothing => continue,
            }
            self.reads -= 1;
            each(one.wr_id, status);
        }
        true
    }

    /// The READ at the front has ended by the failure of a part: its other parts tell nothing.
    fn hush(&mut self) {
        for one in &mut self.posted {
            let last = std::mem::replace(&mut one.tells, Tells::Nothing) == Tells::End;
            if last {
                return;
            }
        }
    }

    /// Cuts the peer off, and makes what is outstanding flush. A lane without anything outstanding is
    /// destroyed at once.
    pub(super) fn cut(&mut self) {
        let Some(pair) = &self.pair else { return };
        let failed = !self.posted.is_empty() && pair.fail().is_ok();
        if !failed {
            // Either nothing is outstanding, or the device is gone: then READs are given up in
            // `abandon`, and destruction is what stops them.
            self.pair = None;
        } else if !self.signaled {
            let nothing = RemoteSpan { rkey: 0, address: 0, len: 0 };
            let id = Work::Marker { lane: self.index }.encode();
            self.list.read(id, &nothing, std::iter::empty(), true);
            // Where not even this can be posted, the drain ends at its deadline.
            pair.post_send(&mut self.list).ok();
            self.list.clear();
        }
    }

    /// Whether nothing is outstanding, after a cut.
    pub(super) fn is_drained(&self) -> bool {
        self.posted.is_empty()
    }

    /// Whether what is outstanding can complete by itself.
    pub(super) fn is_live(&self) -> bool {
        self.pair.is_some()
    }

    /// Destroys the queue pair; `each` gets what was outstanding, which the device does not touch any
    /// more.
    pub(super) fn abandon(&mut self, mut each: impl FnMut(WrId)) {
        self.pair = None;
        let ends = self.posted.drain(..).filter(|one| one.tells == Tells::End);
        ends.for_each(|one| each(one.wr_id));
        (self.reads, self.bytes) = (0, 0);
    }
}

/// The part of a NIC's memory for probes of lanes that begins at `offset`.
fn segment(device: &Device, offset: usize) -> Segment {
    Segment {
        addr: device.lane_probe.address() + offset as u64,
        length: u32::try_from(PROBE_BYTES).unwrap_or(0),
        lkey: device.lane_probe.lkey(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane without a device, on which READs 0.. were posted.
    fn lane(count: u32) -> Lane {
        let mut lane = Lane {
            index: 3,
            rail: Rail { nic: 0, peer: 0, longest: 0 },
            depth: 16,
            pair: None,
            posted: VecDeque::new(),
            next: 0,
            doorbells: 0,
            reads: 0,
            bytes: 0,
            list: SendList::default(),
            signaled: true,
        };
        for slot in 0..count {
            add(&mut lane, slot, 1);
        }
        lane
    }

    /// Posts a READ in so many parts.
    fn add(lane: &mut Lane, slot: u32, parts: u32) {
        let wr_id = WrId { slot, generation: 1 };
        let remote = RemoteSpan { rkey: 1, address: 0, len: 10 };
        for part in 1..=parts {
            lane.add(&Part { wr_id, remote, last: part == parts }, std::iter::empty());
        }
    }

    fn complete(lane: &mut Lane, number: u64, status: CompletionStatus) -> Vec<(u32, bool)> {
        let mut told = Vec::new();
        lane.complete(number, status, |wr_id, status| {
            told.push((wr_id.slot, status == CompletionStatus::Success));
        });
        told
    }

    #[test]
    fn a_completion_is_that_of_all_reads_before_it() {
        let mut lane = lane(10);
        let done = complete(&mut lane, 2, CompletionStatus::Success);
        assert_eq!(done, [(0, true), (1, true), (2, true)]);
        let done = complete(&mut lane, 4, CompletionStatus::RemoteAccess);
        assert_eq!(done, [(3, true), (4, false)], "READs complete in order");
        assert_eq!((lane.outstanding(), lane.bytes(), lane.oldest()), (5, 50, 5));
        for slot in 5..10 {
            let done = complete(&mut lane, slot, CompletionStatus::Flushed);
            assert_eq!(done, [(u32::try_from(slot).unwrap(), false)]);
        }
        assert!(lane.is_drained());
    }

    #[test]
    fn a_stale_number_completes_nothing() {
        let mut lane = lane(4);
        complete(&mut lane, 1, CompletionStatus::Success);
        for stale in [0, 1, 4, 5, u64::MAX] {
            assert_eq!(complete(&mut lane, stale, CompletionStatus::Success), [], "{stale}");
        }
        assert_eq!(lane.outstanding(), 2);
    }

    #[test]
    fn what_cannot_be_posted_is_handed_back_and_what_is_abandoned_is_told() {
        let mut lane = lane(3);
        let mut refused = Vec::new();
        assert!(lane.flush(&mut refused).is_err(), "there is no queue pair");
        assert_eq!(refused.len(), 3);
        assert_eq!((lane.outstanding(), lane.next(), lane.bytes()), (0, 0, 0));
        let mut lane = self::lane(3);
        let mut told = Vec::new();
        lane.abandon(|wr_id| told.push(wr_id.slot));
        assert_eq!(told, [0, 1, 2]);
        assert!(lane.is_drained() && !lane.is_live());
    }

    #[test]
    fn a_read_in_parts_ends_once_with_its_last_part_or_its_first_failure() {
        use CompletionStatus::{Flushed, RemoteAccess, Success};
        let mut lane = lane(1);
        add(&mut lane, 1, 3);
        add(&mut lane, 2, 2);
        assert_eq!((lane.outstanding(), lane.reads(), lane.bytes()), (6, 3, 60));
        assert_eq!(complete(&mut lane, 2, Success), [(0, true)], "two parts of READ 1 are there");
        assert_eq!(lane.reads(), 2);
        assert_eq!(complete(&mut lane, 3, Success), [(1, true)]);
        add(&mut lane, 3, 1);
        assert_eq!(complete(&mut lane, 4, RemoteAccess), [(2, false)]);
        assert_eq!(lane.reads(), 1);
        assert_eq!(complete(&mut lane, 5, Flushed), [], "its end was told");
        assert_eq!(complete(&mut lane, 6, Flushed), [(3, false)]);
        assert!(lane.is_drained());
        assert_eq!((lane.reads(), lane.bytes()), (0, 0));
    }

    #[test]
    fn parts_that_are_abandoned_or_refused_end_their_read_once() {
        let mut lane = lane(1);
        add(&mut lane, 1, 3);
        let mut told = Vec::new();
        complete(&mut lane, 1, CompletionStatus::Success);
        lane.abandon(|wr_id| told.push(wr_id.slot));
        assert_eq!((told, lane.reads()), (vec![1], 0));
        let mut lane = self::lane(0);
        add(&mut lane, 0, 2);
        let mut refused = Vec::new();
        lane.list.clear();
        add(&mut lane, 1, 2);
        assert!(lane.flush(&mut refused).is_err(), "there is no queue pair");
        assert_eq!(refused.len(), 1, "the one in the list, not the one before it");
        assert_eq!((lane.outstanding(), lane.reads()), (2, 1));
    }
}
