//! A node of one pool and no peers, for tests of the door, the client and the commands: real memory,
//! simple bookkeeping, and counters of what is reserved and pinned.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use tokio::sync::{oneshot, watch};
use xxhash_rust::xxh3::xxh3_64;

use super::{Door, DoorService, Page, PoolHandle, Publish, ReserveError, Reserved};
use crate::event::BusyReason;
use crate::limits::EXTENT_ALIGN;
use crate::memory::{
    Claims, Copier, CopyError, Direction, EngineMemory, ImportError, Mapping, SharedMemory,
    StridedCopy,
};
use crate::protocol::door::stat::{PoolStat, ResidentStat, StatReport};
use crate::protocol::door::{
    AcquireOutcome, BlockOrigin, DeviceUuid, EngineEvent, EvictedBlock, HeldBlock, ListEntry,
    MemorySource, PublishOutcome, Source,
};
use crate::runtime::deadline::Deadline;
use crate::types::{
    BlockHash, BlockKey, EvictionRank, Extent, Generation, Namespace, NamespaceId, NodeId, PoolId,
    ResidentCause, ResidentId,
};

/// What copies of imported memory wait for before they end.
#[derive(Debug)]
pub(crate) struct Gate(Mutex<bool>, Condvar);

impl Gate {
    pub(crate) fn set(&self, open: bool) {
        *self.0.lock().unwrap() = open;
        self.1.notify_all();
    }
}

#[derive(Debug)]
struct Gated(SharedMemory, Arc<Gate>);

impl EngineMemory for Gated {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn device(&self) -> Option<DeviceUuid> {
        self.0.device()
    }

    fn copier(&self) -> Result<Box<dyn Copier + '_>, CopyError> {
        Ok(Box::new(GatedCopier(self.0.copier()?, Arc::clone(&self.1))))
    }
}

#[derive(Debug)]
struct GatedCopier<'a>(Box<dyn Copier + 'a>, Arc<Gate>);

impl Copier for GatedCopier<'_> {
    fn wait_for(&mut self, event: &EngineEvent) -> Result<(), CopyError> {
        self.0.wait_for(event)
    }

    fn start(
        &mut self,
        direction: Direction,
        (memory, copies): (&dyn EngineMemory, &[StridedCopy]),
        pool: &Arc<Mapping>,
    ) -> Result<(), CopyError> {
        let memory: &dyn Any = memory;
        let Gated(inside, _gate) = memory.downcast_ref().unwrap();
        self.0.start(direction, (inside, copies), pool)
    }

    fn finish(&mut self) -> Result<(), CopyError> {
        let shut = self.1.0.lock().unwrap();
        drop(self.1.1.wait_while(shut, |open| !*open).unwrap());
        self.0.finish()
    }
}

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
}

impl StandIn {
    fn new(bytes: u64) -> Self {
        let file = File::from(rustix::fs::memfd_create("pool", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        Self {
            map: Arc::new(Mapping::new(&file, bytes).unwrap()),
            claims: Claims::default(),
            gate: Arc::new(Gate(Mutex::new(true), Condvar::new())),
            file,
            used: Arc::default(),
            blocks: Mutex::default(),
            names: Mutex::default(),
            remote: Mutex::default(),
            open: watch::Sender::new(true),
            registry: watch::Sender::new(true),
            finished: Mutex::default(),
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

    fn pools(&self) -> Vec<PoolHandle<'_>> {
        vec![PoolHandle { id: PoolId(3), bytes: self.map.len(), file: self.file.as_fd() }]
    }

    fn pool(&self, id: PoolId) -> Option<Arc<Mapping>> {
        (id == PoolId(3)).then(|| Arc::clone(&self.map))
    }

    fn import(
        &self,
        source: &MemorySource,
        bytes: u64,
        file: Option<OwnedFd>,
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        match (source, file) {
            (MemorySource::Memfd, Some(file)) => {
                let memory = SharedMemory::import(file, bytes, &self.claims)?;
                Ok(Arc::new(Gated(memory, Arc::clone(&self.gate))))
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

    fn release(&self, holds: &[ResidentId]) {
        let mut blocks = self.blocks.lock().unwrap();
        for hold in holds {
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

/// A door that is served until this is dropped.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) service: Arc<StandIn>,
    pub(crate) directory: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    served: Option<tokio::task::JoinHandle<()>>,
    runtime: tokio::runtime::Runtime,
}

impl Running {
    pub(crate) fn start(pool_bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let service = Arc::new(StandIn::new(pool_bytes));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let (stop, stopped) = oneshot::channel();
        let door = {
            let _in_runtime = runtime.enter();
            Door::bind(&directory.path().join("door"), 0o600).unwrap()
        };
        let served = runtime.spawn(door.serve(Arc::clone(&service), async {
            stopped.await.ok();
        }));
        Self { service, directory, stop: Some(stop), served: Some(served), runtime }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("door")
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Ends the door and waits until it has ended.
    pub(crate) fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(served) = self.served.take() {
            self.runtime.block_on(served).unwrap();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
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
