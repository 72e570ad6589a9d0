//! How connections end, and what ends with them.

use super::Peers;
use super::connection::{Connection, State};
use super::landing::Landing;
use super::outbox::Output;
use crate::event::Event;
use crate::fabric::{CloseReason, ConnectionId};
use crate::protocol::{GoodbyeReason, Message};
use crate::types::{NodeId, RequesterIndex, Scope, Timestamp};

impl<L: Landing> Peers<L> {
    pub(super) fn handle_violation(&mut self, on: ConnectionId) {
        self.sink.emit(Event::ProtocolViolation);
        self.outbox.send(on, &Message::Goodbye { reason: GoodbyeReason::Violation });
        self.close(on, Scope::Peer);
    }

    /// Asks the fabric to break a connection; it counts as closing from now on.
    pub(super) fn close(&mut self, on: ConnectionId, scope: Scope) {
        if let Some(connection) = self.connections.get_mut(&on)
            && !matches!(connection.state, State::Closing { .. })
        {
            let (remote, led_to) = (connection.remote().cloned(), connection.leads_to());
            connection.state = State::Closing { remote, led_to, scope };
            self.outbox.push(Output::Close { connection: on });
        }
    }

    pub(super) fn handle_closed(
        &mut self,
        on: ConnectionId,
        reason: CloseReason,
        landing: &mut L,
        now: Timestamp,
    ) {
        let Some(connection) = self.connections.remove(&on) else {
            return;
        };
        let scope = match connection.state {
            State::Closing { scope, .. } => scope,
            _ => reason.scope(),
        };
        self.note_given_up(&connection);
        self.holder.handle_closed(on);
        let led_to = connection.led_to();
        if reason == CloseReason::Moved
            && let Some(node) = connection.leads_to()
            && self.is_needed(node, on)
        {
            // The other way is there: who waits for this peer goes on over it.
            self.dial(node);
        }
        let another = led_to.is_some_and(|node| self.leads_to(node));
        let told = (&*self.sink, now);
        self.requester.handle_closed(on, (scope, another), told);
        self.settle(landing, now);
        if let Some(remote) = connection.remote() {
            self.sink.emit(Event::PeerDisconnected { scope });
            let still_there = |other: &Connection| {
                other.remote().is_some_and(|other| other.requester == remote.requester)
            };
            if !self.connections.values().any(still_there) {
                self.holder.handle_cut(remote.requester);
                // What fell due meanwhile was lent over the connection that is gone: it must not
                // cost the next one.
                self.cut_expired(now);
            }
        }
        match led_to {
            Some(node) if !another => {
                self.requester.handle_unreachable(node, scope, (&*self.sink, now));
            }
            Some(node) if connection.beside.is_some() => self.lend_again(node, now),
            _ => {}
        }
        self.finish_cuts(landing, now);
    }

    /// Whether this node waits for a connection to another one, or for something on this one.
    fn is_needed(&self, node: NodeId, on: ConnectionId) -> bool {
        let requester = &self.requester;
        requester.waits_for(node)
            || requester.asked().on.contains(&on)
            || requester.probes.want(node, on)
    }

    /// Cuts off requesters whose leases have expired (invariant 2).
    pub(super) fn cut_expired(&mut self, now: Timestamp) {
        while let Some(requester) = self.holder.poll_cut(now) {
            if !self.holder.revoke_expired(requester, &mut self.outbox) {
                self.cut(requester);
            }
        }
    }

    /// Cuts off requesters whose keys did not end in time.
    pub(super) fn cut_overdue(&mut self, now: Timestamp) {
        while let Some(requester) = self.holder.poll_overdue(now) {
            self.cut(requester);
        }
    }

    /// Ends expired leases whose keys have all ended.
    pub(super) fn finish_cuts(&mut self, landing: &mut L, now: Timestamp) {
        while let Some(requester) = self.holder.poll_revoked() {
            self.holder.handle_cut(requester);
            self.cut_expired(now);
        }
        self.raise_proven(landing, now);
    }

    /// Closes all connections of a requester.
    fn cut(&mut self, requester: RequesterIndex) {
        let theirs = |connection: &Connection| {
            connection.remote().is_some_and(|remote| remote.requester == requester)
        };
        let cut: Vec<_> = self
            .connections
            .iter()
            .filter(|(_, connection)| theirs(connection))
            .map(|(id, _)| *id)
            .collect();
        if cut.is_empty() {
            self.holder.handle_cut(requester);
        }
        for connection in cut {
            self.close(connection, Scope::Peer);
        }
    }

    /// Says goodbye to everyone and closes.
    pub fn shut_down(&mut self) {
        let all: Vec<_> = self.connections.keys().copied().collect();
        for connection in all {
            self.outbox.send(connection, &Message::Goodbye { reason: GoodbyeReason::Shutdown });
            self.close(connection, Scope::Local);
        }
    }
}
