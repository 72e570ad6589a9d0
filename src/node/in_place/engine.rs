//! What one engine has published in place.
//!
//! Three locks. `state` says what is published, and is never held over a wait. `ways` is held by whoever
//! registers memory or lets go of it, `withdrawing` by whoever takes blocks back, so that two of these
//! never meet: who comes second finds what the first one has done. Nobody holds one of them while it
//! waits for the other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Open;
use crate::fabric::Region;
use crate::layout::{AllocationId, BlockId, Tensor};
use crate::memory::Climb;
use crate::node::Inner;
use crate::node::residency::Admitted;
use crate::node::transport::PeerAddress;
use crate::protocol::door::{DeviceUuid, LayoutId, MovedBlock, PublishOutcome};
use crate::protocol::{RegionEntry, TensorEntry};
use crate::runtime::data::{DataHandle, Stopped};
use crate::runtime::door::{Imported, InPlace};
use crate::runtime::in_place::{NotRegistered, ServedLayout};
use crate::sync::{Mutex, lock};
use crate::types::{BlockKey, Namespace, PoolId, ResidentId};

/// Why nothing is published on a GPU that is lost.
pub(super) const LOST: &str = "the GPU that this layout lies on is lost to the node, and nothing can be published \
                    there: start the node again to have the GPU back";

/// How long one waits who finds the data thread's box of orders full.
const ROOM_PAUSE: Duration = Duration::from_millis(5);

/// An engine, as the node knows what it published.
#[derive(Debug, Default)]
pub struct Engine {
    pub(super) state: Mutex<State>,
    ways: tokio::sync::Mutex<Ways>,
    withdrawing: tokio::sync::Mutex<()>,
    /// Told when blocks are no more ones that a load may land in.
    pub(super) settled: tokio::sync::Notify,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Its connection has ended.
    pub(super) gone: bool,
    pub(super) layouts: BTreeMap<LayoutId, Published>,
}

/// A layout that is open, and the blocks that lie there for peers.
#[derive(Debug)]
pub(super) struct Published {
    pub(super) pool: PoolId,
    pub(super) open: Arc<Open>,
    pub(super) blocks: BTreeMap<BlockId, (BlockKey, ResidentId)>,
    /// Blocks that a load may land in.
    pub(super) landing: BTreeSet<BlockId>,
}

/// Regions of an engine's allocations.
#[derive(Debug, Default)]
struct Ways(BTreeMap<AllocationId, (Region, Option<Climb>)>);

/// A layout in which an engine may publish now.
#[derive(Debug)]
pub struct Opened {
    engine: Arc<Engine>,
    layout: LayoutId,
    /// Blocks that the node had stored by then.
    stored_before: u64,
}

impl Published {
    /// Peers read this resident there from now on.
    pub(super) fn enter(&mut self, block: BlockId, key: BlockKey, resident: ResidentId) {
        self.blocks.insert(block, (key, resident));
        self.open.published.fetch_add(1, Ordering::Relaxed);
    }
}

impl State {
    /// Why these blocks cannot be published.
    fn conflict(&self, id: LayoutId, blocks: &[(BlockId, BlockKey)]) -> Option<String> {
        let Published { open, blocks: published, landing, .. } = self.layouts.get(&id)?;
        let leaving = lock(&open.leaving);
        blocks.iter().find_map(|(block, key)| match published.get(block) {
            _ if landing.contains(block) => {
                Some(format!("block {} is being loaded: publish it after that", block.0))
            }
            Some(_) if leaving.contains(block) => {
                Some(format!("block {} is being withdrawn: publish it after that", block.0))
            }
            Some((other, _)) if other != key => Some(format!(
                "block {} is published in place as {}: withdraw it before it becomes another one",
                block.0, other.hash
            )),
            _ => None,
        })
    }
}

impl Engine {
    pub(in crate::node) fn in_use(&self, id: LayoutId, blocks: &[MovedBlock]) -> Option<String> {
        lock(&self.state).layouts.get(&id)?.in_use(blocks)
    }

    /// All that it has published in such layouts.
    pub(super) fn published(&self, which: impl Fn(&Open) -> bool) -> Vec<(LayoutId, Vec<BlockId>)> {
        let state = lock(&self.state);
        let wanted = state.layouts.iter().filter(|(_, layout)| which(&layout.open));
        let blocks = |layout: &Published| layout.blocks.keys().copied().collect();
        wanted.map(|(id, layout)| (*id, blocks(layout))).collect()
    }
}

/// The GPUs that a layout lies on.
fn gpus(imported: &Imported) -> BTreeSet<DeviceUuid> {
    imported.lies().flatten().filter_map(|memory| memory.device()).collect()
}

/// A layout as the data thread has it: by its numbers, and with the regions of the allocations that it
/// lies in, which are in the order of their numbers; without any where no card reaches them.
fn served(
    (pool, number): (PoolId, u32),
    lies: Arc<Imported>,
    (places, regions): (&[AllocationId], &[Region]),
) -> ServedLayout {
    let place = |wanted: &AllocationId| places.binary_search(wanted).ok();
    let tensor = |tensor: &Tensor| {
        let place = place(&tensor.allocation).and_then(|place| u16::try_from(place).ok());
        let allocation = AllocationId(place.unwrap_or(u16::MAX));
        TensorEntry::from(&Tensor { allocation, ..*tensor })
    };
    let region = |allocation| Some(regions.get(place(&AllocationId(allocation))?)?.id);
    let allocations = u16::try_from(lies.memory.len()).unwrap_or(u16::MAX);
    let blocks = lies.layout.blocks();
    ServedLayout {
        pool,
        number,
        blocks,
        bytes: u64::from(blocks) * u64::from(lies.layout.block_bytes()),
        regions: regions.iter().map(RegionEntry::from).collect(),
        tensors: lies.layout.tensors().iter().map(tensor).collect(),
        in_host_memory: lies.lies_in(|memory| memory.host().is_some()),
        places: (0..allocations).map(region).collect(),
        lies,
    }
}

impl Inner {
    pub(in crate::node) async fn open_in_place(
        &self,
        engine: Arc<Engine>,
        (id, imported): (LayoutId, Arc<Imported>),
        (namespace, blocks): (Namespace, Vec<MovedBlock>),
    ) -> Result<Opened, String> {
        self.in_place.never()?;
        let stored_before = self.residency.stored();
        self.open_layout(&engine, id, imported).await?;
        let namespace = namespace.id();
        let key = |moved: &MovedBlock| BlockKey { namespace, hash: moved.hash };
        let blocks: Vec<_> = blocks.iter().map(|moved| (moved.block, key(moved))).collect();
        let conflict = lock(&engine.state).conflict(id, &blocks);
        match conflict {
            Some(why) => Err(why),
            None => Ok(Opened { engine, layout: id, stored_before }),
        }
    }

    /// Registers the memory of a layout and serves it, where that has not been done.
    pub(super) async fn open_layout(
        &self,
        engine: &Arc<Engine>,
        id: LayoutId,
        imported: Arc<Imported>,
    ) -> Result<(), String> {
        let gpus = gpus(&imported);
        if !gpus.is_disjoint(&self.residency.lost_gpus()) {
            return Err(LOST.to_owned());
        }
        let mut ways = engine.ways.lock().await;
        {
            let state = lock(&engine.state);
            if state.gone {
                return Err("the client is gone".to_owned());
            }
            if state.layouts.contains_key(&id) {
                return Ok(());
            }
        }
        let tensors = imported.layout.tensors().iter();
        let mut places: Vec<AllocationId> = tensors.map(|it| it.allocation).collect();
        places.sort_unstable();
        places.dedup();
        let registered = self.register(&mut ways, &places, &imported).await;
        let (known, mut climbs): (Vec<_>, _) = match registered {
            Ok(()) => (places.iter().filter_map(|place| ways.0.get(place)).collect(), Vec::new()),
            Err(NotRegistered::NoWay(climb)) => {
                if let Some(why) = self.in_place.not_staged(&imported) {
                    let way = NotRegistered::NoWay(climb.clone());
                    let why = format!("{way}, and no copies can be lent of it: {why}");
                    return Err(self.in_place.refuse(&why, climb));
                }
                (Vec::new(), vec![climb])
            }
            Err(error) => return Err(self.in_place.refuse(&error, Climb::default())),
        };
        let staged = known.is_empty();
        let not_landed = match staged {
            true => Some("no card reaches its memory"),
            false => self.in_place.not_landed(&imported),
        };
        climbs.extend(known.iter().filter_map(|(_, climb)| climb.clone()));
        let open = Arc::new(Open {
            engine: Arc::downgrade(engine),
            imported: Arc::clone(&imported),
            gpus,
            staged,
            not_landed,
            climbs,
            published: AtomicU64::new(0),
            leaving: Mutex::default(),
        });
        let named = self.in_place.number(&open);
        let named = named.ok_or_else(|| {
            self.in_place.refuse(&"as many layouts are open as can be", Climb::default())
        })?;
        let regions: Vec<Region> = known.into_iter().map(|(region, _)| *region).collect();
        if let Err(stopped) = self.data.serve(served(named, imported, (&places, &regions))) {
            self.in_place.free(named.0);
            return Err(self.in_place.refuse(&stopped, Climb::default()));
        }
        let (pool, blocks, landing) = (named.0, BTreeMap::new(), BTreeSet::new());
        lock(&engine.state).layouts.insert(id, Published { pool, open, blocks, landing });
        Ok(())
    }

    /// Registers those of these allocations that are not.
    async fn register(
        &self,
        ways: &mut Ways,
        places: &[AllocationId],
        imported: &Imported,
    ) -> Result<(), NotRegistered> {
        let new = places.iter().filter(|place| !ways.0.contains_key(place));
        let memory = new.filter_map(|place| {
            Some((*place, imported.memory.get(usize::from(place.0))?.registrable()))
        });
        let (new, memory): (Vec<_>, Vec<_>) = memory.unzip();
        if new.is_empty() {
            return Ok(());
        }
        let registered = self.data.register(memory, self.in_place.rungs).await?;
        ways.0.extend(new.into_iter().zip(registered));
        Ok(())
    }

    pub(in crate::node) fn publish_opened(
        &self,
        opened: &Opened,
        namespace: &Namespace,
        blocks: &[InPlace],
        pulled: bool,
    ) -> Vec<PublishOutcome> {
        let namespace = self.learn(namespace);
        let mut state = lock(&opened.engine.state);
        let layout = match &mut *state {
            State { gone: true, .. } => None,
            State { layouts, .. } => layouts.get_mut(&opened.layout),
        };
        // Looked at with the state locked: whoever takes back what lies on a lost GPU finds what was
        // published before.
        let layout = layout.filter(|it| !it.open.lies_on(&self.residency.lost_gpus()));
        let Some(layout) = layout else { return vec![PublishOutcome::Refused; blocks.len()] };
        let publish = |block: &InPlace| {
            let key = BlockKey { namespace, hash: block.hash };
            self.publish_in(layout, (key, block), (opened.stored_before, pulled))
        };
        // Leaf first, so that the root of a prefix is the newest.
        let mut outcomes: Vec<_> = blocks.iter().rev().map(publish).collect();
        outcomes.reverse();
        outcomes
    }

    fn publish_in(
        &self,
        layout: &mut Published,
        (key, block): (BlockKey, &InPlace),
        (stored_before, pulled): (u64, bool),
    ) -> PublishOutcome {
        // The entry of one that leaves is there until it has left.
        if lock(&layout.open.leaving).contains(&block.block)
            || layout.landing.contains(&block.block)
            || layout.blocks.get(&block.block).is_some_and(|(other, _)| *other != key)
        {
            return PublishOutcome::Refused;
        }
        let extent = layout.place(block.block);
        let admitted = self.residency.admit_in_place(key, extent, block.checksum);
        if let Admitted::Stored(found) = &admitted {
            layout.enter(block.block, key, found.id);
        }
        self.outcome(&key, &admitted, (stored_before, pulled))
    }

    /// Takes blocks back; how many of them were published. Done when nobody can read them any more.
    pub(in crate::node) async fn withdraw_from(
        &self,
        engine: &Engine,
        named: &[(LayoutId, Vec<BlockId>)],
    ) -> u32 {
        let _alone = engine.withdrawing.lock().await;
        let mut found: Vec<(LayoutId, BlockId, ResidentId)> = Vec::new();
        {
            let state = lock(&engine.state);
            for (id, blocks) in named {
                let Some(layout) = state.layouts.get(id) else { continue };
                // Before they are withdrawn: whoever comes now does not keep them from going.
                let mut leaving = lock(&layout.open.leaving);
                for block in blocks {
                    if let Some((_key, resident)) = layout.blocks.get(block) {
                        leaving.insert(*block);
                        found.push((*id, *block, *resident));
                    }
                }
            }
        }
        if found.is_empty() {
            return 0;
        }
        let residents: Vec<ResidentId> = found.iter().map(|(.., resident)| *resident).collect();
        self.surely(|data| data.withdraw(residents.clone())).await;
        let mut count = 0;
        {
            let mut state = lock(&engine.state);
            for (id, block, ..) in &found {
                let Some(layout) = state.layouts.get_mut(id) else { continue };
                lock(&layout.open.leaving).remove(block);
                // One that was named twice is counted once.
                if layout.blocks.remove(block).is_some() {
                    layout.open.published.fetch_sub(1, Ordering::Relaxed);
                    count += 1;
                }
            }
        }
        count
    }

    /// Has the data thread do what must not stay undone, once it has room for the order. Without the
    /// thread a node serves nobody.
    async fn surely<'a, A>(&'a self, order: impl Fn(&'a DataHandle<PeerAddress>) -> A)
    where
        A: Future<Output = Result<(), Stopped>>,
    {
        while order(&self.data).await.is_err() && self.data.is_alive() {
            tokio::time::sleep(ROOM_PAUSE).await;
        }
    }

    /// Takes back all that an engine has published, and lets go of its memory.
    pub(in crate::node) async fn clear(&self, engine: &Engine) {
        // A load that is under way publishes yet, and then no other one begins.
        self.withdraw_from(engine, &engine.published(|_| true)).await;
        engine.landed().await;
        self.withdraw_from(engine, &engine.published(|_| true)).await;
        let mut ways = engine.ways.lock().await;
        let layouts = std::mem::take(&mut lock(&engine.state).layouts);
        let pools: Vec<PoolId> = layouts.values().map(|layout| layout.pool).collect();
        let regions: Vec<_> = ways.0.values().map(|(region, _)| region.id).collect();
        ways.0.clear();
        if !(pools.is_empty() && regions.is_empty()) {
            // What the data thread has of their memory is not the last of it.
            self.surely(|data| data.let_go(pools.clone(), regions.clone())).await;
        }
        pools.iter().for_each(|pool| self.in_place.free(*pool));
    }

    /// Nothing more of this engine is published from here on, and what is will be taken back.
    pub(in crate::node) fn end_of(self: Arc<Self>, engine: Arc<Engine>) {
        let mut state = lock(&engine.state);
        state.gone = true;
        drop(state);
        // Outside a runtime the node is ending, and its fabric with it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move { self.clear(&engine).await });
        }
    }
}
