//! The owner registry of a simulated cluster, and the network to it: the directory that every form of
//! the registry is made of, behind calls that are delayed, lost, repeated and overtaken, also by more
//! than their senders' patience.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::krate::registry::announcing::{Answer, Call};
use super::krate::registry::{
    Batch, Directory, DirectoryOptions, InProcess, Missing, NodeIdentity, OwnerRegistry, Plan,
    PlanQuery, RegistryEpoch, RegistryError, RegistryFuture, Stamp,
};
use super::krate::route::Question;
use super::krate::sim::Random;
use super::krate::types::{BlockKey, NodeEpoch, NodeId, Timestamp};
use super::node_id;
use super::seen::Seen;

/// After so long a sender gives a call up.
const PATIENCE: Duration = Duration::from_millis(150);

/// How long a node stays registered without a heartbeat.
const LEASE: Duration = Duration::from_secs(2);

/// What a node asks.
#[derive(Debug, Clone)]
pub(crate) enum Ask {
    Call(Call),
    Plan { read: u64, question: Question },
    Report { owner: NodeId, epoch: NodeEpoch, keys: Vec<BlockKey> },
}

/// What it hears.
#[derive(Debug, Clone)]
pub(crate) enum Told {
    Call(Answer),
    Plan { read: u64, plan: Option<Plan> },
    Nothing,
}

/// One start of a node, as it registers.
#[derive(Debug, Clone)]
pub(crate) struct Sender {
    pub(crate) at: usize,
    pub(crate) identity: NodeIdentity,
}

#[derive(Debug)]
struct Underway {
    sender: Sender,
    ask: Ask,
    /// When it arrives; `None` once it did, or where it is lost.
    arrives: Option<Timestamp>,
    /// Whether it arrives once more, later.
    repeats: bool,
    /// The answer and when it arrives; `None` where it is lost.
    answer: Option<(Timestamp, Told)>,
    given_up: Timestamp,
    /// Whether the sender still waits.
    waits: bool,
}

/// The registry and what is under way to it and from it.
#[derive(Debug)]
pub(crate) struct Registry {
    random: Random,
    directory: Arc<Directory>,
    epoch: u64,
    underway: Vec<Underway>,
    /// One call of so many is late by more than its sender's patience.
    pub(crate) late_one_in: u64,
    /// Whether calls are lost, late and repeated.
    pub(crate) faults: bool,
    pub(crate) is_down: bool,
    /// Nodes that cannot reach it.
    pub(crate) cut: BTreeSet<usize>,
    /// Nodes whose list somebody else has changed: their digests may differ.
    pub(crate) harmed: BTreeSet<usize>,
}

fn directory(epoch: u64) -> Arc<Directory> {
    let options = DirectoryOptions { lease: LEASE, ..DirectoryOptions::default() };
    Arc::new(Directory::new(RegistryEpoch(epoch), options))
}

/// The answer of a registry in this process, which has it at once.
fn now<T>(answer: RegistryFuture<'_, T>) -> Result<T, RegistryError> {
    match pin!(answer).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("a directory answers at once"),
    }
}

impl Registry {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed ^ 0x4e61),
            directory: directory(1),
            epoch: 1,
            underway: Vec::new(),
            late_one_in: 16,
            faults: true,
            is_down: false,
            cut: BTreeSet::new(),
            harmed: BTreeSet::new(),
        }
    }

    /// Another start, which knows nothing. What is under way arrives at it.
    pub(crate) fn restart(&mut self) {
        self.epoch += 1;
        self.directory = directory(self.epoch);
        self.harmed.clear();
    }

    fn one_in(&mut self, bound: u64) -> bool {
        self.random.below(bound) == 0
    }

    fn delay(&mut self, seen: &mut Seen) -> Duration {
        let is_late = self.faults && self.one_in(self.late_one_in);
        seen.count("late call", u64::from(is_late));
        let most = if is_late { 600_000 } else { 9_000 };
        Duration::from_micros(self.random.below(most))
    }

    pub(crate) fn send(&mut self, sender: &Sender, ask: Ask, at: Timestamp, seen: &mut Seen) {
        let lost = self.cut.contains(&sender.at) || (self.faults && self.one_in(20));
        let arrives = (!lost).then(|| at + self.delay(seen));
        let repeats = self.faults && self.one_in(12);
        let (sender, given_up) = (sender.clone(), at + PATIENCE);
        let underway =
            Underway { sender, ask, arrives, repeats, answer: None, given_up, waits: true };
        self.underway.push(underway);
    }

    /// When something happens next.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        let of_one = |call: &Underway| {
            let answer = call.answer.as_ref().map_or(call.given_up, |(at, _)| *at);
            let heard = call.waits.then(|| answer.min(call.given_up));
            heard.into_iter().chain(call.arrives).min()
        };
        self.underway.iter().filter_map(of_one).min()
    }

    /// Lets happen what is due. `holds` says whether a node holds a block now. Answers are for the
    /// start of a node that asked, whatever became of it.
    pub(crate) fn turn(
        &mut self,
        at: Timestamp,
        holds: impl Fn(usize, &BlockKey) -> bool,
        seen: &mut Seen,
    ) -> Vec<(Sender, Told)> {
        for call in 0..self.underway.len() {
            if self.underway[call].arrives.is_some_and(|arrives| arrives <= at) {
                self.arrive(call, at, &holds, seen);
            }
        }
        let mut told = Vec::new();
        for call in &mut self.underway {
            let answered = call.answer.take_if(|(due, _)| *due <= at);
            let answer = match answered {
                Some((_, answer)) if call.waits => answer,
                None if call.waits && call.given_up <= at => unanswered(call.ask.clone()),
                _ => continue,
            };
            call.waits = false;
            told.push((call.sender.clone(), answer));
        }
        self.underway.retain(|call| call.waits || call.arrives.is_some());
        told
    }

    fn arrive(
        &mut self,
        call: usize,
        at: Timestamp,
        holds: &impl Fn(usize, &BlockKey) -> bool,
        seen: &mut Seen,
    ) {
        let (delay, again) = (self.delay(seen), self.delay(seen));
        let lost = self.faults && self.one_in(20);
        let answer = match self.is_down {
            true => unanswered(self.underway[call].ask.clone()),
            false => self.apply(call, at, holds, seen),
        };
        let underway = &mut self.underway[call];
        underway.arrives = underway.repeats.then(|| at + again);
        if underway.answer.is_none() && !lost {
            underway.answer = Some((at + delay, answer));
        }
        underway.repeats = false;
    }

    fn apply(
        &mut self,
        call: usize,
        at: Timestamp,
        holds: &impl Fn(usize, &BlockKey) -> bool,
        seen: &mut Seen,
    ) -> Told {
        let Underway { sender, ask, .. } = &self.underway[call];
        let registry = InProcess::new(Arc::clone(&self.directory), move || at);
        match ask {
            Ask::Call(call) => {
                let make = call.clone().make(&registry, &sender.identity);
                let answer = now(Box::pin(async move { Ok(make.await) })).unwrap();
                let late = answer.error() == Some(&RegistryError::Late);
                seen.count("late batch refused", u64::from(late));
                let superseded = answer.error() == Some(&RegistryError::Superseded);
                seen.count("call of an earlier start", u64::from(superseded));
                Told::Call(answer)
            }
            Ask::Plan { read, question } => {
                let asker = sender.identity.node;
                let Question { keys, avoid, choice, .. } = question;
                let query = PlanQuery { avoid, choice: *choice, ..PlanQuery::new(asker, keys) };
                let plan = now(registry.plan(query)).unwrap();
                check_plan(&plan, question, asker);
                Told::Plan { read: *read, plan: Some(plan) }
            }
            Ask::Report { owner, epoch, keys } => {
                let missing = Missing { owner: *owner, epoch: *epoch, keys };
                let removed = now(registry.report_missing(missing)).unwrap();
                seen.count("owner reported", u64::from(removed));
                let of = index(*owner);
                if removed > 0 && keys.iter().any(|key| holds(of, key)) {
                    self.harmed.insert(of);
                    seen.count("wrong report", 1);
                }
                Told::Nothing
            }
        }
    }

    /// Takes a block from a node's list, or puts one onto it, behind the node's back.
    pub(crate) fn harm(&mut self, whose: &Sender, (key, registration): (BlockKey, u64)) {
        let (node, epoch) = (whose.identity.node, whose.identity.epoch);
        self.harmed.insert(whose.at);
        let keys = &[key];
        let at = Timestamp::ZERO;
        if self.one_in(2) {
            let missing = Missing { owner: node, epoch, keys };
            self.directory.report_missing(missing, at).unwrap();
        } else {
            let stamp = Stamp { node, epoch, registration, sequence: u64::MAX, settled: 0 };
            // Where the node is not registered, nothing is listed.
            drop(self.directory.announce(Batch { stamp, keys }, at));
        }
    }

    /// The nodes that it lists for a block.
    pub(crate) fn owners(&self, key: &BlockKey, at: Timestamp) -> BTreeSet<usize> {
        let mut avoid: Vec<NodeId> = Vec::new();
        loop {
            let (asker, keys) = (NodeId([0; 16]), &[*key]);
            let query = PlanQuery { avoid: &avoid, ..PlanQuery::new(asker, keys) };
            let plan = self.directory.plan(query, at).unwrap();
            let Some((owner, _)) = plan.runs().next() else { break };
            avoid.push(owner.node);
        }
        avoid.into_iter().map(index).collect()
    }

    /// How many owners it counts for blocks that a registered node announces, by position.
    pub(crate) fn counts(
        &self,
        who: &NodeIdentity,
        (keys, registration): (&[BlockKey], u64),
        at: Timestamp,
    ) -> Vec<u32> {
        let (node, epoch) = (who.node, who.epoch);
        let stamp = Stamp { node, epoch, registration, sequence: u64::MAX, settled: 0 };
        self.directory.announce(Batch { stamp, keys }, at).unwrap().owners
    }
}

fn index(node: NodeId) -> usize {
    let at = usize::from(node.0[0]) - 1;
    assert_eq!(node_id(at), node);
    at
}

fn unanswered(ask: Ask) -> Told {
    match ask {
        Ask::Call(call) => Told::Call(call.fail(RegistryError::TimedOut(PATIENCE))),
        Ask::Plan { read, .. } => Told::Plan { read, plan: None },
        Ask::Report { .. } => Told::Nothing,
    }
}

/// A plan names nobody whom it must not name, and covers no position twice.
fn check_plan(plan: &Plan, question: &Question, asker: NodeId) {
    let mut next = 0;
    for (owner, segment) in plan.runs() {
        assert!(owner.node != asker && !question.avoid.contains(&owner.node), "{plan:?}");
        assert!(segment.first >= next && segment.count > 0, "{plan:?}");
        next = segment.first + segment.count;
    }
    assert!(next as usize <= question.keys.len());
}
