//! Which partitions are compared next, and what follows from a difference.
//!
//! A node's digest moves in the moment between a change in its store and the note of it, so that one
//! difference proves nothing. A partition that differs twice in a row has its residents announced
//! again, which mends what the registry lacks. One that differs twice more has blocks listed that the
//! node does not hold: the registry forgets the partition first then.

use std::collections::BTreeMap;

use super::partitions::PartitionSet;
use crate::limits;
use crate::registry::{Partition, PartitionDigest};

/// Partitions that one heartbeat compares while all is well: a round takes eight heartbeats.
const ROTATION: u16 = limits::REGISTRY_PARTITIONS / 8;

/// Differences in a row after which a partition is announced again, and after which it is forgotten
/// first.
const STRIKES_AGAIN: u8 = 2;
const STRIKES_AFRESH: u8 = 4;

/// What has to be done about partitions that differ.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Repair {
    /// To be announced again.
    pub(super) partitions: PartitionSet,
    /// Those of them that the registry forgets first.
    pub(super) forget: Vec<Partition>,
}

#[derive(Debug, Default)]
pub(super) struct Drift {
    next: u16,
    strikes: BTreeMap<Partition, u8>,
    /// Partitions of which the registry did not take every block, because it is full: they differ.
    refused: PartitionSet,
}

impl Drift {
    /// All is announced anew.
    pub(super) fn reset(&mut self) {
        *self = Self { next: self.next, ..Self::default() };
    }

    pub(super) fn refuse(&mut self, partition: Partition) {
        self.refused.insert(partition);
    }

    /// The partitions to compare now: some in turn, or all where one is under suspicion.
    pub(super) fn due(&mut self) -> Vec<Partition> {
        let turn = self.next..self.next + ROTATION;
        self.next = turn.end % limits::REGISTRY_PARTITIONS;
        let due = Partition::all()
            .filter(|partition| !self.strikes.is_empty() || turn.contains(&partition.get()));
        due.filter(|partition| !self.refused.contains(*partition)).collect()
    }

    /// The registry compared `told` and found that `drifted` differ.
    pub(super) fn compared(
        &mut self,
        told: &[PartitionDigest],
        drifted: &[Partition],
    ) -> Option<Repair> {
        let mut repair = Repair::default();
        let drifted: PartitionSet = drifted.iter().copied().collect();
        for partition in told.iter().map(|told| told.partition) {
            if !drifted.contains(partition) {
                self.strikes.remove(&partition);
                continue;
            }
            let strikes = self.strikes.entry(partition).or_default();
            *strikes += 1;
            if *strikes == STRIKES_AGAIN || *strikes == STRIKES_AFRESH {
                repair.partitions.insert(partition);
            }
            if *strikes == STRIKES_AFRESH {
                *strikes = 0;
                repair.forget.push(partition);
            }
        }
        (!repair.partitions.is_empty()).then_some(repair)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(drift: &mut Drift, differs: &[Partition]) -> Option<Repair> {
        let told: Vec<_> = drift
            .due()
            .into_iter()
            .map(|partition| PartitionDigest { partition, digest: 0 })
            .collect();
        drift.compared(&told, differs)
    }

    #[test]
    fn a_round_compares_every_partition_once() {
        let mut drift = Drift::default();
        let mut seen: Vec<_> = (0..8).flat_map(|_| drift.due()).collect();
        assert_eq!(seen.len(), usize::from(limits::REGISTRY_PARTITIONS));
        seen.sort_unstable();
        assert!(seen.into_iter().eq(Partition::all()));
    }

    #[test]
    fn one_difference_is_forgiven_two_are_announced_four_are_forgotten_first() {
        let mut drift = Drift::default();
        let bad = Partition::new(3).unwrap();
        assert_eq!(compare(&mut drift, &[bad]), None);
        assert_eq!(drift.due().len(), usize::from(limits::REGISTRY_PARTITIONS), "all at once now");
        assert_eq!(compare(&mut drift, &[]), None);
        assert!(drift.due().len() < 200, "trust is back");
        drift.next = 0;
        for round in 1..=4 {
            let repair = compare(&mut drift, &[bad]);
            assert_eq!(repair.is_some(), round % 2 == 0, "{round}");
            let Some(repair) = repair else { continue };
            assert!(repair.partitions.contains(bad));
            assert_eq!(repair.forget.len(), usize::from(round == 4));
        }
    }

    #[test]
    fn what_the_registry_had_no_room_for_is_no_drift() {
        let mut drift = Drift::default();
        let full = Partition::new(5).unwrap();
        drift.refuse(full);
        assert!(!drift.due().contains(&full));
        drift.reset();
        drift.next = 0;
        assert!(drift.due().contains(&full));
    }
}
