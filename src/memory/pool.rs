//! A pool of host memory: a sealed memory file, mapped here, passed to engines, registered with
//! fabrics, and handed out in extents.
//!
//! A [`Reservation`] owns its extent while a block is being written or fetched, and returns it when
//! dropped, on whatever path. Once the block is published the store owns the plain [`Extent`] and
//! gives it back by [`HostPool::release`] when the resident is evicted and unpinned.

use std::fmt::Debug;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::create::{self, PoolError, PoolOptions};
use super::{Exhausted, ExtentSpace, Mapping, OutOfBounds, ReleaseError, Usage};
use crate::types::{Extent, PoolId};

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

/// A pool of host memory. See the module's documentation.
#[derive(Debug)]
pub struct HostPool {
    file: File,
    mapping: Arc<Mapping>,
    space: ExtentSpace,
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
        let space = ExtentSpace::new(options.id, mapping.len());
        Ok(Arc::new(Self { file, mapping: Arc::new(mapping), space }))
    }

    /// The pool's place in the configuration.
    #[must_use]
    pub fn id(&self) -> PoolId {
        self.space.id()
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
        self.space.usage()
    }

    /// Times that memory was given back which was not held as such; see [`ExtentSpace::strays`].
    #[must_use]
    pub fn strays(&self) -> u64 {
        self.space.strays()
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
        Reservation::reserve_into(self, lens, reservations)
    }

    /// As [`reserve_into`](Self::reserve_into), for a thread that must not stand behind another one;
    /// see [`ExtentSpace::try_reserve`]. `None` where others had the allocator.
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was reserved or appended then.
    pub fn try_reserve_into(
        self: &Arc<Self>,
        lens: &[u32],
        reservations: &mut Vec<Reservation>,
    ) -> Option<Result<(), Exhausted>> {
        self.space.try_reserve(lens, |extent| {
            reservations.push(Reservation { extent, pool: Arc::clone(self), armed: true });
        })
    }

    /// Gives back an extent that [`Reservation::into_extent`] handed out. The caller vouches that
    /// nobody reads or writes it any more: it is not pinned, and no READ into it is outstanding. Takes
    /// no lock. Whether exactly this extent was held turns out when it is settled ([`Self::strays`]).
    ///
    /// # Errors
    /// [`ReleaseError::WrongPool`]; nothing changed then.
    pub fn release(&self, extent: Extent) -> Result<(), ReleaseError> {
        self.space.release(extent)
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
        let own = extent.pool == self.id();
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

/// Memory that is handed out in extents, of whatever kind.
pub trait Pool: Debug {
    /// Which of its bytes are taken.
    fn space(&self) -> &ExtentSpace;
}

impl Pool for HostPool {
    fn space(&self) -> &ExtentSpace {
        &self.space
    }
}

/// An extent that nobody else has, given back when dropped. It keeps its pool alive.
#[derive(Debug)]
#[must_use = "dropping a reservation gives its memory back"]
pub struct Reservation<P: Pool = HostPool> {
    extent: Extent,
    pool: Arc<P>,
    /// Whether dropping gives the memory back.
    armed: bool,
}

impl<P: Pool> Reservation<P> {
    /// Reserves one extent per length, in order and next to each other as far as free ranges allow,
    /// and appends them to a list that the caller keeps. An empty list reserves nothing.
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was reserved or appended then.
    pub fn reserve_into(
        pool: &Arc<P>,
        lens: &[u32],
        reservations: &mut Vec<Self>,
    ) -> Result<(), Exhausted> {
        pool.space().reserve(lens, |extent| {
            reservations.push(Self { extent, pool: Arc::clone(pool), armed: true });
        })
    }

    /// Reserves one extent; `None` where the pool has none of that length.
    #[must_use]
    pub fn reserve_one(pool: &Arc<P>, len: u32) -> Option<Self> {
        let mut made = None;
        let reserved = pool.space().reserve(&[len], |extent| {
            made = Some(Self { extent, pool: Arc::clone(pool), armed: true });
        });
        reserved.ok().and(made)
    }

    /// The extent.
    #[must_use]
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// The pool that it lies in.
    #[must_use]
    pub fn pool(&self) -> &Arc<P> {
        &self.pool
    }

    /// Hands the extent over: from now on the caller owes a
    /// [`ExtentSpace::release`].
    #[must_use = "the extent is lost unless it is released"]
    pub fn into_extent(mut self) -> Extent {
        self.armed = false;
        self.extent
    }
}

impl<P: Pool> Drop for Reservation<P> {
    fn drop(&mut self) {
        if self.armed {
            let released = self.pool.space().release(self.extent);
            // It is of this pool.
            debug_assert!(released.is_ok(), "{released:?}");
        }
    }
}

#[cfg(test)]
mod tests;
