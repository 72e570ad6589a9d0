//! A client's own memory: imported by it, saved from, loaded into.
//!
//! A save reserves memory, copies, and only then publishes; a load acquires, verifies, copies, and only
//! then answers. Copies run on threads that may wait. Each holds the memory that it touches, the
//! reservations that it writes and the pins that it reads, so that the end of a connection in the
//! middle of a copy, for whatever reason, takes nothing away from under it. A client that is gone by
//! the end of a save publishes nothing: nobody vouches for the bytes any more.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::owned::Acquired;
use super::service::{DoorService, Publish, ReserveError, Reserved};
use super::session::refused;
use crate::layout::{AllocationId, BlockId, Layout, Tensor};
use crate::limits;
use crate::memory::{CopyError, Direction, EngineMemory, Mapping, StridedCopy};
use crate::protocol::door::{
    AcquireOutcome, EngineEvent, EngineReply, ImportRefusal, LayoutId, LoadOutcome, MemorySource,
    MovedBlock, Reply, SENTENCE_BYTES_MAX, Source,
};
use crate::types::{BlockHash, Extent, Namespace, PoolId};

/// A layout and all memory that it may lie in.
#[derive(Debug)]
pub(super) struct Imported {
    layout: Layout,
    memory: Vec<Arc<dyn EngineMemory>>,
}

/// What a client imported. Dropping it tells what still runs that the client is gone.
#[derive(Debug)]
pub(super) struct Imports {
    memory: Vec<Arc<dyn EngineMemory>>,
    layouts: Vec<Arc<Imported>>,
    alive: Arc<AtomicBool>,
}

impl Drop for Imports {
    fn drop(&mut self) {
        // Relaxed: advice, which a copy that is almost over may miss.
        self.alive.store(false, Ordering::Relaxed);
    }
}

/// Blocks of one layout to move, checked.
#[derive(Debug)]
pub(super) struct Move {
    imported: Arc<Imported>,
    blocks: Vec<MovedBlock>,
    event: Option<EngineEvent>,
    alive: Arc<AtomicBool>,
}

impl Imports {
    pub(super) fn new() -> Self {
        Self { memory: Vec::new(), layouts: Vec::new(), alive: Arc::new(AtomicBool::new(true)) }
    }

    /// Takes an allocation.
    pub(super) fn add_memory<S: DoorService>(
        &mut self,
        service: &S,
        (source, bytes): (&MemorySource, u64),
        file: Option<OwnedFd>,
    ) -> Reply {
        let limit = limits::ENGINE_ALLOCATIONS_MAX;
        if self.memory.len() >= limit {
            let why = format!("a connection may import {limit} allocations");
            return import_refused(ImportRefusal::TooMany, &why);
        }
        match service.import(source, bytes, file) {
            Ok(memory) => {
                let allocation = AllocationId(u16::try_from(self.memory.len()).unwrap_or(u16::MAX));
                self.memory.push(memory);
                Reply::Engine(EngineReply::MemoryImported { allocation })
            }
            Err(error) => import_refused(error.reason(), &error.to_string()),
        }
    }

    /// Takes a layout of the allocations.
    pub(super) fn add_layout(&mut self, blocks: u32, tensors: Vec<Tensor>) -> Reply {
        let limit = limits::ENGINE_LAYOUTS_MAX;
        if self.layouts.len() >= limit {
            let why = format!("a connection may import {limit} layouts");
            return import_refused(ImportRefusal::TooMany, &why);
        }
        let bytes_of = |id: AllocationId| self.memory.get(usize::from(id.0)).map(|it| it.bytes());
        let layout = match Layout::new(tensors, blocks, bytes_of) {
            Ok(layout) => layout,
            Err(error) => return import_refused(ImportRefusal::Layout, &error.to_string()),
        };
        if let Some(why) = self.layouts.iter().find_map(|other| collision(&layout, &other.layout)) {
            return import_refused(ImportRefusal::AlreadyImported, &why);
        }
        let id = LayoutId(u16::try_from(self.layouts.len()).unwrap_or(u16::MAX));
        let block_bytes = layout.block_bytes();
        self.layouts.push(Arc::new(Imported { layout, memory: self.memory.clone() }));
        Reply::Engine(EngineReply::LayoutImported { layout: id, block_bytes })
    }

    /// Checks what is to be moved.
    pub(super) fn moving(
        &self,
        id: LayoutId,
        blocks: Vec<MovedBlock>,
        direction: Direction,
    ) -> Result<Move, Reply> {
        let Some(imported) = self.layouts.get(usize::from(id.0)) else {
            return Err(refused(&format!("layout {} was not imported by this connection", id.0)));
        };
        let count = imported.layout.blocks();
        if let Some(BlockId(beyond)) =
            blocks.iter().map(|it| it.block).find(|block| block.0 >= count)
        {
            let why = format!("block {beyond} is not in layout {}, which has {count}", id.0);
            return Err(refused(&why));
        }
        let mut seen = BTreeSet::new();
        if let (Direction::Load, Some(BlockId(twice))) =
            (direction, blocks.iter().map(|it| it.block).find(|block| !seen.insert(*block)))
        {
            return Err(refused(&format!("block {twice} is named twice in one load")));
        }
        let (imported, alive) = (Arc::clone(imported), Arc::clone(&self.alive));
        Ok(Move { imported, blocks, event: None, alive })
    }
}

/// How two layouts of one client share bytes, by the ranges of their tensors.
fn collision(one: &Layout, other: &Layout) -> Option<String> {
    one.ranges().find_map(|(allocation, range)| {
        let (_, hit) = other.ranges().find(|(id, hit)| {
            *id == allocation && hit.start < range.end && range.start < hit.end
        })?;
        Some(format!(
            "bytes {range:?} of allocation {} meet bytes {hit:?}, which belong to a layout already",
            allocation.0
        ))
    })
}

fn import_refused(reason: ImportRefusal, sentence: &str) -> Reply {
    let end = sentence.floor_char_boundary(SENTENCE_BYTES_MAX);
    let sentence = sentence.get(..end).unwrap_or_default().to_owned();
    Reply::Engine(EngineReply::ImportRefused { reason, sentence })
}

/// The copies of a batch, by what they go between.
#[derive(Debug, Default)]
struct Copies(BTreeMap<(AllocationId, PoolId), Vec<StridedCopy>>);

impl Copies {
    fn add(&mut self, layout: &Layout, block: BlockId, extent: Extent) {
        for rows in layout.rows(block) {
            self.0.entry((rows.allocation, extent.pool)).or_default().push(StridedCopy {
                memory_offset: rows.offset,
                memory_pitch: rows.pitch,
                pool_offset: extent.offset + rows.logical,
                pool_pitch: rows.logical_pitch,
                width: rows.width,
                rows: rows.count,
            });
        }
    }

    /// The memories that take part.
    fn memories<'a>(
        &'a self,
        all: &'a [Arc<dyn EngineMemory>],
    ) -> impl Iterator<Item = &'a Arc<dyn EngineMemory>> {
        self.0.keys().filter_map(|(allocation, _)| all.get(usize::from(allocation.0)))
    }

    /// Carries them out. When this returns none is running, whatever it answers.
    fn run<S: DoorService>(
        &self,
        service: &S,
        memory: &[Arc<dyn EngineMemory>],
        direction: Direction,
    ) -> Result<(), CopyError> {
        let gone =
            |what| CopyError::Device { call: "looking up", error: format!("no such {what}") };
        let mut begun = Vec::new();
        let mut outcome = Ok(());
        for ((allocation, pool), copies) in &self.0 {
            let memory = memory.get(usize::from(allocation.0)).ok_or_else(|| gone("allocation"));
            let pool: Result<Arc<Mapping>, _> = service.pool(*pool).ok_or_else(|| gone("pool"));
            outcome = memory.and_then(|memory| {
                begun.push(memory);
                memory.start(direction, copies, &pool?)
            });
            if outcome.is_err() {
                break;
            }
        }
        for memory in begun {
            outcome = memory.finish().and(outcome);
        }
        outcome
    }
}

impl Move {
    /// As it is, but no copy begins before this event.
    pub(super) fn after(self, event: Option<EngineEvent>) -> Self {
        Self { event, ..self }
    }

    fn is_wanted(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// Saves the blocks: reserve, copy, sum up, publish.
    pub(super) async fn save<S: DoorService>(
        self,
        service: Arc<S>,
        namespace: Namespace,
        pulled: bool,
    ) -> Reply {
        let sizes = vec![self.imported.layout.block_bytes(); self.blocks.len()];
        let reserved = match service.reserve(&sizes) {
            Ok(reserved) => reserved,
            Err(ReserveError::Busy { pause_ms }) => return Reply::Busy { pause_ms },
            Err(ReserveError::Refused(sentence)) => return refused(&sentence),
        };
        let copied = tokio::task::spawn_blocking(move || {
            let published = self.copy_out(&*service, reserved)?;
            // A client that is gone does not vouch for the bytes.
            let wanted = if self.is_wanted() { published } else { Vec::new() };
            Ok::<_, CopyError>(service.publish(&namespace, wanted, pulled))
        });
        match copied.await {
            Ok(Ok(outcomes)) => Reply::Published { outcomes },
            Ok(Err(error)) => not_copied(&error),
            Err(died) => not_copied(&died),
        }
    }

    fn copy_out<S: DoorService>(
        &self,
        service: &S,
        reserved: Vec<S::Reserved>,
    ) -> Result<Vec<Publish<S::Reserved>>, CopyError> {
        let mut copies = Copies::default();
        for (moved, memory) in self.blocks.iter().zip(&reserved) {
            copies.add(&self.imported.layout, moved.block, memory.extent());
        }
        let memory = &self.imported.memory;
        if let Some(event) = &self.event {
            copies.memories(memory).try_for_each(|memory| memory.wait_for(event))?;
        }
        copies.run(service, memory, Direction::Save)?;
        let mut published = Vec::with_capacity(reserved.len());
        for (moved, memory) in self.blocks.iter().zip(reserved) {
            let checksum = checksum(service, memory.extent())?;
            published.push(Publish { hash: moved.hash, checksum, memory });
        }
        Ok(published)
    }

    /// Loads the blocks: acquire, verify, copy, let go.
    pub(super) async fn load<S: DoorService>(
        self,
        service: Arc<S>,
        namespace: Namespace,
        source: Source,
    ) -> Reply {
        let hashes: Vec<BlockHash> = self.blocks.iter().map(|moved| moved.hash).collect();
        let outcomes = Arc::clone(&service).acquire(namespace, hashes, source).await;
        let acquired = Acquired::new(Arc::clone(&service), outcomes);
        let copied =
            tokio::task::spawn_blocking(move || self.copy_in(&*service, acquired.outcomes()));
        match copied.await {
            Ok(Ok(outcomes)) => Reply::Engine(EngineReply::Loaded { outcomes }),
            Ok(Err(error)) => not_copied(&error),
            Err(died) => not_copied(&died),
        }
    }

    /// Copies what is ready and whole into the layout. The caller holds the pins.
    fn copy_in<S: DoorService>(
        &self,
        service: &S,
        acquired: &[AcquireOutcome],
    ) -> Result<Vec<LoadOutcome>, CopyError> {
        let mut copies = Copies::default();
        let mut outcomes = Vec::with_capacity(acquired.len());
        for (moved, outcome) in self.blocks.iter().zip(acquired) {
            outcomes.push(match outcome {
                AcquireOutcome::Ready(held) => {
                    let whole = held.extent.len == self.imported.layout.block_bytes()
                        && checksum(service, held.extent)? == held.checksum;
                    if whole {
                        copies.add(&self.imported.layout, moved.block, held.extent);
                        LoadOutcome::Loaded { origin: held.origin, rank: held.rank }
                    } else {
                        tracing::warn!(hash = %moved.hash, "a block is not what its layout takes");
                        LoadOutcome::Failed
                    }
                }
                AcquireOutcome::NotFound => LoadOutcome::NotFound,
                AcquireOutcome::Busy => LoadOutcome::Busy,
                AcquireOutcome::Failed => LoadOutcome::Failed,
            });
        }
        if self.is_wanted() {
            copies.run(service, &self.imported.memory, Direction::Load)?;
        }
        Ok(outcomes)
    }
}

/// The checksum of what lies in an extent.
fn checksum<S: DoorService>(service: &S, extent: Extent) -> Result<u64, CopyError> {
    let Extent { pool, offset, len } = extent;
    let gone = || CopyError::Device { call: "looking up", error: "no such pool".to_owned() };
    Ok(service.pool(pool).ok_or_else(gone)?.checksum(offset, len.into())?)
}

fn not_copied(error: &dyn std::fmt::Display) -> Reply {
    refused(&format!("the blocks could not be copied: {error}; look at the node's log and doctor"))
}
