//! What each event adds to which metric.

use metrics::{Counter, Gauge, Recorder};

use super::families::{FAMILIES, counter_of, gauge_of};
use super::histogram::FixedHistogram;
use crate::event::{Event, LeaseEnd, LendRefusal, RegistryCall, Widening};
use crate::types::{EvictionRank, PolicyKind, ResidentCause, Scope};

/// Upper bounds of the transfer times, nanoseconds: half a decade each, from a cached 4 KiB read on
/// RDMA (100 us) to the default timeout (30 s).
const SECONDS: [u64; 12] = [
    100_000,
    300_000,
    1_000_000,
    3_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
    300_000_000,
    1_000_000_000,
    3_000_000_000,
    10_000_000_000,
    30_000_000_000,
];

/// Upper bounds of the owners of a block: sole, replicated, and how widely.
const OWNERS: [u64; 7] = [1, 2, 3, 4, 8, 16, 32];

/// One handle for each value of a label, found by comparing: there are at most five.
struct ByLabel<K, H, const N: usize>([(K, H); N]);

impl<K: PartialEq, H, const N: usize> ByLabel<K, H, N> {
    fn each(all: [K; N], mut register: impl FnMut(&K) -> H) -> Self {
        Self(all.map(|label| {
            let handle = register(&label);
            (label, handle)
        }))
    }

    fn with(&self, label: K, act: impl FnOnce(&H)) {
        if let Some((_, handle)) = self.0.iter().find(|(known, _)| *known == label) {
            act(handle);
        }
    }
}

impl<K: PartialEq, const N: usize> ByLabel<K, Counter, N> {
    fn add(&self, label: K, count: u64) {
        self.with(label, |counter| counter.increment(count));
    }
}

/// The handles of every metric that an event moves.
pub(super) struct Counters {
    inserted_blocks: ByLabel<bool, Counter, 2>,
    inserted_bytes: ByLabel<bool, Counter, 2>,
    /// By rank, 1 first.
    evicted_blocks: Vec<Counter>,
    evicted_bytes: Counter,
    removed_blocks: Counter,
    removed_bytes: Counter,
    refetched: Counter,
    raised: Counter,
    lowered: Counter,
    already_resident: ByLabel<ResidentCause, Counter, 3>,
    loaded: ByLabel<bool, Counter, 2>,
    hits: Counter,
    misses: Counter,
    busy: Counter,
    busy_bytes: Counter,
    leases_granted: Counter,
    lent_blocks: Counter,
    lent_bytes: Counter,
    leases_ended: ByLabel<LeaseEnd, Counter, 4>,
    returned_blocks: Counter,
    returned_bytes: Counter,
    lend_refused: ByLabel<LendRefusal, Counter, 7>,
    completions_replayed: Counter,
    completions_refused: Counter,
    transferred_blocks: Counter,
    transferred_bytes: Counter,
    transfer_failed: ByLabel<Scope, Counter, 4>,
    transfer_nanos: FixedHistogram<12>,
    checksum_mismatches: Counter,
    stale_completions: Counter,
    peers_opened: Counter,
    peers_closed: ByLabel<Scope, Counter, 4>,
    widened: ByLabel<Widening, Counter, 3>,
    violations: Counter,
    breakers_opened: ByLabel<Scope, Counter, 4>,
    breakers_closed: ByLabel<Scope, Counter, 4>,
    probes: ByLabel<bool, Counter, 2>,
    pauses: Counter,
    shared: Counter,
    owner_missed: Counter,
    stalls: Counter,
    stalled_millis: Counter,
    registry_answered: ByLabel<RegistryCall, Counter, { RegistryCall::ALL.len() }>,
    registry_failed: ByLabel<RegistryCall, Counter, { RegistryCall::ALL.len() }>,
    owners: FixedHistogram<7>,
    policy: ByLabel<PolicyKind, Gauge, 4>,
}

const fn origin(fetched: bool) -> &'static str {
    if fetched { "fetched" } else { "saved" }
}

fn widenings(recorder: &impl Recorder) -> ByLabel<Widening, Counter, 3> {
    ByLabel::each(Widening::ALL, |it| {
        let name = "kvrail_peer_connections_widened_total";
        counter_of(recorder, name, &[("outcome", it.as_str())])
    })
}

const LOADED: &str = "kvrail_loaded_blocks_total";

const fn way(in_place: bool) -> &'static str {
    if in_place { "in_place" } else { "copied" }
}

impl Counters {
    pub(super) fn register(recorder: &impl Recorder) -> Self {
        let plain = |name| counter_of(recorder, name, &[]);
        let one = |name, label, value: &str| counter_of(recorder, name, &[(label, value)]);
        let call = |call: &RegistryCall, outcome| {
            let labels = [("call", call.as_str()), ("outcome", outcome)];
            counter_of(recorder, "kvrail_registry_calls_total", &labels)
        };
        let origins = |name| ByLabel::each([false, true], |it| one(name, "origin", origin(*it)));
        let scopes = |name| ByLabel::each(Scope::ALL, |it| one(name, "scope", it.as_str()));
        Self {
            inserted_blocks: origins("kvrail_inserted_blocks_total"),
            inserted_bytes: origins("kvrail_inserted_bytes_total"),
            evicted_blocks: EvictionRank::all()
                .map(|rank| one("kvrail_evicted_blocks_total", "rank", &rank.to_string()))
                .collect(),
            evicted_bytes: plain("kvrail_evicted_bytes_total"),
            removed_blocks: plain("kvrail_removed_blocks_total"),
            removed_bytes: plain("kvrail_removed_bytes_total"),
            refetched: plain("kvrail_refetched_blocks_total"),
            raised: one("kvrail_rank_moves_total", "direction", "raised"),
            lowered: one("kvrail_rank_moves_total", "direction", "lowered"),
            already_resident: ByLabel::each(ResidentCause::ALL, |it| {
                one("kvrail_already_resident_blocks_total", "cause", it.as_str())
            }),
            loaded: ByLabel::each([false, true], |it| one(LOADED, "way", way(*it))),
            hits: plain("kvrail_local_hit_blocks_total"),
            misses: plain("kvrail_local_miss_blocks_total"),
            busy: plain("kvrail_pool_busy_total"),
            busy_bytes: plain("kvrail_pool_busy_bytes_total"),
            leases_granted: plain("kvrail_leases_granted_total"),
            lent_blocks: plain("kvrail_lent_blocks_total"),
            lent_bytes: plain("kvrail_lent_bytes_total"),
            leases_ended: ByLabel::each(LeaseEnd::ALL, |it| {
                one("kvrail_leases_ended_total", "end", it.as_str())
            }),
            returned_blocks: plain("kvrail_returned_blocks_total"),
            returned_bytes: plain("kvrail_returned_bytes_total"),
            lend_refused: ByLabel::each(LendRefusal::ALL, |it| {
                one("kvrail_lend_refused_blocks_total", "reason", it.as_str())
            }),
            completions_replayed: plain("kvrail_completions_replayed_total"),
            completions_refused: plain("kvrail_completions_refused_total"),
            transferred_blocks: plain("kvrail_transferred_blocks_total"),
            transferred_bytes: plain("kvrail_transferred_bytes_total"),
            transfer_failed: scopes("kvrail_transfer_failed_blocks_total"),
            transfer_nanos: FixedHistogram::new(SECONDS),
            checksum_mismatches: plain("kvrail_checksum_mismatches_total"),
            stale_completions: plain("kvrail_stale_completions_total"),
            peers_opened: plain("kvrail_peer_connections_opened_total"),
            peers_closed: scopes("kvrail_peer_connections_closed_total"),
            widened: widenings(recorder),
            violations: plain("kvrail_protocol_violations_total"),
            breakers_opened: scopes("kvrail_breakers_opened_total"),
            breakers_closed: scopes("kvrail_breakers_closed_total"),
            probes: ByLabel::each([false, true], |it| {
                one("kvrail_probes_total", "outcome", if *it { "good" } else { "failed" })
            }),
            pauses: plain("kvrail_pauses_obeyed_total"),
            shared: plain("kvrail_shared_fetch_blocks_total"),
            owner_missed: plain("kvrail_stale_owner_blocks_total"),
            stalls: plain("kvrail_data_thread_stalls_total"),
            stalled_millis: plain("kvrail_data_thread_stalled_milliseconds_total"),
            registry_answered: ByLabel::each(RegistryCall::ALL, |it| call(it, "answered")),
            registry_failed: ByLabel::each(RegistryCall::ALL, |it| call(it, "failed")),
            owners: FixedHistogram::new(OWNERS),
            policy: ByLabel::each(PolicyKind::ALL, |it| {
                gauge_of(recorder, "kvrail_store_info", &[("policy", it.as_str())])
            }),
        }
    }

    /// Adds `event` to its metrics. Exhaustive, so that a new event cannot be forgotten.
    pub(super) fn count(&self, event: Event) {
        match event {
            Event::Inserted { .. }
            | Event::Evicted { .. }
            | Event::Removed { .. }
            | Event::RankMoved { .. }
            | Event::AlreadyResident { .. }
            | Event::BlocksLoaded { .. }
            | Event::LocalHits { .. }
            | Event::LocalMisses { .. }
            | Event::RefetchedAfterEviction
            | Event::PoolBusy { .. }
            | Event::StoreStarted { .. } => self.count_store(event),
            Event::LeaseGranted { blocks, bytes, .. } => {
                self.leases_granted.increment(1);
                self.lent_blocks.increment(blocks);
                self.lent_bytes.increment(bytes);
            }
            Event::LeaseEnded { end, blocks, bytes, .. } => {
                self.leases_ended.add(end, 1);
                self.returned_blocks.increment(blocks);
                self.returned_bytes.increment(bytes);
            }
            Event::LendRefused { reason, blocks } => self.lend_refused.add(reason, blocks),
            Event::BreakerOpened { .. }
            | Event::BreakerClosed { .. }
            | Event::Probed { .. }
            | Event::PauseObeyed
            | Event::FetchesShared { .. }
            | Event::OwnerMissed { .. } => self.count_care(event),
            Event::CompletionReplayed => self.completions_replayed.increment(1),
            Event::CompletionRefused => self.completions_refused.increment(1),
            Event::TransferSucceeded { blocks, bytes, took } => {
                self.transferred_blocks.increment(blocks);
                self.transferred_bytes.increment(bytes);
                self.transfer_nanos.observe(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
            }
            Event::TransferFailed { blocks, scope } => self.transfer_failed.add(scope, blocks),
            Event::ChecksumMismatch => self.checksum_mismatches.increment(1),
            Event::StaleCompletion => self.stale_completions.increment(1),
            Event::PeerConnected => self.peers_opened.increment(1),
            Event::PeerDisconnected { scope } => self.peers_closed.add(scope, 1),
            Event::ConnectionWidened { outcome } => self.widened.add(outcome, 1),
            Event::ProtocolViolation => self.violations.increment(1),
            Event::DataThreadStalled { late } => {
                self.stalls.increment(1);
                self.stalled_millis.increment(u64::try_from(late.as_millis()).unwrap_or(u64::MAX));
            }
            Event::RegistryAnswered { call } => self.registry_answered.add(call, 1),
            Event::RegistryFailed { call } => self.registry_failed.add(call, 1),
            Event::OwnersSeen { owners } => self.owners.observe(u64::from(owners)),
        }
    }

    /// The share of [`Self::count`] of whom to ask and whom to leave alone.
    fn count_care(&self, event: Event) {
        match event {
            Event::BreakerOpened { scope } => self.breakers_opened.add(scope, 1),
            Event::BreakerClosed { scope } => self.breakers_closed.add(scope, 1),
            Event::Probed { good } => self.probes.add(good, 1),
            Event::PauseObeyed => self.pauses.increment(1),
            Event::FetchesShared { blocks } => self.shared.increment(blocks),
            Event::OwnerMissed { blocks } => self.owner_missed.increment(blocks),
            _ => {}
        }
    }

    /// The store's share of [`Self::count`].
    fn count_store(&self, event: Event) {
        match event {
            Event::Inserted { bytes, fetched, .. } => {
                self.inserted_blocks.add(fetched, 1);
                self.inserted_bytes.add(fetched, bytes);
            }
            Event::Evicted { rank, bytes } => {
                if let Some(counter) = self.evicted_blocks.get(usize::from(rank.get()) - 1) {
                    counter.increment(1);
                }
                self.evicted_bytes.increment(bytes);
            }
            Event::Removed { bytes, .. } => {
                self.removed_blocks.increment(1);
                self.removed_bytes.increment(bytes);
            }
            Event::RankMoved { from, to } if to > from => self.raised.increment(1),
            Event::RankMoved { from, to } if to < from => self.lowered.increment(1),
            Event::AlreadyResident { cause } => self.already_resident.add(cause, 1),
            Event::BlocksLoaded { blocks, in_place } => self.loaded.add(in_place, blocks),
            Event::LocalHits { blocks } => self.hits.increment(blocks),
            Event::LocalMisses { blocks } => self.misses.increment(blocks),
            Event::RefetchedAfterEviction => self.refetched.increment(1),
            Event::PoolBusy { bytes } => {
                self.busy.increment(1);
                self.busy_bytes.increment(bytes);
            }
            Event::StoreStarted { policy } => self.policy.with(policy, |gauge| gauge.set(1.0)),
            _ => {}
        }
    }

    /// Appends the histograms, which the recorder does not hold.
    pub(super) fn render_histograms(&self, out: &mut String) {
        for family in &FAMILIES {
            match family.name {
                "kvrail_transfer_seconds" => self.transfer_nanos.render(out, family, 1e9),
                "kvrail_registry_owners" => self.owners.render(out, family, 1.0),
                _ => {}
            }
        }
    }
}
