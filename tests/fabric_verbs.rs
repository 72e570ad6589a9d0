//! The verbs fabric passes the conformance suite on a real device.
//!
//! `KVRAIL_RDMA_DEVICE` names the device. Without it the tests say on standard error that they are
//! skipped, and why.

#[allow(dead_code, unused_imports, unused_macros, reason = "windows have tests of their own")]
mod conformance;
mod rdma;

use rdma::{Verbs, device};

/// Makes one `#[test]` per function of the suite, which runs where there is a device.
macro_rules! on_a_device {
    ($($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                if device().is_some() {
                    conformance::$name::<Verbs>();
                }
            }
        )+
    };
}

on_a_device!(
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
