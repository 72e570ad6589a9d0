//! Leases from the holder's side: completions lost, repeated, late and false; readers that die.

use std::time::Duration;

use super::cluster::{Cluster, Shape, endpoint, is_ready, node_id};
use super::stranger::{Said, Stranger};
use crate::event::{Event, LeaseEnd, LendRefusal};
use crate::fabric::{CompletionStatus, RemoteSpan};
use crate::peer::FetchOutcome;
use crate::protocol::{AbortReason, Loan, LoanEntry, Message, Outcomes, Place, RanksStatus};
use crate::types::{LeaseId, NodeEpoch};

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

fn ranks_of(said: &Said) -> (RanksStatus, Vec<u8>) {
    match said.message() {
        Message::Ranks { status, ranks, .. } => (status, ranks.to_vec()),
        other => panic!("{other:?}"),
    }
}

fn renewed(said: &Said) -> (LeaseId, u32) {
    match said.message() {
        Message::Renewed { lease, ttl_ms, .. } => (lease, ttl_ms),
        other => panic!("{other:?}"),
    }
}

fn span_of(loan: &LoanEntry) -> RemoteSpan {
    match loan.loan() {
        Loan::Ready { place: Place::Span(span), .. } => span,
        other => panic!("{other:?}"),
    }
}

/// A holds blocks 1 to 3; a stranger is connected to it.
fn holder() -> (Cluster, Stranger, crate::fabric::ConnectionId) {
    let mut cluster = Cluster::new(1, Shape::default());
    cluster.save(A, &[1, 2, 3]);
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    (cluster, stranger, on)
}

#[test]
fn a_completion_moves_the_rank_of_good_blocks_and_unpins_all() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1, 9, 2]);
    assert_eq!((cluster.node(A).pins(1), cluster.node(A).pins(2)), (1, 1));
    let said = stranger.complete(&mut cluster, on, lease, &[true, false, false]);
    assert_eq!(ranks_of(&said), (RanksStatus::Recorded, vec![1, 0, 0]));
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).rank(2)), (2, 1));
    assert_eq!((cluster.node(A).pins(1), cluster.node(A).pins(2)), (0, 0));
}

#[test]
fn a_repeated_completion_answers_the_same_and_moves_nothing() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1, 2]);
    let first = ranks_of(&stranger.complete(&mut cluster, on, lease, &[true, true]));
    assert_eq!(first, (RanksStatus::Recorded, vec![1, 1]));
    for good in [[true, true], [false, false]] {
        let again = ranks_of(&stranger.complete(&mut cluster, on, lease, &good));
        assert_eq!(again, (RanksStatus::Replayed, vec![1, 1]));
    }
    // Over another connection, too.
    let on = stranger.shake_hands(&mut cluster, A);
    let again = ranks_of(&stranger.complete(&mut cluster, on, lease, &[true, true]));
    assert_eq!(again, (RanksStatus::Replayed, vec![1, 1]));
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).rank(2)), (2, 2));
}

#[test]
fn a_completion_after_the_expiry_moves_no_rank() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1]);
    stranger.closed(&mut cluster, on);
    cluster.run_for(Duration::from_millis(20));
    assert_eq!((cluster.node(A).pins(1), cluster.node(A).leases()), (0, 0));
    let on = stranger.shake_hands(&mut cluster, A);
    let said = stranger.complete(&mut cluster, on, lease, &[true]);
    assert_eq!(ranks_of(&said), (RanksStatus::Unknown, vec![]));
    assert_eq!(cluster.node(A).rank(1), 1);
}

#[test]
fn a_completion_of_an_unknown_lease_moves_no_rank() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1]);
    for unknown in [LeaseId(lease.0 + 1), LeaseId(lease.0 + (1 << 32)), LeaseId(u64::MAX)] {
        let said = stranger.complete(&mut cluster, on, unknown, &[true]);
        assert_eq!(ranks_of(&said), (RanksStatus::Unknown, vec![]));
    }
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).pins(1)), (1, 1));
    let said = stranger.complete(&mut cluster, on, lease, &[true]);
    assert_eq!(ranks_of(&said), (RanksStatus::Recorded, vec![1]));
}

#[test]
fn a_completion_of_another_requesters_lease_moves_no_rank() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1]);
    let mut thief = Stranger::new(&cluster, C);
    let other = thief.shake_hands(&mut cluster, A);
    let said = thief.complete(&mut cluster, other, lease, &[true]);
    assert_eq!(ranks_of(&said), (RanksStatus::Unknown, vec![]));
    thief.say(other, &Message::Abort { lease, reason: AbortReason::Cancelled });
    thief.say(other, &Message::Renew { lease });
    let said = thief.hear(&mut cluster, other);
    assert_eq!(renewed(&said), (lease, 0));
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).pins(1)), (1, 1));
    let said = stranger.complete(&mut cluster, on, lease, &[true]);
    assert_eq!(ranks_of(&said), (RanksStatus::Recorded, vec![1]));
}

#[test]
fn a_completion_of_the_wrong_shape_moves_no_rank_and_leaves_the_lease() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1, 9, 2]);
    // Too short, too long, and a block that was not lent.
    for good in [&[true, false][..], &[true; 9], &[true, true, true]] {
        let said = stranger.complete(&mut cluster, on, lease, good);
        assert_eq!(ranks_of(&said), (RanksStatus::Unknown, vec![]));
    }
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).pins(1)), (1, 1));
    let said = stranger.complete(&mut cluster, on, lease, &[true, false, true]);
    assert_eq!(ranks_of(&said), (RanksStatus::Recorded, vec![1, 0, 1]));
    assert_eq!(cluster.node(A).leases(), 0);
}

#[test]
fn a_completion_under_another_start_of_its_requester_is_unknown() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1]);
    let mut bitmap = Vec::new();
    let count = Outcomes::pack(&mut bitmap, [true].into_iter());
    let outcomes = Outcomes::new(count, &bitmap).unwrap();
    stranger.say(on, &Message::Complete { lease, epoch: NodeEpoch(99), outcomes });
    let said = stranger.hear_a(&mut cluster, on, |m| matches!(m, Message::Ranks { .. }));
    assert_eq!(ranks_of(&said), (RanksStatus::Unknown, vec![]));
    assert_eq!(cluster.node(A).rank(1), 1);
}

#[test]
fn a_requesters_restart_ends_the_leases_of_its_earlier_start_at_once() {
    let (mut cluster, mut stranger, old) = holder();
    stranger.lend(&mut cluster, old, &[1]);
    stranger.lend(&mut cluster, old, &[2]);
    stranger.epoch = NodeEpoch(2);
    let began = cluster.now();
    let on = stranger.shake_hands(&mut cluster, A);
    let (lease, _) = stranger.lend(&mut cluster, on, &[3]);
    assert!(cluster.now().since(began) < Duration::from_millis(100));
    let pins = [1, 2, 3].map(|block| cluster.node(A).pins(block));
    assert_eq!((pins, cluster.node(A).leases()), ([0, 0, 1], 1));
    let superseded = |e: &Event| matches!(e, Event::LeaseEnded { end: LeaseEnd::Superseded, .. });
    assert_eq!(cluster.node(A).log.count(superseded), 2);
    let said = stranger.complete(&mut cluster, on, lease, &[true]);
    assert_eq!(ranks_of(&said), (RanksStatus::Recorded, vec![1]));
}

#[test]
fn a_reconnected_requester_gives_back_what_it_reads_no_more() {
    let (mut cluster, mut stranger, on) = holder();
    stranger.lend(&mut cluster, on, &[1, 2]);
    let on = stranger.shake_hands(&mut cluster, A);
    cluster.run_for(Duration::from_millis(20));
    assert_eq!(cluster.node(A).leases(), 1, "the holder cannot know that nobody reads");
    let reason = AbortReason::Reconnected;
    stranger.say(on, &Message::Abort { lease: LeaseId::NONE, reason });
    cluster.run_for(Duration::from_millis(20));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
    assert_eq!(cluster.node(A).rank(1), 1);
}

#[test]
fn an_expired_lease_costs_its_requester_the_access_before_the_pins() {
    // However long the flush takes: until it is over the block is pinned, and it is not read.
    let mut shape = Shape::default();
    shape.network.drain = Duration::from_millis(400)..=Duration::from_millis(400);
    let ttl = shape.peers.lease.ttl;
    let mut cluster = Cluster::new(1, shape);
    cluster.save(A, &[1]);
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    let (_, loans) = stranger.lend(&mut cluster, on, &[1]);
    let span = span_of(&loans[0]);
    assert_eq!(stranger.read(&mut cluster, on, span), CompletionStatus::Success);
    let granted = cluster.now();
    cluster.run_until(ttl * 2, |cluster| cluster.node(A).peers.connected().count() == 0);
    assert!(cluster.now().since(granted) > ttl - Duration::from_millis(10));
    assert_eq!((cluster.node(A).pins(1), cluster.node_mut(A).landing.evict()), (1, None));
    assert!(stranger.try_read(&mut cluster, on, span) != Some(CompletionStatus::Success));
    cluster.run_for(Duration::from_millis(450));
    assert_eq!((cluster.node(A).pins(1), cluster.node(A).rank(1)), (0, 1));
    let expired = |e: &Event| matches!(e, Event::LeaseEnded { end: LeaseEnd::Expired, .. });
    assert_eq!(cluster.node(A).log.count(expired), 1);
}

#[test]
fn leases_that_fall_due_during_a_cut_do_not_cost_the_next_connection() {
    let mut shape = Shape::default();
    shape.network.drain = Duration::from_millis(300)..=Duration::from_millis(300);
    let mut cluster = Cluster::new(1, shape);
    cluster.save(A, &[1, 2]);
    let mut stranger = Stranger::new(&cluster, B);
    let old = stranger.shake_hands(&mut cluster, A);
    stranger.lend(&mut cluster, old, &[1]);
    cluster.run_for(Duration::from_millis(200));
    stranger.lend(&mut cluster, old, &[2]);
    cluster.run_until(Duration::from_secs(2), |c| c.node(A).peers.connected().count() == 0);
    let on = stranger.shake_hands(&mut cluster, A);
    cluster.run_for(Duration::from_millis(400));
    assert_eq!(cluster.node(A).leases(), 0);
    stranger.say(on, &Message::Ping { token: 5 });
    let said = stranger.hear_a(&mut cluster, on, |m| matches!(m, Message::Pong { .. }));
    assert!(matches!(said.message(), Message::Pong { token: 5, .. }));
}

#[test]
fn a_renewed_lease_lasts_another_period_and_an_expired_one_is_not_renewed() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1]);
    for _ in 0..5 {
        cluster.run_for(Duration::from_millis(700));
        stranger.say(on, &Message::Renew { lease });
        let said = stranger.hear_a(&mut cluster, on, |m| matches!(m, Message::Renewed { .. }));
        assert_eq!(renewed(&said), (lease, 1000));
    }
    assert_eq!(cluster.node(A).pins(1), 1);
    stranger.closed(&mut cluster, on);
    let on = stranger.shake_hands(&mut cluster, A);
    stranger.say(on, &Message::Renew { lease });
    let said = stranger.hear_a(&mut cluster, on, |m| matches!(m, Message::Renewed { .. }));
    assert_eq!(renewed(&said), (lease, 0));
}

#[test]
fn a_requester_that_dies_in_mid_read_costs_no_rank_and_its_pins_return() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1, 2]);
    cluster.begin_fetch(B, A, &[1, 2]);
    let reading = |cluster: &Cluster| !cluster.network.exposed().is_empty();
    cluster.run_until(Duration::from_secs(1), reading);
    cluster.crash(B);
    cluster.run_for(Duration::from_millis(900));
    assert_eq!(cluster.node(A).pins(1), 1, "nobody has said that the read is over");
    cluster.run_for(Duration::from_millis(200));
    assert_eq!((cluster.node(A).pins(1), cluster.node(A).leases()), (0, 0));
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).rank(2)), (1, 1));
    // Its next start reads as if nothing had been.
    cluster.start(B);
    assert!(cluster.fetch(B, A, &[1, 2]).iter().all(is_ready));
    assert_eq!((cluster.node(A).rank(1), cluster.node(B).rank(1)), (2, 1));
}

#[test]
fn a_reader_that_is_cut_off_never_publishes_what_took_the_blocks_place() {
    // Partitions of any length at any moment of a read; as soon as the holder may, it evicts and
    // overwrites. `Cluster::check` sees a wrong byte at the reader, and a READ of unpinned memory.
    for seed in 0..60 {
        let mut shape = Shape { seed, ..Shape::default() };
        shape.network.delay = Duration::from_micros(50)..=Duration::from_millis(3);
        shape.network.give_up = Duration::from_secs(20);
        let mut cluster = Cluster::new(2, shape);
        cluster.save(A, &[1, 2, 3, 4]);
        let id = cluster.begin_fetch(B, A, &[1, 2, 3, 4]);
        cluster.run_for(Duration::from_micros(seed * 811 % 20_000));
        cluster.network.partition(endpoint(A), endpoint(B));
        let cut = |cluster: &Cluster| cluster.node(A).leases() == 0;
        cluster.run_for(Duration::from_millis(seed * 97 % 2500));
        if cut(&cluster) {
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

#[test]
fn a_requesters_quota_is_answered_busy_and_leaves_room_for_others() {
    let mut shape = Shape::default();
    shape.peers.lease.leases_per_requester = 2;
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1, 2, 3]);
    let mut stranger = Stranger::new(&cluster, C);
    let on = stranger.shake_hands(&mut cluster, A);
    let (first, _) = stranger.lend(&mut cluster, on, &[1]);
    stranger.lend(&mut cluster, on, &[2]);
    let (none, loans) = stranger.lend(&mut cluster, on, &[3, 9]);
    assert_eq!(none, LeaseId::NONE);
    let refused = [Loan::Busy(LendRefusal::Quota), Loan::NotFound];
    assert_eq!(loans.iter().map(LoanEntry::loan).collect::<Vec<_>>(), refused);
    assert_eq!(cluster.node(A).pins(3), 0);
    assert!(is_ready(&cluster.fetch(B, A, &[3])[0]));
    stranger.complete(&mut cluster, on, first, &[true]);
    let (_, loans) = stranger.lend(&mut cluster, on, &[3]);
    assert!(loans[0].loan().is_ready());
}

#[test]
fn a_draining_node_answers_busy_and_lets_running_leases_end() {
    let (mut cluster, mut stranger, on) = holder();
    let (lease, _) = stranger.lend(&mut cluster, on, &[1]);
    cluster.node_mut(A).peers.drain();
    let (none, loans) = stranger.lend(&mut cluster, on, &[2]);
    assert_eq!((none, loans[0].loan()), (LeaseId::NONE, Loan::Busy(LendRefusal::Draining)));
    // The lease ends by its reader or by the deadline that it has.
    stranger.say(on, &Message::Renew { lease });
    let said = stranger.hear_a(&mut cluster, on, |m| matches!(m, Message::Renewed { .. }));
    assert_eq!(renewed(&said), (lease, 0));
    assert_eq!(cluster.node(A).peers.leases_out(), 1);
    let said = stranger.complete(&mut cluster, on, lease, &[true]);
    assert_eq!(ranks_of(&said), (RanksStatus::Recorded, vec![1]));
    assert_eq!(cluster.node(A).peers.leases_out(), 0);
}

#[test]
fn a_holder_under_pressure_says_how_long_to_wait() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1]);
    cluster.node_mut(A).landing.pause_ms = 25;
    let id = cluster.begin_fetch(B, A, &[1]);
    let fetched = cluster.finish(B, id);
    assert_eq!((fetched.load.pause_ms, fetched.node), (25, node_id(A)));
    assert!(matches!(fetched.outcomes[0], FetchOutcome::Ready { .. }));
}
