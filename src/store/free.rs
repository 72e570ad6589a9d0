//! A stack of indices that are free: one word at its top, with a count of changes against the
//! return of an old top, and one link per index.

use crate::sync::{Cell, Shared, zeroed};

const INDEX_BITS: u32 = 28;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

#[derive(Debug)]
pub(super) struct FreeStack {
    /// The index at the top, and above it the count of changes: 36 bits. One that is beyond all
    /// indices says that none is free.
    top: Cell,
    /// By index: how far below it, in steps upwards, its next one is, less one. So zeros are a stack
    /// in which each index is followed by the next higher one.
    below: Box<[Cell]>,
}

impl FreeStack {
    /// All of `0..count` are free; the lowest comes first.
    pub(super) fn full(count: u32) -> Self {
        Self { top: Cell::new(0), below: zeroed(count as usize) }
    }

    pub(super) fn pop(&self) -> Option<u32> {
        loop {
            let top = self.top.get();
            let index = top & INDEX_MASK;
            let steps = self.below.get(usize::try_from(index).ok()?)?.get();
            let below = (index + 1).wrapping_add(steps) & INDEX_MASK;
            let changes = (top >> INDEX_BITS).wrapping_add(1);
            if self.top.replace(top, changes << INDEX_BITS | below) {
                return u32::try_from(index).ok();
            }
        }
    }

    /// `index` is free from now on.
    pub(super) fn push(&self, index: u32) {
        let Some(below) = self.below.get(index as usize) else {
            return;
        };
        loop {
            let top = self.top.get();
            below.publish((top & INDEX_MASK).wrapping_sub(u64::from(index) + 1));
            let changes = (top >> INDEX_BITS).wrapping_add(1);
            if self.top.replace(top, changes << INDEX_BITS | u64::from(index)) {
                return;
            }
        }
    }
}

#[cfg(test)]
impl FreeStack {
    /// How many are free, if nothing else is going on.
    pub(super) fn count(&self) -> usize {
        let mut free = Vec::new();
        free.extend(std::iter::from_fn(|| self.pop()));
        free.iter().rev().for_each(|index| self.push(*index));
        free.len()
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_last_comes_out_first_and_an_empty_stack_says_so() {
        let stack = FreeStack::full(3);
        let pops = |count| (0..count).map(|_| stack.pop()).collect::<Vec<_>>();
        assert_eq!(pops(4), [Some(0), Some(1), Some(2), None]);
        [1, 2, 0].into_iter().for_each(|index| stack.push(index));
        assert_eq!(pops(4), [Some(0), Some(2), Some(1), None]);
        stack.push(2);
        assert_eq!(pops(2), [Some(2), None]);
        assert_eq!(FreeStack::full(0).pop(), None);
    }
}
