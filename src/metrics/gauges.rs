//! What is so now: set at each scrape, never on the data path.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use metrics::{Counter, Gauge, Recorder};

use super::families::{counter_of, gauge_of};
use crate::limits;
use crate::sync::lock;
use crate::types::{EvictionRank, RequesterId};

/// The use of one pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolGauge {
    /// Bytes in use.
    pub used: u64,
    /// All bytes.
    pub size: u64,
}

/// What one requester holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequesterGauge {
    /// Who.
    pub requester: RequesterId,
    /// Leases.
    pub leases: u64,
    /// Bytes under them.
    pub bytes: u64,
}

/// How many peers are left alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SuspendedGauge {
    /// For the way to them.
    pub path: u64,
    /// For what they did.
    pub peer: u64,
    /// Because they said that they leave.
    pub leaving: u64,
}

/// A node's state at one moment, as metrics show it.
#[derive(Debug, Clone, Default)]
pub struct GaugeSnapshot {
    /// Residents by rank, rank 1 first.
    pub residents: [u64; limits::RANK_MAX as usize],
    /// Residents that are pinned.
    pub pinned: u64,
    /// The pools, in the order of the configuration.
    pub pools: Vec<PoolGauge>,
    /// Requesters that hold leases; one that holds none may be left out.
    pub requesters: Vec<RequesterGauge>,
    /// Connections to peers that are up.
    pub connections: u64,
    /// Peers that are left alone, by path, peer, or because they leave.
    pub suspended: SuspendedGauge,
    /// Whether the registry answers.
    pub registry_up: bool,
    /// Since the data thread last went round.
    pub heartbeat_age: Duration,
    /// Heap allocations of this process since its start.
    pub allocations: u64,
}

/// Leases, and bytes under them.
type RequesterHandles = (Gauge, Gauge);

/// The handles of the gauges.
pub(super) struct Gauges {
    /// By rank, 1 first.
    residents: Vec<Gauge>,
    rank_max: Gauge,
    pinned: Gauge,
    connections: Gauge,
    /// Path, peer, leaving.
    suspended: [Gauge; 3],
    registry_up: Gauge,
    heartbeat_age: Gauge,
    allocations: Counter,
    /// Requesters that a scrape has shown, at most [`limits::REQUESTERS_MAX`]; a holder knows no more.
    requesters: Mutex<BTreeMap<RequesterId, RequesterHandles>>,
}

impl Gauges {
    pub(super) fn register(recorder: &impl Recorder) -> Self {
        let plain = |name| gauge_of(recorder, name, &[]);
        Self {
            residents: EvictionRank::all()
                .map(|rank| {
                    let rank = rank.to_string();
                    gauge_of(recorder, "kvrail_residents", &[("rank", &rank)])
                })
                .collect(),
            rank_max: plain("kvrail_rank_max"),
            pinned: plain("kvrail_pinned_residents"),
            connections: plain("kvrail_peer_connections"),
            suspended: ["path", "peer", "leaving"]
                .map(|scope| gauge_of(recorder, "kvrail_suspended_peers", &[("scope", scope)])),
            registry_up: plain("kvrail_registry_up"),
            heartbeat_age: plain("kvrail_heartbeat_age_seconds"),
            allocations: counter_of(recorder, "kvrail_heap_allocations_total", &[]),
            requesters: Mutex::default(),
        }
    }

    pub(super) fn set(&self, recorder: &impl Recorder, now: &GaugeSnapshot) {
        for (gauge, count) in self.residents.iter().zip(&now.residents) {
            gauge.set(*count as f64);
        }
        let highest = now.residents.iter().rposition(|count| *count > 0);
        self.rank_max.set(highest.map_or(0.0, |at| (at + 1) as f64));
        self.pinned.set(now.pinned as f64);
        self.connections.set(now.connections as f64);
        let SuspendedGauge { path, peer, leaving } = now.suspended;
        for (gauge, count) in self.suspended.iter().zip([path, peer, leaving]) {
            gauge.set(count as f64);
        }
        self.registry_up.set(f64::from(u8::from(now.registry_up)));
        self.heartbeat_age.set(now.heartbeat_age.as_secs_f64());
        self.allocations.absolute(now.allocations);
        for (index, pool) in now.pools.iter().enumerate() {
            let labels = [("pool", &*index.to_string())];
            gauge_of(recorder, "kvrail_pool_used_bytes", &labels).set(pool.used as f64);
            gauge_of(recorder, "kvrail_pool_size_bytes", &labels).set(pool.size as f64);
        }
        self.set_requesters(recorder, now);
    }

    /// Whoever is no longer listed goes to zero: a gauge that stays would show leases for ever.
    fn set_requesters(&self, recorder: &impl Recorder, now: &GaugeSnapshot) {
        let mut known = lock(&self.requesters);
        for (leases, bytes) in known.values() {
            leases.set(0.0);
            bytes.set(0.0);
        }
        for listed in &now.requesters {
            if known.len() >= limits::REQUESTERS_MAX && !known.contains_key(&listed.requester) {
                continue;
            }
            let (leases, bytes) = known.entry(listed.requester).or_insert_with(|| {
                let labels = [("requester", listed.requester.as_str())];
                (
                    gauge_of(recorder, "kvrail_requester_leases", &labels),
                    gauge_of(recorder, "kvrail_requester_leased_bytes", &labels),
                )
            });
            leases.set(listed.leases as f64);
            bytes.set(listed.bytes as f64);
        }
    }
}
