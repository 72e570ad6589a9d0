//! The verbs fabric between two devices, over an interface that delays and loses packets.
//!
//! `KVRAIL_RDMA_DEVICE` and `KVRAIL_RDMA_PEER_DEVICE` name the devices, `KVRAIL_TEST_NETDEVS` their
//! network interfaces. Tests that need another wire than `RXE_NETEM` describes make it themselves,
//! and put that one back.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests: they fail by panicking, a wait has a deadline"
)]

#[allow(dead_code, reason = "not the whole suite runs on a slow wire")]
#[path = "../conformance/mod.rs"]
mod conformance;
#[path = "../rdma/mod.rs"]
mod rdma;

mod wire;

use std::io::Write as _;

use rdma::{Verbs, device, setting};

/// Prints what was observed, past the test harness, which hides what a test that passes prints.
fn say(what: &str) {
    std::io::stderr().write_all(format!("observed: {what}\n").as_bytes()).ok();
}

/// Whether there are two devices; says once that there are not.
fn two_devices() -> bool {
    let two = device().is_some() && setting("KVRAIL_RDMA_PEER_DEVICE").is_some();
    if device().is_some() && !two {
        std::io::stderr().write_all(b"SKIPPED: KVRAIL_RDMA_PEER_DEVICE names no device\n").ok();
    }
    two
}

// What reads megabytes at once is left out: SoftRoCE goes on from the first packet lost, and counts that
// as a retry, so that a long READ does not get through a wire that loses one packet in twenty.
conformance_tests!(Verbs, two_devices();
    messages_arrive_whole_and_in_order_both_ways,
    a_peer_that_does_not_drain_messages_fills_a_bounded_queue,
    last_words_before_a_close_arrive,
    a_read_scatters_over_its_segments_and_touches_nothing_else,
    a_segment_that_leaves_its_region_is_refused_at_either_end,
    thousands_of_small_reads_in_random_order,
    a_wrong_key_is_refused,
    after_a_refusal_the_rest_is_flushed,
    a_close_flushes_and_holds_memory_until_the_flush_is_polled,
    after_the_holder_closes_nothing_new_can_be_read,
    a_deregistration_in_mid_read_ends_it,
    a_dead_peer_ends_what_is_outstanding,
    a_fresh_connection_works_and_an_old_id_stays_dead,
);
