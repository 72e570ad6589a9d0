//! One connection: a control stream, its data streams, and how they begin and end together.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::control::Control;
use super::data::{DataStream, Landing, Shared};
use super::socket::{self, Ready, Waiter};
use super::table::Token;
use super::wire::{JOIN, PRIMARY, Preamble, WELCOME};
use crate::fabric::{
    Completion, CompletionStatus, ConnectionId, EventBatch, FabricEvent, ReadBatch, ReadWork,
    RegisteredSpan, WrId,
};
use crate::limits::{READ_BYTES_MAX, READ_SEGMENTS_MAX, READS_OUTSTANDING_MAX};
use crate::memory::Regions;
use crate::sys::connections::{Breakable, Broken};
use crate::types::{Path, Timestamp};

/// Receives in which a connection that is about to end looks for the peer's last messages.
const LAST_RECEIVES: usize = 4;

/// What a connection borrows from its fabric for one call.
pub(super) struct Context<'a> {
    pub(super) regions: &'a Regions,
    pub(super) waiter: &'a Waiter,
    pub(super) scratch: &'a mut [u8],
}

#[derive(Debug)]
pub(super) struct Connection {
    id: ConnectionId,
    /// Where its data streams connect to; `None` where the peer connected to us.
    dialed: Option<SocketAddr>,
    /// Whether the caller knows of it, so that its end is an event.
    announced: bool,
    /// When it must be open.
    deadline: Timestamp,
    /// Data streams asked for, then granted.
    granted: usize,
    token: [u8; 16],
    control: Option<Control>,
    streams: Vec<DataStream>,
    admitted: bool,
    outstanding: usize,
    serving: usize,
    /// Set once it is broken: the sockets are closed, completions wait for the next poll.
    broken: Option<Broken>,
    /// READs that never reached a stream, and how they ended.
    stillborn: Vec<(WrId, CompletionStatus)>,
}

impl Breakable for Connection {
    fn is_broken(&self) -> bool {
        self.broken.is_some()
    }
}

impl Connection {
    /// A connection to `peer` with `wanted` streams, begun on `socket`.
    pub(super) fn dialed(
        id: ConnectionId,
        peer: SocketAddr,
        socket: OwnedFd,
        wanted: usize,
        deadline: Timestamp,
    ) -> Self {
        let preamble = Preamble::new(PRIMARY, to_u32(wanted), [0; 16]);
        let control = Control::dialed(socket, &preamble);
        let mut connection = Self::new(id, control, wanted, deadline);
        connection.dialed = Some(peer);
        connection.announced = true;
        connection
    }

    /// A connection that a peer began on `socket`, which is granted `granted` streams.
    pub(super) fn accepted(
        id: ConnectionId,
        socket: OwnedFd,
        granted: usize,
        token: [u8; 16],
        deadline: Timestamp,
    ) -> Self {
        let mut connection = Self::new(id, Control::accepted(socket), granted, deadline);
        connection.token = token;
        connection
    }

    fn new(id: ConnectionId, control: Control, granted: usize, deadline: Timestamp) -> Self {
        Self {
            id,
            dialed: None,
            announced: false,
            deadline,
            granted,
            token: [0; 16],
            control: Some(control),
            streams: Vec::new(),
            admitted: false,
            outstanding: 0,
            serving: 0,
            broken: None,
            stillborn: Vec::new(),
        }
    }

    /// Whether messages may be sent.
    pub(super) fn is_open(&self) -> bool {
        self.control.as_ref().is_some_and(Control::is_open)
    }

    /// Whether it waits for data streams that name `token`.
    pub(super) fn expects(&self, token: &[u8; 16]) -> bool {
        self.is_gathering() && self.token == *token
    }

    /// Whether a peer began it and has not joined all data streams.
    pub(super) fn is_gathering(&self) -> bool {
        self.dialed.is_none() && !self.announced && !self.is_broken()
    }

    pub(super) fn admit(&mut self) {
        self.admitted = true;
    }

    /// Answers the peer that began this connection.
    pub(super) fn welcome(&mut self, waiter: &Waiter) -> Result<(), Broken> {
        let answer = Preamble::new(WELCOME, to_u32(self.granted), self.token);
        let token = Token::control(self.id);
        let control = self.control.as_mut().ok_or(Broken::UNREACHABLE)?;
        control.welcome(&answer)?;
        control.arm(waiter, token.encode())
    }

    /// The token under which the next data stream is watched.
    pub(super) fn next_stream(&self) -> Token {
        Token::data(self.id, self.streams.len())
    }

    /// Adds a data stream that the peer opened. The last one opens the connection.
    pub(super) fn join(
        &mut self,
        socket: OwnedFd,
        waiter: &Waiter,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        self.streams.push(DataStream::accepted(socket));
        if self.streams.len() < self.granted {
            return Ok(());
        }
        let token = Token::control(self.id);
        let control = self.control.as_mut().ok_or(Broken::UNREACHABLE)?;
        control.ready()?;
        control.arm(waiter, token.encode())?;
        self.announced = true;
        batch.events.push(FabricEvent::Accepted { connection: self.id });
        Ok(())
    }

    /// Handles a ready control stream.
    pub(super) fn handle_control(
        &mut self,
        ready: Ready,
        context: &mut Context<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let control = self.control.as_mut().ok_or(Broken::UNREACHABLE)?;
        let welcome = control.handle(ready, self.id, context.scratch, batch)?;
        control.arm(context.waiter, ready.token)?;
        match welcome {
            Some(answer) => self.open_streams(&answer, context.waiter),
            None => Ok(()),
        }
    }

    fn open_streams(&mut self, answer: &Preamble, waiter: &Waiter) -> Result<(), Broken> {
        let granted = usize::try_from(answer.streams).unwrap_or(usize::MAX);
        let peer = self.dialed.ok_or(Broken::VIOLATION)?;
        if granted == 0 || granted > self.granted {
            return Err(Broken::VIOLATION);
        }
        self.granted = granted;
        let join = Preamble::new(JOIN, answer.streams, answer.token);
        for _stream in 0..granted {
            let socket = socket::dial(&peer).map_err(|_refused| Broken::UNREACHABLE)?;
            let token = self.next_stream();
            let stream = DataStream::dialed(socket, &join);
            stream.watch(waiter, token.encode())?;
            self.streams.push(stream);
        }
        Ok(())
    }

    /// Handles a ready data stream.
    pub(super) fn handle_data(
        &mut self,
        index: usize,
        ready: Ready,
        context: &Context<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let Some(stream) = self.streams.get_mut(index) else {
            return Ok(());
        };
        if ready.writable {
            stream.connected()?;
        }
        if ready.readable {
            let mut shared = Shared {
                id: self.id,
                admitted: self.admitted,
                outstanding: &mut self.outstanding,
                serving: &mut self.serving,
            };
            stream.receive(&mut shared, batch)?;
        }
        stream.flush(context.regions, &mut self.serving)?;
        stream.arm(context.waiter, ready.token)
    }

    /// Whether so many more READs may be outstanding.
    pub(super) fn has_credit(&self, reads: usize) -> bool {
        self.outstanding + reads <= READS_OUTSTANDING_MAX
    }

    /// Whether READs may be posted.
    pub(super) fn can_post(&self) -> bool {
        self.is_open() && self.admitted
    }

    /// Posts READs for which there is credit. A READ whose local spans are wrong breaks the
    /// connection: it completes as such, all others are flushed.
    pub(super) fn post(&mut self, batch: &ReadBatch, context: &Context<'_>) -> Result<(), Broken> {
        let mut spans = batch.segments.as_slice();
        let mut works = batch.works.iter();
        for work in works.by_ref() {
            let part = spans.split_at_checked(usize::from(work.segments));
            let posted = part.is_some_and(|(segments, rest)| {
                spans = rest;
                self.post_one(work, segments, context.regions)
            });
            if !posted {
                let failed = (work.wr_id, CompletionStatus::LocalProtection);
                self.stillborn.push(failed);
                let flushed = works.map(|work| (work.wr_id, CompletionStatus::Flushed));
                self.stillborn.extend(flushed);
                return Err(Broken::READ_FAILED);
            }
        }
        for (index, stream) in self.streams.iter_mut().enumerate() {
            if stream.can_flush() {
                stream.flush(context.regions, &mut self.serving)?;
                stream.arm(context.waiter, Token::data(self.id, index).encode())?;
            }
        }
        Ok(())
    }

    /// Queues one READ on the stream with the least to do. `false` where its spans are wrong.
    fn post_one(
        &mut self,
        work: &ReadWork,
        segments: &[RegisteredSpan],
        regions: &Regions,
    ) -> bool {
        let total: u64 = segments.iter().map(|span| u64::from(span.len)).sum();
        if segments.len() > READ_SEGMENTS_MAX
            || work.remote.len > READ_BYTES_MAX
            || total != u64::from(work.remote.len)
            || !segments.iter().all(|span| regions.local(span).is_some())
        {
            return false;
        }
        let Some(stream) = self.streams.iter_mut().min_by_key(|stream| stream.load()) else {
            return false;
        };
        for span in segments {
            if let Some(memory) = regions.local(span) {
                stream.land(Landing { memory: memory.clone(), offset: span.offset, len: span.len });
            }
        }
        stream.post(work);
        self.outstanding += 1;
        true
    }

    /// Whether a message of this length can be queued.
    pub(super) fn has_room(&self, len: usize) -> bool {
        let control = self.control.as_ref();
        control.is_some_and(|control| control.has_room(len))
    }

    /// Sends a message for which there is room.
    pub(super) fn send(&mut self, message: &[u8], waiter: &Waiter) -> Result<(), Broken> {
        let token = Token::control(self.id);
        let control = self.control.as_mut().ok_or(Broken::UNREACHABLE)?;
        control.message(message)?;
        control.arm(waiter, token.encode())
    }

    /// Checks the deadlines.
    pub(super) fn check(
        &mut self,
        now: Timestamp,
        trickle: Duration,
        stall: Duration,
    ) -> Result<(), Broken> {
        if !self.is_open() && now >= self.deadline {
            return Err(Broken::UNREACHABLE);
        }
        if let Some(control) = &mut self.control {
            control.check(now, trickle, stall)?;
        }
        for stream in &mut self.streams {
            stream.check(now, trickle, stall)?;
        }
        Ok(())
    }

    /// Takes the messages that the peer sent before it closed: the end of a data stream may be seen
    /// before the control stream's last bytes.
    pub(super) fn take_last_messages(&mut self, scratch: &mut [u8], batch: &mut EventBatch) {
        let Some(control) = self.control.as_mut().filter(|control| control.is_open()) else {
            return;
        };
        for _receive in 0..LAST_RECEIVES {
            if control.receive(self.id, scratch, batch).is_err() {
                return;
            }
        }
    }

    /// Closes the sockets: once this returns, no byte of registered memory is sent to the peer or
    /// received from it. The control stream closes in order, so that messages already sent arrive.
    pub(super) fn cut(&mut self, broken: Broken) {
        self.control = None;
        for stream in &mut self.streams {
            stream.cut();
        }
        self.broken = Some(broken);
    }

    /// Ends a connection that was cut: the completions of what was outstanding, then its end.
    pub(super) fn bury(mut self, batch: &mut EventBatch) {
        let broken = self.broken.unwrap_or(Broken::REQUESTED);
        let connection = self.id;
        let mut complete = |wr_id, status| {
            batch.events.push(FabricEvent::Completed(Completion {
                connection,
                wr_id,
                status,
                path: Path::default(),
            }));
        };
        for (wr_id, status) in self.stillborn {
            complete(wr_id, status);
        }
        let mut status = broken.first;
        for stream in &mut self.streams {
            while let Some(wr_id) = stream.flush_one() {
                complete(wr_id, status);
                status = CompletionStatus::Flushed;
            }
        }
        if self.announced {
            batch.events.push(FabricEvent::Closed { connection, reason: broken.reason });
        }
    }
}

fn to_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
