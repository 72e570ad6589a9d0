//! Which lists there are: one for each rank of each kind of memory, so that what is evicted for one kind
//! makes room there.

use crate::limits;
use crate::types::{EvictionRank, MemoryKind};

/// The bits of a list's number that are its rank; what is above them is the kind.
const RANK_BITS: u32 = 5;
const _: () = assert!((limits::RANK_MAX as usize) < 1 << RANK_BITS);

/// Numbers of lists, with those that no list has.
pub(super) const LISTS: usize = MemoryKind::ALL.len() << RANK_BITS;

/// One of the lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::store) struct List {
    pub(in crate::store) kind: MemoryKind,
    pub(in crate::store) rank: EvictionRank,
}

impl List {
    /// All lists, in the order of their numbers.
    pub(in crate::store) fn all() -> impl Iterator<Item = Self> {
        let of = |kind| EvictionRank::all().map(move |rank| Self { kind, rank });
        MemoryKind::ALL.into_iter().flat_map(of)
    }

    pub(super) fn number(self) -> u8 {
        let kind = match self.kind {
            MemoryKind::Host => 0,
            MemoryKind::Device => 1 << RANK_BITS,
            MemoryKind::Engine => 2 << RANK_BITS,
        };
        kind | self.rank.get()
    }

    /// The list of this number, or the one nearest to it.
    pub(super) fn numbered(number: u64) -> Self {
        let kind = match number >> RANK_BITS {
            0 => MemoryKind::Host,
            1 => MemoryKind::Device,
            _ => MemoryKind::Engine,
        };
        let rank = u32::try_from(number & ((1 << RANK_BITS) - 1)).unwrap_or(0);
        Self { kind, rank: EvictionRank::clamped(rank) }
    }

    /// The list behind this one, or the first one behind the last.
    pub(super) fn next(self) -> Self {
        let Self { kind, rank } = self;
        if rank < EvictionRank::LAST {
            return Self { kind, rank: rank.raised() };
        }
        let kind = match kind {
            MemoryKind::Host => MemoryKind::Device,
            MemoryKind::Device => MemoryKind::Engine,
            MemoryKind::Engine => MemoryKind::Host,
        };
        Self { kind, rank: EvictionRank::FIRST }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    #[test]
    fn each_list_has_a_number_of_its_own_and_a_next_one() {
        let all: Vec<List> = List::all().collect();
        assert_eq!(all.len(), 93);
        for (at, list) in all.iter().enumerate() {
            assert_eq!(List::numbered(list.number().into()), *list);
            assert!(usize::from(list.number()) < LISTS);
            assert_eq!(list.next(), all[(at + 1) % all.len()]);
        }
        assert!(all.is_sorted_by_key(|list| list.number()));
    }
}
