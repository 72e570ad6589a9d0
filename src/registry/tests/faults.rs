//! Nodes that announce to a directory over the simulation's network, which delays, loses, repeats and
//! overtakes their calls, while blocks come and go, nodes and registry start again, and lists are
//! changed behind their nodes' backs. When all is quiet the registry knows exactly what is true, and
//! whenever digests are compared they agree, unless somebody changed a list. Every deliberate fault is
//! caught by that.

use std::collections::BTreeSet;
use std::panic::catch_unwind;
use std::sync::Mutex;

use network::{Ask, Registry, Sender, Told};
use seen::Seen;

use super::*;
use crate::registry::announcing::{
    AnnounceOptions, Announcing, Answer, Call, Digests, News, Pending, Residents,
};
use crate::registry::fault::{self, Fault};
use crate::sim::Random;

mod krate {
    pub(super) use crate::{registry, route, sim, types};
}

mod seen {
    use std::collections::BTreeMap;

    /// What happened.
    #[derive(Debug, Default)]
    pub(super) struct Seen(pub(super) BTreeMap<&'static str, u64>);

    impl Seen {
        pub(super) fn count(&mut self, what: &'static str, times: u64) {
            *self.0.entry(what).or_default() += times;
        }
    }
}

#[path = "../../../tests/simulation/registry.rs"]
#[expect(dead_code, reason = "nobody plans reads here")]
mod network;

fn node_id(at: usize) -> NodeId {
    NodeId([u8::try_from(at + 1).unwrap(); 16])
}

const NODES: usize = 3;
const BLOCKS: u16 = 10;

/// Things done in one run.
const OPERATIONS: usize = 60;

/// Runs in which a fault has to show: many times more than any takes.
const SEEDS: u64 = 2000;

const MS: Duration = Duration::from_millis(1);

/// What a node holds, and what it has to tell.
#[derive(Debug, Default)]
struct Held {
    blocks: Mutex<BTreeSet<u16>>,
    news: Mutex<Vec<(BlockKey, bool)>>,
    digests: Digests,
}

impl Held {
    fn change(&self, block: u16, is_here: bool) {
        let mut blocks = self.blocks.lock().unwrap();
        let changed = if is_here { blocks.insert(block) } else { blocks.remove(&block) };
        if changed {
            let note = |is_here| self.news.lock().unwrap().push((key(block), is_here));
            self.digests.change(&key(block), is_here, note, || is_here);
        }
    }

    fn holds(&self, wanted: &BlockKey) -> bool {
        self.blocks.lock().unwrap().iter().any(|block| key(*block) == *wanted)
    }
}

impl News for &Held {
    fn note_in(&mut self, pending: &mut Pending) {
        let news = std::mem::take(&mut *self.news.lock().unwrap());
        news.into_iter().for_each(|(key, is_here)| pending.note(key, is_here));
    }
}

impl Residents for Held {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let blocks = self.blocks.lock().unwrap();
        let from = u16::try_from(cursor).unwrap();
        let page: Vec<u16> = blocks.range(from..).take(max).copied().collect();
        out.extend(page.iter().map(|block| key(*block)));
        let last = page.last().filter(|last| blocks.last() != Some(last))?;
        Some(u32::from(*last) + 1)
    }

    fn digest(&self, partition: Partition) -> Option<u64> {
        Some(self.digests.of(partition))
    }
}

/// One start of a node.
struct Life {
    sender: Sender,
    held: Held,
    announcing: Announcing,
}

impl Life {
    fn new(at: usize, life: u64, pending_max: usize) -> Self {
        let address = format!("node-{at}:1");
        let identity = NodeIdentity { node: node_id(at), epoch: NodeEpoch(life), address };
        let options = AnnounceOptions {
            heartbeat_interval: MS * 400,
            flush_interval: MS * 2,
            batch: 2,
            in_flight: [4, 1, 2][at],
            backoff: (MS * 5, MS * 200),
            pending_max,
            // Slow, so that much changes while all is announced again.
            resync_rate: if at == 0 { 100 } else { 1000 },
        };
        let announcing = Announcing::new(&identity, options);
        Self { sender: Sender { at, identity }, held: Held::default(), announcing }
    }

    fn number(&self) -> u64 {
        self.announcing.registration().map_or(0, |known| known.number)
    }
}

struct World {
    random: Random,
    registry: Registry,
    nodes: Vec<Life>,
    lives: u64,
    pending_max: usize,
    now: Timestamp,
    seen: Seen,
}

impl World {
    fn new(seed: u64) -> Self {
        let pending_max = if seed.is_multiple_of(2) { 3 } else { 1000 };
        let nodes = (0..NODES).map(|at| Life::new(at, 1, pending_max)).collect();
        let (random, mut registry) = (Random::new(seed), Registry::new(seed));
        registry.late_one_in = 4;
        let (now, seen) = (Timestamp::ZERO, Seen::default());
        Self { random, registry, nodes, lives: 1, pending_max, now, seen }
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.random.below(bound as u64)).unwrap()
    }

    fn block(&mut self) -> u16 {
        u16::try_from(self.random.below(BLOCKS.into())).unwrap()
    }

    /// Answers what happened.
    fn run(mut self) -> Seen {
        for _ in 0..OPERATIONS {
            self.operate();
            let most = [1, 10, 200, 1000][self.below(4)];
            let span = MS * u32::try_from(self.random.below(most)).unwrap();
            self.run_for(span);
        }
        (self.registry.faults, self.registry.is_down) = (false, false);
        self.registry.cut.clear();
        // All have registered by then, and nothing is repeated any more.
        self.run_for(MS * 5000);
        self.harm();
        // Time for a dozen heartbeats and more to find and mend what the lists have wrong.
        self.run_for(MS * 15_000);
        self.assert_owners_are_true();
        let before: Vec<u64> = self.nodes.iter().map(Life::number).collect();
        self.run_for(MS * 5000);
        let after: Vec<u64> = self.nodes.iter().map(Life::number).collect();
        assert_eq!(before, after, "one that only heartbeats stays registered");
        self.assert_owners_are_true();
        for node in &self.nodes {
            assert!(node.announcing.pending().is_empty() && !node.announcing.is_resyncing());
            let (full, partial) = node.announcing.resyncs();
            self.seen.count("announced all", full);
            self.seen.count("drift repaired", partial);
        }
        self.seen
    }

    fn operate(&mut self) {
        let at = self.below(NODES);
        match self.random.below(100) {
            0..35 => {
                for _ in 0..=self.random.below(5) {
                    let block = self.block();
                    let is_here = self.random.below(2) == 0;
                    self.nodes[at].held.change(block, is_here);
                }
            }
            35..50 => self.churn(at),
            50..60 => {
                self.lives += 1;
                self.nodes[at] = Life::new(at, self.lives, self.pending_max);
            }
            60..68 => self.registry.restart(),
            68..78 => self.registry.is_down = !self.registry.is_down,
            78..84 => {
                self.registry.cut.insert(at);
            }
            84..90 => drop(self.registry.cut.pop_first()),
            90..93 => self.leave_nothing(at),
            93..96 => {
                // Somebody found a node without a block, rightly or not.
                let (whose, block) = (self.below(NODES), self.block());
                let identity = &self.nodes[whose].sender.identity;
                let (owner, epoch) = (identity.node, identity.epoch);
                let ask = Ask::Report { owner, epoch, keys: vec![key(block)] };
                self.registry.send(&self.nodes[at].sender, ask, self.now, &mut self.seen);
            }
            _ => self.now = self.now + MS * u32::try_from(self.random.below(3000)).unwrap(),
        }
    }

    /// A few blocks come and go, faster than calls are answered; often while all is announced again.
    fn churn(&mut self, at: usize) {
        if self.random.below(2) == 0 {
            self.registry.restart();
        }
        let first = self.random.below(u64::from(BLOCKS) - 2);
        for _ in 0..40 {
            let block = u16::try_from(first + self.random.below(3)).unwrap();
            let is_here = self.random.below(2) == 0;
            self.nodes[at].held.change(block, is_here);
            let micros = u32::try_from(self.random.below(4000)).unwrap();
            self.run_for(MS / 1000 * micros);
        }
    }

    /// A block comes and goes, with all others, shortly before the registry is lost: what is late finds
    /// one that nobody tells anything.
    fn leave_nothing(&mut self, at: usize) {
        self.nodes[at].held.change(0, true);
        for most in [20, 300] {
            let millis = u32::try_from(self.random.below(most)).unwrap();
            self.run_for(MS * millis);
            (0..BLOCKS).for_each(|block| self.nodes[at].held.change(block, false));
        }
        self.registry.restart();
    }

    /// Some lists lose a block, or gain one that its node does not hold.
    fn harm(&mut self) {
        for at in 0..NODES {
            let block = self.block();
            let node = &self.nodes[at];
            self.registry.harm(&node.sender, (key(block), node.number()));
        }
    }

    fn run_for(&mut self, span: Duration) {
        let (end, mut idle) = (self.now + span, 0);
        loop {
            let nodes = &self.nodes;
            let holds = |at: usize, key: &BlockKey| nodes[at].held.holds(key);
            for (sender, told) in self.registry.turn(self.now, holds, &mut self.seen) {
                if let Told::Call(answer) = told
                    && self.nodes[sender.at].sender.identity == sender.identity
                {
                    self.handle(sender.at, &answer);
                }
            }
            let mut next = end;
            for Life { sender, held, announcing } in &mut self.nodes {
                while let Some(call) = announcing.poll_call(&mut &*held, held, self.now) {
                    self.registry.send(sender, Ask::Call(call), self.now, &mut self.seen);
                }
                next = next.min(announcing.next_wake(self.now));
            }
            if self.now >= end {
                return;
            }
            let next = self.registry.next().into_iter().fold(next, Timestamp::min);
            idle = if next <= self.now { idle + 1 } else { 0 };
            assert!(idle < 1000, "a deadline in the past");
            self.now = self.now.max(next);
        }
    }

    fn handle(&mut self, at: usize, answer: &Answer) {
        let node = &mut self.nodes[at];
        if let Answer::Heartbeat(Ok(beat)) = answer {
            if node.announcing.registration() == Some(beat.registration) {
                let harmed = self.registry.harmed.contains(&at);
                assert!(beat.drifted.is_empty() || harmed, "node {at} and its list differ");
            } else {
                self.registry.harmed.remove(&at);
            }
        }
        node.announcing.handle_answer(answer, &mut |_, _| {}, self.now);
    }

    fn assert_owners_are_true(&self) {
        for number in 0..BLOCKS {
            let key = key(number);
            let holders: BTreeSet<usize> =
                (0..NODES).filter(|at| self.nodes[*at].held.holds(&key)).collect();
            assert_eq!(self.registry.owners(&key, self.now), holders, "of block {number}");
            for at in &holders {
                let node = &self.nodes[*at];
                let (who, asked) = (&node.sender.identity, (&[key][..], node.number()));
                let counts = self.registry.counts(who, asked, self.now);
                assert_eq!(counts, [u32::try_from(holders.len()).unwrap()]);
            }
        }
    }
}

/// The first run that fails under a fault.
fn caught_at(fault: Fault) -> Option<u64> {
    fault::set(Some(fault));
    let caught = (0..SEEDS).find(|seed| catch_unwind(|| World::new(*seed).run()).is_err());
    fault::set(None);
    caught
}

#[test]
fn whatever_is_lost_late_or_repeated_the_registry_ends_with_the_truth() {
    let mut seen = Seen::default();
    for seed in 0..300 {
        let run = catch_unwind(|| World::new(seed).run());
        let run = run.unwrap_or_else(|_said| panic!("seed {seed}"));
        run.0.iter().for_each(|(what, times)| seen.count(what, *times));
    }
    let must_happen = [
        "announced all",
        "call of an earlier start",
        "drift repaired",
        "late batch refused",
        "late call",
        "owner reported",
        "wrong report",
    ];
    for what in must_happen {
        assert!(seen.0.get(what).is_some_and(|times| *times > 10), "{what}: {seen:?}");
    }
}

#[test]
fn a_quiet_node_only_sends_heartbeats() {
    let mut world = World::new(7);
    world.registry.faults = false;
    world.nodes[0].held.change(1, true);
    world.run_for(MS * 1000);
    let Life { held, announcing, .. } = &mut world.nodes[0];
    assert!(announcing.is_connected() && !announcing.is_resyncing());
    assert_eq!(announcing.pending().answered(), 1);
    let beats = (0..1000).filter_map(|millis| {
        let now = world.now + MS * millis;
        announcing.poll_call(&mut &*held, held, now)
    });
    // The first one is under way for the rest of the time.
    let beats: Vec<Call> = beats.collect();
    let presence = Presence::Here;
    assert!(matches!(&beats[..], [Call::Heartbeat { presence: p, .. }] if *p == presence));
    assert_eq!(announcing.resyncs(), (1, 0));
}

#[test]
fn every_deliberate_fault_is_caught() {
    let caught = Fault::ALL.map(|fault| (fault, caught_at(fault)));
    println!("{caught:?}");
    let missed: Vec<Fault> =
        caught.iter().filter(|(_, seed)| seed.is_none()).map(|(fault, _)| *fault).collect();
    assert_eq!(missed, []);
}
