//! The embedded fabric over TCP: what RDMA reliable connections do, on any network.
//!
//! A connection is one control stream for messages and several data streams for READs, all between
//! the same two fabrics. READs are served by the peer's fabric inside its poll, straight from
//! registered memory to the socket and from the socket into the registered spans of the reader.
//!
//! Invariants, beyond those of [`crate::fabric`]:
//!
//! - Nothing queued points into registered memory for sending; key, bounds and access are checked in
//!   the call that sends. Whatever closes the sockets or ends a registration needs no search.
//! - A local span's memory is held by the READ that lands in it until that READ's completion is in an
//!   event batch.
//! - Closing the sockets is the cut: they are closed first, completions and the end are reported by
//!   the next poll.
//! - A peer costs fixed buffers and bounded queues. What is longer, more or slower than the bounds of
//!   [`crate::limits`] closes its connection, and only that.
//! - One poll does a bounded amount of work per ready stream, so bulk data does not delay messages.
//!
//! How a connection's end is reported: an orderly end and a reset after it was up are
//! [`CloseReason::PeerClosed`] (TCP resets where the peer closes
//! with bytes under way); a failed connect, a timeout and a stall are `Unreachable`. The first READ
//! outstanding then completes as `Unreachable`, the others as `Flushed`. A READ that arrives before
//! [`Fabric::admit`] is refused as one with a wrong key is. A zero-length READ succeeds under any key
//! once admitted, as it does on RoCE.
//! Posting before one's own `admit` answers [`FabricError::Closed`]: the connection takes no READs yet.

mod arrivals;
mod connection;
mod control;
mod data;
mod flow;
mod serving;
mod socket;
mod table;
#[cfg(test)]
mod tests;
mod vectored;
mod wire;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use self::arrivals::{Arrivals, Greeting};
use self::connection::{Connection, Context};
use self::control::SCRATCH_BYTES;
use self::socket::{Interest, REMEDY_DESCRIPTORS, Ready, Waiter};
use self::table::{Table, Token};
use self::wire::{JOIN, PRIMARY, Preamble};
use crate::fabric::{
    Access, Capabilities, CloseReason, ConnectionId, EventBatch, Fabric, FabricError, ReadBatch,
    Region, RegionId, Wake, check_message,
};
use crate::limits::{
    HANDSHAKE_TIMEOUT, HANDSHAKES_MAX, READ_BYTES_MAX, READ_SEGMENTS_MAX, READS_OUTSTANDING_MAX,
    STALL_TIMEOUT, STREAMS_MAX,
};
use crate::memory::{Climb, ForeignFabric, Mapping, Pinner, Regions, Registrable};
use crate::sys::connections::Broken;
use crate::sys::watch::Watch;
use crate::types::Timestamp;

/// Sockets accepted in one poll; the others wait in the kernel's queue for the next one.
const ACCEPTS_PER_POLL: usize = 16;

/// Deadlines are checked this many times in the shortest timeout, which is their precision.
const SWEEPS_PER_TIMEOUT: u32 = 8;

/// How a TCP fabric is set up.
#[derive(Debug, Clone)]
pub struct TcpConfig {
    /// Where to listen; port 0 takes any free one. `None`: connect only. Default: none.
    pub listen: Option<SocketAddr>,
    /// Data streams per connection, `1..=`[`STREAMS_MAX`]; the smaller number of both ends holds.
    /// More streams use more of a network with several paths; each costs a socket at both ends and
    /// 4 KiB. Default: 2.
    pub streams: usize,
    /// Time for a connection to open, and for a begun header or message to arrive whole.
    /// Default: [`HANDSHAKE_TIMEOUT`].
    pub handshake_timeout: Duration,
    /// Time in which a READ, or data that the peer has to take, may stand still before the connection
    /// counts as broken. Default: [`STALL_TIMEOUT`].
    pub io_timeout: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            listen: None,
            streams: 2,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            io_timeout: STALL_TIMEOUT,
        }
    }
}

/// A fabric over TCP, owned by the thread that polls it.
pub struct TcpFabric {
    listener: Option<OwnedFd>,
    local: Option<SocketAddr>,
    streams: usize,
    handshake_timeout: Duration,
    io_timeout: Duration,
    sweep_interval: Duration,
    next_sweep: Timestamp,
    /// Whether accepting waits for the next sweep, since no descriptor was free.
    paused: bool,
    waiter: Waiter,
    regions: Regions,
    table: Table,
    arrivals: Arrivals,
    /// Whether the descriptor that is watched for somebody else was readable.
    watched: bool,
    /// Cut connections whose end the next poll reports.
    dying: Vec<ConnectionId>,
    ready: Vec<Ready>,
    scratch: Box<[u8]>,
}

impl fmt::Debug for TcpFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpFabric")
            .field("local", &self.local)
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

impl TcpFabric {
    /// Makes a fabric, listening where the configuration says so.
    ///
    /// # Errors
    /// [`FabricError::Limit`] for a number of streams out of range; [`FabricError::Os`] where the
    /// address cannot be listened on or no descriptor is free.
    pub fn new(config: TcpConfig) -> Result<Self, FabricError> {
        if config.streams == 0 || config.streams > STREAMS_MAX {
            return Err(FabricError::Limit {
                what: "data streams per connection (at least 1)",
                limit: STREAMS_MAX,
            });
        }
        let waiter = Waiter::new()?;
        let (listener, local) = config.listen.map(socket::listen).transpose()?.unzip();
        if let Some(listener) = &listener {
            waiter.add(listener, Token::Listener.encode(), Interest::Read).map_err(|source| {
                socket::os("watching the listener".to_owned(), source, REMEDY_DESCRIPTORS)
            })?;
        }
        let shortest = config.handshake_timeout.min(config.io_timeout);
        Ok(Self {
            listener,
            local,
            streams: config.streams,
            handshake_timeout: config.handshake_timeout,
            io_timeout: config.io_timeout,
            sweep_interval: shortest / SWEEPS_PER_TIMEOUT,
            next_sweep: Timestamp::ZERO,
            paused: false,
            waiter,
            regions: Regions::default(),
            table: Table::default(),
            arrivals: Arrivals::default(),
            watched: false,
            dying: Vec::new(),
            ready: Vec::new(),
            scratch: vec![0; SCRATCH_BYTES].into_boxed_slice(),
        })
    }

    /// The address that it listens on, with the port that the kernel chose. `None` where it does not.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.local
    }

    /// Runs `act` on a connection, and cuts it where that breaks it. `None` where it is gone.
    fn with<R: Default>(
        &mut self,
        id: ConnectionId,
        batch: Option<&mut EventBatch>,
        act: impl FnOnce(&mut Connection, &mut Context<'_>, &mut EventBatch) -> Result<R, Broken>,
    ) -> Option<R> {
        let connection = self.table.get(id)?;
        let mut context =
            Context { regions: &self.regions, waiter: &self.waiter, scratch: &mut self.scratch };
        // Outside a poll nothing is received, so nothing is put into this one.
        let mut none = EventBatch::default();
        let polling = batch.is_some();
        let batch = batch.unwrap_or(&mut none);
        match act(connection, &mut context, batch) {
            Ok(result) => Some(result),
            // A stream that the peer closed stays readable: the next poll finds the same end, and can
            // deliver what the peer said before it.
            Err(broken) if broken.reason == CloseReason::PeerClosed && !polling => {
                Some(R::default())
            }
            Err(broken) => {
                if broken.reason == CloseReason::PeerClosed {
                    connection.take_last_messages(&mut self.scratch, batch);
                }
                connection.cut(broken);
                self.dying.push(id);
                Some(R::default())
            }
        }
    }

    fn handle(&mut self, ready: Ready, now: Timestamp, batch: &mut EventBatch) {
        match Token::decode(ready.token) {
            Token::Listener => self.accept(now, batch),
            Token::Watched => self.watched = true,
            Token::Arrival(number) => self.greet(number, now, batch),
            Token::Control(id) => {
                self.with(id, Some(batch), |connection, context, batch| {
                    connection.handle_control(ready, context, batch)
                });
            }
            Token::Data(id, stream) => {
                self.with(id, Some(batch), |connection, context, batch| {
                    connection.handle_data(stream, ready, context, batch)
                });
            }
        }
    }

    fn accept(&mut self, now: Timestamp, batch: &mut EventBatch) {
        for _accept in 0..ACCEPTS_PER_POLL {
            let Some(listener) = &self.listener else {
                return;
            };
            let socket = match socket::accept(listener) {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    self.pause(true);
                    return;
                }
                // The peer of this one has gone already.
                Err(_) => continue,
            };
            let number = self.arrivals.add(socket, now + self.handshake_timeout);
            let token = Token::Arrival(number).encode();
            if let Some(socket) = self.arrivals.socket(number) {
                // An unwatched arrival does nothing, and its deadline closes it.
                let _outcome = self.waiter.add(socket, token, Interest::Read);
            }
            self.greet(number, now, batch);
        }
    }

    /// Stops or restarts accepting: without a free descriptor a waiting connection would make every
    /// wait return at once.
    fn pause(&mut self, paused: bool) {
        let Some(listener) = &self.listener else {
            return;
        };
        let want = if paused { Interest::Nothing } else { Interest::Read };
        let token = Token::Listener.encode();
        if self.waiter.change(listener, token, want).is_ok() {
            self.paused = paused;
        }
    }

    /// Reads an arrival's preamble, and makes of it what it says.
    fn greet(&mut self, number: u32, now: Timestamp, batch: &mut EventBatch) {
        match self.arrivals.receive(number) {
            Greeting::Complete(preamble, socket) if preamble.kind == PRIMARY => {
                self.begin(&preamble, socket, now);
            }
            Greeting::Complete(preamble, socket) if preamble.kind == JOIN => {
                self.join(&preamble, socket, batch);
            }
            Greeting::Complete(..) | Greeting::Incomplete | Greeting::Refused => {}
        }
    }

    /// Begins a connection for a peer. What cannot be had closes the socket.
    fn begin(&mut self, preamble: &Preamble, socket: OwnedFd, now: Timestamp) {
        let wanted = usize::try_from(preamble.streams).unwrap_or(usize::MAX);
        let gathering = self.table.whole_mut().filter(|(_, peer)| peer.is_gathering());
        if wanted == 0 || gathering.count() >= HANDSHAKES_MAX {
            return;
        }
        // Sixteen random bytes tie data streams to their connection.
        let mut token = [0; 16];
        if getrandom::fill(&mut token).is_err() {
            return;
        }
        let Ok(id) = self.table.reserve() else {
            return;
        };
        let watched = Token::control(id).encode();
        let changed = self.waiter.change(&socket, watched, Interest::Read);
        if changed.is_err() {
            self.table.release(id);
            return;
        }
        let granted = wanted.min(self.streams);
        let deadline = now + self.handshake_timeout;
        let connection = Connection::accepted(id, socket, granted, token, deadline);
        self.table.put(id, connection);
        self.with(id, None, |connection, context, _| connection.welcome(context.waiter));
    }

    /// Adds a data stream to the connection whose token it names; else closes it.
    fn join(&mut self, preamble: &Preamble, socket: OwnedFd, batch: &mut EventBatch) {
        let found = self
            .table
            .whole_mut()
            .find(|(_, peer)| peer.expects(&preamble.token))
            .map(|(id, peer)| (id, peer.next_stream().encode()));
        let Some((id, token)) = found else {
            return;
        };
        if self.waiter.change(&socket, token, Interest::Read).is_err() {
            return;
        }
        self.with(id, Some(batch), |connection, context, batch| {
            connection.join(socket, context.waiter, batch)
        });
    }

    /// Checks all deadlines.
    fn sweep(&mut self, now: Timestamp, batch: &mut EventBatch) {
        self.next_sweep = now + self.sweep_interval;
        self.arrivals.sweep(now);
        if self.paused {
            self.pause(false);
        }
        let mut late = Vec::new();
        for (id, connection) in self.table.whole_mut() {
            if let Err(broken) = connection.check(now, self.handshake_timeout, self.io_timeout) {
                late.push((id, broken));
            }
        }
        for (id, broken) in late {
            self.with(id, Some(batch), |_, _, _| Err::<(), Broken>(broken));
        }
    }

    /// How long a poll may wait, so that deadlines are checked in time.
    fn wait_limit(&self, timeout: Duration) -> Duration {
        if !self.dying.is_empty() {
            Duration::ZERO
        } else if self.table.is_empty() && self.arrivals.is_empty() && !self.paused {
            timeout
        } else {
            timeout.min(self.sweep_interval)
        }
    }
}

/// It serves in software, from memory that the CPU reads.
impl ForeignFabric for TcpFabric {
    type Pinned = (Arc<Mapping>, Access);

    fn pinner(&self, access: Access) -> Pinner<Self::Pinned> {
        Box::new(move |memory, _rungs| {
            let pinned = match memory {
                Registrable::Host(mapping) => Some((Arc::clone(mapping), access)),
                Registrable::Foreign(_) => None,
            };
            Ok((pinned, Climb::default()))
        })
    }

    fn adopt(&mut self, (memory, access): Self::Pinned) -> Result<Region, FabricError> {
        self.regions.register(memory, access)
    }

    fn disown(&mut self, region: RegionId) -> Option<Self::Pinned> {
        self.regions.deregister(region);
        None
    }
}

impl Fabric for TcpFabric {
    type Endpoint = SocketAddr;
    type Memory = Mapping;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            transport: "tcp",
            reads_outstanding: READS_OUTSTANDING_MAX,
            segments: READ_SEGMENTS_MAX,
            windows: 0,
            read_bytes: READ_BYTES_MAX,
            opening: Duration::ZERO,
        }
    }

    fn register(&mut self, memory: Arc<Mapping>, access: Access) -> Result<Region, FabricError> {
        self.regions.register(memory, access)
    }

    fn deregister(&mut self, region: RegionId) {
        self.regions.deregister(region);
    }

    fn connect(&mut self, to: &SocketAddr) -> Result<ConnectionId, FabricError> {
        let id = self.table.reserve()?;
        let dialed = socket::dial(to).and_then(|socket| {
            let token = Token::control(id).encode();
            self.waiter.add(socket.as_fd(), token, Interest::Write)?;
            Ok(socket)
        });
        match dialed {
            Ok(socket) => {
                let deadline = socket::now() + self.handshake_timeout;
                let connection = Connection::dialed(id, *to, socket, self.streams, deadline);
                self.table.put(id, connection);
                Ok(id)
            }
            Err(source) => {
                self.table.release(id);
                Err(socket::os(
                    format!("connecting to {to}"),
                    source,
                    "check the address, the route to it, and the limit of open files",
                ))
            }
        }
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        let connection = self.table.get(connection).ok_or(FabricError::Closed)?;
        connection.admit();
        Ok(())
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        check_message(message)?;
        let open = self.table.get(connection).filter(|open| open.is_open());
        if !open.ok_or(FabricError::Closed)?.has_room(message.len()) {
            return Err(FabricError::Full);
        }
        self.with(connection, None, |connection, context, _| {
            connection.send(message, context.waiter)
        });
        Ok(())
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        let open = self.table.get(connection).filter(|open| open.can_post());
        if !open.ok_or(FabricError::Closed)?.has_credit(batch.works.len()) {
            return Err(FabricError::Full);
        }
        self.with(connection, None, |connection, context, _| connection.post(batch, context));
        Ok(())
    }

    fn close(&mut self, connection: ConnectionId) {
        self.with(connection, None, |_, _, _| Err::<(), Broken>(Broken::REQUESTED));
    }

    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError> {
        let limit = self.wait_limit(timeout);
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        self.waiter.wait(&mut ready, limit)?;
        let now = socket::now();
        for ready in &ready {
            self.handle(*ready, now, batch);
        }
        self.ready = ready;
        if now >= self.next_sweep {
            self.sweep(now, batch);
        }
        for id in std::mem::take(&mut self.dying) {
            if let Some(connection) = self.table.take(id) {
                connection.bury(batch);
            }
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.waiter.waker()
    }
}

impl Watch for TcpFabric {
    fn watch(&mut self, fd: BorrowedFd<'_>) -> Result<(), FabricError> {
        self.waiter.add(fd, Token::Watched.encode(), Interest::Read).map_err(|source| {
            socket::os("watching a descriptor".to_owned(), source, REMEDY_DESCRIPTORS)
        })
    }

    fn take_watched(&mut self) -> bool {
        std::mem::take(&mut self.watched)
    }
}
