//! The directory against the obvious model, and what plans promise.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::types::{BlockHash, NamespaceId, Timestamp};

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
    number: u32,
    sequence: u64,
}

impl Node {
    fn join(directory: &Directory, node: u8) -> Self {
        Self::join_with(directory, node, Load::default())
    }

    fn join_with(directory: &Directory, node: u8, load: Load) -> Self {
        let presence = Presence::Afresh;
        let heartbeat = Heartbeat { presence, load };
        let standing = directory.heartbeat(&identity(node, 1), heartbeat, at(0)).unwrap();
        Self { node, epoch: 1, number: standing.number, sequence: 0 }
    }

    fn batch<'a>(&mut self, keys: &'a [BlockKey]) -> Batch<'a> {
        self.sequence += 1;
        Batch {
            node: NodeId([self.node; 16]),
            epoch: NodeEpoch(self.epoch),
            registration: self.number,
            sequence: self.sequence,
            keys,
        }
    }

    fn announce(&mut self, directory: &Directory, numbers: impl IntoIterator<Item = u16>) {
        let keys = keys(numbers);
        directory.announce(self.batch(&keys), at(0)).unwrap();
    }
}

fn plan(directory: &Directory, asker: u8, keys: &[BlockKey], choice: u64) -> Plan {
    let query = PlanQuery { asker: NodeId([asker; 16]), keys, avoid: &[], choice };
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
    let newer = directory.heartbeat(&identity(1, 2), here, at(0)).unwrap();
    let third = a.batch(&asked);
    let superseded = Err(RegistryError::Superseded);
    assert_eq!(directory.announce(third, at(0)), superseded);
    assert_eq!(directory.heartbeat(&identity(1, 1), here, at(0)), Err(RegistryError::Superseded));
    let mut b = Node { epoch: 2, number: newer.number, ..a };
    let late = b.batch(&asked);
    let afresh = Heartbeat { presence: Presence::Afresh, ..here };
    let fresh = directory.heartbeat(&identity(1, 2), afresh, at(0)).unwrap();
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
    assert_eq!(left.number, 0);
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
    let query =
        PlanQuery { asker: NodeId([1; 16]), keys: &asked, avoid: &[NodeId([2; 16])], choice: 0 };
    for choice in 0..20 {
        let plan = directory.plan(PlanQuery { choice, ..query }, at(0)).unwrap();
        assert_eq!(runs(&plan), [(3, 0, 4)]);
    }
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

#[derive(Debug, Clone)]
enum Operation {
    Advance(u8),
    Heartbeat(u8, Presence),
    Restart(u8),
    Announce(u8, Vec<u16>),
    Withdraw(u8, Vec<u16>),
    Plan(u8, u64),
    Sweep,
}

fn operation() -> impl Strategy<Value = Operation> {
    let numbers = || prop::collection::vec(0_u16..12, 0..8);
    let presence = prop_oneof![
        8 => Just(Presence::Here),
        1 => Just(Presence::Afresh),
        1 => Just(Presence::Leaving),
    ];
    prop_oneof![
        1 => (0_u8..6).prop_map(Operation::Advance),
        4 => (0_u8..7, presence).prop_map(|(node, presence)| Operation::Heartbeat(node, presence)),
        1 => (0_u8..7).prop_map(Operation::Restart),
        5 => (0_u8..7, numbers()).prop_map(|(node, keys)| Operation::Announce(node, keys)),
        3 => (0_u8..7, numbers()).prop_map(|(node, keys)| Operation::Withdraw(node, keys)),
        2 => (0_u8..7, any::<u64>()).prop_map(|(node, choice)| Operation::Plan(node, choice)),
        1 => Just(Operation::Sweep),
    ]
}

/// Sets of keys by live node, with deadlines; nothing shared, nothing lazy.
#[derive(Debug, Default)]
struct Model {
    seconds: u64,
    /// The start of each node that runs, live or not.
    epochs: BTreeMap<u8, u64>,
    live: BTreeMap<u8, Live>,
    numbers: BTreeSet<u32>,
}

#[derive(Debug)]
struct Live {
    deadline: u64,
    number: u32,
    keys: BTreeSet<u16>,
}

impl Model {
    fn owners(&self, number: u16) -> BTreeSet<u8> {
        let holds = |(node, live): (&u8, &Live)| live.keys.contains(&number).then_some(*node);
        self.live.iter().filter_map(holds).collect()
    }

    fn heartbeat(&mut self, directory: &Directory, node: u8, presence: Presence) {
        let epoch = *self.epochs.entry(node).or_insert(1);
        let heartbeat = Heartbeat { presence, load: Load::default() };
        let got = directory.heartbeat(&identity(node, epoch), heartbeat, at(self.seconds)).unwrap();
        if presence != Presence::Here {
            self.live.remove(&node);
        }
        if presence == Presence::Leaving {
            assert_eq!(got.number, 0);
            return;
        }
        let deadline = self.seconds + LEASE.as_secs();
        if let Some(live) = self.live.get_mut(&node) {
            assert_eq!(got.number, live.number);
            live.deadline = deadline;
        } else {
            assert!(self.numbers.insert(got.number), "a number came twice");
            let (number, keys) = (got.number, BTreeSet::new());
            let live = Live { deadline, number, keys };
            self.live.insert(node, live);
        }
    }

    fn check_plan(&self, directory: &Directory, asker: u8, choice: u64) {
        let asked = keys(0..12);
        let query = PlanQuery {
            asker: NodeId([asker; 16]),
            keys: &asked,
            avoid: &[NodeId([6; 16])],
            choice,
        };
        let plan = directory.plan(query, at(self.seconds)).unwrap();
        let mut covered = BTreeSet::new();
        for (owner, first, count) in runs(&plan) {
            for position in first..first + count {
                let number = u16::try_from(position).unwrap();
                assert!(covered.insert(number));
                assert!(![6, asker].contains(&owner));
                assert!(self.owners(number).contains(&owner));
            }
        }
        for number in 0..12 {
            let others = self.owners(number).into_iter();
            let others = others.filter(|owner| ![6, asker].contains(owner)).count();
            assert_eq!(covered.contains(&number), others > 0);
        }
        assert_eq!(usize::try_from(plan.missing).unwrap(), 12 - covered.len());
    }
}

fn run(operations: Vec<Operation>) {
    let directory = directory();
    let mut model = Model::default();
    let mut sequence = 0;
    for operation in operations {
        sequence += 1;
        match operation {
            Operation::Advance(seconds) => {
                model.seconds += u64::from(seconds);
                let now = model.seconds;
                model.live.retain(|_, live| live.deadline > now);
            }
            Operation::Heartbeat(node, presence) => model.heartbeat(&directory, node, presence),
            Operation::Restart(node) => {
                *model.epochs.entry(node).or_insert(1) += 1;
                // The old start stays registered until the new one shows up.
                model.live.remove(&node);
                model.heartbeat(&directory, node, Presence::Here);
            }
            Operation::Announce(node, numbers) | Operation::Withdraw(node, numbers)
                if !model.live.contains_key(&node) =>
            {
                let keys = keys(numbers);
                let mut absent = Node {
                    node,
                    epoch: *model.epochs.get(&node).unwrap_or(&1),
                    number: 4096,
                    sequence,
                };
                let refused = directory.announce(absent.batch(&keys), at(model.seconds));
                assert_eq!(refused, Err(RegistryError::UnknownNode));
            }
            Operation::Announce(node, numbers) => {
                let live = model.live.get_mut(&node).unwrap();
                live.keys.extend(numbers.iter().copied());
                let mut sender =
                    Node { node, epoch: model.epochs[&node], number: live.number, sequence };
                let keys = keys(numbers.iter().copied());
                let got = directory.announce(sender.batch(&keys), at(model.seconds));
                let want = numbers.iter().map(|n| model.owners(*n).len());
                let want: Vec<_> = want.map(|n| u32::try_from(n).unwrap()).collect();
                assert_eq!(got.unwrap().owners, want);
            }
            Operation::Withdraw(node, numbers) => {
                let live = model.live.get_mut(&node).unwrap();
                live.keys.retain(|key| !numbers.contains(key));
                let mut sender =
                    Node { node, epoch: model.epochs[&node], number: live.number, sequence };
                let keys = keys(numbers.iter().copied());
                let got = directory.withdraw(sender.batch(&keys), at(model.seconds));
                let sole = (0..).zip(&numbers).filter(|(_, n)| model.owners(**n).len() == 1);
                let want: Vec<u32> = sole.map(|(position, _)| position).collect();
                assert_eq!(got.unwrap().sole, want);
            }
            Operation::Plan(asker, choice) => model.check_plan(&directory, asker, choice),
            Operation::Sweep => {
                for _ in 0..1024 {
                    directory.sweep(at(model.seconds));
                }
                let stats = directory.stats(at(model.seconds));
                let owned: usize = model.live.values().map(|live| live.keys.len()).sum();
                assert_eq!(usize::try_from(stats.owners).unwrap(), owned);
                assert_eq!(usize::try_from(stats.nodes).unwrap(), model.live.len());
            }
        }
    }
    model.check_plan(&directory, 99, 7);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn the_directory_answers_as_the_model(operations in prop::collection::vec(operation(), 1..60)) {
        run(operations);
    }
}
