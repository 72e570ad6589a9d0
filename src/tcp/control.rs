//! The control stream of a connection: its handshake and its messages.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags};

use super::flow::{ByteQueue, Watch, would_block};
use super::socket::{self, Interest, Ready, Waiter};
use super::wire::{
    CONTROL_HEADER_BYTES, ControlHeader, MESSAGE, PREAMBLE_BYTES, Preamble, READY, WELCOME,
};
use crate::fabric::{ConnectionId, EventBatch, FabricEvent};
use crate::limits::MESSAGE_BYTES_MAX;
use crate::sys::connections::Broken;
use crate::types::Timestamp;

/// Bytes of messages that wait for a peer which does not drain them: eight of the largest.
const QUEUE_BYTES_MAX: usize = 8 * (CONTROL_HEADER_BYTES + MESSAGE_BYTES_MAX);

/// The buffer into which all control streams receive, one at a time: an incomplete message and as
/// much again and more. It bounds what one poll takes from one stream.
pub(super) const SCRATCH_BYTES: usize = 64 << 10;

const _: () = assert!(SCRATCH_BYTES > 2 * (CONTROL_HEADER_BYTES + MESSAGE_BYTES_MAX));

/// What may come next from the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// We connect: the answer to our preamble.
    Welcome,
    /// We connect: word that all data streams have joined.
    Ready,
    /// We accept, and data streams are missing: nothing.
    Silence,
    /// Messages.
    Open,
}

#[derive(Debug)]
pub(super) struct Control {
    socket: OwnedFd,
    connecting: bool,
    armed: Interest,
    stage: Stage,
    out: ByteQueue,
    /// The beginning of a frame whose rest has not arrived.
    partial: Vec<u8>,
    frames: u64,
    sent: u64,
    incoming: Watch,
    outgoing: Watch,
}

impl Control {
    /// A stream that has begun to connect; `preamble` goes out first.
    pub(super) fn dialed(socket: OwnedFd, preamble: &Preamble) -> Self {
        let mut control = Self::accepted(socket);
        control.connecting = true;
        control.armed = Interest::Write;
        control.stage = Stage::Welcome;
        control.out.push(bytemuck::bytes_of(preamble));
        control
    }

    /// A stream whose preamble has arrived.
    pub(super) fn accepted(socket: OwnedFd) -> Self {
        Self {
            socket,
            connecting: false,
            armed: Interest::Read,
            stage: Stage::Silence,
            out: ByteQueue::default(),
            partial: Vec::new(),
            frames: 0,
            sent: 0,
            incoming: Watch::default(),
            outgoing: Watch::default(),
        }
    }

    /// Sends the acceptor's answer.
    pub(super) fn welcome(&mut self, answer: &Preamble) -> Result<(), Broken> {
        self.out.push(bytemuck::bytes_of(answer));
        self.flush()
    }

    /// Tells the connector that its data streams have joined. Messages may come from now on.
    pub(super) fn ready(&mut self) -> Result<(), Broken> {
        self.stage = Stage::Open;
        self.out.push(bytemuck::bytes_of(&ControlHeader { kind: READY, len: 0 }));
        self.flush()
    }

    pub(super) fn is_open(&self) -> bool {
        self.stage == Stage::Open
    }

    /// Whether a message of this length fits into the queue.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.out.pending().len() + CONTROL_HEADER_BYTES + len <= QUEUE_BYTES_MAX
    }

    /// Queues a message that fits, and sends what the socket takes.
    pub(super) fn message(&mut self, message: &[u8]) -> Result<(), Broken> {
        let len = u32::try_from(message.len()).map_err(|_too_long| Broken::REQUESTED)?;
        let header = ControlHeader { kind: MESSAGE, len };
        self.out.push(bytemuck::bytes_of(&header));
        self.out.push(message);
        self.flush()
    }

    /// Finishes the connect where one is under way, and sends what waits.
    pub(super) fn writable(&mut self) -> Result<(), Broken> {
        if self.connecting {
            socket::connected(&self.socket).map_err(|_refused| Broken::UNREACHABLE)?;
            self.connecting = false;
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), Broken> {
        while !self.connecting && !self.out.is_empty() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(&self.socket, self.out.pending(), flags) {
                Ok(count) => {
                    self.out.consume(count);
                    self.sent += count as u64;
                }
                Err(error) => {
                    let error = error.into();
                    return if would_block(&error) { Ok(()) } else { Err(Broken::from_io(&error)) };
                }
            }
        }
        Ok(())
    }

    /// Handles readiness up to one scratch buffer of bytes. Answers the acceptor's welcome where it
    /// came; messages and the connection's start go to `batch`.
    pub(super) fn handle(
        &mut self,
        ready: Ready,
        id: ConnectionId,
        scratch: &mut [u8],
        batch: &mut EventBatch,
    ) -> Result<Option<Preamble>, Broken> {
        if ready.writable {
            self.writable()?;
        }
        if ready.readable && !self.connecting {
            return self.receive(id, scratch, batch);
        }
        Ok(None)
    }

    /// Receives once. An error is answered after everything that came before it was delivered.
    pub(super) fn receive(
        &mut self,
        id: ConnectionId,
        scratch: &mut [u8],
        batch: &mut EventBatch,
    ) -> Result<Option<Preamble>, Broken> {
        let have = self.partial.len();
        let (old, fresh) = scratch.split_at_mut_checked(have).ok_or(Broken::VIOLATION)?;
        old.copy_from_slice(&self.partial);
        let count = match rustix::net::recv(&self.socket, fresh, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Broken::PEER_CLOSED),
            Ok((count, _)) => count,
            Err(error) => {
                let error = error.into();
                return if would_block(&error) { Ok(None) } else { Err(Broken::from_io(&error)) };
            }
        };
        let bytes = scratch.get(..have + count).unwrap_or_default();
        if self.stage == Stage::Welcome {
            return self.take_welcome(bytes);
        }
        let rest = self.parse(id, bytes, batch)?;
        self.partial.clear();
        self.partial.extend_from_slice(rest);
        Ok(None)
    }

    fn take_welcome(&mut self, bytes: &[u8]) -> Result<Option<Preamble>, Broken> {
        if bytes.len() < PREAMBLE_BYTES {
            self.partial.clear();
            self.partial.extend_from_slice(bytes);
            return Ok(None);
        }
        // The acceptor says nothing more before our data streams have joined: longer is wrong too.
        let answer = Preamble::decode(bytes).ok_or(Broken::VIOLATION)?;
        if answer.kind != WELCOME {
            return Err(Broken::VIOLATION);
        }
        self.partial.clear();
        self.frames += 1;
        self.stage = Stage::Ready;
        Ok(Some(answer))
    }

    /// Delivers whole frames; answers the beginning of the one that is not whole.
    fn parse<'a>(
        &mut self,
        id: ConnectionId,
        mut bytes: &'a [u8],
        batch: &mut EventBatch,
    ) -> Result<&'a [u8], Broken> {
        while let Some((head, rest)) = bytes.split_at_checked(CONTROL_HEADER_BYTES) {
            let header: ControlHeader = bytemuck::pod_read_unaligned(head);
            let len = header.len as usize;
            match (header.kind, self.stage) {
                (READY, Stage::Ready) if len == 0 => {
                    self.stage = Stage::Open;
                    batch.events.push(FabricEvent::Connected { connection: id });
                    bytes = rest;
                }
                (MESSAGE, Stage::Open) if len <= MESSAGE_BYTES_MAX => {
                    let Some((message, rest)) = rest.split_at_checked(len) else {
                        break;
                    };
                    deliver(id, message, batch)?;
                    bytes = rest;
                }
                _ => return Err(Broken::VIOLATION),
            }
            self.frames += 1;
        }
        Ok(bytes)
    }

    /// Watches for output where there is some. Called after everything that may queue or send.
    pub(super) fn arm(&mut self, waiter: &Waiter, token: u64) -> Result<(), Broken> {
        let want = if self.connecting {
            Interest::Write
        } else if self.out.is_empty() {
            Interest::Read
        } else {
            Interest::ReadWrite
        };
        if want != self.armed {
            let changed = waiter.change(self.socket.as_fd(), token, want);
            changed.map_err(|_refused| Broken::UNREACHABLE)?;
            self.armed = want;
        }
        Ok(())
    }

    /// Whether a frame trickles, or the peer does not drain what we send.
    pub(super) fn check(
        &mut self,
        now: Timestamp,
        trickle: Duration,
        stall: Duration,
    ) -> Result<(), Broken> {
        let partial = !self.partial.is_empty();
        if self.incoming.stalled(now, partial, self.frames, trickle) {
            return Err(Broken::VIOLATION);
        }
        let queued = !self.out.is_empty();
        if self.outgoing.stalled(now, queued, self.sent, stall) {
            return Err(Broken::UNREACHABLE);
        }
        Ok(())
    }
}

fn deliver(id: ConnectionId, message: &[u8], batch: &mut EventBatch) -> Result<(), Broken> {
    let start = batch.bytes.len();
    // A caller that never clears its batch reaches 4 GiB; its connections break, the others' bytes
    // stay right.
    let range = u32::try_from(start).ok().zip(u32::try_from(start + message.len()).ok());
    let (start, end) = range.ok_or(Broken::REQUESTED)?;
    batch.bytes.extend_from_slice(message);
    batch.events.push(FabricEvent::Message { connection: id, start, end });
    Ok(())
}
