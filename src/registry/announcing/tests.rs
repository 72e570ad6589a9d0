//! A node and a registry on a network that delays, loses, repeats and reorders, in simulated time. The
//! registry restarts empty, loses some of what it knew, and lists what nobody holds. When all is quiet
//! it knows exactly what is true.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::{Arc, Mutex as StdMutex};
use std::task::{Context, Poll, Waker};

use super::*;
use crate::registry::{
    Batch, Directory, DirectoryOptions, InProcess, Missing, NodeIdentity, PlanQuery,
};
use crate::sim::Random;
use crate::types::{BlockHash, NamespaceId};

const KEYS: u32 = 64;

/// Seeds of one run.
const SEEDS: u64 = 60;

/// After so long a sender gives a call up.
const PATIENCE: Duration = Duration::from_millis(30);

fn key(number: u32) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&number.to_le_bytes()).unwrap() }
}

fn identity() -> NodeIdentity {
    NodeIdentity { node: NodeId([1; 16]), epoch: NodeEpoch(1), address: "a:1".to_owned() }
}

#[derive(Debug)]
struct Truth {
    held: StdMutex<BTreeSet<u32>>,
    prints: Vec<Fingerprint>,
}

impl Truth {
    fn new() -> Self {
        let prints = (0..KEYS).map(|number| Fingerprint::of(&key(number))).collect();
        Self { held: StdMutex::default(), prints }
    }
}

impl Residents for Truth {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let end = cursor.saturating_add(u32::try_from(max).unwrap()).min(KEYS);
        out.extend(self.held.lock().unwrap().range(cursor..end).map(|number| key(*number)));
        (end < KEYS).then_some(end)
    }

    fn digest(&self, partition: Partition) -> Option<u64> {
        let held = self.held.lock().unwrap();
        let numbered = (0..).zip(&self.prints);
        let here = numbered.filter(|(_, print)| print.partition() == partition);
        let here = here.filter(|(number, _)| held.contains(number)).map(|(_, print)| print);
        Some(here.fold(0, |sum, print| sum ^ print.digest()))
    }
}

/// What changed since the announcements heard of it last.
#[derive(Debug, Default)]
struct Noted(Vec<(BlockKey, bool)>);

impl News for Noted {
    fn note_in(&mut self, pending: &mut Pending) {
        self.0.drain(..).for_each(|(key, resident)| pending.note(key, resident));
    }
}

#[derive(Debug)]
struct Underway {
    call: Call,
    /// When it arrives; `None` once it did, or where it is lost.
    arrives: Option<Timestamp>,
    /// Whether it arrives once more, later.
    repeats: bool,
    /// The answer and when it arrives; `None` where it is lost.
    answer: Option<(Timestamp, Answer)>,
    given_up: Timestamp,
    /// Whether the sender still waits.
    waits: bool,
}

struct World {
    random: Random,
    now: Timestamp,
    epoch: u64,
    directory: Arc<Directory>,
    announcing: Announcing,
    noted: Noted,
    truth: Truth,
    underway: Vec<Underway>,
    faults: bool,
    most_underway: usize,
}

fn directory(epoch: u64) -> Arc<Directory> {
    Arc::new(Directory::new(RegistryEpoch(epoch), DirectoryOptions::default()))
}

fn asking() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

impl World {
    fn one_in(&mut self, bound: u64) -> bool {
        self.random.below(bound) == 0
    }

    fn new(seed: u64) -> Self {
        let options = AnnounceOptions {
            heartbeat_interval: Duration::from_millis(40),
            flush_interval: Duration::from_millis(1),
            batch: 4,
            in_flight: 1 + usize::try_from(seed % 6).unwrap(),
            backoff: (Duration::from_millis(2), Duration::from_millis(20)),
            pending_max: if seed.is_multiple_of(5) { 12 } else { 1000 },
            ..AnnounceOptions::default()
        };
        Self {
            random: Random::new(seed),
            now: Timestamp::ZERO,
            epoch: 1,
            directory: directory(1),
            announcing: Announcing::new(&identity(), options),
            noted: Noted::default(),
            truth: Truth::new(),
            underway: Vec::new(),
            faults: true,
            most_underway: 0,
        }
    }

    fn flip(&mut self) {
        let number = u32::try_from(self.random.below(KEYS.into())).unwrap();
        let mut held = self.truth.held.lock().unwrap();
        let resident = held.insert(number);
        if !resident {
            held.remove(&number);
        }
        drop(held);
        self.noted.0.push((key(number), resident));
    }

    /// What befalls the registry.
    fn harm(&mut self) {
        let keys = [key(u32::try_from(self.random.below(KEYS.into())).unwrap())];
        let least = if self.faults { 0 } else { 1 };
        match least + self.random.below(8 - least) {
            0 => {
                self.epoch += 1;
                self.directory = directory(self.epoch);
            }
            1..=3 => {
                let missing = Missing { owner: NodeId([1; 16]), epoch: NodeEpoch(1), keys: &keys };
                self.directory.report_missing(missing, self.now).unwrap();
            }
            _ => {
                let registration = self.announcing.registration().map_or(0, |known| known.number);
                let (node, epoch) = (NodeId([1; 16]), NodeEpoch(1));
                let stamp = Stamp { node, epoch, registration, sequence: u64::MAX, settled: 0 };
                // Where the node is not registered, nothing is listed.
                drop(self.directory.announce(Batch { stamp, keys: &keys }, self.now));
            }
        }
    }

    fn delay(&mut self) -> Duration {
        let most = if self.faults && self.one_in(8) { 200_000 } else { 9_000 };
        Duration::from_micros(self.random.below(most))
    }

    fn send(&mut self, call: Call) {
        let lost = self.faults && self.one_in(12);
        let arrives = (!lost).then(|| self.now + self.delay());
        let repeats = self.faults && self.one_in(10);
        let given_up = self.now + PATIENCE;
        let underway = Underway { call, arrives, repeats, answer: None, given_up, waits: true };
        self.underway.push(underway);
        let waiting = self.underway.iter().filter(|call| call.waits).count();
        self.most_underway = self.most_underway.max(waiting);
    }

    fn apply(&self, call: &Call) -> Answer {
        let now = self.now;
        let registry = InProcess::new(Arc::clone(&self.directory), move || now);
        let made = pin!(call.clone().make(&registry, &identity())).poll(&mut asking());
        match made {
            Poll::Ready(answer) => answer,
            Poll::Pending => panic!("a directory answers at once"),
        }
    }

    fn arrive(&mut self, at: usize) {
        let answer = self.apply(&self.underway[at].call);
        let (delay, again) = (self.delay(), self.delay());
        let lost = self.faults && self.one_in(12);
        let underway = &mut self.underway[at];
        underway.arrives = underway.repeats.then(|| self.now + again);
        if underway.answer.is_none() && !lost {
            underway.answer = Some((self.now + delay, answer));
        }
        underway.repeats = false;
    }

    fn answer(&mut self, at: usize, answer: &Answer) {
        self.underway[at].waits = false;
        self.announcing.handle_answer(answer, &mut |_, _| {}, self.now);
    }

    fn give_up(&mut self, at: usize) {
        let answer = self.underway[at].call.clone().fail(RegistryError::TimedOut(PATIENCE));
        self.answer(at, &answer);
    }

    /// Goes on to the next thing that happens, at most until `until`.
    fn step(&mut self, until: Timestamp) {
        while let Some(call) = self.announcing.poll_call(&mut self.noted, &self.truth, self.now) {
            self.send(call);
        }
        let wake = self.announcing.next_wake(self.now);
        let events = self.underway.iter().flat_map(|call| {
            let answer = call.answer.as_ref().map(|(at, _)| *at);
            let waits = call.waits.then(|| answer.unwrap_or(call.given_up).min(call.given_up));
            [call.arrives, waits].into_iter().flatten()
        });
        let next = events.chain([wake, until]).fold(until, Timestamp::min);
        self.now = self.now.max(next);
        for at in 0..self.underway.len() {
            if self.underway[at].arrives.is_some_and(|arrives| arrives <= self.now) {
                self.arrive(at);
            }
            let underway = &self.underway[at];
            if !underway.waits {
                continue;
            }
            match underway.answer.clone() {
                Some((due, answer)) if due <= self.now => self.answer(at, &answer),
                _ if underway.given_up <= self.now => self.give_up(at),
                _ => {}
            }
        }
        self.underway.retain(|call| call.waits || call.arrives.is_some());
    }

    fn run_for(&mut self, span: Duration) {
        let until = self.now + span;
        let mut steps = 0_u32;
        while self.now < until {
            self.step(until);
            steps += 1;
            assert!(steps < 2_000_000, "it spins at {:?}: {:?}", self.now, self.announcing);
        }
    }

    fn listed(&self) -> BTreeSet<u32> {
        let is_listed = |number: &u32| {
            let asker = NodeId([9; 16]);
            let keys = [key(*number)];
            let query = PlanQuery::new(asker, &keys);
            self.directory.plan(query, self.now).unwrap().missing == 0
        };
        (0..KEYS).filter(is_listed).collect()
    }
}

#[test]
fn whatever_is_lost_late_or_repeated_the_registry_ends_with_the_truth() {
    let mut seen = (0, 0, 0);
    for seed in 0..SEEDS {
        let mut world = World::new(seed);
        for _ in 0..300 {
            for _ in 0..world.random.below(4) {
                world.flip();
            }
            if world.one_in(60) {
                world.harm();
            }
            let span = Duration::from_micros(world.random.below(6_000));
            world.run_for(span);
        }
        world.faults = false;
        world.run_for(Duration::from_secs(2));
        // Nothing but the digests tells of these.
        (0..8).for_each(|_| world.harm());
        world.run_for(Duration::from_secs(3));
        assert_eq!(world.announcing.pending().len(), 0, "seed {seed}");
        let truth = world.truth.held.lock().unwrap().clone();
        assert_eq!(world.listed(), truth, "seed {seed}: {:?}", world.announcing);
        let (full, partial) = world.announcing.resyncs();
        seen = (seen.0 + full, seen.1 + partial, seen.2.max(world.most_underway));
    }
    let (full, partial, underway) = seen;
    assert!(full >= SEEDS && partial >= SEEDS && underway > 4, "hardly tried: {seen:?}");
}

#[test]
fn a_quiet_node_only_sends_heartbeats() {
    let mut world = World::new(7);
    world.faults = false;
    world.flip();
    world.run_for(Duration::from_secs(1));
    assert!(world.announcing.is_connected() && !world.announcing.is_resyncing());
    assert_eq!(world.announcing.pending().answered(), 1);
    let started = world.now;
    while world.now < started + Duration::from_secs(1) {
        let call = world.announcing.poll_call(&mut world.noted, &world.truth, world.now);
        assert!(matches!(call, None | Some(Call::Heartbeat { presence: Presence::Here, .. })));
        call.into_iter().for_each(|call| world.send(call));
        world.step(started + Duration::from_secs(1));
    }
    assert_eq!(world.announcing.resyncs(), (1, 0));
}
