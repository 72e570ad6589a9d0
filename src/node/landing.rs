//! The data thread's view of the node: memory for what arrives, spans of what is lent.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::gpu::{Arriving, Tier};
use super::residency::{Admitted, Patience, Residency};
use crate::fabric::{Region, RegionId, RegisteredSpan};
use crate::layout::BlockId;
use crate::limits;
use crate::memory::Reservation;
use crate::peer::{Landing, LentLayout, Pressure, Published, Settled};
use crate::protocol::Place;
use crate::runtime::in_place::{InPlace, ServedLayout};
use crate::store::{Evicted, Found, Payload};
use crate::types::{BlockKey, EvictionRank, Extent, Load, MemoryKind, PoolId, ResidentId, Scope};

/// A pool's registration with the fabric.
#[derive(Debug, Clone, Copy)]
pub(super) struct PoolRegion {
    pub(super) pool: PoolId,
    pub(super) region: Region,
}

/// Memory for a block that arrives.
#[derive(Debug)]
pub(super) enum Memory {
    /// In a host pool.
    Host(Reservation),
    /// In the GPU's.
    Gpu(Arriving),
    /// A place in an engine's layout, which no one else uses; in a GPU's memory it is copied out of there
    /// to be verified.
    Layout(Extent, Option<Arriving>),
}

/// Implements [`Landing`] on the node's memory and residents.
#[derive(Debug)]
pub(super) struct NodeLanding {
    pub(super) residency: Arc<Residency>,
    pub(super) regions: Vec<PoolRegion>,
    pub(super) tier: Option<Tier>,
    /// Host memory of one batch, kept for the next one.
    pub(super) reserved: Vec<Reservation>,
    /// Layouts of engines that blocks are published in.
    pub(super) layouts: BTreeMap<PoolId, ServedLayout>,
    /// Most leases, and what of the memory, and of them, they may take, percent.
    pub(super) marks: (u64, (u8, u8)),
    /// Whether half of what engines open comes on top of each requester's quota.
    pub(super) quota_grows: bool,
}

impl NodeLanding {
    /// When peers hold back: by the memory of the node's own, and what engines have opened.
    pub(super) fn marks(&self) -> Pressure {
        let own = MemoryKind::ALL.map(|kind| self.residency.usage(kind).bytes);
        let own = own.into_iter().fold(0, u64::saturating_add);
        let (leases, marks) = self.marks;
        Pressure::new((own, self.opened()), leases, marks)
    }

    /// Bytes that engines have opened to peers.
    fn opened(&self) -> u64 {
        self.layouts.values().map(|layout| layout.bytes).fold(0, u64::saturating_add)
    }

    fn region(&self, pool: PoolId) -> Option<&Region> {
        self.regions.iter().find(|region| region.pool == pool).map(|found| &found.region)
    }
}

impl Landing for NodeLanding {
    type Memory = Memory;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Memory>) {
        let mut rest = sizes;
        let mut victims = limits::INLINE_VICTIMS_MAX;
        while let (Some(tier), Some((first, others))) = (&mut self.tier, rest.split_first())
            && let Some(memory) = tier.reserve(*first, &mut victims)
        {
            out.push(Memory::Gpu(memory));
            rest = others;
        }
        // What the GPU or its staging has no room for lands in host memory.
        self.residency.reserve_some(rest, &mut self.reserved, Patience::Goes);
        out.extend(self.reserved.drain(..).map(Memory::Host));
    }

    fn land_at(&mut self, place: &Extent) -> Option<Memory> {
        let layout = self.layouts.get(&place.pool).filter(|layout| !layout.is_staged())?;
        let gathered = match &mut self.tier {
            _ if layout.in_host_memory => None,
            Some(tier) => Some(tier.arrive_in(place, &layout.lies)?),
            None => return None,
        };
        Some(Memory::Layout(*place, gathered))
    }

    fn spans(&self, memory: &Memory) -> impl Iterator<Item = RegisteredSpan> {
        let mut pieces = None;
        let span = match (memory, &self.tier) {
            (Memory::Layout(place, _), _) => {
                let layout = self.layouts.get(&place.pool);
                pieces = layout.map(|layout| layout.spans(BlockId::of(place)));
                None
            }
            (Memory::Gpu(memory), Some(tier)) => Some(tier.span(memory)),
            (Memory::Gpu(_), None) => None,
            (Memory::Host(memory), _) => {
                let Extent { pool, offset, len } = memory.extent();
                // Every pool is registered before the data thread starts; a region that does not
                // exist is refused by the fabric as a local fault.
                let region = self.region(pool).map_or(RegionId(u16::MAX), |region| region.id);
                Some(RegisteredSpan { region, offset, len })
            }
        };
        span.into_iter().chain(pieces.into_iter().flatten())
    }

    fn settle(&mut self, memory: &mut Memory) -> Settled {
        match (memory, &mut self.tier) {
            (Memory::Host(_) | Memory::Layout(_, None), _) => Settled::Now,
            (Memory::Gpu(memory) | Memory::Layout(_, Some(memory)), Some(tier)) => {
                tier.settle(memory)
            }
            (Memory::Gpu(_) | Memory::Layout(_, Some(_)), None) => Settled::Never(Scope::Local),
        }
    }

    fn checksum(&self, memory: &Memory) -> u64 {
        match memory {
            Memory::Host(memory) => memory.pool().checksum(memory.extent()).unwrap_or_default(),
            Memory::Gpu(memory) | Memory::Layout(_, Some(memory)) => memory.checksum(),
            Memory::Layout(place, None) => {
                let lies = self.layouts.get(&place.pool).map(|layout| &layout.lies);
                lies.and_then(|lies| lies.checksum(BlockId::of(place))).unwrap_or_default()
            }
        }
    }

    fn publish(
        &mut self,
        key: BlockKey,
        memory: Memory,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published {
        let lost = self.tier.as_ref().is_some_and(Tier::is_lost);
        let admitted = match memory {
            Memory::Gpu(_) | Memory::Layout(_, Some(_)) if lost => Admitted::Full,
            Memory::Layout(extent, _) => {
                let payload = Payload { extent, checksum };
                self.residency.admit_fetched_in_place(key, payload, rank)
            }
            Memory::Host(memory) => self.residency.admit_fetched(key, memory, checksum, rank),
            Memory::Gpu(memory) => match memory.into_reservation() {
                Some(memory) => self.residency.admit_fetched(key, memory, checksum, rank),
                None => Admitted::Full,
            },
        };
        match admitted {
            Admitted::Stored(found) => Published::Stored(found),
            Admitted::AlreadyResident(found) => Published::AlreadyResident(found),
            Admitted::Full => Published::Full,
        }
    }

    fn look_again(&mut self) {
        if let Some(tier) = &mut self.tier {
            tier.look_again();
        }
    }

    fn prepare(&mut self, found: &Found) -> bool {
        let Some(tier) = &mut self.tier else { return true };
        let pool = found.payload.extent.pool;
        if pool == PoolId::GPU {
            return tier.prepare(found);
        }
        let staged = self.layouts.get(&pool).filter(|layout| layout.is_staged());
        staged.is_none_or(|layout| tier.prepare_in_place(found, &layout.lies))
    }

    fn remote(&self, extent: &Extent) -> Option<Place> {
        if extent.pool.kind() == MemoryKind::Engine {
            let (layout, block) = (self.layouts.get(&extent.pool)?, extent.offset);
            if layout.is_staged() {
                return self.tier.as_ref()?.staged(extent).map(Place::Span);
            }
            let block = BlockId(u32::try_from(block).ok()?);
            return Some(Place::Block { layout: layout.number, block, len: extent.len });
        }
        let span = match &self.tier {
            Some(tier) if extent.pool == PoolId::GPU => tier.remote(extent),
            _ => self.region(extent.pool)?.remote(extent.offset, extent.len),
        };
        span.map(Place::Span)
    }

    fn layout(&self, number: u32) -> Option<LentLayout<'_>> {
        let layout = self.layouts.values().find(|layout| layout.number == number)?;
        let ServedLayout { blocks, regions, tensors, .. } = layout;
        Some(LentLayout { blocks: *blocks, regions, tensors })
    }

    fn lets_go(&mut self, resident: ResidentId) -> bool {
        self.tier.as_mut().is_none_or(|tier| tier.lets_go(resident))
    }

    fn removed(&mut self, removed: &Evicted) {
        self.residency.tell(removed.key, false);
    }

    fn pause_ms(&self) -> u32 {
        let staging = self.tier.as_ref().map_or(0, Tier::pause_ms);
        self.residency.pause_ms().max(staging)
    }

    fn note_load(&self, load: Load) {
        self.residency.note_load(load);
    }
}

impl InPlace for NodeLanding {
    fn serve(&mut self, layout: ServedLayout) {
        self.layouts.insert(layout.pool, layout);
    }

    fn forget(&mut self, pool: PoolId) {
        self.layouts.remove(&pool);
    }

    fn lendable(&self) -> Option<(Pressure, u64)> {
        let in_place_quota = if self.quota_grows { self.opened() / 2 } else { 0 };
        Some((self.marks(), in_place_quota))
    }
}
