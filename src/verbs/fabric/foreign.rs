//! Regions of another driver's device, and what a new region means for those who read here already.

use std::sync::Arc;

use super::VerbsFabric;
use crate::fabric::{Access, FabricError, Region};
use crate::memory::{Climb, ForeignFabric, ForeignMemory, Rung};
use crate::sys::clock::coarse;
use crate::verbs::Served;

impl ForeignFabric for VerbsFabric {
    fn register_foreign(
        &mut self,
        memory: &Arc<dyn ForeignMemory>,
        access: Access,
        rungs: &[Rung],
    ) -> Result<(Option<Region>, Climb), FabricError> {
        let served = self.served(access);
        let (region, climb) = self.regions.register_foreign(&self.nics, memory, served, rungs)?;
        if let Some(region) = &region {
            self.tell_readers(region, served);
        }
        Ok((region, climb))
    }
}

impl VerbsFabric {
    /// How a region of this access is registered.
    pub(super) fn served(&self, access: Access) -> Served {
        match access {
            Access::Local => Served::No,
            Access::RemoteRead if self.nics.windows > 0 => Served::ByWindows,
            Access::RemoteRead => Served::Whole,
        }
    }

    /// Tells those who may read by regions' keys of a new one.
    pub(super) fn tell_readers(&mut self, region: &Region, served: Served) {
        if served != Served::Whole {
            return;
        }
        let readers = self.table.whole_mut().filter(|(_, connection)| connection.can_post());
        let readers: Vec<_> = readers.map(|(id, _)| id).collect();
        let now = coarse();
        for id in readers {
            self.with(id, now, |connection, around| connection.tell(region.rkey, around));
        }
    }
}
