//! The end of a run: all heals and comes to rest, and what is left must add up.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::client::Client;
use crate::cluster::{Noise, block_of, endpoint, key_of};
use crate::krate::event::{Event, LeaseEnd, Widening};
use crate::krate::health::BreakerState;
use crate::krate::protocol::door::Source;
use crate::world::{BLOCKS, World};

impl World {
    /// Heals networks and registry, starts the dead, lets go of every pin, and waits for all to be
    /// over.
    pub(crate) fn come_to_rest(&mut self) {
        while let Some((a, b)) = self.split.pop_first() {
            self.cluster.network.heal(endpoint(a), endpoint(b));
        }
        (self.registry.faults, self.registry.is_down) = (false, false);
        self.registry.cut.clear();
        for at in 0..self.lives.len() {
            if self.cluster.nodes[at].is_none() {
                self.start(at);
            }
        }
        // All have registered by then, and nothing is repeated any more.
        self.run_for(Duration::from_secs(5));
        self.harm_lists();
        // What was withdrawn goes when the last reader lets go of it.
        self.let_go_of_all();
        // The longest that anything waits: a lease that is renewed to the end of its reads, a cut,
        // and the silence of a peer that died unheard. Within this, twelve heartbeats find and mend
        // what the lists have wrong.
        self.run_for(Duration::from_secs(15));
        self.let_go_of_all();
        self.assert_owners_are_true();
        self.read_what_somebody_has();
    }

    fn let_go_of_all(&mut self) {
        for held in std::mem::take(&mut self.held) {
            self.let_go(held);
        }
    }

    /// Some lists lose a block, or gain one that its node does not hold.
    fn harm_lists(&mut self) {
        for at in 0..self.lives.len() {
            if self.random.below(4) == 0 {
                let block = u16::try_from(self.random.below(BLOCKS)).unwrap();
                let client = self.clients[at].as_ref().unwrap();
                let harm = (key_of(block), client.registration());
                self.registry.harm(&client.sender, harm);
                self.seen.count("list harmed", 1);
            }
        }
    }

    /// The registry lists exactly those who hold a block, and counts them so.
    fn assert_owners_are_true(&self) {
        let now = self.cluster.now();
        let nodes = 0..self.lives.len();
        let held: Vec<BTreeSet<_>> =
            nodes.clone().map(|at| Client::keys(self.cluster.node(at))).collect();
        for block in 0..u16::try_from(BLOCKS).unwrap() {
            let key = key_of(block);
            let holders: BTreeSet<_> =
                nodes.clone().filter(|at| held[*at].contains(&key)).collect();
            let owners = self.registry.owners(&key, now);
            assert_eq!(owners, holders, "owners and holders of block {block}");
        }
        for at in nodes {
            let keys: Vec<_> = held[at].iter().copied().collect();
            let holders = keys.iter().map(|key| held.iter().filter(|it| it.contains(key)).count());
            let client = self.clients[at].as_ref().unwrap();
            let who = &client.sender.identity;
            let counts = self.registry.counts(who, (&keys, client.registration()), now);
            let counts = counts.into_iter().map(|owners| owners as usize);
            assert!(counts.eq(holders), "owner counts of node {at}");
        }
    }

    /// With all whole again, a read finds whatever anybody holds.
    fn read_what_somebody_has(&mut self) {
        for node in self.cluster.nodes.iter_mut().flatten() {
            node.noise = Noise::default();
        }
        for _ in 0..2 {
            let reader = usize::try_from(self.random.below(self.lives.len() as u64)).unwrap();
            let here = Client::keys(self.cluster.node(reader));
            let mut others = self.cluster.nodes.iter().flatten().flat_map(Client::keys);
            let Some(key) = others.find(|key| !here.contains(key)) else { continue };
            let block = block_of(&key);
            self.begin_read(reader, &[block], Source::Anywhere);
            self.run_for(Duration::from_secs(3));
            self.let_go_of_all();
            let got = self.cluster.node(reader).view(block).is_some();
            assert!(got, "node {reader} did not get block {block}, which another holds");
            self.seen.count("read at rest", 1);
        }
        self.assert_owners_are_true();
    }

    /// Nothing is left over, and ranks are what their histories say.
    pub(crate) fn account(&mut self) {
        for at in 0..self.lives.len() {
            self.tally(at);
            self.clients[at].as_mut().unwrap().assert_at_rest();
            let node = self.cluster.node(at);
            // The network is whole and everybody lives: nobody is left alone any more.
            let mut health = node.peers.health(self.cluster.now());
            let open = health.find(|entry| entry.state != BreakerState::Closed);
            assert_eq!(open, None, "node {at} still leaves somebody alone");
            assert_eq!(node.leases(), 0, "node {at} still lends");
            assert_eq!(node.peers.unfinished(), 0, "node {at} still fetches");
            let over = node.withdrawn.len() as u64;
            assert_eq!(over, node.withdrawals, "node {at} has not given back what it was to");
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

    /// Counts what one start of a node has seen, and holds it against its ranks.
    pub(crate) fn tally(&mut self, at: usize) {
        let (node, seen) = (self.cluster.node(at), &mut self.seen);
        let client = self.clients[at].as_ref().unwrap();
        client.tally(seen);
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
        let wider = Event::ConnectionWidened { outcome: Widening::Wider };
        seen.count("made wider", logged(wider));
        seen.count("pause obeyed", logged(Event::PauseObeyed));
        seen.count("evicted", node.landing.evicted);
        seen.count("withdrawn", node.landing.removed);
        seen.count("lost message", node.lost);
        seen.count("repeated message", node.repeated);
        let never = |which: Event, what| assert_eq!(logged(which), 0, "node {at} {what}");
        never(Event::ChecksumMismatch, "found by a checksum what a pin must prevent");
        never(Event::ProtocolViolation, "was told something that no node says");
        never(Event::StaleCompletion, "was told of a READ that it did not post");
        // Each commit of a reader that is new to a resident raises it by one, and so may a hint;
        // only recoveries (already resident) and hints lower it.
        let raised = |event: &Event| matches!(event, Event::RankMoved { from, to } if to > from);
        let mut readers = 0;
        for view in node.residents() {
            readers += u64::from(view.requesters);
        }
        readers += node.landing.readers_of_evicted;
        let steps = node.log.count(raised) as u64 - client.raised;
        // Nobody has counted the readers of what was withdrawn.
        let explained = if node.landing.removed == 0 { steps == readers } else { steps >= readers };
        assert!(explained, "node {at}: {steps} rank steps, {readers} readers");
        self.steps += steps;
        for blocks in 0..=6 {
            let landed = |event: &Event| match event {
                Event::TransferSucceeded { blocks: landed, .. } => *landed == blocks,
                _ => false,
            };
            self.landed += blocks * node.log.count(landed) as u64;
        }
        self.seen.count("rank step", steps);
    }
}
