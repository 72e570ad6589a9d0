//! The simulated fabric passes the conformance suite.

mod conformance;

use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::sync::Arc;

use kvrail::memory::Mapping;
use kvrail::sim::{SimConfig, SimEndpoint, SimFabric, SimNetwork};

use conformance::Harness;

/// A network per thread, in which one thing happens at each poll of any of its nodes: so a poll of one
/// end moves the data of both, as a device does.
struct SimOf<const WINDOWS: u16>;

type Sim = SimOf<0>;
type Windows = SimOf<40>;

thread_local! {
    static NETWORK: RefCell<Option<(u16, SimNetwork)>> = const { RefCell::new(None) };
    static NODES: Cell<u32> = const { Cell::new(0) };
}

/// A failure shows it by being the same in each run.
const SEED: u64 = 20;

/// What the suite's READs need, at a rate at which the largest ones outlast a few messages.
#[expect(clippy::unwrap_used, reason = "it was made just before")]
fn network(windows: u16) -> SimNetwork {
    let config = SimConfig {
        windows,
        reads_outstanding: 512,
        read_bytes: 4 << 20,
        read_rate: NonZeroU64::new(1 << 30),
        ..SimConfig::default()
    };
    NETWORK.with_borrow_mut(|network| {
        if network.as_ref().is_none_or(|(of, _)| *of != windows) {
            *network = Some((windows, SimNetwork::new(SEED, config)));
        }
        network.as_ref().unwrap().1.clone()
    })
}

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl<const WINDOWS: u16> Harness for SimOf<WINDOWS> {
    type Fabric = SimFabric;

    fn fabric() -> SimFabric {
        let at = SimEndpoint(NODES.replace(NODES.get() + 1));
        network(WINDOWS).fabric(at)
    }

    fn endpoint(fabric: &SimFabric) -> SimEndpoint {
        fabric.endpoint()
    }

    fn pass() {
        network(WINDOWS).step();
    }

    fn nowhere() -> SimEndpoint {
        SimEndpoint(u32::MAX)
    }

    fn memory(len: u64) -> Arc<Mapping> {
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

conformance_tests!(Sim:
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

/// The same nodes, with windows.
mod windows {
    use super::{Windows, conformance};

    crate::conformance_tests!(Windows:
        a_key_reads_its_span_and_no_byte_more,
        a_regions_own_key_reads_nothing,
        a_key_ends_and_the_others_of_its_peer_go_on,
        a_key_of_another_connection_reads_nothing,
        a_message_after_a_grant_finds_the_key_at_work,
        windows_are_bounded_and_granted_once,
        a_deregistration_ends_the_keys_of_its_region,
        a_closed_connection_takes_its_keys_along,
    );

    #[test]
    fn a_window_is_granted_again_and_again() {
        conformance::a_window_is_granted_again_and_again::<Windows>(1_000);
    }
}
