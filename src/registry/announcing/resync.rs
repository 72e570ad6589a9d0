//! Announcing residents again: all of them, or those of some partitions, at a paced rate.

use std::time::Duration;

use super::drift::Repair;
use super::partitions::PartitionSet;
use super::{AnnounceOptions, Residents};
use crate::registry::{Fingerprint, Partition};
use crate::types::{BlockKey, Timestamp};

/// How far the pace may lag behind before the lag is forgiven.
const PACE_SLACK: Duration = Duration::from_millis(20);

/// Listings that one step may take to fill a batch with residents of some partitions: some
/// milliseconds of work.
const LISTINGS_MAX: usize = 64;

#[derive(Debug)]
struct Walk {
    /// Where the next listing begins; `None` at the end.
    cursor: Option<u32>,
    /// When the next step is due.
    next: Timestamp,
    /// Residents of other partitions are passed over.
    only: Option<PartitionSet>,
    /// What the registry is to forget before the walk begins.
    forget: Vec<Partition>,
    /// The call that makes it forget something.
    forgetting: Option<u64>,
    /// The last batch of the walk.
    last: u64,
}

/// The walk over the residents, if one is under way.
#[derive(Debug, Default)]
pub(super) struct Resync {
    walk: Option<Walk>,
    full: u64,
    partial: u64,
}

impl Resync {
    /// All residents from the beginning.
    pub(super) fn all(&mut self, now: Timestamp) {
        self.begin(None, Vec::new(), now);
    }

    /// The residents of some partitions.
    pub(super) fn some(&mut self, repair: Repair, now: Timestamp) {
        self.begin(Some(repair.partitions), repair.forget, now);
    }

    fn begin(&mut self, only: Option<PartitionSet>, forget: Vec<Partition>, now: Timestamp) {
        let cursor = Some(0);
        self.walk = Some(Walk { cursor, next: now, only, forget, forgetting: None, last: 0 });
    }

    /// A call failed. A walk over all residents goes on, because the batches that failed wait again; a
    /// repair is given up.
    pub(super) fn interrupt(&mut self) {
        self.walk = self.walk.take().filter(|walk| walk.only.is_none());
    }

    pub(super) fn is_running(&self) -> bool {
        self.walk.is_some()
    }

    /// Times that all residents were announced, and times that some were.
    pub(super) const fn counts(&self) -> (u64, u64) {
        (self.full, self.partial)
    }

    /// Whether nothing may be sent before the registry has forgotten something.
    pub(super) fn is_forgetting(&self) -> bool {
        self.walk.as_ref().is_some_and(|walk| walk.forgetting.is_some())
    }

    /// What the registry is to forget next.
    pub(super) fn to_forget(&self) -> Option<Partition> {
        self.walk.as_ref().and_then(|walk| walk.forget.last().copied())
    }

    /// That is under way, in this batch.
    pub(super) fn forgets(&mut self, sequence: u64) {
        if let Some(walk) = &mut self.walk {
            walk.forget.pop();
            walk.forgetting = Some(sequence);
        }
    }

    /// When the next step is due.
    pub(super) fn next(&self) -> Option<Timestamp> {
        let walk = self.walk.as_ref()?;
        walk.cursor.map(|_| walk.next)
    }

    /// The residents of the next step, if it is due; perhaps none.
    pub(super) fn list(
        &mut self,
        residents: &dyn Residents,
        options: &AnnounceOptions,
        now: Timestamp,
    ) -> Option<Vec<BlockKey>> {
        let walk = self.walk.as_mut().filter(|walk| walk.next <= now)?;
        let mut cursor = walk.cursor?;
        let mut keys = Vec::with_capacity(options.batch);
        for _ in 0..LISTINGS_MAX {
            let before = keys.len();
            let next = residents.list(cursor, options.batch - before, &mut keys);
            if let Some(only) = &walk.only {
                let mut at = 0;
                keys.retain(|key| {
                    at += 1;
                    at <= before || only.contains(Fingerprint::of(key).partition())
                });
            }
            walk.cursor = next;
            let Some(next) = next.filter(|_| walk.only.is_some() && keys.len() < options.batch)
            else {
                break;
            };
            cursor = next;
        }
        Some(keys)
    }

    /// `count` of them were sent; the last batch so far has this number.
    pub(super) fn listed(
        &mut self,
        last: u64,
        count: usize,
        options: &AnnounceOptions,
        now: Timestamp,
    ) {
        let Some(walk) = &mut self.walk else { return };
        if count > 0 {
            walk.last = last;
        }
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let cost = Duration::from_secs(1) * count / options.resync_rate.max(1);
        let lag = Timestamp::from_nanos(
            now.as_nanos().saturating_sub(u64::try_from(PACE_SLACK.as_nanos()).unwrap_or(0)),
        );
        walk.next = walk.next.max(lag) + cost;
    }

    /// All batches up to this one are settled; whether a walk over all residents ended by that.
    pub(super) fn settled(&mut self, sequence: u64) -> bool {
        let Some(walk) = &mut self.walk else { return false };
        walk.forgetting = walk.forgetting.filter(|forgetting| *forgetting > sequence);
        let done = walk.cursor.is_none() && walk.forget.is_empty() && walk.last <= sequence;
        if !done {
            return false;
        }
        let full = walk.only.is_none();
        self.walk = None;
        let count = if full { &mut self.full } else { &mut self.partial };
        *count += 1;
        full
    }
}
