//! When keys were evicted, so that a block which is fetched again soon after is counted.
//!
//! A table of words, each one the time of a key's eviction under a part of the key's hash. A word is
//! stored, read and exchanged as a whole, so nobody waits and nothing is torn. What it costs: of two keys
//! that share a word the older one is forgotten, and a key is taken for another one once in 2^39 times.
//! For a counter that says whether a pool is too small, that is exact enough.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;

use crate::limits;
use crate::sync::{Cell, Shared, zeroed};
use crate::types::{BlockKey, Timestamp};

/// Of a word: the time, and above it the key's mark, which is odd, so that no word is 0.
const TIME_BITS: u32 = 24;
const TIME_MASK: u64 = (1 << TIME_BITS) - 1;

/// Times are counted in these parts of the window: a quarter of a second, for 45 days.
const WINDOW_TICKS: u64 = 256;

pub(super) struct Refetches {
    words: Box<[Cell]>,
    hasher: RandomState,
}

impl std::fmt::Debug for Refetches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refetches").field("words", &self.words.len()).finish_non_exhaustive()
    }
}

fn ticks(now: Timestamp) -> u64 {
    let window = u64::try_from(limits::REFETCH_WINDOW.as_nanos()).unwrap_or(u64::MAX);
    (now.as_nanos() / (window / WINDOW_TICKS)) & TIME_MASK
}

impl Refetches {
    pub(super) fn new() -> Self {
        Self { words: zeroed(limits::EVICTED_MEMORY_MAX), hasher: RandomState::default() }
    }

    /// The key's word, and its mark in its place.
    fn find(&self, key: &BlockKey) -> Option<(&Cell, u64)> {
        let hash = self.hasher.hash_one(key);
        let at = usize::try_from(hash & TIME_MASK).ok()? % self.words.len();
        Some((self.words.get(at)?, (hash | 1 << TIME_BITS) & !TIME_MASK))
    }

    pub(super) fn note(&self, key: &BlockKey, now: Timestamp) {
        if let Some((word, mark)) = self.find(key) {
            word.publish(mark | ticks(now));
        }
    }

    /// Whether the key was evicted within the window; forgets that.
    pub(super) fn take(&self, key: &BlockKey, now: Timestamp) -> bool {
        let Some((word, mark)) = self.find(key) else { return false };
        let found = word.get();
        let age = ticks(now).wrapping_sub(found & TIME_MASK) & TIME_MASK;
        // Where somebody else took it, or noted another key, that one decides.
        found & !TIME_MASK == mark && word.replace(found, 0) && age <= WINDOW_TICKS
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::types::{BlockHash, NamespaceId};

    fn key(name: u32) -> BlockKey {
        BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&name.to_le_bytes()).unwrap() }
    }

    #[test]
    fn a_refetch_counts_within_the_window_and_once() {
        let refetches = Refetches::new();
        let at = Timestamp::ZERO + limits::REFETCH_WINDOW * 3;
        let later = at + limits::REFETCH_WINDOW;
        // A key of its own each, because two may share a word.
        refetches.note(&key(1), at);
        assert!(refetches.take(&key(1), later));
        assert!(!refetches.take(&key(1), at), "once");
        refetches.note(&key(2), at);
        assert!(!refetches.take(&key(3), at), "another one");
        assert!(!refetches.take(&key(2), at + limits::REFETCH_WINDOW * 2), "too late");
    }

    #[test]
    fn most_of_what_fits_is_remembered_and_no_more() {
        let refetches = Refetches::new();
        let count = u32::try_from(limits::EVICTED_MEMORY_MAX).unwrap();
        (0..count).for_each(|name| refetches.note(&key(name), Timestamp::ZERO));
        let known = (0..count).filter(|name| refetches.take(&key(*name), Timestamp::ZERO)).count();
        // As many words as keys: 1 - 1/e of the words are taken.
        let share = known * 100 / limits::EVICTED_MEMORY_MAX;
        assert!((60..67).contains(&share), "{share} %");
    }
}
