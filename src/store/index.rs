//! Finds a slot by its block key: chains of slots behind a fixed array of buckets, without a lock.
//!
//! Keys and links are in the slots. The index never grows, rehashes or leaves tombstones. Peers choose the
//! keys, so the hash has a random seed.
//!
//! A link is one word: the next slot, a mark that says "this one's slot is leaving", and the
//! generation of the slot that the link belongs to, so that an exchange that was meant for an
//! earlier tenancy fails. A bucket's head counts its changes instead. Slots enter at the head alone;
//! so, as long as a slot's tenancy lasts, its link never comes back to a slot that it has left, and
//! whoever reads a link, then what it leads to, and then the same link again, knows that all of it
//! was in the chain in between. A slot leaves by its mark, and then by the exchange of the one link
//! that leads to it, by whoever gets there first.

use std::fmt;
use std::hash::BuildHasher;
use std::ops::Range;

use foldhash::fast::RandomState;

use super::fault::{self, Fault};
use super::slots::Slots;
use crate::sync::{Cell, Groups, Shared};
use crate::types::BlockKey;

const TARGET_BITS: u32 = 25;
const TARGET_MASK: u64 = (1 << TARGET_BITS) - 1;
/// No target. A slot is named by its index and one.
const NIL: u64 = 0;
const MARK: u64 = 1 << TARGET_BITS;
const GENERATION_AT: u32 = TARGET_BITS + 1;

const _: () = assert!(crate::limits::RESIDENTS_MAX as u64 <= TARGET_MASK);

/// A chain and what its first link was.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    bucket: Bucket,
    link: u64,
}

/// How a walk ended.
pub(super) enum Walk<R> {
    /// The visitor stopped it.
    Stopped(R),
    /// All was visited.
    End(Head),
}

pub(super) struct Index {
    /// The first slot of each chain and a count of changes; one per slot.
    buckets: Groups<1>,
    hasher: RandomState,
}

/// A chain, by the key that belongs there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bucket(usize);

impl Index {
    pub(super) fn new(capacity: u32) -> Self {
        Self { buckets: Groups::zeroed(capacity as usize), hasher: RandomState::default() }
    }

    /// Where the buckets lie.
    pub(super) fn addresses(&self) -> Range<*const u8> {
        self.buckets.addresses()
    }

    pub(super) fn bucket(&self, key: &BlockKey) -> Bucket {
        // The upper half of the product: the hash as a fraction, times the number of buckets.
        let product = u128::from(self.hasher.hash_one(key)) * self.buckets.count() as u128;
        Bucket(usize::try_from(product >> u64::BITS).unwrap_or(0))
    }

    fn head(&self, bucket: Bucket) -> Option<&Cell> {
        self.buckets.get(bucket.0).map(|[head]| head)
    }

    /// The slot at the head of a chain, as of now.
    pub(super) fn first(&self, bucket: Bucket) -> Option<u32> {
        slot_of(self.head(bucket)?.get())
    }

    /// What comes after a slot in its chain, as of now.
    pub(super) fn next(slots: &Slots, slot: u32) -> Option<u32> {
        slot_of(slots.link(slot)?.get())
    }

    /// The tenancy of a slot, as of now.
    pub(super) fn generation(slots: &Slots, slot: u32) -> u32 {
        slots.link(slot).map_or(0, |link| generation_of(link.get()))
    }

    /// Starts the next tenancy of a slot that the caller owns. 0 is left out, so that an id of zeros
    /// never matches.
    pub(super) fn renew(slots: &Slots, slot: u32) -> u32 {
        let next = Self::generation(slots, slot).wrapping_add(1).max(1);
        if let Some(link) = slots.link(slot) {
            link.publish(u64::from(next) << GENERATION_AT | NIL);
        }
        next
    }

    /// Shows the slots of a chain, each with the tenancy in which it was in the chain after
    /// the call began, until `visit` answers something. Takes out the ones that are marked.
    pub(super) fn walk<R>(
        &self,
        slots: &Slots,
        bucket: Bucket,
        mut visit: impl FnMut(u32, u32) -> Option<R>,
    ) -> Walk<R> {
        loop {
            let Some(first) = self.head(bucket) else {
                return Walk::End(Head { bucket, link: NIL });
            };
            let head = Head { bucket, link: first.get() };
            if let Some(walk) = Self::walk_from(slots, first, head, None, &mut visit) {
                return walk;
            }
        }
    }

    /// Goes no further than to take out `last`. `None` where the chain changed underfoot.
    fn walk_from<R>(
        slots: &Slots,
        first: &Cell,
        mut head: Head,
        last: Option<u32>,
        visit: &mut impl FnMut(u32, u32) -> Option<R>,
    ) -> Option<Walk<R>> {
        let (mut before, mut link) = (first, head.link);
        let mut at_head = true;
        loop {
            let slot = slot_of(link);
            let Some((slot, cell)) = slot.and_then(|slot| Some((slot, slots.link(slot)?))) else {
                return Some(Walk::End(head));
            };
            let next = cell.get();
            if before.get() != link {
                return None;
            }
            if next & MARK != 0 {
                let after = next & TARGET_MASK;
                let past = if at_head { changed(link, after) } else { link & !TARGET_MASK | after };
                if !before.replace(link, past) {
                    return None;
                }
                link = past;
                if at_head {
                    head.link = past;
                }
                if last == Some(slot) {
                    return Some(Walk::End(head));
                }
                continue;
            }
            if let Some(result) = visit(slot, generation_of(next)) {
                return Some(Walk::Stopped(result));
            }
            (before, link, at_head) = (cell, next, false);
        }
    }

    /// Puts a slot of the caller's at the head of a chain, unless the chain has a new head since it
    /// was walked.
    pub(super) fn insert(
        &self,
        slots: &Slots,
        mut head: Head,
        (slot, tenancy): (u32, u32),
    ) -> bool {
        let (Some(cell), Some(own)) = (self.head(head.bucket), slots.link(slot)) else {
            return false;
        };
        if fault::is(Fault::HeadUnchecked) {
            head.link = cell.get();
        }
        own.publish(u64::from(tenancy) << GENERATION_AT | head.link & TARGET_MASK);
        cell.replace(head.link, changed(head.link, u64::from(slot) + 1))
    }

    /// Takes a slot of the caller's out of its chain.
    pub(super) fn remove(&self, slots: &Slots, bucket: Bucket, slot: u32) {
        let Some(cell) = slots.link(slot) else {
            return;
        };
        loop {
            let link = cell.get();
            if link & MARK != 0 || cell.replace(link, link | MARK) {
                break;
            }
        }
        // A walk meets the slot if it is still there, and takes it out.
        let Some(first) = self.head(bucket) else {
            return;
        };
        let mut visit = |_, _| None::<()>;
        loop {
            let head = Head { bucket, link: first.get() };
            if Self::walk_from(slots, first, head, Some(slot), &mut visit).is_some() {
                return;
            }
        }
    }
}

fn generation_of(link: u64) -> u32 {
    u32::try_from(link >> GENERATION_AT & u64::from(u32::MAX)).unwrap_or(0)
}

fn slot_of(link: u64) -> Option<u32> {
    u32::try_from((link & TARGET_MASK).checked_sub(1)?).ok()
}

/// A head that leads to `target`, with its next count of changes.
fn changed(head: u64, target: u64) -> u64 {
    (head >> TARGET_BITS).wrapping_add(1) << TARGET_BITS | target
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("buckets", &self.buckets.count()).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::types::{BlockHash, NamespaceId};

    fn key(number: u32) -> BlockKey {
        BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&number.to_le_bytes()).unwrap() }
    }

    #[test]
    fn chains_lose_exactly_the_slot_that_leaves() {
        let count = 300;
        // One bucket, so that slots leave from the front, the middle and the end of a chain.
        let (index, slots) = (Index::new(1), Slots::new(count));
        let bucket = index.bucket(&key(7));
        let insert = |slot| {
            let tenancy = Index::renew(&slots, slot);
            let Walk::End(head) = index.walk(&slots, bucket, |_, _| None::<()>) else {
                panic!("nothing stops this walk");
            };
            assert!(index.insert(&slots, head, (slot, tenancy)));
        };
        (0..count).for_each(insert);
        let found = |slot| {
            let walk = index.walk(&slots, bucket, |at, _| (at == slot).then_some(()));
            matches!(walk, Walk::Stopped(()))
        };
        for gone in [299, 0, 150, 149, 298] {
            assert!(found(gone));
            index.remove(&slots, bucket, gone);
            assert!(!found(gone));
        }
        assert_eq!((0..count).filter(|&slot| found(slot)).count(), 295);
        insert(150);
        assert!(found(150));
    }

    #[test]
    fn keys_spread_over_all_buckets() {
        let index = Index::new(100);
        let mut counts = [0_u32; 100];
        (0..10_000).for_each(|number| counts[index.bucket(&key(number)).0] += 1);
        assert!(counts.iter().all(|count| (40..200).contains(count)), "{counts:?}");
    }
}
