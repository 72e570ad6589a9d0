//! A node that was stopped for a while blames nobody for it.

use std::time::Duration;

use super::cluster::{Cluster, Shape, endpoint, is_failed, is_ready};
use super::stranger::Stranger;
use crate::event::{Event, LeaseEnd};
use crate::sim::SimConfig;
use crate::types::Scope;

const A: usize = 0;
const B: usize = 1;

/// A network that waits for a stalled node longer than any stall here.
fn patient() -> Shape {
    let network = SimConfig { give_up: Duration::from_secs(600), ..SimConfig::default() };
    Shape { network, ..Shape::default() }
}

/// A has lent before, so that the two are connected.
fn connected(shape: Shape) -> Cluster {
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1, 2, 3]);
    assert!(is_ready(&cluster.fetch(B, A, &[1])[0]));
    cluster
}

/// The network goes on for so long without this node.
fn stall(cluster: &mut Cluster, at: usize, span: Duration, told: bool) {
    let to = cluster.now() + span;
    cluster.network.advance_to(to);
    if told {
        let node = cluster.node_mut(at);
        node.peers.handle_stall(span, &mut node.landing, to);
    }
}

#[test]
fn an_answer_that_a_stalled_requester_could_not_hear_is_not_overdue() {
    for told in [true, false] {
        let mut shape = patient();
        // The lease counts from before it was asked for: it must outlast the stall to be of use.
        shape.peers.lease.ttl = Duration::from_secs(10);
        let mut cluster = connected(shape);
        // So that no answer is waiting when it wakes up.
        cluster.network.partition(endpoint(A), endpoint(B));
        let id = cluster.begin_fetch(B, A, &[2]);
        cluster.turn();
        stall(&mut cluster, B, Duration::from_millis(2500), told);
        cluster.turn();
        cluster.network.heal(endpoint(A), endpoint(B));
        let outcome = cluster.finish(B, id).outcomes[0];
        assert_eq!(is_ready(&outcome), told, "{outcome:?}");
        assert_eq!(is_failed(&outcome, Scope::Path), !told, "{outcome:?}");
    }
}

#[test]
fn a_lease_that_ended_during_the_stall_is_used_no_more_and_is_not_the_peers_fault() {
    for (told, scope) in [(true, Scope::Local), (false, Scope::Path)] {
        let mut cluster = connected(patient());
        let id = cluster.begin_fetch(B, A, &[2]);
        cluster.run_until(Duration::from_secs(1), |cluster| {
            !cluster.network.landing(endpoint(B)).is_empty()
        });
        cluster.network.partition(endpoint(A), endpoint(B));
        stall(&mut cluster, B, Duration::from_secs(5), told);
        let outcome = cluster.finish(B, id).outcomes[0];
        assert!(is_failed(&outcome, scope), "{outcome:?}");
    }
}

#[test]
fn peers_that_a_stalled_node_did_not_hear_are_not_silent() {
    for told in [true, false] {
        let mut cluster = connected(patient());
        cluster.network.partition(endpoint(A), endpoint(B));
        stall(&mut cluster, B, Duration::from_secs(7), told);
        cluster.turn();
        assert_eq!(cluster.node(B).peers.connected().count(), usize::from(told));
        let stalls = |event: &Event| matches!(event, Event::DataThreadStalled { .. });
        assert_eq!(cluster.node(B).log.count(stalls), usize::from(told));
    }
}

#[test]
fn a_stalled_holder_gives_its_requesters_the_time_in_which_it_did_not_hear_them() {
    for told in [true, false] {
        let mut cluster = Cluster::new(1, patient());
        cluster.save(A, &[1]);
        let mut stranger = Stranger::new(&cluster, B);
        let on = stranger.shake_hands(&mut cluster, A);
        stranger.lend(&mut cluster, on, &[1]);
        stall(&mut cluster, A, Duration::from_millis(1100), told);
        cluster.turn();
        cluster.run_for(Duration::from_millis(50));
        assert_eq!(cluster.node(A).leases(), u64::from(told));
        // A lease of one second ends all the same.
        cluster.run_for(Duration::from_millis(1100));
        assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
        let expired =
            |event: &Event| matches!(event, Event::LeaseEnded { end: LeaseEnd::Expired, .. });
        assert_eq!(cluster.node(A).log.count(expired), 1);
    }
}
