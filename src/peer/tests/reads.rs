//! DESIGN §4: what a read moves and answers when nothing goes wrong, and when a part of it does.

use std::time::Duration;

use super::cluster::{Cluster, Shape, is_failed, is_ready, key_of};
use crate::event::{BusyReason, Event, LendRefusal};
use crate::peer::FetchOutcome;
use crate::types::Scope;

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;

fn cluster(nodes: usize) -> Cluster {
    Cluster::new(nodes, Shape::default())
}

fn ranks(cluster: &Cluster, block: u16) -> Vec<u8> {
    cluster.nodes.iter().flatten().map(|node| node.rank(block)).collect()
}

#[test]
fn each_reader_takes_its_sources_rank_and_raises_it() {
    let mut cluster = cluster(3);
    cluster.save(A, &[1]);
    assert_eq!(ranks(&cluster, 1), [1, 0, 0]);
    assert!(cluster.fetch(B, A, &[1]).iter().all(is_ready));
    assert_eq!(ranks(&cluster, 1), [2, 1, 0]);
    assert!(cluster.fetch(C, B, &[1]).iter().all(is_ready));
    assert_eq!(ranks(&cluster, 1), [2, 2, 1]);
}

#[test]
fn a_repeat_by_the_same_requester_moves_nothing_and_gets_the_same_rank() {
    let mut cluster = cluster(3);
    cluster.save(A, &[1]);
    cluster.fetch(B, A, &[1]);
    cluster.fetch(C, A, &[1]);
    assert_eq!(ranks(&cluster, 1), [3, 1, 2]);
    assert!(cluster.node_mut(B).landing.evict().is_some());
    assert_eq!(ranks(&cluster, 1), [3, 0, 2]);
    assert!(cluster.fetch(B, A, &[1]).iter().all(is_ready));
    assert_eq!(ranks(&cluster, 1), [3, 1, 2]);
}

#[test]
fn two_readers_at_once_get_one_and_two() {
    for seed in 0..20 {
        let mut cluster = Cluster::new(3, Shape { seed, ..Shape::default() });
        cluster.save(A, &[1]);
        let (b, c) = (cluster.begin_fetch(B, A, &[1]), cluster.begin_fetch(C, A, &[1]));
        cluster.finish(B, b);
        cluster.finish(C, c);
        let mut seen = [cluster.node(B).rank(1), cluster.node(C).rank(1)];
        seen.sort_unstable();
        assert_eq!((cluster.node(A).rank(1), seen), (3, [1, 2]));
    }
}

#[test]
fn what_a_fetch_made_ready_is_pinned_once_and_the_lease_is_over() {
    let mut cluster = cluster(2);
    let blocks: Vec<u16> = (1..=40).collect();
    cluster.save(A, &blocks);
    let id = cluster.begin_fetch(B, A, &blocks);
    let fetched = cluster.finish(B, id);
    for (block, outcome) in blocks.iter().zip(&fetched.outcomes) {
        let FetchOutcome::Ready { found, fetched: true } = outcome else {
            panic!("block {block}: {outcome:?}")
        };
        assert_eq!(
            cluster.node(B).view(*block).map(|view| (view.id, view.pins)),
            Some((found.id, 1))
        );
        assert_eq!(cluster.node(A).pins(*block), 0);
    }
    assert_eq!(cluster.node(A).leases(), 0);
    cluster.node(B).peers.release(&fetched);
    assert!(blocks.iter().all(|block| cluster.node(B).pins(*block) == 0));
}

#[test]
fn wrong_bytes_fail_their_block_alone_and_blame_the_peer() {
    let mut cluster = cluster(2);
    cluster.save(A, &[1, 2, 3]);
    // From here on the rule that residents hold their true bytes is broken at A, on purpose.
    cluster.node(A).corrupt(2);
    let id = cluster.begin_fetch(B, A, &[1, 2, 3]);
    while cluster.node(B).fetched.is_empty() {
        cluster.turn();
        let next = cluster.next().unwrap();
        cluster.network.advance_to(next);
    }
    let fetched = cluster.node_mut(B).fetched.pop().unwrap();
    assert_eq!(fetched.id, id);
    assert!(is_ready(&fetched.outcomes[0]) && is_ready(&fetched.outcomes[2]));
    assert!(is_failed(&fetched.outcomes[1], Scope::Peer));
    assert_eq!((ranks(&cluster, 1), ranks(&cluster, 2)), (vec![2, 1], vec![1, 0]));
    let log = &cluster.node(B).log;
    assert_eq!(log.count(|event| *event == Event::ChecksumMismatch), 1);
    assert_eq!(
        log.count(|event| *event == Event::TransferFailed { blocks: 1, scope: Scope::Peer }),
        1
    );
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(2)), (0, 0));
}

#[test]
fn each_position_of_a_partial_answer_keeps_its_own_outcome() {
    let mut shape = Shape::default();
    shape.peers.lease.bytes_per_requester = 700;
    let mut cluster = Cluster::new(2, shape);
    cluster.save(A, &[1, 3, 5]);
    // 265, 392 and 522 bytes: the third is over the quota.
    let outcomes = cluster.fetch(B, A, &[9, 1, 8, 3, 5]);
    assert_eq!(outcomes[0], FetchOutcome::NotFound);
    assert!(is_ready(&outcomes[1]));
    assert_eq!(outcomes[2], FetchOutcome::NotFound);
    assert!(is_ready(&outcomes[3]));
    assert_eq!(outcomes[4], FetchOutcome::Busy(BusyReason::Owner(LendRefusal::Quota)));
    assert_eq!((ranks(&cluster, 1), ranks(&cluster, 3)), (vec![2, 1], vec![2, 1]));
    assert_eq!((ranks(&cluster, 5), cluster.node(A).pins(5)), (vec![1, 0], 0));
}

#[test]
fn a_block_without_room_here_is_busy_and_given_back() {
    let mut cluster = Cluster::new(2, Shape { pool_bytes: 4096, ..Shape::default() });
    // Blocks of 200 bytes, which take 256: sixteen fill the pool.
    let small: Vec<u16> = (1..=17).map(|number| number * 21).collect();
    cluster.save(B, &small[..15]);
    for block in &small[..15] {
        cluster.node(B).landing.store.pin(&key_of(*block)).unwrap();
    }
    cluster.save(A, &small[15..]);
    let outcomes = cluster.fetch(B, A, &small[15..]);
    assert!(is_ready(&outcomes[0]));
    assert_eq!(outcomes[1], FetchOutcome::Busy(BusyReason::Memory));
    assert_eq!(cluster.node(A).leases(), 0);
    assert_eq!((ranks(&cluster, small[15]), ranks(&cluster, small[16])), (vec![2, 1], vec![1, 0]));

    // Without room for any, the lease comes back unread.
    cluster.node(B).landing.store.pin(&key_of(small[15])).unwrap();
    let here = FetchOutcome::Busy(BusyReason::Memory);
    assert_eq!(cluster.fetch(B, A, &small[16..]), [here]);
    cluster.run_for(Duration::from_millis(50));
    assert_eq!((cluster.node(A).leases(), cluster.node(A).pins(small[16])), (0, 0));
}
