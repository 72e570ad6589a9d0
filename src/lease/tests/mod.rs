//! What each failure does to pins and ranks. The stand-in store counts: a pin that is given back
//! twice, or a rank step that happens twice, fails the test at once.

mod expiry;
mod model;
mod quotas;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use super::*;
use crate::event::{Event, EventSink, LeaseEnd, LendRefusal};
use crate::limits;
use crate::types::{Generation, MemoryKind, Timestamp};

/// One resident of the stand-in.
#[derive(Debug, Default)]
struct Kept {
    pins: u32,
    /// Rank steps so far; the rank is one more.
    steps: u32,
    readers: HashMap<RequesterIndex, EvictionRank>,
}

/// A stand-in for the store: pins are counted, a reader steps the rank once.
#[derive(Debug, Default)]
pub(super) struct Shelf {
    books: RefCell<HashMap<ResidentId, Kept>>,
}

impl Shelf {
    pub(super) fn pin(&self, slot: u32) -> ResidentId {
        let id = ResidentId { slot, generation: Generation(1) };
        self.books.borrow_mut().entry(id).or_default().pins += 1;
        id
    }

    pub(super) fn pins(&self) -> u32 {
        self.books.borrow().values().map(|book| book.pins).sum()
    }

    pub(super) fn steps(&self) -> u32 {
        self.books.borrow().values().map(|book| book.steps).sum()
    }
}

impl Residents for Shelf {
    fn unpin(&self, resident: ResidentId) {
        let mut books = self.books.borrow_mut();
        let book = books.get_mut(&resident).expect("unpinned, never pinned");
        book.pins = book.pins.checked_sub(1).expect("unpinned twice");
    }

    fn commit(&self, resident: ResidentId, requester: RequesterIndex) -> Option<EvictionRank> {
        self.unpin(resident);
        let mut books = self.books.borrow_mut();
        let book = books.get_mut(&resident)?;
        let Kept { steps, readers, .. } = book;
        let rank = readers.entry(requester).or_insert_with(|| {
            *steps += 1;
            EvictionRank::clamped(*steps)
        });
        Some(*rank)
    }
}

#[derive(Debug, Default)]
pub(super) struct Log(Mutex<Vec<Event>>);

impl EventSink for Log {
    fn emit(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Log {
    fn drain(&self) -> Vec<Event> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

pub(super) const MS: u64 = 1_000_000;

pub(super) fn at(ms: u64) -> Timestamp {
    Timestamp::from_nanos(ms * MS)
}

pub(super) fn borrower(requester: u16, epoch: u64) -> Borrower {
    Borrower { requester: RequesterIndex(requester), epoch: NodeEpoch(epoch) }
}

fn config() -> LeaseConfig {
    LeaseConfig {
        ttl: Duration::from_millis(1000),
        leases_per_requester: 3,
        bytes_per_requester: 1000,
        leases_total: 8,
    }
}

struct Bench {
    table: LeaseTable,
    shelf: Shelf,
    log: Arc<Log>,
    ranks: Vec<u8>,
}

const A: u16 = 0;
const B: u16 = 5;

impl Bench {
    fn new() -> Self {
        let log = Arc::new(Log::default());
        Self {
            table: LeaseTable::new(config(), log.clone()).unwrap(),
            shelf: Shelf::default(),
            log,
            ranks: vec![77],
        }
    }

    /// A lease over these blocks of 100 bytes each; `None` is a position without a loan.
    fn lend(&mut self, to: Borrower, blocks: &[Option<u32>], now: Timestamp) -> LeaseId {
        let mut draft = self.table.draft(to, blocks.len(), &self.shelf).unwrap();
        for block in blocks {
            match block {
                Some(block) => draft.lend(self.shelf.pin(*block), 100, MemoryKind::Host).unwrap(),
                None => draft.skip(),
            }
        }
        draft.grant(now)
    }

    fn complete(&mut self, by: Borrower, lease: LeaseId, count: u16, bitmap: &[u8]) -> Completed {
        let completion = Completion { borrower: by, lease, count, bitmap };
        self.table.complete(&completion, &self.shelf, &mut self.ranks)
    }

    fn cut_all(&mut self, now: Timestamp) -> Vec<u16> {
        let named: Vec<_> = std::iter::from_fn(|| self.table.poll_cut(now)).collect();
        for requester in &named {
            self.table.handle_cut(*requester, &self.shelf);
        }
        named.iter().map(|requester| requester.0).collect()
    }

    /// Nothing lent, nothing pinned, every grant ended.
    fn assert_idle(&self) {
        assert_eq!(self.shelf.pins(), 0);
        assert_eq!(self.table.totals(), Usage::default());
        assert_eq!(self.table.usages().count(), 0);
        assert_eq!(self.table.poll_timeout(), None);
    }
}

#[test]
fn a_completion_steps_good_blocks_and_only_unpins_the_others() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let lease = bench.lend(a, &[Some(1), None, Some(2)], at(0));
    assert_eq!(
        bench.table.usage(a.requester),
        Usage { leases: 1, bytes: 200, own_bytes: 200, blocks: 2 }
    );
    assert_eq!(bench.complete(a, lease, 3, &[0b001]), Completed::Recorded);
    assert_eq!(bench.ranks, [1, 0, 0]);
    assert_eq!(bench.shelf.steps(), 1);
    bench.assert_idle();
    let requester = a.requester;
    let (blocks, bytes, end) = (2, 200, LeaseEnd::Completed);
    assert_eq!(
        bench.log.drain(),
        [
            Event::LeaseGranted { requester, blocks, bytes },
            Event::LeaseEnded { requester, end, blocks, bytes },
        ]
    );
}

#[test]
fn a_repeated_completion_gets_the_same_answer_and_moves_nothing() {
    let mut bench = Bench::new();
    let (a, b) = (borrower(A, 1), borrower(B, 1));
    let lease = bench.lend(a, &[Some(1), Some(2)], at(0));
    let other = bench.lend(b, &[Some(1)], at(0));
    assert_eq!(bench.complete(b, other, 1, &[1]), Completed::Recorded);
    assert_eq!(bench.complete(a, lease, 2, &[0b11]), Completed::Recorded);
    assert_eq!(bench.ranks, [2, 1]);
    let steps = bench.shelf.steps();
    bench.log.drain();
    for bitmap in [[0b11], [0b01], [0b00]] {
        assert_eq!(bench.complete(a, lease, 2, &bitmap), Completed::Replayed);
        assert_eq!(bench.ranks, [2, 1]);
    }
    assert_eq!(bench.shelf.steps(), steps);
    assert_eq!(bench.log.drain(), [Event::CompletionReplayed; 3]);
    bench.assert_idle();
}

#[test]
fn a_slot_that_is_lent_again_answers_replays_of_its_earlier_lease() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let first = bench.lend(a, &[Some(1)], at(0));
    assert_eq!(bench.complete(a, first, 1, &[1]), Completed::Recorded);
    let second = bench.lend(a, &[Some(2)], at(0));
    assert_ne!(first, second);
    assert_eq!(bench.complete(a, first, 1, &[1]), Completed::Replayed);
    assert_eq!(bench.shelf.pins(), 1);
    assert_eq!(bench.complete(a, second, 1, &[1]), Completed::Recorded);
    bench.assert_idle();
}

#[test]
fn a_completion_of_an_unknown_lease_or_by_another_borrower_moves_nothing() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let lease = bench.lend(a, &[Some(1)], at(0));
    bench.log.drain();
    let strangers = [borrower(B, 1), borrower(A, 2), borrower(999, 1)];
    for stranger in strangers {
        assert_eq!(bench.complete(stranger, lease, 1, &[1]), Completed::Unknown);
        assert!(bench.ranks.is_empty());
        assert_eq!(bench.table.renew(lease, stranger, at(1)), None);
        assert!(!bench.table.abort(lease, stranger, &bench.shelf));
    }
    for unknown in [0, 1, lease.0 + 1, lease.0 + (1 << 32), u64::MAX] {
        let answer = bench.complete(a, LeaseId(unknown), 1, &[1]);
        assert_eq!(answer, Completed::Unknown, "{unknown:#x}");
    }
    assert_eq!(bench.log.drain(), [Event::CompletionRefused; 8]);
    assert_eq!((bench.shelf.pins(), bench.shelf.steps()), (1, 0));
    assert_eq!(bench.complete(a, lease, 1, &[1]), Completed::Recorded);
    // Its answer is nobody else's, either.
    for stranger in strangers {
        assert_eq!(bench.complete(stranger, lease, 1, &[1]), Completed::Unknown);
        assert!(bench.ranks.is_empty());
    }
    bench.assert_idle();
}

#[test]
fn a_completion_of_the_wrong_shape_is_refused_and_the_lease_goes_on() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let mut blocks = vec![Some(1); 9];
    blocks[4] = None;
    let lease = bench.lend(a, &blocks, at(0));
    let shapes: [(u16, &[u8]); 7] = [
        (8, &[0xef]),
        (10, &[0xef, 1]),
        (9, &[0xef]),
        (9, &[0xef, 1, 0]),
        (9, &[]),
        // A bit behind the last block, and one for a block that was not lent.
        (9, &[0xef, 3]),
        (9, &[0xff, 1]),
    ];
    for (count, bitmap) in shapes {
        let answer = bench.complete(a, lease, count, bitmap);
        assert_eq!(answer, Completed::WrongShape, "{count} {bitmap:?}");
        assert!(bench.ranks.is_empty());
    }
    assert_eq!((bench.shelf.pins(), bench.shelf.steps()), (8, 0));
    assert_eq!(bench.complete(a, lease, 9, &[0xef, 1]), Completed::Recorded);
    assert_eq!(bench.complete(a, lease, 8, &[0xef]), Completed::WrongShape);
    bench.assert_idle();
}

#[test]
fn nothing_is_unpinned_before_the_requester_is_cut_off() {
    let mut bench = Bench::new();
    let (a, b) = (borrower(A, 1), borrower(B, 1));
    let lease = bench.lend(a, &[Some(1), Some(2)], at(0));
    let kept = bench.lend(b, &[Some(1)], at(500));
    assert_eq!(bench.table.poll_timeout(), Some(at(1000)));
    assert_eq!(bench.table.poll_cut(at(999)), None);
    assert_eq!(bench.table.poll_cut(at(1000)), Some(a.requester));
    assert_eq!(bench.table.poll_cut(at(1000)), None);
    assert_eq!(bench.shelf.pins(), 3, "invariant 2: cut first, then unpin");
    // Expiry is not completion, and cannot be undone.
    assert_eq!(bench.complete(a, lease, 2, &[3]), Completed::Unknown);
    assert_eq!(bench.table.renew(lease, a, at(1000)), None);
    assert!(!bench.table.abort(lease, a, &bench.shelf));
    assert_eq!(bench.shelf.pins(), 3);
    bench.log.drain();
    bench.table.handle_cut(a.requester, &bench.shelf);
    assert_eq!((bench.shelf.pins(), bench.shelf.steps()), (1, 0));
    let (requester, end) = (a.requester, LeaseEnd::Expired);
    let (blocks, bytes) = (2, 200);
    let expired = Event::LeaseEnded { requester, end, blocks, bytes };
    assert_eq!(bench.log.drain(), [expired]);
    assert_eq!(bench.complete(a, lease, 2, &[3]), Completed::Unknown);
    assert_eq!(bench.complete(b, kept, 1, &[1]), Completed::Recorded);
    assert_eq!(bench.ranks, [1]);
    bench.assert_idle();
}

#[test]
fn requesters_are_named_in_the_order_of_expiry_each_once() {
    let mut bench = Bench::new();
    let (a, b) = (borrower(A, 1), borrower(B, 1));
    bench.lend(b, &[Some(1)], at(0));
    bench.lend(a, &[Some(2)], at(10));
    bench.lend(b, &[Some(3)], at(20));
    assert_eq!(bench.cut_all(at(1005)), [B]);
    assert_eq!(bench.table.poll_timeout(), Some(at(1010)));
    assert_eq!(bench.cut_all(at(1020)), [A, B]);
    bench.assert_idle();
}

#[test]
fn leases_made_after_a_cut_need_a_cut_of_their_own() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    bench.lend(a, &[Some(1)], at(0));
    assert_eq!(bench.table.poll_cut(at(1000)), Some(a.requester));
    // The requester is back on another connection before the old one is drained.
    bench.lend(a, &[Some(2)], at(1000));
    assert_eq!(bench.table.poll_cut(at(2000)), None);
    bench.table.handle_cut(a.requester, &bench.shelf);
    assert_eq!(bench.shelf.pins(), 1);
    assert_eq!(bench.table.poll_timeout(), Some(Timestamp::ZERO));
    assert_eq!(bench.cut_all(at(2000)), [A]);
    bench.assert_idle();
}

#[test]
fn a_renewal_lasts_a_full_period_from_then() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let first = bench.lend(a, &[Some(1)], at(0));
    let second = bench.lend(a, &[Some(2)], at(100));
    assert_eq!(bench.table.renew(first, a, at(900)), Some(bench.table.ttl()));
    assert_eq!(bench.table.poll_timeout(), Some(at(1100)));
    assert_eq!(bench.cut_all(at(1100)), [A]);
    assert_eq!(bench.complete(a, second, 1, &[1]), Completed::Unknown);
    assert_eq!(bench.cut_all(at(1899)), [0; 0]);
    assert_eq!(bench.complete(a, first, 1, &[1]), Completed::Recorded);
    bench.assert_idle();
}

#[test]
fn time_that_goes_backwards_does_not_break_the_order() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    bench.lend(a, &[Some(1)], at(500));
    bench.lend(borrower(B, 1), &[Some(2)], at(0));
    assert_eq!(bench.cut_all(at(1499)), [0; 0]);
    assert_eq!(bench.cut_all(at(1500)), [A, B]);
    bench.assert_idle();
}

#[test]
fn a_later_start_ends_the_leases_of_the_earlier_one_only() {
    let mut bench = Bench::new();
    let (old, new, b) = (borrower(A, 1), borrower(A, 2), borrower(B, 1));
    let ended = bench.lend(old, &[Some(1)], at(0));
    let kept = bench.lend(new, &[Some(2)], at(0));
    let others = bench.lend(b, &[Some(3)], at(0));
    assert_eq!(bench.complete(b, others, 1, &[1]), Completed::Recorded);
    bench.log.drain();
    bench.table.supersede(new.requester, new.epoch, &bench.shelf);
    let [Event::LeaseEnded { end, .. }] = bench.log.drain()[..] else {
        panic!("one lease ends");
    };
    assert_eq!(end, LeaseEnd::Superseded);
    assert_eq!(bench.complete(old, ended, 1, &[1]), Completed::Unknown);
    assert_eq!(bench.complete(new, kept, 1, &[1]), Completed::Recorded);
    // A reconnect within one start leaves its answers alone.
    bench.table.supersede(new.requester, new.epoch, &bench.shelf);
    assert_eq!(bench.complete(new, kept, 1, &[1]), Completed::Replayed);
    bench.assert_idle();
}

#[test]
fn a_later_start_is_not_cut_off_for_leases_of_the_earlier_one() {
    let mut bench = Bench::new();
    let (old, new) = (borrower(A, 1), borrower(A, 2));
    bench.lend(old, &[Some(1)], at(0));
    assert_eq!(bench.table.poll_cut(at(1000)), Some(old.requester));
    bench.lend(old, &[Some(2)], at(1000));
    assert_eq!(bench.table.poll_cut(at(2000)), None);
    bench.table.handle_cut(old.requester, &bench.shelf);
    bench.table.supersede(new.requester, new.epoch, &bench.shelf);
    assert_eq!(bench.cut_all(at(2000)), [0; 0]);
    bench.assert_idle();
}

#[test]
fn an_abort_unpins_and_moves_no_rank() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let lease = bench.lend(a, &[Some(1), Some(2)], at(0));
    assert!(bench.table.abort(lease, a, &bench.shelf));
    assert!(!bench.table.abort(lease, a, &bench.shelf));
    assert_eq!(bench.complete(a, lease, 2, &[3]), Completed::Unknown);
    assert_eq!(bench.shelf.steps(), 0);
    bench.assert_idle();
}

#[test]
fn a_draft_that_is_dropped_or_lends_nothing_leaves_nothing_behind() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let mut draft = bench.table.draft(a, 2, &bench.shelf).unwrap();
    draft.lend(bench.shelf.pin(1), 100, MemoryKind::Host).unwrap();
    draft.skip();
    drop(draft);
    assert_eq!(bench.lend(a, &[None, None], at(0)), LeaseId::NONE);
    assert_eq!(bench.log.drain(), []);
    bench.assert_idle();
}

#[test]
fn ids_are_never_reused() {
    let mut bench = Bench::new();
    let a = borrower(A, 1);
    let mut seen = HashSet::new();
    for round in 0..100 {
        let lease = bench.lend(a, &[Some(1)], at(round));
        assert!(lease != LeaseId::NONE && seen.insert(lease));
        assert!(bench.table.abort(lease, a, &bench.shelf));
    }
    bench.assert_idle();
}

#[test]
fn limits_that_contradict_each_other_are_refused() {
    let with = |change: fn(&mut LeaseConfig)| {
        let mut config = LeaseConfig::default();
        change(&mut config);
        config.validate()
    };
    assert_eq!(with(|_| ()), Ok(()));
    let ttl = with(|it| it.ttl = Duration::from_millis(99));
    assert!(matches!(ttl, Err(LeaseConfigError::Ttl { .. })));
    assert_eq!(with(|it| it.leases_per_requester = 0), Err(LeaseConfigError::NoQuota));
    assert_eq!(with(|it| it.bytes_per_requester = 0), Err(LeaseConfigError::NoQuota));
    let total = with(|it| it.leases_total = 63);
    assert!(matches!(total, Err(LeaseConfigError::Total { .. })));
    let log = Arc::new(Log::default());
    let mut config = config();
    config.leases_total = 2;
    assert!(LeaseTable::new(config, log).is_err());
}
