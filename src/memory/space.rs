//! The space of a pool: which of its bytes are taken, for as many threads as ask.
//!
//! It knows offsets and lengths and never touches a byte, so that it serves pools of host memory and
//! of a GPU's alike.
//!
//! The allocator is behind a lock. It is taken once per batch of blocks, never per block or byte, is
//! held for a few map operations per block without a system call or a wait inside, and lending and
//! polling never take it.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Exhausted, ExtentAllocator, ReleaseError};
use crate::sync::{Mutex, lock};
use crate::types::{Extent, PoolId};

/// How full a pool is. The numbers are read one by one: each is right, together they may straddle a
/// concurrent reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// All bytes.
    pub bytes: u64,
    /// Bytes that reservations and residents take.
    pub used: u64,
    /// The longest free range, bytes.
    pub largest_free: u64,
}

/// The allocator and its scratch list, so that a reservation allocates no list of its own.
#[derive(Debug)]
struct Extents {
    allocator: ExtentAllocator,
    offsets: Vec<u64>,
}

/// The space of one pool. See the module's documentation.
#[derive(Debug)]
pub struct ExtentSpace {
    id: PoolId,
    bytes: u64,
    extents: Mutex<Extents>,
    /// Copies of the allocator's numbers, written under the lock and read without it, where a
    /// slightly old value is as good.
    used: AtomicU64,
    largest_free: AtomicU64,
}

impl ExtentSpace {
    /// The space of a pool of `bytes` bytes, all free.
    #[must_use]
    pub fn new(id: PoolId, bytes: u64) -> Self {
        let allocator = ExtentAllocator::new(bytes);
        Self {
            id,
            bytes,
            used: AtomicU64::new(0),
            largest_free: AtomicU64::new(allocator.largest_free()),
            extents: Mutex::new(Extents { allocator, offsets: Vec::new() }),
        }
    }

    /// The pool.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// All bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How full it is, without the lock.
    #[must_use]
    pub fn usage(&self) -> Usage {
        // Relaxed: the numbers are advice to reclaim and metrics, and publish no memory.
        Usage {
            bytes: self.bytes,
            used: self.used.load(Ordering::Relaxed),
            largest_free: self.largest_free.load(Ordering::Relaxed),
        }
    }

    /// Takes one extent per length and hands it to `take`, in order and next to each other as far as
    /// free ranges allow. Whoever takes one owes a [`Self::release`].
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was taken then.
    pub fn reserve(&self, lens: &[u32], mut take: impl FnMut(Extent)) -> Result<(), Exhausted> {
        let mut guard = lock(&self.extents);
        let Extents { allocator, offsets } = &mut *guard;
        offsets.clear();
        allocator.allocate_batch(lens, offsets)?;
        for (offset, len) in offsets.iter().zip(lens) {
            take(Extent { pool: self.id, offset: *offset, len: *len });
        }
        self.note_usage(allocator);
        Ok(())
    }

    /// Gives back an extent. The caller vouches that nobody reads or writes it any more: it is not
    /// pinned, and no READ into it is outstanding.
    ///
    /// # Errors
    /// [`ReleaseError`] unless exactly this extent is held; nothing changed then.
    pub fn release(&self, extent: Extent) -> Result<(), ReleaseError> {
        if extent.pool != self.id {
            return Err(ReleaseError::WrongPool { given: extent.pool, pool: self.id });
        }
        let mut extents = lock(&self.extents);
        extents.allocator.free(extent.offset, extent.len)?;
        self.note_usage(&extents.allocator);
        Ok(())
    }

    /// Called under the lock, so that the last writer writes the last state.
    fn note_usage(&self, allocator: &ExtentAllocator) {
        self.used.store(allocator.used_bytes(), Ordering::Relaxed);
        self.largest_free.store(allocator.largest_free(), Ordering::Relaxed);
    }
}
