//! A node's memory and residents.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

use super::super::krate::fabric::{Region, RegionId, RegisteredSpan};
use super::super::krate::layout::{AllocationId, BlockId, KvSplit, Layout, Tensor};
use super::super::krate::memory::{Checksum, HostPool, Reservation, checksum_bytes};
use super::super::krate::peer::{Landing, LentLayout, Published, Settled};
use super::super::krate::policy::Origin;
use super::super::krate::protocol::{Place, RegionEntry, TensorEntry};
use super::super::krate::store::{Evicted, Found, InsertError, Payload, Store};
use super::super::krate::types::{
    BlockKey, EvictionRank, Extent, MemoryKind, PoolId, ResidentCause, ResidentId, Scope,
};
use super::ledger::Ledger;
use super::{STRIDED_BYTES, bytes_of, key_of};

/// Extents that the peer core owns as destinations, by offset.
type Owned = Rc<RefCell<BTreeMap<u64, u32>>>;

/// What a destination lies in.
#[derive(Debug)]
enum Lies {
    Pool(Reservation),
    /// A place in the cache, which its asker has for it.
    Cache(Extent, Arc<HostPool>),
}

/// A destination. What is given back is overwritten at once, as its next tenant would.
#[derive(Debug)]
pub(crate) struct Destination {
    lies: Option<Lies>,
    /// Where in the region, in order.
    pieces: Vec<(u64, u32)>,
    owned: Owned,
    /// How often it was asked whether it has settled.
    asked: u32,
}

impl Destination {
    fn new(lies: Lies, pieces: Vec<(u64, u32)>, owned: &Owned) -> Self {
        owned.borrow_mut().extend(pieces.iter().copied());
        Self { lies: Some(lies), pieces, owned: Rc::clone(owned), asked: 0 }
    }

    fn extent(&self) -> Extent {
        match self.lies.as_ref().unwrap() {
            Lies::Pool(memory) => memory.extent(),
            Lies::Cache(extent, _) => *extent,
        }
    }

    /// The extent is a resident's from here on.
    fn hand_over(mut self) {
        self.forget();
        if let Some(Lies::Pool(memory)) = self.lies.take() {
            let _resident = memory.into_extent();
        }
    }

    fn forget(&self) {
        let mut owned = self.owned.borrow_mut();
        self.pieces.iter().for_each(|(at, _)| {
            owned.remove(at);
        });
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        let pool = match self.lies.take() {
            Some(Lies::Pool(memory)) => Arc::clone(memory.pool()),
            Some(Lies::Cache(_, pool)) => pool,
            None => return,
        };
        self.forget();
        scribble(&pool, &self.pieces);
    }
}

fn scribble(pool: &HostPool, pieces: &[(u64, u32)]) {
    for (offset, len) in pieces {
        pool.mapping().write(*offset, &vec![0xee; *len as usize]).unwrap();
    }
}

/// The number of the only layout.
pub(crate) const LAYOUT: u32 = 77;

/// What extents of blocks in pieces name; their offset is the block's number.
pub(crate) const CACHE: PoolId = PoolId::of_layout(77).unwrap();

/// Blocks in pieces, in a part of the pool that is reserved for them.
#[derive(Debug)]
pub(crate) struct Cache {
    pub(crate) layout: Layout,
    pub(crate) regions: Vec<RegionEntry>,
    pub(crate) tensors: Vec<TensorEntry>,
    _memory: Reservation,
}

/// Eight blocks of two layers with K and V of 128 bytes, from `offset` on.
pub(crate) fn cache_tensor(offset: u64) -> Tensor {
    Tensor {
        allocation: AllocationId(0),
        offset,
        layers: 2,
        layer_stride: 4096,
        kv: KvSplit::Split { stride: 2048 },
        block_stride: 144,
        segment_bytes: 128,
    }
}

/// A node's memory and residents.
#[derive(Debug)]
pub(crate) struct TestLanding {
    pub(crate) cache: Option<Cache>,
    pub(crate) store: Arc<Store>,
    pub(crate) pool: Arc<HostPool>,
    region: Region,
    owned: Owned,
    /// Residents that were evicted.
    pub(crate) evicted: u64,
    /// Requesters that those had been served to.
    pub(crate) readers_of_evicted: u64,
    /// How often residents that are withdrawn are still being copied.
    pub(crate) copying: u32,
    /// Residents that were withdrawn and are gone.
    pub(crate) removed: u64,
    pub(crate) pause_ms: u32,
    pub(crate) ledger: Arc<Ledger>,
    /// Residents that a peer sent.
    pub(crate) fetched: BTreeSet<ResidentId>,
    /// How often a destination is asked before it has settled.
    pub(crate) settle_after: u32,
    /// Whether none ever does, and whose fault that is.
    pub(crate) never_settles: Option<Scope>,
    /// How often residents are not ready yet.
    pub(crate) unready: u32,
}

impl TestLanding {
    pub(super) fn new(
        store: Arc<Store>,
        pool: Arc<HostPool>,
        region: Region,
        ledger: Arc<Ledger>,
    ) -> Self {
        Self {
            cache: None,
            store,
            pool,
            region,
            owned: Owned::default(),
            evicted: 0,
            readers_of_evicted: 0,
            copying: 0,
            removed: 0,
            pause_ms: 0,
            ledger,
            fetched: BTreeSet::new(),
            settle_after: 0,
            never_settles: None,
            unready: 0,
        }
    }

    /// Evicts one resident; its memory is overwritten and given back.
    pub(crate) fn evict(&mut self) -> Option<BlockKey> {
        let mut before = Vec::new();
        self.store.list(0, u32::MAX, &mut before);
        let Evicted { key, payload, id, .. } = self.store.evict(MemoryKind::Host)?;
        let victim = before.iter().find(|view| view.id == id).unwrap();
        self.readers_of_evicted += u64::from(victim.requesters);
        scribble(&self.pool, &self.pieces(payload.extent));
        self.pool.release(payload.extent).unwrap();
        self.evicted += 1;
        self.fetched.remove(&id);
        self.ledger.change(&key, false);
        Some(key)
    }

    fn place(&mut self, len: u32) -> Option<Reservation> {
        loop {
            match self.pool.reserve(&[len]) {
                Ok(mut one) => return one.pop(),
                Err(_full) => self.evict()?,
            };
        }
    }

    /// Saves a block as a local engine does. `false` where every resident is pinned.
    pub(crate) fn save(&mut self, block: u16) -> bool {
        let bytes = bytes_of(block);
        let Some(reservation) = self.place(u32::try_from(bytes.len()).unwrap()) else {
            return false;
        };
        self.pool.write(reservation.extent(), 0, &bytes).unwrap();
        let checksum = self.pool.checksum(reservation.extent()).unwrap();
        let payload = Payload { extent: reservation.extent(), checksum };
        let origin = Origin::Saved { owners: None };
        match self.store.insert(key_of(block), payload, origin, false) {
            Ok(_) => {
                let _resident = reservation.into_extent();
                self.ledger.change(&key_of(block), true);
            }
            Err(InsertError::AlreadyResident(_)) => {
                self.store.already_resident(&key_of(block), ResidentCause::PartialHit);
            }
            Err(InsertError::Full) => return false,
        }
        true
    }

    /// The place of this block of the cache, in which blocks may lie and land from here on.
    #[allow(dead_code, reason = "simulations hold no blocks in pieces")]
    pub(crate) fn place_in_cache(&mut self, block: u32) -> Extent {
        if self.cache.is_none() {
            let memory = self.pool.reserve(&[8192]).unwrap().pop().unwrap();
            let tensor = cache_tensor(memory.extent().offset);
            let layout = Layout::new(vec![tensor], 8, |_| Some(self.region.len)).unwrap();
            assert_eq!(layout.block_bytes() as usize, STRIDED_BYTES);
            let regions = vec![RegionEntry::from(&self.region)];
            let tensors = vec![TensorEntry::from(&tensor)];
            self.cache = Some(Cache { layout, regions, tensors, _memory: memory });
        }
        let len = u32::try_from(STRIDED_BYTES).unwrap();
        Extent { pool: CACHE, offset: block.into(), len }
    }

    /// Saves a block in pieces, as the block of this number of the cache.
    #[allow(dead_code, reason = "simulations hold no blocks in pieces")]
    pub(crate) fn save_in_pieces(&mut self, name: u16, block: u32) {
        let (bytes, extent) = (bytes_of(name), self.place_in_cache(block));
        let mut rest = bytes.as_slice();
        for (offset, len) in self.pieces(extent) {
            let (now, later) = rest.split_at(len as usize);
            self.pool.mapping().write(offset, now).unwrap();
            rest = later;
        }
        let payload = Payload { extent, checksum: checksum_bytes(&bytes) };
        self.store.insert(key_of(name), payload, Origin::Saved { owners: None }, false).unwrap();
    }

    /// Where the bytes of a resident lie in the region, in order.
    pub(super) fn pieces(&self, extent: Extent) -> Vec<(u64, u32)> {
        match &self.cache {
            Some(cache) if extent.pool == CACHE => {
                let block = BlockId(u32::try_from(extent.offset).unwrap());
                cache.layout.segments(block).map(|it| (it.offset, it.len)).collect()
            }
            _ => vec![(extent.offset, extent.len)],
        }
    }

    /// Whether a region is the one that blocks are lent from.
    pub(super) fn lends_from(&self, region: RegionId) -> bool {
        self.region.id == region
    }

    /// Whether the fabric may write here on behalf of a fetch.
    pub(super) fn owns(&self, span: &RegisteredSpan) -> bool {
        let end = span.offset + u64::from(span.len);
        let owned = self.owned.borrow();
        // A span may cover destinations that are neighbours.
        let mut at = span.offset;
        while at < end {
            let Some((start, len)) = owned.range(..=at).next_back() else {
                return false;
            };
            let next = start + u64::from(*len);
            if next <= at {
                return false;
            }
            at = next;
        }
        true
    }
}

impl Landing for TestLanding {
    type Memory = Destination;

    fn reserve(&mut self, sizes: &[u32], out: &mut Vec<Destination>) {
        for size in sizes {
            let Some(reservation) = self.place(*size) else {
                return;
            };
            let pieces = vec![(reservation.extent().offset, *size)];
            out.push(Destination::new(Lies::Pool(reservation), pieces, &self.owned));
        }
    }

    fn land_at(&mut self, place: &Extent) -> Option<Destination> {
        self.cache.as_ref()?;
        let lies = Lies::Cache(*place, Arc::clone(&self.pool));
        Some(Destination::new(lies, self.pieces(*place), &self.owned))
    }

    fn spans(&self, memory: &Destination) -> impl Iterator<Item = RegisteredSpan> {
        let region = self.region.id;
        memory.pieces.iter().map(move |&(offset, len)| RegisteredSpan { region, offset, len })
    }

    fn settle(&mut self, memory: &mut Destination) -> Settled {
        if let Some(scope) = self.never_settles {
            return Settled::Never(scope);
        }
        memory.asked += 1;
        if memory.asked > self.settle_after { Settled::Now } else { Settled::Later }
    }

    fn prepare(&mut self, _found: &Found) -> bool {
        self.unready = self.unready.saturating_sub(1);
        self.unready == 0
    }

    fn checksum(&self, memory: &Destination) -> u64 {
        let mut sum = Checksum::default();
        for (offset, len) in &memory.pieces {
            sum.add(self.pool.mapping(), *offset, (*len).into()).unwrap();
        }
        sum.value()
    }

    fn publish(
        &mut self,
        key: BlockKey,
        memory: Destination,
        checksum: u64,
        rank: EvictionRank,
    ) -> Published {
        let payload = Payload { extent: memory.extent(), checksum };
        loop {
            match self.store.insert(key, payload, Origin::Fetched { source: rank }, true) {
                Ok(found) => {
                    memory.hand_over();
                    self.fetched.insert(found.id);
                    self.ledger.change(&key, true);
                    return Published::Stored(found);
                }
                Err(InsertError::AlreadyResident(_)) => {
                    let found = self.store.pin(&key).unwrap();
                    self.store.already_resident(&key, ResidentCause::PeerFetch);
                    return Published::AlreadyResident(found);
                }
                Err(InsertError::Full) if self.evict().is_some() => {}
                Err(InsertError::Full) => return Published::Full,
            }
        }
    }

    fn remote(&self, extent: &Extent) -> Option<Place> {
        if extent.pool == CACHE {
            let block = BlockId(u32::try_from(extent.offset).unwrap());
            return Some(Place::Block { layout: LAYOUT, block, len: extent.len });
        }
        self.region.remote(extent.offset, extent.len).map(Place::Span)
    }

    fn layout(&self, number: u32) -> Option<LentLayout<'_>> {
        let cache = self.cache.as_ref().filter(|_| number == LAYOUT)?;
        let (regions, tensors) = (&cache.regions, &cache.tensors);
        Some(LentLayout { blocks: cache.layout.blocks(), regions, tensors })
    }

    fn lets_go(&mut self, _resident: ResidentId) -> bool {
        self.copying = self.copying.saturating_sub(1);
        self.copying == 0
    }

    /// Whoever owns the memory overwrites it at once.
    fn removed(&mut self, removed: &Evicted) {
        let extent = removed.payload.extent;
        scribble(&self.pool, &self.pieces(extent));
        if extent.pool != CACHE {
            self.pool.release(extent).unwrap();
        }
        self.removed += 1;
        self.fetched.remove(&removed.id);
        self.ledger.change(&removed.key, false);
    }

    fn pause_ms(&self) -> u32 {
        self.pause_ms
    }
}
