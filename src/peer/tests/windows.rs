//! Leases with keys of their own: what ends with one, and what does not.

use std::time::Duration;

use super::cluster::{Cluster, Shape, endpoint, is_ready};
use super::stranger::Stranger;
use crate::event::{Event, LeaseEnd, LendRefusal};
use crate::fabric::{CloseReason, CompletionStatus, ConnectionId, RemoteSpan};
use crate::protocol::{AbortReason, Loan, LoanEntry, Message, Place, RanksStatus};
use crate::types::LeaseId;

const A: usize = 0;
const B: usize = 1;

fn shape(windows: u16) -> Shape {
    let mut shape = Shape::default();
    shape.network.windows = windows;
    shape
}

fn span_of(loan: &LoanEntry) -> RemoteSpan {
    match loan.loan() {
        Loan::Ready { place: Place::Span(span), .. } => span,
        other => panic!("{other:?}"),
    }
}

/// A holds blocks 1 to 4; a stranger is connected to it.
fn holder(shape: Shape) -> (Cluster, Stranger, ConnectionId) {
    let mut cluster = Cluster::new(1, shape);
    cluster.save(A, &[1, 2, 3, 4]);
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    (cluster, stranger, on)
}

fn renew(stranger: &mut Stranger, cluster: &mut Cluster, on: ConnectionId, lease: LeaseId) {
    stranger.say(on, &Message::Renew { lease });
    let said = stranger.hear_a(cluster, on, |m| matches!(m, Message::Renewed { .. }));
    let renewed = said.message();
    assert!(matches!(renewed, Message::Renewed { ttl_ms: 1000, .. }), "{renewed:?}");
}

#[test]
fn an_expired_lease_loses_its_keys_before_its_pins_and_the_others_go_on() {
    let (mut cluster, mut stranger, on) = holder(shape(8));
    let (_, first) = stranger.lend(&mut cluster, on, &[1]);
    let (second, other) = stranger.lend(&mut cluster, on, &[2]);
    let (first, other) = (span_of(&first[0]), span_of(&other[0]));
    assert_ne!(first.rkey, other.rkey);
    assert_eq!(stranger.read(&mut cluster, on, first), CompletionStatus::Success);
    for _ in 0..3 {
        cluster.run_for(Duration::from_millis(600));
        renew(&mut stranger, &mut cluster, on, second);
    }
    assert_eq!((cluster.node(A).pins(1), cluster.node(A).pins(2)), (0, 1));
    let expired = |e: &Event| matches!(e, Event::LeaseEnded { end: LeaseEnd::Expired, .. });
    assert_eq!(cluster.node(A).log.count(expired), 1);
    assert_eq!(stranger.read(&mut cluster, on, other), CompletionStatus::Success);
    let said = stranger.complete(&mut cluster, on, second, &[true]);
    assert!(matches!(said.message(), Message::Ranks { status: RanksStatus::Recorded, .. }));
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).rank(2)), (1, 2));
    // The connection lived through all that, and dies of the use of a dead key.
    assert_eq!(stranger.read(&mut cluster, on, first), CompletionStatus::RemoteAccess);
    assert_eq!(stranger.closed(&mut cluster, on), CloseReason::ReadFailed);
}

#[test]
fn a_lease_that_is_completed_or_given_back_takes_its_keys_along() {
    for abort in [false, true] {
        let (mut cluster, mut stranger, on) = holder(shape(8));
        let (lease, loans) = stranger.lend(&mut cluster, on, &[1]);
        let (_, others) = stranger.lend(&mut cluster, on, &[2]);
        if abort {
            stranger.say(on, &Message::Abort { lease, reason: AbortReason::Cancelled });
        } else {
            stranger.complete(&mut cluster, on, lease, &[true]);
        }
        cluster.run_for(Duration::from_millis(5));
        assert_eq!((cluster.node(A).pins(1), cluster.node(A).pins(2)), (0, 1));
        let other = span_of(&others[0]);
        assert_eq!(stranger.read(&mut cluster, on, other), CompletionStatus::Success);
        let ended = span_of(&loans[0]);
        assert_eq!(stranger.read(&mut cluster, on, ended), CompletionStatus::RemoteAccess);
    }
}

#[test]
fn loans_without_a_window_are_busy_until_one_is_free() {
    let (mut cluster, mut stranger, on) = holder(shape(2));
    // Blocks 1 and 3 do not lie next to each other, so each needs a window.
    let (lease, loans) = stranger.lend(&mut cluster, on, &[1, 3]);
    let keys = [span_of(&loans[0]).rkey, span_of(&loans[1]).rkey];
    assert_ne!(keys[0], keys[1]);
    let (none, loans) = stranger.lend(&mut cluster, on, &[2, 9]);
    assert_eq!(none, LeaseId::NONE);
    let refused = [Loan::Busy(LendRefusal::Windows), Loan::NotFound];
    assert_eq!(loans.iter().map(LoanEntry::loan).collect::<Vec<_>>(), refused);
    assert_eq!((cluster.node(A).pins(2), cluster.node(A).leases()), (0, 1));
    let refused = Event::LendRefused { reason: LendRefusal::Windows, blocks: 1 };
    assert_eq!(cluster.node(A).log.count(|event| *event == refused), 1);
    stranger.complete(&mut cluster, on, lease, &[true, true]);
    cluster.run_for(Duration::from_millis(5));
    let (_, loans) = stranger.lend(&mut cluster, on, &[2]);
    assert_eq!(stranger.read(&mut cluster, on, span_of(&loans[0])), CompletionStatus::Success);
}

#[test]
fn a_key_that_does_not_end_in_time_costs_its_requester_the_connection() {
    let mut shape = shape(8);
    shape.network.delay = Duration::from_millis(1100)..=Duration::from_millis(1150);
    let (mut cluster, mut stranger, on) = holder(shape);
    stranger.lend(&mut cluster, on, &[1]);
    stranger.closed(&mut cluster, on);
    cluster.run_for(Duration::from_millis(20));
    assert_eq!((cluster.node(A).pins(1), cluster.node(A).leases()), (0, 0));
}

#[test]
fn nodes_read_from_each_other_by_windows() {
    let mut cluster = Cluster::new(3, shape(16));
    cluster.save(A, &[1, 2, 3, 4, 5, 6]);
    for round in 0..20 {
        assert!(cluster.fetch(B, A, &[1, 2, 3, 4, 5, 6]).iter().all(is_ready), "round {round}");
        while cluster.node_mut(B).landing.evict().is_some() {}
    }
    assert!(cluster.fetch(2, A, &[3]).iter().all(is_ready));
    assert_eq!((cluster.node(A).rank(3), cluster.node(A).rank(4)), (3, 2));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(3)), (0, 0));
}

#[test]
fn whatever_a_network_does_nothing_unpinned_can_be_read() {
    // As without windows: partitions of any length at any moment of a read, and a holder that evicts
    // and overwrites as soon as it may. `Cluster::check` sees a READ of unpinned memory.
    for seed in 0..60 {
        let mut shape = Shape { seed, ..shape(4) };
        shape.network.delay = Duration::from_micros(50)..=Duration::from_millis(3);
        shape.network.give_up = Duration::from_secs(20);
        let mut cluster = Cluster::new(2, shape);
        cluster.save(A, &[1, 2, 3, 4]);
        let id = cluster.begin_fetch(B, A, &[1, 2, 3, 4]);
        cluster.run_for(Duration::from_micros(seed * 811 % 20_000));
        cluster.network.partition(endpoint(A), endpoint(B));
        cluster.run_for(Duration::from_millis(seed * 97 % 2500));
        if cluster.node(A).leases() == 0 {
            while cluster.node_mut(A).landing.evict().is_some() {}
        }
        cluster.network.heal(endpoint(A), endpoint(B));
        let fetched = cluster.finish(B, id);
        cluster.node(B).peers.release(&fetched);
        cluster.run_for(Duration::from_secs(3));
        assert_eq!(cluster.node(A).leases(), 0, "seed {seed}");
        assert!((1..=4).all(|block| cluster.node(A).pins(block) == 0), "seed {seed}");
    }
}
