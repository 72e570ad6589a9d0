//! Whole saves and loads: this process is an engine, its node a `kvrail serve` of its own. What counts is
//! the engine's wait for the answer: the copies, the checksums, the node's bookkeeping, two messages.

use std::sync::Arc;
use std::time::Duration;

use super::measure::in_turn;
use super::report::{Report, Row};
use super::{Run, pattern, uuid};
use crate::cli::CliError;
use crate::cli::cluster::Cluster;
use crate::client::{Client, ClientError, ImportedLayout};
use crate::cuda::{DeviceMemory, PinnedMemory};
use crate::layout::{AllocationId, BlockId, KvSplit, Tensor};
use crate::limits;
use crate::protocol::door::{LoadOutcome, MovedBlock, PublishOutcome, Source};
use crate::runtime::clock::Clock;
use crate::runtime::deadline::Deadline;
use crate::types::{BlockHash, Namespace};

/// Batches that the node's pool holds: saves go on while older blocks are evicted.
const POOL_BATCHES: u64 = 12;

/// How long the node may be busy.
const PATIENCE: Duration = Duration::from_secs(10);

/// Layers of the layout by layers, keys and values apart.
const LAYERS: u16 = 16;

const SHAPES: [&str; 2] = ["in one piece", "16 layers, K and V"];

/// An engine of one layout.
struct Engine<'c> {
    layout: ImportedLayout<'c>,
    namespace: Namespace,
    blocks: Vec<BlockId>,
    /// How many batches were saved, so that no two have the same hashes.
    saved: u64,
}

/// Measures saves and loads at each size of a block, in one piece and by layers.
pub(super) fn run(run: &mut Run<'_>, report: &mut Report) -> Result<(), CliError> {
    let batch = u64::from(run.sizes.batch);
    let bound = run.bound;
    let cache = DeviceMemory::allocate_plain(bound, batch).map_err(CliError::failed)?;
    let handle = cache.ipc_handle(bound).map_err(CliError::failed)?;
    let cluster = Cluster::new(std::env::current_exe().map_err(CliError::failed)?)?;
    let registry = cluster.registry("registry", &[])?;
    let pool = format!("{}KiB", (batch * POOL_BATCHES) >> 10);
    let told: Vec<&str> =
        ["--pool", &pool].into_iter().chain(run.driver.iter().map(String::as_str)).collect();
    let node = cluster.node("node", registry.addresses()?.listen, &told)?;
    let device = uuid(bound.context().device());
    for shape in SHAPES {
        for bytes in run.sizes.blocks.clone() {
            if run.is_over() {
                return Ok(());
            }
            // The node waits until it has let go of what the connection before had.
            let client = node.client()?;
            client.import_cuda_ipc(device, handle.0, batch)?;
            let mut engine = Engine::new(&client, shape, (bytes, run.sizes.batch))?;
            let rows = engine.rows(run, &cache, (shape, bytes))?;
            report.rows.extend(rows);
            run.bench.step();
            run.bench.step();
        }
    }
    Ok(())
}

impl<'c> Engine<'c> {
    fn new(client: &'c Client, shape: &str, (bytes, batch): (u32, u32)) -> Result<Self, CliError> {
        let count = (batch / bytes).min(u32::try_from(limits::DOOR_BLOCKS_MAX).unwrap_or(u32::MAX));
        let (blocks, allocation) = (u64::from(count), AllocationId(0));
        let segment = bytes / (2 * u32::from(LAYERS));
        let half = u64::from(segment) * blocks;
        let tensor = if shape == SHAPES[0] {
            Tensor {
                allocation,
                offset: 0,
                layers: 1,
                layer_stride: 0,
                kv: KvSplit::Fused,
                block_stride: bytes.into(),
                segment_bytes: bytes,
            }
        } else {
            Tensor {
                allocation,
                offset: 0,
                layers: LAYERS,
                layer_stride: 2 * half,
                kv: KvSplit::Split { stride: half },
                block_stride: segment.into(),
                segment_bytes: segment,
            }
        };
        Ok(Self {
            layout: client.import_layout(count, &[tensor])?,
            namespace: format!("kvrail-bench/gpu-{bytes}-{}", shape.len())
                .parse()
                .map_err(CliError::failed)?,
            blocks: (0..count).map(BlockId).collect(),
            saved: 0,
        })
    }

    /// The blocks of a batch, whose hashes no other batch has.
    fn batch(&self, number: u64) -> Result<Vec<MovedBlock>, CliError> {
        let moved = |block: &BlockId| {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&number.to_le_bytes()).update(&block.0.to_le_bytes());
            let hash = BlockHash::new(hasher.finalize().as_bytes());
            let hash = hash.ok_or_else(|| CliError::failed("a hash of no length"))?;
            Ok(MovedBlock { hash, block: *block })
        };
        self.blocks.iter().map(moved).collect()
    }

    /// Saves the cache under new hashes; how long the answer took, once the node was not busy.
    fn save(&mut self) -> Result<Duration, CliError> {
        self.saved += 1;
        let (moved, clock, deadline) =
            (self.batch(self.saved)?, Clock::start(), Deadline::after(PATIENCE));
        loop {
            let begun = clock.now();
            match self.layout.save(&self.namespace, &moved, false) {
                Ok(outcomes) if outcomes.iter().all(|it| *it == PublishOutcome::Stored) => {
                    return Ok(clock.now().since(begun));
                }
                Ok(outcomes) => {
                    let why = outcomes.iter().find(|it| **it != PublishOutcome::Stored);
                    return Err(CliError::failed(format!("a block was not saved: {why:?}")));
                }
                Err(ClientError::Busy { pause, .. }) if deadline.pause(pause) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Loads what was saved last into the cache; how long the answer took.
    fn load(&self) -> Result<Duration, CliError> {
        let (moved, clock) = (self.batch(self.saved)?, Clock::start());
        let begun = clock.now();
        let outcomes = self.layout.load(&self.namespace, &moved, Source::Here)?;
        let took = clock.now().since(begun);
        match outcomes.iter().find(|it| !matches!(it, LoadOutcome::Loaded { .. })) {
            None => Ok(took),
            Some(bad) => Err(CliError::failed(format!("a block was not loaded: {bad:?}"))),
        }
    }

    fn rows(
        &mut self,
        run: &mut Run<'_>,
        cache: &Arc<DeviceMemory>,
        (shape, bytes): (&'static str, u32),
    ) -> Result<[Row; 2], CliError> {
        let bound = run.bound;
        let len = self.blocks.len() * bytes as usize;
        let image = pattern(&format!("{shape} {bytes}"), len);
        run.pinned.write(&image).map_err(CliError::failed)?;
        run.pinned.copy_to(bound, cache, len).map_err(CliError::failed)?;
        let saved = {
            let mut driver = |run: &mut Run<'_>| {
                let beside = Arc::clone(&run.beside);
                run.pinned.copy_from(bound, &beside, len).map_err(CliError::failed).map(|()| None)
            };
            in_turn(run, &mut driver, &mut |_: &mut Run<'_>| self.save().map(Some))?
        };
        // Other bytes in the place of what was saved: what is right then came from the node.
        let other = PinnedMemory::new(bound, len).map_err(CliError::failed)?;
        other.copy_to(bound, cache, len).map_err(CliError::failed)?;
        let loaded = {
            let mut driver = |run: &mut Run<'_>| {
                let beside = Arc::clone(&run.beside);
                run.pinned.copy_to(bound, &beside, len).map_err(CliError::failed).map(|()| None)
            };
            in_turn(run, &mut driver, &mut |_: &mut Run<'_>| self.load().map(Some))?
        };
        run.pinned.copy_from(bound, cache, len).map_err(CliError::failed)?;
        let mut arrived = vec![0; len];
        run.pinned.read(&mut arrived).map_err(CliError::failed)?;
        let (wrong, sizes) = (arrived != image, (u64::from(bytes), len as u64));
        Ok([
            Row::new(("save", shape), sizes, saved, wrong),
            Row::new(("load", shape), sizes, loaded, wrong),
        ])
    }
}
