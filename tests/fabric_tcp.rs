//! The TCP fabric passes the conformance suite.

#[allow(dead_code, unused_imports, unused_macros, reason = "windows have tests of their own")]
mod conformance;

use std::net::SocketAddr;
use std::sync::Arc;

use kvrail::fabric::Fabric;
use kvrail::memory::Mapping;
use kvrail::tcp::{TcpConfig, TcpFabric};

use conformance::Harness;

/// Three streams: more than one, and not a power of two.
struct Tcp;

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl Harness for Tcp {
    type Fabric = TcpFabric;

    fn fabric() -> TcpFabric {
        TcpFabric::new(TcpConfig {
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            streams: 3,
            ..TcpConfig::default()
        })
        .unwrap()
    }

    fn endpoint(fabric: &TcpFabric) -> SocketAddr {
        fabric.local_addr().unwrap()
    }

    fn nowhere() -> SocketAddr {
        // tcpmux: reserved since 1988, served by nobody, and never given out as a free port.
        SocketAddr::from(([127, 0, 0, 1], 1))
    }

    fn memory(len: u64) -> Arc<<TcpFabric as Fabric>::Memory> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        Arc::new(Mapping::new(&file, len).unwrap())
    }

    fn write(memory: &Mapping, offset: u64, bytes: &[u8]) {
        memory.write(offset, bytes).unwrap();
    }

    fn read(memory: &Mapping, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        memory.read(offset, &mut bytes).unwrap();
        bytes
    }
}

conformance_tests!(Tcp:
    messages_arrive_whole_and_in_order_both_ways,
    a_peer_that_does_not_drain_messages_fills_a_bounded_queue,
    a_message_beyond_the_limit_is_refused_and_harms_nothing,
    last_words_before_a_close_arrive,
    a_connect_to_nowhere_ends_as_unreachable,
    one_fabric_has_many_peers_at_once,
    a_wake_ends_a_poll,
    a_read_scatters_over_its_segments_and_touches_nothing_else,
    the_longest_read_arrives_whole,
    a_read_of_nothing_succeeds_under_any_key,
    thousands_of_small_reads_in_random_order,
    both_ends_read_from_each_other_at_once,
    reads_of_a_holder_whose_own_data_is_stuck_succeed,
    reads_of_all_sizes_cross_in_both_directions,
    messages_pass_while_bulk_data_flows,
    posting_beyond_the_limit_posts_nothing,
    a_wrong_key_is_refused,
    a_span_that_leaves_its_region_is_refused,
    a_local_region_is_refused,
    a_key_is_stale_after_deregistration,
    nobody_reads_before_being_admitted,
    after_a_refusal_the_rest_is_flushed,
    wrong_local_spans_are_a_local_fault,
    a_connection_that_we_did_not_admit_takes_no_reads,
    a_close_flushes_and_holds_memory_until_the_flush_is_polled,
    after_the_holder_closes_nothing_new_can_be_read,
    a_deregistration_in_mid_read_ends_it,
    a_dead_peer_ends_what_is_outstanding,
    a_fresh_connection_works_and_an_old_id_stays_dead,
    a_close_of_an_unfinished_connect_is_reported_once,
    connections_come_and_go,
);
