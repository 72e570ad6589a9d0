//! The port to a fabric: register memory, connect, post a batch of READs, poll a batch of events.
//!
//! One trait, four implementations in time (`tcp`, `verbs`, `shm`, `sim`), one conformance suite.
//! The semantics are those of an RDMA reliable connection:
//!
//! - A READ is one-sided: the other end's fabric serves it, its program sees nothing.
//! - Each posted READ yields exactly one [`Completion`], matched by its [`WrId`] alone. Until that
//!   completion has been polled, the fabric may write to the READ's local spans: the caller keeps
//!   that memory.
//! - The first failing READ breaks its connection: everything else outstanding on it completes with
//!   [`CompletionStatus::Flushed`], and [`FabricEvent::Closed`] comes after the last completion.
//! - [`Fabric::close`] is what setting a queue pair to the error state is: once it returns, the other
//!   end can read nothing more through this connection; what we had outstanding is flushed by polls.
//! - A new connection carries messages but serves no READ until [`Fabric::admit`]: access is given
//!   to a peer that has proved who it is, not to a socket.
//! - Messages of one connection arrive whole and in order; READs are not ordered with them.

mod rail;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

pub use rail::{Lack, LackReason, Rail, width};

use crate::limits::MESSAGE_BYTES_MAX;
use crate::types::{Path, Reach, Scope};

/// A registered region, numbered by the fabric that registered it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u16);

/// A registered region as its owner sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its number here.
    pub id: RegionId,
    /// The key that a peer must present to read it. It is the fabric's: what each NIC calls the region
    /// stays inside.
    pub rkey: u32,
    /// The remote address of its first byte.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
}

impl Region {
    /// The part of this region that a peer is told to read. `None` where it leaves the region.
    #[must_use]
    pub fn remote(&self, offset: u64, len: u32) -> Option<RemoteSpan> {
        let end = offset.checked_add(u64::from(len))?;
        (end <= self.len).then_some(RemoteSpan {
            rkey: self.rkey,
            address: self.address + offset,
            len,
        })
    }
}

/// What peers may do with a region. There is no write: served regions are for reading only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Only this node's own READs may land in it.
    Local,
    /// Peers may READ it, too.
    RemoteRead,
}

/// A local span in registered memory: where a READ lands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegisteredSpan {
    /// The region.
    pub region: RegionId,
    /// Bytes from its start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A peer's span: what a READ reads. It never converts into a local address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteSpan {
    /// The key of the peer's region.
    pub rkey: u32,
    /// The peer's address.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A work request's identity, chosen by the caller: a slot of the in-flight table and that slot's
/// generation, so that a completion of an earlier tenant matches nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WrId {
    /// The slot.
    pub slot: u32,
    /// The slot's generation when the READ was posted.
    pub generation: u32,
}

/// A connection to a peer, as one fabric numbers it; an old number never means a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId {
    /// The slot.
    pub slot: u32,
    /// The slot's generation.
    pub generation: u32,
}

/// One READ: a contiguous remote span, scattered over local spans of the same total length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadWork {
    /// Its identity.
    pub wr_id: WrId,
    /// What to read.
    pub remote: RemoteSpan,
    /// How many spans of the batch's list it fills; they follow those of the READ before it.
    pub segments: u16,
}

/// One of the keys that a connection can give out beside those of regions, `0..`
/// [`Capabilities::windows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WindowId(pub u16);

/// READs to post with one doorbell, and the local spans that they fill, in order. Kept and reused
/// by the caller, so that posting allocates nothing.
#[derive(Debug, Default)]
pub struct ReadBatch {
    /// The READs.
    pub works: Vec<ReadWork>,
    /// Their local spans, one after the other.
    pub segments: Vec<RegisteredSpan>,
}

impl ReadBatch {
    /// Forgets the READs, keeps the memory.
    pub fn clear(&mut self) {
        self.works.clear();
        self.segments.clear();
    }
}

/// How a READ ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CompletionStatus {
    /// All bytes are in place.
    Success,
    /// The connection broke before or while it ran; local memory may hold a part of it.
    Flushed,
    /// The peer refused the key, the bounds or the access: our knowledge of its memory is stale.
    RemoteAccess,
    /// A local span is not registered, or its length is wrong.
    LocalProtection,
    /// The peer or the way to it is gone.
    Unreachable,
}

impl CompletionStatus {
    /// Whose fault it is; `None` for success.
    #[must_use]
    pub const fn scope(self) -> Option<Scope> {
        match self {
            Self::Success => None,
            Self::Flushed | Self::LocalProtection => Some(Scope::Local),
            Self::RemoteAccess => Some(Scope::Peer),
            Self::Unreachable => Some(Scope::Path),
        }
    }
}

/// The end of one posted READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The connection that it was posted on.
    pub connection: ConnectionId,
    /// Which READ.
    pub wr_id: WrId,
    /// How it ended.
    pub status: CompletionStatus,
    /// What it went over, or would have.
    pub path: Path,
}

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// [`Fabric::close`] was called.
    Requested,
    /// The peer closed it.
    PeerClosed,
    /// It could not be made, was reset, or timed out.
    Unreachable,
    /// The peer sent what no fabric of this kind sends, or too slowly.
    Violation,
    /// One of our READs failed, which breaks its connection.
    ReadFailed,
    /// A limit of this node was reached.
    Exhausted,
    /// A NIC of this node that carried it went down or away. A fresh connection takes another one,
    /// where there is one.
    NicLost,
    /// This fabric has another way to the peer, and one of the two ends wants that one. A fresh
    /// connection takes it.
    Moved,
}

impl CloseReason {
    /// Whose fault it is.
    #[must_use]
    pub const fn scope(self) -> Scope {
        match self {
            Self::Requested | Self::Exhausted | Self::NicLost | Self::Moved => Scope::Local,
            Self::PeerClosed | Self::Violation | Self::ReadFailed => Scope::Peer,
            Self::Unreachable => Scope::Path,
        }
    }
}

/// What a poll found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FabricEvent {
    /// A peer connected to us; messages may be sent.
    Accepted {
        /// The new connection.
        connection: ConnectionId,
    },
    /// A connection that we asked for is up; messages may be sent.
    Connected {
        /// The connection.
        connection: ConnectionId,
    },
    /// A whole message arrived: `start..end` of [`EventBatch::bytes`].
    Message {
        /// On which connection.
        connection: ConnectionId,
        /// First byte.
        start: u32,
        /// One past the last byte.
        end: u32,
    },
    /// A READ ended.
    Completed(Completion),
    /// What [`Fabric::revoke`] asked for is done: the peer can read nothing more by that key, and the
    /// window may be granted again.
    Revoked {
        /// On which connection.
        connection: ConnectionId,
        /// Which window.
        window: WindowId,
    },
    /// The connection is gone: every READ posted on it has completed, the peer can read nothing
    /// more through it, and its id means nothing from here on.
    Closed {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
    },
}

/// Events of one poll and the bytes of the messages among them. Kept and reused by the caller.
#[derive(Debug, Default)]
pub struct EventBatch {
    /// The events, in order per connection.
    pub events: Vec<FabricEvent>,
    /// Messages' bytes; an event names its range.
    pub bytes: Vec<u8>,
}

impl EventBatch {
    /// Forgets the events, keeps the memory.
    pub fn clear(&mut self) {
        self.events.clear();
        self.bytes.clear();
    }

    /// The bytes of a message event of this batch.
    #[must_use]
    pub fn message(&self, start: u32, end: u32) -> &[u8] {
        self.bytes.get(start as usize..end as usize).unwrap_or_default()
    }
}

/// What a fabric can do, for the planner of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// The name that output uses: `tcp`, `verbs`, `shm`.
    pub transport: &'static str,
    /// READs that one connection can have outstanding.
    pub reads_outstanding: usize,
    /// Local segments of one READ.
    pub segments: usize,
    /// Longest READ, bytes.
    pub read_bytes: u32,
    /// Keys of its own that each connection can give out at once. With any, peers read by those keys
    /// alone: a served region's own key reads nothing. 0: peers read by the regions' keys.
    pub windows: u16,
    /// How long a connection may take to open beyond what its messages take, with nothing wrong at the
    /// other end: while ways that turn out to carry nothing are tried. 0 where there are none to try.
    pub opening: Duration,
}

/// An error of a fabric call. READs that were accepted end by completions, never by this.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The operating system refused.
    #[error("{call}: {source}; {remedy}")]
    Os {
        /// The call that failed, with what it was about.
        call: String,
        /// The system's answer.
        source: std::io::Error,
        /// What to try.
        remedy: &'static str,
    },
    /// The id names no open connection.
    #[error("this connection is closed")]
    Closed,
    /// As many READs or message bytes are outstanding as the connection takes; poll first.
    #[error("the connection's queue is full: poll for completions, then post again")]
    Full,
    /// More regions, connections or handshakes than the limit.
    #[error("more {what} than the limit of {limit}")]
    Limit {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
}

impl FabricError {
    /// Whose fault it is.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Os { .. } | Self::Full | Self::Limit { .. } => Scope::Local,
            Self::Closed => Scope::Path,
        }
    }
}

/// Refuses a message that is longer than any fabric takes.
///
/// # Errors
/// [`FabricError::Limit`] beyond [`MESSAGE_BYTES_MAX`].
pub fn check_message(message: &[u8]) -> Result<(), FabricError> {
    if message.len() > MESSAGE_BYTES_MAX {
        return Err(FabricError::Limit { what: "bytes in a message", limit: MESSAGE_BYTES_MAX });
    }
    Ok(())
}

/// Ends another thread's [`Fabric::poll`].
pub trait Wake: Send + Sync + Debug {
    /// Makes the current poll, or the next one, return at once.
    fn wake(&self);
}

/// A fabric, owned by the one thread that polls it.
pub trait Fabric {
    /// Where its peers find it.
    type Endpoint: Clone + Debug;
    /// The memory that it can register.
    type Memory;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// The transport of a connection, as [`Capabilities::transport`] names it: a fabric may be made of
    /// several.
    fn transport(&self, _connection: ConnectionId) -> &'static str {
        self.capabilities().transport
    }

    /// The pairs of NICs that a connection goes over; none where the fabric has no NICs.
    fn rails(&self, _connection: ConnectionId) -> Vec<Rail> {
        Vec::new()
    }

    /// NICs of this node that a connection goes without although it would have used them, had they worked
    /// when it was made. None where it has all that it can have, or the fabric has no NICs.
    fn lacks(&self, _connection: ConnectionId) -> Vec<Lack> {
        Vec::new()
    }

    /// Whether peers on this host are connected to over shared memory.
    ///
    /// # Errors
    /// Why they are not now, in words.
    fn shared_memory(&self) -> Result<(), &str> {
        Err("this fabric has none")
    }

    /// What lies between this node and the other end of a connection, as far as the fabric knows.
    fn reach(&self, _connection: ConnectionId) -> Reach {
        Reach::Far
    }

    /// Registers memory and keeps it alive until deregistration or the fabric's own end.
    ///
    /// # Errors
    /// [`FabricError::Limit`] beyond [`crate::limits::REGIONS_MAX`]; [`FabricError::Os`] where the
    /// system refuses.
    fn register(
        &mut self,
        memory: Arc<Self::Memory>,
        access: Access,
    ) -> Result<Region, FabricError>;

    /// Ends a registration: READs of it from now on fail with [`CompletionStatus::RemoteAccess`].
    /// The memory itself is let go when nothing outstanding touches it.
    fn deregister(&mut self, region: RegionId);

    /// Starts to connect. [`FabricEvent::Connected`] or [`FabricEvent::Closed`] follows.
    ///
    /// # Errors
    /// [`FabricError::Limit`] or [`FabricError::Os`] where not even an attempt can be made.
    fn connect(&mut self, to: &Self::Endpoint) -> Result<ConnectionId, FabricError>;

    /// Lets the peer read our served regions through this connection, and us post READs.
    ///
    /// # Errors
    /// [`FabricError::Closed`].
    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError>;

    /// Gives the peer a key of its own to a part of a served region, which `span` names as
    /// [`Region::remote`] does; answers the key. It reads that span only, over this connection only,
    /// until [`Self::revoke`]. Messages that are sent after this call arrive when the key works. Not
    /// before [`Self::admit`].
    ///
    /// # Errors
    /// [`FabricError::Closed`]; [`FabricError::Full`] where the window is granted already;
    /// [`FabricError::Limit`] for a window or span that there is not; [`FabricError::Os`]. A fabric
    /// without windows answers the region's key.
    fn grant(
        &mut self,
        connection: ConnectionId,
        window: WindowId,
        span: &RemoteSpan,
    ) -> Result<u32, FabricError> {
        let _ = (connection, window);
        Ok(span.rkey)
    }

    /// Ends a granted key, and nothing else of the connection. [`FabricEvent::Revoked`] or
    /// [`FabricEvent::Closed`] follows: only then the peer can read nothing more by it.
    ///
    /// # Errors
    /// [`FabricError::Closed`]. A fabric without windows always answers that.
    fn revoke(&mut self, connection: ConnectionId, window: WindowId) -> Result<(), FabricError> {
        let _ = (connection, window);
        Err(FabricError::Closed)
    }

    /// Sends one message of at most [`crate::limits::MESSAGE_BYTES_MAX`] bytes.
    ///
    /// # Errors
    /// [`FabricError::Closed`], or [`FabricError::Full`] where the peer does not drain its messages.
    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError>;

    /// Posts READs, all or none. Each one yields exactly one completion.
    ///
    /// # Errors
    /// [`FabricError::Closed`], or [`FabricError::Full`] beyond
    /// [`Capabilities::reads_outstanding`]. Nothing was posted then.
    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError>;

    /// Breaks a connection. When this returns the peer can read nothing more through it; completions
    /// of what we had outstanding and then [`FabricEvent::Closed`] are polled.
    fn close(&mut self, connection: ConnectionId);

    /// Appends to `batch` what happened, waiting at most `timeout` where nothing has yet.
    ///
    /// # Errors
    /// [`FabricError::Os`] where polling itself fails: the fabric is unusable from then on.
    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError>;

    /// A handle that ends polls from other threads.
    fn waker(&self) -> Arc<dyn Wake>;
}
