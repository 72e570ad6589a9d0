//! Leases that expire before their time, because what they lend is to be given back.

use super::*;

fn is(block: u32) -> impl Fn(ResidentId) -> bool {
    move |resident| resident.slot == block
}

#[test]
fn leases_over_what_is_given_back_expire_whatever_their_deadline_and_others_do_not() {
    let mut bench = Bench::new();
    let (a, b) = (borrower(A, 1), borrower(B, 1));
    let both = bench.lend(a, &[Some(1), Some(2)], at(0));
    let other = bench.lend(a, &[Some(2)], at(1));
    let third = bench.lend(b, &[None, Some(1)], at(2));
    assert!(bench.table.lends(both, is(1)) && bench.table.lends(third, is(1)));
    assert!(!bench.table.lends(other, is(1)) && !bench.table.lends(LeaseId(both.0 + 1), is(1)));
    bench.table.expire_where(is(1));
    // Nothing goes before its requester is cut off, and none is renewed or completed until then.
    assert_eq!(bench.shelf.pins(), 4);
    assert_eq!(bench.table.poll_timeout(), Some(Timestamp::ZERO));
    assert_eq!(bench.table.renew(both, a, at(3)), None);
    assert_eq!(bench.complete(b, third, 2, &[0b10]), Completed::Unknown);
    assert_eq!(bench.cut_all(at(3)), [A, B]);
    assert_eq!((bench.shelf.pins(), bench.shelf.steps()), (1, 0));
    assert!(!bench.table.lends(both, is(1)), "it is no lease any more");
    assert_eq!(bench.complete(a, other, 1, &[1]), Completed::Recorded);
    bench.assert_idle();
}

#[test]
fn what_nobody_lends_and_what_is_being_cut_expires_nothing() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    bench.lend(a, &[Some(1)], at(0));
    bench.table.expire_where(is(7));
    assert_eq!(bench.table.poll_cut(at(1)), None);
    bench.table.expire_where(is(1));
    assert_eq!(bench.table.poll_cut(at(1)), Some(a.requester));
    // Once is enough.
    bench.table.expire_where(is(1));
    assert_eq!(bench.table.poll_cut(at(1)), None);
    bench.table.handle_cut(a.requester, &bench.shelf);
    bench.assert_idle();
}
