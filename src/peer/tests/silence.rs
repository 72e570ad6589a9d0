//! Peers that hang or are cut off, and peers that are only slow.

use std::num::NonZeroU64;
use std::time::Duration;

use super::cluster::{Cluster, Shape, bytes_of, endpoint, is_failed, is_ready};
use super::stranger::Stranger;
use crate::event::Event;
use crate::health::{BreakerConfig, BreakerState};
use crate::limits::{SILENCE_ASK, SILENCE_MAX};
use crate::memory::checksum_bytes;
use crate::protocol::{Loan, LoanEntry, Message, Place};
use crate::sim::SimConfig;
use crate::types::{EvictionRank, Generation, LeaseId, Load, Scope};

const A: usize = 0;
const B: usize = 1;
const SECOND: Duration = Duration::from_secs(1);

/// Deadlines as long as those of a node, and a network that never gives up by itself.
fn patient() -> Shape {
    let network = SimConfig { give_up: SECOND * 600, ..SimConfig::default() };
    let mut shape = Shape { network, ..Shape::default() };
    shape.peers.lease.ttl = SECOND * 10;
    shape.peers.requester.answer_timeout = SECOND * 5;
    shape.peers.requester.transfer_timeout = SECOND * 30;
    shape
}

/// A has lent before, so that the two are connected.
fn connected(shape: Shape) -> Cluster {
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1, 2, 3]);
    assert!(is_ready(&cluster.fetch(B, A, &[1])[0]));
    cluster
}

fn is_out(cluster: &Cluster) -> bool {
    let now = cluster.now();
    cluster.node(B).peers.health(now).any(|entry| entry.state != BreakerState::Closed)
}

fn opened(cluster: &Cluster) -> usize {
    cluster.node(B).log.count(|event| matches!(event, Event::BreakerOpened { .. }))
}

/// Asks A, which is as good as gone: the answer comes, and A is out of use, within a second.
fn fails_within_a_second(cluster: &mut Cluster) {
    let began = cluster.now();
    let id = cluster.begin_fetch(B, A, &[2]);
    let fetched = cluster.finish(B, id);
    let took = cluster.now().since(began);
    assert!(took > SILENCE_MAX / 2 && took <= SECOND, "{took:?}");
    assert!(is_failed(&fetched.outcomes[0], Scope::Path), "{fetched:?}");
    assert!(fetched.suspended.is_some() && is_out(cluster));
    assert_eq!(opened(cluster), 1);
    assert_eq!(cluster.node(B).peers.unfinished(), 0);
}

/// How long until A is in use again, from now on.
fn comes_back(cluster: &mut Cluster) -> Duration {
    let began = cluster.now();
    cluster.run_until(SECOND * 30, |cluster| !is_out(cluster));
    let took = cluster.now().since(began);
    assert!(is_ready(&cluster.fetch(B, A, &[2])[0]));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(2)), (0, 0));
    took
}

/// Within two intervals between probes, after a fault of this length, and the step of a probe that was
/// under way.
fn two_intervals(fault: Duration) -> Duration {
    let config = BreakerConfig::default();
    (fault.max(config.probe_first).min(config.probe_longest)) * 2 + SECOND
}

#[test]
fn a_peer_that_hangs_is_out_within_a_second_and_back_within_two_probe_intervals() {
    for hung in [1, 3, 20] {
        let mut cluster = connected(patient());
        cluster.pause(A, SECOND * hung);
        let ends = cluster.now() + SECOND * hung;
        fails_within_a_second(&mut cluster);
        let left = ends.since(cluster.now());
        cluster.run_for(left.max(Duration::from_nanos(1)));
        let took = comes_back(&mut cluster);
        assert!(took <= two_intervals(SECOND * hung), "{took:?} after {hung} s");
    }
}

#[test]
fn a_peer_behind_a_cut_link_is_out_within_a_second_connected_or_not() {
    for (is_connected, cut) in [(true, 1), (true, 20), (false, 1), (false, 20)] {
        let mut cluster = Cluster::new(2, patient());
        cluster.save(A, &[1, 2, 3]);
        if is_connected {
            assert!(is_ready(&cluster.fetch(B, A, &[1])[0]));
        }
        cluster.network.partition(endpoint(A), endpoint(B));
        fails_within_a_second(&mut cluster);
        cluster.run_for(SECOND * cut);
        cluster.network.heal(endpoint(A), endpoint(B));
        let took = comes_back(&mut cluster);
        assert!(took <= two_intervals(SECOND * (cut + 1)), "{took:?} after {cut} s");
    }
}

#[test]
fn blocks_that_have_landed_do_not_wait_for_the_words_of_a_silent_holder() {
    let mut cluster = connected(patient());
    let id = cluster.begin_fetch(B, A, &[2, 3]);
    cluster.run_until(SECOND, |cluster| !cluster.network.landing(endpoint(B)).is_empty());
    // Its NIC goes on serving.
    cluster.pause(A, SECOND * 4);
    let began = cluster.now();
    let fetched = cluster.finish(B, id);
    let took = cluster.now().since(began);
    assert!(took <= SECOND, "{took:?}");
    assert!(fetched.outcomes.iter().all(is_ready), "{fetched:?}");
    assert!(is_out(&cluster));
    cluster.node(B).peers.release(&fetched);
    cluster.run_for(SECOND * 4);
    cluster.run_until(SECOND * 30, |cluster| !is_out(cluster));
    // It has heard the completion, if late, and its rank moved once.
    assert!(is_ready(&cluster.fetch(B, A, &[1])[0]));
    assert_eq!((cluster.node(A).rank(2), cluster.node(A).leases()), (2, 0));
}

#[test]
fn a_transfer_that_takes_long_blames_nobody() {
    let mut shape = patient();
    // One READ of a few seconds.
    shape.network.read_rate = NonZeroU64::new(100);
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1]);
    let began = cluster.now();
    let id = cluster.begin_fetch(B, A, &[1]);
    let fetched = cluster.finish(B, id);
    assert!(is_ready(&fetched.outcomes[0]), "{fetched:?}");
    assert!(cluster.now().since(began) > SILENCE_MAX * 2);
    assert_eq!(opened(&cluster), 0);
}

#[test]
fn reads_of_a_holder_that_hangs_end_by_their_own_deadline() {
    let mut shape = patient();
    shape.network.read_rate = NonZeroU64::new(100);
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1]);
    let id = cluster.begin_fetch(B, A, &[1]);
    cluster.run_until(SECOND, |cluster| !cluster.network.landing(endpoint(B)).is_empty());
    cluster.pause(A, SECOND * 2);
    cluster.run_until(SECOND, is_out);
    // The NIC serves on, and what lands within the lease counts.
    let fetched = cluster.finish(B, id);
    assert!(is_ready(&fetched.outcomes[0]), "{fetched:?}");
}

#[test]
fn a_holder_that_takes_its_time_for_a_lend_but_is_there_is_blamed_for_nothing() {
    let mut cluster = Cluster::new(2, patient());
    cluster.crash(A);
    let mut holder = Stranger::new(&cluster, A);
    holder.pool.mapping().write(0, &bytes_of(1)).unwrap();
    let id = cluster.begin_fetch(B, A, &[1]);
    let on = holder.welcome(&mut cluster);
    let lend = |message: &Message<'_>| matches!(message, Message::Lend { .. });
    let said = holder.hear_a(&mut cluster, on, lend);
    let Message::Lend { request, .. } = said.message() else { unreachable!() };
    holder.live_for(&mut cluster, on, SECOND * 4);
    let bytes = bytes_of(1);
    let len = u32::try_from(bytes.len()).unwrap();
    let loans = [LoanEntry::from(Loan::Ready {
        rank: EvictionRank::FIRST,
        generation: Generation(1),
        place: Place::Span(holder.region.remote(0, len).unwrap()),
        checksum: checksum_bytes(&bytes),
    })];
    let (lease, load) = (LeaseId(7), Load::default());
    holder.say(on, &Message::Lease { request, lease, ttl_ms: 9000, load, loans: &loans });
    holder.live_for(&mut cluster, on, SECOND);
    assert!(cluster.node(B).view(1).is_none(), "it waits for the ranks");
    holder.live_for(&mut cluster, on, SECOND * 5);
    assert!(is_ready(&cluster.finish(B, id).outcomes[0]));
    assert_eq!(opened(&cluster), 0);
}

#[test]
fn a_stall_of_this_node_is_nobodys_silence() {
    for told in [true, false] {
        let mut cluster = connected(patient());
        // So that no answer is waiting when it wakes up.
        cluster.network.partition(endpoint(A), endpoint(B));
        let id = cluster.begin_fetch(B, A, &[2]);
        cluster.run_for(SILENCE_ASK + Duration::from_millis(100));
        let to = cluster.now() + SECOND;
        cluster.network.advance_to(to);
        if told {
            let node = cluster.node_mut(B);
            node.peers.handle_stall(SECOND, &mut node.landing, to);
        }
        cluster.turn();
        cluster.network.heal(endpoint(A), endpoint(B));
        let outcome = cluster.finish(B, id).outcomes[0];
        assert_eq!(is_ready(&outcome), told, "{outcome:?}");
        assert_eq!(opened(&cluster), usize::from(!told));
    }
}
