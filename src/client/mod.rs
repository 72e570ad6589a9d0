//! A synchronous client of a node's local door.
//!
//! The node's pools are mapped into this process: a [`Reservation`] is written and a [`Held`] block
//! is read in place, and only small messages cross the socket. Both are guards. What is dropped is
//! given back in batches: with the next call, or at once when it was the last guard or a batch is
//! full. The node takes back whatever a connection owned when it ends, so neither a panic nor a kill
//! leaks memory or pins.
//!
//! An engine may give the node its own KV cache instead ([`ImportedLayout`]): then the node copies, and
//! a block is its number.
//!
//! Every call has a deadline. A call that misses it, or that breaks the protocol, ends the connection
//! (a late reply could otherwise be taken for another one's); calls after that answer
//! [`ClientError::Closed`], and blocks still held may change: their checksum tells.

mod connection;
mod engine;
mod error;
mod guard;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::Duration;

pub use engine::ImportedLayout;
pub use error::ClientError;
pub use guard::{Acquired, Held, Reservation};

use crate::limits;
use crate::memory::Mapping;
use crate::protocol::door::stat::StatReport;
use crate::protocol::door::{
    AcquireOutcome, EngineReply, EvictedBlock, ListEntry, PublishBlock, PublishOutcome, Reply,
    Request, Source,
};
use crate::sync::{Mutex, lock};
use crate::types::{BlockHash, Extent, Namespace, NodeId, PoolId, ResidentId};
use connection::Connection;

/// The deadline of a call, where [`Client::connect`] sets it. Longer than a node needs to find out
/// that a peer is gone.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);

const _: () = assert!(
    limits::IMPORT_WAIT.as_secs() < CALL_TIMEOUT.as_secs(),
    "a node answers an import in time that waits as long as it may"
);

/// What was dropped is given back when so much of it waits.
const BATCH: usize = 64;

/// A pool of the node, mapped here.
#[derive(Debug)]
pub struct Pool {
    id: PoolId,
    mapping: Mapping,
}

impl Pool {
    /// Its number, which extents name.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// Its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.mapping.len()
    }
}

/// A page of residents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListPage {
    /// The residents.
    pub entries: Vec<ListEntry>,
    /// The cursor of the next page; `None` where this is the last one.
    pub next: Option<u64>,
}

#[derive(Debug)]
struct State {
    connection: Connection,
    /// Dropped guards that the node does not know of yet.
    releases: Vec<ResidentId>,
    discards: Vec<Extent>,
    /// Guards that are still out.
    guards: usize,
}

/// A connection to a node's local door. Threads that share one take turns.
#[derive(Debug)]
pub struct Client {
    pools: Vec<Pool>,
    timeout: Duration,
    state: Mutex<State>,
}

impl Client {
    /// Connects to the node that listens at `path` and maps its pools. Calls have a deadline of
    /// [`CALL_TIMEOUT`].
    ///
    /// # Errors
    /// [`ClientError::NoNode`] or [`ClientError::NotAllowed`] where that is why; else what broke.
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        Self::connect_within(path, CALL_TIMEOUT)
    }

    /// As [`Client::connect`], with another deadline for this and each later call.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn connect_within(path: &Path, timeout: Duration) -> Result<Self, ClientError> {
        let mut connection = Connection::open(path, timeout)?;
        let (sizes, files) = connection.hello(timeout)?;
        if sizes.len() != files.len() {
            return Err(ClientError::Unexpected);
        }
        let pools = sizes
            .into_iter()
            .zip(files)
            .map(|(size, file)| {
                Mapping::new(&file.into(), size.bytes)
                    .map(|mapping| Pool { id: size.id, mapping })
                    .map_err(|source| ClientError::Io { action: "map a pool of the node", source })
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            pools,
            timeout,
            state: Mutex::new(State {
                connection,
                releases: Vec::new(),
                discards: Vec::new(),
                guards: 0,
            }),
        })
    }

    /// The node's pools.
    #[must_use]
    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// Memory for blocks of these sizes (bytes, 1 to [`limits::BLOCK_BYTES_MAX`] each), all or none;
    /// at most [`limits::DOOR_BLOCKS_MAX`] of them.
    ///
    /// # Errors
    /// [`ClientError::Busy`] where there is none now; [`ClientError::Refused`] where there never is.
    pub fn reserve(&self, sizes: &[u32]) -> Result<Vec<Reservation<'_>>, ClientError> {
        let request = Request::Reserve { sizes: sizes.to_vec() };
        match self.call(&request)? {
            Reply::Reserved { extents } if extents.len() == sizes.len() => {
                Ok(extents.into_iter().map(|extent| Reservation::new(self, extent)).collect())
            }
            other => Err(self.unexpected(other)),
        }
    }

    /// Makes written blocks visible, root first; one outcome per block. `pulled`: the bytes were
    /// pulled from another engine rather than computed here.
    ///
    /// # Errors
    /// What broke the call; the reservations went back to the node then.
    pub fn publish(
        &self,
        namespace: &Namespace,
        blocks: Vec<(BlockHash, Reservation<'_>)>,
        pulled: bool,
    ) -> Result<Vec<PublishOutcome>, ClientError> {
        let entries = blocks
            .iter()
            .map(|(hash, memory)| {
                Ok(PublishBlock {
                    hash: *hash,
                    extent: memory.extent(),
                    checksum: memory.checksum()?,
                })
            })
            .collect::<Result<_, ClientError>>()?;
        let request = Request::Publish { namespace: *namespace, pulled, blocks: entries };
        match self.call(&request)? {
            Reply::Published { outcomes } if outcomes.len() == blocks.len() => {
                for (_, memory) in blocks {
                    memory.consumed();
                }
                Ok(outcomes)
            }
            other => Err(self.unexpected(other)),
        }
    }

    /// Pins blocks for reading, fetching from peers those that are not here where `source` allows
    /// it; one answer per hash.
    ///
    /// # Errors
    /// [`ClientError::Busy`] where too much is going on already; else what broke the call.
    pub fn acquire(
        &self,
        namespace: &Namespace,
        hashes: &[BlockHash],
        source: Source,
    ) -> Result<Vec<Acquired<'_>>, ClientError> {
        let request = Request::Acquire { namespace: *namespace, source, hashes: hashes.to_vec() };
        match self.call(&request)? {
            Reply::Acquired { outcomes } if outcomes.len() == hashes.len() => Ok(outcomes
                .into_iter()
                .zip(hashes)
                .map(|(outcome, hash)| match outcome {
                    AcquireOutcome::Ready(block) => Acquired::Ready(Held::new(self, *hash, block)),
                    AcquireOutcome::NotFound => Acquired::NotFound,
                    AcquireOutcome::Busy(reason) => Acquired::Busy(reason),
                    AcquireOutcome::Failed => Acquired::Failed,
                })
                .collect()),
            other => Err(self.unexpected(other)),
        }
    }

    /// Tells the node that these blocks were sent to the decode side; for how many that changed
    /// something.
    ///
    /// # Errors
    /// What broke the call.
    pub fn finished_sending(
        &self,
        namespace: &Namespace,
        hashes: &[BlockHash],
    ) -> Result<u32, ClientError> {
        let request = Request::FinishedSending { namespace: *namespace, hashes: hashes.to_vec() };
        match self.call(&request)? {
            Reply::Done { count } => Ok(count),
            other => Err(self.unexpected(other)),
        }
    }

    /// Waits at most so long (and at most [`limits::DOOR_FLUSH_MAX`]) until the registry knows all
    /// that was published; whether it does.
    ///
    /// # Errors
    /// What broke the call.
    pub fn flush(&self, within: Duration) -> Result<bool, ClientError> {
        let within = within.min(limits::DOOR_FLUSH_MAX);
        let request =
            Request::Flush { deadline_ms: u32::try_from(within.as_millis()).unwrap_or(u32::MAX) };
        match self.call_within(&request, within.saturating_add(self.timeout))? {
            Reply::Flushed { known } => Ok(known),
            other => Err(self.unexpected(other)),
        }
    }

    /// Makes the node forget what speaks against a peer, or against all peers and its own NICs; how many
    /// breakers were not closed.
    ///
    /// # Errors
    /// What broke the call.
    pub fn reset_health(&self, node: Option<NodeId>) -> Result<u32, ClientError> {
        match self.call(&Request::ResetHealth { node })? {
            Reply::Done { count } => Ok(count),
            other => Err(self.unexpected(other)),
        }
    }

    /// The node's state as the node wrote it.
    ///
    /// # Errors
    /// What broke the call.
    pub fn stat_json(&self) -> Result<serde_json::Value, ClientError> {
        match self.call(&Request::Stat)? {
            Reply::Stat { json } => {
                serde_json::from_str(&json).map_err(|_no_json| ClientError::Unexpected)
            }
            other => Err(self.unexpected(other)),
        }
    }

    /// The node's state.
    ///
    /// # Errors
    /// What broke the call.
    pub fn stat(&self) -> Result<StatReport, ClientError> {
        serde_json::from_value(self.stat_json()?).map_err(|_other_shape| ClientError::Unexpected)
    }

    /// A page of at most `max` residents from `cursor` on (`None` at first).
    ///
    /// # Errors
    /// What broke the call.
    pub fn list(
        &self,
        namespace: Option<&Namespace>,
        cursor: Option<u64>,
        max: usize,
    ) -> Result<ListPage, ClientError> {
        let max = max.clamp(1, limits::DOOR_BLOCKS_MAX);
        let request = Request::List {
            namespace: namespace.copied(),
            cursor: cursor.unwrap_or(0),
            max: u32::try_from(max).unwrap_or(u32::MAX),
        };
        match self.call(&request)? {
            Reply::Listed { next, entries } => {
                Ok(ListPage { entries, next: (next != 0).then_some(next) })
            }
            other => Err(self.unexpected(other)),
        }
    }

    /// Evictions with a sequence greater than `since`, oldest first, as far as the node remembers
    /// them and at most [`limits::DOOR_BLOCKS_MAX`]: ask again from the last one's sequence.
    ///
    /// # Errors
    /// What broke the call.
    pub fn evictions(&self, since: u64) -> Result<Vec<EvictedBlock>, ClientError> {
        match self.call(&Request::Evictions { since })? {
            Reply::Evicted { entries } => Ok(entries),
            other => Err(self.unexpected(other)),
        }
    }

    fn call(&self, request: &Request) -> Result<Reply, ClientError> {
        self.call_within(request, self.timeout)
    }

    fn call_within(&self, request: &Request, within: Duration) -> Result<Reply, ClientError> {
        let mut state = lock(&self.state);
        state.give_back(self.timeout)?;
        let reply = state.connection.call(request, within)?;
        state.count(&reply);
        Ok(reply)
    }

    /// A call with a descriptor, whose reply holds no guard.
    fn call_with(
        &self,
        request: &Request,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<Reply, ClientError> {
        let mut state = lock(&self.state);
        state.give_back(self.timeout)?;
        state.connection.call_with(request, file, self.timeout)
    }

    /// What a reply means that is not the one that was asked for.
    fn unexpected(&self, reply: Reply) -> ClientError {
        match reply {
            Reply::Busy { pause_ms, reason } => {
                ClientError::Busy { pause: Duration::from_millis(pause_ms.into()), reason }
            }
            Reply::Refused { sentence } => ClientError::Refused { sentence },
            Reply::Engine(EngineReply::ImportRefused { reason, sentence }) => {
                ClientError::ImportRefused { reason, sentence }
            }
            _ => {
                lock(&self.state).connection.close();
                ClientError::Unexpected
            }
        }
    }

    fn pool(&self, id: PoolId) -> Result<&Mapping, ClientError> {
        self.pools
            .iter()
            .find(|pool| pool.id == id)
            .map(|pool| &pool.mapping)
            .ok_or(ClientError::Unexpected)
    }

    /// A guard is gone; `give_back` notes what the node is to be told. The errors of a broken
    /// connection are left to the next call: the node has taken everything back then.
    fn dropped(&self, give_back: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        state.guards = state.guards.saturating_sub(1);
        give_back(&mut state);
        let waiting = state.releases.len() + state.discards.len();
        if waiting >= BATCH || state.guards == 0 {
            drop(state.give_back(self.timeout));
        }
    }
}

impl State {
    /// The guards of a reply count from here, not from when each is made, so that another thread's drop
    /// does not take itself for the last one.
    fn count(&mut self, reply: &Reply) {
        let ready = |outcome: &&AcquireOutcome| matches!(outcome, AcquireOutcome::Ready(_));
        self.guards += match reply {
            Reply::Reserved { extents } => extents.len(),
            Reply::Acquired { outcomes } => outcomes.iter().filter(ready).count(),
            _ => 0,
        };
    }

    /// Tells the node what was dropped.
    fn give_back(&mut self, within: Duration) -> Result<(), ClientError> {
        while !self.releases.is_empty() {
            let rest = self.releases.len().saturating_sub(limits::DOOR_BLOCKS_MAX);
            let holds = self.releases.split_off(rest);
            self.connection.call(&Request::Release { holds }, within)?;
        }
        while !self.discards.is_empty() {
            let rest = self.discards.len().saturating_sub(limits::DOOR_BLOCKS_MAX);
            let extents = self.discards.split_off(rest);
            self.connection.call(&Request::Discard { extents }, within)?;
        }
        Ok(())
    }
}
