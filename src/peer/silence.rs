//! Peers that say nothing (DESIGN §7).
//!
//! Whoever was asked for something answers, or at least says that it is there. While a fetch waits for a
//! connection, an answer or the end of its READs, and neither a message nor a completion comes from that
//! peer, it is asked for a sign of life after [`limits::SILENCE_ASK`]; where none comes by
//! [`limits::SILENCE_MAX`] it is left alone, and what only waits for its words ends. So a peer that hangs,
//! or that a cut link hides, costs its readers less than a second, however long an answer or a transfer
//! may take: one that is merely slow answers the ping, and each READ that ends is a sign of life as well.
//! READs that are under way have a deadline of their own and go on: a NIC may serve them while its
//! node's thread stands still.
//!
//! A connection on which nothing is asked is pinged now and then, and closed where that goes unanswered.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Peers;
use super::connection::{Connection, State};
use super::landing::Landing;
use crate::fabric::ConnectionId;
use crate::limits;
use crate::protocol::Message;
use crate::types::{NodeId, Scope, Timestamp};

/// Of whom something is asked, and on which connections.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Nodes to which a connection is waited for.
    pub(super) of: BTreeSet<NodeId>,
    /// Connections on which something is waited for.
    pub(super) on: BTreeSet<ConnectionId>,
}

/// A peer that has been silent for too long.
struct Silent {
    on: ConnectionId,
    node: NodeId,
    waited: Duration,
    is_up: bool,
}

/// What one look at a connection finds.
enum Finding {
    Fine,
    Ask,
    Silent(Duration),
}

impl Connection {
    /// How long it has been silent although it was asked, and what to do about it.
    fn listen(&mut self, is_asked: bool, most: Duration, now: Timestamp) -> Finding {
        if !is_asked {
            self.asked = None;
            return Finding::Fine;
        }
        let since = (*self.asked.get_or_insert(now)).max(self.heard);
        let (waited, is_up) = (now.since(since), matches!(self.state, State::Up { .. }));
        let was_pinged = self.pinged > since && now.since(self.pinged) >= limits::SILENCE_ASK;
        if waited >= most && (was_pinged || !is_up) {
            // Should it go on like this it is told again as late.
            self.asked = Some(now);
            Finding::Silent(waited)
        } else if is_up && waited >= limits::SILENCE_ASK && self.pinged <= since {
            self.pinged = now;
            Finding::Ask
        } else {
            Finding::Fine
        }
    }
}

impl<L: Landing> Peers<L> {
    /// When [`Self::check_answers`] has something to do.
    pub(super) fn next_look(&self) -> Option<Timestamp> {
        self.requester.is_asking().then(|| self.looked + limits::SILENCE_LOOK)
    }

    /// Leaves peers alone that were asked and say nothing.
    pub(super) fn check_answers(&mut self, now: Timestamp) {
        if self.next_look().is_none_or(|at| now < at) {
            return;
        }
        self.looked = now;
        let (asked, opening) = (self.requester.asked(), self.requester.opening());
        let mut silent = Vec::new();
        for (&on, connection) in &mut self.connections {
            let (node, is_asked, most) = match &connection.state {
                State::Up { remote } => (remote.node, asked.on.contains(&on), Duration::ZERO),
                State::Opening { node } => (*node, asked.of.contains(node), opening),
                State::Greeting { node, .. } => (*node, asked.of.contains(node), Duration::ZERO),
                _ => continue,
            };
            let is_up = matches!(connection.state, State::Up { .. });
            match connection.listen(is_asked, limits::SILENCE_MAX + most, now) {
                Finding::Fine => {}
                Finding::Ask => {
                    self.outbox.send(on, &Message::Ping { token: now.as_nanos() });
                }
                Finding::Silent(waited) => silent.push(Silent { on, node, waited, is_up }),
            }
        }
        for Silent { on, node, waited, is_up } in silent {
            self.requester.handle_silent((node, on), waited, (&*self.sink, now));
            if !is_up {
                // It has led nowhere; the next probe makes one of its own.
                self.close(on, Scope::Path);
            }
        }
    }

    /// Closes handshakes that are not over in time, and connections that nothing was heard on for long.
    pub(super) fn check_silence(&mut self, now: Timestamp) {
        let mut silent = Vec::new();
        for (&id, connection) in &mut self.connections {
            if connection.is_shaking_hands() {
                if now.since(connection.opened) >= limits::HANDSHAKE_TIMEOUT {
                    silent.push(id);
                }
            } else if matches!(connection.state, State::Up { .. }) {
                let quiet = now.since(connection.heard);
                if quiet >= limits::PING_INTERVAL * 3 {
                    silent.push(id);
                } else if quiet.min(now.since(connection.pinged)) >= limits::PING_INTERVAL {
                    connection.pinged = now;
                    self.outbox.send(id, &Message::Ping { token: now.as_nanos() });
                }
            }
        }
        for id in silent {
            self.close(id, Scope::Path);
        }
    }

    /// A probe was not answered: what led to its peer ends, but for a connection that READs are under way
    /// on. The next probe makes an attempt of its own, which finds a peer that is back at once, while an
    /// old connection waits for the network to repeat what it has lost.
    pub(super) fn give_up_ways(&mut self, node: NodeId) {
        let led = self.connections.iter().filter(|(on, connection)| {
            connection.leads_to() == Some(node)
                && match connection.state {
                    State::Up { .. } => !self.requester.reads_on(**on),
                    _ => connection.ours && connection.is_shaking_hands(),
                }
        });
        for on in led.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.close(on, Scope::Path);
        }
    }
}
