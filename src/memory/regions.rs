//! The regions of a fabric that serves in software: which memory has which key and address, and who
//! may read it.
//!
//! Keys and addresses are random: a peer learns nothing of this process from them, and a key of an
//! earlier start, or a guessed one, names nothing. Neither a key nor an id is used twice, so the
//! registrations of one fabric are limited to the number of ids.

use std::collections::HashSet;
use std::sync::Arc;

use super::Mapping;
use crate::fabric::{Access, FabricError, Region, RegionId, RegisteredSpan};
use crate::limits::REGIONS_MAX;
use crate::sys::random;

/// Registrations in the life of one fabric: as many as there are [`RegionId`]s.
const REGISTRATIONS_MAX: usize = u16::MAX as usize;

/// Remote addresses lie in the user half of a 48-bit address space, on pages, as those of a NIC do.
const ADDRESS_MASK: u64 = 0x3fff_ffff_f000;

#[derive(Debug)]
struct Entry {
    region: Region,
    access: Access,
    memory: Arc<Mapping>,
}

/// The table. At most [`REGIONS_MAX`] entries and usually a few, so that a scan beats hashing.
#[derive(Debug, Default)]
pub struct Regions {
    entries: Vec<Entry>,
    keys: HashSet<u32>,
    /// The id that the next registration gets.
    next: usize,
}

impl Regions {
    /// Registers memory under a new id, with a random key and address.
    ///
    /// # Errors
    /// [`FabricError::Limit`], or [`FabricError::Os`] where the system gives no random bytes.
    pub fn register(
        &mut self,
        memory: Arc<Mapping>,
        access: Access,
    ) -> Result<Region, FabricError> {
        self.check_room()?;
        let id = u16::try_from(self.next).map_err(|_used_up| FabricError::Limit {
            what: "registrations in the life of one fabric",
            limit: REGISTRATIONS_MAX,
        })?;
        let mut rkey = random::number()?;
        while rkey == 0 || !self.keys.insert(rkey) {
            rkey = random::number()?;
        }
        self.next += 1;
        let address = (u64::from(random::number()?) << 12 | 1 << 44) & ADDRESS_MASK;
        let region = Region { id: RegionId(id), rkey, address, len: memory.len() };
        self.entries.push(Entry { region, access, memory });
        Ok(region)
    }

    /// Takes over a region as another fabric registered it: the same memory under the same id, key and
    /// address.
    ///
    /// # Errors
    /// [`FabricError::Limit`] beyond [`REGIONS_MAX`], and for an id or a key that is in use here.
    pub fn adopt(
        &mut self,
        region: &Region,
        memory: Arc<Mapping>,
        access: Access,
    ) -> Result<(), FabricError> {
        self.check_room()?;
        let in_use = |entry: &Entry| entry.region.id == region.id;
        if memory.len() < region.len
            || self.entries.iter().any(in_use)
            || !self.keys.insert(region.rkey)
        {
            return Err(FabricError::Limit { what: "region under one id and key", limit: 1 });
        }
        self.next = self.next.max(usize::from(region.id.0) + 1);
        self.entries.push(Entry { region: *region, access, memory });
        Ok(())
    }

    fn check_room(&self) -> Result<(), FabricError> {
        if self.entries.len() >= REGIONS_MAX {
            return Err(FabricError::Limit { what: "registered regions", limit: REGIONS_MAX });
        }
        Ok(())
    }

    /// Forgets a region. Who still writes to its memory holds the memory itself.
    pub fn deregister(&mut self, id: RegionId) {
        self.entries.retain(|entry| entry.region.id != id);
    }

    /// What a peer may read: the memory and the offset in it.
    #[must_use]
    pub fn remote(&self, rkey: u32, address: u64, len: u32) -> Option<(&Mapping, u64)> {
        let entry = self
            .entries
            .iter()
            .find(|entry| entry.region.rkey == rkey && entry.access == Access::RemoteRead)?;
        let offset = address.checked_sub(entry.region.address)?;
        let end = offset.checked_add(u64::from(len))?;
        (end <= entry.region.len).then_some((&*entry.memory, offset))
    }

    /// The memory of a local span; `None` where the span is not registered.
    #[must_use]
    pub fn local(&self, span: &RegisteredSpan) -> Option<&Arc<Mapping>> {
        let entry = self.entries.iter().find(|entry| entry.region.id == span.region)?;
        let end = span.offset.checked_add(u64::from(span.len))?;
        (end <= entry.region.len).then_some(&entry.memory)
    }
}
