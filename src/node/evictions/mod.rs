//! What was evicted lately: for people who look, and to count blocks that were missed soon after.
//!
//! Whoever evicts, the reclaimer above all, writes here, and nobody waits for that: there is no lock, and
//! a thread that stops in the middle leaves a gap and nothing else.

mod recent;
mod refetches;

use crate::protocol::door::EvictedBlock;
use crate::store::Evicted;
use crate::types::{BlockKey, Timestamp};
use recent::Recent;
use refetches::Refetches;

/// The evictions of one node, bounded.
#[derive(Debug)]
pub(super) struct Evictions {
    recent: Recent,
    refetches: Refetches,
}

impl Evictions {
    pub(super) fn new() -> Self {
        Self { recent: Recent::new(), refetches: Refetches::new() }
    }

    pub(super) fn note(&self, evicted: &Evicted, now: Timestamp) {
        self.recent.note(&evicted.key, evicted.rank);
        self.refetches.note(&evicted.key, now);
    }

    /// Whether a block that comes now was evicted a short time ago. Asks once: the next fetch of the
    /// same block is another story.
    pub(super) fn is_refetch(&self, key: &BlockKey, now: Timestamp) -> bool {
        self.refetches.take(key, now)
    }

    /// The evictions after this one, in their order, up to the first that is being written now.
    pub(super) fn since(&self, sequence: u64, max: usize) -> Vec<EvictedBlock> {
        self.recent.since(sequence, max)
    }
}
