//! A pool of host memory: a sealed memory file, mapped here, passed to engines, registered with
//! fabrics, and handed out in extents.
//!
//! A [`Reservation`] owns its extent while a block is being written or fetched, and returns it when
//! dropped, on whatever path. Once the block is published the store owns the plain [`Extent`] and
//! gives it back by [`HostPool::release`] when the resident is evicted and unpinned.
//!
//! The allocator is behind a lock that only reservations take: once per batch of blocks, never per block
//! or byte, and for a few map operations per block without a system call or a wait inside. Memory comes
//! back through a mailbox ([`crate::sync::Mailbox`]), without that lock: who evicts waits for nobody and,
//! wherever it stops, makes nobody wait. The next reservations settle what came back, a bounded number
//! of blocks each, unless they cannot do without all of it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::create::{self, PoolError, PoolOptions};
use super::extent::footprint;
use super::{Exhausted, ExtentAllocator, Mapping, OutOfBounds, ReleaseError};
use crate::limits;
use crate::sync::{Mailbox, Mutex, Taken, lock};
use crate::types::{Extent, PoolId};

/// How full a pool is. The numbers are read one by one: each is right, together they may straddle a
/// concurrent reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// All bytes.
    pub bytes: u64,
    /// Bytes that reservations and residents take.
    pub used: u64,
}

/// Blocks that a reservation settles before it looks for memory, besides two for each block it asks
/// for, so that what came back never piles up: some tens of microseconds.
const SETTLED_AT_LEAST: usize = 64;

/// More blocks than can be held at one time: residents, and what clients have reserved.
const RETURNED_MAX: usize = 1 << 27;
const _: () = assert!(
    RETURNED_MAX
        > limits::RESIDENTS_MAX as usize + limits::DOOR_CLIENTS_MAX * limits::DOOR_RESERVATIONS_MAX
);

/// When to reclaim: above the high mark, down to the low one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watermarks {
    high_permille: u16,
    low_permille: u16,
}

impl Watermarks {
    /// Marks in thousandths of a pool's bytes. `None` unless low < high ≤ 1000.
    #[must_use]
    pub fn new(high_permille: u16, low_permille: u16) -> Option<Self> {
        (low_permille < high_permille && high_permille <= 1000)
            .then_some(Self { high_permille, low_permille })
    }

    /// Bytes to reclaim now: none up to the high mark, above it what leads down to the low mark.
    #[must_use]
    pub fn excess(self, usage: Usage) -> u64 {
        let mark = |permille: u16| {
            // Exact and without overflow: whole thousandths first, then their rest.
            let permille = u64::from(permille);
            usage.bytes / 1000 * permille + usage.bytes % 1000 * permille / 1000
        };
        if usage.used > mark(self.high_permille) { usage.used - mark(self.low_permille) } else { 0 }
    }
}

/// The allocator and its scratch list, so that a reservation allocates no list of its own.
#[derive(Debug)]
struct Extents {
    allocator: ExtentAllocator,
    offsets: Vec<u64>,
    /// What was taken from the mailbox and is not settled yet.
    taken: Taken,
}

/// A pool of host memory. See the module's documentation.
#[derive(Debug)]
pub struct HostPool {
    id: PoolId,
    file: File,
    mapping: Arc<Mapping>,
    extents: Mutex<Extents>,
    /// Offset and length of what was given back and the allocator does not know yet.
    returned: Mailbox<(u64, u32)>,
    /// Bytes of that.
    unsettled: AtomicU64,
    /// Bytes that the allocator takes for used, written under the lock.
    allocated: AtomicU64,
    /// Times that memory was given back which was not held.
    strays: AtomicU64,
}

impl HostPool {
    /// Takes the memory, all of it present (and locked, where asked) when this returns. The kernel
    /// clears every page meanwhile: expect up to a second per GiB of ordinary pages on a virtual
    /// machine, more where the hypervisor itself has to find the memory.
    ///
    /// # Errors
    /// [`PoolError`], which names the limit that refused, what was asked and the remedy. No memory
    /// stays taken then.
    pub fn create(options: &PoolOptions) -> Result<Arc<Self>, PoolError> {
        let (file, mapping) = create::create(options)?;
        let allocator = ExtentAllocator::new(mapping.len());
        Ok(Arc::new(Self {
            id: options.id,
            file,
            returned: Mailbox::new(RETURNED_MAX),
            unsettled: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
            strays: AtomicU64::new(0),
            mapping: Arc::new(mapping),
            extents: Mutex::new(Extents {
                allocator,
                offsets: Vec::new(),
                taken: Taken::nothing(),
            }),
        }))
    }

    /// The pool's place in the configuration.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.id
    }

    /// Length in bytes: what was asked for, rounded up to whole pages.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.mapping.len()
    }

    /// Whether the pool has no byte, which creation refuses.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mapping.is_empty()
    }

    /// The memory file, sealed at its length, to pass to a process that maps the pool.
    #[must_use]
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The mapping, to register with a fabric. It outlives the pool while anyone holds it.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// How full the pool is, without the lock.
    #[must_use]
    pub fn usage(&self) -> Usage {
        // In this order, which is the opposite of the order in which they are written: what is being
        // settled meanwhile is seen as free twice rather than not at all, and reclaim never takes more
        // than it has to.
        let unsettled = self.unsettled.load(Ordering::Acquire);
        let allocated = self.allocated.load(Ordering::Acquire);
        Usage { bytes: self.mapping.len(), used: allocated.saturating_sub(unsettled) }
    }

    /// Times that memory was given back which was not held as such, as far as it was settled. Not 0 is
    /// a fault of this program: what was given back stays as it was.
    #[must_use]
    pub fn strays(&self) -> u64 {
        self.strays.load(Ordering::Relaxed)
    }

    /// Reserves one extent per length, in order and next to each other as far as free ranges allow.
    /// An empty list reserves nothing.
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was reserved then.
    pub fn reserve(self: &Arc<Self>, lens: &[u32]) -> Result<Vec<Reservation>, Exhausted> {
        let mut reservations = Vec::with_capacity(lens.len());
        self.reserve_into(lens, &mut reservations)?;
        Ok(reservations)
    }

    /// As [`reserve`](Self::reserve), appended to a list that the caller keeps.
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was reserved or appended then.
    pub fn reserve_into(
        self: &Arc<Self>,
        lens: &[u32],
        reservations: &mut Vec<Reservation>,
    ) -> Result<(), Exhausted> {
        let mut guard = lock(&self.extents);
        let mut settled = self.settle(&mut guard, SETTLED_AT_LEAST + 2 * lens.len());
        loop {
            let Extents { allocator, offsets, .. } = &mut *guard;
            offsets.clear();
            match allocator.allocate_batch(lens, offsets) {
                Ok(()) => break,
                Err(refusal) if settled == 0 => return Err(refusal),
                // It asks for what is not settled yet.
                Err(_more) => settled = self.settle(&mut guard, limits::LEND_BLOCKS_MAX),
            }
        }
        let Extents { allocator, offsets, .. } = &mut *guard;
        reservations.extend(offsets.iter().zip(lens).map(|(offset, len)| Reservation {
            extent: Extent { pool: self.id, offset: *offset, len: *len },
            pool: Arc::clone(self),
            armed: true,
        }));
        self.allocated.store(allocator.used_bytes(), Ordering::Release);
        Ok(())
    }

    /// Tells the allocator of up to `most` blocks that came back; how many there were.
    fn settle(&self, extents: &mut Extents, most: usize) -> usize {
        let (mut settled, mut bytes) = (0, 0);
        while settled < most {
            if extents.taken.is_empty() {
                extents.taken = self.returned.take();
            }
            let Some((offset, len)) = self.returned.next(&mut extents.taken) else { break };
            settled += 1;
            bytes += footprint(len);
            if let Err(error) = extents.allocator.free(offset, len) {
                self.strays.fetch_add(1, Ordering::Relaxed);
                tracing::error!(%error, pool = self.id.0, "memory was given back that was not held");
            }
        }
        if settled > 0 {
            self.allocated.store(extents.allocator.used_bytes(), Ordering::Release);
            self.unsettled.fetch_sub(bytes, Ordering::AcqRel);
        }
        settled
    }

    /// Gives back an extent that [`Reservation::into_extent`] handed out. The caller vouches that
    /// nobody reads or writes it any more: it is not pinned, and no READ into it is outstanding. Takes
    /// no lock. Whether exactly this extent was held turns out when it is settled ([`Self::strays`]).
    ///
    /// # Errors
    /// [`ReleaseError::WrongPool`]; nothing changed then.
    pub fn release(&self, extent: Extent) -> Result<(), ReleaseError> {
        if extent.pool != self.id {
            return Err(ReleaseError::WrongPool { given: extent.pool, pool: self.id });
        }
        // Before it can be settled, so that the sum never falls below zero.
        self.unsettled.fetch_add(footprint(extent.len), Ordering::AcqRel);
        let mut back = (extent.offset, extent.len);
        while let Err(full) = self.returned.put(back) {
            // More than can be held was given back: never, unless some of it is given back for ever.
            self.settle(&mut lock(&self.extents), limits::LEND_BLOCKS_MAX);
            back = full;
        }
        Ok(())
    }

    /// Copies bytes into an extent, `at` bytes from its start.
    ///
    /// # Errors
    /// [`OutOfBounds`] where they leave the extent or it is not of this pool; nothing was written.
    pub fn write(&self, extent: Extent, at: u32, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let offset = self.within(extent, at, bytes.len() as u64)?;
        self.mapping.write(offset, bytes)
    }

    /// Copies bytes out of an extent, from `at` bytes after its start.
    ///
    /// # Errors
    /// As for [`write`](Self::write); nothing was copied.
    pub fn read(&self, extent: Extent, at: u32, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        let offset = self.within(extent, at, bytes.len() as u64)?;
        self.mapping.read(offset, bytes)
    }

    /// The checksum of an extent's bytes, as [`super::checksum_bytes`] gives it.
    ///
    /// # Errors
    /// [`OutOfBounds`] where the extent is not of this pool.
    pub fn checksum(&self, extent: Extent) -> Result<u64, OutOfBounds> {
        let len = u64::from(extent.len);
        let offset = self.within(extent, 0, len)?;
        self.mapping.checksum(offset, len)
    }

    /// The offset in the pool of `len` bytes at `at` in `extent`. In an error the bounds are those
    /// of the extent; an extent of another pool has no byte here.
    fn within(&self, extent: Extent, at: u32, len: u64) -> Result<u64, OutOfBounds> {
        let own = extent.pool == self.id;
        let outside = OutOfBounds {
            offset: u64::from(at),
            len,
            size: if own { u64::from(extent.len) } else { 0 },
        };
        let end = u64::from(at).checked_add(len).ok_or(outside)?;
        if !own || end > u64::from(extent.len) {
            return Err(outside);
        }
        extent.offset.checked_add(u64::from(at)).ok_or(outside)
    }
}

/// An extent that nobody else has, given back when dropped. It keeps its pool alive.
#[derive(Debug)]
#[must_use = "dropping a reservation gives its memory back"]
pub struct Reservation {
    extent: Extent,
    pool: Arc<HostPool>,
    /// Whether dropping gives the memory back.
    armed: bool,
}

impl Reservation {
    /// The extent.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// The pool that it lies in.
    #[must_use]
    pub fn pool(&self) -> &Arc<HostPool> {
        &self.pool
    }

    /// Hands the extent over: from now on the caller owes a [`HostPool::release`].
    #[must_use = "the extent is lost unless it is released"]
    pub fn into_extent(mut self) -> Extent {
        self.armed = false;
        self.extent
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.armed {
            let released = self.pool.release(self.extent);
            // It is of this pool.
            debug_assert!(released.is_ok(), "{released:?}");
        }
    }
}

#[cfg(test)]
mod tests;
