//! Whom to leave alone, and for how long: DESIGN §7. Sans-IO: time is an argument.
//!
//! - Three scopes, never mixed. A **path** is a local NIC and a NIC of a peer; a **peer** is what its
//!   paths lead to; a **local NIC** is ours. [`Cause::scope`] says which one a failure blames. A fault
//!   of our own and a flush that follows from another failure blame no peer.
//! - Each has a [`BreakerConfig`] breaker, which opens on evidence within a window: by count and
//!   ratio, or by a run without a success. Outcomes that come together are one piece of evidence. A
//!   peer that was asked and says nothing at all ([`Verdict::Silent`]) needs no second piece. An open
//!   breaker is probed ([`Health::poll_probe`]) after a back-off that doubles with each failed
//!   probe, has an upper bound, and decays while all is well. Nothing is given up for good.
//! - Stale keys are no fault: the first access error of a peer only means that its connection is to
//!   be made anew, which refreshes them. A second one without a success in between blames the peer.
//! - A peer that says that it leaves is left alone without blame.
//! - A path's breaker stops nothing as long as another path is open: its fabric chooses among them. It
//!   closes when something goes over it well. With the last one the peer is left alone, and probed.
//! - The local NIC's breaker is shown and stops nothing: there is no way around it.
//!
//! What did not get as far as a READ counts on [`Path::MESSAGES`]. There is no way around that one: READs
//! need lends, and lends are messages.
//!
//! What a peer said about its load, and the rate of transfers from it, are kept here too, because
//! they last as long.
#![forbid(unsafe_code)]

mod breaker;
mod pace;
mod words;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub use breaker::{BreakerConfig, BreakerState};
pub use words::{Cause, Entry, Suspended, Verdict};

use crate::event::Event;
use crate::limits;
use crate::types::{Load, Nic, NodeId, Path, Paths, Scope, Timestamp};
use breaker::{Breaker, Outcome};
use pace::Pace;

/// The longest pause that a peer can ask for: what says more is obeyed for so long.
pub const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How long a peer that said that it leaves is left alone, unless it comes back under another start.
const LEAVING: Duration = Duration::from_secs(5);

/// A peer that nobody has asked for so long is forgotten.
const FORGET: Duration = Duration::from_secs(300);

/// A breaker, and the last failure that it was blamed for.
#[derive(Debug)]
struct Blamed {
    breaker: Breaker,
    cause: Option<Cause>,
    /// When something last spoke for it or against it.
    weighed: Timestamp,
}

impl Blamed {
    fn new(config: BreakerConfig, now: Timestamp) -> Self {
        Self { breaker: Breaker::new(config, now), cause: None, weighed: now }
    }

    /// It works: a breaker whose probe is due closes, as a probe that was good closes it; whether it
    /// did.
    fn works(&mut self, now: Timestamp) -> bool {
        self.breaker.begin_probe(now);
        self.breaker.state() == BreakerState::HalfOpen && self.breaker.end_probe(true, now)
    }
}

#[derive(Debug)]
struct Peer {
    own: Blamed,
    paths: BTreeMap<Path, Blamed>,
    pace: Pace,
    load: Load,
    paused_until: Timestamp,
    leaving_until: Option<Timestamp>,
    /// Whether keys were refused since the last success.
    stale: bool,
    /// When somebody last wanted something of it.
    wanted: Timestamp,
}

impl Peer {
    fn new(config: BreakerConfig, now: Timestamp) -> Self {
        Self {
            own: Blamed::new(config, now),
            paths: BTreeMap::new(),
            pace: Pace::default(),
            load: Load::default(),
            paused_until: Timestamp::ZERO,
            leaving_until: None,
            stale: false,
            wanted: now,
        }
    }

    /// All of its breakers: those of its paths, and its own.
    fn breakers(&mut self) -> impl Iterator<Item = (Option<Path>, &mut Blamed)> {
        let paths = self.paths.iter_mut().map(|(path, blamed)| (Some(*path), blamed));
        paths.chain(std::iter::once((None, &mut self.own)))
    }

    /// Why it is not to be used: its own breaker, that of its messages, or those of all its paths.
    fn open(&self) -> Option<(Scope, &Breaker)> {
        if !self.own.breaker.is_closed() {
            return Some((Scope::Peer, &self.own.breaker));
        }
        let of_messages = self.paths.get(&Path::MESSAGES).map(|path| &path.breaker);
        if let Some(breaker) = of_messages.filter(|breaker| !breaker.is_closed()) {
            return Some((Scope::Path, breaker));
        }
        let of_reads = self.paths.iter().filter(|(path, _)| **path != Path::MESSAGES);
        let mut of_reads = of_reads.map(|(_, path)| &path.breaker);
        let first = of_reads.next()?;
        let all_open = !first.is_closed() && of_reads.all(|breaker| !breaker.is_closed());
        all_open.then_some((Scope::Path, first))
    }

    fn is_leaving(&self, now: Timestamp) -> bool {
        self.leaving_until.is_some_and(|until| now < until)
    }
}

/// The health of everything that one data thread talks to. See the module's documentation.
#[derive(Debug)]
pub struct Health {
    config: BreakerConfig,
    peers: BTreeMap<NodeId, Peer>,
    nics: BTreeMap<Nic, Blamed>,
    events: VecDeque<Event>,
}

impl Health {
    /// Nothing is known yet, and all is well.
    #[must_use]
    pub fn new(config: BreakerConfig) -> Self {
        Self { config, peers: BTreeMap::new(), nics: BTreeMap::new(), events: VecDeque::new() }
    }

    /// Whether something may be asked of a peer now. It counts as wanted.
    ///
    /// # Errors
    /// [`Suspended`] says why not, and when to ask again.
    pub fn ask(&mut self, node: NodeId, now: Timestamp) -> Result<(), Suspended> {
        let Some(peer) = self.peers.get_mut(&node) else { return Ok(()) };
        peer.wanted = now;
        if let Some(until) = peer.leaving_until.filter(|until| now < *until) {
            return Err(Suspended { scope: Scope::Request, until });
        }
        match peer.open() {
            None => Ok(()),
            Some((scope, breaker)) => {
                // A probe that runs ends within moments.
                let until = breaker.next_probe().unwrap_or(now + self.config.probe_first);
                Err(Suspended { scope, until: until.max(now + self.config.incident) })
            }
        }
    }

    /// Why a peer was last left alone, and until when; that may be over.
    #[must_use]
    pub fn suspended(&self, node: NodeId) -> Option<Suspended> {
        let peer = self.peers.get(&node)?;
        let leaving = peer.leaving_until.map(|until| Suspended { scope: Scope::Request, until });
        leaving.or_else(|| {
            let (scope, breaker) = peer.open()?;
            Some(Suspended { scope, until: breaker.next_probe()? })
        })
    }

    /// Until when a peer asked to be spared; `None` where it did not, or that is over.
    #[must_use]
    pub fn paused(&self, node: NodeId, now: Timestamp) -> Option<Timestamp> {
        let peer = self.peers.get(&node)?;
        Some(peer.paused_until).filter(|until| now < *until)
    }

    /// What a peer last said about its load.
    #[must_use]
    pub fn load(&self, node: NodeId) -> Load {
        self.peers.get(&node).map_or_else(Load::default, |peer| peer.load)
    }

    /// How long a transfer of so many bytes from a peer may take, at most `bound`.
    #[must_use]
    pub fn allowance(&self, node: NodeId, bytes: u64, bound: Duration) -> Duration {
        self.peers.get(&node).map_or(bound, |peer| peer.pace.allowance(bytes, bound))
    }

    /// A peer said how busy it is.
    pub fn handle_load(&mut self, node: NodeId, load: Load, now: Timestamp) {
        let peer = self.peer(node, now);
        peer.load = load;
        let pause = Duration::from_millis(load.pause_ms.into()).min(PAUSE_MAX);
        peer.paused_until = now + pause;
    }

    /// A peer said that it leaves.
    pub fn handle_leaving(&mut self, node: NodeId, now: Timestamp) {
        self.peer(node, now).leaving_until = Some(now + LEAVING);
    }

    /// A connection to a peer is up: whoever was leaving is back, under another start.
    pub fn handle_up(&mut self, node: NodeId) {
        if let Some(peer) = self.peers.get_mut(&node) {
            peer.leaving_until = None;
        }
    }

    /// Takes note of how something ended that was asked of a peer, and went over these paths or failed
    /// on them.
    pub fn handle_verdict(
        &mut self,
        (node, paths): (NodeId, &Paths),
        verdict: Verdict,
        now: Timestamp,
    ) {
        let peer = self.peer(node, now);
        let (cause, waited) = match verdict {
            Verdict::Answered => (None, Duration::ZERO),
            Verdict::Sent { bytes, took } => {
                peer.pace.note(bytes, took);
                peer.stale = false;
                (None, took)
            }
            Verdict::StaleKeys if peer.stale => (Some(Cause::KeysRefused), Duration::ZERO),
            Verdict::StaleKeys => {
                peer.stale = true;
                return;
            }
            // What a peer that leaves takes with it is nobody's fault.
            Verdict::Failed { .. } if peer.is_leaving(now) => return,
            Verdict::Failed { cause, waited } => (Some(cause), waited),
            Verdict::Silent { waited } => return self.handle_silent(node, waited, now),
        };
        let of_messages = [Path::MESSAGES];
        let paths = if paths.is_empty() { &of_messages } else { paths.as_slice() };
        match cause.map(Cause::scope) {
            Some(Scope::Local) => {
                let nic = |path: &Path| if *path == Path::MESSAGES { Nic(0) } else { path.local };
                paths.iter().for_each(|path| self.handle_own_fault(nic(path), now));
            }
            Some(Scope::Request) => {}
            _ => self.weigh((node, paths), cause, waited, now),
        }
    }

    /// Nothing more is asked of a peer that does not say anything.
    fn handle_silent(&mut self, node: NodeId, waited: Duration, now: Timestamp) {
        let config = self.config;
        let peer = self.peer(node, now);
        if peer.is_leaving(now) {
            return;
        }
        let of_messages = peer.paths.entry(Path::MESSAGES);
        let blamed = of_messages.or_insert_with(|| Blamed::new(config, now));
        (blamed.cause, blamed.weighed) = (Some(Cause::NoAnswer), now);
        if blamed.breaker.trip(waited, now) {
            self.events.push_back(Event::BreakerOpened { scope: Scope::Path });
        }
    }

    /// A success speaks for the paths, that of its messages and the peer; a failure against those that
    /// it blames.
    fn weigh(
        &mut self,
        (node, paths): (NodeId, &[Path]),
        cause: Option<Cause>,
        waited: Duration,
        now: Timestamp,
    ) {
        let config = self.config;
        let Some(peer) = self.peers.get_mut(&node) else { return };
        let is_used = peer.open().is_none();
        let outcome = Outcome { good: cause.is_none(), waited };
        for path in paths {
            peer.paths.entry(*path).or_insert_with(|| Blamed::new(config, now)).weighed = now;
        }
        let is_on_it =
            |path: &Path| paths.contains(path) || (outcome.good && *path == Path::MESSAGES);
        let on_it = peer.paths.iter_mut().filter(|(path, _)| is_on_it(path));
        let on_it = on_it.map(|(_, blamed)| (Scope::Path, blamed));
        for (scope, blamed) in on_it.chain([(Scope::Peer, &mut peer.own)]) {
            match cause {
                Some(cause) if cause.scope() == scope => blamed.cause = Some(cause),
                Some(_) => continue,
                None => {}
            }
            if blamed.breaker.record(outcome, now) {
                self.events.push_back(Event::BreakerOpened { scope });
            }
            if outcome.good && is_used && blamed.works(now) {
                self.events.push_back(Event::BreakerClosed { scope });
            }
        }
    }

    /// A fault of our own: it blames the NIC that it happened on, and no peer.
    pub fn handle_own_fault(&mut self, nic: Nic, now: Timestamp) {
        let config = self.config;
        let blamed = self.nics.entry(nic).or_insert_with(|| Blamed::new(config, now));
        blamed.cause = Some(Cause::Own);
        let outcome = Outcome { good: false, waited: Duration::ZERO };
        if blamed.breaker.record(outcome, now) {
            self.events.push_back(Event::BreakerOpened { scope: Scope::Local });
        }
    }

    /// READs that were posted on a NIC have completed well.
    pub fn handle_own_success(&mut self, nic: Nic, now: Timestamp) {
        let Some(blamed) = self.nics.get_mut(&nic) else { return };
        blamed.breaker.record(Outcome { good: true, waited: Duration::ZERO }, now);
        // There is nothing to probe a NIC with but its use.
        if blamed.works(now) {
            self.events.push_back(Event::BreakerClosed { scope: Scope::Local });
        }
    }

    /// A peer to probe now; answered by [`Self::handle_probe`]. Forgets peers that nobody wants, and
    /// paths that nothing goes over.
    pub fn poll_probe(&mut self, now: Timestamp) -> Option<NodeId> {
        self.peers.retain(|_, peer| peer.open().is_none() || now.since(peer.wanted) < FORGET);
        self.peers.iter_mut().find_map(|(node, peer)| {
            if peer.open().is_none() {
                peer.paths.retain(|_, path| now.since(path.weighed) < FORGET);
                return None;
            }
            let mut due = false;
            for (_, blamed) in peer.breakers() {
                due |= blamed.breaker.begin_probe(now);
            }
            due.then_some(*node)
        })
    }

    /// How a probe ended that went over these paths, or over any. A fault of our own says nothing about
    /// the peer, and what went over one path nothing about another; but that it went over one at all says
    /// that messages are answered.
    pub fn handle_probe(
        &mut self,
        (node, paths): (NodeId, &Paths),
        result: Result<(), Cause>,
        now: Timestamp,
    ) {
        let Some(peer) = self.peers.get_mut(&node) else { return };
        let mut closed = Vec::new();
        for (path, blamed) in peer.breakers() {
            if blamed.breaker.state() != BreakerState::HalfOpen {
                continue;
            }
            let scope = if path.is_some() { Scope::Path } else { Scope::Peer };
            let went_over = |it: Path| paths.is_empty() || paths.as_slice().contains(&it);
            let is_answered = path.is_some_and(|it| it == Path::MESSAGES && !paths.is_empty());
            let was_tried = is_answered || path.is_none_or(went_over);
            match if is_answered { Ok(()) } else { result } {
                Err(Cause::Own) => blamed.breaker.put_probe_off(now),
                _ if !was_tried => blamed.breaker.put_probe_off(now),
                Err(cause) => {
                    blamed.cause = Some(cause);
                    blamed.breaker.end_probe(false, now);
                }
                Ok(()) if blamed.breaker.end_probe(true, now) => {
                    closed.push(Event::BreakerClosed { scope });
                }
                Ok(()) => {}
            }
        }
        self.events.push_back(Event::Probed { good: result.is_ok() });
        self.events.extend(closed);
    }

    /// When [`Self::poll_probe`] has something to say.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let of_peer = |peer: &Peer| {
            peer.open()?;
            let paths = peer.paths.values().filter_map(|path| path.breaker.next_probe());
            paths.chain(peer.own.breaker.next_probe()).min()
        };
        self.peers.values().filter_map(of_peer).min()
    }

    /// What happened since the last call.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Forgets what speaks against one peer, or against all and this node's NICs; how many breakers
    /// were not closed.
    pub fn reset(&mut self, node: Option<NodeId>, now: Timestamp) -> u32 {
        let mut reset = 0;
        for (known, peer) in &mut self.peers {
            if node.is_none_or(|node| node == *known) {
                for (_, blamed) in peer.breakers() {
                    reset += u32::from(blamed.breaker.reset(now));
                    blamed.cause = None;
                }
                (peer.leaving_until, peer.stale) = (None, false);
                peer.paused_until = Timestamp::ZERO;
            }
        }
        if node.is_none() {
            for blamed in self.nics.values_mut() {
                reset += u32::from(blamed.breaker.reset(now));
                blamed.cause = None;
            }
        }
        reset
    }

    /// All that is known, peers first.
    pub fn report(&self, now: Timestamp) -> impl Iterator<Item = Entry> + '_ {
        let peers = self.peers.iter().flat_map(move |(node, peer)| {
            let own = Entry {
                rate: peer.pace.rate(),
                load: peer.load,
                leaving: peer.is_leaving(now),
                ..entry(Scope::Peer, Some(*node), Path::default(), &peer.own)
            };
            let paths = peer.paths.iter();
            std::iter::once(own)
                .chain(paths.map(|(path, it)| entry(Scope::Path, Some(*node), *path, it)))
        });
        let nics = self.nics.iter().map(|(nic, blamed)| {
            let path = Path { local: *nic, remote: Nic::default() };
            entry(Scope::Local, None, path, blamed)
        });
        peers.chain(nics)
    }

    fn peer(&mut self, node: NodeId, now: Timestamp) -> &mut Peer {
        if self.peers.len() >= limits::CONNECTIONS_MAX && !self.peers.contains_key(&node) {
            // The one that was wanted least lately goes, whatever is known of it.
            let oldest = self.peers.iter().min_by_key(|(_, peer)| peer.wanted);
            if let Some(oldest) = oldest.map(|(node, _)| *node) {
                self.peers.remove(&oldest);
            }
        }
        let config = self.config;
        let peer = self.peers.entry(node).or_insert_with(|| Peer::new(config, now));
        peer.wanted = peer.wanted.max(now);
        peer
    }
}

fn entry(scope: Scope, peer: Option<NodeId>, path: Path, blamed: &Blamed) -> Entry {
    Entry {
        scope,
        peer,
        path,
        state: blamed.breaker.state(),
        leaving: false,
        cause: blamed.cause,
        weighed: blamed.breaker.weighed(),
        next_probe: blamed.breaker.next_probe(),
        rate: None,
        load: Load::default(),
    }
}
