//! A node of one pool and no peers, for tests of the door, the client and the commands: real memory,
//! simple bookkeeping, and counters of what is reserved and pinned.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    DoorService, Imported, InPlace, NotLanded, Page, PoolHandle, Publish, ReserveError, Reserved,
};
use crate::event::BusyReason;
use crate::layout::BlockId;
use crate::limits::EXTENT_ALIGN;
use crate::memory::{Claims, EngineMemory, ImportError, Mapping, Owner, SharedMemory};
use crate::protocol::door::stat::{PoolStat, ResidentStat, StatReport};
use crate::protocol::door::{
    AcquireOutcome, BlockOrigin, EvictedBlock, HeldBlock, LayoutId, ListEntry, MemorySource,
    MovedBlock, PublishOutcome, Source,
};
use crate::runtime::deadline::Deadline;
use crate::types::{
    BlockHash, BlockKey, EvictionRank, Extent, Generation, Namespace, NamespaceId, NodeId, PoolId,
    ResidentCause, ResidentId,
};

mod gated;
mod landed;
mod running;

pub(crate) use gated::Gate;
use gated::Gated;
use landed::LANDED;
pub(crate) use running::Running;

/// Ranges in use, by where they begin.
#[derive(Debug, Default)]
struct Used(BTreeMap<u64, u64>);

#[derive(Debug)]
pub(crate) struct Memory {
    used: Arc<Mutex<Used>>,
    extent: Extent,
}

impl Reserved for Memory {
    fn extent(&self) -> Extent {
        self.extent
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.used.lock().unwrap().0.remove(&self.extent.offset);
    }
}

#[derive(Debug)]
struct Block {
    memory: Memory,
    checksum: u64,
    id: ResidentId,
    pins: u16,
    fetched: bool,
}

#[derive(Debug)]
pub(crate) struct StandIn {
    file: File,
    map: Arc<Mapping>,
    /// Memory that clients have imported.
    pub(crate) claims: Claims,
    pub(crate) gate: Arc<Gate>,
    used: Arc<Mutex<Used>>,
    blocks: Mutex<BTreeMap<BlockKey, Block>>,
    names: Mutex<HashMap<NamespaceId, Namespace>>,
    /// What peers hold.
    pub(crate) remote: Mutex<HashMap<BlockKey, Vec<u8>>>,
    /// Acquisitions wait while this is false.
    pub(crate) open: watch::Sender<bool>,
    /// Flushes wait while this is false.
    pub(crate) registry: watch::Sender<bool>,
    pub(crate) finished: Mutex<Vec<BlockHash>>,
    /// What clients have published in place, with the checksums.
    pub(crate) in_place: Mutex<BTreeMap<(LayoutId, BlockId), (BlockHash, u64)>>,
    /// Whether clients' memory can be read in place.
    pub(crate) reachable: AtomicBool,
    /// Clients that have left.
    pub(crate) left: AtomicUsize,
}

impl StandIn {
    fn new(bytes: u64) -> Self {
        let file = File::from(rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        Self {
            map: Arc::new(Mapping::new(&file, bytes).unwrap()),
            claims: Claims::default(),
            gate: Arc::default(),
            file,
            used: Arc::default(),
            blocks: Mutex::default(),
            names: Mutex::default(),
            remote: Mutex::default(),
            open: watch::Sender::new(true),
            registry: watch::Sender::new(true),
            finished: Mutex::default(),
            in_place: Mutex::default(),
            reachable: AtomicBool::new(true),
            left: AtomicUsize::new(0),
        }
    }

    /// Ranges of the pool that a block or a reservation occupies.
    pub(crate) fn occupied(&self) -> usize {
        self.used.lock().unwrap().0.len()
    }

    pub(crate) fn residents(&self) -> usize {
        self.blocks.lock().unwrap().len()
    }

    pub(crate) fn pins(&self) -> u32 {
        let blocks = self.blocks.lock().unwrap();
        blocks.values().map(|block| u32::from(block.pins)).sum()
    }

    /// Forgets every block that is not pinned.
    pub(crate) fn evict(&self) {
        self.blocks.lock().unwrap().retain(|_, block| block.pins > 0);
    }

    /// Overwrites a resident's first byte.
    pub(crate) fn damage(&self, namespace: &Namespace, hash: BlockHash) {
        let blocks = self.blocks.lock().unwrap();
        let extent = blocks[&key(namespace, hash)].memory.extent;
        let mut byte = [0];
        self.map.read(extent.offset, &mut byte).unwrap();
        self.map.write(extent.offset, &[!byte[0]]).unwrap();
    }

    fn allocate(&self, len: u32) -> Option<Memory> {
        let mut used = self.used.lock().unwrap();
        let size = u64::from(len).next_multiple_of(EXTENT_ALIGN);
        // Behind the last range where that fits, so that many ranges are quick to make; else first fit.
        let mut offset = used.0.last_key_value().map_or(0, |(start, len)| start + len);
        if offset + size > self.map.len() {
            offset = 0;
            for (start, taken) in &used.0 {
                if offset + size <= *start {
                    break;
                }
                offset = start + taken;
            }
        }
        if offset + size > self.map.len() {
            return None;
        }
        used.0.insert(offset, size);
        Some(Memory {
            used: Arc::clone(&self.used),
            extent: Extent { pool: PoolId(3), offset, len },
        })
    }

    fn insert(&self, key: BlockKey, memory: Memory, checksum: u64, fetched: bool) -> bool {
        let mut blocks = self.blocks.lock().unwrap();
        if blocks.contains_key(&key) {
            return false;
        }
        let slot = u32::try_from(memory.extent.offset / EXTENT_ALIGN).unwrap();
        let block = Block {
            memory,
            checksum,
            id: ResidentId { slot, generation: Generation(1) },
            pins: 0,
            fetched,
        };
        blocks.insert(key, block);
        true
    }

    fn pin(&self, key: BlockKey) -> Option<AcquireOutcome> {
        let mut blocks = self.blocks.lock().unwrap();
        let block = blocks.get_mut(&key)?;
        block.pins += 1;
        Some(AcquireOutcome::Ready(HeldBlock {
            origin: if block.fetched { BlockOrigin::Fetched } else { BlockOrigin::Local },
            rank: EvictionRank::FIRST,
            extent: block.memory.extent,
            checksum: block.checksum,
            hold: block.id,
        }))
    }

    fn fetch(&self, key: BlockKey) -> AcquireOutcome {
        let Some(bytes) = self.remote.lock().unwrap().get(&key).cloned() else {
            return AcquireOutcome::NotFound;
        };
        let Some(memory) = self.allocate(u32::try_from(bytes.len()).unwrap()) else {
            return AcquireOutcome::Busy(BusyReason::Memory);
        };
        self.map.write(memory.extent.offset, &bytes).unwrap();
        self.insert(key, memory, xxh3_64(&bytes), true);
        self.pin(key).unwrap_or(AcquireOutcome::Failed)
    }
}

fn key(namespace: &Namespace, hash: BlockHash) -> BlockKey {
    BlockKey { namespace: namespace.id(), hash }
}

impl DoorService for StandIn {
    type Reserved = Memory;
    type Client = ();
    type Opened = LayoutId;

    fn pools(&self) -> Vec<PoolHandle<'_>> {
        vec![PoolHandle { id: PoolId(3), bytes: self.map.len(), file: self.file.as_fd() }]
    }

    fn pool(&self, id: PoolId) -> Option<Arc<Mapping>> {
        (id == PoolId(3)).then(|| Arc::clone(&self.map))
    }

    fn import(
        &self,
        owner: &Arc<Owner>,
        (source, bytes): (&MemorySource, u64),
        file: Option<OwnedFd>,
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        match (source, file) {
            (MemorySource::Memfd, Some(file)) => {
                let memory = SharedMemory::import(file, bytes, (&self.claims, owner))?;
                Ok(Arc::new(Gated::new(memory, &self.gate)))
            }
            (MemorySource::Memfd, None) => Err(ImportError::NotMemory),
            _ => Err(ImportError::NoGpu("this node has no GPU".to_owned())),
        }
    }

    fn reserve(&self, sizes: &[u32]) -> Result<Vec<Memory>, ReserveError> {
        if sizes.iter().any(|size| u64::from(*size) > self.map.len()) {
            return Err(ReserveError::Refused("no pool is so large".to_owned()));
        }
        sizes
            .iter()
            .map(|size| self.allocate(*size))
            .collect::<Option<_>>()
            .ok_or(ReserveError::Busy { pause_ms: 2 })
    }

    fn publish(
        &self,
        namespace: &Namespace,
        blocks: Vec<Publish<Memory>>,
        pulled: bool,
    ) -> Vec<PublishOutcome> {
        let cause = if pulled { ResidentCause::PeerFetch } else { ResidentCause::PartialHit };
        self.names.lock().unwrap().insert(namespace.id(), *namespace);
        blocks
            .into_iter()
            .map(|block| {
                let key = key(namespace, block.hash);
                if self.insert(key, block.memory, block.checksum, false) {
                    PublishOutcome::Stored
                } else {
                    PublishOutcome::AlreadyResident(cause)
                }
            })
            .collect()
    }

    fn client(&self) -> Arc<()> {
        Arc::default()
    }

    async fn open(
        self: Arc<Self>,
        _client: Arc<()>,
        (id, _imported): (LayoutId, Arc<Imported>),
        _blocks: (Namespace, Vec<MovedBlock>),
    ) -> Result<LayoutId, String> {
        let reachable = self.reachable.load(Ordering::Relaxed);
        reachable.then_some(id).ok_or_else(|| "save them instead".to_owned())
    }

    fn publish_in_place(
        &self,
        opened: LayoutId,
        _namespace: &Namespace,
        blocks: Vec<InPlace>,
        _pulled: bool,
    ) -> Vec<PublishOutcome> {
        let mut all = self.in_place.lock().unwrap();
        let stored = vec![PublishOutcome::Stored; blocks.len()];
        let one = |block: InPlace| ((opened, block.block), (block.hash, block.checksum));
        all.extend(blocks.into_iter().map(one));
        stored
    }

    fn in_use(&self, _client: &(), layout: LayoutId, blocks: &[MovedBlock]) -> Option<String> {
        let all = self.in_place.lock().unwrap();
        let mut blocks = blocks.iter().map(|moved| moved.block);
        let BlockId(block) = blocks.find(|block| all.contains_key(&(layout, *block)))?;
        Some(format!("block {block} is published in place"))
    }

    async fn withdraw(
        self: Arc<Self>,
        _client: Arc<()>,
        layout: LayoutId,
        blocks: Vec<BlockId>,
    ) -> u32 {
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        let mut all = self.in_place.lock().unwrap();
        let gone = blocks.iter().filter_map(|block| all.remove(&(layout, *block)));
        u32::try_from(gone.count()).unwrap()
    }

    fn leave(self: Arc<Self>, _client: Arc<()>) {
        self.in_place.lock().unwrap().clear();
        self.left.fetch_add(1, Ordering::Relaxed);
    }

    async fn acquire(
        self: Arc<Self>,
        namespace: Namespace,
        hashes: Vec<BlockHash>,
        source: Source,
    ) -> Vec<AcquireOutcome> {
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        hashes
            .into_iter()
            .map(|hash| {
                let key = key(&namespace, hash);
                self.pin(key).unwrap_or_else(|| {
                    if source != Source::Here { self.fetch(key) } else { AcquireOutcome::NotFound }
                })
            })
            .collect()
    }

    async fn land(
        self: Arc<Self>,
        _client: Arc<()>,
        layout: (LayoutId, Arc<Imported>),
        (namespace, blocks): (Namespace, Vec<MovedBlock>),
        source: Source,
    ) -> Result<Vec<AcquireOutcome>, NotLanded> {
        if !self.reachable.load(Ordering::Relaxed) {
            return Err(NotLanded::NoWay("no card reaches it".to_owned()));
        }
        let hashes = blocks.iter().map(|moved| moved.hash).collect();
        let mut outcomes = Arc::clone(&self).acquire(namespace, hashes, Source::Here).await;
        for (outcome, moved) in outcomes.iter_mut().zip(&blocks) {
            if *outcome == AcquireOutcome::NotFound && source != Source::Here {
                *outcome = self.land_one(&layout, &namespace, moved);
            }
        }
        Ok(outcomes)
    }

    fn release(&self, holds: &[ResidentId]) {
        let mut blocks = self.blocks.lock().unwrap();
        for hold in holds.iter().filter(|hold| **hold != LANDED) {
            let block = blocks.values_mut().find(|block| block.id == *hold);
            block.unwrap().pins -= 1;
        }
    }

    async fn reset_health(&self, node: Option<NodeId>) -> u32 {
        u32::from(node.is_none())
    }

    fn finished_sending(&self, _namespace: &Namespace, hashes: &[BlockHash]) -> u32 {
        let mut finished = self.finished.lock().unwrap();
        let before = finished.len();
        finished.extend_from_slice(hashes);
        finished.sort_unstable();
        finished.dedup();
        u32::try_from(finished.len() - before).unwrap()
    }

    async fn flush(&self) -> bool {
        let mut registry = self.registry.subscribe();
        registry.wait_for(|up| *up).await.is_ok()
    }

    async fn stat(&self) -> serde_json::Value {
        let blocks = self.blocks.lock().unwrap();
        serde_json::to_value(StatReport {
            pools: vec![PoolStat { id: 3, bytes: self.map.len(), free_bytes: 0 }],
            residents: ResidentStat {
                blocks: blocks.len() as u64,
                ranks: vec![blocks.len() as u64],
                ..ResidentStat::default()
            },
            ..StatReport::default()
        })
        .unwrap()
    }

    fn list(&self, namespace: Option<&Namespace>, cursor: u64, max: usize) -> Page {
        let blocks = self.blocks.lock().unwrap();
        let names = self.names.lock().unwrap();
        let start = usize::try_from(cursor).unwrap();
        let all: Vec<ListEntry> = blocks
            .iter()
            .filter(|(key, _)| namespace.is_none_or(|name| name.id() == key.namespace))
            .map(|(key, block)| ListEntry {
                namespace: key.namespace,
                name: names.get(&key.namespace).copied(),
                hash: key.hash,
                rank: EvictionRank::FIRST,
                bytes: block.memory.extent.len,
                pins: block.pins,
                requesters: 0,
            })
            .collect();
        let end = all.len().min(start + max);
        Page {
            entries: all[start.min(end)..end].to_vec(),
            next: if end < all.len() { end as u64 } else { 0 },
        }
    }

    fn evictions(&self, since: u64, max: usize) -> Vec<EvictedBlock> {
        let first = since + 1;
        (first..4)
            .take(max)
            .map(|sequence| EvictedBlock {
                sequence,
                namespace: NamespaceId(9),
                hash: BlockHash::new(&sequence.to_le_bytes()).unwrap(),
                rank: EvictionRank::LAST,
            })
            .collect()
    }
}

/// Polls until it is so, and fails where it does not come to be.
#[track_caller]
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Deadline::after(Duration::from_secs(60));
    while !so() {
        assert!(deadline.pause(Duration::from_millis(1)), "never: {what}");
    }
}

pub(crate) fn hash(byte: u8) -> BlockHash {
    BlockHash::new(&[byte; 32]).unwrap()
}

pub(crate) fn namespace() -> Namespace {
    "test/tp1".parse().unwrap()
}

pub(crate) fn remote(service: &StandIn, hash: BlockHash, bytes: &[u8]) {
    let key = key(&namespace(), hash);
    service.remote.lock().unwrap().insert(key, bytes.to_vec());
}

/// Names in a directory, sorted.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
