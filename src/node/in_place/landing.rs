//! Loads whose blocks land in the layout of the engine that asked for them: one READ scatters over the
//! segments of a block, and no pool has a copy.
//!
//! A block that landed is published where it lies, with the rank that a fetched block starts with, so that
//! source and destination move as for every transfer; its engine takes it back before it overwrites it, as
//! it does one that it published itself.
//!
//! While a load is under way its blocks are marked as landing: they are neither published nor loaded by
//! anybody else, and no memory of the layout is let go, whatever becomes of the engine. The mark goes when
//! the load is over, in one step with the entry of what it published. A load is never cancelled while the
//! node runs; one that were would leave its marks behind, and with them the memory: what READs may touch
//! stays.

use std::sync::Arc;

use super::Engine;
use super::engine::{LOST, Published};
use crate::layout::BlockId;
use crate::node::Inner;
use crate::peer::Wish;
use crate::protocol::door::{AcquireOutcome, LayoutId, MovedBlock, Source};
use crate::runtime::door::{Imported, NotLanded};
use crate::sync::lock;
use crate::types::{BlockKey, Extent, Namespace};

impl Published {
    /// Where a block lies, as extents name it.
    pub(super) fn place(&self, block: BlockId) -> Extent {
        let len = self.open.imported.layout.block_bytes();
        Extent { pool: self.pool, offset: block.0.into(), len }
    }

    /// Why one of these blocks must not be written to now.
    pub(super) fn in_use(&self, blocks: &[MovedBlock]) -> Option<String> {
        let used = |block: &BlockId| match () {
            () if self.blocks.contains_key(block) => Some("published in place: withdraw it first"),
            () if self.landing.contains(block) => Some("being loaded already"),
            () => None,
        };
        let mut blocks = blocks.iter().map(|moved| moved.block);
        let (block, why) = blocks.find_map(|block| Some((block, used(&block)?)))?;
        Some(format!("block {} is {why}", block.0))
    }

    /// Marks blocks as landing, all or none; the place of each.
    fn begin(&mut self, blocks: &[MovedBlock]) -> Result<Vec<Extent>, NotLanded> {
        if let Some(why) = self.open.not_landed {
            return Err(NotLanded::NoWay(why.to_owned()));
        }
        if let Some(why) = self.in_use(blocks) {
            return Err(NotLanded::InUse(why));
        }
        let places = blocks.iter().map(|moved| self.place(moved.block)).collect();
        self.landing.extend(blocks.iter().map(|moved| moved.block));
        Ok(places)
    }

    /// The load is over: enters what it published, and says which of its blocks that is.
    fn end(&mut self, blocks: &[(BlockKey, BlockId)], outcomes: &[AcquireOutcome]) -> Vec<usize> {
        let mut landed = Vec::new();
        for (at, ((key, block), outcome)) in blocks.iter().zip(outcomes).enumerate() {
            self.landing.remove(block);
            if let AcquireOutcome::Ready(held) = outcome
                && held.extent == self.place(*block)
            {
                self.enter(*block, *key, held.hold);
                landed.push(at);
            }
        }
        landed
    }
}

impl Engine {
    /// Done when no load may land anywhere any more. None begins after its connection has ended.
    pub(super) async fn landed(&self) {
        while lock(&self.state).layouts.values().any(|layout| !layout.landing.is_empty()) {
            // One waits, and finds the permit of what ended meanwhile.
            self.settled.notified().await;
        }
    }
}

impl Inner {
    pub(in crate::node) async fn land_in_place(
        self: Arc<Self>,
        engine: Arc<Engine>,
        (id, imported): (LayoutId, Arc<Imported>),
        (namespace, blocks): (Namespace, Vec<MovedBlock>),
        source: Source,
    ) -> Result<Vec<AcquireOutcome>, NotLanded> {
        self.in_place.never().map_err(NotLanded::NoWay)?;
        let no_way = |why: &str| NotLanded::NoWay(why.to_owned());
        self.open_layout(&engine, id, imported).await.map_err(NotLanded::NoWay)?;
        let places = {
            let mut state = lock(&engine.state);
            let layout = if state.gone { None } else { state.layouts.get_mut(&id) };
            let layout = layout.ok_or_else(|| no_way("the client is gone"))?;
            if layout.open.lies_on(&self.residency.lost_gpus()) {
                return Err(no_way(LOST));
            }
            layout.begin(&blocks)?
        };
        let namespace = self.learn(&namespace);
        let hashes = blocks.iter().map(|moved| moved.hash).collect();
        let mut outcomes = self.get(&Wish { namespace, hashes, places }, source).await;
        let keyed: Vec<_> = blocks
            .iter()
            .map(|moved| (BlockKey { namespace, hash: moved.hash }, moved.block))
            .collect();
        let landed = match lock(&engine.state).layouts.get_mut(&id) {
            Some(layout) => layout.end(&keyed, &outcomes),
            None => Vec::new(),
        };
        engine.settled.notify_one();
        self.take_back_lost(&engine, (id, landed), &mut outcomes).await;
        Ok(outcomes)
    }

    /// Blocks that landed on a GPU which is lost by now have failed. Whoever takes back what lies there
    /// may have been before them.
    async fn take_back_lost(
        &self,
        engine: &Engine,
        (id, landed): (LayoutId, Vec<usize>),
        outcomes: &mut [AcquireOutcome],
    ) {
        let mut lost = Vec::new();
        for at in landed {
            if let Some(outcome) = outcomes.get_mut(at)
                && let AcquireOutcome::Ready(held) = outcome
                && self.in_place.is_leaving(&held.extent, &self.residency.lost_gpus())
            {
                lost.push(BlockId::of(&held.extent));
                self.residency.store.unpin_batch(&[held.hold]);
                *outcome = AcquireOutcome::Failed;
            }
        }
        if !lost.is_empty() {
            self.withdraw_from(engine, &[(id, lost)]).await;
        }
    }
}
