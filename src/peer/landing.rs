//! What the peer core needs from its node: memory for what arrives, and the residents it may lend.

use std::fmt::Debug;

use crate::fabric::RegisteredSpan;
use crate::protocol::{Place, RegionEntry, TensorEntry};
use crate::store::{Evicted, Found};
use crate::types::{BlockKey, EvictionRank, Extent, Load, ResidentId, Scope};

/// What became of a block that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// It is resident now, pinned once for the reader that waits for it.
    Stored(Found),
    /// It was resident already; that resident is pinned once for the reader, the copy is dropped.
    AlreadyResident(Found),
    /// There is no room for one more resident.
    Full,
}

/// How far a block that landed has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// Its bytes are where they belong, and their checksum can be asked for.
    Now,
    /// That takes longer: to be asked again.
    Later,
    /// It will not come to that.
    Never(Scope),
}

/// A layout as peers are told it.
#[derive(Debug, Clone, Copy)]
pub struct LentLayout<'a> {
    /// Blocks.
    pub blocks: u32,
    /// The regions that the tensors lie in.
    pub regions: &'a [RegionEntry],
    /// The tensors, in the order of a block's logical bytes.
    pub tensors: &'a [TensorEntry],
}

/// A node's memory and residents, as one data thread sees them.
pub trait Landing {
    /// Memory for one block, given back when dropped.
    type Memory: Debug;

    /// Reserves memory for blocks of these sizes, in order and next to each other where it can, and
    /// appends it to `out`: for all of them, or for the first few where the pools are full. It may
    /// evict a bounded number of residents to that end, and never waits.
    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Self::Memory>);

    /// The memory at a place that the block's asker named, which is its asker's; `None` where nothing can
    /// land there now.
    fn land_at(&mut self, place: &Extent) -> Option<Self::Memory> {
        let _ = place;
        None
    }

    /// Where the bytes of a block in this memory land, in the order of its logical bytes: one span, or
    /// one for each segment. Together they have the length that was reserved.
    fn spans(&self, memory: &Self::Memory) -> impl Iterator<Item = RegisteredSpan>;

    /// Brings a block whose READs have succeeded to its place, a step at a time and without waiting:
    /// where that takes copies, they are begun by one call and found to have ended by a later one.
    fn settle(&mut self, memory: &mut Self::Memory) -> Settled {
        let _ = memory;
        Settled::Now
    }

    /// The checksum of the logical bytes that are in this memory now. Asked for once it has settled.
    fn checksum(&self, memory: &Self::Memory) -> u64;

    /// Makes a fetched block resident with this rank.
    fn publish(
        &mut self,
        key: BlockKey,
        memory: Self::Memory,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published;

    /// The blocks of a lend are asked for, or asked for again, or blocks that have landed are looked at:
    /// what [`Self::prepare`] and [`Self::settle`] may do at a time, they may do anew.
    fn look_again(&mut self) {}

    /// Makes a resident, which the caller has pinned, ready for [`Self::remote`], a step at a time and
    /// without waiting. Whether it is; a caller that gives up asks for it no more, and tells its reader to
    /// pause by [`Self::pause_ms`].
    fn prepare(&mut self, found: &Found) -> bool {
        let _ = found;
        true
    }

    /// What a peer is told to read for a resident's extent; `None` where it is not registered. A layout
    /// that it names is one that [`Self::layout`] knows, as long as a resident lies in it.
    fn remote(&self, extent: &Extent) -> Option<Place>;

    /// A layout that residents lie in, by its number. No landing needs to have any.
    fn layout(&self, number: u32) -> Option<LentLayout<'_>> {
        let _ = number;
        None
    }

    /// Whether a resident that is withdrawn may go, as far as this node's own copies out of it are
    /// concerned. One that may not is asked for again.
    fn lets_go(&mut self, resident: ResidentId) -> bool {
        let _ = resident;
        true
    }

    /// A resident that was withdrawn is gone, and nobody can read it any more.
    fn removed(&mut self, removed: &Evicted) {
        let _ = removed;
    }

    /// How long requesters should hold back for the sake of memory, milliseconds; 0 without pressure.
    fn pause_ms(&self) -> u32;

    /// How busy this node is now with what it lends, for whoever else wants to know.
    fn note_load(&self, load: Load) {
        let _ = load;
    }
}
