//! What the directory promises, case by case; `model` compares it with the obvious one.

mod faults;
mod model;

use std::collections::BTreeSet;
use std::time::Duration;

use super::*;
use crate::limits;
use crate::types::{BlockHash, BlockKey, NamespaceId, NodeEpoch, NodeId, Timestamp};

const LEASE: Duration = Duration::from_secs(10);

fn key(number: u16) -> BlockKey {
    BlockKey { namespace: NamespaceId(9), hash: BlockHash::new(&number.to_le_bytes()).unwrap() }
}

fn keys(numbers: impl IntoIterator<Item = u16>) -> Vec<BlockKey> {
    numbers.into_iter().map(key).collect()
}

fn identity(node: u8, epoch: u64) -> NodeIdentity {
    NodeIdentity {
        node: NodeId([node; 16]),
        epoch: NodeEpoch(epoch),
        address: format!("host{node}:7000"),
    }
}

fn directory() -> Directory {
    let options = DirectoryOptions { lease: LEASE, ..DirectoryOptions::default() };
    Directory::new(RegistryEpoch(5), options)
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::ZERO + Duration::from_secs(seconds)
}

/// A node of these tests: it numbers its batches.
#[derive(Debug, Clone, Copy)]
struct Node {
    node: u8,
    epoch: u64,
    number: u64,
    sequence: u64,
}

impl Node {
    fn join(directory: &Directory, node: u8) -> Self {
        Self::join_with(directory, node, Load::default())
    }

    fn join_with(directory: &Directory, node: u8, load: Load) -> Self {
        let presence = Presence::Afresh;
        let heartbeat = Heartbeat { presence, load, digests: &[] };
        let beat = directory.heartbeat(&identity(node, 1), heartbeat, at(0)).unwrap();
        Self { node, epoch: 1, number: beat.registration.number, sequence: 0 }
    }

    /// A change that settles all before it.
    fn stamp(&mut self) -> Stamp {
        self.sequence += 1;
        Stamp {
            node: NodeId([self.node; 16]),
            epoch: NodeEpoch(self.epoch),
            registration: self.number,
            sequence: self.sequence,
            settled: self.sequence - 1,
        }
    }

    fn batch<'a>(&mut self, keys: &'a [BlockKey]) -> Batch<'a> {
        Batch { stamp: self.stamp(), keys }
    }

    fn beat(&self, directory: &Directory, digests: &[PartitionDigest]) -> Beat {
        let heartbeat = Heartbeat { digests, ..Heartbeat::default() };
        directory.heartbeat(&identity(self.node, self.epoch), heartbeat, at(0)).unwrap()
    }

    fn announce(&mut self, directory: &Directory, numbers: impl IntoIterator<Item = u16>) {
        let keys = keys(numbers);
        directory.announce(self.batch(&keys), at(0)).unwrap();
    }
}

fn plan(directory: &Directory, asker: u8, keys: &[BlockKey], choice: u64) -> Plan {
    let query = PlanQuery { choice, ..PlanQuery::new(NodeId([asker; 16]), keys) };
    directory.plan(query, at(0)).unwrap()
}

fn runs(plan: &Plan) -> Vec<(u8, u32, u32)> {
    plan.runs().map(|(owner, segment)| (owner.node.0[0], segment.first, segment.count)).collect()
}

#[test]
fn counts_and_sole_positions_are_positional() {
    let directory = directory();
    let (mut a, mut b) = (Node::join(&directory, 1), Node::join(&directory, 2));
    a.announce(&directory, [1, 3]);
    let asked = keys([1, 2, 3]);
    let answer = directory.announce(b.batch(&asked), at(0)).unwrap();
    assert_eq!(answer.owners, [2, 1, 2]);
    assert_eq!(answer.registry, RegistryEpoch(5));
    let again = directory.announce(b.batch(&asked), at(0)).unwrap();
    assert_eq!(again.owners, [2, 1, 2], "idempotent");
    let answer = directory.withdraw(a.batch(&asked), at(0)).unwrap();
    assert_eq!(answer.sole, [0, 1, 2]);
    let answer = directory.withdraw(b.batch(&asked), at(0)).unwrap();
    assert_eq!(answer.sole, [0_u32; 0]);
    assert_eq!(directory.stats(at(0)).keys, 0);
}

#[test]
fn a_later_batch_an_old_start_and_an_old_registration_shut_out_what_is_late() {
    let directory = directory();
    let mut a = Node::join(&directory, 1);
    let asked = keys([1]);
    let first = a.batch(&asked);
    let second = a.batch(&asked);
    directory.withdraw(second, at(0)).unwrap();
    assert_eq!(directory.announce(first, at(0)), Err(RegistryError::Late));
    let here = Heartbeat::default();
    let newer = directory.heartbeat(&identity(1, 2), here, at(0)).unwrap().registration;
    let third = a.batch(&asked);
    let superseded = Err(RegistryError::Superseded);
    assert_eq!(directory.announce(third, at(0)), superseded);
    assert_eq!(directory.heartbeat(&identity(1, 1), here, at(0)), Err(RegistryError::Superseded));
    let mut b = Node { epoch: 2, number: newer.number, ..a };
    let late = b.batch(&asked);
    let afresh = Heartbeat { presence: Presence::Afresh, ..here };
    let fresh = directory.heartbeat(&identity(1, 2), afresh, at(0)).unwrap().registration;
    assert_ne!(fresh.number, newer.number);
    let unknown = Err(RegistryError::UnknownNode);
    assert_eq!(directory.announce(late, at(0)), unknown);
    assert_eq!(directory.stats(at(0)).owners, 0);
}

#[test]
fn an_expired_node_owns_nothing_and_must_register_again() {
    let directory = directory();
    let mut a = Node::join(&directory, 1);
    a.announce(&directory, 0..100);
    let late = at(10);
    assert_eq!(directory.announce(a.batch(&keys([1])), late), Err(RegistryError::UnknownNode));
    // A heartbeat that was on its way before the lease ended does not revive it.
    let again = directory.heartbeat(&identity(1, 1), Heartbeat::default(), at(9)).unwrap();
    let again = again.registration;
    assert_ne!(again.number, a.number);
    assert_eq!(plan(&directory, 9, &keys([1]), 0).missing, 1);
    let swept: u64 = (0..1024).map(|_| directory.sweep(at(9))).sum();
    assert_eq!(swept, 100);
    assert_eq!(directory.stats(at(9)).keys, 0);
}

#[test]
fn a_node_that_leaves_takes_its_blocks_with_it() {
    let directory = directory();
    let (mut a, mut b) = (Node::join(&directory, 1), Node::join(&directory, 2));
    a.announce(&directory, [1]);
    let leaving = Heartbeat { presence: Presence::Leaving, ..Heartbeat::default() };
    let left = directory.heartbeat(&identity(1, 1), leaving, at(0)).unwrap();
    assert_eq!(left.registration.number, 0);
    let answer = directory.announce(b.batch(&keys([1])), at(0)).unwrap();
    assert_eq!(answer.owners, [1]);
    assert_eq!(directory.stats(at(0)).owners, 1, "the dead owner was purged when met");
}

#[test]
fn bounds_are_refused_and_a_full_directory_says_so() {
    let directory = Directory::new(
        RegistryEpoch(1),
        DirectoryOptions { keys_max: 0, ..DirectoryOptions::default() },
    );
    let mut a = Node::join(&directory, 1);
    let answer = directory.announce(a.batch(&keys([1])), at(0)).unwrap();
    assert_eq!(answer.owners, [0]);
    let many = vec![key(1); limits::REGISTRY_BATCH_MAX + 1];
    let refused = directory.announce(a.batch(&many), at(0));
    assert!(matches!(refused, Err(RegistryError::Refused { .. })));
    for address in ["", "a b:1", &"x".repeat(265)] {
        let identity = NodeIdentity { address: address.to_owned(), ..identity(3, 1) };
        let refused = directory.heartbeat(&identity, Heartbeat::default(), at(0));
        assert!(matches!(refused, Err(RegistryError::Refused { .. })), "{address:?}");
    }
}

#[test]
fn a_prefix_spread_over_nodes_is_read_whole() {
    let directory = directory();
    let mut nodes = [1, 2, 3].map(|node| Node::join(&directory, node));
    nodes[0].announce(&directory, 0..10);
    nodes[1].announce(&directory, 10..30);
    nodes[2].announce(&directory, [5, 12, 31]);
    for choice in 0..20 {
        let plan = plan(&directory, 9, &keys(0..33), choice);
        assert_eq!(runs(&plan), [(1, 0, 10), (2, 10, 20), (3, 31, 1)]);
        assert_eq!(plan.missing, 2);
        assert_eq!(plan.owners.len(), 3);
        assert_eq!(plan.owners[0].address, "host1:7000");
    }
}

#[test]
fn the_asker_and_the_nodes_to_avoid_are_left_out() {
    let directory = directory();
    for node in 1..=3 {
        Node::join(&directory, node).announce(&directory, 0..4);
    }
    let asked = keys(0..4);
    let query = PlanQuery { avoid: &[NodeId([2; 16])], ..PlanQuery::new(NodeId([1; 16]), &asked) };
    for choice in 0..20 {
        let plan = directory.plan(PlanQuery { choice, ..query }, at(0)).unwrap();
        assert_eq!(runs(&plan), [(3, 0, 4)]);
    }
}

#[test]
fn who_is_near_survives_the_sample_of_many_owners_and_does_not_cut_a_run_short() {
    let directory = directory();
    for node in 1..=40 {
        Node::join(&directory, node).announce(&directory, 0..4);
    }
    Node::join(&directory, 41).announce(&directory, 0..100);
    let id = |node| NodeId([node; 16]);
    let (host, rail) = ([id(7)], [id(8), id(9)]);
    let asked = keys(0..4);
    let long = keys(0..100);
    for choice in 0..40 {
        let query = PlanQuery { choice, same_rail: &rail, ..PlanQuery::new(id(99), &asked) };
        let by_rail = runs(&directory.plan(query, at(0)).unwrap());
        assert!(matches!(by_rail[..], [(8 | 9, 0, 4)]), "{by_rail:?}");
        let query = PlanQuery { same_host: &host, ..query };
        assert_eq!(runs(&directory.plan(query, at(0)).unwrap()), [(7, 0, 4)]);
        // One that reaches much farther makes fewer runs.
        let query = PlanQuery { keys: &long, ..query };
        let run = runs(&directory.plan(query, at(0)).unwrap());
        assert!(run == [(41, 0, 100)] || run[0] == (7, 0, 4), "{run:?}");
    }
    let many = [id(1); limits::REGISTRY_NEAR_MAX + 1];
    let query = PlanQuery { same_host: &many, ..PlanQuery::new(id(99), &asked) };
    assert!(matches!(directory.plan(query, at(0)), Err(RegistryError::Refused { .. })));
}

#[test]
fn load_decides_between_owners_that_reach_about_as_far() {
    let load = |outstanding_bytes, pause_ms| Load { outstanding_bytes, pause_ms };
    let wins = |first: Load, second: Load, third: u16| {
        let directory = directory();
        Node::join_with(&directory, 1, first).announce(&directory, 0..100);
        Node::join_with(&directory, 2, second).announce(&directory, 0..third);
        let mut wins = [0; 3];
        for choice in 0..200 {
            let plan = plan(&directory, 9, &keys(0..100), choice);
            wins[usize::from(runs(&plan)[0].0)] += 1;
        }
        (wins[1], wins[2])
    };
    assert_eq!(wins(load(1, 0), load(2, 0), 100), (200, 0));
    assert_eq!(wins(load(2, 0), load(1, 0), 99), (0, 200), "one block fewer is as far");
    assert_eq!(wins(load(1, 5), load(2, 0), 100), (0, 200), "who asks for a pause is spared");
    assert_eq!(wins(load(2, 0), load(1, 0), 50), (200, 0), "half the run is not as far");
    let (first, second) = wins(load(0, 0), load(0, 0), 100);
    assert!(first > 60 && second > 60, "equals share: {first} and {second}");
}

#[test]
fn a_hot_prefix_stays_one_run_however_many_own_it() {
    let directory = directory();
    for node in 1..=40 {
        Node::join(&directory, node).announce(&directory, 0..50);
    }
    let mut chosen = BTreeSet::new();
    for choice in 0..200 {
        let plan = plan(&directory, 99, &keys(0..50), choice);
        assert_eq!((plan.segments.len(), plan.missing), (1, 0));
        chosen.insert(plan.owners[0].node);
    }
    assert!(chosen.len() > 30, "only {} of 40 owners serve", chosen.len());
}

#[test]
fn batches_under_way_come_in_any_order_and_a_settled_one_changes_nothing() {
    let directory = directory();
    let mut a = Node::join(&directory, 1);
    let (one, two) = (keys([1]), keys([2]));
    let mut first = a.batch(&one);
    let mut second = a.batch(&two);
    (first.stamp.settled, second.stamp.settled) = (0, 0);
    assert_eq!(directory.announce(second, at(0)).unwrap().owners, [1]);
    assert_eq!(
        directory.announce(first, at(0)).unwrap().owners,
        [1],
        "the earlier one is not late"
    );
    assert_eq!(directory.announce(first, at(0)).unwrap().owners, [1], "a repeat changes nothing");
    let mut third = a.batch(&one);
    third.stamp.settled = 1;
    directory.withdraw(third, at(0)).unwrap();
    assert_eq!(directory.announce(first, at(0)), Err(RegistryError::Late));
    assert_eq!(directory.announce(second, at(0)).unwrap().owners, [1], "not settled yet");
    assert_eq!(directory.stats(at(0)).keys, 1);
}

fn digests(numbers: impl IntoIterator<Item = u16>) -> Vec<PartitionDigest> {
    let mut digests = vec![0; usize::from(limits::REGISTRY_PARTITIONS)];
    for number in numbers {
        let print = Fingerprint::of(&key(number));
        digests[print.partition().index()] ^= print.digest();
    }
    let told = |(partition, digest)| PartitionDigest { partition, digest };
    Partition::all().zip(digests).map(told).collect()
}

#[test]
fn digests_say_what_differs_and_a_forgotten_partition_is_announced_again() {
    let directory = directory();
    let (mut a, mut b) = (Node::join(&directory, 1), Node::join(&directory, 2));
    a.announce(&directory, 0..500);
    a.announce(&directory, 0..500);
    b.announce(&directory, 0..500);
    let gone = keys(100..200);
    directory.withdraw(a.batch(&gone), at(0)).unwrap();
    directory.withdraw(a.batch(&gone), at(0)).unwrap();
    let true_ones = digests((0..100).chain(200..500));
    assert_eq!(a.beat(&directory, &true_ones).drifted, []);
    assert_eq!(b.beat(&directory, &digests(0..500)).drifted, []);
    let differs = Fingerprint::of(&key(7)).partition();
    let wrong = digests((0..7).chain(8..100).chain(200..500));
    assert_eq!(a.beat(&directory, &wrong).drifted, [differs]);
    let stamp = a.stamp();
    directory.forget(stamp, differs, at(0)).unwrap();
    assert_eq!(a.beat(&directory, &true_ones).drifted, [differs]);
    assert_eq!(b.beat(&directory, &digests(0..500)).drifted, [], "others keep theirs");
    let theirs = (0..100).chain(200..500);
    a.announce(&directory, theirs.filter(|n| Fingerprint::of(&key(*n)).partition() == differs));
    assert_eq!(a.beat(&directory, &true_ones).drifted, []);
    let left = directory.announce(a.batch(&keys([7])), at(0)).unwrap();
    assert_eq!(left.owners, [2]);
}

#[test]
fn whoever_becomes_the_only_owner_hears_so_once() {
    let directory = directory();
    let (mut a, mut b) = (Node::join(&directory, 1), Node::join(&directory, 2));
    a.announce(&directory, 0..4);
    b.announce(&directory, 1..6);
    let sole = |node: &Node| node.beat(&directory, &[]).sole;
    assert_eq!((sole(&a), sole(&b)), (vec![], vec![]));
    let withdrawn = directory.withdraw(b.batch(&keys([1, 5])), at(0)).unwrap();
    assert_eq!(withdrawn.sole, [0]);
    assert_eq!((sole(&a), sole(&b)), (keys([1]), vec![]));
    assert_eq!(sole(&a), []);
    let owner = NodeId([1; 16]);
    let missing = keys([2, 4]);
    let report = |epoch| Missing { owner, epoch: NodeEpoch(epoch), keys: &missing };
    assert_eq!(directory.report_missing(report(9), at(0)), Ok(0), "another start of it");
    assert_eq!(directory.report_missing(report(1), at(0)), Ok(1), "it was listed for one");
    assert_eq!(sole(&b), keys([2]));
    let plan = plan(&directory, 9, &keys([2]), 0);
    assert_eq!(runs(&plan), [(2, 0, 1)]);
    let differs = Fingerprint::of(&key(2)).partition();
    assert_eq!(a.beat(&directory, &digests(0..4)).drifted, [differs], "the owner can object");
}
