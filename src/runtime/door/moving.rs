//! Batches of blocks on their way between an engine's memory and the pools.
//!
//! A batch is cut into pieces that several threads take in turn, each with a copier of its own: while
//! one sums up what has arrived, another one's copies run, and neither the copy engines of a GPU nor
//! the bus wait for a checksum. What must not go away under a copy (the engine's memory, reservations,
//! pins) is shared by all of these threads until the last one has ended, whatever becomes of the task
//! that waits for them.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::engine::Imported;
use crate::layout::{AllocationId, BlockId};
use crate::memory::{Copier, CopyError, Direction, Mapping, StridedCopy};
use crate::protocol::door::EngineEvent;
use crate::types::{Extent, PoolId};

/// Bytes that one thread takes at a time, or one block: long enough for the cost of a stream's wait not
/// to show, short enough for a save of a few dozen MiB to keep all threads busy.
const PIECE_BYTES: usize = if cfg!(test) { 1 << 10 } else { 4 << 20 };

/// Threads of one batch. Sums of four keep up with a bus of 40 GB/s.
const THREADS_MAX: usize = 4;

/// Blocks of a layout, and where each lies in a pool.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) pools: Vec<(PoolId, Arc<Mapping>)>,
    pub(super) imported: Arc<Imported>,
    pub(super) direction: Direction,
    /// What copies out of the engine's memory wait for.
    pub(super) event: Option<EngineEvent>,
    pub(super) pairs: Vec<(BlockId, Extent)>,
    /// For a load: the checksum of each block. A block with another one is not copied.
    pub(super) expected: Vec<u64>,
}

/// A batch, what it keeps, and how far its threads have come.
struct Running<K> {
    batch: Batch,
    keeps: K,
    next: AtomicUsize,
}

/// Why blocks were not copied, in words.
#[derive(Debug)]
pub(super) struct NotCopied(String);

impl Display for NotCopied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl Batch {
    /// Copies the blocks; the checksum of each one's bytes in the pool, in order. `keeps` is what must
    /// stay until then, and comes back.
    pub(super) async fn run<K: Send + Sync + 'static>(
        self,
        keeps: K,
    ) -> Result<(K, Vec<u64>), NotCopied> {
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
        (PIECE_BYTES / self.imported.layout.block_bytes() as usize).max(1)
    }

    fn pool(&self, wanted: PoolId) -> Result<&Arc<Mapping>, CopyError> {
        let pool = self.pools.iter().find(|(id, _)| *id == wanted).map(|(_, pool)| pool);
        pool.ok_or_else(|| missing("pool"))
    }

    fn checksum(&self, extent: Extent) -> Result<u64, CopyError> {
        Ok(self.pool(extent.pool)?.checksum(extent.offset, extent.len.into())?)
    }

    /// Moves the blocks from `start` on, as many as a piece has; their places and checksums.
    fn move_piece(&self, start: usize) -> Result<Vec<(usize, u64)>, CopyError> {
        let end = (start + self.piece()).min(self.pairs.len());
        let pairs = self.pairs.get(start..end).unwrap_or_default();
        let mut sums = Vec::with_capacity(pairs.len());
        let mut copies = Copies::default();
        for (at, (block, extent)) in (start..).zip(pairs) {
            if self.direction == Direction::Load {
                let sum = self.checksum(*extent)?;
                sums.push((at, sum));
                if self.expected.get(at) != Some(&sum) {
                    continue;
                }
            }
            copies.add(&self.imported, *block, *extent);
        }
        copies.run(self)?;
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
        loop {
            // Relaxed: each number is taken once; the blocks behind it are nobody else's.
            let start = self.next.fetch_add(piece, Ordering::Relaxed);
            if start >= self.batch.pairs.len() {
                return Ok(all);
            }
            all.extend(self.batch.move_piece(start)?);
        }
    }
}

/// Copies by what they go between.
#[derive(Debug, Default)]
struct Copies(BTreeMap<(AllocationId, PoolId), Vec<StridedCopy>>);

impl Copies {
    fn add(&mut self, imported: &Imported, block: BlockId, extent: Extent) {
        for rows in imported.layout.rows(block) {
            self.0.entry((rows.allocation, extent.pool)).or_default().push(StridedCopy {
                memory_offset: rows.offset,
                memory_pitch: rows.pitch,
                pool_offset: extent.offset + rows.logical,
                pool_pitch: rows.logical_pitch,
                width: rows.width,
                rows: rows.count,
            });
        }
    }

    /// Carries them out. When this returns none is running, whatever it answers.
    fn run(&self, batch: &Batch) -> Result<(), CopyError> {
        let mut copiers: Vec<Box<dyn Copier + '_>> = Vec::with_capacity(self.0.len());
        for ((allocation, pool), copies) in &self.0 {
            let memory = batch.imported.memory.get(usize::from(allocation.0));
            let mut copier = memory.ok_or_else(|| missing("allocation"))?.copier()?;
            if let Some(event) = &batch.event {
                copier.wait_for(event)?;
            }
            copier.start(batch.direction, copies, batch.pool(*pool)?)?;
            copiers.push(copier);
        }
        // An early end above drops the copiers, which waits for what they have begun.
        copiers.iter_mut().try_for_each(|copier| copier.finish())
    }
}

fn missing(what: &str) -> CopyError {
    CopyError::Device { call: "looking up", error: format!("there is no such {what}") }
}
