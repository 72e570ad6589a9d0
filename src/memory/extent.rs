//! Which bytes of a pool are taken.
//!
//! Free memory is an address-ordered set of ranges, coalesced at once: two free ranges never touch.
//! The set is therefore a function of what is held, and undoing a half-placed batch restores it
//! exactly. Blocks are always cut from the front of a range, so in a pool of equal-sized blocks every
//! boundary is a multiple of that size and no free byte is ever too small a hole for the next block.
//!
//! Held blocks are recorded by offset with the length asked for. That costs one entry of a hash table
//! per block, which takes memory only until it has room for as many blocks as are ever held at once,
//! and buys that memory comes back exactly once: a second free, a part of a block or somebody else's
//! range is refused and changes nothing.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::limits;
use crate::types::{PoolId, Scope};

/// A batch does not fit. Nothing was taken; evict and try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the pool cannot place {asked} bytes: {free} are free, {largest} of them in one piece; \
     release or evict blocks first"
)]
pub struct Exhausted {
    /// Bytes that the whole batch takes, rounded up to [`limits::EXTENT_ALIGN`] per block.
    pub asked: u64,
    /// Bytes that are free.
    pub free: u64,
    /// The longest free range, bytes.
    pub largest: u64,
}

impl Exhausted {
    /// Whose fault it is.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        Scope::Local
    }
}

/// A range that was given back is not held as such. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReleaseError {
    /// No held block starts here: it was released before, or never reserved.
    #[error("no block is held at offset {offset}: it was released before, or never reserved")]
    NotHeld {
        /// Bytes from the start of the pool.
        offset: u64,
    },
    /// A block is held here, but not of this length.
    #[error("the block at offset {offset} has {held} bytes, {len} were given back")]
    WrongLength {
        /// Bytes from the start of the pool.
        offset: u64,
        /// The length given.
        len: u32,
        /// The length that was reserved.
        held: u32,
    },
    /// The extent belongs to another pool.
    #[error("the extent lies in pool {}, this is pool {}", given.0, pool.0)]
    WrongPool {
        /// The extent's pool.
        given: PoolId,
        /// The pool that was asked.
        pool: PoolId,
    },
}

impl ReleaseError {
    /// Whose fault it is: the caller's, always.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        Scope::Request
    }
}

/// The free and held ranges of one pool. Each operation is O(log n) per block in the number of free
/// ranges.
#[derive(Debug)]
pub struct ExtentAllocator {
    capacity: u64,
    free: u64,
    /// Free ranges: offset to length.
    by_offset: BTreeMap<u64, u64>,
    /// The same ranges, as (length, offset).
    by_len: BTreeSet<(u64, u64)>,
    /// Held blocks: offset to the length asked for.
    held: HashMap<u64, u32, foldhash::fast::RandomState>,
}

/// Bytes that a block of `len` bytes takes. Even an empty block has an offset of its own.
pub(super) const fn footprint(len: u32) -> u64 {
    let bytes = if len == 0 { 1 } else { len as u64 };
    bytes.next_multiple_of(limits::EXTENT_ALIGN)
}

impl ExtentAllocator {
    /// An allocator of `bytes` bytes, rounded down to [`limits::EXTENT_ALIGN`], all free.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let capacity = bytes - bytes % limits::EXTENT_ALIGN;
        let mut allocator = Self {
            capacity,
            free: 0,
            by_offset: BTreeMap::new(),
            by_len: BTreeSet::new(),
            held: HashMap::default(),
        };
        if capacity > 0 {
            allocator.insert_free(0, capacity);
        }
        allocator
    }

    /// All bytes, free or held.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that are free.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free
    }

    /// Bytes that held blocks take, rounded up to [`limits::EXTENT_ALIGN`] each.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.capacity - self.free
    }

    /// The longest free range, bytes.
    #[must_use]
    pub fn largest_free(&self) -> u64 {
        self.by_len.last().map_or(0, |(len, _offset)| *len)
    }

    /// How many blocks are held.
    #[must_use]
    pub fn held_blocks(&self) -> usize {
        self.held.len()
    }

    /// Places blocks of these lengths and appends their offsets, in the order asked. One contiguous
    /// run where a free range is long enough (the shortest such), else the longest ranges first, so
    /// that blocks of equal length lie in the fewest runs. With mixed lengths the order asked is
    /// kept, and a batch may be refused that another order could place.
    ///
    /// # Errors
    /// [`Exhausted`]; nothing was taken or appended then.
    pub fn allocate_batch(
        &mut self,
        lens: &[u32],
        offsets: &mut Vec<u64>,
    ) -> Result<(), Exhausted> {
        let asked = lens.iter().fold(0_u64, |sum, len| {
            // Cannot saturate for a list that fits memory; were it to, it is refused as too much.
            sum.saturating_add(footprint(*len))
        });
        let refusal = Exhausted { asked, free: self.free, largest: self.largest_free() };
        if asked > self.free {
            return Err(refusal);
        }
        let first = offsets.len();
        let mut rest = lens;
        let mut bytes = asked;
        while !rest.is_empty() {
            let placed = self
                .best_range(bytes)
                .map_or(0, |(start, len)| self.fill_range(start, len, rest, offsets));
            if placed == 0 {
                self.undo(lens, first, offsets);
                return Err(refusal);
            }
            let (done, left) = rest.split_at(placed);
            bytes -= done.iter().map(|len| footprint(*len)).sum::<u64>();
            rest = left;
        }
        Ok(())
    }

    /// Gives back the block of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`ReleaseError`] unless exactly this block is held; nothing changed then.
    pub fn free(&mut self, offset: u64, len: u32) -> Result<(), ReleaseError> {
        match self.held.get(&offset).copied() {
            None => Err(ReleaseError::NotHeld { offset }),
            Some(held) if held != len => Err(ReleaseError::WrongLength { offset, len, held }),
            Some(_same) => {
                self.held.remove(&offset);
                self.insert_free(offset, footprint(len));
                Ok(())
            }
        }
    }

    /// The shortest free range of at least `bytes`, or else the longest one there is; of equals, the
    /// one with the lowest offset. As (offset, length).
    fn best_range(&self, bytes: u64) -> Option<(u64, u64)> {
        let fitting = self.by_len.range((bytes, 0)..).next();
        let range = fitting.or_else(|| self.by_len.range((self.largest_free(), 0)..).next());
        range.map(|(len, offset)| (*offset, *len))
    }

    /// Cuts blocks from the front of a free range while they fit; answers how many did.
    fn fill_range(
        &mut self,
        start: u64,
        range: u64,
        lens: &[u32],
        offsets: &mut Vec<u64>,
    ) -> usize {
        let mut taken = 0;
        let mut placed = 0;
        for len in lens {
            let bytes = footprint(*len);
            if bytes > range - taken {
                break;
            }
            offsets.push(start + taken);
            self.held.insert(start + taken, *len);
            taken += bytes;
            placed += 1;
        }
        if placed > 0 {
            self.remove_free(start, range);
            if taken < range {
                self.insert_free(start + taken, range - taken);
            }
        }
        placed
    }

    /// Gives back what a failed batch has placed so far: `offsets[first..]`, of `lens` in order.
    fn undo(&mut self, lens: &[u32], first: usize, offsets: &mut Vec<u64>) {
        for (offset, len) in offsets.drain(first..).zip(lens) {
            let undone = self.free(offset, *len);
            debug_assert!(undone.is_ok(), "placed by this very batch: {undone:?}");
        }
    }

    fn remove_free(&mut self, offset: u64, len: u64) {
        self.by_offset.remove(&offset);
        self.by_len.remove(&(len, offset));
        self.free -= len;
    }

    /// Adds a free range, joined with the free ranges that it touches.
    fn insert_free(&mut self, offset: u64, len: u64) {
        let (mut offset, mut len) = (offset, len);
        let before = self.by_offset.range(..offset).next_back();
        if let Some((start, length)) = before.map(|(start, length)| (*start, *length))
            && start + length == offset
        {
            self.remove_free(start, length);
            offset = start;
            len += length;
        }
        if let Some(length) = self.by_offset.get(&(offset + len)).copied() {
            self.remove_free(offset + len, length);
            len += length;
        }
        self.by_offset.insert(offset, len);
        self.by_len.insert((len, offset));
        self.free += len;
    }
}

#[cfg(test)]
mod tests;
