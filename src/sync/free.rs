//! A stack of indices that are free: one word at its top, with a count of changes against the
//! return of an old top, and one link per index, which lies in the memory of what is free.

use super::{Apart, Cell, Shared};

const INDEX_BITS: u32 = 28;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

#[derive(Debug)]
pub(crate) struct FreeStack {
    /// The index at the top, and above it the count of changes: 36 bits. One that is beyond all
    /// indices says that none is free.
    top: Apart<Cell>,
}

impl FreeStack {
    /// All indices are free; the lowest comes first.
    pub(crate) fn full() -> Self {
        Self { top: Apart(Cell::new(0)) }
    }

    /// No index is free yet.
    pub(crate) fn empty() -> Self {
        Self { top: Apart(Cell::new(INDEX_MASK)) }
    }

    /// `below` names the cell of an index: how far below it, in steps upwards, its next one is, less
    /// one. So zeros are a stack in which each index is followed by the next higher one. The cell of
    /// an index that is not free may hold anything.
    pub(crate) fn pop<'a>(&self, below: impl Fn(u32) -> Option<&'a Cell>) -> Option<u32> {
        loop {
            let top = self.top.get();
            let index = top & INDEX_MASK;
            let steps = below(u32::try_from(index).ok()?)?.get();
            let next = (index + 1).wrapping_add(steps) & INDEX_MASK;
            let changes = (top >> INDEX_BITS).wrapping_add(1);
            if self.top.replace(top, changes << INDEX_BITS | next) {
                return u32::try_from(index).ok();
            }
        }
    }

    /// `index`, whose cell is `below`, is free from now on.
    pub(crate) fn push(&self, index: u32, below: &Cell) {
        loop {
            let top = self.top.get();
            let steps = (top & INDEX_MASK).wrapping_sub(u64::from(index) + 1) & INDEX_MASK;
            below.publish(steps);
            let changes = (top >> INDEX_BITS).wrapping_add(1);
            if self.top.replace(top, changes << INDEX_BITS | u64::from(index)) {
                return;
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_last_comes_out_first_and_an_empty_stack_says_so() {
        let (stack, cells) = (FreeStack::full(), [const { Cell::new(0) }; 3]);
        let below = |index: u32| cells.get(index as usize);
        let pops = |count| (0..count).map(|_| stack.pop(below)).collect::<Vec<_>>();
        let push = |index: u32| stack.push(index, &cells[index as usize]);
        assert_eq!(pops(4), [Some(0), Some(1), Some(2), None]);
        [1, 2, 0].into_iter().for_each(push);
        assert_eq!(pops(4), [Some(0), Some(2), Some(1), None]);
        push(2);
        assert_eq!(pops(2), [Some(2), None]);
        assert_eq!(FreeStack::full().pop(|_| None), None);
        let stack = FreeStack::empty();
        assert_eq!(stack.pop(below), None);
        stack.push(1, &cells[1]);
        assert_eq!([stack.pop(below), stack.pop(below)], [Some(1), None]);
    }
}
