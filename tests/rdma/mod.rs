//! The devices that tests run on, and the fabrics that they make of them.

use std::cell::Cell;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use kvrail::fabric::Fabric;
use kvrail::memory::Mapping;
use kvrail::verbs::{VerbsConfig, VerbsFabric};

use crate::conformance::Harness;

/// Fabrics with so many lanes. Where the environment names a second device, every other fabric of a
/// test is on that one, so that both ends of a pair are not on the same.
/// Peers read by windows where `WINDOWS` says so.
pub(crate) struct Lanes<const COUNT: usize, const WINDOWS: bool = false>;

/// More than one lane, and not a power of two.
pub(crate) type Verbs = Lanes<3>;

/// A fabric on a device, as the tests have it.
pub(crate) fn config(device: &str, lanes: usize) -> VerbsConfig {
    VerbsConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        devices: vec![device.to_owned()],
        lanes,
        ..VerbsConfig::default()
    }
}

/// The device under test; says once that there is none.
pub(crate) fn device() -> Option<&'static str> {
    static DEVICE: OnceLock<Option<String>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        let named = setting("KVRAIL_RDMA_DEVICE");
        if named.is_none() {
            // Not by a macro, whose output the test harness would hide.
            let line = b"SKIPPED: KVRAIL_RDMA_DEVICE names no RDMA device; nothing was tested\n";
            std::io::stderr().write_all(line).ok();
        }
        named
    });
    device.as_deref()
}

/// A setting of the test run; an empty one is none.
#[expect(clippy::disallowed_methods, reason = "tests take their devices from the environment")]
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

thread_local! {
    /// Whether the next fabric of this test is its second, fourth, and so on.
    static SECOND: Cell<bool> = const { Cell::new(false) };
}

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl<const COUNT: usize, const WINDOWS: bool> Harness for Lanes<COUNT, WINDOWS> {
    type Fabric = VerbsFabric;

    fn fabric() -> VerbsFabric {
        let peer = setting("KVRAIL_RDMA_PEER_DEVICE").filter(|_| SECOND.replace(!SECOND.get()));
        let device = peer.as_deref().or(device()).unwrap();
        let config = VerbsConfig { lease_windows: WINDOWS, ..config(device, COUNT) };
        VerbsFabric::new(&config).unwrap()
    }

    /// SoftRoCE compares a READ with the bounds of the window's region only (`check_rkey` of its
    /// responder, Linux 6.12).
    fn windows_have_bounds() -> bool {
        device().is_some_and(|name| !name.starts_with("rxe"))
    }

    fn endpoint(fabric: &VerbsFabric) -> SocketAddr {
        fabric.local_addr().unwrap()
    }

    fn nowhere() -> SocketAddr {
        // tcpmux: reserved since 1988, served by nobody, and never given out as a free port.
        SocketAddr::from(([127, 0, 0, 1], 1))
    }

    fn memory(len: u64) -> Arc<<VerbsFabric as Fabric>::Memory> {
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

/// Makes one `#[test]` per function of the suite for a harness; each runs where the second argument, a
/// function, answers that there is a device.
#[macro_export]
macro_rules! every_test_on_a_device {
    ($harness:ty, $there:path) => {
        $crate::every_test_on_a_device! { $harness, $there:
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
        }
    };
    ($harness:ty, $there:path: $($name:ident),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                if $there().is_some() {
                    conformance::$name::<$harness>();
                }
            }
        )+
    };
}
