use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::event::{LeaseEnd, LendRefusal, RegistryCall, Widening};
use crate::types::{EvictionRank, PolicyKind, RequesterIndex, ResidentCause, Scope};

/// The variant after `event`, with every field at a value that counts; `None` after the last. The
/// match is exhaustive: a new event does not compile until it has its place here.
fn after(event: Event) -> Option<Event> {
    let requester = RequesterIndex(1);
    let (blocks, bytes) = (3, 300);
    let (call, scope) = (RegistryCall::Plan, Scope::Path);
    Some(match event {
        Event::Inserted { .. } => Event::Evicted { rank: EvictionRank::LAST, bytes },
        Event::Evicted { .. } => Event::Removed { rank: EvictionRank::FIRST, bytes },
        Event::Removed { .. } => {
            Event::RankMoved { from: EvictionRank::FIRST, to: EvictionRank::LAST }
        }
        Event::RankMoved { .. } => Event::AlreadyResident { cause: ResidentCause::PartialHit },
        Event::AlreadyResident { .. } => Event::BlocksLoaded { blocks, in_place: true },
        Event::BlocksLoaded { .. } => Event::LocalHits { blocks },
        Event::LocalHits { .. } => Event::LocalMisses { blocks },
        Event::LocalMisses { .. } => Event::RefetchedAfterEviction,
        Event::RefetchedAfterEviction => Event::PoolBusy { bytes },
        Event::PoolBusy { .. } => Event::LeaseGranted { requester, blocks, bytes },
        Event::LeaseGranted { .. } => {
            Event::LeaseEnded { requester, end: LeaseEnd::Expired, blocks, bytes }
        }
        Event::LeaseEnded { .. } => Event::LendRefused { reason: LendRefusal::Quota, blocks },
        Event::LendRefused { .. } => Event::CompletionReplayed,
        Event::CompletionReplayed => Event::CompletionRefused,
        Event::CompletionRefused => {
            Event::TransferSucceeded { blocks, bytes, took: Duration::from_millis(2) }
        }
        Event::TransferSucceeded { .. } => Event::TransferFailed { blocks, scope },
        Event::TransferFailed { .. } => Event::ChecksumMismatch,
        Event::ChecksumMismatch => Event::StaleCompletion,
        Event::StaleCompletion => Event::PeerConnected,
        Event::PeerConnected => Event::PeerDisconnected { scope },
        Event::PeerDisconnected { .. } => Event::ConnectionWidened { outcome: Widening::Wider },
        Event::ConnectionWidened { .. } => Event::ProtocolViolation,
        Event::ProtocolViolation => Event::BreakerOpened { scope },
        Event::BreakerOpened { .. } => Event::BreakerClosed { scope },
        Event::BreakerClosed { .. } => Event::Probed { good: true },
        Event::Probed { .. } => Event::PauseObeyed,
        Event::PauseObeyed => Event::FetchesShared { blocks },
        Event::FetchesShared { .. } => Event::OwnerMissed { blocks },
        Event::OwnerMissed { .. } => Event::DataThreadStalled { late: Duration::from_millis(700) },
        Event::DataThreadStalled { .. } => Event::RegistryAnswered { call },
        Event::RegistryAnswered { .. } => Event::RegistryFailed { call },
        Event::RegistryFailed { .. } => Event::OwnersSeen { owners: 2 },
        Event::OwnersSeen { .. } => Event::StoreStarted { policy: PolicyKind::Aged },
        Event::StoreStarted { .. } => return None,
    })
}

fn every_event() -> impl Iterator<Item = Event> {
    let first = Event::Inserted { rank: EvictionRank::FIRST, bytes: 100, fetched: true };
    std::iter::successors(Some(first), |event| after(*event))
}

/// The values of a rendering by series.
fn values(text: &str) -> BTreeMap<String, f64> {
    text.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap();
            (series.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// The family that a series belongs to.
fn family_of(series: &str) -> &str {
    let name = series.split('{').next().unwrap();
    ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name)
}

fn busy_snapshot() -> GaugeSnapshot {
    let mut now = GaugeSnapshot {
        pinned: 1,
        pools: vec![PoolGauge { used: 5, size: 10 }],
        requesters: vec![RequesterGauge {
            requester: "b:7070".parse().unwrap(),
            leases: 2,
            bytes: 64,
        }],
        connections: 1,
        suspended: SuspendedGauge { path: 1, peer: 0, leaving: 0 },
        registry_up: true,
        heartbeat_age: Duration::from_millis(20),
        allocations: 9,
        ..GaugeSnapshot::default()
    };
    now.residents[2] = 7;
    now
}

#[test]
fn every_event_moves_a_metric() {
    for event in every_event() {
        let sink = MetricsSink::new();
        let before = values(&sink.render(&GaugeSnapshot::default()));
        sink.emit(event);
        assert_ne!(before, values(&sink.render(&GaugeSnapshot::default())), "{event:?}");
    }
}

#[test]
fn every_label_value_has_its_own_series() {
    let sink = MetricsSink::new();
    for end in LeaseEnd::ALL {
        sink.emit(Event::LeaseEnded { requester: RequesterIndex(0), end, blocks: 1, bytes: 1 });
    }
    for rank in EvictionRank::all() {
        sink.emit(Event::Evicted { rank, bytes: 1 });
    }
    sink.emit(Event::RankMoved { from: EvictionRank::LAST, to: EvictionRank::FIRST });
    let values = values(&sink.render(&GaugeSnapshot::default()));
    assert_eq!(values["kvrail_leases_ended_total{end=\"superseded\"}"], 1.0);
    assert_eq!(values["kvrail_evicted_blocks_total{rank=\"1\"}"], 1.0);
    assert_eq!(values["kvrail_evicted_blocks_total{rank=\"31\"}"], 1.0);
    assert_eq!(values["kvrail_evicted_bytes_total"], 31.0);
    assert_eq!(values["kvrail_rank_moves_total{direction=\"lowered\"}"], 1.0);
    assert_eq!(values["kvrail_rank_moves_total{direction=\"raised\"}"], 0.0);
}

/// Fails for a metric that nothing increments, and for one that is not in the list.
#[test]
fn no_metric_is_dead_or_unlisted() {
    let sink = MetricsSink::new();
    every_event().for_each(|event| sink.emit(event));
    let text = sink.render(&busy_snapshot());
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    let values = values(&text);
    for (series, value) in &values {
        *sums.entry(family_of(series)).or_default() += value;
    }
    for family in FAMILIES {
        let sum = sums.remove(family.name);
        assert!(sum.is_some_and(|sum| sum > 0.0), "nothing moves {}", family.name);
        assert!(text.contains(&format!("# HELP {} {}", family.name, family.help)), "{text}");
    }
    assert!(sums.is_empty(), "not in FAMILIES: {sums:?}");
}

#[test]
fn a_requester_that_holds_nothing_goes_to_zero() {
    let sink = MetricsSink::new();
    let series = "kvrail_requester_leases{requester=\"b:7070\"}";
    assert_eq!(values(&sink.render(&busy_snapshot()))[series], 2.0);
    assert_eq!(values(&sink.render(&GaugeSnapshot::default()))[series], 0.0);
}

#[test]
fn the_highest_rank_is_the_last_that_has_residents() {
    let sink = MetricsSink::new();
    assert_eq!(values(&sink.render(&GaugeSnapshot::default()))["kvrail_rank_max"], 0.0);
    assert_eq!(values(&sink.render(&busy_snapshot()))["kvrail_rank_max"], 3.0);
}

#[test]
fn no_registry_metric_is_dead_or_unlisted() {
    let metrics = RegistryMetrics::new();
    let now = RegistrySnapshot {
        nodes: 2,
        blocks_by_owners: [1, 2, 0, 0, 0, 0, 0, 9],
        served: [1, 2, 3, 4, 5],
    };
    let values = values(&metrics.render(&now));
    assert_eq!(values["kvrail_registry_blocks{owners=\"8\"}"], 9.0);
    assert_eq!(values["kvrail_registry_served_total{call=\"heartbeat\"}"], 4.0);
    let names: std::collections::BTreeSet<&str> = values.keys().map(|key| family_of(key)).collect();
    let listed = REGISTRY_FAMILIES.iter().map(|family| family.name).collect();
    assert_eq!(names, listed);
}

#[test]
fn every_metric_is_in_the_readme() {
    let readme = include_str!("../../README.md");
    for family in FAMILIES.iter().chain(&REGISTRY_FAMILIES) {
        let line = format!("| `{}` | {} |", family.name, family.help);
        assert!(readme.contains(&line), "README.md lacks the line\n{line}");
    }
}
