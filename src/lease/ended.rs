//! What a requester's latest completions were answered, for those that come again.

use std::collections::VecDeque;

use crate::limits;
use crate::types::{LeaseId, NodeEpoch};

#[derive(Debug)]
struct Entry {
    lease: LeaseId,
    epoch: NodeEpoch,
    /// Where its ranks begin, counted from the first one ever remembered.
    start: u64,
    ranks: u16,
}

/// The answers to at most [`limits::ENDED_LEASES_MAX`] completions, in two rings: memory grows to
/// what the requester's leases need, at most 128 KiB of ranks, and is then reused.
#[derive(Debug, Default)]
pub(super) struct Ended {
    entries: VecDeque<Entry>,
    ranks: VecDeque<u8>,
    /// Ranks forgotten so far.
    forgotten: u64,
}

impl Ended {
    /// Remembers an answer; the oldest one makes room.
    pub(super) fn remember(&mut self, lease: LeaseId, epoch: NodeEpoch, ranks: &[u8]) {
        if self.entries.len() == limits::ENDED_LEASES_MAX
            && let Some(oldest) = self.entries.pop_front()
        {
            self.ranks.drain(..usize::from(oldest.ranks));
            self.forgotten += u64::from(oldest.ranks);
        }
        self.entries.push_back(Entry {
            lease,
            epoch,
            start: self.forgotten + self.ranks.len() as u64,
            // A lease has at most LEND_BLOCKS_MAX positions.
            ranks: u16::try_from(ranks.len()).unwrap_or(u16::MAX),
        });
        self.ranks.extend(ranks);
    }

    /// The answer that this lease's completion got.
    pub(super) fn recall(
        &self,
        lease: LeaseId,
        epoch: NodeEpoch,
    ) -> Option<impl ExactSizeIterator<Item = u8>> {
        let newest_first = self.entries.iter().rev();
        let entry = { newest_first }.find(|it| it.lease == lease && it.epoch == epoch)?;
        let start = usize::try_from(entry.start - self.forgotten).ok()?;
        let end = start + usize::from(entry.ranks);
        (end <= self.ranks.len()).then(|| self.ranks.range(start..end).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_answers_are_kept_whole() {
        let mut ended = Ended::default();
        let epoch = NodeEpoch(1);
        let ranks = |id: u64| vec![(id % 31) as u8; (id % 7) as usize + 1];
        for id in 1..=1000 {
            ended.remember(LeaseId(id), epoch, &ranks(id));
        }
        let kept = limits::ENDED_LEASES_MAX as u64;
        for id in 1001 - kept..=1000 {
            let answer: Vec<_> = ended.recall(LeaseId(id), epoch).unwrap().collect();
            assert_eq!(answer, ranks(id));
            assert!(ended.recall(LeaseId(id), NodeEpoch(2)).is_none());
        }
        assert!(ended.recall(LeaseId(1000 - kept), epoch).is_none());
    }
}
