//! Blocks that take copies on their way: from where they land to their place, and from there to where
//! they are lent.

use std::time::Duration;

use super::cluster::{Cluster, Shape, is_failed, is_ready};
use crate::event::{BusyReason, Event, LendRefusal};
use crate::limits;
use crate::peer::FetchOutcome;
use crate::types::Scope;

const A: usize = 0;
const B: usize = 1;

fn saved(blocks: &[u16]) -> Cluster {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, blocks);
    cluster
}

#[test]
fn a_block_is_told_of_when_it_has_settled_and_not_before() {
    let mut cluster = saved(&[1, 2]);
    cluster.node_mut(B).landing.settle_after = 7;
    let id = cluster.begin_fetch(B, A, &[1, 2]);
    let before = cluster.now();
    let fetched = cluster.finish(B, id);
    assert!(fetched.outcomes.iter().all(is_ready));
    assert!(cluster.now().since(before) >= limits::LOOK_AGAIN * 6, "it was asked again");
    assert_eq!((cluster.node(A).rank(1), cluster.node(B).rank(1)), (2, 1));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
}

#[test]
fn what_cannot_settle_fails_here_and_moves_no_rank() {
    let mut cluster = saved(&[1]);
    cluster.node_mut(B).landing.never_settles = Some(Scope::Local);
    let id = cluster.begin_fetch(B, A, &[1]);
    let fetched = cluster.finish(B, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Local));
    assert_eq!((cluster.node(A).rank(1), cluster.node(B).rank(1)), (1, 0));
    let mismatch = |event: &Event| *event == Event::ChecksumMismatch;
    assert_eq!(cluster.node(B).log.count(mismatch), 0, "its bytes are not looked at");
    cluster.node_mut(B).landing.never_settles = None;
    assert!(cluster.fetch(B, A, &[1]).iter().all(is_ready), "the peer is not blamed");
}

#[test]
fn a_copy_that_does_not_end_is_given_up() {
    let mut shape = Shape::default();
    shape.peers.requester.transfer_timeout = Duration::from_millis(100);
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1]);
    cluster.node_mut(B).landing.settle_after = u32::MAX;
    let id = cluster.begin_fetch(B, A, &[1]);
    let fetched = cluster.finish(B, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Local));
    // The holder hears of it, too.
    cluster.run_for(Duration::from_millis(50));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
    assert_eq!(cluster.node(B).peers.unfinished(), 0);
}

#[test]
fn a_lend_waits_until_its_blocks_are_ready() {
    let mut cluster = saved(&[1, 2]);
    cluster.node_mut(A).landing.unready = 9;
    assert!(cluster.fetch(B, A, &[1, 2]).iter().all(is_ready));
    assert_eq!((cluster.node(A).rank(1), cluster.node(B).rank(1)), (2, 1));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
}

#[test]
fn blocks_that_do_not_become_ready_are_busy() {
    let mut cluster = saved(&[1]);
    cluster.node_mut(A).landing.unready = u32::MAX;
    let outcomes = cluster.fetch(B, A, &[1, 9]);
    assert_eq!(
        outcomes,
        [FetchOutcome::Busy(BusyReason::Owner(LendRefusal::Staging)), FetchOutcome::NotFound,]
    );
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(1)), (0, 0));
}
