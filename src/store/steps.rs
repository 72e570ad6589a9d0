//! What a batch did to ranks, to be told once it is done.

use super::table::Step;
use crate::limits;

/// The steps of one event over a batch that moved a rank, counted by the rank that they left, so that
/// they can be told after the batch without a list of them.
pub(super) struct Steps {
    pub(super) counts: [u32; limits::RANK_MAX as usize + 1],
    /// The ranks that were left, one bit each.
    pub(super) left: u32,
}

impl Steps {
    pub(super) fn new() -> Self {
        Self { counts: [0; _], left: 0 }
    }

    pub(super) fn add(&mut self, step: Step) {
        if step.from != step.to
            && let Some(count) = self.counts.get_mut(usize::from(step.from.get()))
        {
            *count += 1;
            self.left |= 1 << step.from.get();
        }
    }
}
