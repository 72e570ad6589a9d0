//! Batches of blocks on their way between an engine's memory and the pools.
//!
//! A batch is cut into pieces that several threads take in turn, each with a copier of its own: while
//! one sums up what has arrived, another one's copies run, and neither the copy engines of a GPU nor
//! the bus wait for a checksum. What must not go away under a copy (the engine's memory, reservations,
//! pins) is shared by all of these threads until the last one has ended, whatever becomes of the task
//! that waits for them.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::service::Imported;
use crate::layout::{AllocationId, BlockId, Layout};
use crate::memory::{Copier, CopyError, Direction, Mapping, StridedCopy};
use crate::protocol::door::{DeviceUuid, EngineEvent};
use crate::types::{Extent, PoolId};

/// Bytes that one thread takes at a time, or one block: long enough for the cost of a stream's wait not
/// to show, short enough for the first sum of a load and the last one of a save, during which no copy
/// runs, to be a small part of a few dozen MiB.
const PIECE_BYTES: usize = if cfg!(test) { 1 << 10 } else { 1 << 20 };

/// Bytes of a piece for each segment of its blocks, so that a copy of that segment of all of them takes
/// longer than its launch: some 2 microseconds on a bus of 50 GB/s.
const SEGMENT_BYTES: usize = if cfg!(test) { 1 << 6 } else { 64 << 10 };

/// Threads of one batch. One sums up some 8 GB/s: eight keep up with the fastest bus of a GPU, PCIe 5 of
/// 16 lanes.
const THREADS_MAX: usize = 8;

/// Blocks of a layout, and where each lies in a pool.
#[derive(Debug)]
pub struct Batch {
    /// The pools' memory, by their numbers.
    pub pools: Vec<(PoolId, Arc<Mapping>)>,
    /// The layout.
    pub imported: Arc<Imported>,
    /// Which way they go.
    pub direction: Direction,
    /// What copies out of the engine's memory wait for.
    pub event: Option<EngineEvent>,
    /// Each block, and where it lies in a pool.
    pub pairs: Vec<(BlockId, Extent)>,
    /// For a load: the checksum of each block. A block with another one is not copied.
    pub expected: Vec<u64>,
}

/// A batch, what it keeps, and how far its threads have come.
struct Running<K> {
    batch: Batch,
    keeps: K,
    next: AtomicUsize,
}

/// Why blocks were not copied, in words.
#[derive(Debug)]
pub struct NotCopied(String);

impl Display for NotCopied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Batch {
    /// Copies the blocks; the checksum of each one's bytes in the pool, in order. `keeps` is what must
    /// stay until then, and comes back.
    ///
    /// # Errors
    /// [`NotCopied`]; what was copied to is of no use then.
    pub async fn run<K: Send + Sync + 'static>(self, keeps: K) -> Result<(K, Vec<u64>), NotCopied> {
        let count = self.pairs.len();
        let pieces = count.div_ceil(self.piece());
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        let running = Arc::new(Running { batch: self, keeps, next: AtomicUsize::new(0) });
        let threads: Vec<_> = (0..pieces.min(most).min(THREADS_MAX))
            .map(|_| {
                let running = Arc::clone(&running);
                tokio::task::spawn_blocking(move || running.work())
            })
            .collect();
        let (mut sums, mut outcome) = (vec![0; count], Ok(()));
        // All of them, even after one has failed: none may be copying when this returns.
        for thread in threads {
            match thread.await {
                Ok(Ok(found)) => {
                    for (at, sum) in found {
                        if let Some(place) = sums.get_mut(at) {
                            *place = sum;
                        }
                    }
                }
                Ok(Err(error)) => outcome = Err(NotCopied(error.to_string())),
                Err(died) => outcome = Err(NotCopied(died.to_string())),
            }
        }
        outcome?;
        let running = Arc::into_inner(running);
        let gone = || NotCopied("a thread still runs".to_owned());
        running.map(|running| (running.keeps, sums)).ok_or_else(gone)
    }

    /// Blocks of a piece.
    fn piece(&self) -> usize {
        let layout = &self.imported.layout;
        let bytes = PIECE_BYTES.max(layout.segments_per_block() * SEGMENT_BYTES);
        (bytes / layout.block_bytes() as usize).max(1)
    }

    fn pool(&self, wanted: PoolId) -> Result<&Arc<Mapping>, CopyError> {
        let pool = self.pools.iter().find(|(id, _)| *id == wanted).map(|(_, pool)| pool);
        pool.ok_or_else(|| missing("pool"))
    }

    fn checksum(&self, extent: Extent) -> Result<u64, CopyError> {
        Ok(self.pool(extent.pool)?.checksum(extent.offset, extent.len.into())?)
    }

    /// Moves the blocks from `start` on, as many as a piece has; their places and checksums.
    fn move_piece<'a>(
        &'a self,
        start: usize,
        copiers: &mut Copiers<'a>,
    ) -> Result<Vec<(usize, u64)>, CopyError> {
        let end = (start + self.piece()).min(self.pairs.len());
        let pairs = self.pairs.get(start..end).unwrap_or_default();
        let (mut sums, mut good) =
            (Vec::with_capacity(pairs.len()), Vec::with_capacity(pairs.len()));
        for (at, pair) in (start..).zip(pairs) {
            if self.direction == Direction::Load {
                let sum = self.checksum(pair.1)?;
                sums.push((at, sum));
                if self.expected.get(at) != Some(&sum) {
                    continue;
                }
            }
            good.push(*pair);
        }
        Copies::of(&self.imported.layout, &good).run(self, copiers)?;
        if self.direction == Direction::Save {
            for (at, (_, extent)) in (start..).zip(pairs) {
                sums.push((at, self.checksum(*extent)?));
            }
        }
        Ok(sums)
    }
}

impl<K> Running<K> {
    /// What one thread does.
    fn work(&self) -> Result<Vec<(usize, u64)>, CopyError> {
        let (mut all, piece) = (Vec::new(), self.batch.piece());
        let mut copiers = Copiers::new();
        loop {
            // Relaxed: each number is taken once; the blocks behind it are nobody else's.
            let start = self.next.fetch_add(piece, Ordering::Relaxed);
            if start >= self.batch.pairs.len() {
                return Ok(all);
            }
            all.extend(self.batch.move_piece(start, &mut copiers)?);
        }
    }
}

/// What one thread copies with: a copier for each GPU, and one for host memory. Each waits for the
/// engine's event once, before its first copy.
type Copiers<'a> = BTreeMap<Option<DeviceUuid>, Box<dyn Copier + 'a>>;

/// Copies by what they go between.
#[derive(Debug, Default)]
struct Copies(BTreeMap<(AllocationId, PoolId), Vec<StridedCopy>>);

impl Copies {
    /// Copies of these blocks, as few as one of three ways makes of them: the rows of one block, the
    /// segments of one block after the other, or each segment of all blocks. Which one that is depends
    /// on what lies beside each other, in a layer, in a block, or from block to block.
    fn of(layout: &Layout, pairs: &[(BlockId, Extent)]) -> Self {
        let mut best = Self::by_rows(layout, pairs);
        if layout.segments_per_block() > 1 {
            for other in [Self::by_blocks(layout, pairs), Self::by_segments(layout, pairs)] {
                if other.count() < best.count() {
                    best = other;
                }
            }
        }
        best
    }

    fn by_rows(layout: &Layout, pairs: &[(BlockId, Extent)]) -> Self {
        let mut made = Self::default();
        for (block, extent) in pairs {
            for rows in layout.rows(*block) {
                let copy = StridedCopy {
                    memory_offset: rows.offset,
                    memory_pitch: rows.pitch,
                    pool_offset: extent.offset + rows.logical,
                    pool_pitch: rows.logical_pitch,
                    width: rows.width,
                    rows: rows.count,
                };
                made.add((rows.allocation, extent.pool), copy);
            }
        }
        made.joined()
    }

    fn by_blocks(layout: &Layout, pairs: &[(BlockId, Extent)]) -> Self {
        let mut made = Self::default();
        for (block, extent) in pairs {
            let mut logical = extent.offset;
            for segment in layout.segments(*block) {
                let copy = StridedCopy::row(segment.offset, logical, segment.len);
                logical += u64::from(segment.len);
                made.add((segment.allocation, extent.pool), copy);
            }
        }
        made.joined()
    }

    fn by_segments(layout: &Layout, pairs: &[(BlockId, Extent)]) -> Self {
        let mut made = Self::default();
        let block = |(block, extent): &(BlockId, Extent)| {
            (layout.segments(*block), extent.pool, extent.offset)
        };
        let mut blocks: Vec<_> = pairs.iter().map(block).collect();
        for _segment in 0..layout.segments_per_block() {
            for (segments, pool, logical) in &mut blocks {
                let Some(segment) = segments.next() else { continue };
                let copy = StridedCopy::row(segment.offset, *logical, segment.len);
                *logical += u64::from(segment.len);
                made.add((segment.allocation, *pool), copy);
            }
        }
        made.joined()
    }

    fn add(&mut self, between: (AllocationId, PoolId), copy: StridedCopy) {
        self.0.entry(between).or_default().push(copy);
    }

    fn joined(mut self) -> Self {
        self.0.values_mut().for_each(StridedCopy::join_all);
        self
    }

    fn count(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }

    /// Carries them out. When this returns well none is running; otherwise the copiers wait when they
    /// are dropped.
    fn run<'a>(&self, batch: &'a Batch, copiers: &mut Copiers<'a>) -> Result<(), CopyError> {
        for ((allocation, pool), copies) in &self.0 {
            let memory = batch.imported.memory.get(usize::from(allocation.0));
            let memory = memory.ok_or_else(|| missing("allocation"))?;
            let copier = match copiers.entry(memory.device()) {
                Entry::Occupied(there) => there.into_mut(),
                Entry::Vacant(place) => {
                    let mut copier = memory.copier()?;
                    if let Some(event) = &batch.event {
                        copier.wait_for(event)?;
                    }
                    place.insert(copier)
                }
            };
            copier.start(batch.direction, (&**memory, copies), batch.pool(*pool)?)?;
        }
        copiers.values_mut().try_for_each(|copier| copier.finish())
    }
}

fn missing(what: &str) -> CopyError {
    CopyError::Device { call: "looking up", error: format!("there is no such {what}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{KvSplit, Tensor};

    const SEGMENT: u32 = 64;

    fn tensor(layers: u16, strides: (u64, KvSplit, u64)) -> Tensor {
        let (layer_stride, kv, block_stride) = strides;
        let (allocation, segment_bytes) = (AllocationId(0), SEGMENT);
        Tensor { allocation, offset: 0, layers, layer_stride, kv, block_stride, segment_bytes }
    }

    /// How many copies move four blocks, which lie next to each other in a pool.
    fn copies(tensors: Vec<Tensor>) -> usize {
        let layout = Layout::new(tensors, 8, |_| Some(1 << 20)).unwrap();
        let len = layout.block_bytes();
        let extent = |at| Extent { pool: PoolId(0), offset: at * u64::from(len), len };
        let pairs: Vec<_> = (2..6).map(|at| (BlockId(at), extent(u64::from(at) + 100))).collect();
        let copies = Copies::of(&layout, &pairs);
        let bytes = |copy: &StridedCopy| u64::from(copy.width) * u64::from(copy.rows);
        let moved: u64 = copies.0.values().flatten().map(bytes).sum();
        assert_eq!(moved, 4 * u64::from(len));
        copies.count()
    }

    #[test]
    fn blocks_move_in_as_few_copies_as_their_layout_allows() {
        let split = |stride| KvSplit::Split { stride };
        // All of a block beside each other, and blocks beside each other: one row.
        assert_eq!(copies(vec![tensor(4, (128, split(64), 512))]), 1);
        // With room between the blocks: a row for each.
        assert_eq!(copies(vec![tensor(4, (128, split(64), 1024))]), 1);
        // [layers, 2, blocks] at even distances: all segments of a block.
        assert_eq!(copies(vec![tensor(4, (1024, split(512), 64))]), 4);
        // The values somewhere else: keys and values of each block.
        assert_eq!(copies(vec![tensor(4, (1024, split(8192), 64))]), 8);
        // Six layers of their own allocations: each segment of all blocks.
        let layer = |at| Tensor { allocation: AllocationId(at), ..tensor(1, (0, split(8192), 64)) };
        assert_eq!(copies((0..6).map(layer).collect()), 12);
    }
}
