//! The fabric between processes of one host: a READ is one copy out of the holder's own memory.
//!
//! A connection is one Unix socket, for messages and for the memory files of the regions that the
//! holder serves, and one page of shared memory each way, in which a holder says what it serves. The
//! reader's fabric maps the files for reading and copies from there to its own registered memory,
//! inside its polls. The holder's process does nothing for a READ.
//!
//! **What a cut is.** The holder cannot unmap what the reader has mapped. `close` marks the page, and
//! the reader's fabric looks at the page behind each copy: a copy that raced a cut completes as
//! refused or flushed, never as good ([`page`]). So the promise of [`crate::fabric`], that the peer
//! reads nothing more, holds here as "gets nothing more that counts"; a reader whose fabric is not
//! this one could still look. Therefore access is given only to processes of the same user, which the
//! kernel vouches for, and which could look into each other's memory anyway; and to peers that have
//! proved themselves, as on every fabric.
//!
//! Invariants, beyond those of [`crate::fabric`]:
//!
//! - Memory files are passed when a peer is admitted, not before, under descriptors that map for
//!   reading only. (Against carelessness, not malice: a process of the same user can open such a file
//!   again for writing.) Pages are sealed against all writers but their holder.
//! - A file from a peer is mapped only where it can never shrink ([`crate::sys::memfd::examine`]), and
//!   its descriptor is closed at once: a peer costs mappings, and one descriptor, its socket.
//! - Grants and messages travel in order on one socket: a key that a message named has been granted.
//! - One poll copies a bounded number of bytes, so that messages, and other fabrics of the same thread,
//!   wait no longer than that takes.
//!
//! How a connection's end is reported: as the TCP fabric does, but for [`ShmFabric::stop`], which either
//! end reports as [`CloseReason::Moved`]: the page says so. A holder that dies takes nothing away:
//! what the reader had mapped stays as it was until the reader has seen the end of the socket.

mod connection;
mod name;
mod outbox;
mod page;
mod reads;
mod service;
#[cfg(test)]
mod tests;
mod window;
mod wire;
mod with_shm;

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

pub use self::name::ShmName;
pub use self::with_shm::{PeerEndpoint, WithShm};

use self::connection::{Connection, Context, Export};
use self::wire::{GRANT, Grant, PACKET_BYTES_MAX};
use crate::fabric::{
    Access, Capabilities, CloseReason, ConnectionId, EventBatch, Fabric, FabricError, ReadBatch,
    Region, RegionId, Wake, check_message,
};
use crate::limits::{
    HANDSHAKE_TIMEOUT, READ_BYTES_MAX, READ_SEGMENTS_MAX, READS_OUTSTANDING_MAX, REGIONS_MAX,
};
use crate::memory::{Mapping, Regions};
use crate::sys::clock::coarse;
use crate::sys::connections::{Broken, Connections};
use crate::sys::epoll::{Epoll, Interest, Ready};
use crate::sys::eventfd::EventFd;
use crate::sys::{local_socket, memfd};
use crate::types::{Reach, Timestamp};

/// Descriptors that one wait reports.
const READY_MAX: usize = 64;

/// How often deadlines are checked while some are running.
const SWEEP: Duration = Duration::from_millis(50);

/// Tokens of what is no connection; no slot is that large.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

fn token(id: ConnectionId) -> u64 {
    u64::from(id.generation) << 32 | u64::from(id.slot)
}

#[expect(clippy::cast_possible_truncation, reason = "takes the bits that `token` put there")]
fn connection_of(token: u64) -> ConnectionId {
    ConnectionId { slot: token as u32, generation: (token >> 32) as u32 }
}

/// How a shm fabric is set up.
#[derive(Debug, Clone)]
pub struct ShmConfig {
    /// The name to listen under. `None`: connect only. Default: none.
    pub listen: Option<ShmName>,
    /// Time for a connection to open. Default: [`HANDSHAKE_TIMEOUT`].
    pub handshake_timeout: Duration,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self { listen: None, handshake_timeout: HANDSHAKE_TIMEOUT }
    }
}

/// A fabric over shared memory, owned by the thread that polls it.
pub struct ShmFabric {
    name: Option<ShmName>,
    listener: Option<OwnedFd>,
    handshake_timeout: Duration,
    next_sweep: Timestamp,
    /// Whether accepting waits for the next sweep, since no descriptor was free.
    paused: bool,
    epoll: Epoll,
    wake: Arc<EventWake>,
    regions: Regions,
    /// Served regions, by their slot in the pages.
    exports: Vec<Option<(RegionId, Export)>>,
    table: Connections<Connection>,
    /// Connections with READs to carry out.
    queued: VecDeque<ConnectionId>,
    /// Cut connections whose end the next poll reports.
    dying: Vec<ConnectionId>,
    ready: Vec<Ready>,
    scratch: Box<[u8]>,
}

impl fmt::Debug for ShmFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmFabric").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ShmFabric {
    /// Makes a fabric, listening where the configuration says so.
    ///
    /// # Errors
    /// [`FabricError::Os`] where the name is taken or no descriptor is free.
    pub fn new(config: &ShmConfig) -> Result<Self, FabricError> {
        let setup = |source: std::io::Error| {
            os("making an epoll set", source, "raise the limit of open files (ulimit -n)")
        };
        let epoll = Epoll::new(READY_MAX).map_err(setup)?;
        let wake = Arc::new(EventWake(EventFd::new().map_err(setup)?));
        epoll.add(&wake.0, WAKE, Interest::Read).map_err(setup)?;
        let mut fabric = Self {
            name: config.listen.clone(),
            listener: None,
            handshake_timeout: config.handshake_timeout,
            next_sweep: Timestamp::ZERO,
            paused: false,
            epoll,
            wake,
            regions: Regions::default(),
            exports: Vec::new(),
            table: Connections::default(),
            queued: VecDeque::new(),
            dying: Vec::new(),
            ready: Vec::with_capacity(READY_MAX),
            scratch: vec![0; PACKET_BYTES_MAX + 1].into_boxed_slice(),
        };
        fabric.listen()?;
        Ok(fabric)
    }

    /// Listens again after [`Self::stop`], where it has a name.
    ///
    /// # Errors
    /// [`FabricError::Os`] where the name is taken or no descriptor is free.
    pub fn listen(&mut self) -> Result<(), FabricError> {
        let (Some(name), None) = (&self.name, &self.listener) else { return Ok(()) };
        let refused = |source: std::io::Error, remedy| {
            os(&format!("listening as {}", name.as_str()), source, remedy)
        };
        let listener = local_socket::listen(name.as_str()).map_err(|errno| {
            refused(errno.into(), "give each node of a host an identity of its own")
        })?;
        let watched = self.epoll.add(&listener, LISTENER, Interest::Read);
        watched.map_err(|source| refused(source, "raise the limit of open files (ulimit -n)"))?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Listens no more, and ends all connections: once this returns nobody reads anything here, and
    /// each connection ends at either end as [`CloseReason::Moved`]. Whoever dials is refused at once.
    pub fn stop(&mut self) {
        self.listener = None;
        self.paused = false;
        self.for_each(|_, _| Err(Broken::MOVED));
    }

    /// The name that it listens under. `None` where it does not.
    #[must_use]
    pub fn name(&self) -> Option<&ShmName> {
        self.name.as_ref()
    }

    /// Registers memory as another fabric of this process has registered it: under the same id, key
    /// and address, so that what a peer is told holds on both.
    ///
    /// # Errors
    /// As [`Fabric::register`].
    pub fn adopt(
        &mut self,
        region: &Region,
        memory: Arc<Mapping>,
        access: Access,
    ) -> Result<(), FabricError> {
        let file = served_file(&memory, access)?;
        self.regions.adopt(region, memory, access)?;
        self.export(region, file);
        Ok(())
    }

    /// Starts to connect, where somebody of this user listens under this name; `None` where not, or
    /// where nothing can be spent on it.
    pub fn connect_here(&mut self, to: &ShmName) -> Option<ConnectionId> {
        let id = self.table.reserve().ok()?;
        match self.dial(id, to) {
            Ok(connection) => {
                self.table.put(id, connection);
                Some(id)
            }
            Err(_refused) => {
                self.table.release(id);
                None
            }
        }
    }

    /// Whether a poll has something to do without waiting.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.queued.is_empty() || !self.dying.is_empty()
    }

    /// How long a poll may wait, so that deadlines are met.
    pub fn wait_limit(&mut self) -> Duration {
        if self.has_work() {
            return Duration::ZERO;
        }
        let opening = self.table.iter_mut().any(|(_, connection)| connection.is_opening());
        if opening || self.paused { SWEEP } else { Duration::MAX }
    }

    /// Grants a region to all peers that are admitted. `None` for memory that is not served.
    fn export(&mut self, region: &Region, file: Option<OwnedFd>) {
        let Some(file) = file else { return };
        let free = self.exports.iter().position(Option::is_none).unwrap_or(self.exports.len());
        let Ok(slot) = u32::try_from(free) else { return };
        let (rkey, address, len) = (region.rkey, region.address, region.len);
        let grant = Grant { kind: GRANT, slot, rkey, reserved: 0, address, len };
        if free == self.exports.len() {
            self.exports.push(None);
        }
        let export = Export { grant, file };
        self.for_each(|connection, cx| connection.serve(&export, cx));
        if let Some(place) = self.exports.get_mut(free) {
            *place = Some((region.id, export));
        }
    }

    /// Runs `act` on all connections that are whole, and cuts those that it breaks.
    fn for_each(&mut self, act: impl Fn(&mut Connection, &mut Context<'_>) -> Result<(), Broken>) {
        let ids: Vec<ConnectionId> = self.table.whole_mut().map(|(id, _)| id).collect();
        for id in ids {
            self.with(id, None, |connection, cx, _| act(connection, cx));
        }
    }

    /// Runs `act` on a connection, and cuts it where that breaks it.
    fn with(
        &mut self,
        id: ConnectionId,
        batch: Option<&mut EventBatch>,
        act: impl FnOnce(&mut Connection, &mut Context<'_>, &mut EventBatch) -> Result<(), Broken>,
    ) {
        let Some(connection) = self.table.get(id) else { return };
        let mut cx = Context { epoll: &self.epoll, scratch: &mut self.scratch };
        // Outside a poll nothing is received, so nothing is put into this one.
        let mut none = EventBatch::default();
        let polling = batch.is_some();
        let batch = batch.unwrap_or(&mut none);
        match act(connection, &mut cx, batch) {
            Ok(()) => {}
            // A socket that the peer closed stays readable: the next poll finds the same end, and can
            // deliver what the peer said before it.
            Err(broken) if broken.reason == CloseReason::PeerClosed && !polling => {}
            Err(broken) => {
                if broken.reason == CloseReason::PeerClosed {
                    connection.take_last_messages(&mut self.scratch, batch);
                }
                connection.cut(broken);
                self.dying.push(id);
            }
        }
    }

    /// Connects a socket and says hello on it.
    fn dial(&mut self, id: ConnectionId, to: &ShmName) -> Result<Connection, Broken> {
        let socket = local_socket::dial(to.as_str()).map_err(|errno| match errno {
            Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS => Broken::EXHAUSTED,
            _ => Broken::UNREACHABLE,
        })?;
        if !local_socket::is_of_this_user(&socket) {
            return Err(Broken::UNREACHABLE);
        }
        let watched = self.epoll.add(&socket, token(id), Interest::Read);
        watched.map_err(|_refused| Broken::EXHAUSTED)?;
        let deadline = coarse() + self.handshake_timeout;
        let mut connection = Connection::dialed(id, socket, deadline);
        connection.greet()?;
        connection.arm(&self.epoll)?;
        Ok(connection)
    }
}

impl AsFd for ShmFabric {
    /// What to wait for, beside other descriptors: readable when a poll has something to find.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Fabric for ShmFabric {
    type Endpoint = ShmName;
    type Memory = Mapping;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            transport: "shm",
            reads_outstanding: READS_OUTSTANDING_MAX,
            segments: READ_SEGMENTS_MAX,
            windows: 0,
            read_bytes: READ_BYTES_MAX,
            opening: Duration::ZERO,
        }
    }

    fn reach(&self, _connection: ConnectionId) -> Reach {
        Reach::SameHost
    }

    fn register(&mut self, memory: Arc<Mapping>, access: Access) -> Result<Region, FabricError> {
        let file = served_file(&memory, access)?;
        let region = self.regions.register(memory, access)?;
        self.export(&region, file);
        Ok(region)
    }

    fn deregister(&mut self, region: RegionId) {
        self.regions.deregister(region);
        let is_it = |place: &Option<(RegionId, Export)>| {
            place.as_ref().is_some_and(|(id, _)| *id == region)
        };
        let Some(place) = self.exports.iter_mut().find(|place| is_it(place)) else { return };
        if let Some((_, export)) = place.take() {
            self.for_each(|connection, cx| connection.withdraw(export.grant.slot, cx));
        }
    }

    fn connect(&mut self, to: &ShmName) -> Result<ConnectionId, FabricError> {
        let id = self.table.reserve()?;
        let connection = self.dial(id, to).unwrap_or_else(|broken| {
            self.dying.push(id);
            Connection::stillborn(id, broken)
        });
        self.table.put(id, connection);
        Ok(id)
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        let open = self.table.get(connection).filter(|open| open.is_open());
        open.ok_or(FabricError::Closed)?;
        let exports = std::mem::take(&mut self.exports);
        self.with(connection, None, |connection, cx, _| {
            connection.admit(exports.iter().flatten().map(|(_, export)| export), cx)
        });
        self.exports = exports;
        Ok(())
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        check_message(message)?;
        let open = self.table.get(connection).filter(|open| open.is_open());
        if !open.ok_or(FabricError::Closed)?.has_room(message.len()) {
            return Err(FabricError::Full);
        }
        self.with(connection, None, |connection, cx, _| connection.send(message, cx));
        Ok(())
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        let open = self.table.get(connection).filter(|open| open.can_post());
        let open = open.ok_or(FabricError::Closed)?;
        if !open.has_credit(batch.works.len()) {
            return Err(FabricError::Full);
        }
        open.post(batch, &self.regions);
        self.queue(connection);
        Ok(())
    }

    fn close(&mut self, connection: ConnectionId) {
        self.with(connection, None, |_, _, _| Err(Broken::REQUESTED));
    }

    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError> {
        let limit = timeout.min(self.wait_limit());
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        self.epoll
            .wait(&mut ready, Some(limit))
            .map_err(|source| os("epoll_wait", source, "make a new fabric; report this"))?;
        let now = coarse();
        for ready in &ready {
            self.handle(*ready, now, batch);
        }
        self.ready = ready;
        self.copy(batch);
        if now >= self.next_sweep {
            self.sweep(now);
        }
        while let Some(id) = self.dying.pop() {
            if let Some(connection) = self.table.take(id) {
                connection.bury(batch);
            }
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.wake) as Arc<dyn Wake>
    }
}

/// The file of memory that peers may read, for reading only; `None` for memory that they may not.
fn served_file(memory: &Mapping, access: Access) -> Result<Option<OwnedFd>, FabricError> {
    if access == Access::Local {
        return Ok(None);
    }
    let refused = |source: std::io::Error| {
        os(
            "registering memory for peers on this host",
            source,
            "use memory of a pool, which has a sealed memory file, and mount /proc",
        )
    };
    let file = memory.file().ok_or_else(|| refused(std::io::ErrorKind::Unsupported.into()))?;
    let file = memfd::read_only(file).map_err(refused)?;
    memfd::examine(&file).map_err(refused)?;
    Ok(Some(file))
}

fn os(call: &str, source: std::io::Error, remedy: &'static str) -> FabricError {
    FabricError::Os { call: call.to_owned(), source, remedy }
}

/// Ends waits of the fabric that it was made with.
#[derive(Debug)]
struct EventWake(EventFd);

impl Wake for EventWake {
    fn wake(&self) {
        // A counter that refuses has woken the poll already.
        self.0.notify().ok();
    }
}

const _: () = assert!(REGIONS_MAX <= u32::MAX as usize, "slots travel as u32");
