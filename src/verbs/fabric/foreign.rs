//! Regions of another driver's device, and what a new region means for those who read here already.

use std::sync::Arc;

use super::VerbsFabric;
use super::pinned::{Cards, Pinned};
use crate::fabric::{Access, FabricError, Region, RegionId};
use crate::memory::{Climb, ForeignFabric, Pinner, Registrable};
use crate::sys::clock::coarse;
use crate::verbs::Served;

impl ForeignFabric for VerbsFabric {
    type Pinned = Pinned;

    fn pinner(&self, access: Access) -> Pinner<Pinned> {
        let (cards, served) = (Cards::new(&self.nics), self.served(access));
        Box::new(move |memory, rungs| match memory {
            Registrable::Host(mapping) => {
                let pinned = Pinned::host(&cards, Arc::clone(mapping), served)?;
                Ok((Some(pinned), Climb::default()))
            }
            Registrable::Foreign(memory) => Pinned::foreign(&cards, memory, served, rungs),
        })
    }

    fn adopt(&mut self, pinned: Pinned) -> Result<Region, FabricError> {
        let served = pinned.served();
        let region = self.regions.adopt(pinned)?;
        self.tell_readers(&region, served);
        Ok(region)
    }

    fn disown(&mut self, region: RegionId) -> Option<Pinned> {
        self.forget_windows(region);
        self.regions.disown(region, &mut self.table)
    }
}

impl VerbsFabric {
    /// No window is bound to a region any more.
    fn forget_windows(&mut self, region: RegionId) {
        for (_, connection) in self.table.iter_mut() {
            if let Some(windows) = connection.windows_mut() {
                windows.forget(region);
            }
        }
    }

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
