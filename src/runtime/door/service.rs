//! What the door asks of the node.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::layout::{AllocationId, BlockId, Layout, Segment};
use crate::memory::{Checksum, EngineMemory, ImportError, Mapping, Owner};
use crate::protocol::door::{
    AcquireOutcome, EvictedBlock, LayoutId, ListEntry, MemorySource, MovedBlock, PublishOutcome,
    Source,
};
use crate::types::{BlockHash, Extent, Namespace, NodeId, PoolId, ResidentId};

/// A pool as clients are given it.
#[derive(Debug, Clone, Copy)]
pub struct PoolHandle<'a> {
    /// Its number, which extents name.
    pub id: PoolId,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its memory file, which clients map.
    pub file: BorrowedFd<'a>,
}

/// Reserved memory. Dropping it frees it.
pub trait Reserved: Send + Sync + 'static {
    /// Where it lies.
    fn extent(&self) -> Extent;
}

/// Why there is no memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReserveError {
    /// Not now.
    Busy {
        /// When to ask again, milliseconds.
        pause_ms: u32,
    },
    /// Never, as asked: the sentence says why and what to do.
    Refused(String),
}

/// A block to make visible.
#[derive(Debug)]
pub struct Publish<R> {
    /// Its hash.
    pub hash: BlockHash,
    /// XXH3-64 of its bytes, as the client computed it.
    pub checksum: u64,
    /// The memory that the client wrote it into.
    pub memory: R,
}

/// A layout that a client imported, and all memory that it may lie in.
#[derive(Debug)]
pub struct Imported {
    /// How blocks lie.
    pub layout: Layout,
    /// The client's allocations, in the order of their numbers.
    pub memory: Vec<Arc<dyn EngineMemory>>,
}

impl Imported {
    /// The memory that each tensor lies in; `None` for an allocation that there is not.
    pub fn lies(&self) -> impl Iterator<Item = Option<&dyn EngineMemory>> {
        let memory = |at: AllocationId| self.memory.get(usize::from(at.0)).map(|memory| &**memory);
        self.layout.tensors().iter().map(move |tensor| memory(tensor.allocation))
    }

    /// Whether all of the layout lies in memory like this.
    pub fn lies_in(&self, like: impl Fn(&dyn EngineMemory) -> bool) -> bool {
        self.lies().all(|memory| memory.is_some_and(&like))
    }

    /// The checksum of the logical bytes of a block where they lie; `None` where they are not in host
    /// memory.
    #[must_use]
    pub fn checksum(&self, block: BlockId) -> Option<u64> {
        let mut sum = Checksum::default();
        for Segment { allocation, offset, len } in self.layout.segments(block) {
            let memory = self.memory.get(usize::from(allocation.0))?.host()?;
            sum.add(memory, offset, len.into()).ok()?;
        }
        Some(sum.value())
    }
}

/// A block to make visible where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InPlace {
    /// Its hash.
    pub hash: BlockHash,
    /// Its number in the layout.
    pub block: BlockId,
    /// XXH3-64 of its logical bytes.
    pub checksum: u64,
}

/// Why blocks do not land in a layout. Each has a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotLanded {
    /// These blocks must not be written to now.
    InUse(String),
    /// There is no way for peers' bytes into this layout: they land in the pools, and are copied.
    NoWay(String),
}

/// A page of residents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Page {
    /// At most as many as were asked for.
    pub entries: Vec<ListEntry>,
    /// The cursor of the next page; 0 where there is none.
    pub next: u64,
}

/// The node behind the door. Methods that are not async answer at once: they run on the door's
/// threads, and every client waits for them.
pub trait DoorService: Send + Sync + 'static {
    /// Reserved memory.
    type Reserved: Reserved;

    /// A client, as the one who publishes blocks in place.
    type Client: Send + Sync + 'static;

    /// A layout whose blocks a client may publish in place now.
    type Opened: Send + 'static;

    /// The pools, at most [`crate::limits::POOLS_MAX`].
    fn pools(&self) -> Vec<PoolHandle<'_>>;

    /// The memory of a pool, which outlives the pool while anyone holds it.
    fn pool(&self, id: PoolId) -> Option<Arc<Mapping>>;

    /// Imports memory of a client, so many bytes long. `file` is the descriptor that came with the
    /// request. May take its time: no thread of the door calls it.
    ///
    /// # Errors
    /// [`ImportError`].
    fn import(
        &self,
        owner: &Arc<Owner>,
        memory: (&MemorySource, u64),
        file: Option<OwnedFd>,
    ) -> Result<Arc<dyn EngineMemory>, ImportError>;

    /// Reserves memory for blocks of these sizes (1 to [`crate::limits::BLOCK_BYTES_MAX`] bytes
    /// each), all or none, next to each other where that is possible.
    ///
    /// # Errors
    /// [`ReserveError`].
    fn reserve(&self, sizes: &[u32]) -> Result<Vec<Self::Reserved>, ReserveError>;

    /// Makes blocks visible; one outcome per block, in order. `pulled`: the engine pulled the bytes
    /// from another engine rather than computed them, so a resident found here means one replica
    /// fewer than its rank expected.
    fn publish(
        &self,
        namespace: &Namespace,
        blocks: Vec<Publish<Self::Reserved>>,
        pulled: bool,
    ) -> Vec<PublishOutcome>;

    /// A client that has come.
    fn client(&self) -> Arc<Self::Client>;

    /// Makes a layout of a client, by its number on the client's connection, readable for peers, so that
    /// these blocks of it may be published.
    ///
    /// # Errors
    /// A sentence that says why they cannot be, and what to do instead.
    fn open(
        self: Arc<Self>,
        client: Arc<Self::Client>,
        layout: (LayoutId, Arc<Imported>),
        blocks: (Namespace, Vec<MovedBlock>),
    ) -> impl Future<Output = Result<Self::Opened, String>> + Send;

    /// Makes blocks visible where they lie; one outcome per block, in order. Nothing of a client that
    /// has left.
    fn publish_in_place(
        &self,
        opened: Self::Opened,
        namespace: &Namespace,
        blocks: Vec<InPlace>,
        pulled: bool,
    ) -> Vec<PublishOutcome>;

    /// Why one of these blocks must not be written to now, in a sentence: its client has published it in
    /// place and not had it back, or a load lands there.
    fn in_use(
        &self,
        client: &Self::Client,
        layout: LayoutId,
        blocks: &[MovedBlock],
    ) -> Option<String>;

    /// Takes blocks back that were published in place. Done when nobody can read them any more; how
    /// many of them were published.
    fn withdraw(
        self: Arc<Self>,
        client: Arc<Self::Client>,
        layout: LayoutId,
        blocks: Vec<BlockId>,
    ) -> impl Future<Output = u32> + Send;

    /// Blocks were loaded by a client: so many landed in its memory, and so many were copied there.
    fn note_loaded(&self, landed: u64, copied: u64) {
        let _ = (landed, copied);
    }

    /// A client has gone: what it published in place is taken back, and its memory is kept until then.
    fn leave(self: Arc<Self>, client: Arc<Self::Client>);

    /// Pins blocks for reading, after fetching from peers those that are not here where `source`
    /// allows it; one outcome per hash, in order. Each `Ready` is one pin, given back by one
    /// [`DoorService::release`] of its hold. Has a deadline of its own and is never cancelled while
    /// the runtime lives.
    fn acquire(
        self: Arc<Self>,
        namespace: Namespace,
        hashes: Vec<BlockHash>,
        source: Source,
    ) -> impl Future<Output = Vec<AcquireOutcome>> + Send;

    /// As [`Self::acquire`], but what comes from peers lands in a layout of the client, at the place that
    /// each block names, and is published there: its extent names the layout and the block. What is here
    /// already, and what somebody else is fetching, is where it is.
    ///
    /// # Errors
    /// [`NotLanded`]; nothing was done then.
    fn land(
        self: Arc<Self>,
        client: Arc<Self::Client>,
        layout: (LayoutId, Arc<Imported>),
        blocks: (Namespace, Vec<MovedBlock>),
        source: Source,
    ) -> impl Future<Output = Result<Vec<AcquireOutcome>, NotLanded>> + Send;

    /// Gives pins back, one per entry.
    fn release(&self, holds: &[ResidentId]);

    /// Notes that these blocks were sent to the decode side; for how many that changed something.
    fn finished_sending(&self, namespace: &Namespace, hashes: &[BlockHash]) -> u32;

    /// Done when the registry knows all that was published before the call: true; or when that
    /// cannot come to be: false. May be cancelled.
    fn flush(&self) -> impl Future<Output = bool> + Send;

    /// The node's state, as [`crate::protocol::door::stat::StatReport`] lays it out.
    /// May be cancelled.
    fn stat(&self) -> impl Future<Output = serde_json::Value> + Send;

    /// Forgets what speaks against a peer, or against all; how many breakers were not closed. May be
    /// cancelled.
    fn reset_health(&self, node: Option<NodeId>) -> impl Future<Output = u32> + Send;

    /// A page of residents from `cursor` on (0 at first), at most `max` entries.
    fn list(&self, namespace: Option<&Namespace>, cursor: u64, max: usize) -> Page;

    /// Evictions with a sequence greater than `since`, oldest first, as far as they are remembered;
    /// at most `max`.
    fn evictions(&self, since: u64, max: usize) -> Vec<EvictedBlock>;
}
