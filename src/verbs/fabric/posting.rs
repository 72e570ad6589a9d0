//! How a connection spreads READs over its lanes, and so over NICs: by load, or where a window's key
//! says.
//!
//! A READ goes to one lane, whole: a reliable connection answers in order, so a READ ends with its last
//! part. It is cut where a registration ends, at either end, and at what the ports carry.
//!
//! A READ of no bytes is alone on its lane. It touches no memory, and SoftRoCE seems to forget for it which
//! memory the READs before it are answered from: where one of their answers is lost, it refuses to
//! repeat it (`read_reply` of the kernel's `rxe_resp.c` looks at the length of the latest request).

use arrayvec::ArrayVec;

use super::connection::{Connection, Surroundings};
use super::keys::{PeerKeys, PeerRegion, chunk, to_chunk_end};
use super::lane::{Lane, Part, Rail};
use super::link::Link;
use super::messages::ASK;
use super::near::Wish;
use super::regions::Regions;
use super::windows::lane_of;
use crate::fabric::{
    Completion, CompletionStatus, EventBatch, FabricEvent, ReadBatch, ReadWork, RegisteredSpan,
    RemoteSpan,
};
use crate::limits::{NICS_MAX, READ_SEGMENTS_MAX};
use crate::sys::connections::{Breakable, Broken};
use crate::types::Path;
use crate::verbs::Segment;

/// READs and bytes after which a list goes on to another lane: fewer do not pay for a second
/// doorbell.
const RUN_READS: usize = 32;
const RUN_BYTES: u64 = 1 << 20;

/// READs that follow each other on one lane.
#[derive(Debug, Clone, Copy)]
struct Run {
    lane: usize,
    reads: usize,
    bytes: u64,
    /// Work requests that the lane's completion queue still has room for.
    room: usize,
}

/// What became of a READ that was to be put on a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placed {
    /// It is in a lane's list.
    Listed,
    /// It has to wait for completions.
    NoRoom,
    /// It has to wait for the peer's word about its region.
    NoKey,
    /// It can never be posted.
    Refused(CompletionStatus),
}

impl Connection {
    /// Takes READs for which there is room, and posts those that can be, one doorbell per lane. A READ
    /// whose local spans are wrong breaks the connection: it completes as such, all others are flushed.
    pub(super) fn post(
        &mut self,
        batch: &ReadBatch,
        around: &Surroundings<'_>,
    ) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        let mut spans = batch.segments.as_slice();
        let mut works = batch.works.iter();
        let mut run = None;
        let mut outcome = Ok(());
        for work in works.by_ref() {
            let part = spans.split_at_checked(usize::from(work.segments));
            let good = part.filter(|(segments, _)| is_valid(work, segments, around));
            let Some((segments, rest)) = good else {
                self.stillborn.push((work.wr_id, CompletionStatus::LocalProtection));
                outcome = Err(Broken::READ_FAILED);
                break;
            };
            spans = rest;
            // In order: what comes after a READ that waits waits too. A refusal is told by a poll.
            if !self.parked.is_empty()
                || place(link, &self.keys, around, &mut run, (work, segments)) != Placed::Listed
            {
                self.parked.push(work, segments);
            }
        }
        let outcome = self.ring().and(outcome);
        // The first one that failed has the fault, whichever way it failed.
        for work in works {
            let status = match self.stillborn.is_empty() {
                true => CompletionStatus::LocalProtection,
                false => CompletionStatus::Flushed,
            };
            self.stillborn.push((work.wr_id, status));
        }
        outcome.and_then(|()| self.ask())
    }

    /// Posts the READs that wait, as far as keys and room go. Answers whether there were any.
    pub(super) fn unpark(&mut self, around: &Surroundings<'_>, batch: &mut EventBatch) -> bool {
        if self.parked.is_empty() || self.is_broken() {
            return false;
        }
        let before = self.parked.len();
        let (mut run, mut outcome) = (None, Ok(()));
        while let Some((work, spans)) = self.parked.front() {
            let Some(link) = &mut self.link else { break };
            match place(link, &self.keys, around, &mut run, (&work, &spans)) {
                Placed::Listed => self.parked.pop(),
                Placed::NoRoom | Placed::NoKey => break,
                Placed::Refused(status) => {
                    self.parked.pop();
                    let (connection, wr_id) = (self.id, work.wr_id);
                    let done = Completion { connection, wr_id, status, path: Path::default() };
                    batch.events.push(FabricEvent::Completed(done));
                    outcome = Err(Broken::READ_FAILED);
                    break;
                }
            }
        }
        let any = self.parked.len() < before;
        if let Err(broken) = self.ring().and(outcome).and_then(|()| self.ask()) {
            self.cut(broken, around.now);
        }
        any
    }

    /// Rings the doorbells of all lanes with READs in their lists.
    fn ring(&mut self) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        let (mut refused, mut outcome) = (Vec::new(), Ok(()));
        for lane in &mut link.lanes {
            if let Err(error) = lane.flush(&mut refused) {
                tracing::warn!(%error, "the device refused READs");
                outcome = Err(Broken::READ_FAILED);
            }
        }
        for wr_id in refused {
            let status = match self.stillborn.is_empty() {
                true => CompletionStatus::LocalProtection,
                false => CompletionStatus::Flushed,
            };
            self.stillborn.push((wr_id, status));
        }
        outcome
    }

    /// Asks the peer for the key that the first READ waits for, once.
    fn ask(&mut self) -> Result<(), Broken> {
        let Some((work, _)) = self.parked.front() else { return Ok(()) };
        let key = work.remote.rkey;
        if self.link.as_ref().is_some_and(|link| link.by_window) {
            return Ok(());
        }
        if self.parked.asked.is_some() || work.remote.len == 0 || self.keys.find(key).is_some() {
            return Ok(());
        }
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        self.parked.asked = Some(key);
        link.messages.control(ASK, &key.to_le_bytes()).map_err(|error| {
            tracing::warn!(%error, "a connection ends");
            Broken::UNREACHABLE
        })
    }
}

/// Puts a READ into a lane's list.
fn place(
    link: &mut Link,
    keys: &PeerKeys,
    around: &Surroundings<'_>,
    run: &mut Option<Run>,
    (work, spans): (&ReadWork, &[RegisteredSpan]),
) -> Placed {
    let wr_id = work.wr_id;
    if work.remote.len == 0 {
        let Some(lane) = alone(link) else { return Placed::NoRoom };
        // No byte moves, so the key is nobody's business.
        let remote = RemoteSpan { rkey: 0, address: 0, len: 0 };
        lane.add(&Part { wr_id, remote, last: true }, std::iter::empty());
        *run = None;
        return Placed::Listed;
    }
    let (keys, offset, begun) = if link.by_window {
        let index = lane_of(work.remote.rkey, link.lanes.len());
        // A window is one registration, whose key is the device's own.
        (Keys::Window(work.remote.rkey), 0, begin_on(link, index))
    } else {
        let Some(region) = keys.find(work.remote.rkey) else { return Placed::NoKey };
        let Some(offset) = region.offset(&work.remote) else {
            return Placed::Refused(CompletionStatus::RemoteAccess);
        };
        let wish = Wish { ours: around.regions.near(spans), theirs: region.near };
        let wish = wish.within(link.lanes.iter().map(ends));
        let goes_on = |run: &Run| goes_on(link, run, wish);
        (Keys::Region(region), offset, run.filter(goes_on).or_else(|| begin(link, wish)))
    };
    let Some(mut at) = begun else { return Placed::NoRoom };
    let Some(lane) = link.lanes.get_mut(at.lane) else { return Placed::NoRoom };
    let cut = Cut { work, keys, offset, rail: lane.rail(), regions: around.regions };
    let parts = match cut.whole(spans) {
        Some((remote, segments)) => {
            lane.add(&Part { wr_id, remote, last: true }, segments.into_iter());
            1
        }
        None => match add_parts(lane, &cut, spans, (around.nics.segments as usize, at.room)) {
            Ok(parts) => parts,
            Err(refused) => return refused,
        },
    };
    at.reads += 1;
    at.bytes += u64::from(work.remote.len);
    at.room = at.room.saturating_sub(parts);
    *run = Some(at);
    Placed::Listed
}

/// Puts a READ into a lane's list in parts; answers how many.
fn add_parts(
    lane: &mut Lane,
    cut: &Cut<'_>,
    spans: &[RegisteredSpan],
    (most, room): (usize, usize),
) -> Result<usize, Placed> {
    let mut parts = 0;
    let counted = cut.parts(spans, most, |_, _| parts += 1);
    counted.ok_or(Placed::Refused(CompletionStatus::LocalProtection))?;
    if parts > room {
        // Nothing is there to wait for where even an idle lane has no room for them.
        let never = lane.outstanding() == 0 && parts > lane.depth();
        let refused = Placed::Refused(CompletionStatus::LocalProtection);
        return Err(if never { refused } else { Placed::NoRoom });
    }
    cut.parts(spans, most, |part, segments| lane.add(&part, segments.iter().copied()));
    Ok(parts)
}

/// The NICs of a lane, ours and the peer's.
fn ends(lane: &Lane) -> (u8, u8) {
    let rail = lane.rail();
    (rail.nic, rail.peer)
}

/// Whether a READ may follow those of a run.
fn goes_on(link: &Link, run: &Run, wish: Wish) -> bool {
    let fits = link.lanes.get(run.lane).is_some_and(|lane| wish.fits(ends(lane)));
    fits && run.reads < RUN_READS && run.bytes < RUN_BYTES && run.room > 0
}

/// The lane with the least to do, of those that are wished for, whose completion queue has room.
fn begin(link: &Link, wish: Wish) -> Option<Run> {
    let used = used(link);
    let open = link.lanes.iter().enumerate().filter(|(_, lane)| wish.fits(ends(lane)));
    let open = open.map(|(index, lane)| (index, lane, room(link, lane, &used)));
    let open = open.filter(|(_, lane, room)| *room > 0 && !lane.reads_nothing());
    let (lane, _, room) = open.min_by_key(|(_, lane, _)| (lane.bytes(), lane.outstanding()))?;
    Some(Run { lane, reads: 0, bytes: 0, room })
}

/// The lane that a window's key names, where its completion queue has room. A key that names none is
/// for the device to refuse, on any lane.
fn begin_on(link: &Link, index: usize) -> Option<Run> {
    let index = if index < link.lanes.len() { index } else { 0 };
    let lane = link.lanes.get(index).filter(|lane| !lane.reads_nothing())?;
    let room = room(link, lane, &used(link));
    (room > 0).then_some(Run { lane: index, reads: 0, bytes: 0, room })
}

/// A lane on which nothing is outstanding.
fn alone(link: &mut Link) -> Option<&mut Lane> {
    link.lanes.iter_mut().find(|lane| lane.outstanding() == 0)
}

/// Work requests outstanding on each NIC.
fn used(link: &Link) -> [usize; NICS_MAX] {
    let mut used = [0; NICS_MAX];
    for lane in &link.lanes {
        if let Some(used) = used.get_mut(usize::from(lane.rail().nic)) {
            *used += lane.outstanding();
        }
    }
    used
}

/// Work requests that the completion queue of a lane has room for.
fn room(link: &Link, lane: &Lane, used: &[usize; NICS_MAX]) -> usize {
    let nic = lane.rail().nic;
    let queue = link.queues.iter().find(|queue| queue.nic == nic);
    let depth = queue.map_or(0, |queue| queue.depth);
    depth.saturating_sub(used.get(usize::from(nic)).copied().unwrap_or(depth))
}

/// The keys by which a READ reads.
#[derive(Debug, Clone, Copy)]
enum Keys<'a> {
    Region(&'a PeerRegion),
    Window(u32),
}

impl Keys<'_> {
    /// The length of the registrations as a power of two.
    const fn shift(&self) -> u32 {
        match self {
            Self::Region(region) => region.shift,
            Self::Window(_) => u64::BITS - 1,
        }
    }

    /// The key of a registration on a NIC of the peer.
    fn key(&self, nic: u8, chunk: usize) -> u32 {
        match self {
            Self::Region(region) => region.key(nic, chunk),
            Self::Window(key) => *key,
        }
    }
}

/// A READ of some bytes of a peer's region over a rail.
#[derive(Debug, Clone, Copy)]
struct Cut<'a> {
    work: &'a ReadWork,
    keys: Keys<'a>,
    /// Of its first byte in the region; 0 for a window.
    offset: u64,
    rail: Rail,
    regions: &'a Regions,
}

impl Cut<'_> {
    /// The READ as one work request; `None` where it must be cut.
    fn whole(
        &self,
        spans: &[RegisteredSpan],
    ) -> Option<(RemoteSpan, ArrayVec<Segment, READ_SEGMENTS_MAX>)> {
        let len = self.work.remote.len;
        let chunk = chunk(self.offset, len, self.keys.shift())?;
        if len > self.rail.longest {
            return None;
        }
        let mut segments = ArrayVec::new();
        // Devices take a segment of length 0 for one of 2 GiB.
        for span in spans.iter().filter(|span| span.len > 0) {
            segments.try_push(self.regions.local(span, self.rail.nic)?).ok()?;
        }
        let rkey = self.keys.key(self.rail.peer, chunk);
        Some((RemoteSpan { rkey, ..self.work.remote }, segments))
    }

    /// Gives `each` the parts of the READ, in order, each with at most `most` segments. `None` where a
    /// local span is not registered.
    fn parts(
        &self,
        spans: &[RegisteredSpan],
        most: usize,
        mut each: impl FnMut(Part, &[Segment]),
    ) -> Option<()> {
        let Self { work, keys, rail, .. } = self;
        let limit = |at| to_chunk_end(at, keys.shift()).min(u64::from(rail.longest));
        let mut segments = ArrayVec::<Segment, READ_SEGMENTS_MAX>::new();
        let (mut at, mut have, mut left) = (self.offset, 0, u64::from(work.remote.len));
        for span in spans {
            let mut span = *span;
            while span.len > 0 {
                let segment = self.regions.local_part(&span, rail.nic, limit(at) - have)?;
                let taken = u64::from(segment.length);
                (span.offset, span.len) = (span.offset + taken, span.len - segment.length);
                (have, left) = (have + taken, left.saturating_sub(taken));
                segments.try_push(segment).ok()?;
                if have == limit(at) || left == 0 || segments.len() >= most.min(READ_SEGMENTS_MAX) {
                    let chunk = usize::try_from(at >> keys.shift()).ok()?;
                    let remote = RemoteSpan {
                        rkey: keys.key(rail.peer, chunk),
                        address: work.remote.address + (at - self.offset),
                        len: u32::try_from(have).ok()?,
                    };
                    each(Part { wr_id: work.wr_id, remote, last: left == 0 }, &segments);
                    segments.clear();
                    (at, have) = (at + have, 0);
                }
            }
        }
        Some(())
    }
}

/// Whether the device can be given this READ.
fn is_valid(work: &ReadWork, segments: &[RegisteredSpan], around: &Surroundings<'_>) -> bool {
    let total: u64 = segments.iter().map(|span| u64::from(span.len)).sum();
    segments.len() <= around.nics.segments as usize
        && work.remote.len <= around.nics.read_bytes
        && total == u64::from(work.remote.len)
        && segments.iter().all(|span| around.regions.contains(span))
}
