//! What local engines ask of the node, through the door.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Inner;
use super::in_place::{Engine, Opened};
use super::residency::{Admitted, Reserved};
use crate::event::{BusyReason, Event};
use crate::layout::BlockId;
use crate::memory::{EngineMemory, ImportError, Mapping, Owner};
use crate::peer::{FetchOutcome, Wish};
use crate::policy::Origin;
use crate::protocol::door::stat::StatReport;
use crate::protocol::door::{
    AcquireOutcome, BlockOrigin, EvictedBlock, HeldBlock, LayoutId, ListEntry, MemorySource,
    MovedBlock, PublishOutcome, Source,
};
use crate::runtime::door::{
    self, DoorService, Imported, InPlace, NotLanded, Page, PoolHandle, Publish, ReserveError,
};
use crate::store::{Found, PinError, ResidentView};
use crate::types::{
    BlockHash, BlockKey, Extent, Namespace, NamespaceId, NodeId, PoolId, ResidentCause, ResidentId,
};

/// Names of namespaces that local engines have told, so that people can read them. Bounded: names
/// beyond it are shown by their numbers.
const NAMES_MAX: usize = 4096;

/// How often blocks that were on a lost GPU are looked for elsewhere. More than once, because a GPU may be
/// lost while that is under way.
const LOOKS_ELSEWHERE: usize = 2;

impl door::Reserved for Reserved {
    fn extent(&self) -> Extent {
        self.memory.extent()
    }
}

impl Inner {
    pub(super) fn learn(&self, namespace: &Namespace) -> NamespaceId {
        let id = namespace.id();
        let mut names = crate::sync::lock(&self.names);
        if names.len() < NAMES_MAX {
            names.insert(id, *namespace);
        }
        id
    }

    fn publish_one(&self, key: BlockKey, block: Publish<Reserved>, pulled: bool) -> PublishOutcome {
        let Reserved { memory, stored_before } = block.memory;
        let origin = Origin::Saved { owners: None };
        let admitted = self.residency.admit(key, memory, block.checksum, origin);
        self.outcome(&key, &admitted, (stored_before, pulled))
    }

    /// What an engine is told of a block that it saved or published; one that was here is touched as
    /// the reason why it was says.
    pub(super) fn outcome(
        &self,
        key: &BlockKey,
        admitted: &Admitted,
        (stored_before, pulled): (u64, bool),
    ) -> PublishOutcome {
        match admitted {
            Admitted::Stored(_) => PublishOutcome::Stored,
            Admitted::Full => PublishOutcome::Refused,
            Admitted::AlreadyResident(found) => {
                let cause = if pulled {
                    ResidentCause::PeerFetch
                } else if self.residency.came_after(found, stored_before) {
                    ResidentCause::DuplicateSave
                } else {
                    ResidentCause::PartialHit
                };
                self.residency.store.already_resident(key, cause);
                PublishOutcome::AlreadyResident(cause)
            }
        }
    }

    /// One outcome per hash: what is here, and what was fetched, each pinned once.
    pub(super) async fn get(self: &Arc<Self>, wish: &Wish, source: Source) -> Vec<AcquireOutcome> {
        let mut outcomes = self.look(wish, source).await;
        for _ in 0..LOOKS_ELSEWHERE {
            let lost: Vec<(usize, ResidentId)> =
                (0..).zip(&outcomes).filter_map(|(at, it)| Some((at, lost(it)?))).collect();
            if lost.is_empty() {
                return outcomes;
            }
            let (positions, holds): (Vec<_>, Vec<_>) = lost.into_iter().unzip();
            self.residency.forget_lost(&holds);
            let again = self.look(&wish.part(&positions), source).await;
            for (at, outcome) in positions.into_iter().zip(again) {
                if let Some(slot) = outcomes.get_mut(at) {
                    *slot = outcome;
                }
            }
        }
        // Whoever reads such a block keeps it here, and another one of its name out, as long as that takes.
        for outcome in &mut outcomes {
            if let Some(hold) = lost(outcome) {
                self.residency.store.unpin_batch(&[hold]);
                *outcome = AcquireOutcome::Busy(BusyReason::Pins);
            }
        }
        outcomes
    }

    /// One outcome per hash: what is here, and what was fetched. Blocks in the GPU's memory have a copy in
    /// host memory, unless that GPU is lost ([`lost`]); those in engines' memory, too, but for what lies at
    /// the place that was wished for.
    async fn look(self: &Arc<Self>, wish: &Wish, source: Source) -> Vec<AcquireOutcome> {
        let Wish { namespace, hashes, places } = wish;
        let namespace = *namespace;
        let keys: Vec<_> = hashes.iter().map(|&hash| BlockKey { namespace, hash }).collect();
        let mut found = Vec::with_capacity(keys.len());
        self.residency.store.hit_batch(&keys, true, &mut found);
        self.forget_hits(&mut found);
        self.forget_leaving(&mut found);
        let misses: Vec<usize> = (0..)
            .zip(&found)
            .filter_map(|(at, hit)| (*hit == Err(PinError::NotFound)).then_some(at))
            .collect();
        let sink = &self.residency.sink;
        sink.emit(Event::LocalHits { blocks: (found.len() - misses.len()) as u64 });
        sink.emit(Event::LocalMisses { blocks: misses.len() as u64 });
        let mut outcomes: Vec<_> = found
            .iter()
            .map(|hit| match hit {
                Ok(found) => held(BlockOrigin::Local, found),
                Err(PinError::NotFound) => AcquireOutcome::NotFound,
                Err(PinError::TooManyPins) => AcquireOutcome::Busy(BusyReason::Pins),
            })
            .collect();
        if source != Source::Here && !misses.is_empty() {
            let fetched = self.fetcher.fetch(&wish.part(&misses), source).await;
            for (at, got) in misses.iter().zip(fetched) {
                if let Some(outcome) = outcomes.get_mut(*at) {
                    *outcome = match got {
                        FetchOutcome::Ready { found, fetched: true } => {
                            held(BlockOrigin::Fetched, &found)
                        }
                        FetchOutcome::Ready { found, fetched: false } => {
                            held(BlockOrigin::Local, &found)
                        }
                        FetchOutcome::NotFound => AcquireOutcome::NotFound,
                        FetchOutcome::Busy(reason) => AcquireOutcome::Busy(reason),
                        FetchOutcome::Failed(_) => AcquireOutcome::Failed,
                    };
                }
            }
        }
        if let Some((_, shadows)) = &self.gpu {
            Arc::clone(shadows).in_host_memory(&self.residency, &mut outcomes).await;
        }
        self.copied_to_host(&mut outcomes, places).await;
        outcomes
    }

    /// Hits on a GPU that is lost are none, unless the block has a copy in host memory.
    fn forget_hits(&self, hits: &mut [Result<Found, PinError>]) {
        let Some((_, shadows)) = &self.gpu else { return };
        if !self.residency.device_is_lost() {
            return;
        }
        let mut holds = Vec::new();
        for hit in hits {
            if let Ok(found) = hit
                && found.payload.extent.pool == PoolId::GPU
                && !shadows.has(found.id)
            {
                holds.push(found.id);
                *hit = Err(PinError::NotFound);
            }
        }
        self.residency.forget_lost(&holds);
    }

    /// Hits on blocks that their engine takes back, or that lie on a lost GPU of its, are none.
    fn forget_leaving(&self, hits: &mut [Result<Found, PinError>]) {
        let lost = self.residency.lost_gpus();
        for hit in hits {
            if let Ok(found) = hit
                && self.in_place.is_leaving(&found.payload.extent, &lost)
            {
                self.residency.store.unpin_batch(&[found.id]);
                *hit = Err(PinError::NotFound);
            }
        }
    }
}

/// The hold on a block that has no place in host memory: its GPU is lost.
fn lost(outcome: &AcquireOutcome) -> Option<ResidentId> {
    match outcome {
        AcquireOutcome::Ready(held) if held.extent.pool == PoolId::GPU => Some(held.hold),
        _ => None,
    }
}

fn held(origin: BlockOrigin, found: &Found) -> AcquireOutcome {
    AcquireOutcome::Ready(HeldBlock {
        origin,
        rank: found.rank,
        extent: found.payload.extent,
        checksum: found.payload.checksum,
        hold: found.id,
    })
}

impl DoorService for Inner {
    type Reserved = Reserved;
    type Client = Engine;
    type Opened = Opened;

    fn pools(&self) -> Vec<PoolHandle<'_>> {
        let handle = |pool: &'_ Arc<crate::memory::HostPool>| (pool.id(), pool.len());
        self.residency
            .pools
            .iter()
            .map(|pool| {
                let (id, bytes) = handle(pool);
                PoolHandle { id, bytes, file: pool.memfd() }
            })
            .collect()
    }

    fn pool(&self, id: PoolId) -> Option<Arc<Mapping>> {
        let mut pools = self.residency.pools.iter();
        pools.find(|pool| pool.id() == id).map(|pool| Arc::clone(pool.mapping()))
    }

    fn import(
        &self,
        owner: &Arc<Owner>,
        memory: (&MemorySource, u64),
        file: Option<OwnedFd>,
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        self.imports.import(owner, memory, file)
    }

    fn reserve(&self, sizes: &[u32]) -> Result<Vec<Reserved>, ReserveError> {
        let largest = self.residency.pools.iter().map(|pool| pool.len()).max().unwrap_or(0);
        let bytes: u64 = sizes.iter().map(|size| u64::from(*size)).sum();
        if bytes > largest {
            return Err(ReserveError::Refused(format!(
                "these blocks take {bytes} bytes and the largest memory pool has {largest}: reserve \
                 fewer at a time, or give the node a larger --pool"
            )));
        }
        match self.residency.reserve(sizes) {
            Ok(memory) => {
                Ok(memory.into_iter().map(|memory| self.residency.reserved(memory)).collect())
            }
            Err(busy) => Err(ReserveError::Busy { pause_ms: busy.pause_ms }),
        }
    }

    fn publish(
        &self,
        namespace: &Namespace,
        blocks: Vec<Publish<Reserved>>,
        pulled: bool,
    ) -> Vec<PublishOutcome> {
        let namespace = self.learn(namespace);
        let publish = |block: Publish<Reserved>| {
            let key = BlockKey { namespace, hash: block.hash };
            self.publish_one(key, block, pulled)
        };
        // Leaf first, so that the root of a prefix is the newest and the last to go.
        let mut outcomes: Vec<_> = blocks.into_iter().rev().map(publish).collect();
        outcomes.reverse();
        outcomes
    }

    fn client(&self) -> Arc<Engine> {
        Arc::default()
    }

    async fn open(
        self: Arc<Self>,
        client: Arc<Engine>,
        layout: (LayoutId, Arc<Imported>),
        blocks: (Namespace, Vec<MovedBlock>),
    ) -> Result<Opened, String> {
        self.open_in_place(client, layout, blocks).await
    }

    fn publish_in_place(
        &self,
        opened: Opened,
        namespace: &Namespace,
        blocks: Vec<InPlace>,
        pulled: bool,
    ) -> Vec<PublishOutcome> {
        self.publish_opened(&opened, namespace, &blocks, pulled)
    }

    fn in_use(&self, client: &Engine, layout: LayoutId, blocks: &[MovedBlock]) -> Option<String> {
        client.in_use(layout, blocks)
    }

    async fn withdraw(
        self: Arc<Self>,
        client: Arc<Engine>,
        layout: LayoutId,
        blocks: Vec<BlockId>,
    ) -> u32 {
        self.withdraw_from(&client, &[(layout, blocks)]).await
    }

    fn leave(self: Arc<Self>, client: Arc<Engine>) {
        self.end_of(client);
    }

    async fn acquire(
        self: Arc<Self>,
        namespace: Namespace,
        hashes: Vec<BlockHash>,
        source: Source,
    ) -> Vec<AcquireOutcome> {
        self.get(&Wish::anywhere(self.learn(&namespace), hashes), source).await
    }

    async fn land(
        self: Arc<Self>,
        client: Arc<Engine>,
        layout: (LayoutId, Arc<Imported>),
        blocks: (Namespace, Vec<MovedBlock>),
        source: Source,
    ) -> Result<Vec<AcquireOutcome>, NotLanded> {
        self.land_in_place(client, layout, blocks, source).await
    }

    fn note_loaded(&self, landed: u64, copied: u64) {
        self.in_place.note_loaded(landed, copied);
        for (blocks, in_place) in [(landed, true), (copied, false)] {
            if blocks > 0 {
                self.residency.sink.emit(Event::BlocksLoaded { blocks, in_place });
            }
        }
    }

    fn release(&self, holds: &[ResidentId]) {
        if let Some((_, shadows)) = &self.gpu {
            shadows.release(holds);
        }
        self.residency.store.unpin_batch(&self.copies.release(holds));
    }

    fn finished_sending(&self, namespace: &Namespace, hashes: &[BlockHash]) -> u32 {
        let namespace = namespace.id();
        let moved = hashes.iter().rev().filter(|&&hash| {
            self.residency.store.finished_sending(&BlockKey { namespace, hash }) == Some(true)
        });
        u32::try_from(moved.count()).unwrap_or(u32::MAX)
    }

    async fn flush(&self) -> bool {
        self.announcer.flush(super::FLUSH_TIMEOUT).await.is_ok()
    }

    async fn stat(&self) -> serde_json::Value {
        let report: StatReport = self.snapshot().await.report;
        serde_json::to_value(report).unwrap_or_default()
    }

    async fn reset_health(&self, node: Option<NodeId>) -> u32 {
        self.data.reset_health(node).await.unwrap_or(0)
    }

    fn list(&self, namespace: Option<&Namespace>, cursor: u64, max: usize) -> Page {
        let wanted = namespace.map(Namespace::id);
        let names: BTreeMap<NamespaceId, Namespace> = crate::sync::lock(&self.names).clone();
        let mut views: Vec<ResidentView> = Vec::new();
        let mut page = Page::default();
        let mut cursor = u32::try_from(cursor).ok();
        while let Some(at) = cursor
            && page.entries.len() < max
        {
            views.clear();
            // A page of the store is as large as what is still wanted, so that none is left over.
            let room = u32::try_from(max - page.entries.len()).unwrap_or(u32::MAX);
            cursor = self.residency.store.list(at, room, &mut views);
            page.entries.extend(
                views.iter().filter(|view| wanted.is_none_or(|id| view.key.namespace == id)).map(
                    |view| ListEntry {
                        namespace: view.key.namespace,
                        name: names.get(&view.key.namespace).copied(),
                        hash: view.key.hash,
                        rank: view.rank,
                        bytes: view.payload.extent.len,
                        pins: view.pins,
                        requesters: u16::try_from(view.requesters).unwrap_or(u16::MAX),
                    },
                ),
            );
        }
        page.next = cursor.map_or(0, u64::from);
        page
    }

    fn evictions(&self, since: u64, max: usize) -> Vec<EvictedBlock> {
        self.residency.evictions_since(since, max)
    }
}
