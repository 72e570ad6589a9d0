//! A read, step by step, against owners that have, lack, fail and refuse blocks.

use std::time::Duration;

use super::*;
use crate::event::{BusyReason, LendRefusal};
use crate::limits;
use crate::peer::FetchOutcome;
use crate::protocol::door::Source;
use crate::registry::{NodeIdentity, Plan, RegistryEpoch, Segment};
use crate::store::{Found, Payload};
use crate::types::{
    BlockHash, BlockKey, EvictionRank, Extent, Generation, Load, NamespaceId, NodeEpoch, NodeId,
    PoolId, ResidentId, Scope, Timestamp,
};

const BUSY: FetchOutcome = FetchOutcome::Busy(BusyReason::Owner(LendRefusal::Quota));

const NOW: Timestamp = Timestamp::ZERO;
const FAILED: FetchOutcome = FetchOutcome::Failed(Scope::Path);

fn node(number: u8) -> NodeId {
    NodeId([number; 16])
}

fn ready() -> FetchOutcome {
    let extent = Extent { pool: PoolId(0), offset: 0, len: 1 << 20 };
    let found = Found {
        id: ResidentId { slot: 0, generation: Generation(1) },
        payload: Payload { extent, checksum: 0 },
        rank: EvictionRank::FIRST,
    };
    FetchOutcome::Ready { found, fetched: true }
}

/// A read and what its asker knows.
struct Reading {
    sources: Sources,
    read: Read,
}

impl Reading {
    fn of(blocks: u8, source: Source) -> Self {
        let sources = Sources::new(node(200));
        let hash = |name| BlockHash::new(&[name]).unwrap();
        let key = |name| BlockKey { namespace: NamespaceId(1), hash: hash(name) };
        let read = Read::new((0..blocks).map(key).collect(), source, &sources, NOW);
        Self { sources, read }
    }

    fn step(&mut self) -> Step {
        self.read.poll(&mut self.sources, NOW)
    }

    /// Answers the question that comes next with these runs: owner, first position, count. Answers
    /// whom it was to avoid.
    fn plan(&mut self, runs: &[(u8, u32, u32)]) -> Vec<NodeId> {
        let Step::Ask(question) = self.step() else { panic!("it asks for no plan") };
        let owner = |&(owner, _, _): &(u8, u32, u32)| NodeIdentity {
            node: node(owner),
            epoch: NodeEpoch(1),
            address: format!("node-{owner}:1"),
        };
        let segment = |(at, &(_, first, count))| Segment { owner: at, first, count };
        let plan = Plan {
            registry: RegistryEpoch(1),
            owners: runs.iter().map(owner).collect(),
            segments: (0..).zip(runs).map(segment).collect(),
            missing: 0,
        };
        self.read.handle_plan(Some(&plan), &mut self.sources, NOW);
        question.avoid
    }

    fn lend(&mut self) -> Lend {
        match self.step() {
            Step::Lend(lend) => lend,
            other => panic!("no lend but {other:?}"),
        }
    }

    fn answer(&mut self, lend: &Lend, outcomes: &[FetchOutcome]) -> usize {
        let lent = Lent {
            outcomes: outcomes.to_vec(),
            load: Load::default(),
            reach: None,
            suspended: None,
        };
        self.read.handle_lent(lend, &lent, &mut self.sources, NOW).len()
    }

    fn assert_over(&mut self, outcomes: &[FetchOutcome]) {
        assert!(matches!(self.step(), Step::Over));
        assert_eq!(self.read.outcomes(), outcomes);
    }
}

#[test]
fn what_one_owner_lacks_is_asked_of_the_next_and_told() {
    let mut reading = Reading::of(3, Source::Anywhere);
    assert!(reading.plan(&[(1, 0, 3)]).is_empty());
    let lend = reading.lend();
    assert_eq!((lend.owner, lend.positions.as_slice()), (node(1), &[0, 1, 2][..]));
    assert!(matches!(reading.step(), Step::Wait));
    assert_eq!(reading.answer(&lend, &[ready(), FetchOutcome::NotFound, ready()]), 1);
    assert_eq!(reading.plan(&[(2, 0, 1)]), [node(1)]);
    let lend = reading.lend();
    assert_eq!((lend.owner, lend.positions.as_slice()), (node(2), &[1][..]));
    assert_eq!(reading.answer(&lend, &[ready()]), 0);
    reading.assert_over(&[ready(), ready(), ready()]);
}

#[test]
fn what_failed_is_tried_once_more_by_another_or_else_by_the_same() {
    let mut reading = Reading::of(2, Source::Anywhere);
    reading.plan(&[(1, 0, 2)]);
    let lend = reading.lend();
    reading.answer(&lend, &[FAILED, FAILED]);
    // Another has the first block; nobody but the one that failed has the second.
    assert_eq!(reading.plan(&[(2, 0, 1)]), [node(1)]);
    assert_eq!(reading.plan(&[(1, 0, 1)]), []);
    let (one, two) = (reading.lend(), reading.lend());
    assert_eq!((one.owner, two.owner, two.positions.as_slice()), (node(2), node(1), &[1][..]));
    reading.answer(&two, &[FAILED]);
    reading.answer(&one, &[ready()]);
    reading.assert_over(&[ready(), FAILED]);
}

#[test]
fn a_registry_that_says_nothing_leaves_every_block_without_an_owner() {
    let mut reading = Reading::of(2, Source::Anywhere);
    assert!(matches!(reading.step(), Step::Ask(_)));
    assert!(matches!(reading.step(), Step::Wait), "it asks once");
    reading.read.handle_plan(None, &mut reading.sources, NOW);
    reading.assert_over(&[FetchOutcome::NotFound; 2]);
    Reading::of(0, Source::Anywhere).assert_over(&[]);
}

#[test]
fn a_read_of_one_node_asks_until_that_node_is_named() {
    let mut reading = Reading::of(2, Source::From(node(3)));
    assert_eq!(reading.plan(&[(1, 0, 2)]), []);
    assert_eq!(reading.plan(&[(2, 0, 1), (3, 1, 1)]), [node(1)]);
    assert_eq!(reading.plan(&[(3, 0, 2)]), [node(1), node(2)]);
    let lend = reading.lend();
    assert_eq!((lend.owner, lend.positions.as_slice()), (node(3), &[0, 1][..]));
    reading.answer(&lend, &[ready(), ready()]);
    reading.assert_over(&[ready(), ready()]);
}

#[test]
fn of_two_owners_of_a_long_read_each_serves_a_part() {
    let mut reading = Reading::of(255, Source::Anywhere);
    reading.plan(&[(1, 0, 255)]);
    assert_eq!(reading.plan(&[(2, 0, 255)]), [node(1)], "the second choice");
    let owners: Vec<NodeId> = (0..4).map(|_| reading.lend().owner).collect();
    assert_eq!(owners.iter().filter(|owner| **owner == node(1)).count(), 2, "{owners:?}");
    assert!(matches!(reading.step(), Step::Wait));
}

#[test]
fn busy_because_of_our_own_lends_waits_behind_them_and_busy_alone_is_the_answer() {
    let mut reading = Reading::of(128, Source::Anywhere);
    reading.plan(&[(1, 0, 128)]);
    reading.plan(&[]);
    let (one, two) = (reading.lend(), reading.lend());
    reading.answer(&one, &[BUSY; 64]);
    let again = reading.lend();
    assert_eq!(again.positions, one.positions);
    reading.answer(&two, &[ready(); 64]);
    reading.answer(&again, &[BUSY; 64]);
    // One try more, in the next round.
    reading.plan(&[(1, 0, 64)]);
    let last = reading.lend();
    reading.answer(&last, &[BUSY; 64]);
    let outcomes: Vec<_> = (0..128).map(|at| if at < 64 { BUSY } else { ready() }).collect();
    reading.assert_over(&outcomes);
}

#[test]
fn who_is_left_alone_is_avoided_and_asked_only_where_nobody_else_is() {
    let mut reading = Reading::of(1, Source::Anywhere);
    reading.plan(&[(1, 0, 1)]);
    let lend = reading.lend();
    let suspended = Some(NOW + Duration::from_secs(1));
    let lent = Lent { outcomes: vec![FAILED], load: Load::default(), reach: None, suspended };
    assert!(reading.read.handle_lent(&lend, &lent, &mut reading.sources, NOW).is_empty());
    let mut next = Reading { sources: reading.sources, ..Reading::of(1, Source::Anywhere) };
    next.read = Read::new(
        vec![BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&[0]).unwrap() }],
        Source::Anywhere,
        &next.sources,
        NOW,
    );
    assert_eq!(next.plan(&[]), [node(1)]);
    assert_eq!(next.plan(&[(1, 0, 1)]), [], "nobody else has it");
    let lend = next.lend();
    next.answer(&lend, &[ready()]);
    next.assert_over(&[ready()]);
}

#[test]
fn an_owner_that_always_lacks_what_it_is_listed_for_is_not_asked_for_ever() {
    let mut reading = Reading::of(1, Source::Anywhere);
    let mut asked = 0;
    loop {
        match reading.step() {
            Step::Ask(question) => {
                assert!(question.avoid.len() <= limits::REGISTRY_AVOID_MAX);
                let identity =
                    NodeIdentity { node: node(1), epoch: NodeEpoch(1), address: "a:1".to_owned() };
                let plan = Plan {
                    registry: RegistryEpoch(1),
                    owners: vec![identity],
                    segments: vec![Segment { owner: 0, first: 0, count: 1 }],
                    missing: 0,
                };
                reading.read.handle_plan(Some(&plan), &mut reading.sources, NOW);
            }
            Step::Lend(lend) => {
                asked += 1;
                reading.answer(&lend, &[FetchOutcome::NotFound]);
            }
            Step::Wait => panic!("nothing runs"),
            Step::Over => break,
        }
    }
    assert_eq!(asked, 4);
    assert_eq!(reading.sources.weight(node(1), NOW), 0, "all that was asked was answered");
}
