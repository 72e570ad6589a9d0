//! The GPU's pool as the data thread has it. See the module above.

use std::collections::HashMap;
use std::sync::Arc;

use super::block::{Block, Blocks, Lies};
use super::note_loss;
use crate::cuda::{Bound, Context, CudaError, GpuPool, Staging, StagingCopy, StagingSlot, rows};
use crate::fabric::{Region, RegionId, RegisteredSpan, RemoteSpan};
use crate::layout::BlockId;
use crate::memory::Reservation;
use crate::node::residency::Residency;
use crate::peer::Settled;
use crate::runtime::door::Imported;
use crate::store::{Found, ResidentView, Store};
use crate::types::{Extent, PoolId, ResidentId, Scope};

/// How long a requester holds back while blocks wait for staging memory, milliseconds: a READ of some
/// blocks, and the end of its lease.
const PAUSE_FOR_STAGING_MS: u32 = 10;

/// Copies that are kept to be lent, before their table grows.
const LEAVING: usize = 512;

/// Calls of the driver that may begin copies of blocks in pieces to staging memory, and of others to be
/// lent, before the data thread looks at something else: some 2 microseconds each. A block in pieces needs
/// one for each tensor, or more.
const CALLS_AT_ONCE: usize = 128;

/// What a tier is made of.
#[derive(Debug)]
pub(super) struct TierParts {
    pub(super) context: Arc<Context>,
    pub(super) pool: Arc<GpuPool>,
    /// The pool's region, where every card reaches it.
    pub(super) direct: Option<Region>,
    /// Staging for blocks that arrive, and its region where they land there.
    pub(super) arriving: (Staging<Block>, Region),
    /// Staging for blocks that are lent.
    pub(super) leaving: (Staging<LeavingAt>, Region),
    /// Who evicts what is in the pool, and knows what is pinned and whether the GPU is lost.
    pub(super) residency: Arc<Residency>,
}

/// Memory for a block that arrives.
#[derive(Debug)]
pub(in crate::node) struct Arriving {
    block: Block,
    len: u32,
    /// Where it lands, where cards do not reach the pool; gone when its copy has begun.
    slot: Option<StagingSlot>,
    /// Whether the copy has begun.
    copying: bool,
}

impl Arriving {
    /// The checksum of the bytes, once settled.
    pub(in crate::node) fn checksum(&self) -> u64 {
        self.block.checksum().unwrap_or_default()
    }

    /// The extent of the pool, once settled; `None` while a copy still owns it.
    pub(in crate::node) fn into_reservation(self) -> Option<Reservation<GpuPool>> {
        self.block.into_reservation()
    }
}

/// Where a block is that is copied to staging memory: what its extent names.
type Source = (PoolId, u64);

const fn source_of(extent: &Extent) -> Source {
    (extent.pool, extent.offset)
}

/// Which copy to staging memory has ended: by its source, and its number. One that the driver refused
/// ends, too, when others of that extent may be under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeavingAt {
    source: Source,
    attempt: u64,
}

/// A copy of a resident in staging memory, to be lent.
#[derive(Debug)]
struct Leaving {
    resident: ResidentId,
    /// The number of the copy; 0 where it was refused.
    attempt: u64,
    copy: LeavingCopy,
}

#[derive(Debug)]
enum LeavingCopy {
    Running,
    Ready(StagingSlot),
    /// The driver refused it. The next lend tries again.
    Refused,
}

/// The tier. See the module's documentation.
#[derive(Debug)]
pub(in crate::node) struct Tier {
    parts: TierParts,
    /// What is on its way into the pool.
    blocks: Blocks,
    leaving: HashMap<Source, Leaving>,
    /// Calls that may be made before the next look.
    calls: usize,
    /// Kept for the next look at what is pinned.
    views: Vec<ResidentView>,
    /// Copies to staging memory so far.
    attempts: u64,
    /// Whether the last block that wanted a place to be lent from found none.
    exhausted: bool,
}

impl Tier {
    pub(super) fn new(parts: TierParts) -> Self {
        // Room for more than staging has places: what is lent allocates nothing.
        let leaving = HashMap::with_capacity(LEAVING);
        let (blocks, views) = (Blocks::default(), Vec::with_capacity(1));
        Self { parts, blocks, leaving, views, calls: CALLS_AT_ONCE, attempts: 0, exhausted: false }
    }

    pub(in crate::node) fn is_lost(&self) -> bool {
        self.parts.residency.device_is_lost()
    }

    /// Memory for a block that arrives; `None` where it shall land in a host pool. Each of `victims`
    /// may go for that.
    pub(in crate::node) fn reserve(&mut self, len: u32, victims: &mut usize) -> Option<Arriving> {
        if self.is_lost() {
            return None;
        }
        let slot = match self.parts.direct {
            Some(_) if !self.parts.arriving.0.fits(len.into()) => return None,
            Some(_) => None,
            None => Some(self.parts.arriving.0.take(len.into())?),
        };
        let TierParts { residency, pool, .. } = &self.parts;
        let memory = residency.reserve_on_device(pool, len, victims)?;
        let block = self.blocks.enter(memory.extent(), Lies::Pool(memory));
        Some(Arriving { block, len, slot, copying: false })
    }

    /// A block that arrives at a place in an engine's layout on this GPU, which cards reach; `None` where
    /// its bytes could not be verified.
    pub(in crate::node) fn arrive_in(
        &mut self,
        place: &Extent,
        lies: &Arc<Imported>,
    ) -> Option<Arriving> {
        if self.is_lost() || !self.parts.arriving.0.fits(place.len.into()) {
            return None;
        }
        let block = self.blocks.enter(*place, Lies::Layout(Arc::clone(lies)));
        Some(Arriving { block, len: place.len, slot: None, copying: false })
    }

    /// Where a READ into this memory lands.
    pub(in crate::node) fn span(&self, memory: &Arriving) -> RegisteredSpan {
        let len = memory.len;
        match (&memory.slot, &self.parts.direct) {
            (None, Some(direct)) => {
                let offset = memory.block.extent().offset;
                RegisteredSpan { region: direct.id, offset, len }
            }
            (Some(slot), _) => {
                let region = self.parts.arriving.1.id;
                RegisteredSpan { region, offset: slot.offset(), len }
            }
            // Its copy has begun: nothing lands there any more. No fabric has such a region.
            (None, None) => RegisteredSpan { region: RegionId(u16::MAX), offset: 0, len },
        }
    }

    /// Brings a block that has landed to its place, and its checksum to light, a step at a time.
    pub(in crate::node) fn settle(&mut self, memory: &mut Arriving) -> Settled {
        if memory.block.is_done() {
            return Settled::Now;
        }
        if self.is_lost() {
            return Settled::Never(Scope::Local);
        }
        if let Err(error) = self.advance(memory) {
            self.note(&error);
            return Settled::Never(Scope::Local);
        }
        if memory.block.is_done() { Settled::Now } else { Settled::Later }
    }

    /// Begins the copy of a block that has none, and takes note of those that have ended. An error is
    /// this block's, unless the GPU is lost.
    fn advance(&mut self, memory: &mut Arriving) -> Result<(), CudaError> {
        let context = Arc::clone(&self.parts.context);
        let bound = context.bind()?;
        if !memory.copying {
            match memory.block.layout() {
                Some(lies) => self.begin_in_layout(&bound, memory, &lies)?,
                None => self.begin(&bound, memory)?,
            }
        }
        if let Err(error) = self.poll_arriving(&bound) {
            // Whatever the driver calls it: no copy in flight will be known to have ended.
            self.lose(&error);
            return Err(error);
        }
        Ok(())
    }

    fn begin(&mut self, bound: &Bound<'_>, memory: &mut Arriving) -> Result<(), CudaError> {
        let extent = memory.block.extent();
        let staging = &mut self.parts.arriving.0;
        let (way, slot) = if self.parts.direct.is_some() {
            // It was written by a card; the copy out of it comes behind the flush.
            bound.flush_writes()?;
            (StagingCopy::FromDevice, staging.take(extent.len.into()))
        } else {
            let slot = memory.slot.take();
            if let Some(slot) = &slot {
                let sum = staging.mapping().checksum(slot.offset(), slot.len())?;
                memory.block.set_checksum(sum);
            }
            (StagingCopy::ToDevice, slot)
        };
        // Without a slot, and without room for a copy, it is tried again in the next round.
        let Some(slot) = slot else { return Ok(()) };
        match staging.begin(bound, way, (slot, extent.offset), memory.block.share()) {
            Ok(()) => memory.copying = true,
            Err((error, Some((slot, _block)))) if error.is_backpressure() => {
                memory.slot = (way == StagingCopy::ToDevice).then_some(slot);
            }
            Err((error, _)) => return Err(error),
        }
        Ok(())
    }

    /// Begins to bring a block together that landed in pieces, to be summed up.
    fn begin_in_layout(
        &mut self,
        bound: &Bound<'_>,
        memory: &mut Arriving,
        lies: &Imported,
    ) -> Result<(), CudaError> {
        let (extent, staging) = (memory.block.extent(), &mut self.parts.arriving.0);
        // Without a slot, and without room for the copies, it is tried again in the next round.
        if self.calls == 0 {
            return Ok(());
        }
        let Some(slot) = staging.take(extent.len.into()) else { return Ok(()) };
        // It was written by cards; the copies out of it come behind the flush.
        bound.flush_writes()?;
        let calls = &mut self.calls;
        let rows = rows((&lies.layout, &lies.memory), BlockId::of(&extent));
        let counted = rows.inspect(|_| *calls = calls.saturating_sub(1));
        match staging.gather(bound, slot, counted, memory.block.share()) {
            Ok(()) => memory.copying = true,
            Err((error, Some(_))) if error.is_backpressure() => {}
            Err((error, _)) => return Err(error),
        }
        Ok(())
    }

    /// Takes note of the copies that have ended.
    fn poll_arriving(&mut self, bound: &Bound<'_>) -> Result<(), CudaError> {
        let staging = &mut self.parts.arriving.0;
        let mapping = Arc::clone(staging.mapping());
        staging.poll(bound, |slot, block| {
            // What landed in a slot was summed up there.
            if block.checksum().is_none()
                && let Ok(sum) = mapping.checksum(slot.offset(), slot.len())
            {
                block.set_checksum(sum);
            }
            block.finish();
        })
    }

    /// The data thread has looked at other things: more copies may be begun. What copies own whose blocks
    /// were given up is let go when these have ended, even if no other block ever arrives.
    pub(in crate::node) fn look_again(&mut self) {
        self.calls = CALLS_AT_ONCE;
        if self.parts.arriving.0.in_flight() == 0 || self.is_lost() {
            return;
        }
        let context = Arc::clone(&self.parts.context);
        let polled = context.bind().and_then(|bound| self.poll_arriving(&bound));
        if let Err(error) = polled {
            self.lose(&error);
        }
    }

    /// Makes a resident of the pool ready to be lent; `false` while that takes its time. The caller has
    /// it pinned.
    pub(in crate::node) fn prepare(&mut self, found: &Found) -> bool {
        self.parts.direct.is_some() || self.stage(found, None)
    }

    /// The same for a resident in an engine's memory on this GPU that cards do not reach.
    pub(in crate::node) fn prepare_in_place(&mut self, found: &Found, lies: &Imported) -> bool {
        self.stage(found, Some(lies))
    }

    fn stage(&mut self, found: &Found, lies: Option<&Imported>) -> bool {
        if self.is_lost() {
            return true;
        }
        let extent = found.payload.extent;
        let leaving = self.leaving.get(&source_of(&extent)).filter(|it| it.resident == found.id);
        match leaving.map(|leaving| &leaving.copy) {
            Some(LeavingCopy::Ready(_)) => return true,
            Some(LeavingCopy::Running) => {}
            Some(LeavingCopy::Refused) | None => {
                if let Err(error) = self.begin_leaving(found.id, extent, lies) {
                    self.note(&error);
                    let (resident, copy) = (found.id, LeavingCopy::Refused);
                    self.leaving.insert(source_of(&extent), Leaving { resident, attempt: 0, copy });
                    return true;
                }
            }
        }
        if let Err(error) = self.poll_leaving() {
            self.lose(&error);
            return true;
        }
        // The copy of an earlier tenant of this place may be there still, and is none of this one.
        let leaving = self.leaving.get(&source_of(&extent)).filter(|it| it.resident == found.id);
        leaving.is_some_and(|leaving| matches!(leaving.copy, LeavingCopy::Ready(_)))
    }

    fn begin_leaving(
        &mut self,
        resident: ResidentId,
        extent: Extent,
        lies: Option<&Imported>,
    ) -> Result<(), CudaError> {
        if self.calls == 0 {
            return Ok(());
        }
        let bound = self.parts.context.bind()?;
        let staging = &mut self.parts.leaving.0;
        let slot = staging.take(extent.len.into()).or_else(|| {
            // What nobody can read any more gives its place.
            let store = &self.parts.residency.store;
            let views = &mut self.views;
            self.leaving.retain(|_, leaving| match leaving.copy {
                LeavingCopy::Running => true,
                LeavingCopy::Ready(_) => is_pinned(store, leaving.resident, views),
                LeavingCopy::Refused => false,
            });
            staging.take(extent.len.into())
        });
        self.exhausted = slot.is_none();
        let Some(slot) = slot else { return Ok(()) };
        self.attempts += 1;
        let (source, attempt) = (source_of(&extent), self.attempts);
        let owned = LeavingAt { source, attempt };
        let calls = &mut self.calls;
        let begun = match lies {
            None => {
                *calls -= 1;
                staging.begin(&bound, StagingCopy::FromDevice, (slot, extent.offset), owned)
            }
            Some(Imported { layout, memory }) => {
                let rows = rows((layout, memory), BlockId::of(&extent));
                let counted = rows.inspect(|_| *calls = calls.saturating_sub(1));
                staging.gather(&bound, slot, counted, owned)
            }
        };
        match begun {
            Ok(()) => {
                let copy = LeavingCopy::Running;
                self.leaving.insert(source, Leaving { resident, attempt, copy });
                Ok(())
            }
            Err((error, Some(_))) if error.is_backpressure() => Ok(()),
            Err((error, _)) => Err(error),
        }
    }

    fn poll_leaving(&mut self) -> Result<(), CudaError> {
        let bound = self.parts.context.bind()?;
        let leaving = &mut self.leaving;
        self.parts.leaving.0.poll(&bound, |slot, LeavingAt { source, attempt }| {
            let wanted = leaving.get_mut(&source).filter(|entry| entry.attempt == attempt);
            if let Some(entry) = wanted {
                entry.copy = LeavingCopy::Ready(slot);
            }
        })
    }

    /// Whether no copy of a resident is under way that is to be lent: its memory may be closed then. What
    /// a lost GPU's copies own is theirs for ever.
    pub(in crate::node) fn lets_go(&mut self, resident: ResidentId) -> bool {
        if self.is_lost() || self.parts.leaving.0.in_flight() == 0 {
            return true;
        }
        if let Err(error) = self.poll_leaving() {
            self.lose(&error);
            return true;
        }
        let mut running =
            self.leaving.values().filter(|it| matches!(it.copy, LeavingCopy::Running));
        !running.any(|leaving| leaving.resident == resident)
    }

    /// How long readers should hold back, milliseconds; 0 unless blocks wait for a place to be lent from.
    pub(in crate::node) fn pause_ms(&self) -> u32 {
        if self.exhausted && !self.is_lost() { PAUSE_FOR_STAGING_MS } else { 0 }
    }

    /// What a peer is told to read for an extent of the pool.
    pub(in crate::node) fn remote(&self, extent: &Extent) -> Option<RemoteSpan> {
        match &self.parts.direct {
            Some(direct) if !self.is_lost() => direct.remote(extent.offset, extent.len),
            _ => self.staged(extent),
        }
    }

    /// The same for a block that a copy is lent of.
    pub(in crate::node) fn staged(&self, extent: &Extent) -> Option<RemoteSpan> {
        if self.is_lost() {
            return None;
        }
        let LeavingCopy::Ready(slot) = &self.leaving.get(&source_of(extent))?.copy else {
            return None;
        };
        self.parts.leaving.1.remote(slot.offset(), extent.len)
    }

    /// A call was refused: of this block, or because the GPU is lost.
    fn note(&self, error: &CudaError) {
        note_loss(&self.parts.residency, error);
        tracing::warn!(%error, "a block could not be copied by the GPU");
    }

    fn lose(&self, error: &CudaError) {
        super::lose(&self.parts.residency, error);
    }
}

/// Whether somebody may still read this resident.
fn is_pinned(store: &Store, resident: ResidentId, views: &mut Vec<ResidentView>) -> bool {
    views.clear();
    store.list(resident.slot, 1, views);
    // Another resident in its slot that is pinned keeps the copy, too: that costs its place only.
    views.iter().any(|view| view.pins > 0)
}
