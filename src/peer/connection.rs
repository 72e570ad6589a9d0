//! One connection to a peer: how far its handshake has come.

use std::collections::BTreeMap;

use super::Peers;
use super::landing::Landing;
use super::layouts::HeardLayouts;
use super::outbox::Output;
use crate::fabric::ConnectionId;
use crate::lease::Borrower;
use crate::protocol::{Introduction, RegionEntry};
use crate::types::{NodeEpoch, NodeId, RequesterId, RequesterIndex, Scope, Timestamp};

/// A peer that has proved who it is.
#[derive(Debug, Clone)]
pub(super) struct Remote {
    pub(super) connection: ConnectionId,
    pub(super) node: NodeId,
    pub(super) epoch: NodeEpoch,
    pub(super) requester: RequesterIndex,
    /// What it lends from: every loan is checked against them.
    pub(super) regions: Vec<RegionEntry>,
    /// How its blocks lie that do not lie in one piece, as far as it has said so.
    pub(super) layouts: HeardLayouts,
}

impl Remote {
    pub(super) fn borrower(&self) -> Borrower {
        Borrower { requester: self.requester, epoch: self.epoch }
    }
}

/// ```text
/// ours:    Opening --Connected--> Greeting --Welcome--> Proven --alone--> Up --> Closing
/// theirs:  Accepted --Hello--> Challenged --Confirm--> Proven --alone--> Up --> Closing
/// ```
#[derive(Debug)]
pub(super) enum State {
    /// The fabric connects us to this node.
    Opening { node: NodeId },
    /// Our `Hello` is out.
    Greeting { node: NodeId, hello: Introduction },
    /// A peer has connected and not spoken yet.
    Accepted,
    /// Our `Welcome` is out.
    Challenged { hello: Introduction, welcome: Introduction },
    /// Both ends have proved themselves; an earlier connection of the same node, or a cut of the
    /// same requester, must end first. Messages that come meanwhile wait.
    Proven { remote: Remote, held: Vec<Vec<u8>> },
    /// In use.
    Up { remote: Remote },
    /// To be closed, or closing: nothing that it says counts any more. `led_to` is the node for
    /// which fetches may have waited for it.
    Closing { remote: Option<Remote>, led_to: Option<NodeId>, scope: Scope },
}

/// What a connection that is made beside another one waits for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beside {
    /// The one whose place it is to take, which was up when this one began.
    pub(super) than: ConnectionId,
    /// Once it is proven: until when that one must be at rest.
    pub(super) until: Timestamp,
    /// Whether the other end uses it already.
    pub(super) is_used: bool,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) state: State,
    /// Set while it is to take the place of one that is up.
    pub(super) beside: Option<Beside>,
    /// Whether this node opened it.
    pub(super) ours: bool,
    pub(super) opened: Timestamp,
    /// When its last sign of life came.
    pub(super) heard: Timestamp,
    /// When we last asked for one.
    pub(super) pinged: Timestamp,
    /// Since when something is asked on it, or for it, as far as it was looked; `None` while nothing is.
    pub(super) asked: Option<Timestamp>,
}

impl Connection {
    pub(super) fn new(state: State, now: Timestamp) -> Self {
        let ours = matches!(state, State::Opening { .. });
        Self { state, beside: None, ours, opened: now, heard: now, pinged: now, asked: None }
    }

    /// The peer that has access through it, or had until it began to close.
    pub(super) fn remote(&self) -> Option<&Remote> {
        match &self.state {
            State::Up { remote } | State::Closing { remote: Some(remote), .. } => Some(remote),
            _ => None,
        }
    }

    /// The node that this connection is up to, or will be; `None` for one that is closing, and for
    /// a peer that only claims to be that node.
    pub(super) fn leads_to(&self) -> Option<NodeId> {
        match &self.state {
            State::Opening { node } | State::Greeting { node, .. } => Some(*node),
            State::Proven { remote, .. } | State::Up { remote } => Some(remote.node),
            State::Accepted | State::Challenged { .. } | State::Closing { .. } => None,
        }
    }

    /// The node for which fetches may wait or run on it, also while it is closing.
    pub(super) fn led_to(&self) -> Option<NodeId> {
        match &self.state {
            State::Closing { led_to, .. } => *led_to,
            _ => self.leads_to(),
        }
    }

    /// Whether it still has to finish its handshake.
    pub(super) fn is_shaking_hands(&self) -> bool {
        matches!(
            self.state,
            State::Opening { .. }
                | State::Greeting { .. }
                | State::Accepted
                | State::Challenged { .. }
                | State::Proven { .. }
        )
    }
}

impl<L: Landing> Peers<L> {
    /// Asks for a connection to `node` unless one is on its way.
    pub(super) fn dial(&mut self, node: NodeId) {
        if !self.leads_to(node) {
            self.dialing.push(node);
            self.outbox.push(Output::Connect { node });
        }
    }

    /// Whether a connection to `node` is up or on its way.
    pub(super) fn leads_to(&self, node: NodeId) -> bool {
        self.dialing.contains(&node)
            || self.connections.values().any(|connection| connection.leads_to() == Some(node))
    }

    /// The connection to `node` that is up.
    #[must_use]
    pub fn up_to(&self, node: NodeId) -> Option<ConnectionId> {
        up_to(&self.connections, node)
    }

    /// Peers that are connected and authenticated, and their identities as readers.
    pub fn connected(&self) -> impl Iterator<Item = (NodeId, RequesterId)> + '_ {
        self.connections.values().filter_map(|connection| match &connection.state {
            State::Up { remote } => Some((remote.node, self.requesters.name(remote.requester)?)),
            _ => None,
        })
    }
}

/// The connection to a node that is up.
pub(super) fn up_to(
    connections: &BTreeMap<ConnectionId, Connection>,
    node: NodeId,
) -> Option<ConnectionId> {
    connections.iter().find_map(|(id, connection)| match &connection.state {
        State::Up { remote } if remote.node == node => Some(*id),
        _ => None,
    })
}
