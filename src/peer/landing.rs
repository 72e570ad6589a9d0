//! What the peer core needs from its node: memory for what arrives, and the residents it may lend.

use std::fmt::Debug;

use crate::fabric::{RegisteredSpan, RemoteSpan};
use crate::store::Found;
use crate::types::{BlockKey, EvictionRank, Extent, Load};

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

/// A node's memory and residents, as one data thread sees them.
pub trait Landing {
    /// Memory for one block, given back when dropped.
    type Memory: Debug;

    /// Reserves memory for blocks of these sizes, in order and next to each other where it can, and
    /// appends it to `out`: for all of them, or for the first few where the pools are full. It may
    /// evict a bounded number of residents to that end, and never waits.
    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Self::Memory>);

    /// Where the bytes of a block in this memory land, in the order of its logical bytes: one span, or
    /// one for each segment. Together they have the length that was reserved.
    fn spans(&self, memory: &Self::Memory) -> impl Iterator<Item = RegisteredSpan>;

    /// The checksum of the logical bytes that are in this memory now.
    fn checksum(&self, memory: &Self::Memory) -> u64;

    /// Makes a fetched block resident with this rank.
    fn publish(
        &mut self,
        key: BlockKey,
        memory: Self::Memory,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published;

    /// What a peer is told to read for a resident's extent; `None` where it is not registered.
    fn remote(&self, extent: &Extent) -> Option<RemoteSpan>;

    /// How long requesters should hold back for the sake of memory, milliseconds; 0 without pressure.
    fn pause_ms(&self) -> u32;

    /// How busy this node is now with what it lends, for whoever else wants to know.
    fn note_load(&self, load: Load) {
        let _ = load;
    }
}
