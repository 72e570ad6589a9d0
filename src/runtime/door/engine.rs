//! A client's own memory: imported by it, saved from, loaded into.
//!
//! A save reserves memory, copies, and only then publishes; a load acquires, verifies, copies, and only
//! then answers, unless what it acquires has landed in the layout already. A client that is gone by the end of a save publishes nothing: nobody vouches for the
//! bytes any more. The copies themselves are in [`super::moving`]; what is published where it lies, in
//! [`super::in_place`].

use std::collections::BTreeSet;
use std::sync::Arc;

use super::moving::Batch;
use super::owned::Acquired;
use super::service::{DoorService, Imported, NotLanded, Publish, ReserveError, Reserved};
use super::session::{no_memory, refused};
use crate::layout::{AllocationId, BlockId, Layout, Tensor};
use crate::limits;
use crate::memory::{Direction, EngineMemory, ImportError, Mapping, Owner};
use crate::protocol::door::{
    AcquireOutcome, EngineEvent, EngineReply, HeldBlock, ImportRefusal, LayoutId, LoadOutcome,
    MovedBlock, Reply, SENTENCE_BYTES_MAX, Source,
};
use crate::types::{BlockHash, MemoryKind, Namespace, PoolId};

/// What a client imported. Dropping it tells what still runs that the client is gone.
#[derive(Debug)]
pub(super) struct Imports {
    memory: Vec<Arc<dyn EngineMemory>>,
    layouts: Vec<Arc<Imported>>,
    /// Allocations that are on their way in.
    coming: usize,
    owner: Arc<Owner>,
}

impl Drop for Imports {
    fn drop(&mut self) {
        self.owner.end();
    }
}

/// What blocks are named for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Save,
    Load,
    Publish,
}

impl Purpose {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Save => "save",
            Self::Load => "load",
            Self::Publish => "publication",
        }
    }
}

/// Blocks of one layout to move, checked.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) id: LayoutId,
    pub(super) imported: Arc<Imported>,
    pub(super) blocks: Vec<MovedBlock>,
    event: Option<EngineEvent>,
    owner: Arc<Owner>,
}

impl Imports {
    pub(super) fn new(owner: Owner) -> Self {
        let owner = Arc::new(owner);
        Self { memory: Vec::new(), layouts: Vec::new(), coming: 0, owner }
    }

    /// Makes room for an allocation, until [`Self::add_memory`]; for whom it is.
    pub(super) fn expect_memory(&mut self) -> Result<Arc<Owner>, Reply> {
        let limit = limits::ENGINE_ALLOCATIONS_MAX;
        if self.memory.len() + self.coming >= limit {
            let why = format!("a connection may import {limit} allocations");
            return Err(import_refused(ImportRefusal::TooMany, &why));
        }
        self.coming += 1;
        Ok(Arc::clone(&self.owner))
    }

    /// Takes an allocation that has come, or not.
    pub(super) fn add_memory(
        &mut self,
        imported: Result<Arc<dyn EngineMemory>, ImportError>,
    ) -> Reply {
        self.coming -= 1;
        match imported {
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
        purpose: Purpose,
    ) -> Result<Move, Reply> {
        let imported = self.layout(id, blocks.iter().map(|it| it.block))?;
        let mut seen = BTreeSet::new();
        if purpose != Purpose::Save
            && let Some(BlockId(twice)) =
                blocks.iter().map(|it| it.block).find(|block| !seen.insert(*block))
        {
            let purpose = purpose.as_str();
            return Err(refused(&format!("block {twice} is named twice in one {purpose}")));
        }
        let (imported, owner) = (Arc::clone(imported), Arc::clone(&self.owner));
        Ok(Move { id, imported, blocks, event: None, owner })
    }

    /// The layout of this number, where it has these blocks.
    pub(super) fn layout(
        &self,
        id: LayoutId,
        mut blocks: impl Iterator<Item = BlockId>,
    ) -> Result<&Arc<Imported>, Reply> {
        let Some(imported) = self.layouts.get(usize::from(id.0)) else {
            return Err(refused(&format!("layout {} was not imported by this connection", id.0)));
        };
        let count = imported.layout.blocks();
        match blocks.find(|block| block.0 >= count) {
            Some(BlockId(beyond)) => Err(refused(&format!(
                "block {beyond} is not in layout {}, which has {count}",
                id.0
            ))),
            None => Ok(imported),
        }
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

impl Move {
    /// As it is, but no copy begins before this event.
    pub(super) fn after(self, event: Option<EngineEvent>) -> Self {
        Self { event, ..self }
    }

    /// Whether the client is there still.
    pub(super) fn is_wanted(&self) -> bool {
        !self.owner.has_ended()
    }

    /// Saves the blocks: reserve, copy, sum up, publish.
    pub(super) async fn save<S: DoorService>(
        self,
        service: Arc<S>,
        namespace: Namespace,
        pulled: bool,
    ) -> Reply {
        let (reserved, sums) = match self.copy_out(&*service, &self.blocks).await {
            Ok(copied) => copied,
            Err(reply) => return reply,
        };
        if !self.is_wanted() {
            return refused("the client is gone");
        }
        let own = self.blocks.iter().zip(reserved).zip(sums);
        let own =
            own.map(|((moved, memory), checksum)| Publish { hash: moved.hash, checksum, memory });
        Reply::Published { outcomes: service.publish(&namespace, own.collect(), pulled) }
    }

    /// Copies some of the blocks into reserved memory; that, and their checksums.
    pub(super) async fn copy_out<S: DoorService>(
        &self,
        service: &S,
        blocks: &[MovedBlock],
    ) -> Result<(Vec<S::Reserved>, Vec<u64>), Reply> {
        let sizes = vec![self.imported.layout.block_bytes(); blocks.len()];
        let reserved = service.reserve(&sizes).map_err(|error| match error {
            ReserveError::Busy { pause_ms } => no_memory(pause_ms),
            ReserveError::Refused(sentence) => refused(&sentence),
        })?;
        let pairs = blocks.iter().zip(&reserved);
        let pairs = pairs.map(|(moved, memory)| (moved.block, memory.extent())).collect();
        let batch = Batch {
            pools: pools(service),
            imported: Arc::clone(&self.imported),
            direction: Direction::Save,
            event: self.event,
            pairs,
            expected: Vec::new(),
        };
        batch.run(reserved).await.map_err(|error| not_copied(&error))
    }

    /// Loads the blocks: acquire, verify, copy, let go. For a client that is named, what comes from peers
    /// lands in its layout itself, where there is a way.
    pub(super) async fn load<S: DoorService>(
        self,
        (service, client): (Arc<S>, Option<Arc<S::Client>>),
        namespace: Namespace,
        source: Source,
    ) -> Reply {
        let found = match self.find((&service, client), namespace, source).await {
            Ok(found) => found,
            Err(reply) => return reply,
        };
        let acquired = Acquired::new(Arc::clone(&service), found);
        if !self.is_wanted() {
            return refused("the client is gone");
        }
        let block_bytes = self.imported.layout.block_bytes();
        let copied = |outcome: &'_ AcquireOutcome| match outcome {
            AcquireOutcome::Ready(held) if is_there(held) => None,
            AcquireOutcome::Ready(held) if held.extent.len == block_bytes => Some(*held),
            _ => None,
        };
        let whole = self.blocks.iter().zip(acquired.outcomes());
        let whole = whole.filter_map(|(moved, outcome)| Some((moved, copied(outcome)?)));
        let whole: Vec<_> = whole.collect();
        let batch = Batch {
            pools: pools(&*service),
            imported: Arc::clone(&self.imported),
            direction: Direction::Load,
            event: None,
            pairs: whole.iter().map(|(moved, held)| (moved.block, held.extent)).collect(),
            expected: whole.iter().map(|(_, held)| held.checksum).collect(),
        };
        let (acquired, sums) = match batch.run(acquired).await {
            Ok(done) => done,
            Err(error) => return not_copied(&error),
        };
        let mut sums = sums.into_iter();
        let outcome = |outcome: &AcquireOutcome| match outcome {
            AcquireOutcome::Ready(held) => {
                let in_place = is_there(held);
                let is_good =
                    in_place || copied(outcome).is_some() && sums.next() == Some(held.checksum);
                match is_good {
                    true => LoadOutcome::Loaded { origin: held.origin, rank: held.rank, in_place },
                    false => LoadOutcome::Failed,
                }
            }
            AcquireOutcome::NotFound => LoadOutcome::NotFound,
            AcquireOutcome::Busy(reason) => LoadOutcome::Busy(*reason),
            AcquireOutcome::Failed => LoadOutcome::Failed,
        };
        let outcomes: Vec<_> = acquired.outcomes().iter().map(outcome).collect();
        let count = |wanted| {
            let is = |it: &&LoadOutcome| matches!(it, LoadOutcome::Loaded { in_place, .. } if *in_place == wanted);
            outcomes.iter().filter(is).count() as u64
        };
        service.note_loaded(count(true), count(false));
        Reply::Engine(EngineReply::Loaded { outcomes })
    }

    /// What is to be loaded, each block pinned once.
    async fn find<S: DoorService>(
        &self,
        (service, client): (&Arc<S>, Option<Arc<S::Client>>),
        namespace: Namespace,
        source: Source,
    ) -> Result<Vec<AcquireOutcome>, Reply> {
        if let Some(client) = client {
            let layout = (self.id, Arc::clone(&self.imported));
            let blocks = (namespace, self.blocks.clone());
            match Arc::clone(service).land(client, layout, blocks, source).await {
                Ok(found) => return Ok(found),
                Err(NotLanded::InUse(why)) => return Err(refused(&why)),
                Err(NotLanded::NoWay(why)) => {
                    tracing::debug!(%why, "blocks do not land in a layout");
                }
            }
            if !self.is_wanted() {
                return Err(refused("the client is gone"));
            }
        }
        let hashes: Vec<BlockHash> = self.blocks.iter().map(|moved| moved.hash).collect();
        Ok(Arc::clone(service).acquire(namespace, hashes, source).await)
    }
}

/// Whether a block that was acquired for a layout lies there already.
fn is_there(held: &HeldBlock) -> bool {
    held.extent.pool.kind() == MemoryKind::Engine
}

/// The pools' memory, by their numbers.
pub fn pools<S: DoorService>(service: &S) -> Vec<(PoolId, Arc<Mapping>)> {
    let ids = service.pools().into_iter().map(|pool| pool.id);
    ids.filter_map(|id| Some((id, service.pool(id)?))).collect()
}

fn not_copied(error: &dyn std::fmt::Display) -> Reply {
    tracing::warn!(%error, "an engine's blocks were not copied");
    refused(&format!("the blocks could not be copied: {error}"))
}
