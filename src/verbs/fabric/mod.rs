//! The fabric over RDMA reliable connections.
//!
//! Invariants, beyond those of [`crate::fabric`]:
//!
//! - Each connection has a completion queue of its own on each NIC that it uses, as deep as all that it
//!   can have outstanding there: none can overflow, and a peer's end takes its queues with it.
//! - Messages have a queue pair of their own, on which peers may read nothing but a fixed pattern, the
//!   proof that the path works; READs go over the lanes, which are spread over the NICs. Until
//!   [`Fabric::admit`] the lanes refuse the peer's READs. Pairs of NICs that carry no data are left out.
//! - [`Fabric::close`] moves lanes to ERR, and destroys those on which nothing of ours is outstanding,
//!   which on every device waits until the last response has left.
//! - A poll that finds nothing spins for a while, since the next completion is usually close, then
//!   arms the queues, looks once more, and sleeps on one epoll set: completion channels, asynchronous
//!   events, sockets, waker. One thread does that for all NICs.
//! - A NIC that goes down or away ends the connections that use it, without blame for the peer, where
//!   another NIC is left for fresh ones; else they end as their READs do.
//! - A connection keeps the NICs that it was made with. Those of ours that it had to be made without it
//!   remembers, and tells which of them a fresh one would try now ([`Fabric::lacks`]); to make that one is
//!   for the caller.
//!
//! How a connection's end is reported: as the TCP fabric does. A READ that a peer's device does not
//! answer is `Unreachable` after six retries, about two seconds.

mod broken;
mod chunks;
mod completions;
mod config;
mod connection;
mod device;
mod foreign;
mod handshake;
mod hello;
mod keys;
mod lane;
mod link;
mod messages;
mod near;
mod nics;
mod pairing;
mod parking;
mod pinned;
mod polling;
mod posting;
mod probe;
mod rails;
mod raising;
mod regions;
mod service;
mod table;
mod windows;
mod wr_id;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub use self::config::{NicPair, PollMode, VerbsConfig};
pub use self::lane::Posts;

use self::connection::{Connection, PATHS_MAX, Path, Surroundings};
use self::device::Device;
use self::link::Link;
use self::nics::Nics;
use self::pinned::{Cards, Pinned};
use self::raising::Raisers;
use self::regions::Regions;
use self::table::{Table, Token};
use super::error::VerbsError;
use super::gid::GidChoice;
use crate::fabric::{
    Access, Capabilities, ConnectionId, EventBatch, Fabric, FabricError, Lack, Rail, ReadBatch,
    Region, RegionId, RemoteSpan, Wake, WindowId, check_message,
};
use crate::limits::{RETRIES_MAX, STREAMS_MAX};
use crate::memory::{ForeignFabric, Mapping};
use crate::sys::avoided::Avoided;
use crate::sys::clock::coarse;
use crate::sys::connections::Broken;
use crate::sys::epoll::{Epoll, Interest, Ready};
use crate::sys::eventfd::EventFd;
use crate::sys::ibverbs::ibv_wc;
use crate::sys::socket;
use crate::sys::watch::Watch;
use crate::types::{Reach, Timestamp};

/// Descriptors that one wait reports.
const READY_MAX: usize = 64;

/// How often deadlines are checked while some are running.
const SWEEP: Duration = Duration::from_millis(50);

/// How often a poll that spins looks at what it watches for somebody else. That is a system call, and
/// costs as much as several looks at the queues.
const LOOK: Duration = Duration::from_micros(10);

/// Completions taken at once.
const COMPLETIONS: usize = 32;

/// A fabric over one RDMA device or several, owned by the thread that polls it.
pub struct VerbsFabric {
    // Connections go first and regions second: nothing can land in memory without a queue pair.
    table: Table,
    regions: Regions,
    nics: Nics,
    avoided: Avoided<Path>,
    raisers: Raisers,
    listener: Option<OwnedFd>,
    local: Option<SocketAddr>,
    poll: PollMode,
    handshake_timeout: Duration,
    epoll: Epoll,
    wake: Arc<EventWake>,
    ready: Vec<Ready>,
    over: Vec<ConnectionId>,
    /// Whether accepting waits for the next sweep, since no descriptor was free.
    paused: bool,
    next_sweep: Timestamp,
    next_service: Timestamp,
    /// Whether something was found or posted since the last spin in vain.
    active: bool,
    stale: u64,
    /// Where completions are taken to.
    found: Vec<ibv_wc>,
    /// Set when the last device is gone.
    lost: bool,
    /// Where a descriptor is watched for somebody else: when a spinning poll looks at it next.
    watching: Option<Timestamp>,
    /// Whether it was readable.
    watched: bool,
    /// Looks at the queues before a poll that spins gives the processor away; see [`polling`].
    turns: u32,
}

impl fmt::Debug for VerbsFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerbsFabric")
            .field("devices", &self.device_names())
            .field("local", &self.local)
            .finish_non_exhaustive()
    }
}

impl VerbsFabric {
    /// Opens the devices and makes a fabric of them, listening where the configuration says so.
    ///
    /// # Errors
    /// [`VerbsError`], with what to try: no library, no device, no active port, no GID, or what the
    /// system refuses.
    pub fn new(config: &VerbsConfig) -> Result<Self, VerbsError> {
        if config.lanes == 0 || config.lanes > STREAMS_MAX {
            let what = "data queue pairs per connection (at least 1)";
            return Err(FabricError::Limit { what, limit: STREAMS_MAX }.into());
        }
        if config.retries > RETRIES_MAX {
            let (what, limit) = ("retransmissions", RETRIES_MAX.into());
            return Err(FabricError::Limit { what, limit }.into());
        }
        let nics = Nics::open(config)?;
        let refused = |call: String| {
            move |source: std::io::Error| FabricError::Os {
                call,
                source,
                remedy: "choose an address of this host and a free port (port 0 takes any free \
                         one), and raise the limit of open files (ulimit -n)",
            }
        };
        let setup = || refused("making an epoll set".to_owned());
        let epoll = Epoll::new(READY_MAX).map_err(setup())?;
        let wake = Arc::new(EventWake {
            event: EventFd::new().map_err(setup())?,
            flag: AtomicBool::new(false),
        });
        let add = |fd, token: Token| epoll.add(fd, token.encode(), Interest::Read).map_err(setup());
        add(std::os::fd::AsFd::as_fd(&wake.event), Token::Wake)?;
        for (nic, device) in (0..).zip(&nics.devices) {
            add(device.channel.fd(), Token::Channel(nic))?;
            add(device.context.events_fd(), Token::Device(nic))?;
        }
        let listening = config.listen.map(|address| {
            let failed = refused(format!("listening on {address}"));
            socket::listen(address).map_err(|errno| failed(errno.into()))
        });
        let (listener, local) = listening.transpose()?.unzip();
        if let Some(listener) = &listener {
            add(std::os::fd::AsFd::as_fd(listener), Token::Listener)?;
        }
        Ok(Self {
            table: Table::default(),
            regions: Regions::default(),
            nics,
            avoided: Avoided::new(PATHS_MAX),
            raisers: Raisers::new(Arc::clone(&wake)),
            listener,
            local,
            poll: config.poll,
            handshake_timeout: config.handshake_timeout,
            epoll,
            wake,
            ready: Vec::new(),
            over: Vec::new(),
            paused: false,
            next_sweep: Timestamp::ZERO,
            next_service: Timestamp::ZERO,
            active: false,
            found: vec![ibv_wc::default(); COMPLETIONS],
            stale: 0,
            lost: false,
            watching: None,
            watched: false,
            turns: 1,
        })
    }

    /// The address that it listens on, with the port that the kernel chose. `None` where it does not.
    #[must_use]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.local
    }

    /// The names of the devices in use.
    #[must_use]
    pub fn device_names(&self) -> Vec<&str> {
        self.nics.devices.iter().map(Device::name).collect()
    }

    /// The GID in use on each device, with the reason.
    #[must_use]
    pub fn gids(&self) -> Vec<&GidChoice> {
        self.nics.devices.iter().map(|device| &device.choice).collect()
    }

    /// READs that one queue pair has on the wire at once (`max_rd_atomic`), as the devices say; a
    /// peer may take fewer.
    #[must_use]
    pub fn reads_issued(&self) -> u8 {
        self.nics.devices.iter().map(|device| device.limits.reads_issued).min().unwrap_or(0)
    }

    /// What the connections that are open have posted so far.
    #[must_use]
    pub fn posts(&self) -> Posts {
        self.table.iter().map(Connection::posts).sum()
    }

    /// Completions that matched no READ outstanding and were dropped.
    #[must_use]
    pub fn stale_completions(&self) -> u64 {
        self.stale
    }

    /// Runs `act` on a connection that is not broken, and cuts it where that breaks it.
    fn with(
        &mut self,
        id: ConnectionId,
        now: Timestamp,
        act: impl FnOnce(&mut Connection, &mut Surroundings<'_>) -> Result<(), Broken>,
    ) {
        let Some(connection) = self.table.find(id) else { return };
        let mut around = Surroundings {
            nics: &self.nics,
            avoided: &mut self.avoided,
            regions: &self.regions,
            raisers: &mut self.raisers,
            epoll: &self.epoll,
            stale: &mut self.stale,
            found: &mut self.found,
            now,
        };
        if let Err(broken) = act(connection, &mut around) {
            connection.cut(broken, now);
        }
    }

    /// Takes completions of all connections, and ends those that are over. Answers whether there is
    /// anything for the caller: that a message has left is nothing to come back for.
    fn drain(&mut self, now: Timestamp, batch: &mut EventBatch) -> bool {
        let before = batch.events.len();
        let mut around = Surroundings {
            nics: &self.nics,
            avoided: &mut self.avoided,
            regions: &self.regions,
            raisers: &mut self.raisers,
            epoll: &self.epoll,
            stale: &mut self.stale,
            found: &mut self.found,
            now,
        };
        let mut any = false;
        for (id, connection) in self.table.iter_mut() {
            any |= connection.drain(&mut around, batch);
            if connection.is_over(now, batch) {
                self.over.push(id);
            }
        }
        while let Some(id) = self.over.pop() {
            if let Some(connection) = self.table.take(id) {
                connection.bury(batch);
            }
        }
        let told = batch.events.len() > before;
        if any || told {
            self.regions.sweep(&mut self.table);
            self.active = true;
        }
        told
    }
}

impl Fabric for VerbsFabric {
    type Endpoint = SocketAddr;
    type Memory = Mapping;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            transport: "verbs",
            reads_outstanding: self.nics.reads as usize,
            segments: self.nics.segments as usize,
            read_bytes: self.nics.read_bytes,
            windows: self.nics.windows,
            // Rails that carry nothing are waited for so long.
            opening: self.handshake_timeout / 2,
        }
    }

    fn rails(&self, connection: ConnectionId) -> Vec<Rail> {
        let link = self.table.peek(connection).and_then(|open| open.link.as_ref());
        link.map_or_else(Vec::new, |link| link.told(&self.nics))
    }

    fn lacks(&self, connection: ConnectionId) -> Vec<Lack> {
        let open = self.table.peek(connection);
        open.map_or_else(Vec::new, |open| open.lacks(&self.nics, &self.avoided, coarse()))
    }

    fn reach(&self, connection: ConnectionId) -> Reach {
        let link = self.table.peek(connection).and_then(|connection| connection.link.as_ref());
        if link.is_some_and(Link::keeps_to_rails) { Reach::SameRail } else { Reach::Far }
    }

    fn register(&mut self, memory: Arc<Mapping>, access: Access) -> Result<Region, FabricError> {
        let served = self.served(access);
        self.adopt(Pinned::host(&Cards::new(&self.nics), memory, served)?)
    }

    fn deregister(&mut self, region: RegionId) {
        drop(self.disown(region));
    }

    fn connect(&mut self, to: &SocketAddr) -> Result<ConnectionId, FabricError> {
        let refused = |source: std::io::Error| FabricError::Os {
            call: format!("connecting to {to}"),
            source,
            remedy: "check the address, the route to it, and the limit of open files",
        };
        let socket = socket::dial(to).map_err(|errno| refused(errno.into()))?;
        let id = self.table.reserve()?;
        let deadline = coarse() + self.handshake_timeout;
        let token = Token::Connection(id).encode();
        // An unwatched connection does nothing, and its deadline closes it.
        self.epoll.add(&socket, token, Interest::Write).ok();
        self.table.put(id, Connection::dialed(id, socket, to.ip(), deadline));
        Ok(id)
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        let open = self.table.get(connection).ok_or(FabricError::Closed)?;
        if let Err(error) = open.admit(&self.nics) {
            tracing::warn!(%error, "a connection ends");
            self.with(connection, coarse(), |_, _| Err(Broken::EXHAUSTED));
            return Err(error.into());
        }
        let keys: Vec<u32> = self.regions.served().collect();
        self.with(connection, coarse(), |connection, around| {
            keys.iter().try_for_each(|key| connection.tell(*key, around))
        });
        Ok(())
    }

    fn grant(
        &mut self,
        connection: ConnectionId,
        window: WindowId,
        span: &RemoteSpan,
    ) -> Result<u32, FabricError> {
        let open = self.table.get(connection).filter(|open| open.is_open());
        let open = open.ok_or(FabricError::Closed)?;
        self.active = true;
        if self.nics.windows == 0 { Ok(span.rkey) } else { open.grant(window, span, &self.regions) }
    }

    fn revoke(&mut self, connection: ConnectionId, window: WindowId) -> Result<(), FabricError> {
        let open = self.table.get(connection).filter(|open| open.is_open());
        self.active = true;
        open.ok_or(FabricError::Closed)?.revoke(window)
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        check_message(message)?;
        let open = self.table.get(connection).filter(|open| open.is_open());
        if !open.ok_or(FabricError::Closed)?.has_room(message.len()) {
            return Err(FabricError::Full);
        }
        self.active = true;
        self.with(connection, coarse(), |connection, _| connection.send(message));
        Ok(())
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        let most = self.nics.reads as usize;
        let open = self.table.get(connection).filter(|open| open.can_post());
        if open.ok_or(FabricError::Closed)?.outstanding() + batch.works.len() > most {
            return Err(FabricError::Full);
        }
        self.active = true;
        self.with(connection, coarse(), |connection, around| connection.post(batch, around));
        Ok(())
    }

    fn close(&mut self, connection: ConnectionId) {
        self.with(connection, coarse(), |_, _| Err(Broken::REQUESTED));
    }

    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError> {
        let at = coarse();
        let woken = at >= self.next_service && self.service(Duration::ZERO, batch)?;
        // Without time to wait there is nothing to spin or arm for.
        let is_over = self.drain(at, batch) || woken || timeout.is_zero();
        if !is_over && !self.spin(at, timeout, batch)? {
            self.sleep(at, timeout, batch)?;
        }
        if self.lost && batch.events.is_empty() {
            return Err(FabricError::Os {
                call: format!("polling {}", self.device_names().join(", ")),
                source: std::io::ErrorKind::NotConnected.into(),
                remedy: "no device is left: bring one back and restart, or use --transport tcp",
            });
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.wake) as Arc<dyn Wake>
    }
}

impl Watch for VerbsFabric {
    fn watch(&mut self, fd: BorrowedFd<'_>) -> Result<(), FabricError> {
        self.watching = Some(Timestamp::ZERO);
        self.epoll.add(fd, Token::Watched.encode(), Interest::Read).map_err(|source| {
            FabricError::Os {
                call: "watching a descriptor".to_owned(),
                source,
                remedy: "raise the limit of open files (ulimit -n)",
            }
        })
    }

    fn take_watched(&mut self) -> bool {
        std::mem::take(&mut self.watched)
    }
}

/// Ends waits of the fabric that it was made with.
#[derive(Debug)]
struct EventWake {
    event: EventFd,
    /// What a poll that spins looks at instead of the event.
    flag: AtomicBool,
}

impl EventWake {
    /// Takes a wake that came since the last call.
    fn take(&self) -> bool {
        self.flag.load(Ordering::Relaxed) && self.flag.swap(false, Ordering::Acquire)
    }
}

impl Wake for EventWake {
    fn wake(&self) {
        // A counter that refuses has woken the poll already.
        self.flag.store(true, Ordering::Release);
        self.event.notify().ok();
    }
}
