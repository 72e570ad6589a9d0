//! The space of a pool: which of its bytes are taken, for as many threads as ask.
//!
//! It knows offsets and lengths and never touches a byte, so that it serves pools of host memory and
//! of a GPU's alike.
//!
//! The allocator is behind a lock that only reservations take: once per batch of blocks, never per block
//! or byte, and for a few map operations per block without a system call or a wait inside. Memory comes
//! back through a mailbox ([`crate::sync::Mailbox`]), without that lock: who evicts waits for nobody and,
//! wherever it stops, makes nobody wait. The next reservations settle what came back, a bounded number
//! of blocks each, unless they cannot do without all of it.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::extent::footprint;
use super::{Exhausted, ExtentAllocator, ReleaseError};
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

/// The allocator and its scratch list, so that a reservation allocates no list of its own.
#[derive(Debug)]
struct Extents {
    allocator: ExtentAllocator,
    offsets: Vec<u64>,
    /// What was taken from the mailbox and is not settled yet.
    taken: Taken,
}

/// The space of one pool. See the module's documentation.
#[derive(Debug)]
pub struct ExtentSpace {
    id: PoolId,
    bytes: u64,
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

impl ExtentSpace {
    /// The space of a pool of `bytes` bytes, all free.
    #[must_use]
    pub fn new(id: PoolId, bytes: u64) -> Self {
        let allocator = ExtentAllocator::new(bytes);
        let taken = Taken::nothing();
        Self {
            id,
            bytes,
            extents: Mutex::new(Extents { allocator, offsets: Vec::new(), taken }),
            returned: Mailbox::new(RETURNED_MAX),
            unsettled: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
            strays: AtomicU64::new(0),
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
        // In this order, which is the opposite of the order in which they are written: what is being
        // settled meanwhile is seen as free twice rather than not at all, and reclaim never takes more
        // than it has to.
        let unsettled = self.unsettled.load(Ordering::Acquire);
        let allocated = self.allocated.load(Ordering::Acquire);
        Usage { bytes: self.bytes, used: allocated.saturating_sub(unsettled) }
    }

    /// Times that memory was given back which was not held as such, as far as it was settled. Not 0 is
    /// a fault of this program: what was given back stays as it was.
    #[must_use]
    pub fn strays(&self) -> u64 {
        self.strays.load(Ordering::Relaxed)
    }

    /// Takes one extent per length and hands it to `take`, in order and next to each other as far as
    /// free ranges allow. Whoever takes one owes a [`Self::release`].
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was taken then.
    pub fn reserve(&self, lens: &[u32], mut take: impl FnMut(Extent)) -> Result<(), Exhausted> {
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
        for (offset, len) in offsets.iter().zip(lens) {
            take(Extent { pool: self.id, offset: *offset, len: *len });
        }
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

    /// Gives back an extent. The caller vouches that nobody reads or writes it any more: it is not
    /// pinned, and no READ into it is outstanding. Takes no lock. Whether exactly this extent was held
    /// turns out when it is settled ([`Self::strays`]).
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
}
