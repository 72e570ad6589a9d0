//! Registrations and lists of owners as the servers keep them.

use std::collections::HashMap;

use crate::limits;
use crate::registry::{Fingerprint, Partition};

/// A registration: the node's slot and a generation of it that only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct Owner(u64);

/// Bits of a generation: milliseconds since 1970, or one more than the generation before.
const GENERATION_BITS: u32 = 48;

impl Owner {
    /// The registration of this number; 0 is none.
    pub(super) const fn new(number: u64) -> Self {
        Self(number)
    }

    pub(super) const fn number(self) -> u64 {
        self.0
    }

    pub(super) const fn slot(self) -> u64 {
        self.0 >> GENERATION_BITS
    }

    pub(super) const fn generation(self) -> u64 {
        self.0 & ((1 << GENERATION_BITS) - 1)
    }

    pub(super) const fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }

    /// The field under which a partition's digest of this slot is kept.
    pub(super) fn digest_field(self, partition: Partition) -> Vec<u8> {
        let [a, b, ..] = self.to_bytes();
        let [c, d] = partition.get().to_be_bytes();
        vec![a, b, c, d]
    }
}

/// The registrations in a list; what is cut off is left out.
pub(super) fn owners(list: &[u8]) -> impl Iterator<Item = Owner> {
    let (words, _rest) = list.as_chunks::<8>();
    words.iter().map(|word| Owner(u64::from_be_bytes(*word)))
}

/// Groups of partitions, each with a hash tag of its own: the keys of a group are on one server.
pub(super) const GROUPS: usize = 32;

/// The group that a partition belongs to.
pub(super) fn group_of(partition: Partition) -> usize {
    partition.index() / (usize::from(limits::REGISTRY_PARTITIONS) / GROUPS)
}

/// The name of a group's table.
pub(super) fn key(group: usize, table: &str) -> Vec<u8> {
    format!("{{kvrail:{group}}}:{table}").into_bytes()
}

/// Keys by group: each fingerprint once, with the positions that asked for it.
#[derive(Debug)]
pub(super) struct Grouped {
    /// By group: the fingerprints.
    pub(super) prints: Vec<Vec<[u8; 16]>>,
    /// By position: the group and the place in it.
    pub(super) places: Vec<(usize, usize)>,
}

impl Grouped {
    pub(super) fn new(prints: impl Iterator<Item = Fingerprint>) -> Self {
        let mut known =
            HashMap::<Fingerprint, (usize, usize), foldhash::fast::RandomState>::default();
        let mut grouped = Self { prints: vec![Vec::new(); GROUPS], places: Vec::new() };
        for print in prints {
            let group = group_of(print.partition());
            let place = *known.entry(print).or_insert_with(|| {
                let prints = grouped.prints.get_mut(group);
                prints.map_or((group, usize::MAX), |prints| {
                    prints.push(print.to_bytes());
                    (group, prints.len() - 1)
                })
            });
            grouped.places.push(place);
        }
        grouped
    }

    /// The groups that have keys.
    pub(super) fn groups(&self) -> impl Iterator<Item = (usize, &[[u8; 16]])> {
        let all = self.prints.iter().enumerate();
        all.filter(|(_, prints)| !prints.is_empty())
            .map(|(group, prints)| (group, prints.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registration_is_its_slot_and_its_generation() {
        let owner = Owner::new(0x0102_0000_0000_0005);
        assert_eq!((owner.slot(), owner.generation()), (0x0102, 5));
        let list = [owner.to_bytes(), Owner::new(7).to_bytes()].concat();
        let all: Vec<_> = owners(&list).collect();
        assert_eq!(all, [owner, Owner::new(7)]);
        assert_eq!(owner.digest_field(Partition::new(0x0104).unwrap()), [1, 2, 1, 4]);
    }

    #[test]
    fn groups_hold_each_key_once_and_every_partition() {
        let print = |n: u8| Fingerprint::from_bytes([n; 16]);
        let grouped = Grouped::new([1, 200, 1].map(print).into_iter());
        assert_eq!(grouped.places[0], grouped.places[2]);
        assert_eq!(grouped.groups().count(), 2);
        let groups: std::collections::BTreeSet<_> = Partition::all().map(group_of).collect();
        assert!(groups.into_iter().eq(0..GROUPS));
    }
}
