//! The directory against the obvious model: sets of keys by live node, with deadlines.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

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
    numbers: BTreeSet<u64>,
}

#[derive(Debug)]
struct Live {
    deadline: u64,
    number: u64,
    keys: BTreeSet<u16>,
}

impl Model {
    fn owners(&self, number: u16) -> BTreeSet<u8> {
        let holds = |(node, live): (&u8, &Live)| live.keys.contains(&number).then_some(*node);
        self.live.iter().filter_map(holds).collect()
    }

    fn heartbeat(&mut self, directory: &Directory, node: u8, presence: Presence) {
        let epoch = *self.epochs.entry(node).or_insert(1);
        let heartbeat = Heartbeat { presence, ..Heartbeat::default() };
        let got = directory.heartbeat(&identity(node, epoch), heartbeat, at(self.seconds)).unwrap();
        let got = got.registration;
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
            avoid: &[NodeId([6; 16])],
            choice,
            ..PlanQuery::new(NodeId([asker; 16]), &asked)
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

/// Applies each operation to both.
#[derive(Debug)]
struct Pair {
    directory: Directory,
    model: Model,
    sequence: u64,
}

impl Pair {
    fn sender(&mut self, node: u8, number: u64) -> Node {
        self.sequence += 1;
        Node {
            node,
            epoch: *self.model.epochs.get(&node).unwrap_or(&1),
            number,
            sequence: self.sequence,
        }
    }

    fn announce(&mut self, node: u8, numbers: &[u16]) {
        let keys = keys(numbers.iter().copied());
        let now = at(self.model.seconds);
        let number = self.model.live.get(&node).map(|live| live.number);
        let mut sender = self.sender(node, number.unwrap_or(4096));
        let got = self.directory.announce(sender.batch(&keys), now);
        let Some(live) = self.model.live.get_mut(&node) else {
            assert_eq!(got, Err(RegistryError::UnknownNode));
            return;
        };
        live.keys.extend(numbers.iter().copied());
        let want = numbers.iter().map(|n| self.model.owners(*n).len());
        let want: Vec<_> = want.map(|n| u32::try_from(n).unwrap()).collect();
        assert_eq!(got.unwrap().owners, want);
    }

    fn withdraw(&mut self, node: u8, numbers: &[u16]) {
        let keys = keys(numbers.iter().copied());
        let now = at(self.model.seconds);
        let number = self.model.live.get(&node).map(|live| live.number);
        let mut sender = self.sender(node, number.unwrap_or(4096));
        let got = self.directory.withdraw(sender.batch(&keys), now);
        let Some(live) = self.model.live.get_mut(&node) else {
            assert_eq!(got, Err(RegistryError::UnknownNode));
            return;
        };
        live.keys.retain(|key| !numbers.contains(key));
        let sole = (0..).zip(numbers);
        let sole = sole.filter(|(_, n)| self.model.owners(**n).len() == 1);
        let want: Vec<u32> = sole.map(|(position, _)| position).collect();
        assert_eq!(got.unwrap().sole, want);
    }

    fn apply(&mut self, operation: Operation) {
        match operation {
            Operation::Advance(seconds) => {
                self.model.seconds += u64::from(seconds);
                let now = self.model.seconds;
                self.model.live.retain(|_, live| live.deadline > now);
            }
            Operation::Heartbeat(node, presence) => {
                self.model.heartbeat(&self.directory, node, presence);
            }
            Operation::Restart(node) => {
                *self.model.epochs.entry(node).or_insert(1) += 1;
                self.model.live.remove(&node);
                self.model.heartbeat(&self.directory, node, Presence::Here);
            }
            Operation::Announce(node, numbers) => self.announce(node, &numbers),
            Operation::Withdraw(node, numbers) => self.withdraw(node, &numbers),
            Operation::Plan(asker, choice) => {
                self.model.check_plan(&self.directory, asker, choice);
            }
            Operation::Sweep => self.sweep(),
        }
    }

    fn sweep(&self) {
        let now = at(self.model.seconds);
        for _ in 0..1024 {
            self.directory.sweep(now);
        }
        let stats = self.directory.stats(now);
        let owned: usize = self.model.live.values().map(|live| live.keys.len()).sum();
        assert_eq!(usize::try_from(stats.owners).unwrap(), owned);
        assert_eq!(usize::try_from(stats.nodes).unwrap(), self.model.live.len());
    }
}

fn run(operations: Vec<Operation>) {
    let mut pair = Pair { directory: directory(), model: Model::default(), sequence: 0 };
    for operation in operations {
        pair.apply(operation);
    }
    pair.apply(Operation::Plan(99, 7));
    pair.apply(Operation::Sweep);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn the_directory_answers_as_the_model(operations in prop::collection::vec(operation(), 1..60)) {
        run(operations);
    }
}
