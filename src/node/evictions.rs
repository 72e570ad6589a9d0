//! What was evicted lately: for people who look, and to count blocks that were missed soon after.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::limits;
use crate::protocol::door::EvictedBlock;
use crate::store::Evicted;
use crate::types::{BlockKey, Timestamp};

/// Evictions that a client can look at.
const RECENT_MAX: usize = 4096;

/// The evictions of one node, bounded.
#[derive(Debug, Default)]
pub(super) struct Evictions {
    sequence: u64,
    recent: VecDeque<EvictedBlock>,
    /// When each key was evicted, and the order to forget them in.
    when: HashMap<BlockKey, Timestamp, foldhash::fast::RandomState>,
    order: VecDeque<(BlockKey, Timestamp)>,
}

impl Evictions {
    pub(super) fn note(&mut self, evicted: &Evicted, now: Timestamp) {
        self.sequence += 1;
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        let BlockKey { namespace, hash } = evicted.key;
        let (sequence, rank) = (self.sequence, evicted.rank);
        self.recent.push_back(EvictedBlock { sequence, namespace, hash, rank });
        if self.order.len() == limits::EVICTED_MEMORY_MAX {
            self.forget_oldest();
        }
        self.when.insert(evicted.key, now);
        self.order.push_back((evicted.key, now));
    }

    fn forget_oldest(&mut self) {
        if let Some((key, at)) = self.order.pop_front()
            && self.when.get(&key) == Some(&at)
        {
            self.when.remove(&key);
        }
    }

    /// Whether a block that comes now was evicted a short time ago. Asks once: the next fetch of the
    /// same block is another story.
    pub(super) fn is_refetch(&mut self, key: &BlockKey, now: Timestamp) -> bool {
        self.when.remove(key).is_some_and(|at| now.since(at) <= limits::REFETCH_WINDOW)
    }

    pub(super) fn since(&self, sequence: u64, max: usize) -> Vec<EvictedBlock> {
        self.recent.iter().filter(|block| block.sequence > sequence).take(max).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Payload;
    use crate::types::{
        BlockHash, EvictionRank, Extent, Generation, NamespaceId, PoolId, ResidentId,
    };

    fn evicted(name: u32) -> Evicted {
        Evicted {
            key: BlockKey {
                namespace: NamespaceId(1),
                hash: BlockHash::new(&name.to_le_bytes()).unwrap(),
            },
            id: ResidentId { slot: 0, generation: Generation(1) },
            payload: Payload { extent: Extent { pool: PoolId(0), offset: 0, len: 1 }, checksum: 0 },
            rank: EvictionRank::FIRST,
        }
    }

    #[test]
    fn a_refetch_counts_within_the_window_and_once() {
        let mut evictions = Evictions::default();
        let at = Timestamp::ZERO;
        evictions.note(&evicted(1), at);
        evictions.note(&evicted(2), at);
        assert!(evictions.is_refetch(&evicted(1).key, at + limits::REFETCH_WINDOW));
        assert!(!evictions.is_refetch(&evicted(1).key, at));
        assert!(!evictions.is_refetch(&evicted(2).key, at + limits::REFETCH_WINDOW * 2));
        assert!(!evictions.is_refetch(&evicted(3).key, at));
    }

    #[test]
    fn memory_of_evictions_is_bounded() {
        let mut evictions = Evictions::default();
        let count = u32::try_from(limits::EVICTED_MEMORY_MAX).unwrap() + 10;
        for name in 0..count {
            evictions.note(&evicted(name), Timestamp::ZERO);
        }
        assert_eq!(evictions.when.len(), limits::EVICTED_MEMORY_MAX);
        assert_eq!(evictions.recent.len(), RECENT_MAX);
        assert!(!evictions.is_refetch(&evicted(0).key, Timestamp::ZERO));
        assert_eq!(evictions.since(0, 5).len(), 5);
        assert_eq!(evictions.since(u64::from(count) - 1, 5).len(), 1);
    }
}
