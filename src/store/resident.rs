//! The plain data that goes into a store and comes out, and what can go wrong.

use crate::limits;
use crate::policy::Policy;
use crate::types::{BlockKey, EvictionRank, Extent, ResidentId, Scope};

/// How a store is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreConfig {
    /// Most residents, 1 to [`limits::RESIDENTS_MAX`]. Their memory is reserved at construction and
    /// used as they come: 88 bytes for each and 10 to 31 for its places in the lists, depending on
    /// how much of the lists is garbage at the time; and 64 more where it was served to a peer.
    pub capacity: u32,
    /// Rank transitions and victim order.
    pub policy: Policy,
}

/// Why a store was not built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StoreConfigError {
    /// The capacity is outside its bounds.
    #[error(
        "a store holds 1 to {max} residents, not {got}; choose a larger block size or split the \
         pools over several nodes",
        max = limits::RESIDENTS_MAX
    )]
    Capacity {
        /// What was asked for.
        got: u32,
    },
}

impl StoreConfigError {
    /// Whose fault: the configuration's.
    #[must_use]
    pub fn scope(&self) -> Scope {
        Scope::Request
    }
}

/// Where a block's bytes are and what they must hash to. The store hands it back as it got it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Payload {
    /// Where.
    pub extent: Extent,
    /// The checksum of the bytes.
    pub checksum: u64,
}

/// A resident, as an operation found or left it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Found {
    /// Which, until its eviction.
    pub id: ResidentId,
    /// Its bytes. They stay where they are, unchanged, only while a pin is held.
    pub payload: Payload,
    /// Its rank after the operation.
    pub rank: EvictionRank,
}

/// A resident that was evicted or removed: whoever gets it owns the memory of its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Evicted {
    /// Its key.
    pub key: BlockKey,
    /// Its id, which matches nothing any more.
    pub id: ResidentId,
    /// The memory to give back.
    pub payload: Payload,
    /// The rank that it went from.
    pub rank: EvictionRank,
}

/// What a completed transfer did at its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Committed {
    /// The source's rank before the step; for a repeat, the one that this requester got the first
    /// time. The destination starts with it.
    pub rank: EvictionRank,
    /// Whether this was the requester's first transfer of this resident.
    pub first: bool,
}

/// Why a block was not inserted. In both cases the caller still owns its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InsertError {
    /// The block is here. Nothing changed: say why with `already_resident`.
    #[error("the block is resident already, as {:?}; use that copy", .0.id)]
    AlreadyResident(Found),
    /// Every slot holds a resident, or one that another thread is about to insert or to take out.
    #[error("the store is full; evict first, or answer Busy where every resident is pinned")]
    Full,
}

/// Why a block was not pinned or hit. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// It is not resident here.
    #[error("the block is not resident here; ask another owner")]
    NotFound,
    /// It has as many pins as a resident can have.
    #[error("the block has {max} pins, the most possible; try again later", max = limits::PINS_MAX)]
    TooManyPins,
}

/// Why a pin was not given back. Nothing changed. Both mean a defect in the caller's accounting of
/// pins: while a pin is held its id cannot become stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnpinError {
    /// The resident that the id meant is gone.
    #[error("the id is of a resident that was evicted; a pin was given back twice")]
    Stale,
    /// The resident is here and nobody holds a pin on it.
    #[error("the resident has no pin to give back; a pin was given back twice")]
    NotPinned,
}

/// Why a resident was not taken out. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RemoveError {
    /// Somebody has a pin on it.
    #[error("the resident has pins; remove it once they are given back")]
    Pinned,
    /// The resident that the id meant was evicted or removed.
    #[error("the id is of a resident that is gone")]
    Gone,
}

/// What a store holds now, in counts: exact where nothing else is going on; else each resident is
/// counted as it was at some moment of the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStats {
    /// Most residents.
    pub capacity: u32,
    /// Residents, pinned ones included.
    pub residents: u32,
    /// Residents with at least one pin: out of reach of eviction.
    pub pinned: u32,
    /// The sum of the payloads' lengths.
    pub bytes: u64,
    /// Residents by rank, pinned ones included; index 0 is unused.
    pub by_rank: [u32; limits::RANK_MAX as usize + 1],
    /// The highest rank that any resident has.
    pub max_rank: Option<EvictionRank>,
}

/// One resident, for people who look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentView {
    /// Its key.
    pub key: BlockKey,
    /// Its id.
    pub id: ResidentId,
    /// Its bytes.
    pub payload: Payload,
    /// Its rank.
    pub rank: EvictionRank,
    /// Pins held on it.
    pub pins: u16,
    /// Different requesters that it was served to.
    pub requesters: u32,
}
