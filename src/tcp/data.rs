//! One data stream of a connection, in both directions: our READs and the peer's.
//!
//! A stream is first in, first out: responses come in the order of the requests, so the READ at the
//! front of [`DataStream::reads`] is the only one that a response can belong to, and a response that
//! names another one, or another length, is a violation. Nothing is ever written outside the local
//! spans of the READ at the front.
//!
//! Payload is received straight into these spans, together with the header behind it. While a READ
//! is outstanding a header is therefore read alone, never bytes beyond it, which may be payload. While
//! none is, only requests can arrive, and many are read at once.
//!
//! Receiving never waits for sending, so two ends that read from each other cannot block each other.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::flow::{BYTES_PER_POLL, ByteQueue, CALLS_PER_POLL, Watch, would_block};
use super::serving::Serving;
use super::socket::{self, Interest, Waiter};
use super::vectored::Scatter;
use super::wire::{
    FRAME_BYTES, Frame, Preamble, REQUEST, RESPONSE, STATUS_REMOTE_ACCESS, STATUS_SUCCESS,
};
use crate::fabric::{
    Completion, CompletionStatus, ConnectionId, EventBatch, FabricEvent, ReadWork, WrId,
};
use crate::limits::{READ_BYTES_MAX, READS_OUTSTANDING_MAX};
use crate::memory::{Mapping, Regions};
use crate::sys::connections::Broken;
use crate::types::{Path, Timestamp};

/// Requests that are read with one call: a batch of 128.
const INPUT_BYTES: usize = 128 * FRAME_BYTES;

/// A READ of ours that waits for its response.
#[derive(Debug, Clone, Copy)]
struct Pending {
    wr_id: WrId,
    len: u32,
    segments: u16,
}

/// A local span of a pending READ. It holds the memory, whatever becomes of the registration.
#[derive(Debug)]
pub(super) struct Landing {
    pub(super) memory: Arc<Mapping>,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// What a stream shares with the others of its connection, for one call.
pub(super) struct Shared<'a> {
    pub(super) id: ConnectionId,
    pub(super) admitted: bool,
    /// READs of ours that are outstanding on all streams.
    pub(super) outstanding: &'a mut usize,
    /// READs of the peer that wait on all streams.
    pub(super) serving: &'a mut usize,
}

#[derive(Debug)]
pub(super) struct DataStream {
    /// `None` once the stream has been cut; what is pending then waits to be flushed.
    socket: Option<OwnedFd>,
    connecting: bool,
    armed: Interest,
    /// The join preamble, then requests: at most [`READS_OUTSTANDING_MAX`] of them.
    requests: ByteQueue,
    serving: Serving,
    reads: VecDeque<Pending>,
    landings: VecDeque<Landing>,
    /// Bytes of the pending READs, and a header's worth for each: the load of this stream.
    load: u64,
    input: Box<[u8; INPUT_BYTES]>,
    have: usize,
    /// Payload bytes received of the READ at the front, once its response has begun.
    landed: Option<u32>,
    frames: u64,
    received: u64,
    sent: u64,
    header_watch: Watch,
    read_watch: Watch,
    send_watch: Watch,
}

impl DataStream {
    /// A stream that has begun to connect; `join` goes out first.
    pub(super) fn dialed(socket: OwnedFd, join: &Preamble) -> Self {
        let mut stream = Self::accepted(socket);
        stream.connecting = true;
        stream.armed = Interest::Write;
        stream.requests.push(bytemuck::bytes_of(join));
        stream
    }

    /// A stream whose preamble has arrived.
    pub(super) fn accepted(socket: OwnedFd) -> Self {
        Self {
            socket: Some(socket),
            connecting: false,
            armed: Interest::Read,
            requests: ByteQueue::default(),
            serving: Serving::default(),
            reads: VecDeque::new(),
            landings: VecDeque::new(),
            load: 0,
            input: Box::new([0; INPUT_BYTES]),
            have: 0,
            landed: None,
            frames: 0,
            received: 0,
            sent: 0,
            header_watch: Watch::default(),
            read_watch: Watch::default(),
            send_watch: Watch::default(),
        }
    }

    /// Outstanding bytes, by which READs are spread over streams.
    pub(super) fn load(&self) -> u64 {
        self.load
    }

    /// Lists one more local span of the READ that [`DataStream::post`] posts next.
    pub(super) fn land(&mut self, landing: Landing) {
        self.landings.push_back(landing);
    }

    /// Queues the request of a READ whose spans have been listed.
    pub(super) fn post(&mut self, work: &ReadWork) {
        self.reads.push_back(Pending {
            wr_id: work.wr_id,
            len: work.remote.len,
            segments: work.segments,
        });
        self.load += cost(work.remote.len);
        self.requests.push(bytemuck::bytes_of(&Frame {
            kind: REQUEST,
            word: work.remote.rkey,
            slot: work.wr_id.slot,
            generation: work.wr_id.generation,
            address: work.remote.address,
            len: work.remote.len,
            reserved: 0,
        }));
    }

    /// Whether posted requests can go out now; else the next readiness sends them.
    pub(super) fn can_flush(&self) -> bool {
        self.armed == Interest::Read && !self.requests.is_empty()
    }

    /// Finishes the connect where one is under way.
    pub(super) fn connected(&mut self) -> Result<(), Broken> {
        if self.connecting
            && let Some(socket) = &self.socket
        {
            socket::connected(socket).map_err(|_refused| Broken::UNREACHABLE)?;
            self.connecting = false;
        }
        Ok(())
    }

    /// Closes the socket: from here on nothing is sent from registered memory or received into it.
    pub(super) fn cut(&mut self) {
        if let Some(socket) = self.socket.take() {
            socket::reset(socket);
        }
    }

    /// Forgets one pending READ, the oldest first, and answers whose it was.
    pub(super) fn flush_one(&mut self) -> Option<WrId> {
        self.pop_read().map(|read| read.wr_id)
    }

    fn pop_read(&mut self) -> Option<Pending> {
        let read = self.reads.pop_front()?;
        let spans = usize::from(read.segments).min(self.landings.len());
        self.landings.drain(..spans);
        self.load = self.load.saturating_sub(cost(read.len));
        Some(read)
    }

    /// Receives what has arrived, up to the bounds of one poll.
    pub(super) fn receive(
        &mut self,
        shared: &mut Shared<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let mut bytes = 0;
        for _call in 0..CALLS_PER_POLL {
            let Some((count, wanted)) = self.fill()? else {
                return Ok(());
            };
            self.absorb(count, shared, batch)?;
            self.parse(shared, batch)?;
            bytes += count;
            if count < wanted || bytes >= BYTES_PER_POLL {
                return Ok(());
            }
        }
        Ok(())
    }

    /// One receive: payload and the header behind it, a header, or many. Answers the bytes received
    /// and those there was room for; `None` where nothing had arrived.
    fn fill(&mut self) -> Result<Option<(usize, usize)>, Broken> {
        if self.connecting {
            return Ok(None);
        }
        let Some(socket) = &self.socket else {
            return Ok(None);
        };
        let mut scatter = Scatter::new();
        let limit = if self.reads.is_empty() { INPUT_BYTES } else { FRAME_BYTES };
        let mut whole = true;
        if let Some(landed) = self.landed {
            let spans = self.reads.front().map_or(0, |read| usize::from(read.segments));
            whole = list(&mut scatter, self.landings.iter().take(spans), landed)?;
        }
        if whole {
            let room = self.input.get_mut(self.have..limit);
            scatter.buffer(room.ok_or(Broken::VIOLATION)?);
        }
        let wanted = scatter.len();
        match scatter.receive(socket.as_fd()) {
            Ok(0) => Err(Broken::PEER_CLOSED),
            Ok(count) => Ok(Some((count, wanted))),
            Err(error) if would_block(&error) => Ok(None),
            Err(error) => Err(Broken::from_io(&error)),
        }
    }

    /// Accounts for received bytes: payload of the READ at the front first, then headers.
    fn absorb(
        &mut self,
        count: usize,
        shared: &mut Shared<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        self.received += count as u64;
        let Some(landed) = self.landed else {
            self.have += count;
            return Ok(());
        };
        let len = self.reads.front().map_or(0, |read| read.len);
        let missing = (len - landed) as usize;
        if count < missing {
            let more = u32::try_from(count).map_err(|_too_many| Broken::VIOLATION)?;
            self.landed = Some(landed + more);
            return Ok(());
        }
        self.landed = None;
        self.have = count - missing;
        self.complete(CompletionStatus::Success, shared, batch);
        Ok(())
    }

    /// Handles the whole headers of the input buffer.
    fn parse(&mut self, shared: &mut Shared<'_>, batch: &mut EventBatch) -> Result<(), Broken> {
        let mut at = 0;
        while self.have - at >= FRAME_BYTES {
            let bytes = self.input.get(at..at + FRAME_BYTES).unwrap_or_default();
            let frame: Frame =
                bytemuck::try_pod_read_unaligned(bytes).map_err(|_short| Broken::VIOLATION)?;
            at += FRAME_BYTES;
            self.frames += 1;
            match frame.kind {
                REQUEST => self.take_request(&frame, shared)?,
                RESPONSE => self.take_response(&frame, shared, batch)?,
                _ => return Err(Broken::VIOLATION),
            }
        }
        self.input.copy_within(at..self.have, 0);
        self.have -= at;
        Ok(())
    }

    fn take_request(&mut self, frame: &Frame, shared: &mut Shared<'_>) -> Result<(), Broken> {
        if *shared.serving >= READS_OUTSTANDING_MAX || frame.len > READ_BYTES_MAX {
            return Err(Broken::VIOLATION);
        }
        *shared.serving += 1;
        self.serving.push(frame, shared.admitted);
        Ok(())
    }

    fn take_response(
        &mut self,
        frame: &Frame,
        shared: &mut Shared<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let read = *self.reads.front().ok_or(Broken::VIOLATION)?;
        let echoed = WrId { slot: frame.slot, generation: frame.generation };
        if echoed != read.wr_id {
            return Err(Broken::VIOLATION);
        }
        match frame.word {
            STATUS_SUCCESS if frame.len == read.len => {
                if read.len > 0 {
                    self.landed = Some(0);
                } else {
                    self.complete(CompletionStatus::Success, shared, batch);
                }
                Ok(())
            }
            STATUS_REMOTE_ACCESS if frame.len == 0 => {
                self.complete(CompletionStatus::RemoteAccess, shared, batch);
                Err(Broken::READ_FAILED)
            }
            _ => Err(Broken::VIOLATION),
        }
    }

    fn complete(
        &mut self,
        status: CompletionStatus,
        shared: &mut Shared<'_>,
        batch: &mut EventBatch,
    ) {
        if let Some(read) = self.pop_read() {
            *shared.outstanding = shared.outstanding.saturating_sub(1);
            batch.events.push(FabricEvent::Completed(Completion {
                connection: shared.id,
                wr_id: read.wr_id,
                status,
                path: Path::default(),
            }));
        }
    }

    /// Sends requests and responses that wait, up to the bounds of one poll.
    pub(super) fn flush(&mut self, regions: &Regions, serving: &mut usize) -> Result<(), Broken> {
        let mut bytes = 0;
        for _call in 0..CALLS_PER_POLL {
            if self.connecting || !self.has_output() || bytes >= BYTES_PER_POLL {
                return Ok(());
            }
            let Some(socket) = &self.socket else {
                return Ok(());
            };
            let heads = self.serving.heads(regions)?;
            let requests = self.requests.pending();
            let gather = self.serving.gather(&heads, requests)?;
            let wanted = gather.len();
            let count = match gather.send(socket.as_fd()) {
                Ok(count) => count,
                Err(error) if would_block(&error) => return Ok(()),
                Err(error) => return Err(Broken::from_io(&error)),
            };
            let (requested, served) = self.serving.account(count, &heads, requests.len());
            self.requests.consume(requested);
            *serving = serving.saturating_sub(served);
            self.sent += count as u64;
            bytes += count;
            if count < wanted {
                return Ok(());
            }
        }
        Ok(())
    }

    fn has_output(&self) -> bool {
        !self.requests.is_empty() || !self.serving.is_empty()
    }

    /// Watches for output where there is some. Called after everything that may queue or send.
    pub(super) fn arm(&mut self, waiter: &Waiter, token: u64) -> Result<(), Broken> {
        let want = if self.connecting {
            Interest::Write
        } else if self.has_output() {
            Interest::ReadWrite
        } else {
            Interest::Read
        };
        if want != self.armed
            && let Some(socket) = &self.socket
        {
            let changed = waiter.change(socket.as_fd(), token, want);
            changed.map_err(|_refused| Broken::UNREACHABLE)?;
            self.armed = want;
        }
        Ok(())
    }

    /// Adds the stream's socket to the watched ones.
    pub(super) fn watch(&self, waiter: &Waiter, token: u64) -> Result<(), Broken> {
        let Some(socket) = &self.socket else {
            return Ok(());
        };
        let added = waiter.add(socket.as_fd(), token, self.armed);
        added.map_err(|_refused| Broken::UNREACHABLE)
    }

    /// Whether a header trickles, our READs stand still, or the peer does not drain what we send.
    pub(super) fn check(
        &mut self,
        now: Timestamp,
        trickle: Duration,
        stall: Duration,
    ) -> Result<(), Broken> {
        let header = self.have > 0;
        if self.header_watch.stalled(now, header, self.frames, trickle) {
            return Err(Broken::VIOLATION);
        }
        let reads = !self.reads.is_empty();
        if self.read_watch.stalled(now, reads, self.received, stall) {
            return Err(Broken::UNREACHABLE);
        }
        let output = self.has_output();
        if self.send_watch.stalled(now, output, self.sent, stall) {
            return Err(Broken::UNREACHABLE);
        }
        Ok(())
    }
}

/// Lists the spans of a READ from byte `landed` on, up to the bounds of one call. Answers whether
/// that is all of them.
fn list<'a>(
    scatter: &mut Scatter<'a>,
    landings: impl Iterator<Item = &'a Landing>,
    landed: u32,
) -> Result<bool, Broken> {
    let mut skip = landed;
    for landing in landings {
        if skip >= landing.len {
            skip -= landing.len;
            continue;
        }
        let room = BYTES_PER_POLL.saturating_sub(scatter.len());
        let rest = (landing.len - skip) as usize;
        let part = rest.min(room);
        scatter
            .mapped(&landing.memory, landing.offset + u64::from(skip), part)
            .map_err(|_outside| Broken::REQUESTED)?;
        if part < rest {
            return Ok(false);
        }
        skip = 0;
    }
    Ok(true)
}

/// What a READ adds to the load of its stream.
fn cost(len: u32) -> u64 {
    u64::from(len) + FRAME_BYTES as u64
}
