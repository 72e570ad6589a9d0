//! The data thread's view of the node: memory for what arrives, spans of what is lent.

use std::sync::Arc;

use super::residency::{Admitted, Patience, Residency};
use crate::fabric::{Region, RegionId, RegisteredSpan};
use crate::memory::Reservation;
use crate::peer::{Landing, Published};
use crate::protocol::Place;
use crate::types::{BlockKey, EvictionRank, Extent, Load, PoolId};

/// A pool's registration with the fabric.
#[derive(Debug, Clone, Copy)]
pub(super) struct PoolRegion {
    pub(super) pool: PoolId,
    pub(super) region: Region,
}

/// Implements [`Landing`] on the node's memory and residents.
#[derive(Debug)]
pub(super) struct NodeLanding {
    pub(super) residency: Arc<Residency>,
    pub(super) regions: Vec<PoolRegion>,
}

impl NodeLanding {
    fn region(&self, pool: PoolId) -> Option<&Region> {
        self.regions.iter().find(|region| region.pool == pool).map(|found| &found.region)
    }
}

impl Landing for NodeLanding {
    type Memory = Reservation;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Reservation>) {
        self.residency.reserve_some(sizes, out, Patience::Goes);
    }

    fn spans(&self, memory: &Reservation) -> impl Iterator<Item = RegisteredSpan> {
        let Extent { pool, offset, len } = memory.extent();
        // Every pool is registered before the data thread starts; a region that does not exist is
        // refused by the fabric as a local fault.
        let region = self.region(pool).map_or(RegionId(u16::MAX), |region| region.id);
        std::iter::once(RegisteredSpan { region, offset, len })
    }

    fn checksum(&self, memory: &Reservation) -> u64 {
        memory.pool().checksum(memory.extent()).unwrap_or_default()
    }

    fn publish(
        &mut self,
        key: BlockKey,
        memory: Reservation,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published {
        match self.residency.admit_fetched(key, memory, checksum, rank) {
            Admitted::Stored(found) => Published::Stored(found),
            Admitted::AlreadyResident(found) => Published::AlreadyResident(found),
            Admitted::Full => Published::Full,
        }
    }

    fn remote(&self, extent: &Extent) -> Option<Place> {
        self.region(extent.pool)?.remote(extent.offset, extent.len).map(Place::Span)
    }

    fn pause_ms(&self) -> u32 {
        self.residency.pause_ms()
    }

    fn note_load(&self, load: Load) {
        self.residency.note_load(load);
    }
}
