//! The regions of one fabric: each is registered with every NIC, in chunks where it is long. A
//! deregistered one leaves at once for peers, and is kept as memory until no READ that was posted
//! before can land in it.
//!
//! A region's key is the fabric's own and says nothing to a NIC; [`super::keys`] tells how a peer gets
//! at the NICs' keys.

use super::chunks::Layout;
use super::keys::{AnswerHeader, chunk};
use super::near::NicSet;
use super::nics::Nics;
use super::pinned::Pinned;
use super::table::Table;
use crate::fabric::{ConnectionId, FabricError, Region, RegionId, RegisteredSpan, RemoteSpan};
use crate::limits::REGIONS_MAX;
use crate::sys::random;
use crate::verbs::memory_region::Kept;
use crate::verbs::{MemoryRegion, Segment, Served};

/// Registrations in the life of one fabric: as many as there are [`RegionId`]s.
const REGISTRATIONS_MAX: usize = u16::MAX as usize;

#[derive(Debug)]
struct Entry {
    region: Region,
    /// Local keys of all chunks on one NIC after the other, with 0 for a NIC that is gone: beside
    /// each other, since every READ looks one up.
    lkeys: Vec<u32>,
    pinned: Pinned,
}

/// READs of one lane that may still land: those with lower numbers.
#[derive(Debug)]
struct Wait {
    connection: ConnectionId,
    lane: usize,
    until: u64,
}

/// A deregistered region in which READs shall land that were accepted before and are not posted yet:
/// of each connection, those with lower numbers.
#[derive(Debug)]
struct Retired {
    entry: Entry,
    waits: Vec<(ConnectionId, u64)>,
}

/// What is kept of a deregistered region.
#[derive(Debug)]
struct Grave {
    /// The registrations, where they gave peers nothing; they end with the READs that they serve.
    _parts: Vec<Option<MemoryRegion>>,
    _memory: Kept,
    waits: Vec<Wait>,
}

/// The table. At most [`REGIONS_MAX`] entries and usually a few, so that a scan beats hashing.
#[derive(Debug, Default)]
pub(super) struct Regions {
    entries: Vec<Entry>,
    retired: Vec<Retired>,
    graves: Vec<Grave>,
    next: usize,
    /// Whether any region ever was nearer to some NICs than to others.
    any_near: bool,
}

impl Regions {
    /// Makes a region of pinned memory.
    pub(super) fn adopt(&mut self, pinned: Pinned) -> Result<Region, FabricError> {
        let id = self.next_id()?;
        let first = pinned.parts.iter().flatten().next().map_or(0, MemoryRegion::address);
        // The number makes the key one of its kind, the random half a stale or guessed one useless.
        let rkey = random::number()? << 16 | u32::from(id);
        let region = Region { id: RegionId(id), rkey, address: first, len: pinned.len };
        self.next += 1;
        self.any_near |= pinned.near != NicSet::ALL;
        let lkey = |part: &Option<MemoryRegion>| part.as_ref().map_or(0, MemoryRegion::lkey);
        let lkeys = pinned.parts.iter().map(lkey).collect();
        self.entries.push(Entry { region, lkeys, pinned });
        Ok(region)
    }

    fn next_id(&self) -> Result<u16, FabricError> {
        if self.entries.len() >= REGIONS_MAX {
            return Err(FabricError::Limit { what: "registered regions", limit: REGIONS_MAX });
        }
        u16::try_from(self.next).map_err(|_used_up| FabricError::Limit {
            what: "registrations in the life of one fabric",
            limit: REGISTRATIONS_MAX,
        })
    }

    /// Ends a registration. What it still holds of the NICs ends when the answer is dropped, unless READs
    /// of ours may land in it.
    pub(super) fn disown(&mut self, id: RegionId, table: &mut Table) -> Option<Pinned> {
        let at = self.entries.iter().position(|entry| entry.region.id == id)?;
        let entry = self.entries.swap_remove(at);
        let parked = table.iter_mut().filter(|(_, peer)| !peer.parked.is_empty());
        let waits: Vec<_> = parked.map(|(id, peer)| (id, peer.parked.next())).collect();
        if entry.pinned.served == Served::No && !waits.is_empty() {
            self.retired.push(Retired { entry, waits });
            return None;
        }
        self.bury(entry, table)
    }

    /// Ends a registration, with the READs that may land in it.
    fn bury(&mut self, entry: Entry, table: &mut Table) -> Option<Pinned> {
        let mut waits = Vec::new();
        for (connection, peer) in table.iter_mut() {
            for (lane, state) in peer.lanes().iter().enumerate() {
                if state.outstanding() > 0 {
                    waits.push(Wait { connection, lane, until: state.next() });
                }
            }
        }
        let mut pinned = entry.pinned;
        if waits.is_empty() {
            return Some(pinned);
        }
        let _memory = pinned.memory.clone();
        // What peers could read is the caller's to end; our own READs may land, and their memory waits.
        let (_parts, rest) = match pinned.served {
            Served::No => (std::mem::take(&mut pinned.parts), None),
            Served::Whole | Served::ByWindows => (Vec::new(), Some(pinned)),
        };
        self.graves.push(Grave { _parts, _memory, waits });
        rest
    }

    /// Lets go of deregistered regions in which nothing can land any more.
    pub(super) fn sweep(&mut self, table: &mut Table) {
        let mut at = 0;
        while let Some(retired) = self.retired.get_mut(at) {
            let waits = |(id, until): &(ConnectionId, u64)| {
                table.find(*id).is_some_and(|peer| peer.parked.first() < *until)
            };
            retired.waits.retain(waits);
            if retired.waits.is_empty() {
                let Retired { entry, .. } = self.retired.swap_remove(at);
                // Peers could not read it, so that nobody waits for its end.
                drop(self.bury(entry, table));
            } else {
                at += 1;
            }
        }
        for grave in &mut self.graves {
            grave.waits.retain(|wait| {
                let lane = table.find(wait.connection).and_then(|peer| peer.lanes().get(wait.lane));
                lane.is_some_and(|lane| lane.oldest() < wait.until && lane.outstanding() > 0)
            });
        }
        self.graves.retain(|grave| !grave.waits.is_empty());
    }

    /// The region that is served by windows and holds a span, as its owner names it, and its
    /// registration with a NIC.
    pub(super) fn windowed(&self, span: &RemoteSpan, nic: u8) -> Option<(RegionId, &MemoryRegion)> {
        let holds = |region: &Region| {
            let offset = span.address.checked_sub(region.address)?;
            (offset.checked_add(span.len.into())? <= region.len).then_some(())
        };
        let mut entries =
            self.entries.iter().filter(|entry| entry.pinned.served == Served::ByWindows);
        let entry = entries.find(|entry| holds(&entry.region).is_some())?;
        // In one piece: there is one registration for each NIC.
        let part = entry.pinned.parts.get(usize::from(nic))?.as_ref()?;
        (span.len > 0).then_some((entry.region.id, part))
    }

    /// The region of a span of a READ that was accepted.
    fn entry(&self, span: &RegisteredSpan) -> Option<&Entry> {
        let retired = self.retired.iter().map(|retired| &retired.entry);
        let mut all = self.entries.iter().chain(retired);
        let entry = all.find(|entry| entry.region.id == span.region)?;
        let end = span.offset.checked_add(u64::from(span.len))?;
        (end <= entry.region.len).then_some(entry)
    }

    /// Whether a local span is registered.
    pub(super) fn contains(&self, span: &RegisteredSpan) -> bool {
        let there = self.entries.iter().any(|entry| entry.region.id == span.region);
        there && self.entry(span).is_some()
    }

    /// The NICs that the memory of these spans is nearest to.
    pub(super) fn near(&self, spans: &[RegisteredSpan]) -> NicSet {
        if !self.any_near {
            return NicSet::ALL;
        }
        let near = spans.iter().filter_map(|span| self.entry(span)).map(|entry| entry.pinned.near);
        near.fold(NicSet::ALL, NicSet::and)
    }

    /// The keys of the regions that peers may read.
    pub(super) fn served(&self) -> impl Iterator<Item = u32> {
        let served = self.entries.iter().filter(|entry| entry.pinned.served == Served::Whole);
        served.map(|entry| entry.region.rkey)
    }

    /// Gives local spans of a region keys that are none, which callers cannot do.
    #[cfg(test)]
    pub(super) fn spoil_keys(&mut self, region: RegionId) {
        let spoilt = self.entries.iter_mut().filter(|entry| entry.region.id == region);
        spoilt.flat_map(|entry| &mut entry.lkeys).for_each(|key| *key ^= 1);
    }

    /// A local span as a NIC names it; `None` where it is not registered, or lies in several chunks.
    pub(super) fn local(&self, span: &RegisteredSpan, nic: u8) -> Option<Segment> {
        let entry = self.entry(span)?;
        let chunk = chunk(span.offset, span.len, entry.pinned.layout.shift)?;
        let lkey = entry.lkeys.get(usize::from(nic) * entry.pinned.layout.chunks + chunk)?;
        let addr = entry.region.address + span.offset;
        Some(Segment { addr, length: span.len, lkey: *lkey })
    }

    /// The first part of a local span that lies in one chunk, at most `longest` bytes of it.
    pub(super) fn local_part(
        &self,
        span: &RegisteredSpan,
        nic: u8,
        longest: u64,
    ) -> Option<Segment> {
        let entry = self.entry(span)?;
        let room = super::keys::to_chunk_end(span.offset, entry.pinned.layout.shift).min(longest);
        let len = u32::try_from(room).unwrap_or(u32::MAX).min(span.len);
        self.local(&RegisteredSpan { len, ..*span }, nic)
    }

    /// What a peer that asks for the keys of a region is told. Without regions to show, or where none
    /// of them has this key for peers: that there is none.
    pub(super) fn answer(shown: Option<&Self>, key: u32, nics: &Nics) -> Vec<u8> {
        let served =
            |entry: &&Entry| entry.region.rkey == key && entry.pinned.served == Served::Whole;
        let entry = shown.and_then(|regions| regions.entries.iter().find(served));
        let head = AnswerHeader {
            key,
            shift: entry.map_or(Layout::SHIFT_MIN, |entry| entry.pinned.layout.shift),
            chunks: entry.map_or(0, |entry| u32::try_from(entry.pinned.layout.chunks).unwrap_or(0)),
            nics: u16::try_from(nics.devices.len()).unwrap_or(0),
            far: entry.map_or(0, |entry| entry.pinned.near.far()),
            address: entry.map_or(0, |entry| entry.region.address),
            len: entry.map_or(0, |entry| entry.region.len),
        };
        let rkey = |part: &Option<MemoryRegion>| part.as_ref().map_or(0, MemoryRegion::rkey);
        let keys = entry.into_iter().flat_map(|entry| entry.pinned.parts.iter().map(rkey));
        let mut bytes = bytemuck::bytes_of(&head).to_vec();
        keys.for_each(|key| bytes.extend_from_slice(&key.to_le_bytes()));
        bytes
    }
}
