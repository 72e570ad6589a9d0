//! What a client owns, as values whose drop gives it back.

use std::collections::HashMap;
use std::sync::Arc;

use super::service::{DoorService, Publish, Reserved};
use crate::protocol::door::{AcquireOutcome, PublishBlock, PublishOutcome};
use crate::types::{Extent, Namespace, PoolId, ResidentId};

/// A client's reservations, by where they begin.
pub(super) struct Reservations<R>(HashMap<(PoolId, u64), R>);

impl<R: Reserved> Reservations<R> {
    pub(super) fn new() -> Self {
        Self(HashMap::new())
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn add(&mut self, memory: R) -> Extent {
        let extent = memory.extent();
        self.0.insert((extent.pool, extent.offset), memory);
        extent
    }

    /// The reservation of exactly this extent; `None` where the client has none.
    pub(super) fn take(&mut self, extent: Extent) -> Option<R> {
        let key = (extent.pool, extent.offset);
        if self.0.get(&key)?.extent() != extent {
            return None;
        }
        self.0.remove(&key)
    }

    /// Publishes the blocks whose extents are reservations of this client; the others are refused,
    /// each in its place.
    pub(super) fn publish<S: DoorService<Reserved = R>>(
        &mut self,
        service: &S,
        namespace: &Namespace,
        blocks: &[PublishBlock],
        pulled: bool,
    ) -> Vec<PublishOutcome> {
        let mut outcomes = vec![PublishOutcome::Refused; blocks.len()];
        let mut places = Vec::with_capacity(blocks.len());
        let mut own = Vec::with_capacity(blocks.len());
        for (place, block) in outcomes.iter_mut().zip(blocks) {
            if let Some(memory) = self.take(block.extent) {
                places.push(place);
                own.push(Publish { hash: block.hash, checksum: block.checksum, memory });
            }
        }
        let stored = service.publish(namespace, own, pulled);
        for (place, outcome) in places.into_iter().zip(stored) {
            *place = outcome;
        }
        outcomes
    }
}

/// A client's holds: how often each resident is pinned for it.
pub(super) struct Holds<S: DoorService> {
    service: Arc<S>,
    counts: HashMap<ResidentId, usize>,
    total: usize,
}

impl<S: DoorService> Holds<S> {
    pub(super) fn new(service: Arc<S>) -> Self {
        Self { service, counts: HashMap::new(), total: 0 }
    }

    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Takes over what an acquisition got.
    pub(super) fn take_over(&mut self, acquired: Acquired<S>) -> Vec<AcquireOutcome> {
        let outcomes = acquired.into_outcomes();
        for hold in ready(&outcomes) {
            *self.counts.entry(hold).or_default() += 1;
            self.total += 1;
        }
        outcomes
    }

    /// Releases those of `holds` that this client has, once per entry; how many that were.
    pub(super) fn release(&mut self, holds: &[ResidentId]) -> usize {
        let mut own = Vec::with_capacity(holds.len());
        for hold in holds {
            let Some(count) = self.counts.get_mut(hold) else {
                continue;
            };
            *count -= 1;
            if *count == 0 {
                self.counts.remove(hold);
            }
            self.total -= 1;
            own.push(*hold);
        }
        if !own.is_empty() {
            self.service.release(&own);
        }
        own.len()
    }
}

impl<S: DoorService> Drop for Holds<S> {
    fn drop(&mut self) {
        let all: Vec<ResidentId> = self
            .counts
            .iter()
            .flat_map(|(hold, count)| std::iter::repeat_n(*hold, *count))
            .collect();
        if !all.is_empty() {
            self.service.release(&all);
        }
    }
}

/// What an acquisition got, until a client's [`Holds`] take it over.
pub(super) struct Acquired<S: DoorService> {
    service: Arc<S>,
    outcomes: Vec<AcquireOutcome>,
}

impl<S: DoorService> Acquired<S> {
    pub(super) fn new(service: Arc<S>, outcomes: Vec<AcquireOutcome>) -> Self {
        Self { service, outcomes }
    }

    /// What it got, which is held as long as `self`.
    pub(super) fn outcomes(&self) -> &[AcquireOutcome] {
        &self.outcomes
    }

    fn into_outcomes(mut self) -> Vec<AcquireOutcome> {
        std::mem::take(&mut self.outcomes)
    }
}

impl<S: DoorService> Drop for Acquired<S> {
    fn drop(&mut self) {
        let all: Vec<ResidentId> = ready(&self.outcomes).collect();
        if !all.is_empty() {
            self.service.release(&all);
        }
    }
}

fn ready(outcomes: &[AcquireOutcome]) -> impl Iterator<Item = ResidentId> {
    outcomes.iter().filter_map(|outcome| match outcome {
        AcquireOutcome::Ready(held) => Some(held.hold),
        _ => None,
    })
}
