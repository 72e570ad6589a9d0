//! A set of partitions, as bits.

use crate::limits;
use crate::registry::Partition;

const WORDS: usize = limits::REGISTRY_PARTITIONS as usize / 64;

/// A set of partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct PartitionSet([u64; WORDS]);

impl PartitionSet {
    /// Adds one.
    pub(super) fn insert(&mut self, partition: Partition) {
        if let Some(word) = self.0.get_mut(partition.index() / 64) {
            *word |= 1 << (partition.index() % 64);
        }
    }

    /// Whether it is in the set.
    #[must_use]
    pub(super) fn contains(&self, partition: Partition) -> bool {
        let word = self.0.get(partition.index() / 64);
        word.is_some_and(|word| word >> (partition.index() % 64) & 1 == 1)
    }

    /// Whether there is none.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }
}

impl FromIterator<Partition> for PartitionSet {
    fn from_iter<T: IntoIterator<Item = Partition>>(partitions: T) -> Self {
        let mut set = Self::default();
        partitions.into_iter().for_each(|partition| set.insert(partition));
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_was_put_in() {
        assert!(PartitionSet::default().is_empty());
        let odd: PartitionSet = Partition::all().filter(|it| it.get() % 2 == 1).collect();
        assert!(Partition::all().all(|it| odd.contains(it) == (it.get() % 2 == 1)));
    }
}
