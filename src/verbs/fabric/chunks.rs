//! How a region is cut into registrations.
//!
//! A region longer than what a NIC registers at once needs several. A long one gets several anyway:
//! registering pins every page, which several threads do in a fraction of the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::device::PART_BYTES_MIN;
use super::pinned::Cards;
use crate::limits::REGION_CHUNKS_MAX;
use crate::memory::Mapping;
use crate::verbs::{MemoryRegion, Served, VerbsError};

/// Chunks that a long region is cut into, and threads that register: more do not pin faster.
const PARALLEL: usize = 16;

/// A chunk is not cut any shorter than this only to register in parallel: a border costs a READ that
/// crosses it a second work request.
const PARALLEL_BYTES: u64 = 1 << 30;

/// Chunks of a region are powers of two, all of one size but the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// The size as a power of two.
    pub(super) shift: u32,
    /// How many there are, at least 1.
    pub(super) chunks: usize,
}

impl Layout {
    /// The smallest region as a power of two: a page.
    pub(super) const SHIFT_MIN: u32 = 12;

    /// The smallest of several chunks as a power of two, [`PART_BYTES_MIN`]: shorter ones would cut the
    /// longest READ into more parts than a queue holds.
    pub(super) const CHUNK_SHIFT_MIN: u32 = PART_BYTES_MIN.ilog2();

    /// The layout of `len` bytes with no chunk above `limit` bytes, or the smallest.
    pub(super) fn new(len: u64, limit: u64) -> Result<Self, VerbsError> {
        let most = limit.checked_ilog2().unwrap_or(0).max(Self::CHUNK_SHIFT_MIN);
        // The size of one chunk for all, or of PARALLEL.
        let whole = ceil_log2(len);
        let part = ceil_log2(len.div_ceil(PARALLEL as u64)).max(ceil_log2(PARALLEL_BYTES));
        let shift = part.min(whole).min(most).max(Self::SHIFT_MIN);
        let chunks = usize::try_from(len.div_ceil(1 << shift)).unwrap_or(usize::MAX).max(1);
        if chunks > REGION_CHUNKS_MAX {
            return Err(VerbsError::Incapable {
                device: "an RDMA device in use".to_owned(),
                lack: format!(
                    "registers at most {limit} bytes at once, so that a pool of {len} bytes would \
                     need {chunks} registrations, more than {REGION_CHUNKS_MAX}: use several \
                     smaller pools"
                ),
            });
        }
        Ok(Self { shift, chunks })
    }

    /// The layout of `len` bytes in one piece, which windows need: each is bound to one registration.
    pub(super) fn whole(len: u64, limit: u64) -> Result<Self, VerbsError> {
        if len > limit {
            return Err(VerbsError::Incapable {
                device: "an RDMA device in use".to_owned(),
                lack: format!(
                    "registers at most {limit} bytes at once, and with --lease-windows a pool, here \
                     of {len} bytes, is registered as a whole: use several smaller pools"
                ),
            });
        }
        Ok(Self { shift: ceil_log2(len).max(Self::SHIFT_MIN), chunks: 1 })
    }

    /// Offset and length of a chunk of a region of `len` bytes.
    pub(super) fn place(self, chunk: usize, len: u64) -> (u64, u64) {
        let size = 1_u64 << self.shift;
        let offset = size.saturating_mul(chunk as u64);
        (offset, len.saturating_sub(offset).min(size))
    }
}

/// The smallest power of two that is not below `len`, as its exponent.
fn ceil_log2(len: u64) -> u32 {
    u64::BITS - len.saturating_sub(1).leading_zeros()
}

/// Registers all chunks with all NICs that are there: those of one NIC after the other, `None` for a
/// NIC that is gone. Where one fails none stays registered.
pub(super) fn register_all(
    cards: &Cards,
    layout: Layout,
    memory: &Arc<Mapping>,
    served: Served,
) -> Result<Vec<Option<MemoryRegion>>, VerbsError> {
    let jobs = cards.domains.len() * layout.chunks;
    let register = |job: usize| {
        let domain = cards.domains.get(job / layout.chunks).and_then(Option::as_ref);
        let place = layout.place(job % layout.chunks, memory.len());
        domain
            .map(|domain| MemoryRegion::part(domain, Arc::clone(memory), place, served))
            .transpose()
    };
    if jobs == 1 {
        return Ok(vec![register(0)?]);
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            // Relaxed: it only hands out numbers; joining the threads orders their results.
            let job = next.fetch_add(1, Ordering::Relaxed);
            if job >= jobs {
                return done;
            }
            done.push((job, register(job)));
        }
    };
    let mut parts: Vec<Option<MemoryRegion>> = (0..jobs).map(|_job| None).collect();
    let mut failed = None;
    let mut keep = |done: Vec<(usize, Result<Option<MemoryRegion>, VerbsError>)>| {
        for (job, outcome) in done {
            match outcome {
                Ok(part) => {
                    if let Some(place) = parts.get_mut(job) {
                        *place = part;
                    }
                }
                Err(error) => failed = Some(error),
            }
        }
    };
    thread::scope(|scope| {
        let helpers: Vec<_> = (1..jobs.min(PARALLEL)).map(|_helper| scope.spawn(work)).collect();
        keep(work());
        for helper in helpers {
            keep(helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    failed.map_or(Ok(parts), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn short_regions_are_whole_and_long_ones_are_cut() {
        let table: [(u64, u64, u32, usize); 12] = [
            (1, u64::MAX, 12, 1),
            (4096, u64::MAX, 12, 1),
            (4097, u64::MAX, 13, 1),
            (GIB, u64::MAX, 30, 1),
            (GIB + 1, u64::MAX, 30, 2),
            (16 * GIB, u64::MAX, 30, 16),
            (64 * GIB, u64::MAX, 32, 16),
            (65 * GIB, u64::MAX, 33, 9),
            (2048 * GIB, u64::MAX, 37, 16),
            // What a device registers at once, where that is no power of two.
            (10 * GIB, 3 * GIB - 1, 30, 10),
            (200 << 10, 100 << 10, 16, 4),
            (200 << 10, 1, 16, 4),
        ];
        for (len, limit, shift, chunks) in table {
            let layout = Layout::new(len, limit).unwrap();
            assert_eq!(layout, Layout { shift, chunks }, "{len} {limit}");
            let places: Vec<_> = (0..chunks).map(|chunk| layout.place(chunk, len)).collect();
            let mut end = 0;
            for (offset, bytes) in places {
                assert_eq!(offset, end);
                assert!(bytes > 0 && bytes <= limit.max(64 << 10));
                end += bytes;
            }
            assert_eq!(end, len, "every byte is in one chunk");
        }
    }

    #[test]
    fn a_region_of_too_many_chunks_is_refused_with_what_to_do() {
        let limit = 64 << 10;
        assert!(Layout::new(512 * limit, limit).is_ok());
        let refused = Layout::new(512 * limit + 1, limit).unwrap_err().to_string();
        assert!(refused.contains("smaller pools"), "{refused}");
    }
}
