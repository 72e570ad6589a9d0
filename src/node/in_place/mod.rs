//! Blocks of local engines that peers read where they lie.
//!
//! A layout that an engine publishes in has a number of the node's own, which stands for it in extents
//! ([`PoolId::of_layout`]), and one that peers are told, which no other layout ever has. Its memory is
//! registered with the fabric when the first block is published, once for each allocation.
//!
//! What an engine published is taken back in one order, whether it asks for that or its connection has
//! ended, by whatever: blocks are withdrawn, which ends when no peer and no local reader can have them
//! any more; then the layout is forgotten and its regions are let go; then its number is free; and only
//! then the memory goes. Nothing of that needs the engine.
//!
//! Where no card reaches the memory because it is a GPU's, copies are lent of its blocks, out of the staging
//! memory of the node's own GPU ([`Stages`]), if that is the same one.
//!
//! Local readers, which cannot look into an engine's memory, get copies ([`copies`]).
//!
//! What an engine loads from peers may land in its layout, without a copy in a pool, and is published
//! there ([`landing`]).
//!
//! What lies on a GPU that is lost is taken back at once, as if its engine had asked for that, and nothing
//! is published there any more ([`losses`]).

mod copies;
mod engine;
mod landing;
mod losses;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::layout::BlockId;
use crate::memory::{Climb, GpuDirect, Rung};
use crate::node::options::NodeOptions;
use crate::protocol::door::DeviceUuid;
use crate::protocol::door::stat::{GpuWayRefused, InPlaceStat, LayoutStat};
use crate::runtime::door::Imported;
use crate::sync::{Mutex, lock};
use crate::types::{Extent, MemoryKind, PoolId};

pub(super) use copies::Copies;
pub use engine::{Engine, Opened};
pub(super) use losses::mind_losses;

/// A GPU that lends copies of blocks where cards do not reach them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stages {
    /// Which: blocks lie in its memory.
    pub(super) device: DeviceUuid,
    /// Longest block that finds a place, bytes.
    pub(super) block_bytes_max: u64,
}

/// A layout that blocks are published in.
#[derive(Debug)]
struct Open {
    engine: Weak<Engine>,
    imported: Arc<Imported>,
    /// The GPUs that its tensors lie on.
    gpus: BTreeSet<DeviceUuid>,
    /// Whether peers get copies of its blocks.
    staged: bool,
    /// Why no blocks from peers land in it; `None` where they do.
    not_landed: Option<&'static str>,
    /// How its memory came to be registered, where that is another driver's.
    climbs: Vec<Climb>,
    /// Residents that lie in it.
    published: AtomicU64,
    /// Blocks that are being taken back: no local reader comes any more.
    leaving: Mutex<BTreeSet<BlockId>>,
}

impl Open {
    fn lies_on(&self, gpus: &BTreeSet<DeviceUuid>) -> bool {
        !self.gpus.is_disjoint(gpus)
    }
}

/// All layouts of local engines that peers may read.
#[derive(Debug)]
pub(super) struct Layouts {
    open: Mutex<BTreeMap<PoolId, Arc<Open>>>,
    /// What peers are told of the next one.
    next: AtomicU32,
    /// The ways into other drivers' memory that may be taken.
    rungs: &'static [Rung],
    /// What lends copies where none of them can be had.
    stages: Option<Stages>,
    /// Why none can be read in place.
    never: Option<&'static str>,
    /// Why the last one that could not be opened was refused.
    refused: Mutex<Refused>,
    /// Blocks that engines loaded: those that landed in their memory, and those that were copied there.
    landed: AtomicU64,
    copied: AtomicU64,
}

/// Why a layout could not be opened.
#[derive(Debug, Default)]
struct Refused {
    why: String,
    climb: Climb,
}

impl Layouts {
    pub(super) fn new(options: &NodeOptions, stages: Option<Stages>) -> Self {
        // Where the node has a GPU of its own it was told which ways to take.
        let direct = options.gpu.map_or(GpuDirect::Auto, |gpu| gpu.direct);
        let never = "leases have keys of their own on this node (--lease-windows), and a block in \
                     pieces cannot have one";
        Self {
            open: Mutex::default(),
            next: AtomicU32::new(0),
            rungs: direct.direct(),
            stages,
            never: options.lease_windows.then_some(never),
            refused: Mutex::default(),
            landed: AtomicU64::new(0),
            copied: AtomicU64::new(0),
        }
    }

    /// Takes note of why a layout is not opened; a sentence for its engine.
    fn refuse(&self, why: &dyn Display, climb: Climb) -> String {
        let why = why.to_string();
        let sentence =
            format!("peers cannot read this layout in place ({why}): save its blocks instead");
        *lock(&self.refused) = Refused { why, climb };
        sentence
    }

    /// Why no layout at all is opened, as [`Self::refuse`] says it.
    fn never(&self) -> Result<(), String> {
        self.never.map_or(Ok(()), |why| Err(self.refuse(&why, Climb::default())))
    }

    pub(super) fn note_loaded(&self, landed: u64, copied: u64) {
        // Relaxed: whoever asks wants numbers that were true lately.
        self.landed.fetch_add(landed, Ordering::Relaxed);
        self.copied.fetch_add(copied, Ordering::Relaxed);
    }

    /// Why the node's own GPU can neither lend copies of a layout's blocks nor verify what lands there.
    fn not_staged(&self, imported: &Imported) -> Option<&'static str> {
        let Some(stages) = &self.stages else {
            return Some("this node has no GPU of its own (--gpu)");
        };
        if !imported.lies_in(|memory| memory.device() == Some(stages.device)) {
            Some("it is not all on the GPU that this node has (--gpu)")
        } else if u64::from(imported.layout.block_bytes()) > stages.block_bytes_max {
            Some("its blocks are longer than this node's staging memory (--gpu-staging)")
        } else {
            None
        }
    }

    /// Why blocks from peers do not land in a layout whose memory cards reach.
    fn not_landed(&self, imported: &Imported) -> Option<&'static str> {
        if imported.lies_in(|memory| memory.host().is_some()) {
            return None;
        }
        self.not_staged(imported)
    }

    /// A number for a layout; `None` where all are taken.
    fn number(&self, open: &Arc<Open>) -> Option<(PoolId, u32)> {
        let mut all = lock(&self.open);
        let mut numbers = (0..PoolId::LAYOUTS_MAX).map_while(PoolId::of_layout);
        let pool = numbers.find(|pool| !all.contains_key(pool))?;
        all.insert(pool, Arc::clone(open));
        // Relaxed: it only has to be another one each time.
        Some((pool, self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// Nothing of the last use of this number is left.
    fn free(&self, pool: PoolId) {
        lock(&self.open).remove(&pool);
    }

    fn find(&self, pool: PoolId) -> Option<Arc<Open>> {
        lock(&self.open).get(&pool).cloned()
    }

    /// Whether a resident is being taken back, or is about to be, for these GPUs are lost.
    pub(super) fn is_leaving(&self, extent: &Extent, lost: &BTreeSet<DeviceUuid>) -> bool {
        if extent.pool.kind() != MemoryKind::Engine {
            return false;
        }
        let block = BlockId::of(extent);
        self.find(extent.pool)
            .is_none_or(|open| open.lies_on(lost) || lock(&open.leaving).contains(&block))
    }

    /// What is told of them, where these GPUs are lost.
    pub(super) fn stat(&self, lost: &BTreeSet<DeviceUuid>) -> InPlaceStat {
        let layout = |(pool, open): (&PoolId, &Arc<Open>)| {
            let blocks = open.published.load(Ordering::Relaxed);
            let bytes = blocks * u64::from(open.imported.layout.block_bytes());
            let nics = open.climbs.iter().flat_map(Climb::ways);
            let refused = open.climbs.iter().flat_map(|climb| &climb.refused);
            let lost = open.lies_on(lost);
            let not_landed = if lost { Some("its GPU is lost") } else { open.not_landed };
            LayoutStat {
                pool: pool.0,
                way: if open.staged { "staging" } else { "direct" }.to_owned(),
                lost,
                blocks,
                bytes,
                not_landed: not_landed.unwrap_or_default().to_owned(),
                nics: nics.collect(),
                refused: refused.map(GpuWayRefused::from).collect(),
            }
        };
        let layouts: Vec<LayoutStat> = lock(&self.open).iter().map(layout).collect();
        let refused = lock(&self.refused);
        InPlaceStat {
            blocks: layouts.iter().map(|layout| layout.blocks).sum(),
            bytes: layouts.iter().map(|layout| layout.bytes).sum(),
            landed: self.landed.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
            layouts,
            not_opened: refused.why.clone(),
            refused: refused.climb.refused.iter().map(GpuWayRefused::from).collect(),
        }
    }
}
