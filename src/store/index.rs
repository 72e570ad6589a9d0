//! Finds a slot by its block key: chains of slots behind a fixed array of buckets, without a lock.
//!
//! The keys are in the slots. The index never grows, rehashes or leaves tombstones. Peers choose the
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

use foldhash::fast::RandomState;

use super::fault::{self, Fault};
use crate::sync::{Cell, Shared, zeroed};
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
    bucket: usize,
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
    /// The first slot of each chain and a count of changes; a power of two of them.
    buckets: Box<[Cell]>,
    /// By slot: target, mark, own generation.
    links: Box<[Cell]>,
    hasher: RandomState,
}

impl Index {
    pub(super) fn new(capacity: u32) -> Self {
        let buckets = (capacity as usize).next_power_of_two();
        Self {
            buckets: zeroed(buckets),
            links: zeroed(capacity as usize),
            hasher: RandomState::default(),
        }
    }

    fn bucket(&self, key: &BlockKey) -> usize {
        let mask = self.buckets.len() as u64 - 1;
        usize::try_from(self.hasher.hash_one(key) & mask).unwrap_or(0)
    }

    fn link(&self, slot: u32) -> Option<&Cell> {
        self.links.get(slot as usize)
    }

    /// The tenancy of a slot, as of now.
    pub(super) fn generation(&self, slot: u32) -> u32 {
        self.link(slot).map_or(0, |link| generation_of(link.get()))
    }

    /// Starts the next tenancy of a slot that the caller owns. 0 is left out, so that an id of zeros
    /// never matches.
    pub(super) fn renew(&self, slot: u32) -> u32 {
        let next = self.generation(slot).wrapping_add(1).max(1);
        if let Some(link) = self.link(slot) {
            link.publish(u64::from(next) << GENERATION_AT | NIL);
        }
        next
    }

    /// Shows the slots of the key's chain, each with the tenancy in which it was in the chain after
    /// the call began, until `visit` answers something. Takes out the ones that are marked.
    pub(super) fn walk<R>(
        &self,
        key: &BlockKey,
        mut visit: impl FnMut(u32, u32) -> Option<R>,
    ) -> Walk<R> {
        let bucket = self.bucket(key);
        loop {
            let Some(first) = self.buckets.get(bucket) else {
                return Walk::End(Head { bucket, link: NIL });
            };
            let head = first.get();
            if let Some(walk) = self.walk_from(first, Head { bucket, link: head }, &mut visit) {
                return walk;
            }
        }
    }

    /// `None` where the chain changed underfoot.
    fn walk_from<R>(
        &self,
        first: &Cell,
        head: Head,
        visit: &mut impl FnMut(u32, u32) -> Option<R>,
    ) -> Option<Walk<R>> {
        let (mut before, mut link) = (first, head.link);
        let mut head = head;
        let mut at_head = true;
        loop {
            let slot = slot_of(link);
            let Some((slot, cell)) = slot.and_then(|slot| Some((slot, self.link(slot)?))) else {
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
    pub(super) fn insert(&self, mut head: Head, slot: u32, generation: u32) -> bool {
        if fault::is(Fault::HeadUnchecked)
            && let Some(cell) = self.buckets.get(head.bucket)
        {
            head.link = cell.get();
        }
        let next = u64::from(generation) << GENERATION_AT | head.link & TARGET_MASK;
        if let Some(link) = self.link(slot) {
            link.publish(next);
        }
        let link = changed(head.link, u64::from(slot) + 1);
        self.buckets.get(head.bucket).is_some_and(|cell| cell.replace(head.link, link))
    }

    /// Takes a slot of the caller's out of its key's chain.
    pub(super) fn remove(&self, key: &BlockKey, slot: u32) {
        let Some(cell) = self.link(slot) else {
            return;
        };
        loop {
            let link = cell.get();
            if link & MARK != 0 || cell.replace(link, link | MARK) {
                break;
            }
        }
        // A walk to the end meets the slot if it is still there, and takes it out.
        let _end: Walk<()> = self.walk(key, |_, _| None);
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
        f.debug_struct("Index").field("buckets", &self.buckets.len()).finish_non_exhaustive()
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

    fn insert(index: &Index, slot: u32) {
        let generation = index.renew(slot);
        let Walk::End(head) = index.walk(&key(slot), |_, _| None::<()>) else {
            panic!("nothing stops this walk");
        };
        assert!(index.insert(head, slot, generation));
    }

    #[test]
    fn chains_lose_exactly_the_slot_that_leaves() {
        let slots = 300;
        let mut index = Index::new(slots);
        // One bucket, so that slots leave from the front, the middle and the end of a chain.
        index.buckets = vec![Cell::new(NIL)].into_boxed_slice();
        (0..slots).for_each(|slot| insert(&index, slot));
        let found = |index: &Index, slot| {
            matches!(index.walk(&key(slot), |at, _| (at == slot).then_some(())), Walk::Stopped(()))
        };
        for gone in [299, 0, 150, 149, 298] {
            assert!(found(&index, gone));
            index.remove(&key(gone), gone);
            assert!(!found(&index, gone));
        }
        assert_eq!((0..slots).filter(|&slot| found(&index, slot)).count(), 295);
        insert(&index, 150);
        assert!(found(&index, 150));
    }
}
