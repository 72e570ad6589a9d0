//! The device that tests run on, and the fabric that they make of it.

use std::io::Write;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use kvrail::fabric::Fabric;
use kvrail::memory::Mapping;
use kvrail::verbs::{VerbsConfig, VerbsFabric};

use crate::conformance::Harness;

/// How a test sets up the fabrics of a harness.
pub(crate) trait Setup {
    /// The configuration; where it listens is the harness's to say.
    fn config() -> VerbsConfig;
}

/// Fabrics that are set up one way.
pub(crate) struct Over<S>(PhantomData<S>);

/// Fabrics on the device under test.
pub(crate) type Verbs = Over<OneDevice>;

/// Three lanes: more than one, and not a power of two.
pub(crate) struct OneDevice;

impl Setup for OneDevice {
    fn config() -> VerbsConfig {
        VerbsConfig {
            devices: device().map(str::to_owned).into_iter().collect(),
            lanes: 3,
            ..VerbsConfig::default()
        }
    }
}

/// The device under test; says once that there is none.
#[expect(clippy::disallowed_methods, reason = "tests take their device from the environment")]
pub(crate) fn device() -> Option<&'static str> {
    static DEVICE: OnceLock<Option<String>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        let named = std::env::var("KVRAIL_RDMA_DEVICE").ok().filter(|name| !name.is_empty());
        if named.is_none() {
            // Not by a macro, whose output the test harness would hide.
            let line = b"SKIPPED: KVRAIL_RDMA_DEVICE names no RDMA device; nothing was tested\n";
            std::io::stderr().write_all(line).ok();
        }
        named
    });
    device.as_deref()
}

/// A fabric that others on this host can connect to.
#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
pub(crate) fn listening(config: VerbsConfig) -> VerbsFabric {
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    VerbsFabric::new(&VerbsConfig { listen, ..config }).unwrap()
}

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl<S: Setup> Harness for Over<S> {
    type Fabric = VerbsFabric;

    fn fabric() -> VerbsFabric {
        listening(S::config())
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
