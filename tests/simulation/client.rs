//! What one start of a node has with the registry: it announces, and plans its reads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::cluster::ledger::Ledger;
use crate::cluster::{Member, block_of, key_of, node_id};
use crate::krate::peer::{FetchId, FetchOutcome, Fetched};
use crate::krate::protocol::door::Source;
use crate::krate::registry::announcing::{AnnounceOptions, Announcing, Answer, Call};
use crate::krate::registry::{NodeIdentity, Presence};
use crate::krate::route::{Lend, Lent, Read, Sources, Step};
use crate::krate::types::{BlockKey, NodeEpoch, ResidentId, Timestamp};
use crate::readers::Readers;
use crate::registry::{Ask, Registry, Sender, Told};
use crate::seen::Seen;

/// A read that runs.
#[derive(Debug)]
struct Reading {
    read: Read,
    /// Its blocks, by position.
    blocks: Vec<u16>,
}

/// One start of a node, towards its registry.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) sender: Sender,
    pub(crate) announcing: Announcing,
    ledger: Arc<Ledger>,
    sources: Sources,
    pub(crate) readers: Readers,
    reads: BTreeMap<u64, Reading>,
    lends: BTreeMap<FetchId, (u64, Lend)>,
    last_read: u64,
    /// Times that a hint raised a rank.
    pub(crate) raised: u64,
}

impl Client {
    pub(crate) fn new((at, life): (usize, u64), member: &Member, pending_max: usize) -> Self {
        let address = format!("node-{at}:1");
        let identity = NodeIdentity { node: node_id(at), epoch: NodeEpoch(life), address };
        let options = AnnounceOptions {
            heartbeat_interval: Duration::from_millis(400),
            flush_interval: Duration::from_millis(2),
            batch: 4,
            in_flight: 1 + at % 4,
            backoff: (Duration::from_millis(5), Duration::from_millis(200)),
            pending_max,
            ..AnnounceOptions::default()
        };
        Self {
            announcing: Announcing::new(&identity, options),
            sources: Sources::new(identity.node),
            sender: Sender { at, identity },
            ledger: Arc::clone(&member.landing.ledger),
            readers: Readers::default(),
            reads: BTreeMap::new(),
            lends: BTreeMap::new(),
            last_read: 0,
            raised: 0,
        }
    }

    /// Begins a read of these blocks. Answers the pins of those that are here, or were led by it and
    /// turned out to be.
    pub(crate) fn begin_read(
        &mut self,
        blocks: &[u16],
        source: Source,
        member: &Member,
        now: Timestamp,
    ) -> Vec<ResidentId> {
        self.last_read += 1;
        let (number, mut pins) = (self.last_read, Vec::new());
        let mut led = self.readers.join(blocks);
        led.retain(|block| match member.landing.store.pin(&key_of(*block)) {
            Ok(found) => {
                self.readers.landed(*block);
                pins.push(found.id);
                false
            }
            Err(_not_here) => true,
        });
        let keys = led.iter().map(|block| key_of(*block)).collect();
        let read = Read::new(keys, source, &self.sources, now);
        self.readers.begun(number, &led);
        self.reads.insert(number, Reading { read, blocks: led });
        pins
    }

    /// When it has something to do by itself.
    pub(crate) fn next(&mut self, now: Timestamp) -> Timestamp {
        self.announcing.handle_news(&mut &*self.ledger);
        self.announcing.next_wake(now)
    }

    /// Makes the calls that are due. `true` where a fetch began.
    pub(crate) fn turn(
        &mut self,
        member: &mut Member,
        registry: &mut Registry,
        now: Timestamp,
        seen: &mut Seen,
    ) -> bool {
        let ledger = &*self.ledger;
        while let Some(call) = self.announcing.poll_call(&mut &*ledger, ledger, now) {
            let afresh = matches!(call, Call::Heartbeat { presence: Presence::Afresh, .. });
            let again = afresh && self.announcing.registration().is_some();
            seen.count("registered afresh", u64::from(again));
            registry.send(&self.sender, Ask::Call(call), now, seen);
        }
        let before = self.lends.len();
        let mut over = Vec::new();
        for (number, reading) in &mut self.reads {
            loop {
                match reading.read.poll(&mut self.sources, now) {
                    Step::Ask(question) => {
                        let ask = Ask::Plan { read: *number, question };
                        registry.send(&self.sender, ask, now, seen);
                    }
                    Step::Lend(lend) => {
                        let owner = usize::from(lend.owner.0[0]) - 1;
                        let blocks: Vec<u16> =
                            lend.positions.iter().map(|at| reading.blocks[*at]).collect();
                        let id = member.fetch(owner, &blocks, now);
                        self.lends.insert(id, (*number, lend));
                        seen.count("planned lend", 1);
                    }
                    Step::Wait => break,
                    Step::Over => {
                        over.push(*number);
                        break;
                    }
                }
            }
        }
        for number in over {
            self.reads.remove(&number);
            self.readers.ended(number);
        }
        self.lends.len() > before
    }

    /// A fetch is over, perhaps one of a read.
    pub(crate) fn handle_fetched(
        &mut self,
        fetched: &Fetched,
        registry: &mut Registry,
        now: Timestamp,
        seen: &mut Seen,
    ) {
        let Some((number, lend)) = self.lends.remove(&fetched.id) else { return };
        let reading = self.reads.get_mut(&number).unwrap();
        let lent = Lent {
            outcomes: fetched.outcomes.clone(),
            load: fetched.load,
            reach: None,
            suspended: fetched.suspended.map(|suspended| suspended.until),
        };
        let keys = reading.read.handle_lent(&lend, &lent, &mut self.sources, now);
        for (at, outcome) in lend.positions.iter().zip(&fetched.outcomes) {
            if matches!(outcome, FetchOutcome::Ready { .. }) {
                self.readers.landed(reading.blocks[*at]);
            }
        }
        if !keys.is_empty() {
            let (owner, epoch) = (lend.owner, lend.epoch);
            registry.send(&self.sender, Ask::Report { owner, epoch, keys }, now, seen);
        }
    }

    /// The registry's answer, or that none came.
    pub(crate) fn handle(
        &mut self,
        told: Told,
        member: &Member,
        registry: &mut Registry,
        (now, seen): (Timestamp, &mut Seen),
    ) {
        match told {
            Told::Call(answer) => self.handle_answer(&answer, member, registry, (now, seen)),
            Told::Plan { read, plan } => {
                seen.count("no plan", u64::from(plan.is_none()));
                if let Some(reading) = self.reads.get_mut(&read) {
                    reading.read.handle_plan(plan.as_ref(), &mut self.sources, now);
                }
            }
            Told::Nothing => {}
        }
    }

    fn handle_answer(
        &mut self,
        answer: &Answer,
        member: &Member,
        registry: &mut Registry,
        (now, seen): (Timestamp, &mut Seen),
    ) {
        let at = self.sender.at;
        if let Answer::Heartbeat(Ok(beat)) = answer {
            if self.announcing.registration() == Some(beat.registration) {
                // Two lists of one moment: they differ only where somebody else changed one of them.
                let drifted = !beat.drifted.is_empty();
                let harmed = registry.harmed.contains(&at);
                assert!(!drifted || harmed, "node {at} and its list differ");
                seen.count("drift found", u64::from(drifted));
            } else {
                registry.harmed.remove(&at);
            }
            seen.count("sole owner told", beat.sole.len() as u64);
        }
        let store = &member.landing.store;
        let mut raised = 0;
        let mut hint = |key: &BlockKey, owners: u32| {
            let Some(before) = store.lookup(key) else { return };
            if store.owner_hint(key, owners) == Some(true) {
                let view = member.view(block_of(key)).unwrap();
                let is_touched = member.landing.fetched.contains(&view.id) || view.requesters > 0;
                assert!(!is_touched, "a hint moved a block that something else had moved");
                raised += u64::from(view.rank > before.rank);
                seen.count("owner hint", 1);
            }
        };
        self.announcing.handle_answer(answer, &mut hint, now);
        self.raised += raised;
    }

    /// Everything is told, and nothing is being read.
    pub(crate) fn assert_at_rest(&mut self) {
        let at = self.sender.at;
        assert!(self.announcing.is_connected(), "node {at} does not reach the registry");
        assert!(!self.announcing.is_resyncing(), "node {at} still announces again");
        self.announcing.handle_news(&mut &*self.ledger);
        assert!(self.announcing.pending().is_empty(), "node {at} has changes to tell");
        assert!(self.reads.is_empty() && self.lends.is_empty(), "node {at} still reads");
        self.readers.assert_at_rest();
    }

    pub(crate) fn tally(&self, seen: &mut Seen) {
        let (full, partial) = self.announcing.resyncs();
        seen.count("announced all", full);
        seen.count("drift repaired", partial);
        seen.count("shared fetch", self.readers.followed);
    }

    /// Its number at the registry.
    pub(crate) fn registration(&self) -> u64 {
        self.announcing.registration().map_or(0, |known| known.number)
    }

    /// Blocks that it is listed for.
    pub(crate) fn keys(member: &Member) -> BTreeSet<BlockKey> {
        member.residents().into_iter().map(|view| view.key).collect()
    }
}
