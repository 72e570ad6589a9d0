//! What the reclaimer does in one step: from above the high mark down to the low one, memory by memory.

use super::Residency;
use crate::runtime::reclaim::{Reclaim, Reclaimed};
use crate::types::MemoryKind;

/// Victims of one step of the reclaimer.
pub(super) const VICTIMS_PER_STEP: usize = 64;

impl Residency {
    fn reclaim_from(&self, kind: MemoryKind) -> Reclaimed {
        // The goal is fixed at the start: from above the high mark down to the low one.
        let excess = self.excess(kind);
        if excess == 0 {
            return Reclaimed::Enough;
        }
        let goal = self.usage(kind).used.saturating_sub(excess);
        // The first victim tells how large they are; the store is not walked to find out.
        let mut typical = excess;
        while let left = self.usage(kind).used.saturating_sub(goal)
            && left > 0
        {
            // As many as are needed if all are as large as the last ones, so that none goes in vain.
            let victims = usize::try_from(left.div_ceil(typical)).unwrap_or(usize::MAX);
            let victims = victims.min(VICTIMS_PER_STEP);
            let freed = self.evict(kind, victims);
            if freed == 0 && kind == MemoryKind::Device && self.device_is_lost() {
                // What a lost GPU's copies own never comes back: no reason to look again at once.
                return Reclaimed::Enough;
            }
            if freed == 0 {
                return Reclaimed::Stuck;
            }
            typical = (freed / victims as u64).max(1);
        }
        Reclaimed::Some
    }
}

impl Reclaim for Residency {
    fn reclaim(&self) -> Reclaimed {
        match MemoryKind::EVICTABLE.map(|kind| self.reclaim_from(kind)) {
            found if found.contains(&Reclaimed::Some) => Reclaimed::Some,
            found if found.contains(&Reclaimed::Stuck) => Reclaimed::Stuck,
            _ => Reclaimed::Enough,
        }
    }
}
