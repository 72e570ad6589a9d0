//! What the data thread tells of its peers.

use super::data::DataThread;
use super::in_place::InPlace;
use crate::fabric::{ConnectionId, Lack, LackReason, Rail, width};
use crate::health::Entry;
use crate::limits;
use crate::memory::ForeignFabric;
use crate::peer::LeaseUsage;
use crate::types::{NodeId, RequesterId, Timestamp};

/// A node that is connected and authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectedPeer {
    /// Who.
    pub node: NodeId,
    /// Its identity as a reader.
    pub requester: RequesterId,
    /// The transport of its connection.
    pub transport: &'static str,
    /// The pairs of NICs that it goes over.
    pub rails: Vec<Rail>,
    /// NICs of this node that it lost, or had to do without from the start.
    pub lacks: Vec<Lack>,
    /// When it is tried again to have it go over more NICs; `None` while none of those it lacks works.
    pub widens: Option<Timestamp>,
}

/// What peers look like now.
#[derive(Debug, Clone, Default)]
pub struct PeerSnapshot {
    /// Connected and authenticated nodes.
    pub connected: Vec<ConnectedPeer>,
    /// What each requester holds.
    pub leases: Vec<LeaseUsage>,
    /// The health of peers, paths and this node's NICs.
    pub health: Vec<Entry>,
    /// Why peers on this host are reached as all others are; empty where they are not.
    pub no_shared_memory: String,
    /// When this was so.
    pub at: Timestamp,
}

impl<F: ForeignFabric, L: InPlace> DataThread<F, L> {
    pub(super) fn snapshot(&self, now: Timestamp) -> PeerSnapshot {
        PeerSnapshot {
            connected: self.connected().collect(),
            leases: self.peers.lease_usage().collect(),
            health: self.peers.health(now).collect(),
            no_shared_memory: self.fabric.shared_memory().err().unwrap_or_default().to_owned(),
            at: now,
        }
    }

    fn connected(&self) -> impl Iterator<Item = ConnectedPeer> + '_ {
        self.peers.connected().filter_map(|(node, requester)| {
            let connection = self.peers.up_to(node)?;
            let transport = self.fabric.transport(connection);
            let rails = self.fabric.rails(connection);
            let lacks = self.fabric.lacks(connection);
            let widens = self.peers.widens(node);
            Some(ConnectedPeer { node, requester, transport, rails, lacks, widens })
        })
    }

    /// Once in a while: connections that lost a NIC get it back where it works again.
    pub(super) fn widen(&mut self, now: Timestamp) {
        if now < self.next_widen {
            return;
        }
        self.next_widen = now + limits::WIDEN_LOOK;
        let fabric = &self.fabric;
        let works = |lack: &Lack| lack.reason == LackReason::None;
        self.peers.widen(|on| fabric.lacks(on).iter().any(works), now);
    }

    pub(super) fn compare(&mut self, connection: ConnectionId, than: ConnectionId) {
        let [new, old] = [connection, than].map(|on| self.fabric.rails(on));
        self.peers.handle_compared(connection, width(&new) > width(&old));
    }
}
