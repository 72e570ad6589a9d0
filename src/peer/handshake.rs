//! How connections come up: three messages, two proofs, one connection per node.
//!
//! The acceptor proves itself in `Welcome`, the initiator in `Confirm`; each proof covers both
//! nonces. Only then is a peer admitted to READs and lends. Nothing unauthenticated can end a
//! connection that is up, or keep one from coming up.
//!
//! **Two connections that were made at once.** The one that the node with the lower [`NodeId`]
//! opened stays, and both ends come to that on their own, in whatever order the steps of the two
//! fall: the lower node refuses the other's `Hello` while its own is out, and lets a proven
//! connection of the other wait while its own is up; the higher node closes its own for a proven
//! one of the lower. A waiting connection is not always a loser, though: the other end may have lost
//! the one that is up here. So the lower node pings that one: either it turns out to be dead, and
//! the waiting one takes its place, or the other end closes the waiting one.

use super::Peers;
use super::connection::{Beside, Connection, Remote, State};
use super::fetch::Violation;
use super::landing::Landing;
use super::layouts::HeardLayouts;
use super::outbox::Output;
use crate::event::{Event, Widening};
use crate::fabric::ConnectionId;
use crate::protocol::{
    GoodbyeReason, Introduction, Message, RegionEntry, RejectReason, Role, decode,
};
use crate::types::{NodeId, RequesterIndex, Scope, Timestamp};

/// Bytes of messages that may wait on a connection that is proven and not up yet: an eager
/// initiator's replays and first lends, of which each has up to 17 KiB. More closes it.
pub(super) const HELD_BYTES_MAX: usize = 1 << 20;

/// The other end of a connection, after its proof.
struct Peer<'a> {
    connection: ConnectionId,
    introduction: &'a Introduction,
    regions: &'a [RegionEntry],
}

impl<L: Landing> Peers<L> {
    /// The fabric's answer to [`Output::Connect`].
    pub fn handle_connecting(
        &mut self,
        node: NodeId,
        result: Result<ConnectionId, Scope>,
        now: Timestamp,
    ) {
        self.dialing.retain(|other| *other != node);
        let beside = self.widening.take_dialed(node, now);
        match result {
            Ok(id) => {
                let opening = State::Opening { node };
                self.connections.insert(id, Connection { beside, ..Connection::new(opening, now) });
            }
            Err(_) if beside.is_some() && self.up_to(node).is_some() => self.tell(Widening::Failed),
            Err(scope) => {
                self.requester.handle_unreachable(node, scope, (&*self.sink, now));
                self.judge(now);
            }
        }
    }

    fn introduction(&mut self) -> Introduction {
        self.nonces += 1;
        let digest = blake3::keyed_hash(&self.local.nonce_seed, &self.nonces.to_le_bytes());
        let mut nonce = [0; 16];
        nonce.iter_mut().zip(digest.as_bytes()).for_each(|(to, from)| *to = *from);
        let (node, epoch, requester) = (self.local.node, self.local.epoch, self.local.requester);
        Introduction { node, epoch, requester, nonce }
    }

    pub(super) fn handle_connected(&mut self, on: ConnectionId, now: Timestamp) {
        let Some(connection) = self.connections.get_mut(&on) else { return };
        connection.heard = now;
        match connection.beside {
            Some(Beside { than, .. }) => {
                self.outbox.push(Output::Compare { connection: on, than });
            }
            None => self.greet(on),
        }
    }

    /// The fabric has connected us: we introduce ourselves.
    pub(super) fn greet(&mut self, on: ConnectionId) {
        let hello = self.introduction();
        if let Some(connection) = self.connections.get_mut(&on)
            && let State::Opening { node } = connection.state
        {
            connection.state = State::Greeting { node, hello };
            let message = match connection.beside {
                Some(_) => Message::Beside(hello),
                None => Message::Hello(hello),
            };
            self.outbox.send(on, &message);
        }
    }

    pub(super) fn handle_handshake(
        &mut self,
        on: ConnectionId,
        message: Message<'_>,
        landing: &mut L,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let state = self.connections.get(&on).map(|connection| &connection.state);
        match (state, message) {
            (Some(State::Accepted), Message::Hello(hello)) => self.handle_hello(on, hello),
            (Some(State::Accepted), Message::Beside(hello)) => {
                self.handle_hello(on, hello);
                self.note_beside(on, hello.node, now);
            }
            (
                Some(&State::Greeting { node, hello }),
                Message::Welcome { introduction: welcome, proof, regions },
            ) => {
                if welcome.node != node
                    || proof != self.local.secret.proof(Role::Acceptor, &hello, &welcome)
                {
                    self.reject(on, RejectReason::Authentication);
                    // Nobody waits for a node that is not the one it should be.
                    let told = (&*self.sink, now);
                    self.requester.handle_unreachable(node, Scope::Peer, told);
                    return Ok(());
                }
                if self.is_superfluous(on, node) {
                    self.outbox.send(on, &Message::Goodbye { reason: GoodbyeReason::Replaced });
                    self.close(on, Scope::Local);
                    return Ok(());
                }
                let proof = self.local.secret.proof(Role::Initiator, &hello, &welcome);
                let own = &self.local.regions;
                self.outbox.send(on, &Message::Confirm { proof, regions: own });
                let peer = Peer { connection: on, introduction: &welcome, regions };
                self.handle_proven(peer, landing, now);
            }
            (Some(&State::Challenged { hello, welcome }), Message::Confirm { proof, regions }) => {
                if proof != self.local.secret.proof(Role::Initiator, &hello, &welcome) {
                    self.reject(on, RejectReason::Authentication);
                    return Ok(());
                }
                let peer = Peer { connection: on, introduction: &hello, regions };
                self.handle_proven(peer, landing, now);
            }
            (Some(&State::Greeting { node, .. }), Message::Reject { reason }) => {
                if reason == RejectReason::Draining {
                    self.health.handle_leaving(node, now);
                }
                self.close(on, Scope::Peer);
                // The peer's own attempt is on its way: fetches wait for that one.
                if reason == RejectReason::Duplicate
                    && let Some(connection) = self.connections.get_mut(&on)
                    && let State::Closing { led_to, .. } = &mut connection.state
                {
                    *led_to = None;
                }
            }
            (Some(_), Message::Goodbye { .. } | Message::Reject { .. }) => {
                self.close(on, Scope::Peer);
            }
            _ => return Err(Violation),
        }
        Ok(())
    }

    fn handle_hello(&mut self, on: ConnectionId, hello: Introduction) {
        // Only an attempt that has reached the peer counts: one that never does must not keep the
        // peer's own from coming up.
        let ours_is_on_its_way = self.connections.values().any(|connection| {
            matches!(connection.state, State::Greeting { node, .. } if node == hello.node)
        });
        if hello.node == self.local.node {
            self.reject(on, RejectReason::SameNode);
        } else if self.draining {
            self.reject(on, RejectReason::Draining);
        } else if ours_is_on_its_way && self.local.node < hello.node {
            self.reject(on, RejectReason::Duplicate);
        } else {
            let welcome = self.introduction();
            let proof = self.local.secret.proof(Role::Acceptor, &hello, &welcome);
            let regions = &self.local.regions;
            self.outbox.send(on, &Message::Welcome { introduction: welcome, proof, regions });
            if let Some(connection) = self.connections.get_mut(&on) {
                connection.state = State::Challenged { hello, welcome };
            }
        }
    }

    /// Whether a connection of ours to `node`, about to be proven, is one too many.
    fn is_superfluous(&self, on: ConnectionId, node: NodeId) -> bool {
        let than = self.than(on);
        self.connections.iter().any(|(id, other)| match &other.state {
            State::Up { remote } => remote.node == node && than != Some(*id),
            State::Proven { remote, .. } => {
                remote.node == node && !other.ours && node < self.local.node
            }
            _ => false,
        })
    }

    pub(super) fn reject(&mut self, on: ConnectionId, reason: RejectReason) {
        self.outbox.send(on, &Message::Reject { reason });
        self.close(on, Scope::Peer);
    }

    /// The peer is who it says. It is numbered as a requester, and an earlier connection of the same
    /// node goes.
    fn handle_proven(&mut self, peer: Peer<'_>, landing: &mut L, now: Timestamp) {
        let Peer { connection: on, introduction: peer, regions } = peer;
        if let Some((_, node)) = self.requesters.get(peer.requester)
            && node != peer.node
            && self.up_to(node).is_some()
        {
            return self.reject(on, RejectReason::RequesterInUse);
        }
        let Some(requester) = self.requesters.index(peer.requester, peer.node) else {
            return self.reject(on, RejectReason::RequestersExhausted);
        };
        let (node, epoch) = (peer.node, peer.epoch);
        let regions = regions.to_vec();
        let layouts = HeardLayouts::default();
        let remote = Remote { connection: on, node, epoch, requester, regions, layouts };
        let ours = self.connections.get(&on).is_some_and(|connection| connection.ours);
        let than = self.than(on);
        let mut earlier = Vec::new();
        for (&id, other) in &mut self.connections {
            let (State::Proven { remote, .. } | State::Up { remote }) = &other.state else {
                continue;
            };
            if id == on || remote.node != node {
                continue;
            }
            let is_up = matches!(other.state, State::Up { .. });
            if is_up && than == Some(id) && remote.epoch == epoch {
                // It goes when nothing runs on it any more.
                continue;
            }
            // Of two at once ours stays; another start of the peer knows nothing of ours.
            let stays = other.ours && !ours && self.local.node < node && remote.epoch == epoch;
            if !stays {
                earlier.push(id);
            } else if is_up {
                other.pinged = now;
                self.outbox.send(id, &Message::Ping { token: now.as_nanos() });
            }
        }
        for id in earlier {
            self.close(id, Scope::Local);
        }
        if let Some(connection) = self.connections.get_mut(&on) {
            connection.state = State::Proven { remote, held: Vec::new() };
        }
        self.begin_rest(on, now);
        self.raise_proven(landing, now);
    }

    /// Brings up proven connections that nothing stands in the way of any more: no other connection
    /// of their node or requester has access, and no lease of the requester is being cut.
    pub(super) fn raise_proven(&mut self, landing: &mut L, now: Timestamp) {
        // One at a time: each that comes up may be in the way of the next.
        while let Some(on) = self.next_to_raise() {
            self.raise(on, landing, now);
        }
    }

    /// A proven connection that nothing is in the way of; of two to one node, ours, which is there
    /// only where it is the one that stays.
    fn next_to_raise(&self) -> Option<ConnectionId> {
        let free = |connection: &Connection| match &connection.state {
            State::Proven { remote, .. } => {
                let in_the_way = |other: &Remote| {
                    other.node == remote.node || other.requester == remote.requester
                };
                !self.holder.is_cutting(remote.requester)
                    && !self.connections.values().filter_map(Connection::remote).any(in_the_way)
            }
            _ => false,
        };
        let free = self.connections.iter().filter(|(_, connection)| free(connection));
        free.max_by_key(|(_, connection)| connection.ours).map(|(id, _)| *id)
    }

    /// Refuses proven connections of other nodes under the identity of a requester that is up.
    fn reject_rivals(&mut self, up: NodeId, requester: RequesterIndex) {
        let rival = |connection: &Connection| match &connection.state {
            State::Proven { remote, .. } => remote.requester == requester && remote.node != up,
            _ => false,
        };
        let rivals = self.connections.iter().filter(|(_, connection)| rival(connection));
        for on in rivals.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.reject(on, RejectReason::RequesterInUse);
        }
    }

    fn raise(&mut self, on: ConnectionId, landing: &mut L, now: Timestamp) {
        let Some(connection) = self.connections.get_mut(&on) else {
            return;
        };
        let closing = State::Closing { remote: None, led_to: None, scope: Scope::Local };
        let (remote, held) = match std::mem::replace(&mut connection.state, closing) {
            State::Proven { remote, held } => (remote, held),
            other => {
                connection.state = other;
                return;
            }
        };
        let (node, epoch, requester) = (remote.node, remote.epoch, remote.requester);
        connection.state = State::Up { remote };
        let was_beside = connection.beside.take().is_some() && connection.ours;
        self.outbox.push(Output::Admit { connection: on });
        self.holder.supersede(requester, epoch);
        self.sink.emit(Event::PeerConnected);
        if was_beside {
            self.tell(Widening::Wider);
        }
        self.reject_rivals(node, requester);
        self.health.handle_up(node);
        self.requester.handle_up(node, on, &mut self.outbox, now);
        for bytes in held {
            let result = match decode(&bytes) {
                Ok(message) => self.handle_up_message(on, message, landing, now),
                Err(_) => Err(Violation),
            };
            if result.is_err() {
                return self.handle_violation(on);
            }
        }
    }
}
