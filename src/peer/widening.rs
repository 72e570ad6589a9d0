//! How a connection that lost a NIC takes it back.
//!
//! A connection goes over the pairs of NICs that carried data when it was made. Where its fabric says that
//! one that is made now could go over more, the end that opened it makes a second one beside it and moves
//! over; the other end asks for that by `Widen`, since it may not know the way here.
//!
//! ```text
//! Opening --Connected, wider--> Greeting --Welcome--> Proven --the old one is closed--> Up
//!    '-- no wider: closed                               '-- not at rest in time: closed
//! ```
//!
//! - **Make before break.** Nothing changes for the old connection until the new one is proven. Then both
//!   ends ask for nothing more on the old one, and let what runs on it end; new fetches wait. When nothing of
//!   ours is left on it, and the other end holds no lease of ours, we close it: no READ is cut short. A lend of
//!   the other end that crosses this is asked again on the new one ([`super::requester`]).
//! - **It costs no transfer.** Should the rest not come within [`limits::WIDEN_REST`], the new one is closed,
//!   and all goes on over the old one. Should the old one break, the new one is its successor as any
//!   other.
//! - **One at a time and paced.** The end that opened a connection is the only one that widens it. The pause
//!   after each attempt doubles, halves with time, is bounded, and differs from peer to peer ([`Pace`]).
//! - What is said on the new one says that the old one is gone at the other end: then it goes here, too.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Peers;
use super::connection::{Beside, Connection, State, up_to};
use super::fetch::{Fetch, Phase};
use super::landing::Landing;
use super::outbox::{Outbox, Output};
use super::requester::Requester;
use crate::event::{Event, Widening};
use crate::fabric::ConnectionId;
use crate::limits;
use crate::protocol::Message;
use crate::types::{NodeId, Scope, Timestamp};

/// When a peer's connection may be made anew to be wider.
#[derive(Debug)]
struct Pace {
    /// From when on one could be tried, as far as the NICs are concerned.
    wanted: Option<Timestamp>,
    /// Whether the peer asked for it.
    asked: bool,
    /// Not before this, because of earlier attempts.
    next: Timestamp,
    /// How long the next attempt keeps the one after it waiting.
    pause: Duration,
}

impl Pace {
    const fn new(now: Timestamp) -> Self {
        Self { wanted: None, asked: false, next: now, pause: limits::WIDEN_PAUSE }
    }

    /// Notes whether a wider connection could be had; whether to try one now. `spread` is this peer's
    /// share of what is spread over peers, out of 256.
    fn look(&mut self, could: bool, spread: u8, now: Timestamp) -> bool {
        self.wanted = match (could || self.asked, self.wanted) {
            (false, _) => None,
            (true, Some(wanted)) => Some(wanted),
            (true, None) => Some(now + limits::WIDEN_SETTLE + part(limits::WIDEN_SPREAD, spread)),
        };
        self.due().is_some_and(|due| due <= now)
    }

    /// When the next attempt is due.
    fn due(&self) -> Option<Timestamp> {
        self.wanted.map(|wanted| wanted.max(self.next))
    }

    /// An attempt begins.
    fn begin(&mut self, spread: u8, now: Timestamp) {
        let quiet = now.since(self.next).as_millis() / limits::WIDEN_DECAY.as_millis();
        let halved = u32::try_from(quiet).ok().and_then(|halvings| 1_u32.checked_shl(halvings));
        let pause = halved.map_or(Duration::ZERO, |by| self.pause / by).max(limits::WIDEN_PAUSE);
        self.next = now + pause + part(pause / 4, spread);
        self.pause = (pause * 2).min(limits::WIDEN_PAUSE_MAX);
        (self.wanted, self.asked) = (None, false);
    }

    /// Whether it is of no use any more: it says as much as a new one would, or its peer is gone.
    fn is_stale(&self, now: Timestamp) -> bool {
        now.since(self.due().unwrap_or(self.next)) >= limits::WIDEN_PAUSE_MAX
    }
}

/// So many 256ths of a time.
fn part(of: Duration, spread: u8) -> Duration {
    of * u32::from(spread) / 256
}

/// The attempts of one data thread.
#[derive(Debug, Default)]
pub(super) struct Widenings {
    paces: BTreeMap<NodeId, Pace>,
    /// Attempts that the fabric was asked for and has not answered for, and the connections that they
    /// are to replace.
    dialing: Vec<(NodeId, ConnectionId)>,
    /// Whether a proven connection may wait for another one's rest: looked at before each lend, so that
    /// connections need not be searched where none does.
    waits: bool,
}

impl Widenings {
    /// Whether an attempt that was asked for is one to make a connection wider.
    pub(super) fn take_dialed(&mut self, node: NodeId, now: Timestamp) -> Option<Beside> {
        let at = self.dialing.iter().position(|(other, _)| *other == node)?;
        let (_, than) = self.dialing.swap_remove(at);
        Some(Beside { than, until: now, is_used: false })
    }

    /// A peer says that its connection could be wider.
    pub(super) fn ask(&mut self, node: NodeId, now: Timestamp) {
        self.paces.entry(node).or_insert_with(|| Pace::new(now)).asked = true;
    }

    /// The connection to `node` on which something may be asked.
    pub(super) fn lends_on(
        &self,
        connections: &BTreeMap<ConnectionId, Connection>,
        node: NodeId,
    ) -> Option<ConnectionId> {
        let up = up_to(connections, node)?;
        let gives_way = self.waits
            && connections.values().any(|other| other.waits().is_some_and(|it| it.than == up));
        (!gives_way).then_some(up)
    }
}

impl Connection {
    /// What it waits for where it is proven and another one has its place.
    fn waits(&self) -> Option<Beside> {
        self.beside.filter(|_| matches!(self.state, State::Proven { .. }))
    }
}

impl<L: Landing> Peers<L> {
    /// Makes connections wider for which it is time: `could` says of which a fresh one would go over more
    /// NICs, as far as the fabric knows. To be called every [`limits::WIDEN_LOOK`].
    pub fn widen(&mut self, could: impl Fn(ConnectionId) -> bool, now: Timestamp) {
        self.widening.paces.retain(|_, pace| !pace.is_stale(now));
        if self.draining {
            return;
        }
        let up = self.connections.iter().filter_map(|(on, connection)| match &connection.state {
            State::Up { remote } => Some((*on, remote.node, connection.ours)),
            _ => None,
        });
        for (on, node, ours) in up.collect::<Vec<_>>() {
            let could = could(on);
            let paces = &mut self.widening.paces;
            if !could && !paces.contains_key(&node) || self.is_widening(node) {
                continue;
            }
            let spread = self.spread(node);
            let pace = self.widening.paces.entry(node).or_insert_with(|| Pace::new(now));
            // Only whoever opened the connection can be asked.
            pace.asked &= ours;
            if !pace.look(could, spread, now) {
                continue;
            }
            pace.begin(spread, now);
            if ours {
                self.widening.dialing.push((node, on));
                self.dialing.push(node);
                self.outbox.push(Output::Connect { node });
            } else {
                self.outbox.send(on, &Message::Widen);
            }
        }
    }

    /// When it is tried again to make the connection to a node wider; `None` where nothing speaks for it.
    #[must_use]
    pub fn widens(&self, node: NodeId) -> Option<Timestamp> {
        self.widening.paces.get(&node)?.due()
    }

    /// A number for each peer that differs from peer to peer, and from one start of this node to the next.
    fn spread(&self, node: NodeId) -> u8 {
        let [first, ..] = *blake3::keyed_hash(&self.local.nonce_seed, &node.0).as_bytes();
        first
    }

    /// Whether an attempt for this node is under way.
    fn is_widening(&self, node: NodeId) -> bool {
        self.dialing.contains(&node)
            || self.connections.values().any(|connection| {
                connection.beside.is_some() && connection.leads_to() == Some(node)
            })
    }

    /// The fabric's answer to [`Output::Compare`].
    pub fn handle_compared(&mut self, connection: ConnectionId, wider: bool) {
        let is_needed = !self.than(connection).is_some_and(|than| self.is_up(than));
        if wider || is_needed {
            return self.greet(connection);
        }
        if let Some(found) = self.connections.get_mut(&connection) {
            found.beside = None;
        }
        self.tell(Widening::InVain);
        self.close(connection, Scope::Local);
    }

    /// The connection whose place this one is to take.
    pub(super) fn than(&self, on: ConnectionId) -> Option<ConnectionId> {
        self.connections.get(&on)?.beside.map(|beside| beside.than)
    }

    /// Whether nothing new is to be asked on the connection that is up, and on which one it is.
    pub(super) fn lends_on(&self, node: NodeId) -> Option<ConnectionId> {
        self.widening.lends_on(&self.connections, node)
    }

    fn is_up(&self, on: ConnectionId) -> bool {
        self.connections.get(&on).is_some_and(|it| matches!(it.state, State::Up { .. }))
    }

    /// A peer, which has yet to prove who it is, says that this connection is beside another one.
    pub(super) fn note_beside(&mut self, on: ConnectionId, node: NodeId, now: Timestamp) {
        let than = self.up_to(node);
        if let Some((than, connection)) = than.zip(self.connections.get_mut(&on)) {
            connection.beside = Some(Beside { than, until: now, is_used: false });
        }
    }

    /// A connection is proven: where it is beside another one, that one shall come to rest. The end that
    /// opened it decides; the other one waits longer, lest it gives up what that end has decided for.
    pub(super) fn begin_rest(&mut self, on: ConnectionId, now: Timestamp) {
        let Some(connection) = self.connections.get_mut(&on) else { return };
        let patience = if connection.ours { 1 } else { 2 };
        if let Some(beside) = &mut connection.beside {
            beside.until = now + limits::WIDEN_REST * patience;
            self.widening.waits = true;
        }
    }

    /// Closes connections that are at rest, for those that wait beside them.
    pub(super) fn take_places(&mut self) {
        if !self.widening.waits {
            return;
        }
        let mut waits = false;
        let mut over = Vec::new();
        for connection in self.connections.values() {
            let (State::Proven { remote, .. }, Some(beside)) =
                (&connection.state, connection.waits())
            else {
                continue;
            };
            waits = true;
            let at_rest = || {
                !self.requester.is_busy_on(beside.than)
                    && self.holder.leases.usage(remote.requester).leases == 0
            };
            if self.is_up(beside.than) && (beside.is_used || connection.ours && at_rest()) {
                over.push(beside.than);
            }
        }
        self.widening.waits = waits;
        for on in over {
            self.close(on, Scope::Local);
        }
    }

    /// Gives up on connections whose places do not come free in time.
    pub(super) fn check_rest(&mut self, now: Timestamp) {
        let late = self.resting().filter(|(.., until)| *until <= now);
        for (on, node, _) in late.collect::<Vec<_>>() {
            self.close(on, Scope::Local);
            self.lend_again(node, now);
        }
    }

    /// When [`Self::check_rest`] has something to do.
    pub(super) fn rest_ends(&self) -> Option<Timestamp> {
        self.resting().map(|(.., until)| until).min()
    }

    /// Connections that wait for the rest of one that is up, for whom, and until when.
    fn resting(&self) -> impl Iterator<Item = (ConnectionId, NodeId, Timestamp)> + '_ {
        let any = self.connections.iter().filter(|_| self.widening.waits);
        any.filter_map(|(on, connection)| {
            let beside = connection.waits().filter(|beside| self.is_up(beside.than))?;
            Some((*on, connection.leads_to()?, beside.until))
        })
    }

    /// A connection has ended: where it was to take another one's place, fetches that waited for it go on
    /// over that one.
    pub(super) fn lend_again(&mut self, node: NodeId, now: Timestamp) {
        if let Some(up) = self.lends_on(node) {
            self.requester.lend_waiting((node, up), &mut self.outbox, now);
        }
    }

    /// A connection has ended: perhaps an attempt with it.
    pub(super) fn note_given_up(&self, connection: &Connection) {
        if connection.ours && connection.beside.is_some() {
            self.tell(Widening::Failed);
        }
    }

    pub(super) fn tell(&self, outcome: Widening) {
        self.sink.emit(Event::ConnectionWidened { outcome });
    }
}

impl<L: Landing> Requester<L> {
    /// Asks for what waits for a connection to `node`.
    pub(super) fn lend_waiting(
        &mut self,
        (node, connection): (NodeId, ConnectionId),
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        let timeout = self.config.answer_timeout;
        for (id, fetch) in &mut self.fetches {
            let waits = matches!(fetch.phase, Phase::Waiting) && fetch.held_until.is_none();
            if fetch.request.node == node && waits {
                fetch.lend(*id, (connection, timeout), outbox, now);
            }
        }
    }

    /// Whether a fetch or a probe runs on a connection.
    fn is_busy_on(&self, connection: ConnectionId) -> bool {
        let on_it = |fetch: &Fetch<_>| fetch.connection == Some(connection);
        self.fetches.values().any(on_it) || self.probes.any_on(connection)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::ZERO + Duration::from_secs(seconds)
    }

    /// Seconds at which attempts begin within so many, looked at each second.
    fn attempts(pace: &mut Pace, seconds: std::ops::Range<u64>) -> Vec<u64> {
        let due = |second: &u64| {
            let due = pace.look(true, 0, at(*second));
            if due {
                pace.begin(0, at(*second));
            }
            due
        };
        seconds.filter(due).collect()
    }

    #[test]
    fn a_nic_that_flaps_is_waited_for_until_it_has_settled() {
        let mut pace = Pace::new(at(100));
        let settle = limits::WIDEN_SETTLE;
        assert!(!pace.look(true, 0, at(100)));
        assert_eq!(pace.due(), Some(at(100) + settle));
        assert!(!pace.look(false, 0, at(102)) && pace.due().is_none(), "it went down again");
        assert!(!pace.look(true, 0, at(104)) && !pace.look(true, 0, at(106)));
        assert!(pace.look(true, 0, at(104) + settle));
        let mut other = Pace::new(at(104));
        assert!(!other.look(true, 128, at(104)));
        assert_eq!(other.due(), Some(at(104) + settle + limits::WIDEN_SPREAD / 2));
    }

    #[test]
    fn attempts_that_gain_nothing_become_rare_and_never_stop() {
        let mut pace = Pace::new(at(100));
        let tried = attempts(&mut pace, 100..4000);
        let gaps: Vec<u64> = tried.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.is_sorted(), "{gaps:?}");
        assert_eq!(gaps[..4], [5, 10, 20, 40]);
        assert_eq!(gaps.last(), Some(&limits::WIDEN_PAUSE_MAX.as_secs()));
    }

    #[test]
    fn the_pause_shrinks_while_nothing_is_tried() {
        let mut pace = Pace::new(at(100));
        let tried = attempts(&mut pace, 100..400);
        let long = pace.pause;
        assert!(long >= Duration::from_secs(160), "{tried:?} {long:?}");
        let quiet = at(400) + long + limits::WIDEN_DECAY * 2;
        pace.look(true, 0, quiet);
        pace.begin(0, quiet);
        assert!(pace.pause <= long, "{:?}", pace.pause);
        assert!(!pace.is_stale(quiet + limits::WIDEN_PAUSE_MAX));
        let after = quiet + limits::WIDEN_PAUSE_MAX * 3;
        assert!(pace.is_stale(after));
        pace.look(true, 0, after);
        pace.begin(0, after);
        assert_eq!(pace.pause, limits::WIDEN_PAUSE * 2, "as that of a new one");
    }

    #[test]
    fn what_a_peer_asks_for_is_tried_once() {
        let mut pace = Pace::new(at(1));
        pace.asked = true;
        assert!(!pace.look(false, 0, at(1)));
        assert!(pace.look(false, 0, at(1) + limits::WIDEN_SETTLE));
        pace.begin(0, at(5));
        assert!(!pace.look(false, 0, at(500)) && pace.due().is_none());
    }
}
