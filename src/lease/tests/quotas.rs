//! What bounds a requester, a lease, and all of them.

use super::*;

#[test]
fn quotas_bound_a_requester_and_not_its_neighbour() {
    let mut bench = Bench::new();
    let (a, b) = (borrower(A, 1), borrower(B, 1));
    // Bytes: 1000 in all, 100 a block. The refused block is given back, its position skipped.
    let mut draft = bench.table.draft(a, 11, &bench.shelf).unwrap();
    for block in 0..10 {
        draft.lend(bench.shelf.pin(block), 100, MemoryKind::Host).unwrap();
    }
    let refused = draft.lend(bench.shelf.pin(10), 1, MemoryKind::Host).unwrap_err();
    assert_eq!(refused, QuotaError::Bytes { limit: 1000 });
    assert!(refused.is_backpressure());
    let lease = draft.grant(at(0));
    assert_eq!(bench.shelf.pins(), 10);
    bench.lend(b, &[Some(1)], at(0));
    assert_eq!(bench.complete(a, lease, 11, &[0xff, 3]), Completed::Recorded);
    // Leases: three of one requester, in two of its starts. Those being cut still count.
    bench.lend(a, &[Some(1)], at(0));
    bench.lend(borrower(A, 2), &[Some(1)], at(0));
    bench.lend(a, &[Some(1)], at(0));
    assert!(bench.table.poll_cut(at(1000)).is_some());
    bench.log.drain();
    let refused = bench.table.draft(a, 7, &bench.shelf).unwrap_err();
    assert_eq!(refused, QuotaError::Leases { limit: 3 });
    let reason = LendRefusal::Quota;
    let blocks = 7;
    assert_eq!(bench.log.drain(), [Event::LendRefused { reason, blocks }]);
    assert!(bench.table.draft(b, 1, &bench.shelf).is_ok());
}

#[test]
fn what_engines_open_may_be_lent_beside_the_quota_and_no_more_of_the_nodes_own() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let limit = |refused: Result<(), QuotaError>| match refused {
        Err(QuotaError::Bytes { limit }) => limit,
        other => panic!("{other:?}"),
    };
    let (own, engines) = (MemoryKind::Host, MemoryKind::Engine);
    // Without it all blocks are the quota's.
    let mut draft = bench.table.draft(a, 3, &bench.shelf).unwrap();
    draft.lend(bench.shelf.pin(0), 900, engines).unwrap();
    assert_eq!(limit(draft.lend(bench.shelf.pin(1), 101, engines)), 1000);
    assert_eq!(limit(draft.lend(bench.shelf.pin(1), 101, own)), 1000);
    drop(draft);
    bench.table.set_in_place_quota(5000);
    let mut draft = bench.table.draft(a, 5, &bench.shelf).unwrap();
    draft.lend(bench.shelf.pin(0), 4900, engines).unwrap();
    draft.lend(bench.shelf.pin(1), 1000, own).unwrap();
    assert_eq!(limit(draft.lend(bench.shelf.pin(2), 1, own)), 1000, "the node's own is as bounded");
    draft.lend(bench.shelf.pin(2), 100, engines).unwrap();
    assert_eq!(limit(draft.lend(bench.shelf.pin(3), 1, engines)), 6000);
    let all = draft.grant(at(0));
    let held = Usage { leases: 1, bytes: 6000, own_bytes: 1000, blocks: 3 };
    assert_eq!((bench.table.usage(a.requester), bench.table.totals()), (held, held));
    // It goes, and what is out stays: only what comes waits.
    bench.table.set_in_place_quota(0);
    assert!(bench.table.renew(all, a, at(10)).is_some());
    let mut draft = bench.table.draft(a, 2, &bench.shelf).unwrap();
    assert_eq!(limit(draft.lend(bench.shelf.pin(4), 1, engines)), 1000);
    assert_eq!(limit(draft.lend(bench.shelf.pin(4), 1, own)), 1000);
    drop(draft);
    assert_eq!(bench.complete(a, all, 5, &[0b01011]), Completed::Recorded);
    let mut draft = bench.table.draft(a, 1, &bench.shelf).unwrap();
    draft.lend(bench.shelf.pin(4), 1000, own).unwrap();
    drop(draft);
    bench.assert_idle();
}

#[test]
fn the_table_and_each_lease_are_bounded() {
    let mut bench = Bench::new();
    for requester in 0..8 {
        bench.lend(borrower(requester, 1), &[Some(1)], at(0));
    }
    let full = bench.table.draft(borrower(9, 1), 1, &bench.shelf).unwrap_err();
    assert_eq!(full, QuotaError::Table { limit: 8 });
    assert_eq!(bench.cut_all(at(1000)).len(), 8);
    let a = borrower(A, 1);
    let limit = limits::LEND_BLOCKS_MAX;
    let long = bench.table.draft(a, limit + 1, &bench.shelf).unwrap_err();
    assert_eq!(long, QuotaError::Blocks { limit });
    let mut draft = bench.table.draft(a, 1, &bench.shelf).unwrap();
    for _ in 0..limit {
        draft.lend(bench.shelf.pin(1), 1, MemoryKind::Host).unwrap();
    }
    let long = draft.lend(bench.shelf.pin(1), 1, MemoryKind::Host).unwrap_err();
    assert_eq!(long, QuotaError::Blocks { limit });
    drop(draft);
    let limit = limits::REQUESTERS_MAX;
    let beyond = bench.table.draft(borrower(4096, 1), 1, &bench.shelf);
    assert_eq!(beyond.unwrap_err(), QuotaError::Requester { limit });
    bench.assert_idle();
}
