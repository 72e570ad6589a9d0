//! One run: a seed, a cluster with its registry, and what is done to them.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::client::Client;
use crate::cluster::{Cluster, Shape, block_of, endpoint, node_id};
use crate::krate::peer::{FetchOutcome, Pressure};
use crate::krate::protocol::door::Source;
use crate::krate::sim::Random;
use crate::krate::types::ResidentId;
use crate::registry::Registry;
use crate::seen::{Seen, count};

/// Blocks that there are: few, so that nodes want the same ones.
pub(crate) const BLOCKS: u64 = 24;

/// Things done in one run.
const OPERATIONS: usize = 60;

pub(crate) struct World {
    pub(crate) random: Random,
    pub(crate) cluster: Cluster,
    pub(crate) registry: Registry,
    /// By node: what its present start has with the registry.
    pub(crate) clients: Vec<Option<Client>>,
    pending_max: usize,
    pub(crate) split: BTreeSet<(usize, usize)>,
    /// Pins that a local reader holds: node, life, resident.
    pub(crate) held: Vec<(usize, u64, ResidentId)>,
    pub(crate) lives: Vec<u64>,
    /// Rank steps, and blocks that arrived whole, of all lives that were tallied.
    pub(crate) steps: u64,
    pub(crate) landed: u64,
    pub(crate) seen: Seen,
}

fn shape_of(seed: u64, random: &mut Random) -> Shape {
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
        shape.peers.pressure =
            Pressure { high_bytes, low_bytes, low_leases, ..Pressure::default() };
    }
    shape.noise.lost = [0, 0, 20][place / 54 % 3];
    shape.noise.repeated = [0, 20][place / 162 % 2];
    shape
}

/// Changes that may wait for the registry: some nodes forget what they were to tell while it does not
/// answer.
fn pending_max(seed: u64) -> usize {
    [3, 6, 1000, 1000][usize::try_from(seed % 4).unwrap()]
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
        let cluster = Cluster::new(nodes, shape_of(seed, &mut random));
        let pending_max = pending_max(seed);
        let client = |at| Some(Client::new((at, 1), cluster.node(at), pending_max));
        Self {
            random,
            clients: (0..nodes).map(client).collect(),
            registry: Registry::new(seed),
            pending_max,
            split: BTreeSet::new(),
            held: Vec::new(),
            lives: vec![1; nodes],
            steps: 0,
            landed: 0,
            seen: Seen::default(),
            cluster,
        }
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

    /// The whole run; answers what happened in it.
    pub(crate) fn run(mut self) -> Seen {
        self.seen.count("large cluster", u64::from(self.lives.len() >= 16));
        for _ in 0..OPERATIONS {
            self.operate();
            // Mostly a few legs of a message, so that the next fault falls into what runs now.
            let leg = u64::try_from(self.cluster.shape.network.delay.end().as_micros()).unwrap();
            let most = [2 * leg, 6 * leg, 20 * leg, 500_000];
            let most = most[usize::try_from(self.random.below(4)).unwrap()];
            let pause = Duration::from_micros(self.random.below(most));
            self.run_for(pause);
            self.let_go_of_some();
        }
        self.come_to_rest();
        self.account();
        self.seen
    }

    /// Rounds of nodes and registry, as things happen, for so long.
    pub(crate) fn run_for(&mut self, span: Duration) {
        let end = self.cluster.now() + span;
        let (mut stirred, mut idle) = (true, 0);
        loop {
            if stirred {
                self.cluster.turn();
                self.cluster.check();
            }
            let now = self.cluster.now();
            stirred = self.turn_clients();
            if now >= end && !stirred {
                return;
            }
            let cluster = if stirred { Some(now) } else { self.cluster.next() };
            let clients = self.clients.iter_mut().flatten().map(|client| client.next(now)).min();
            let next = cluster.into_iter().chain(clients).chain(self.registry.next()).min();
            let next = next.unwrap_or(end).min(end);
            stirred |= cluster.is_some_and(|at| at <= next);
            idle = if next <= now { idle + 1 } else { 0 };
            assert!(idle < 1000, "a deadline in the past keeps the nodes spinning at {now:?}");
            self.cluster.network.advance_to(next);
        }
    }

    /// Takes what the registry and peers answered, and does what follows. `true` where a node has
    /// something to do now.
    fn turn_clients(&mut self) -> bool {
        let now = self.cluster.now();
        let Self { cluster, registry, clients, seen, .. } = self;
        let holds = |at: usize, key: &_| {
            let node = cluster.nodes[at].as_ref();
            node.is_some_and(|node| node.landing.store.lookup(key).is_some())
        };
        for (sender, told) in registry.turn(now, holds, seen) {
            let member = cluster.nodes[sender.at].as_ref();
            let client = clients[sender.at].as_mut();
            let client = client.filter(|it| it.sender.identity == sender.identity);
            if let (Some(member), Some(client)) = (member, client) {
                client.handle(told, member, registry, (now, seen));
            }
        }
        let mut stirred = false;
        for (at, pair) in cluster.nodes.iter_mut().zip(clients.iter_mut()).enumerate() {
            let (Some(member), Some(client)) = pair else { continue };
            for fetched in std::mem::take(&mut member.fetched) {
                count(&fetched, seen);
                client.handle_fetched(&fetched, registry, now, seen);
                for outcome in fetched.outcomes {
                    if let FetchOutcome::Ready { found, .. } = outcome {
                        self.held.push((at, self.lives[at], found.id));
                    }
                }
            }
            stirred |= client.turn(member, registry, now, seen);
        }
        stirred
    }

    fn operate(&mut self) {
        match self.random.below(100) {
            0..45 => {
                for _ in 0..=self.random.below(3) {
                    self.begin_fetch();
                }
            }
            45..61 => {
                let (at, blocks) = (self.node(), self.blocks());
                if let Some(node) = &mut self.cluster.nodes[at] {
                    for block in blocks {
                        node.landing.save(block);
                    }
                }
            }
            61..66 => {
                let at = self.node();
                if let Some(node) = &mut self.cluster.nodes[at] {
                    node.landing.evict();
                }
            }
            66..68 => self.withdraw(),
            68..71 => self.crowd(),
            71..77 => {
                let (a, b) = self.pair();
                if self.random.below(3) == 0 {
                    self.cluster.network.move_on(endpoint(a), endpoint(b));
                    self.seen.count("moved", 1);
                } else {
                    self.cluster.network.reset(endpoint(a), endpoint(b));
                    self.seen.count("reset", 1);
                }
            }
            77..83 => {
                let (a, b) = self.pair();
                self.cluster.network.partition(endpoint(a), endpoint(b));
                self.split.insert((a, b));
                self.seen.count("partition", 1);
            }
            83..86 => {
                if let Some((a, b)) = self.split.pop_first() {
                    self.cluster.network.heal(endpoint(a), endpoint(b));
                }
            }
            86..89 => self.strike_registry(),
            89 => {
                // A NIC of everybody's is lost or back.
                let rails = 1 + self.random.below(3);
                self.cluster.network.set_rails(usize::try_from(rails).unwrap());
            }
            90..95 => self.crash(),
            95..98 => {
                // One thread stands still while its peers' do not.
                let (at, pause) = (self.node(), self.random.below(2500));
                self.cluster.pause(at, Duration::from_millis(pause));
                self.seen.count("paused node", 1);
            }
            _ => {
                // Every thread stands still, the network does not.
                let pause = Duration::from_millis(self.random.below(1500));
                self.cluster.network.advance_to(self.cluster.now() + pause);
                self.seen.count("stall", 1);
            }
        }
    }

    /// Whoever owns the memory of some blocks takes it back.
    fn withdraw(&mut self) {
        let (at, blocks, now) = (self.node(), self.blocks(), self.cluster.now());
        let Some(node) = &mut self.cluster.nodes[at] else { return };
        let lent = blocks.iter().filter(|block| node.pins(**block) > 0).count();
        self.seen.count("withdrawn in use", lent as u64);
        node.withdraw(node.withdrawals, &blocks, now);
    }

    /// The registry loses all, does not answer for a while, or not to one node.
    fn strike_registry(&mut self) {
        match self.random.below(4) {
            0 => {
                self.registry.restart();
                self.seen.count("registry lost", 1);
            }
            1 => {
                self.registry.is_down = !self.registry.is_down;
                self.seen.count("registry down", u64::from(self.registry.is_down));
            }
            2 => {
                let at = self.node();
                self.registry.cut.insert(at);
                self.seen.count("node cut from the registry", 1);
            }
            _ => drop(self.registry.cut.pop_first()),
        }
    }

    fn crash(&mut self) {
        let at = self.node();
        if self.cluster.nodes[at].is_some() {
            self.tally(at);
            self.cluster.crash(at);
            self.clients[at] = None;
            self.seen.count("crash", 1);
        }
        // Some come back at once, while their leases run.
        if self.random.below(2) == 0 {
            self.start(at);
            self.seen.count("restart", 1);
        }
    }

    pub(crate) fn start(&mut self, at: usize) {
        self.lives[at] += 1;
        self.cluster.start(at);
        self.clients[at] =
            Some(Client::new((at, self.lives[at]), self.cluster.node(at), self.pending_max));
    }

    /// Local readers pin all that a node holds: for a while it has no room for anything.
    fn crowd(&mut self) {
        let at = self.node();
        let Some(node) = &self.cluster.nodes[at] else { return };
        for view in node.residents() {
            if let Ok(found) = node.landing.store.pin(&view.key) {
                self.held.push((at, self.lives[at], found.id));
            }
        }
        self.seen.count("crowded node", 1);
    }

    /// A read by the registry's plans, or a fetch of blocks that the owner mostly has.
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
        if self.cluster.nodes[to].is_none() {
            return;
        }
        match self.random.below(8) {
            0..2 => {
                self.cluster.begin_fetch(to, from, &blocks);
                self.seen.count("direct fetch", 1);
            }
            2 => {
                self.begin_read(to, &blocks, Source::From(node_id(from)));
                self.seen.count("read of one node", 1);
            }
            _ => self.begin_read(to, &blocks, Source::Anywhere),
        }
    }

    pub(crate) fn begin_read(&mut self, at: usize, blocks: &[u16], source: Source) {
        let (member, now) = (self.cluster.node(at), self.cluster.now());
        let client = self.clients[at].as_mut().unwrap();
        let pins = client.begin_read(blocks, source, member, now);
        self.held.extend(pins.into_iter().map(|id| (at, self.lives[at], id)));
        self.seen.count("planned read", 1);
    }

    /// Readers let go of what they got, some of them later.
    fn let_go_of_some(&mut self) {
        let mut kept = std::mem::take(&mut self.held);
        kept.retain(|held| self.random.below(3) > 0 || !self.let_go(*held));
        self.held = kept;
    }

    pub(crate) fn let_go(&self, (at, life, id): (usize, u64, ResidentId)) -> bool {
        if let Some(node) = &self.cluster.nodes[at]
            && self.lives[at] == life
        {
            node.landing.store.unpin(id).unwrap();
        }
        true
    }
}
