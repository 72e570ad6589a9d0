//! The names of all metrics, with type and meaning.

use metrics::{Counter, Gauge, Key, KeyName, Label, Level, Metadata, Recorder, SharedString};

/// The type of a metric, as Prometheus names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down; read at the scrape.
    Gauge,
    /// Counts by fixed buckets.
    Histogram,
}

/// One metric, with all its labels.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// The name, with its unit at the end.
    pub name: &'static str,
    /// The type.
    pub kind: Kind,
    /// What it means; its labels in braces.
    pub help: &'static str,
}

const fn counter(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Counter, help }
}

const fn gauge(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Gauge, help }
}

const fn histogram(name: &'static str, help: &'static str) -> Family {
    Family { name, kind: Kind::Histogram, help }
}

/// The metrics of `kvrail serve`.
pub const FAMILIES: [Family; 56] = [
    counter(
        "kvrail_inserted_blocks_total",
        "Blocks that became resident, by {origin}: saved or fetched",
    ),
    counter("kvrail_inserted_bytes_total", "Bytes of blocks that became resident, by {origin}"),
    counter("kvrail_evicted_blocks_total", "Blocks evicted, by the {rank} they had"),
    counter("kvrail_evicted_bytes_total", "Bytes that evictions reclaimed"),
    counter("kvrail_removed_blocks_total", "Blocks taken out for another reason than to make room"),
    counter("kvrail_removed_bytes_total", "Bytes of blocks taken out for another reason"),
    counter("kvrail_refetched_blocks_total", "Blocks fetched again within 60 s of their eviction"),
    counter(
        "kvrail_rank_moves_total",
        "Changes of a resident's rank, by {direction}: raised or lowered",
    ),
    counter(
        "kvrail_already_resident_blocks_total",
        "Blocks to be stored that were here already, by {cause}",
    ),
    counter(
        "kvrail_loaded_blocks_total",
        "Blocks that local engines loaded, by {way}: in_place, read from peers into their memory, or copied",
    ),
    counter(
        "kvrail_local_hit_blocks_total",
        "Blocks that local readers asked for and this node held",
    ),
    counter(
        "kvrail_local_miss_blocks_total",
        "Blocks that local readers asked for and this node did not hold",
    ),
    counter("kvrail_pool_busy_total", "Reservations that found no memory"),
    counter(
        "kvrail_pool_busy_bytes_total",
        "Bytes that reservations asked for which found no memory",
    ),
    counter("kvrail_leases_granted_total", "Leases granted to peers"),
    counter("kvrail_lent_blocks_total", "Blocks lent to peers under leases"),
    counter("kvrail_lent_bytes_total", "Bytes lent to peers under leases"),
    counter(
        "kvrail_leases_ended_total",
        "Leases ended, by {end}: completed, aborted, expired or superseded",
    ),
    counter("kvrail_returned_blocks_total", "Blocks that ended leases gave back"),
    counter("kvrail_returned_bytes_total", "Bytes that ended leases gave back"),
    counter(
        "kvrail_lend_refused_blocks_total",
        "Resident blocks that were not lent, by {reason}: quota, pins, windows, draining, pressure, leases or staging",
    ),
    counter(
        "kvrail_completions_replayed_total",
        "Completions that arrived again and were answered from memory",
    ),
    counter(
        "kvrail_completions_refused_total",
        "Completions of an unknown lease or from another requester",
    ),
    counter(
        "kvrail_transferred_blocks_total",
        "Blocks that arrived from peers, whole and verified",
    ),
    counter("kvrail_transferred_bytes_total", "Bytes that arrived from peers, whole and verified"),
    counter(
        "kvrail_transfer_failed_blocks_total",
        "Blocks that did not arrive, by the {scope} of the fault: local, path, peer or request",
    ),
    histogram("kvrail_transfer_seconds", "Time from a lend request to the last byte"),
    counter(
        "kvrail_checksum_mismatches_total",
        "Blocks that arrived with other bytes than their holder's checksum says",
    ),
    counter(
        "kvrail_stale_completions_total",
        "Completions of reads that were no longer in flight, dropped",
    ),
    counter(
        "kvrail_peer_connections_opened_total",
        "Connections to peers that came up authenticated",
    ),
    counter(
        "kvrail_peer_connections_closed_total",
        "Connections to peers that ended, by the {scope} of the fault",
    ),
    counter(
        "kvrail_peer_connections_widened_total",
        "Attempts to take a NIC back into use that a connection had lost, by {outcome}: the new connection goes over \
         more NICs and took the old one's place, would have gone over no more, or did not come up in time",
    ),
    counter(
        "kvrail_protocol_violations_total",
        "Connections closed because a peer broke the protocol",
    ),
    counter(
        "kvrail_breakers_opened_total",
        "Breakers that opened, by {scope}: path, peer or local (this node's NIC)",
    ),
    counter("kvrail_breakers_closed_total", "Breakers that closed again, by {scope}"),
    counter(
        "kvrail_probes_total",
        "Probes of peers that were left alone, by {outcome}: good or failed",
    ),
    counter(
        "kvrail_pauses_obeyed_total",
        "Lend requests held back because their holder asked for a pause",
    ),
    counter(
        "kvrail_shared_fetch_blocks_total",
        "Blocks that a reader wanted while another reader's fetch was after them",
    ),
    counter(
        "kvrail_stale_owner_blocks_total",
        "Blocks that an owner was listed for and did not hold",
    ),
    counter(
        "kvrail_data_thread_stalls_total",
        "Times that this node's data thread was late by half a second or more",
    ),
    counter(
        "kvrail_data_thread_stalled_milliseconds_total",
        "Milliseconds that this node's data thread was late, in stalls of half a second or more",
    ),
    counter(
        "kvrail_registry_calls_total",
        "Calls to the registry, by {call} and {outcome}: answered or failed",
    ),
    histogram(
        "kvrail_registry_owners",
        "Owners of an announced block, this node among them, as the registry answered",
    ),
    counter(
        "kvrail_heap_allocations_total",
        "Times that this process asked for heap memory; moving a block takes none",
    ),
    gauge("kvrail_store_info", "1 for the {policy} that the store runs"),
    gauge("kvrail_residents", "Blocks held now, by {rank}"),
    gauge("kvrail_pinned_residents", "Blocks that a lease or a local reader keeps from eviction"),
    gauge("kvrail_rank_max", "Highest rank of a block held now, 0 where none is"),
    gauge("kvrail_pool_used_bytes", "Bytes of a {pool} in use"),
    gauge("kvrail_pool_size_bytes", "Bytes of a {pool}"),
    gauge("kvrail_peer_connections", "Connections to peers that are up"),
    gauge(
        "kvrail_suspended_peers",
        "Peers that this node leaves alone now, by {scope}: path, peer or leaving",
    ),
    gauge("kvrail_requester_leases", "Leases that a {requester} holds"),
    gauge("kvrail_requester_leased_bytes", "Bytes that a {requester} holds under leases"),
    gauge(
        "kvrail_heartbeat_age_seconds",
        "Time since this node's data thread last went round: at most 1 where it is idle",
    ),
    gauge("kvrail_registry_up", "1 while the registry answers this node, else 0"),
];

/// The metrics of `kvrail registry`.
pub const REGISTRY_FAMILIES: [Family; 3] = [
    gauge("kvrail_registry_nodes", "Nodes that are listed as owners"),
    gauge(
        "kvrail_registry_blocks",
        "Blocks that have an owner, by how many {owners} they have (8 stands for 8 and more)",
    ),
    counter(
        "kvrail_registry_served_total",
        "Calls answered, by {call}: announce, withdraw, plan, heartbeat or report",
    ),
];

/// Where the recorder would file a metric by level; it has no use for it.
const METADATA: Metadata<'static> = Metadata::new("kvrail", Level::INFO, None);

/// Gives each family its HELP line. Histograms write their own.
pub(super) fn describe(recorder: &impl Recorder, families: &[Family]) {
    for family in families {
        let name = KeyName::from_const_str(family.name);
        let help = SharedString::const_str(family.help);
        match family.kind {
            Kind::Counter => recorder.describe_counter(name, None, help),
            Kind::Gauge => recorder.describe_gauge(name, None, help),
            Kind::Histogram => {}
        }
    }
}

fn key(name: &'static str, labels: &[(&'static str, &str)]) -> Key {
    let labels: Vec<Label> =
        labels.iter().map(|(label, value)| Label::new(*label, (*value).to_owned())).collect();
    Key::from_parts(name, labels)
}

/// A counter's handle.
pub(super) fn counter_of(
    recorder: &impl Recorder,
    name: &'static str,
    labels: &[(&'static str, &str)],
) -> Counter {
    recorder.register_counter(&key(name, labels), &METADATA)
}

/// A gauge's handle.
pub(super) fn gauge_of(
    recorder: &impl Recorder,
    name: &'static str,
    labels: &[(&'static str, &str)],
) -> Gauge {
    recorder.register_gauge(&key(name, labels), &METADATA)
}
