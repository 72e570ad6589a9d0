//! The READs of one connection: a queue, and the copies that carry them out in order.

use std::collections::VecDeque;
use std::sync::Arc;

use super::page::{PeerPage, Standing};
use super::window::Window;
use crate::fabric::{
    Completion, CompletionStatus, ConnectionId, EventBatch, FabricEvent, ReadBatch, ReadWork,
    RegisteredSpan, RemoteSpan, WrId,
};
use crate::limits::{READ_BYTES_MAX, READ_SEGMENTS_MAX, READS_OUTSTANDING_MAX};
use crate::memory::{Mapping, Regions};
use crate::sys::connections::Broken;
use crate::types::Path;

/// What a READ costs a poll's budget at least, bytes: its bookkeeping takes as long as so many.
const READ_COST_MIN: usize = 512;

/// A READ that has not completed.
#[derive(Debug, Clone, Copy)]
struct Work {
    wr_id: WrId,
    remote: RemoteSpan,
    /// Local spans that it fills; `None` where these are wrong.
    segments: Option<u16>,
}

/// A part of a READ's destination. It keeps the memory until the READ has completed.
#[derive(Debug)]
struct Landing {
    memory: Arc<Mapping>,
    offset: u64,
    len: u32,
}

/// What a holder serves to us.
pub(super) struct Source<'a> {
    pub(super) page: &'a PeerPage,
    pub(super) windows: &'a [Window],
}

/// How far a run came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ran {
    /// All READs have completed.
    Empty,
    /// The budget is used up.
    Paused,
    /// The next READ names a key that we know nothing of. A grant may be on its way.
    UnknownKey,
}

/// How far one READ came.
enum Progress {
    Unfinished,
    UnknownKey,
    Ended(CompletionStatus),
    Cut,
}

#[derive(Debug, Default)]
pub(super) struct Reads {
    works: VecDeque<Work>,
    landings: VecDeque<Landing>,
    /// Bytes of the first READ that are in place.
    done: u32,
}

impl Reads {
    pub(super) fn is_empty(&self) -> bool {
        self.works.is_empty()
    }

    /// Whether so many more may be outstanding.
    pub(super) fn has_credit(&self, reads: usize) -> bool {
        self.works.len() + reads <= READS_OUTSTANDING_MAX
    }

    /// Queues READs for which there is credit. One whose local spans are wrong completes as such when
    /// its turn comes.
    pub(super) fn post(&mut self, batch: &ReadBatch, regions: &Regions) {
        let mut spans = batch.segments.as_slice();
        for work in &batch.works {
            let part = spans.split_at_checked(usize::from(work.segments));
            let (segments, rest) = part.unzip();
            spans = rest.unwrap_or_default();
            let good = segments.filter(|segments| is_good(work, segments, regions));
            for span in good.unwrap_or_default() {
                if let Some(memory) = regions.local(span) {
                    let (memory, offset, len) = (Arc::clone(memory), span.offset, span.len);
                    self.landings.push_back(Landing { memory, offset, len });
                }
            }
            let segments = good.map(|_| work.segments);
            self.works.push_back(Work { wr_id: work.wr_id, remote: work.remote, segments });
        }
    }

    /// Copies until the queue is empty, the budget of bytes is used up, or a READ fails.
    ///
    /// # Errors
    /// A READ failed and has completed, or the holder cut us off and none has.
    pub(super) fn run(
        &mut self,
        connection: ConnectionId,
        from: &Source<'_>,
        budget: &mut usize,
        batch: &mut EventBatch,
    ) -> Result<Ran, Broken> {
        while let Some(work) = self.works.front().copied() {
            if *budget == 0 {
                return Ok(Ran::Paused);
            }
            let status = match self.advance(&work, from, budget) {
                Progress::Unfinished => return Ok(Ran::Paused),
                Progress::UnknownKey => return Ok(Ran::UnknownKey),
                Progress::Cut => return Err(Broken::PEER_CLOSED),
                Progress::Ended(status) => status,
            };
            self.finish();
            complete(connection, work.wr_id, status, batch);
            if status != CompletionStatus::Success {
                return Err(Broken::READ_FAILED);
            }
        }
        Ok(Ran::Empty)
    }

    /// Fails the first READ, whose key nobody granted us.
    pub(super) fn refuse(&mut self, connection: ConnectionId, batch: &mut EventBatch) -> Broken {
        if let Some(work) = self.works.front().copied() {
            self.finish();
            complete(connection, work.wr_id, CompletionStatus::RemoteAccess, batch);
        }
        Broken::READ_FAILED
    }

    /// Ends what is left: the first one as `first`, the others as flushed.
    pub(super) fn flush(
        &mut self,
        connection: ConnectionId,
        first: CompletionStatus,
        batch: &mut EventBatch,
    ) {
        let mut status = first;
        for work in self.works.drain(..) {
            complete(connection, work.wr_id, status, batch);
            status = CompletionStatus::Flushed;
        }
        self.landings.clear();
    }

    /// Forgets the first READ and lets go of its memory.
    fn finish(&mut self) {
        if let Some(work) = self.works.pop_front() {
            for _segment in 0..work.segments.unwrap_or(0) {
                self.landings.pop_front();
            }
        }
        self.done = 0;
    }

    /// Copies what the budget allows of the first READ, and looks afterwards whether that was allowed.
    fn advance(&mut self, work: &Work, from: &Source<'_>, budget: &mut usize) -> Progress {
        *budget = budget.saturating_sub(READ_COST_MIN);
        let Some(segments) = work.segments else {
            return Progress::Ended(CompletionStatus::LocalProtection);
        };
        let refused = || match from.page.standing() {
            Standing::Cut | Standing::Moved => Progress::Cut,
            _ => Progress::Ended(CompletionStatus::RemoteAccess),
        };
        if from.page.standing() != Standing::Admitted {
            return refused();
        }
        if work.remote.len == 0 {
            return Progress::Ended(CompletionStatus::Success);
        }
        let Some(window) = from.windows.iter().find(|window| window.rkey == work.remote.rkey)
        else {
            return Progress::UnknownKey;
        };
        let Some(start) = window.offset(&work.remote) else {
            return refused();
        };
        if !from.page.serves(window.slot, window.rkey) {
            return refused();
        }
        let finished = self.copy(usize::from(segments), (window, start), budget);
        // Nothing that was copied counts before this.
        if !from.page.serves(window.slot, window.rkey) {
            return refused();
        }
        match finished {
            None => Progress::Ended(CompletionStatus::LocalProtection),
            Some(true) => Progress::Ended(CompletionStatus::Success),
            Some(false) => Progress::Unfinished,
        }
    }

    /// Copies the first READ's next bytes. Whether it is finished; `None` where memory ends too soon,
    /// which its posting has ruled out.
    fn copy(
        &mut self,
        segments: usize,
        (window, start): (&Window, u64),
        budget: &mut usize,
    ) -> Option<bool> {
        let (mut before, mut room) = (0, *budget);
        for landing in self.landings.iter().take(segments) {
            // Landings that are full already, and the full part of the one that is not.
            let full = self.done.saturating_sub(before).min(landing.len);
            before += landing.len;
            let left = usize::try_from(landing.len - full).ok()?;
            let step = left.min(room);
            let at = landing.offset + u64::from(full);
            window.copy_to(start + u64::from(self.done), (&landing.memory, at), step).ok()?;
            self.done += u32::try_from(step).ok()?;
            room -= step;
            if step < left {
                *budget = 0;
                return Some(false);
            }
        }
        *budget = room;
        Some(true)
    }
}

/// Whether a READ's local spans are registered and as long as what it reads.
fn is_good(work: &ReadWork, segments: &[RegisteredSpan], regions: &Regions) -> bool {
    let total: u64 = segments.iter().map(|span| u64::from(span.len)).sum();
    segments.len() <= READ_SEGMENTS_MAX
        && work.remote.len <= READ_BYTES_MAX
        && total == u64::from(work.remote.len)
        && segments.iter().all(|span| regions.local(span).is_some())
}

fn complete(
    connection: ConnectionId,
    wr_id: WrId,
    status: CompletionStatus,
    batch: &mut EventBatch,
) {
    batch.events.push(FabricEvent::Completed(Completion {
        connection,
        wr_id,
        status,
        path: Path::default(),
    }));
}
