//! Copies of engines' blocks for local readers, which map the host pools and nothing else.
//!
//! A copy is what its reader holds: the pin on the resident goes back as soon as the copy is made, so that
//! a reader that holds a block for long keeps no engine from having it back.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::event::BusyReason;
use crate::layout::BlockId;
use crate::limits;
use crate::memory::{Direction, Reservation};
use crate::node::Inner;
use crate::node::residency::Patience;
use crate::protocol::door::{AcquireOutcome, HeldBlock};
use crate::runtime::door::{Batch, pools};
use crate::sync::{Mutex, lock};
use crate::types::{Extent, Generation, MemoryKind, PoolId, ResidentId};

/// Set in the slots of holds on copies; no store has so many.
const COPY: u32 = 1 << 31;

const _: () = assert!(limits::RESIDENTS_MAX < COPY);

/// Copies that local readers hold, by what they know them as.
#[derive(Debug, Default)]
pub(in crate::node) struct Copies {
    next: AtomicU64,
    held: Mutex<HashMap<ResidentId, Reservation>>,
}

impl Copies {
    /// Keeps a copy until its hold is released.
    fn keep(&self, memory: Reservation) -> ResidentId {
        // Relaxed: a number of its own is all that is wanted.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let low = |number: u64| u32::try_from(number & u64::from(COPY - 1)).unwrap_or_default();
        let hold =
            ResidentId { slot: COPY | low(number), generation: Generation(low(number >> 31)) };
        lock(&self.held).insert(hold, memory);
        hold
    }

    /// Lets go of those of these holds that are on copies; the others.
    pub(in crate::node) fn release<'a>(&self, holds: &'a [ResidentId]) -> Cow<'a, [ResidentId]> {
        let is_copy = |hold: &ResidentId| hold.slot & COPY != 0;
        // Nearly always none is: blocks that are held in place cost a reader no allocation.
        if !holds.iter().any(is_copy) {
            return Cow::Borrowed(holds);
        }
        let mut held = lock(&self.held);
        holds.iter().filter(|hold| is_copy(hold)).for_each(|hold| drop(held.remove(hold)));
        holds.iter().copied().filter(|hold| !is_copy(hold)).collect()
    }
}

/// A block to be copied: where it is told of, and what it is.
type Wanted = (usize, HeldBlock);

impl Inner {
    /// Puts copies in host memory in the place of blocks in engines' memory, but for those that lie at the
    /// place that their reader wished for (`places`, as [`Wish`] has them). What finds no room is busy; what
    /// cannot be copied, or is not what was published any more, has failed.
    ///
    /// [`Wish`]: crate::peer::Wish
    pub(in crate::node) async fn copied_to_host(
        &self,
        outcomes: &mut [AcquireOutcome],
        places: &[Extent],
    ) {
        let mut by_layout: BTreeMap<PoolId, Vec<Wanted>> = BTreeMap::new();
        for (at, outcome) in outcomes.iter().enumerate() {
            if let AcquireOutcome::Ready(held) = outcome
                && held.extent.pool.kind() == MemoryKind::Engine
                && places.get(at) != Some(&held.extent)
            {
                by_layout.entry(held.extent.pool).or_default().push((at, *held));
            }
        }
        for (pool, wanted) in by_layout {
            let pins: Vec<ResidentId> = wanted.iter().map(|(_, held)| held.hold).collect();
            let copied = self.copy(pool, &wanted).await;
            self.residency.store.unpin_batch(&pins);
            for ((at, _), copy) in wanted.iter().zip(copied) {
                if let Some(outcome) = outcomes.get_mut(*at) {
                    *outcome = copy;
                }
            }
        }
    }

    /// Copies blocks of one layout, which the caller has pinned.
    async fn copy(&self, pool: PoolId, wanted: &[Wanted]) -> Vec<AcquireOutcome> {
        let failed = || vec![AcquireOutcome::Failed; wanted.len()];
        // As long as a resident lies in it, which its pin ensures, its layout is open.
        let Some(open) = self.in_place.find(pool) else { return failed() };
        let sizes: Vec<u32> = wanted.iter().map(|(_, held)| held.extent.len).collect();
        let mut memory = Vec::with_capacity(sizes.len());
        self.residency.reserve_some(&sizes, &mut memory, Patience::Waits);
        let pairs = wanted.iter().zip(&memory);
        let pair = |((_, held), memory): (&Wanted, &Reservation)| {
            (BlockId::of(&held.extent), memory.extent())
        };
        let pairs = pairs.map(pair).collect();
        let batch = Batch {
            pools: pools(self),
            imported: Arc::clone(&open.imported),
            direction: Direction::Save,
            event: None,
            pairs,
            expected: Vec::new(),
        };
        let (memory, sums) = match batch.run(memory).await {
            Ok(copied) => copied,
            Err(error) => {
                tracing::warn!(%error, "an engine's blocks were not copied for local readers");
                return failed();
            }
        };
        let mut copies = memory.into_iter().zip(sums);
        let outcome = |(_, held): &Wanted| match copies.next() {
            None => AcquireOutcome::Busy(BusyReason::Memory),
            Some((_, sum)) if sum != held.checksum => AcquireOutcome::Failed,
            Some((memory, _)) => {
                let extent = memory.extent();
                AcquireOutcome::Ready(HeldBlock { extent, hold: self.copies.keep(memory), ..*held })
            }
        };
        wanted.iter().map(outcome).collect()
    }
}
