//! Residents that whoever owns their memory takes back, while peers read them or want to.

use std::time::Duration;

use super::cluster::{Cluster, STRIDED, Shape, endpoint, is_ready};
use super::stranger::Stranger;
use crate::event::{Event, LeaseEnd};
use crate::fabric::{CompletionStatus, ConnectionId, RemoteSpan};
use crate::limits;
use crate::peer::{FetchOutcome, WithdrawalId};
use crate::protocol::{Loan, LoanEntry, Message, Place, RanksStatus};
use crate::types::{Generation, LeaseId, ResidentId};

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

/// More than a look and the end of a connection take.
const SOON: Duration = Duration::from_millis(50);

fn shape(windows: u16) -> Shape {
    let mut shape = Shape::default();
    shape.network.windows = windows;
    // No lease of a test ends by itself.
    shape.peers.lease.ttl = Duration::from_secs(60);
    shape
}

/// A holds blocks 1 to 3; a stranger is connected to it.
fn holder(shape: Shape) -> (Cluster, Stranger, ConnectionId) {
    let mut cluster = Cluster::new(1, shape);
    cluster.save(A, &[1, 2, 3]);
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    (cluster, stranger, on)
}

fn withdraw(cluster: &mut Cluster, id: u64, blocks: &[u16]) {
    let now = cluster.now();
    cluster.node_mut(A).withdraw(id, blocks, now);
}

fn is_over(cluster: &Cluster, id: u64) -> bool {
    cluster.node(A).withdrawn.contains(&WithdrawalId(id))
}

fn span_of(loan: &LoanEntry) -> RemoteSpan {
    match loan.loan() {
        Loan::Ready { place: Place::Span(span), .. } => span,
        other => panic!("{other:?}"),
    }
}

/// For how long a lease goes on, milliseconds.
fn renewed(
    stranger: &mut Stranger,
    cluster: &mut Cluster,
    on: ConnectionId,
    lease: LeaseId,
) -> u32 {
    stranger.say(on, &Message::Renew { lease });
    match stranger.hear_a(cluster, on, |m| matches!(m, Message::Renewed { .. })).message() {
        Message::Renewed { ttl_ms, .. } => ttl_ms,
        _ => unreachable!(),
    }
}

fn expired(cluster: &Cluster) -> usize {
    let expired = |e: &Event| matches!(e, Event::LeaseEnded { end: LeaseEnd::Expired, .. });
    cluster.node(A).log.count(expired)
}

#[test]
fn what_nobody_reads_goes_at_once_and_is_lent_no_more() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1, 2]);
    let was = cluster.node(A).view(1).unwrap().id;
    withdraw(&mut cluster, 7, &[1]);
    let node = cluster.node_mut(A);
    assert_eq!(node.peers.poll_withdrawn(), Some(WithdrawalId(7)));
    assert_eq!((node.rank(1), node.landing.removed), (0, 1));
    // Neither what is gone nor what never was is waited for.
    let unknown = ResidentId { slot: 40, generation: Generation(9) };
    let nowhere = ResidentId { slot: u32::MAX, generation: Generation(1) };
    let now = cluster.now();
    let node = cluster.node_mut(A);
    let ids = vec![was, unknown, nowhere];
    node.peers.withdraw(WithdrawalId(8), ids, &mut node.landing, now);
    node.peers.withdraw(WithdrawalId(9), Vec::new(), &mut node.landing, now);
    let over = std::iter::from_fn(|| node.peers.poll_withdrawn());
    assert_eq!(over.collect::<Vec<_>>(), [WithdrawalId(8), WithdrawalId(9)]);
    let outcomes = cluster.fetch(B, A, &[1, 2]);
    assert_eq!(outcomes[0], FetchOutcome::NotFound);
    assert!(is_ready(&outcomes[1]));
    let gone = |event: &Event| matches!(event, Event::Removed { .. } | Event::Evicted { .. });
    assert_eq!(cluster.node(A).log.count(gone), 1);
    // The same block may come again.
    cluster.save(A, &[1]);
    assert!(is_ready(&cluster.fetch(B, A, &[1])[0]));
}

#[test]
fn a_read_that_is_under_way_ends_well_and_its_blocks_go_then() {
    let mut cluster = Cluster::new(3, Shape::default());
    cluster.save(A, &[1]);
    cluster.node_mut(A).landing.save_in_pieces(STRIDED, 3);
    // So that the next lend is read at once.
    assert!(is_ready(&cluster.fetch(C, A, &[1])[0]));
    let id = cluster.begin_fetch(B, A, &[STRIDED, 1]);
    cluster.run_until(Duration::from_secs(1), |cluster| {
        !cluster.network.landing(endpoint(B)).is_empty()
    });
    withdraw(&mut cluster, 7, &[STRIDED, 1]);
    assert_eq!((cluster.node(A).pins(STRIDED), cluster.node(A).pins(1)), (1, 1));
    let late = cluster.begin_fetch(C, A, &[STRIDED]);
    let fetched = cluster.finish(B, id);
    assert!(fetched.outcomes.iter().all(is_ready), "{:?}", fetched.outcomes);
    assert_eq!(cluster.finish(C, late).outcomes, [FetchOutcome::NotFound]);
    cluster.run_until(SOON, |cluster| is_over(cluster, 7));
    assert_eq!((cluster.node(A).residents().len(), cluster.node(A).landing.removed), (0, 2));
    assert_eq!((expired(&cluster), cluster.node(A).peers.connected().count()), (0, 2));
    assert_eq!((cluster.node(B).rank(STRIDED), cluster.node(B).rank(1)), (1, 2));
}

#[test]
fn who_reads_on_after_the_grace_loses_the_access_and_nobody_else_does() {
    for windows in [0, 8] {
        let (mut cluster, mut stranger, on) = holder(shape(windows));
        let mut other = Stranger::new(&cluster, C);
        let theirs = other.shake_hands(&mut cluster, A);
        let (held, loans) = stranger.lend(&mut cluster, on, &[1]);
        let (kept, more) = stranger.lend(&mut cluster, on, &[3]);
        let (lease, lent) = other.lend(&mut cluster, theirs, &[3]);
        withdraw(&mut cluster, 7, &[1]);
        assert_eq!(renewed(&mut stranger, &mut cluster, on, held), 0);
        assert_eq!(renewed(&mut stranger, &mut cluster, on, kept), 60_000);
        cluster.run_for(limits::WITHDRAW_GRACE - SOON);
        assert_eq!((is_over(&cluster, 7), cluster.node(A).pins(1)), (false, 1));
        cluster.run_for(SOON * 2);
        assert_eq!((is_over(&cluster, 7), cluster.node(A).rank(1)), (true, 0));
        assert_eq!((expired(&cluster), cluster.node(A).pins(3)), (1, 2));
        if windows == 0 {
            stranger.closed(&mut cluster, on);
        } else {
            let status = stranger.read(&mut cluster, on, span_of(&more[0]));
            assert_eq!(status, CompletionStatus::Success);
            let status = stranger.read(&mut cluster, on, span_of(&loans[0]));
            assert_eq!(status, CompletionStatus::RemoteAccess);
        }
        let status = other.read(&mut cluster, theirs, span_of(&lent[0]));
        assert_eq!(status, CompletionStatus::Success);
        let said = other.complete(&mut cluster, theirs, lease, &[true]);
        assert!(matches!(said.message(), Message::Ranks { status: RanksStatus::Recorded, .. }));
    }
}

#[test]
fn a_read_that_hangs_fails_at_its_reader_which_gets_the_block_elsewhere() {
    let mut shape = shape(0);
    shape.network.give_up = Duration::from_secs(600);
    shape.peers.requester.transfer_timeout = Duration::from_secs(20);
    let mut cluster = Cluster::new(3, shape);
    cluster.save(A, &[1, 2]);
    cluster.save(C, &[1]);
    assert!(is_ready(&cluster.fetch(B, A, &[2])[0]));
    let id = cluster.begin_fetch(B, A, &[1]);
    cluster.run_until(Duration::from_secs(1), |cluster| {
        !cluster.network.landing(endpoint(B)).is_empty()
    });
    cluster.network.partition(endpoint(A), endpoint(B));
    let began = cluster.now();
    withdraw(&mut cluster, 7, &[1]);
    cluster.run_until(limits::WITHDRAW_GRACE + SOON, |cluster| is_over(cluster, 7));
    assert!(cluster.now().since(began) >= limits::WITHDRAW_GRACE);
    assert_eq!((expired(&cluster), cluster.node(A).rank(1)), (1, 0));
    cluster.network.heal(endpoint(A), endpoint(B));
    let outcome = cluster.finish(B, id).outcomes[0];
    assert!(outcome.is_disappointing(), "{outcome:?}");
    assert!(is_ready(&cluster.fetch(B, C, &[1])[0]));
    assert_eq!((cluster.node(B).rank(1), cluster.node(C).rank(1)), (1, 2));
}

#[test]
fn a_lend_that_waits_gives_up_what_is_withdrawn() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1, 2]);
    cluster.node_mut(A).landing.unready = u32::MAX;
    let id = cluster.begin_fetch(B, A, &[1, 2]);
    cluster.run_until(Duration::from_secs(1), |cluster| cluster.node(A).pins(1) == 1);
    withdraw(&mut cluster, 7, &[1]);
    assert_eq!(cluster.node_mut(A).peers.poll_withdrawn(), Some(WithdrawalId(7)));
    cluster.node_mut(A).landing.unready = 1;
    let fetched = cluster.finish(B, id);
    assert_eq!(fetched.outcomes[0], FetchOutcome::NotFound);
    assert!(is_ready(&fetched.outcomes[1]));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(2)), (0, 0));
}

#[test]
fn a_stall_moves_the_end_of_the_grace_once() {
    let (mut cluster, mut stranger, on) = holder(shape(0));
    stranger.lend(&mut cluster, on, &[1]);
    withdraw(&mut cluster, 7, &[1]);
    let (late, now) = (Duration::from_secs(3), cluster.now());
    for _ in 0..3 {
        let node = cluster.node_mut(A);
        node.peers.handle_stall(late, &mut node.landing, now);
    }
    stranger.live_for(&mut cluster, on, limits::WITHDRAW_GRACE + late - SOON);
    assert!(!is_over(&cluster, 7));
    cluster.run_for(SOON * 2);
    assert!(is_over(&cluster, 7));
}

#[test]
fn a_node_that_drains_or_shuts_down_gives_back_as_before() {
    let (mut cluster, mut stranger, on) = holder(shape(0));
    let (lease, _) = stranger.lend(&mut cluster, on, &[1]);
    cluster.node_mut(A).peers.drain();
    withdraw(&mut cluster, 7, &[1, 2]);
    assert_eq!((cluster.node(A).rank(2), cluster.node(A).pins(1)), (0, 1));
    stranger.complete(&mut cluster, on, lease, &[true]);
    cluster.run_until(SOON, |cluster| is_over(cluster, 7));

    let (mut cluster, mut stranger, on) = holder(shape(0));
    stranger.lend(&mut cluster, on, &[1]);
    cluster.node_mut(A).peers.shut_down();
    withdraw(&mut cluster, 7, &[1]);
    cluster.run_until(limits::WITHDRAW_GRACE + SOON, |cluster| is_over(cluster, 7));
    assert_eq!((cluster.node(A).rank(1), cluster.node(A).leases()), (0, 0));
}

#[test]
fn many_go_in_steps_and_what_is_withdrawn_twice_goes_once() {
    let count = limits::WITHDRAW_LOOKS + 40;
    let mut shape = shape(0);
    (shape.residents, shape.pool_bytes) = (1024, 1 << 20);
    let mut cluster = Cluster::new(1, shape);
    let blocks: Vec<u16> = (0..).take(count).collect();
    cluster.save(A, &blocks);
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    let (lease, _) = stranger.lend(&mut cluster, on, &[5]);
    withdraw(&mut cluster, 7, &blocks);
    withdraw(&mut cluster, 8, &[5, 6]);
    withdraw(&mut cluster, 9, &[5]);
    assert_eq!(cluster.node(A).residents().len(), 1, "a step for each call");
    cluster.run_for(SOON);
    assert!(![7, 8, 9].into_iter().any(|id| is_over(&cluster, id)));
    stranger.complete(&mut cluster, on, lease, &[true]);
    cluster.run_until(SOON, |cluster| [7, 8, 9].into_iter().all(|id| is_over(cluster, id)));
    assert_eq!(cluster.node(A).landing.removed, count as u64);
    assert_eq!(cluster.node(A).peers.poll_timeout().map(|at| at > cluster.now()), Some(true));
}

#[test]
fn a_local_reader_is_waited_for_and_no_peer_is_blamed_for_it() {
    let (mut cluster, mut stranger, on) = holder(shape(0));
    let (lease, _) = stranger.lend(&mut cluster, on, &[2]);
    let pinned = cluster.node(A).landing.store.pin(&super::cluster::key_of(1)).unwrap();
    withdraw(&mut cluster, 7, &[1]);
    stranger.live_for(&mut cluster, on, limits::WITHDRAW_GRACE * 2);
    assert_eq!((is_over(&cluster, 7), expired(&cluster)), (false, 0));
    cluster.node(A).landing.store.unpin(pinned.id).unwrap();
    cluster.run_until(SOON, |cluster| is_over(cluster, 7));
    stranger.complete(&mut cluster, on, lease, &[true]);
    assert_eq!(cluster.node(A).rank(2), 2);
}

#[test]
fn what_the_node_itself_copies_goes_when_the_copy_has_ended() {
    let mut cluster = Cluster::new(1, Shape::default());
    cluster.save(A, &[1]);
    cluster.node_mut(A).landing.copying = 20;
    let before = cluster.now();
    withdraw(&mut cluster, 7, &[1]);
    assert_eq!(cluster.node(A).rank(1), 1);
    cluster.run_until(SOON, |cluster| is_over(cluster, 7));
    assert!(cluster.now().since(before) >= limits::WITHDRAW_LOOK * 18, "it was asked again");
    assert_eq!(cluster.node(A).rank(1), 0);
}
