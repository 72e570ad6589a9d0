//! Finds a slot by its block key: chains of slots behind a fixed array of buckets.
//!
//! The keys are in the slots, so the index is 8 to 12 bytes a slot. It never grows, rehashes or
//! leaves tombstones: an open-addressed table would stop every reader for a rehash of millions of
//! keys now and then. Peers choose the keys, so the hash has a random seed.

use std::fmt;
use std::hash::BuildHasher;

use foldhash::fast::RandomState;

use super::lists::NIL;
use crate::types::BlockKey;

pub(super) struct Index {
    /// The first slot of each chain; a power of two of them, at least one per slot.
    buckets: Box<[u32]>,
    /// By slot: the next one of its chain.
    next: Box<[u32]>,
    hasher: RandomState,
}

impl Index {
    pub(super) fn new(capacity: u32) -> Self {
        let buckets = (capacity as usize).next_power_of_two();
        Self {
            buckets: vec![NIL; buckets].into_boxed_slice(),
            next: vec![NIL; capacity as usize].into_boxed_slice(),
            hasher: RandomState::default(),
        }
    }

    fn bucket(&self, key: &BlockKey) -> usize {
        let mask = self.buckets.len() as u64 - 1;
        usize::try_from(self.hasher.hash_one(key) & mask).unwrap_or(0)
    }

    /// The slot of `key`, where `holds` says whether a slot holds it.
    pub(super) fn find(&self, key: &BlockKey, holds: impl Fn(u32) -> bool) -> Option<u32> {
        let mut slot = *self.buckets.get(self.bucket(key))?;
        while slot != NIL {
            if holds(slot) {
                return Some(slot);
            }
            slot = *self.next.get(slot as usize)?;
        }
        None
    }

    /// Adds `slot`, which is in no chain, as the one of `key`.
    pub(super) fn insert(&mut self, key: &BlockKey, slot: u32) {
        let bucket = self.bucket(key);
        let head = self.buckets.get_mut(bucket);
        let next = self.next.get_mut(slot as usize);
        if let (Some(head), Some(next)) = (head, next) {
            *next = std::mem::replace(head, slot);
        }
    }

    /// Takes `slot` out of the chain of `key`, which it is in.
    pub(super) fn remove(&mut self, key: &BlockKey, slot: u32) {
        let bucket = self.bucket(key);
        let after = self.next.get(slot as usize).copied().unwrap_or(NIL);
        let mut link = self.buckets.get_mut(bucket);
        while let Some(at) = link {
            if *at == slot {
                *at = after;
                return;
            }
            let here = *at as usize;
            link = self.next.get_mut(here);
        }
    }
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("buckets", &self.buckets.len()).finish_non_exhaustive()
    }
}
