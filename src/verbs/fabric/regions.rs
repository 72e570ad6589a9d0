//! The regions of one fabric. A deregistered one leaves at once for peers, and is kept as memory
//! until no READ that was posted before can land in it.

use std::sync::Arc;

use super::table::Table;
use crate::fabric::{ConnectionId, FabricError, Region, RegionId, RegisteredSpan, RemoteSpan};
use crate::limits::REGIONS_MAX;
use crate::memory::Mapping;
use crate::verbs::{MemoryRegion, ProtectionDomain, Segment, Served};

/// Registrations in the life of one fabric: as many as there are [`RegionId`]s.
const REGISTRATIONS_MAX: usize = u16::MAX as usize;

#[derive(Debug)]
struct Entry {
    region: Region,
    served: Served,
    memory: MemoryRegion,
}

/// READs of one lane that may still land: those with lower numbers.
#[derive(Debug)]
struct Wait {
    connection: ConnectionId,
    lane: usize,
    until: u64,
}

/// What is kept of a deregistered region.
#[derive(Debug)]
struct Grave {
    /// The registration, where it gave peers nothing; it ends with the READs that it serves.
    _region: Option<MemoryRegion>,
    _memory: Option<Arc<Mapping>>,
    waits: Vec<Wait>,
}

/// The table. At most [`REGIONS_MAX`] entries and usually a few, so that a scan beats hashing.
#[derive(Debug, Default)]
pub(super) struct Regions {
    entries: Vec<Entry>,
    graves: Vec<Grave>,
    next: usize,
}

impl Regions {
    pub(super) fn register(
        &mut self,
        domain: &Arc<ProtectionDomain>,
        memory: Arc<Mapping>,
        served: Served,
    ) -> Result<Region, FabricError> {
        if self.entries.len() >= REGIONS_MAX {
            return Err(FabricError::Limit { what: "registered regions", limit: REGIONS_MAX });
        }
        let id = u16::try_from(self.next).map_err(|_used_up| FabricError::Limit {
            what: "registrations in the life of one fabric",
            limit: REGISTRATIONS_MAX,
        })?;
        let memory = MemoryRegion::new(domain, memory, served)?;
        let region = Region {
            id: RegionId(id),
            rkey: memory.rkey(),
            address: memory.address(),
            len: memory.len(),
        };
        self.next += 1;
        self.entries.push(Entry { region, served, memory });
        Ok(region)
    }

    pub(super) fn deregister(&mut self, id: RegionId, table: &mut Table) {
        let Some(at) = self.entries.iter().position(|entry| entry.region.id == id) else {
            return;
        };
        let entry = self.entries.swap_remove(at);
        let mut waits = Vec::new();
        for (connection, peer) in table.iter_mut() {
            for (lane, state) in peer.lanes().iter().enumerate() {
                if state.outstanding() > 0 {
                    waits.push(Wait { connection, lane, until: state.next() });
                }
            }
        }
        if waits.is_empty() {
            return;
        }
        let memory = entry.memory.memory().cloned();
        // What peers could read ends here and now; our own READs then fail, and their memory waits.
        let region = (entry.served == Served::No).then_some(entry.memory);
        self.graves.push(Grave { _region: region, _memory: memory, waits });
    }

    /// Lets go of deregistered regions in which nothing can land any more.
    pub(super) fn sweep(&mut self, table: &mut Table) {
        for grave in &mut self.graves {
            grave.waits.retain(|wait| {
                let lane = table.find(wait.connection).and_then(|peer| peer.lanes().get(wait.lane));
                lane.is_some_and(|lane| lane.oldest() < wait.until && lane.outstanding() > 0)
            });
        }
        self.graves.retain(|grave| !grave.waits.is_empty());
    }

    /// The region that is served by windows and holds a span, as its owner names it.
    pub(super) fn served(&self, span: &RemoteSpan) -> Option<(RegionId, &MemoryRegion)> {
        let holds = |region: &Region| {
            let offset = span.address.checked_sub(region.address)?;
            (offset.checked_add(span.len.into())? <= region.len).then_some(())
        };
        let mut entries = self.entries.iter().filter(|entry| entry.served == Served::ByWindows);
        let entry = entries.find(|entry| holds(&entry.region).is_some())?;
        (span.len > 0).then_some((entry.region.id, &entry.memory))
    }

    /// A local span as the device names it; `None` where it is not registered.
    pub(super) fn local(&self, span: &RegisteredSpan) -> Option<Segment> {
        let entry = self.entries.iter().find(|entry| entry.region.id == span.region)?;
        let end = span.offset.checked_add(u64::from(span.len))?;
        (end <= entry.region.len).then(|| Segment {
            addr: entry.region.address + span.offset,
            length: span.len,
            lkey: entry.memory.lkey(),
        })
    }
}
