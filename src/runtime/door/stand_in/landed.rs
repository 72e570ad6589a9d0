//! Blocks of peers that land in a client's memory.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use super::{StandIn, key};
use crate::protocol::door::{AcquireOutcome, BlockOrigin, HeldBlock, LayoutId, MovedBlock};
use crate::runtime::door::Imported;
use crate::types::{EvictionRank, Extent, Generation, Namespace, PoolId, ResidentId};

/// The hold on every block that has landed in a client's memory.
pub(super) const LANDED: ResidentId = ResidentId { slot: u32::MAX, generation: Generation(1) };

impl StandIn {
    /// A block of a peer's, put into a layout and published there.
    pub(super) fn land_one(
        &self,
        (id, imported): &(LayoutId, Arc<Imported>),
        namespace: &Namespace,
        moved: &MovedBlock,
    ) -> AcquireOutcome {
        let found = self.remote.lock().unwrap().get(&key(namespace, moved.hash)).cloned();
        let Some(bytes) = found else { return AcquireOutcome::NotFound };
        let mut rest = bytes.as_slice();
        for segment in imported.layout.segments(moved.block) {
            let (now, later) = rest.split_at(segment.len as usize);
            let memory = &imported.memory[usize::from(segment.allocation.0)];
            memory.host().unwrap().write(segment.offset, now).unwrap();
            rest = later;
        }
        let checksum = xxh3_64(&bytes);
        self.in_place.lock().unwrap().insert((*id, moved.block), (moved.hash, checksum));
        let (pool, offset) = (PoolId::of_layout(id.0).unwrap(), moved.block.0.into());
        AcquireOutcome::Ready(HeldBlock {
            origin: BlockOrigin::Fetched,
            rank: EvictionRank::FIRST,
            extent: Extent { pool, offset, len: imported.layout.block_bytes() },
            checksum,
            hold: LANDED,
        })
    }
}
