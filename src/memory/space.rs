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
//!
//! **A thread that stops stops nobody who lends.** The data thread reserves by [`ExtentSpace::try_reserve`]
//! alone, which gives up after a bounded number of looks at the lock; it releases and looks at usage
//! without the lock; and it takes no other that a thread of the door takes. So wherever a thread of the door
//! is stopped, each step of the data thread ends: at worst a fetch of this node's own finds no memory and is
//! told to come again. Everybody else who reserves is an engine's request, and waits for its like.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::extent::footprint;
use super::{Exhausted, ExtentAllocator, ReleaseError};
use crate::limits;
use crate::sync::{Mailbox, Mutex, Taken, lock, try_lock};
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

/// Looks at the lock of a thread that does not wait for it, and those after which it lets others run: longer
/// than the largest batch of the door has the lock, unless its thread does not run.
const LOOKS: u32 = 1 << 14;
const LOOKS_PER_YIELD: u32 = 16;

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
    pub fn reserve(&self, lens: &[u32], take: impl FnMut(Extent)) -> Result<(), Exhausted> {
        self.reserve_with(&mut lock(&self.extents), lens, take)
    }

    /// As [`Self::reserve`], for a thread that must not stand behind another one: `None` where others had
    /// the allocator for as long as it was looked for, about a millisecond.
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was taken then.
    pub fn try_reserve(
        &self,
        lens: &[u32],
        take: impl FnMut(Extent),
    ) -> Option<Result<(), Exhausted>> {
        for look in 0..LOOKS {
            if let Some(mut guard) = try_lock(&self.extents) {
                return Some(self.reserve_with(&mut guard, lens, take));
            }
            match look % LOOKS_PER_YIELD {
                // Whoever has it may be waiting for this processor.
                0 => std::thread::yield_now(),
                _ => std::hint::spin_loop(),
            }
        }
        None
    }

    fn reserve_with(
        &self,
        extents: &mut Extents,
        lens: &[u32],
        mut take: impl FnMut(Extent),
    ) -> Result<(), Exhausted> {
        let mut settled = self.settle(extents, SETTLED_AT_LEAST + 2 * lens.len());
        loop {
            let Extents { allocator, offsets, .. } = &mut *extents;
            offsets.clear();
            match allocator.allocate_batch(lens, offsets) {
                Ok(()) => break,
                Err(refusal) if settled == 0 => return Err(refusal),
                // It asks for what is not settled yet.
                Err(_more) => settled = self.settle(extents, limits::LEND_BLOCKS_MAX),
            }
        }
        let Extents { allocator, offsets, .. } = &mut *extents;
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

#[cfg(test)]
#[cfg(not(any(loom, shuttle)))]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_stops_with_the_allocator_stops_nobody_who_does_not_wait() {
        let space = &ExtentSpace::new(PoolId(0), 1 << 12);
        let mut held = Vec::new();
        space.reserve(&[64, 64], |extent| held.push(extent)).unwrap();
        let ((stopped, is_stopped), (resume, resumed)) = (channel(), channel::<()>());
        thread::scope(|scope| {
            scope.spawn(move || {
                // Under the lock.
                let stop = |_extent| {
                    stopped.send(()).unwrap();
                    resumed.recv().unwrap();
                };
                space.reserve(&[64], stop).unwrap();
            });
            is_stopped.recv().unwrap();
            assert_eq!(space.try_reserve(&[64], |_| unreachable!()), None);
            assert_eq!(space.release(held[0]), Ok(()));
            assert_eq!(space.usage().used, 64, "what the stopped one has is not told yet");
            resume.send(()).unwrap();
        });
        assert_eq!(space.usage().used, 128);
        let mut taken = Vec::new();
        assert_eq!(space.try_reserve(&[64], |extent| taken.push(extent)), Some(Ok(())));
        assert_eq!(taken, [held[0]], "what came back is settled as by any reservation");
        assert!(matches!(space.try_reserve(&[1 << 13], |_| unreachable!()), Some(Err(_))));
    }
}
