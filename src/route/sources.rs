//! Which of two owners serves a run, and whom not to ask now.
//!
//! Power of two choices: the registry draws one owner at random among those that reach about as far.
//! Where that one has much to serve, a second one is drawn, and the less busy of the two takes the run.
//! How busy an owner is it says itself, in each reply: bytes that it has lent and not got back. To that
//! comes what this node has asked of it since and it has not counted yet.

use std::time::Duration;

use hashbrown::HashMap;

use super::lend::{Lend, Lent};
use crate::limits;
use crate::peer::FetchOutcome;
use crate::types::{Load, NodeId, Timestamp};

/// What an owner said about its load counts for so long.
const FRESH: Duration = Duration::from_secs(2);

/// An owner with less than this to serve needs no second choice, bytes.
const BUSY_BYTES: u64 = 8 << 20;

/// Length of a block as long as none was seen, bytes.
const BLOCK_BYTES: u64 = 256 << 10;

#[derive(Debug, Clone, Copy, Default)]
struct Source {
    load: Load,
    said: Timestamp,
    /// Blocks that this node has asked for and not got an answer on.
    asked: u64,
    suspended_until: Timestamp,
}

impl Source {
    fn is_idle(&self, now: Timestamp) -> bool {
        self.asked == 0 && self.suspended_until <= now && now.since(self.said) > FRESH
    }
}

/// What a reader knows of the owners that it asks.
#[derive(Debug)]
pub struct Sources {
    known: HashMap<NodeId, Source, foldhash::fast::RandomState>,
    /// Length of a typical block: a moving mean.
    block_bytes: u64,
    /// What spreads equal owners: another number for each plan.
    choice: u64,
}

impl Sources {
    /// What this node knows at its start: nobody.
    #[must_use]
    pub fn new(node: NodeId) -> Self {
        // Where it begins depends on the node, so that nodes that start together do not all ask the
        // same owners.
        let choice = node.0.iter().fold(0, |sum: u64, byte| sum.rotate_left(8) ^ u64::from(*byte));
        Self { known: HashMap::default(), block_bytes: BLOCK_BYTES, choice }
    }

    /// The number that decides among equals in the next plan.
    pub(super) fn next_choice(&mut self) -> u64 {
        self.choice = self.choice.wrapping_add(1);
        self.choice
    }

    /// Bytes that an owner has to serve, as far as is known.
    #[must_use]
    pub fn weight(&self, owner: NodeId, now: Timestamp) -> u64 {
        self.known.get(&owner).map_or(0, |source| {
            let said =
                if now.since(source.said) <= FRESH { source.load.outstanding_bytes } else { 0 };
            said.saturating_add(source.asked.saturating_mul(self.block_bytes))
        })
    }

    /// Whether an owner has so much to serve that a second choice is worth its question.
    #[must_use]
    pub fn is_busy(&self, owner: NodeId, now: Timestamp) -> bool {
        self.weight(owner, now) >= BUSY_BYTES
    }

    /// Takes the less busy of two owners of one run of so many blocks, and counts the run as asked of
    /// it: [`Self::answered`] takes it off again.
    fn choose(
        &mut self,
        first: NodeId,
        second: Option<NodeId>,
        blocks: usize,
        now: Timestamp,
    ) -> NodeId {
        let less_busy = second.filter(|second| self.weight(*second, now) < self.weight(first, now));
        let owner = less_busy.unwrap_or(first);
        if self.known.len() >= limits::CONNECTIONS_MAX && !self.known.contains_key(&owner) {
            self.known.retain(|_, source| !source.is_idle(now));
        }
        self.known.entry(owner).or_default().asked += blocks as u64;
        owner
    }

    /// An owner has answered for so many blocks, and said how busy it is.
    fn answered(&mut self, owner: NodeId, blocks: usize, load: Load, now: Timestamp) {
        let source = self.known.entry(owner).or_default();
        source.asked = source.asked.saturating_sub(blocks as u64);
        (source.load, source.said) = (load, now);
    }

    /// Gives each lend to the less busy of its two owners: its own, and that of the lend in `second`
    /// which covers it, where there is one.
    pub(super) fn assign(
        &mut self,
        mut lends: Vec<Lend>,
        second: &[Lend],
        now: Timestamp,
    ) -> Vec<Lend> {
        for lend in &mut lends {
            let holds =
                |other: &&Lend| lend.positions.iter().all(|at| other.positions.contains(at));
            let other = second.iter().find(holds);
            let owner = other.map(|other| other.owner);
            let chosen = self.choose(lend.owner, owner, lend.positions.len(), now);
            if let Some(other) = other.filter(|other| other.owner == chosen) {
                lend.owner = other.owner;
                (lend.epoch, lend.address) = (other.epoch, other.address.clone());
            }
        }
        lends
    }

    /// A lend has ended.
    pub(super) fn lent(&mut self, lend: &Lend, lent: &Lent, now: Timestamp) {
        self.answered(lend.owner, lend.positions.len(), lent.load, now);
        if let Some(until) = lent.suspended {
            self.known.entry(lend.owner).or_default().suspended_until = until;
        }
        for outcome in &lent.outcomes {
            if let FetchOutcome::Ready { found, .. } = outcome {
                let bytes = u64::from(found.payload.extent.len);
                self.block_bytes = (self.block_bytes * 7 + bytes) / 8;
            }
        }
    }

    /// Whether an owner is left alone now.
    #[must_use]
    pub fn is_suspended(&self, owner: NodeId, now: Timestamp) -> bool {
        self.known.get(&owner).is_some_and(|source| now < source.suspended_until)
    }

    /// Whether anybody is.
    #[must_use]
    pub fn leaves_anyone_alone(&self, now: Timestamp) -> bool {
        self.known.values().any(|source| now < source.suspended_until)
    }

    /// Owners that are left alone now; at most as many as a plan can be told to avoid.
    #[must_use]
    pub fn suspended(&self, now: Timestamp) -> Vec<NodeId> {
        let left_alone = self.known.iter().filter(|(_, source)| now < source.suspended_until);
        left_alone.map(|(owner, _)| *owner).take(limits::REGISTRY_AVOID_MAX).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::NodeEpoch;

    const A: NodeId = NodeId([1; 16]);
    const B: NodeId = NodeId([2; 16]);

    fn load(outstanding_bytes: u64) -> Load {
        Load { outstanding_bytes, pause_ms: 0 }
    }

    fn at(millis: u64) -> Timestamp {
        Timestamp::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn of_two_owners_the_one_with_less_to_serve_is_taken_wherever_it_is_listed() {
        let mut sources = Sources::new(NodeId([9; 16]));
        sources.answered(A, 0, load(100 << 20), at(0));
        sources.answered(B, 0, load(10 << 20), at(0));
        assert!(sources.is_busy(A, at(0)) && sources.is_busy(B, at(0)));
        assert_eq!(sources.choose(A, Some(B), 1, at(0)), B);
        assert_eq!(sources.choose(B, Some(A), 1, at(0)), B);
        assert_eq!(sources.choose(A, None, 1, at(0)), A);
    }

    #[test]
    fn what_was_asked_counts_until_it_is_answered_and_what_was_said_for_a_while() {
        let mut sources = Sources::new(NodeId([9; 16]));
        let mut taken = [0, 0];
        for _ in 0..64 {
            let owner = sources.choose(A, Some(B), 64, at(0));
            taken[usize::from(owner == B)] += 1;
        }
        assert_eq!(taken, [32, 32], "a long read spreads over both");
        sources.answered(A, 32 * 64, load(0), at(0));
        assert_eq!(sources.weight(A, at(0)), 0);
        assert!(sources.is_busy(B, at(0)));
        sources.answered(B, 32 * 64, load(1 << 30), at(0));
        assert_eq!(sources.weight(B, at(2000)), 1 << 30);
        assert_eq!(sources.weight(B, at(2001)), 0, "that is long ago");
    }

    #[test]
    fn a_suspension_ends_by_itself() {
        let mut sources = Sources::new(NodeId([9; 16]));
        let lend =
            Lend { owner: A, epoch: NodeEpoch(1), address: String::new(), positions: Vec::new() };
        let suspended = Some(at(10));
        let lent = Lent { outcomes: Vec::new(), load: load(0), suspended };
        sources.lent(&lend, &lent, at(0));
        assert_eq!(sources.suspended(at(9)), [A]);
        assert_eq!(sources.suspended(at(10)), []);
    }

    #[test]
    fn what_is_known_is_bounded() {
        let mut sources = Sources::new(NodeId([9; 16]));
        for number in 0..10_000_u64 {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&number.to_le_bytes());
            let now = at(number * 10);
            sources.choose(NodeId(id), None, 1, now);
            sources.answered(NodeId(id), 1, load(1), now);
        }
        assert!(sources.known.len() <= limits::CONNECTIONS_MAX, "{}", sources.known.len());
    }
}
