//! A registry against the obvious model: a set of keys for each registered node.

use std::collections::{BTreeMap, BTreeSet};

use kvrail::registry::{Missing, Presence, RegistryError};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::cases::digests;
use crate::forms::{Form, Keyspace, Node, runs};

const NODES: usize = 4;
const KEYS: u32 = 12;

/// Runs for each form; each has nodes and keys of its own.
const CASES: u32 = 48;

#[derive(Debug, Clone)]
enum Operation {
    Beat(usize, Presence),
    Restart(usize),
    Announce(usize, Vec<u32>),
    Withdraw(usize, Vec<u32>),
    Report(usize, Vec<u32>),
    Plan(usize, u64),
}

fn operation() -> impl Strategy<Value = Operation> {
    let numbers = || prop::collection::vec(0..KEYS, 0..8);
    let presence = prop_oneof![
        6 => Just(Presence::Here),
        1 => Just(Presence::Afresh),
        1 => Just(Presence::Leaving),
    ];
    prop_oneof![
        4 => (0..NODES, presence).prop_map(|(node, presence)| Operation::Beat(node, presence)),
        1 => (0..NODES).prop_map(Operation::Restart),
        6 => (0..NODES, numbers()).prop_map(|(node, keys)| Operation::Announce(node, keys)),
        3 => (0..NODES, numbers()).prop_map(|(node, keys)| Operation::Withdraw(node, keys)),
        1 => (0..NODES, numbers()).prop_map(|(node, keys)| Operation::Report(node, keys)),
        2 => (0..NODES, any::<u64>()).prop_map(|(node, choice)| Operation::Plan(node, choice)),
    ]
}

struct Pair<'a> {
    form: &'a Form,
    space: Keyspace,
    nodes: Vec<Node>,
    /// What each registered node holds.
    model: BTreeMap<usize, BTreeSet<u32>>,
}

impl Pair<'_> {
    fn owners(&self, number: u32) -> BTreeSet<usize> {
        let holds = self.model.iter().filter(|(_, keys)| keys.contains(&number));
        holds.map(|(node, _)| *node).collect()
    }

    async fn beat(&mut self, at: usize, presence: Presence) {
        let was = self.model.get(&at).cloned();
        if presence == Presence::Here && was.is_some() {
            // What it holds is what the registry has for it, in every partition.
            let keys = self.space.keys(was.into_iter().flatten());
            let beat = self.nodes[at].beat(&digests(&keys)).await;
            assert_eq!(beat.registration.number, self.nodes[at].number);
            assert_eq!(beat.drifted, []);
            return;
        }
        let before = self.nodes[at].number;
        self.nodes[at].join(presence).await;
        self.model.remove(&at);
        if presence == Presence::Leaving {
            assert_eq!(self.nodes[at].number, 0);
            // Its last registration, for what it sends yet.
            self.nodes[at].number = before;
        } else {
            assert_ne!(self.nodes[at].number, before);
            self.model.insert(at, BTreeSet::new());
        }
    }

    async fn announce(&mut self, at: usize, numbers: &[u32]) {
        let got = self.nodes[at].announce(&self.space.keys(numbers.iter().copied())).await;
        let Some(held) = self.model.get_mut(&at) else {
            assert_eq!(got, Err(RegistryError::UnknownNode));
            return;
        };
        held.extend(numbers);
        let counts = numbers.iter().map(|number| self.owners(*number).len());
        let counts: Vec<u32> = counts.map(|count| u32::try_from(count).unwrap()).collect();
        assert_eq!(got.unwrap(), counts);
    }

    async fn withdraw(&mut self, at: usize, numbers: &[u32]) {
        let got = self.nodes[at].withdraw(&self.space.keys(numbers.iter().copied())).await;
        let Some(held) = self.model.get_mut(&at) else {
            assert_eq!(got, Err(RegistryError::UnknownNode));
            return;
        };
        held.retain(|number| !numbers.contains(number));
        let got: BTreeSet<u32> = got.unwrap().into_iter().collect();
        for (position, number) in (0..).zip(numbers) {
            // Of a key that is there twice, the first removal may leave one owner less than the last.
            assert_eq!(got.contains(&position), self.owners(*number).len() == 1);
        }
    }

    async fn report(&mut self, at: usize, numbers: &[u32]) {
        let identity = self.nodes[at].identity.clone();
        let keys = self.space.keys(numbers.iter().copied());
        let missing = Missing { owner: identity.node, epoch: identity.epoch, keys: &keys };
        self.form.registry.report_missing(missing).await.unwrap();
        if let Some(held) = self.model.get_mut(&at) {
            held.retain(|number| !numbers.contains(number));
        }
    }

    async fn plan(&self, at: usize, choice: u64) {
        let plan = self.nodes[at].plan(&self.space.keys(0..KEYS), choice).await;
        let ids: Vec<_> = self.nodes.iter().map(Node::id).collect();
        let mut covered = BTreeSet::new();
        for (owner, first, count) in runs(&plan) {
            let owner = ids.iter().position(|id| *id == owner).unwrap();
            assert_ne!(owner, at);
            for number in first..first + count {
                assert!(covered.insert(number));
                assert!(self.owners(number).contains(&owner), "{number} is not at {owner}");
            }
        }
        for number in 0..KEYS {
            let others = self.owners(number).iter().filter(|owner| **owner != at).count();
            assert_eq!(covered.contains(&number), others > 0);
        }
        assert_eq!(usize::try_from(plan.missing).unwrap() + covered.len(), KEYS as usize);
    }

    async fn apply(&mut self, operation: &Operation) {
        match operation {
            Operation::Beat(at, presence) => self.beat(*at, *presence).await,
            Operation::Restart(at) => {
                self.nodes[*at].identity.epoch.0 += 1;
                self.model.remove(at);
                self.beat(*at, Presence::Here).await;
            }
            Operation::Announce(at, numbers) => self.announce(*at, numbers).await,
            Operation::Withdraw(at, numbers) => self.withdraw(*at, numbers).await,
            Operation::Report(at, numbers) => self.report(*at, numbers).await,
            Operation::Plan(at, choice) => self.plan(*at, *choice).await,
        }
    }
}

/// Applies random operations to both, and compares every answer.
pub(crate) fn answers_as_the_model(form: &Form) {
    let mut runner = TestRunner::new(Config { cases: CASES, ..Config::default() });
    let operations = prop::collection::vec(operation(), 1..60);
    let ran = runner.run(&operations, |operations| {
        form.runtime.block_on(async {
            let nodes = (0..NODES).map(|_| form.stranger()).collect();
            let space = form.keyspace();
            let mut pair = Pair { form, space, nodes, model: BTreeMap::new() };
            for operation in &operations {
                pair.apply(operation).await;
            }
        });
        Ok(())
    });
    ran.unwrap();
}
