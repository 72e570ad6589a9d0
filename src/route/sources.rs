//! Which of two owners serves a run, and whom not to ask now.
//!
//! Nearness comes first, where it is known: memory of this host, then a rail that both are on. It is
//! what the last connection to an owner told, so that a first read may go to any of them.
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
use crate::types::{Load, NodeId, Reach, Timestamp};

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
    reach: Reach,
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

    /// How near an owner is, as its last connection told.
    fn reach(&self, owner: NodeId) -> Reach {
        self.known.get(&owner).map(|source| source.reach).unwrap_or_default()
    }

    /// Owners that are so near, as many as a plan can be told of.
    pub(super) fn within(&self, reach: Reach) -> Vec<NodeId> {
        let near = self.known.iter().filter(|(_, source)| source.reach == reach);
        near.map(|(owner, _)| *owner).take(limits::REGISTRY_NEAR_MAX).collect()
    }

    /// Whether another owner may be preferred to this one: none that is farther away is.
    pub(super) fn has_rivals(&self, owner: NodeId) -> bool {
        let reach = self.reach(owner);
        let rival = |(other, source): (&NodeId, &Source)| *other != owner && source.reach <= reach;
        reach == Reach::Far || self.known.iter().any(rival)
    }

    /// Takes the nearer, or else the less busy of two owners of one run of so many blocks, and counts the run as asked of
    /// it: [`Self::answered`] takes it off again.
    fn choose(
        &mut self,
        first: NodeId,
        second: Option<NodeId>,
        blocks: usize,
        now: Timestamp,
    ) -> NodeId {
        let rank = |owner| (self.reach(owner), self.weight(owner, now));
        let better = second.filter(|second| rank(*second) < rank(first));
        let owner = better.unwrap_or(first);
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
        let source = self.known.entry(lend.owner).or_default();
        source.suspended_until = lent.suspended.unwrap_or(source.suspended_until);
        source.reach = lent.reach.unwrap_or(source.reach);
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
        let lent = Lent { outcomes: Vec::new(), load: load(0), reach: None, suspended };
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

    #[test]
    fn the_nearer_of_two_owners_is_taken_however_busy_it_is() {
        let mut sources = Sources::new(NodeId([9; 16]));
        let say = |sources: &mut Sources, owner, reach| {
            let (epoch, address) = (NodeEpoch(1), String::new());
            let lend = Lend { owner, epoch, address, positions: Vec::new() };
            let (outcomes, load) = (Vec::new(), load(100 << 20));
            let lent = Lent { outcomes, load, reach, suspended: None };
            sources.lent(&lend, &lent, at(0));
        };
        say(&mut sources, A, Some(Reach::SameRail));
        assert_eq!(sources.choose(B, Some(A), 1, at(0)), A);
        assert_eq!(sources.choose(A, Some(B), 1, at(0)), A);
        assert!(!sources.has_rivals(A) && sources.has_rivals(B));
        say(&mut sources, B, Some(Reach::SameHost));
        assert_eq!(sources.choose(A, Some(B), 1, at(0)), B);
        assert!(sources.has_rivals(A) && !sources.has_rivals(B));
        assert_eq!(
            (sources.within(Reach::SameHost), sources.within(Reach::SameRail)),
            (vec![B], vec![A])
        );
        say(&mut sources, B, None);
        assert_eq!(sources.reach(B), Reach::SameHost, "no connection tells nothing");
        say(&mut sources, B, Some(Reach::Far));
        assert_eq!(sources.choose(B, Some(A), 1, at(0)), A, "it has moved");
    }
}
