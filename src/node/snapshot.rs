//! The state of a node at one moment, as `kvrail stat`, the door and metrics show it.

use std::time::Duration;

use super::Inner;
use crate::fabric::{Lack, Rail};
use crate::health::{BreakerState, Entry};
use crate::protocol::door::stat::{
    GpuStat, HealthStat, LackStat, NodeStat, PeerStat, PoolStat, RailStat, RegistryStat,
    RequesterStat, ResidentStat, StatReport,
};
use crate::protocol::millis;
use crate::registry::RegistryError;
use crate::runtime::announce::AnnouncerState;
use crate::runtime::data::{PeerSnapshot, Stopped};
use crate::types::{Scope, Timestamp};

/// How long the data thread may take to say who is connected; it goes round every second at least.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(2);

/// The state of a node at one moment.
#[derive(Debug, Clone)]
pub struct NodeSnapshot {
    /// As `kvrail stat` shows it.
    pub report: StatReport,
    /// Peers and leases.
    pub peers: PeerSnapshot,
    /// Whether the registry answered the last call.
    pub registry_up: bool,
}

impl NodeSnapshot {
    /// Peers that are left alone for the way to them, for what they did, and because they leave.
    #[must_use]
    pub fn suspended(&self) -> [u64; 3] {
        let count = |which: &dyn Fn(&Entry) -> bool| {
            self.peers.health.iter().filter(|entry| which(entry)).count() as u64
        };
        let open = |scope: Scope| {
            count(&|entry| entry.scope == scope && entry.state != BreakerState::Closed)
        };
        [open(Scope::Path), open(Scope::Peer), count(&|entry| entry.leaving)]
    }
}

/// Milliseconds from one moment to another.
fn millis_until(at: Timestamp, now: Timestamp) -> u64 {
    u64::try_from(at.since(now).as_millis()).unwrap_or(u64::MAX)
}

fn health_stat(entry: &Entry, now: Timestamp) -> HealthStat {
    let millis = |at: Timestamp| millis_until(at, now);
    let state = if entry.leaving { "leaving" } else { entry.state.as_str() };
    HealthStat {
        scope: entry.scope.as_str().to_owned(),
        peer: entry.peer.map(|peer| peer.to_string()).unwrap_or_default(),
        local_nic: entry.path.local.0,
        peer_nic: entry.path.remote.0,
        state: state.to_owned(),
        reason: entry.cause.map(|cause| cause.as_str().to_owned()).unwrap_or_default(),
        failures: entry.weighed.0,
        weighed: entry.weighed.1,
        next_probe_ms: entry.next_probe.map(millis),
        bytes_per_second: entry.rate,
        outstanding_bytes: entry.load.outstanding_bytes,
        pause_ms: entry.load.pause_ms,
    }
}

fn registry_stat(endpoint: &str, announcer: &AnnouncerState) -> RegistryStat {
    let error = announcer.last_error.as_ref().filter(|_| !announcer.connected);
    let state = match error.map(RegistryError::scope) {
        _ if announcer.connected => "connected",
        None | Some(Scope::Path) => "unreachable",
        Some(_) => "refused",
    };
    RegistryStat {
        endpoint: endpoint.to_owned(),
        state: state.to_owned(),
        error: error.map(ToString::to_string).unwrap_or_default(),
        pending: announcer.queued as u64,
    }
}

fn rail_stat(rail: &Rail) -> RailStat {
    RailStat {
        local: rail.local.clone(),
        remote: rail.remote.clone(),
        queue_pairs: rail.queue_pairs,
        reason: rail.reason.clone(),
    }
}

fn lack_stat(lack: &Lack) -> LackStat {
    LackStat { local: lack.local.clone(), reason: lack.reason.as_str().to_owned() }
}

impl Inner {
    /// The node's state now.
    pub async fn snapshot(&self) -> NodeSnapshot {
        // A data thread that hangs is to be seen here, not waited for.
        let peers = tokio::time::timeout(SNAPSHOT_TIMEOUT, self.data.snapshot()).await;
        let unknown = |Stopped| PeerSnapshot {
            no_shared_memory: "the data thread does not answer".to_owned(),
            ..PeerSnapshot::default()
        };
        let peers = peers.unwrap_or(Err(Stopped)).unwrap_or_else(unknown);
        let stats = self.residency.count().await;
        let announcer = self.announcer.state();
        let pools = self.residency.spaces().map(|space| {
            let usage = space.usage();
            let free_bytes = usage.bytes.saturating_sub(usage.used);
            PoolStat { id: space.id().0, bytes: usage.bytes, free_bytes }
        });
        let report = StatReport {
            node: NodeStat {
                id: self.identity.node.to_string(),
                epoch: self.identity.epoch.0,
                requester: self.requester.to_string(),
                address: self.identity.address.clone(),
                policy: self.residency.store.config().policy.kind.to_string(),
                transport: self.transport.to_owned(),
                no_shared_memory: peers.no_shared_memory.clone(),
                heartbeat_age_ms: millis(self.heartbeat_age()).into(),
            },
            pools: pools.collect(),
            gpu: self
                .gpu
                .as_ref()
                .map(|(stat, _)| GpuStat { lost: self.residency.device_is_lost(), ..stat.clone() }),
            residents: ResidentStat {
                blocks: stats.residents.into(),
                capacity: stats.capacity.into(),
                bytes: stats.bytes,
                pinned: stats.pinned.into(),
                ranks: stats.by_rank.iter().skip(1).map(|count| u64::from(*count)).collect(),
            },
            in_place: self.in_place.stat(&self.residency.lost_gpus()),
            requesters: peers
                .leases
                .iter()
                .map(|usage| RequesterStat {
                    name: usage.requester.to_string(),
                    leases: usage.usage.leases,
                    blocks: usage.usage.blocks,
                    bytes: usage.usage.bytes,
                })
                .collect(),
            registry: registry_stat(&self.registry_name, &announcer),
            peers: peers
                .connected
                .iter()
                .map(|peer| PeerStat {
                    id: peer.node.to_string(),
                    requester: peer.requester.to_string(),
                    state: "connected".to_owned(),
                    transport: peer.transport.to_owned(),
                    rails: peer.rails.iter().map(rail_stat).collect(),
                    lacks: peer.lacks.iter().map(lack_stat).collect(),
                    widens_in_ms: peer.widens.map(|at| millis_until(at, peers.at)),
                })
                .collect(),
            health: peers.health.iter().map(|entry| health_stat(entry, peers.at)).collect(),
        };
        NodeSnapshot { report, peers, registry_up: announcer.connected }
    }

    /// Whether the registry answered the last call.
    #[must_use]
    pub fn registry_up(&self) -> bool {
        self.announcer.state().connected
    }

    /// Whether the data thread runs and goes round: the bound is [`crate::limits::HEARTBEAT_MAX`].
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.data.is_alive() && self.data.heartbeat().is_steady(self.clock.now())
    }

    /// How long ago the data thread last went round.
    #[must_use]
    pub fn heartbeat_age(&self) -> Duration {
        self.data.heartbeat().age(self.clock.now())
    }
}
