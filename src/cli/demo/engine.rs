//! The demonstration's engine with a GPU: its KV cache lies in the GPU's memory, a layer's keys and values
//! apart, and nodes copy blocks out of it and into it by their numbers.

use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

use super::story::{BLOCK_BYTES, BLOCKS};
use crate::cli::CliError;
use crate::client::Client;
use crate::cuda::{
    Context, CopyQueue, DeviceMemory, Driver, End, HostRegistration, LIBRARY_NAME, Piece,
};
use crate::layout::{BlockId, KvSplit, Tensor};
use crate::memory::Mapping;
use crate::protocol::door::{DeviceUuid, LoadOutcome, MovedBlock, PublishOutcome, Source};
use crate::types::{BlockHash, Namespace};

const LAYERS: u16 = 4;

/// Segments of a block: keys and values of each layer.
const SEGMENTS: u32 = LAYERS as u32 * 2;

const SEGMENT_BYTES: u32 = BLOCK_BYTES / SEGMENTS;

/// Bytes of the cache.
const CACHE_BYTES: u64 = BLOCK_BYTES as u64 * BLOCKS as u64;

/// From one segment of a block to the next.
const PITCH: u64 = SEGMENT_BYTES as u64 * BLOCKS as u64;

/// An engine on GPU 0.
#[derive(Debug)]
pub(super) struct Engine {
    context: Arc<Context>,
    /// Caches of steps that are over: nodes tell memory by its handle, which is not used twice.
    caches: RefCell<Vec<Arc<DeviceMemory>>>,
}

impl Engine {
    pub(super) fn open(library: Option<&Path>) -> Result<Self, CliError> {
        let library = library.unwrap_or(Path::new(LIBRARY_NAME));
        let open = || Context::primary(&Driver::open(library)?.device(0)?);
        let context =
            open().map_err(|error| CliError::failed(format!("--gpu cannot be had: {error}")))?;
        Ok(Self { context, caches: RefCell::default() })
    }

    /// What it computes with.
    pub(super) fn name(&self) -> &str {
        &self.context.device().attributes().name
    }

    /// Saves blocks of a new cache that holds these bytes.
    pub(super) fn save(
        &self,
        client: &Client,
        namespace: &Namespace,
        (hashes, bytes): (&[BlockHash], &[Vec<u8>]),
    ) -> Result<(), CliError> {
        let cache = self.cache()?;
        self.exchange(&cache, |host, queue| {
            host.mapping().write(0, &bytes.concat()).map_err(CliError::failed)?;
            queue(&End::Host(Arc::clone(host)), &End::Device(Arc::clone(&cache)), true)
        })?;
        let layout = client.import_layout(blocks(), &[self.tensor(client, &cache)?])?;
        let saved = layout.save(namespace, &numbered(hashes), false)?;
        if saved.iter().all(|outcome| *outcome == PublishOutcome::Stored) {
            return Ok(());
        }
        Err(CliError::failed(format!("blocks were not saved from GPU memory: {saved:?}")))
    }

    /// Loads blocks into a new cache; their bytes, as they lie there.
    pub(super) fn load(
        &self,
        client: &Client,
        namespace: &Namespace,
        (hashes, source): (&[BlockHash], Source),
    ) -> Result<Vec<u8>, CliError> {
        let cache = self.cache()?;
        let layout = client.import_layout(blocks(), &[self.tensor(client, &cache)?])?;
        let loaded = layout.load(namespace, &numbered(hashes), source)?;
        if !loaded.iter().all(|outcome| matches!(outcome, LoadOutcome::Loaded { .. })) {
            return Err(CliError::failed(format!(
                "blocks did not get into GPU memory: {loaded:?}"
            )));
        }
        let mut bytes = vec![0; BLOCK_BYTES as usize * BLOCKS];
        self.exchange(&cache, |host, queue| {
            queue(&End::Device(Arc::clone(&cache)), &End::Host(Arc::clone(host)), false)?;
            host.mapping().read(0, &mut bytes).map_err(CliError::failed)
        })?;
        Ok(bytes)
    }

    fn cache(&self) -> Result<Arc<DeviceMemory>, CliError> {
        let bound = self.context.bind().map_err(CliError::failed)?;
        let cache = DeviceMemory::allocate_plain(&bound, CACHE_BYTES).map_err(CliError::failed)?;
        self.caches.borrow_mut().push(Arc::clone(&cache));
        Ok(cache)
    }

    /// Gives the node the cache; how blocks lie in it.
    fn tensor(&self, client: &Client, cache: &DeviceMemory) -> Result<Tensor, CliError> {
        let bound = self.context.bind().map_err(CliError::failed)?;
        let handle = cache.ipc_handle(&bound).map_err(CliError::failed)?;
        let device = DeviceUuid(self.context.device().attributes().uuid);
        Ok(Tensor {
            allocation: client.import_cuda_ipc(device, handle.0, CACHE_BYTES)?,
            offset: 0,
            layers: LAYERS,
            layer_stride: 2 * PITCH,
            kv: KvSplit::Split { stride: PITCH },
            block_stride: SEGMENT_BYTES.into(),
            segment_bytes: SEGMENT_BYTES,
        })
    }

    /// Host memory for all blocks, one after the other, and the copies between it and a cache.
    fn exchange(
        &self,
        cache: &Arc<DeviceMemory>,
        act: impl FnOnce(
            &Arc<HostRegistration>,
            &mut dyn FnMut(&End, &End, bool) -> Result<(), CliError>,
        ) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let bound = self.context.bind().map_err(CliError::failed)?;
        let mapping = Mapping::anonymous("kvrail-demo", cache.len()).map_err(CliError::failed)?;
        let host = HostRegistration::new(&bound, &Arc::new(mapping)).map_err(CliError::failed)?;
        let mut queue = CopyQueue::new(&bound, 1).map_err(CliError::failed)?;
        act(&host, &mut |from, to, into_cache| {
            let pieces: Vec<Piece> = (0..BLOCKS as u64).map(|at| piece(at, into_cache)).collect();
            queue.submit(&bound, (from, to), &pieces, 0).map_err(CliError::failed)?;
            queue.drain(&bound, &mut Vec::new()).map_err(CliError::failed)
        })
    }
}

/// The segments of a block, between its place in host memory and those in the cache.
fn piece(block: u64, into_cache: bool) -> Piece {
    let (segment, whole) = (u64::from(SEGMENT_BYTES), u64::from(BLOCK_BYTES));
    let (host, cache) = ((block * whole, segment), (block * segment, PITCH));
    let ((from, from_pitch), (to, to_pitch)) =
        if into_cache { (host, cache) } else { (cache, host) };
    Piece { from, from_pitch, to, to_pitch, width: segment, rows: SEGMENTS.into() }
}

fn blocks() -> u32 {
    u32::try_from(BLOCKS).unwrap_or(u32::MAX)
}

fn numbered(hashes: &[BlockHash]) -> Vec<MovedBlock> {
    let number = |(at, hash): (u32, &BlockHash)| MovedBlock { hash: *hash, block: BlockId(at) };
    (0..).zip(hashes).map(number).collect()
}
