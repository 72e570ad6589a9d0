//! One run: a seed, a cluster, and what is done to it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::cluster::{Cluster, Shape, block_of, endpoint};
use crate::krate::event::{Event, LeaseEnd};
use crate::krate::health::BreakerState;
use crate::krate::peer::{FetchOutcome, Fetched, Pressure};
use crate::krate::sim::Random;
use crate::krate::types::{ResidentId, Scope};
use crate::readers::Readers;

/// Blocks that there are: few, so that nodes want the same ones.
const BLOCKS: u64 = 24;

/// Things done in one run.
const OPERATIONS: usize = 60;

/// A number from the environment.
#[expect(clippy::disallowed_methods, reason = "a test's replay is not a setting of the program")]
pub(crate) fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

/// What must happen in some run: a simulation in which nothing goes wrong proves nothing.
const MUST_HAPPEN: [&str; 28] = [
    "aborted",
    "already resident",
    "busy",
    "crash",
    "crowded node",
    "evicted",
    "expired",
    "failed by the path",
    "failed by the peer",
    "failed locally",
    "fetched",
    "large cluster",
    "lost message",
    "not found",
    "partition",
    "pause obeyed",
    "paused node",
    "peer left alone",
    "probe that was good",
    "rank step",
    "refused",
    "repeated message",
    "replayed",
    "reset",
    "restart",
    "shared fetch",
    "stall",
    "superseded",
];

/// How often what happened, over all runs.
#[derive(Debug, Default)]
pub(crate) struct Seen(BTreeMap<&'static str, u64>);

impl Seen {
    fn count(&mut self, what: &'static str, times: u64) {
        *self.0.entry(what).or_default() += times;
    }

    /// Adds what another thread's runs saw.
    pub(crate) fn add(&mut self, other: &Self) {
        for (what, times) in &other.0 {
            self.count(what, *times);
        }
    }

    pub(crate) fn assert_it_all_happened(&self) {
        for what in MUST_HAPPEN {
            assert!(self.0.get(what).is_some_and(|times| *times > 0), "no {what}: {self:?}");
        }
    }
}

pub(crate) struct World {
    random: Random,
    cluster: Cluster,
    split: BTreeSet<(usize, usize)>,
    /// Pins that a local reader holds: node, life, resident.
    held: Vec<(usize, u64, ResidentId)>,
    lives: Vec<u64>,
    /// By node: its readers that share fetches, and the life that they belong to.
    readers: Vec<(u64, Readers)>,
    /// Rank steps, and blocks that arrived whole, of all lives that were tallied.
    steps: u64,
    landed: u64,
}

impl World {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x5eed);
        // Mostly few nodes, so that they meet in the same blocks; one cluster in sixteen is large.
        let nodes = match seed % 16 {
            0 => 16 + random.below(17),
            _ => 3 + random.below(6),
        };
        let nodes = usize::try_from(nodes).unwrap();
        let mut shape = Shape { seed, ..Shape::default() };
        let micros = |bound: u64| Duration::from_micros(bound);
        let place = usize::try_from(seed).unwrap();
        shape.network.delay = micros(10)..=micros([100, 2000, 20_000][place % 3]);
        shape.network.drain = micros(10)..=micros([100, 50_000, 400_000][place / 3 % 3]);
        shape.network.reads_outstanding = 1 + usize::try_from(random.below(8)).unwrap();
        shape.network.read_bytes = [100, 300, 4096][place / 9 % 3];
        shape.pool_bytes = [4096, 8192][place / 27 % 2];
        shape.residents = 8 + u32::try_from(random.below(8)).unwrap();
        shape.peers.lease.leases_per_requester = 4;
        shape.peers.lease.bytes_per_requester = 4000;
        if place % 2 == 1 {
            // Some holders ask their readers to hold back, and lend no more at all now and then.
            let (high_bytes, low_bytes, low_leases) = (3000, 1000, 3);
            shape.peers.pressure = Pressure { high_bytes, low_bytes, low_leases };
        }
        shape.noise.lost = [0, 0, 20][place / 54 % 3];
        shape.noise.repeated = [0, 20][place / 162 % 2];
        let cluster = Cluster::new(nodes, shape);
        let (split, held, lives) = (BTreeSet::new(), Vec::new(), vec![0; nodes]);
        let readers = std::iter::repeat_with(|| (0, Readers::default())).take(nodes).collect();
        Self { random, cluster, split, held, lives, readers, steps: 0, landed: 0 }
    }

    fn node(&mut self) -> usize {
        usize::try_from(self.random.below(self.lives.len() as u64)).unwrap()
    }

    fn pair(&mut self) -> (usize, usize) {
        let (a, b) = (self.node(), self.node());
        let b = if a == b { (b + 1) % self.lives.len() } else { b };
        (a.min(b), a.max(b))
    }

    fn blocks(&mut self) -> Vec<u16> {
        let first = self.random.below(BLOCKS);
        let count = 1 + self.random.below(6);
        (first..first + count).map(|block| u16::try_from(block % BLOCKS).unwrap()).collect()
    }

    pub(crate) fn run(&mut self, seen: &mut Seen) {
        seen.count("large cluster", u64::from(self.lives.len() >= 16));
        for _ in 0..OPERATIONS {
            self.operate(seen);
            // Mostly a few legs of a message, so that the next fault falls into what runs now.
            let leg = u64::try_from(self.cluster.shape.network.delay.end().as_micros()).unwrap();
            let most = [2 * leg, 6 * leg, 20 * leg, 500_000];
            let most = most[usize::try_from(self.random.below(4)).unwrap()];
            let pause = Duration::from_micros(self.random.below(most));
            self.cluster.run_for(pause);
            self.take_fetched(seen);
        }
        self.come_to_rest(seen);
        self.account(seen);
    }

    fn operate(&mut self, seen: &mut Seen) {
        match self.random.below(100) {
            0..45 => {
                for _ in 0..=self.random.below(3) {
                    self.begin_fetch();
                }
            }
            45..62 => {
                let (at, blocks) = (self.node(), self.blocks());
                if let Some(node) = &mut self.cluster.nodes[at] {
                    for block in blocks {
                        node.landing.save(block);
                    }
                }
            }
            62..70 => {
                let at = self.node();
                if let Some(node) = &mut self.cluster.nodes[at] {
                    node.landing.evict();
                }
            }
            70..73 => self.crowd(seen),
            73..80 => {
                let (a, b) = self.pair();
                self.cluster.network.reset(endpoint(a), endpoint(b));
                seen.count("reset", 1);
            }
            80..86 => {
                let (a, b) = self.pair();
                self.cluster.network.partition(endpoint(a), endpoint(b));
                self.split.insert((a, b));
                seen.count("partition", 1);
            }
            86..90 => {
                if let Some((a, b)) = self.split.pop_first() {
                    self.cluster.network.heal(endpoint(a), endpoint(b));
                }
            }
            90..95 => self.crash(seen),
            95..98 => {
                // One thread stands still while its peers' do not.
                let (at, pause) = (self.node(), self.random.below(2500));
                self.cluster.pause(at, Duration::from_millis(pause));
                seen.count("paused node", 1);
            }
            _ => {
                // Every thread stands still, the network does not.
                let pause = Duration::from_millis(self.random.below(1500));
                self.cluster.network.advance_to(self.cluster.now() + pause);
                seen.count("stall", 1);
            }
        }
    }

    fn crash(&mut self, seen: &mut Seen) {
        let at = self.node();
        if self.cluster.nodes[at].is_some() {
            self.tally(at, seen);
            self.cluster.crash(at);
            seen.count("crash", 1);
        }
        // Some come back at once, while their leases run.
        if self.random.below(2) == 0 {
            self.lives[at] += 1;
            self.cluster.start(at);
            seen.count("restart", 1);
        }
    }

    /// Local readers pin all that a node holds: for a while it has no room for anything.
    fn crowd(&mut self, seen: &mut Seen) {
        let at = self.node();
        let Some(node) = &self.cluster.nodes[at] else { return };
        for view in node.residents() {
            if let Ok(found) = node.landing.store.pin(&view.key) {
                self.held.push((at, self.lives[at], found.id));
            }
        }
        seen.count("crowded node", 1);
    }

    /// A fetch, mostly of blocks that the owner has.
    fn begin_fetch(&mut self) {
        let (a, b) = self.pair();
        let (to, from) = if self.random.below(2) == 0 { (a, b) } else { (b, a) };
        let mut blocks = self.blocks();
        if let Some(owner) = &self.cluster.nodes[from] {
            let residents = owner.residents();
            for block in &mut blocks {
                if !residents.is_empty() && self.random.below(8) > 0 {
                    let at = self.random.below(residents.len() as u64);
                    *block = block_of(&residents[usize::try_from(at).unwrap()].key);
                }
            }
        }
        if self.cluster.nodes[to].is_some() {
            // Some readers share their fetches, others do not: both must come out right.
            if self.random.below(2) == 0 {
                self.cluster.begin_fetch(to, from, &blocks);
                return;
            }
            let readers = readers_of(&mut self.readers, &self.lives, to);
            let led = readers.join(&blocks);
            if !led.is_empty() {
                let id = self.cluster.begin_fetch(to, from, &led);
                readers.begun(id, led);
            }
        }
    }

    /// Readers let go of what they got, some of them later.
    fn take_fetched(&mut self, seen: &mut Seen) {
        for at in 0..self.lives.len() {
            let Some(node) = &mut self.cluster.nodes[at] else { continue };
            for fetched in std::mem::take(&mut node.fetched) {
                count(&fetched, seen);
                readers_of(&mut self.readers, &self.lives, at).ended(fetched.id);
                for outcome in fetched.outcomes {
                    if let FetchOutcome::Ready { found, .. } = outcome {
                        self.held.push((at, self.lives[at], found.id));
                    }
                }
            }
        }
        let mut kept = std::mem::take(&mut self.held);
        kept.retain(|held| self.random.below(3) > 0 || !self.let_go(*held));
        self.held = kept;
    }

    fn let_go(&self, (at, life, id): (usize, u64, ResidentId)) -> bool {
        if let Some(node) = &self.cluster.nodes[at]
            && self.lives[at] == life
        {
            node.landing.store.unpin(id).unwrap();
        }
        true
    }

    /// Heals the network, starts the dead, lets go of every pin, and waits for all to be over.
    fn come_to_rest(&mut self, seen: &mut Seen) {
        while let Some((a, b)) = self.split.pop_first() {
            self.cluster.network.heal(endpoint(a), endpoint(b));
        }
        for at in 0..self.lives.len() {
            if self.cluster.nodes[at].is_none() {
                self.lives[at] += 1;
                self.cluster.start(at);
            }
        }
        // The longest that anything waits: a lease that is renewed to the end of its reads, a cut,
        // and the silence of a peer that died unheard.
        self.cluster.run_for(Duration::from_secs(20));
        self.take_fetched(seen);
        for held in std::mem::take(&mut self.held) {
            self.let_go(held);
        }
    }

    /// Nothing is left over, and ranks are what their histories say.
    fn account(&mut self, seen: &mut Seen) {
        for at in 0..self.lives.len() {
            self.tally(at, seen);
            let node = self.cluster.node(at);
            readers_of(&mut self.readers, &self.lives, at).assert_at_rest();
            let followed = readers_of(&mut self.readers, &self.lives, at).followed;
            seen.count("shared fetch", followed);
            // The network is whole and everybody lives: nobody is left alone any more.
            let mut health = node.peers.health(self.cluster.now());
            let open = health.find(|entry| entry.state != BreakerState::Closed);
            assert_eq!(open, None, "node {at} still leaves somebody alone");
            assert_eq!(node.leases(), 0, "node {at} still lends");
            assert_eq!(node.peers.unfinished(), 0, "node {at} still fetches");
            assert!(self.cluster.network.landing(endpoint(at)).is_empty());
            let pinned = node.residents().into_iter().filter(|view| view.pins > 0);
            assert_eq!(pinned.count(), 0, "node {at} has pins that nobody holds");
            let held: u64 = node
                .residents()
                .iter()
                .map(|view| u64::from(view.payload.extent.len).next_multiple_of(64))
                .sum();
            assert_eq!(node.landing.pool.usage().used, held, "node {at} lost memory");
        }
        assert!(self.steps <= self.landed, "a rank moved for a block that did not arrive");
    }

    fn tally(&mut self, at: usize, seen: &mut Seen) {
        let node = self.cluster.node(at);
        let ended = |how: LeaseEnd| {
            let of = |event: &Event| matches!(event, Event::LeaseEnded { end, .. } if *end == how);
            node.log.count(of) as u64
        };
        seen.count("expired", ended(LeaseEnd::Expired));
        seen.count("superseded", ended(LeaseEnd::Superseded));
        seen.count("aborted", ended(LeaseEnd::Aborted));
        let logged = |which: Event| node.log.count(|event| *event == which) as u64;
        seen.count("replayed", logged(Event::CompletionReplayed));
        seen.count("refused", logged(Event::CompletionRefused));
        let opened = |event: &Event| matches!(event, Event::BreakerOpened { .. });
        seen.count("peer left alone", node.log.count(opened) as u64);
        seen.count("probe that was good", logged(Event::Probed { good: true }));
        seen.count("pause obeyed", logged(Event::PauseObeyed));
        seen.count("evicted", node.landing.evicted);
        seen.count("lost message", node.lost);
        seen.count("repeated message", node.repeated);
        let mismatches = logged(Event::ChecksumMismatch);
        assert_eq!(mismatches, 0, "node {at}: a checksum caught what a pin must prevent");
        assert_eq!(
            logged(Event::ProtocolViolation),
            0,
            "node {at} was told something that no node says"
        );
        assert_eq!(
            logged(Event::StaleCompletion),
            0,
            "node {at} was told of a READ that it did not post"
        );
        // Each commit of a reader that is new to a resident raises it by one; only recoveries
        // (already resident) lower it.
        let raised = |event: &Event| matches!(event, Event::RankMoved { from, to } if to > from);
        let mut readers = 0;
        for view in node.residents() {
            readers += u64::from(view.requesters);
        }
        readers += node.landing.readers_of_evicted;
        let steps = node.log.count(raised) as u64;
        assert_eq!(steps, readers, "node {at}: rank steps without a reader, or the reverse");
        self.steps += steps;
        for blocks in 0..=6 {
            let landed = |event: &Event| match event {
                Event::TransferSucceeded { blocks: landed, .. } => *landed == blocks,
                _ => false,
            };
            self.landed += blocks * node.log.count(landed) as u64;
        }
        seen.count("rank step", steps);
    }
}

fn count(fetched: &Fetched, seen: &mut Seen) {
    for outcome in &fetched.outcomes {
        let what = match outcome {
            FetchOutcome::Ready { fetched: true, .. } => "fetched",
            FetchOutcome::Ready { fetched: false, .. } => "already resident",
            FetchOutcome::NotFound => "not found",
            FetchOutcome::Busy => "busy",
            FetchOutcome::Failed(Scope::Local) => "failed locally",
            FetchOutcome::Failed(Scope::Path) => "failed by the path",
            FetchOutcome::Failed(Scope::Peer) => "failed by the peer",
            FetchOutcome::Failed(Scope::Request) => "failed by the request",
        };
        seen.count(what, 1);
    }
}

/// The readers of a node's present life.
fn readers_of<'a>(readers: &'a mut [(u64, Readers)], lives: &[u64], at: usize) -> &'a mut Readers {
    let (life, readers) = &mut readers[at];
    if *life != lives[at] {
        (*life, *readers) = (lives[at], Readers::default());
    }
    readers
}
