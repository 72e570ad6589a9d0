//! How connections come up: three messages, two proofs, one connection per node.
//!
//! The acceptor proves itself in `Welcome`, the initiator in `Confirm`; each proof covers both
//! nonces. Only then is a peer admitted to READs and lends. Two connections that were made at once:
//! the node with the lower [`NodeId`] refuses the other's `Hello` while its own attempt runs; the
//! other one gives up its own when it meets a connection that is up. Nothing unauthenticated can end
//! a connection that is up.

use super::Peers;
use super::connection::{Connection, Remote, State};
use super::fetch::Violation;
use super::landing::Landing;
use super::outbox::Output;
use crate::event::Event;
use crate::fabric::ConnectionId;
use crate::protocol::{
    GoodbyeReason, Introduction, Message, RegionEntry, RejectReason, Role, decode,
};
use crate::types::{NodeId, Scope, Timestamp};

/// Messages that may wait on a connection that is proven and not up yet: an eager initiator's first
/// lends.
pub(super) const HELD_MAX: usize = 32;

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
        match result {
            Ok(id) => {
                self.connections.insert(id, Connection::new(State::Opening { node }, now));
            }
            Err(scope) => self.requester.handle_unreachable(node, scope, &*self.sink),
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
        let hello = self.introduction();
        if let Some(connection) = self.connections.get_mut(&on)
            && let State::Opening { node } = connection.state
        {
            connection.state = State::Greeting { node, hello };
            connection.heard = now;
            self.outbox.send(on, &Message::Hello(hello));
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
            (
                Some(&State::Greeting { node, hello }),
                Message::Welcome { introduction: welcome, proof, regions },
            ) => {
                if welcome.node != node
                    || proof != self.local.secret.proof(Role::Acceptor, &hello, &welcome)
                {
                    self.reject(on, RejectReason::Authentication);
                    // Nobody waits for a node that is not the one it should be.
                    self.requester.handle_unreachable(node, Scope::Peer, &*self.sink);
                    return Ok(());
                }
                if self.up_to(node).is_some() {
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
                self.close(on, Scope::Peer);
                let other = self.connections.values().any(|c| c.leads_to() == Some(node));
                if reason != RejectReason::Duplicate && !other {
                    self.requester.handle_unreachable(node, Scope::Peer, &*self.sink);
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
        let ours_is_on_its_way = self.dialing.contains(&hello.node)
            || self.connections.values().any(|connection| match connection.state {
                State::Opening { node } | State::Greeting { node, .. } => node == hello.node,
                _ => false,
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

    fn reject(&mut self, on: ConnectionId, reason: RejectReason) {
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
        let remote = Remote { connection: on, node, epoch, requester, regions };
        let earlier: Vec<_> = self
            .connections
            .iter()
            .filter(|(id, other)| {
                **id != on
                    && (matches!(&other.state, State::Proven { remote, .. } if remote.node == node)
                        || other.remote().is_some_and(|other| other.node == node))
            })
            .map(|(id, _)| *id)
            .collect();
        for id in earlier {
            self.close(id, Scope::Local);
        }
        if let Some(connection) = self.connections.get_mut(&on) {
            connection.state = State::Proven { remote, held: Vec::new() };
        }
        self.raise_proven(landing, now);
    }

    /// Brings up proven connections that nothing stands in the way of any more: no other connection
    /// of their node or requester has access, and no lease of the requester is being cut.
    pub(super) fn raise_proven(&mut self, landing: &mut L, now: Timestamp) {
        let proven = |connection: &Connection| match &connection.state {
            State::Proven { remote, .. } => Some((remote.node, remote.requester)),
            _ => None,
        };
        let ready: Vec<_> = self
            .connections
            .iter()
            .filter_map(|(id, connection)| Some((*id, proven(connection)?)))
            .filter(|(_, (node, requester))| {
                let in_the_way = |other: &Connection| {
                    other
                        .remote()
                        .is_some_and(|other| other.node == *node || other.requester == *requester)
                };
                !self.connections.values().any(in_the_way) && !self.holder.is_cutting(*requester)
            })
            .map(|(id, _)| id)
            .collect();
        for on in ready {
            self.raise(on, landing, now);
        }
    }

    fn raise(&mut self, on: ConnectionId, landing: &mut L, now: Timestamp) {
        let Some(connection) = self.connections.get_mut(&on) else {
            return;
        };
        let closing = State::Closing { remote: None, scope: Scope::Local };
        let (remote, held) = match std::mem::replace(&mut connection.state, closing) {
            State::Proven { remote, held } => (remote, held),
            other => {
                connection.state = other;
                return;
            }
        };
        let (node, epoch, requester) = (remote.node, remote.epoch, remote.requester);
        connection.state = State::Up { remote };
        self.outbox.push(Output::Admit { connection: on });
        self.holder.supersede(requester, epoch);
        self.sink.emit(Event::PeerConnected);
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
