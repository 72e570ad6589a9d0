//! Random operations, and requesters that forget, repeat and confuse things: every pin is given
//! back once, every rank steps at most once per block and requester, and a table that has drained
//! is empty.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Operation {
    /// Lend to a requester in one of its starts; `true` positions are lent.
    Lend(u16, u64, Vec<(u32, bool)>),
    /// Open a draft, lend, and drop it.
    Drop(u16, Vec<u32>),
    /// Complete, in the name of a requester and start, a lease granted before.
    Complete(prop::sample::Index, u16, u64, u16),
    /// Complete in its own name, with bits for what was lent.
    CompleteWell(prop::sample::Index, u16),
    Renew(prop::sample::Index),
    Abort(prop::sample::Index),
    Supersede(u16, u64),
    Advance(u64),
    /// Leases over this block expire.
    Expire(u32),
    PollCut,
    HandleCut,
}

fn operations() -> impl Strategy<Value = Operation> {
    let lease = any::<prop::sample::Index>;
    prop_oneof![
        6 => (0..3_u16, 0..2_u64, vec((0..6_u32, any::<bool>()), 1..12))
            .prop_map(|(r, e, blocks)| Operation::Lend(r, e, blocks)),
        1 => (0..3_u16, vec(0..6_u32, 0..5)).prop_map(|(r, blocks)| Operation::Drop(r, blocks)),
        2 => (lease(), 0..3_u16, 0..2_u64, any::<u16>())
            .prop_map(|(l, r, e, bits)| Operation::Complete(l, r, e, bits)),
        5 => (lease(), any::<u16>()).prop_map(|(l, bits)| Operation::CompleteWell(l, bits)),
        2 => lease().prop_map(Operation::Renew),
        1 => lease().prop_map(Operation::Abort),
        1 => (0..3_u16, 0..2_u64).prop_map(|(r, e)| Operation::Supersede(r, e)),
        3 => (0..700_u64).prop_map(Operation::Advance),
        1 => (0..6_u32).prop_map(Operation::Expire),
        2 => Just(Operation::PollCut),
        2 => Just(Operation::HandleCut),
    ]
}

struct Granted {
    lease: LeaseId,
    borrower: Borrower,
    lent: Vec<bool>,
    answer: Option<Vec<u8>>,
}

#[derive(Default)]
struct World {
    now: u64,
    granted: Vec<Granted>,
    cutting: Vec<RequesterIndex>,
}

fn bitmap(bits: impl Iterator<Item = bool>) -> Vec<u8> {
    bits.enumerate().fold(Vec::new(), |mut bytes, (at, good)| {
        if at % 8 == 0 {
            bytes.push(0);
        }
        *bytes.last_mut().unwrap() |= u8::from(good) << (at % 8);
        bytes
    })
}

fn complete(bench: &mut Bench, granted: &mut Granted, by: Borrower, bits: &[u8]) {
    let (steps, pins) = (bench.shelf.steps(), bench.shelf.pins());
    let count = u16::try_from(granted.lent.len()).unwrap();
    let answer = bench.complete(by, granted.lease, count, bits);
    if answer == Completed::Recorded {
        assert_eq!(by, granted.borrower);
        assert_eq!(granted.answer, None, "recorded twice");
        let lent = granted.lent.iter().filter(|lent| **lent).count();
        assert_eq!(bench.shelf.pins() as usize, pins as usize - lent);
        granted.answer = Some(bench.ranks.clone());
    } else {
        assert_eq!((bench.shelf.steps(), bench.shelf.pins()), (steps, pins));
    }
    if answer == Completed::Replayed {
        assert_eq!(by, granted.borrower);
        assert_eq!(granted.answer.as_ref(), Some(&bench.ranks));
    }
}

fn lend(bench: &mut Bench, world: &mut World, to: Borrower, blocks: &[(u32, bool)]) {
    let Ok(mut draft) = bench.table.draft(to, blocks.len(), &bench.shelf) else {
        return;
    };
    let mut lent = Vec::new();
    for (block, wanted) in blocks {
        if *wanted {
            lent.push(draft.lend(bench.shelf.pin(*block), 90, MemoryKind::Host).is_ok());
        } else {
            draft.skip();
            lent.push(false);
        }
    }
    let lease = draft.grant(at(world.now));
    assert_eq!(lease != LeaseId::NONE, lent.contains(&true));
    if lease != LeaseId::NONE {
        world.granted.push(Granted { lease, borrower: to, lent, answer: None });
    }
}

fn apply(bench: &mut Bench, world: &mut World, operation: Operation) {
    let pick = |index: &prop::sample::Index, world: &World| {
        (!world.granted.is_empty()).then(|| index.index(world.granted.len()))
    };
    match operation {
        Operation::Lend(requester, epoch, blocks) => {
            lend(bench, world, borrower(requester, epoch), &blocks);
        }
        Operation::Drop(requester, blocks) => {
            if let Ok(mut draft) = bench.table.draft(borrower(requester, 0), 5, &bench.shelf) {
                for block in blocks {
                    draft.lend(bench.shelf.pin(block), 400, MemoryKind::Host).ok();
                }
            }
        }
        Operation::Complete(index, requester, epoch, bits) => {
            if let Some(at) = pick(&index, world) {
                let by = borrower(requester, epoch);
                complete(bench, &mut world.granted[at], by, &bits.to_le_bytes());
            }
        }
        Operation::CompleteWell(index, bits) => {
            if let Some(at) = pick(&index, world) {
                let granted = &mut world.granted[at];
                let lent = granted.lent.iter().enumerate();
                let good = bitmap(lent.map(|(at, lent)| *lent && bits >> (at % 16) & 1 == 1));
                complete(bench, granted, granted.borrower, &good);
            }
        }
        Operation::Renew(index) => {
            if let Some(index) = pick(&index, world) {
                let Granted { lease, borrower, .. } = world.granted[index];
                bench.table.renew(lease, borrower, at(world.now));
            }
        }
        Operation::Abort(index) => {
            if let Some(index) = pick(&index, world) {
                let Granted { lease, borrower, .. } = world.granted[index];
                bench.table.abort(lease, borrower, &bench.shelf);
            }
        }
        Operation::Supersede(requester, epoch) => {
            let requester = RequesterIndex(requester);
            bench.table.supersede(requester, NodeEpoch(epoch), &bench.shelf);
        }
        Operation::Advance(ms) => world.now += ms,
        Operation::Expire(block) => {
            let pins = bench.shelf.pins();
            bench.table.expire_where(|resident| resident.slot == block);
            assert_eq!(bench.shelf.pins(), pins, "unpinned before the cut");
        }
        Operation::PollCut => {
            let pins = bench.shelf.pins();
            world.cutting.extend(bench.table.poll_cut(at(world.now)));
            assert_eq!(bench.shelf.pins(), pins, "unpinned before the cut");
        }
        Operation::HandleCut => {
            if let Some(requester) = world.cutting.pop() {
                let steps = bench.shelf.steps();
                bench.table.handle_cut(requester, &bench.shelf);
                assert_eq!(bench.shelf.steps(), steps, "expiry is not completion");
            }
        }
    }
    check_usage(bench);
}

fn check_usage(bench: &Bench) {
    let totals = bench.table.totals();
    assert_eq!(totals.blocks, u64::from(bench.shelf.pins()));
    assert_eq!((totals.bytes, totals.own_bytes), (totals.blocks * 90, totals.blocks * 90));
    let sums = bench.table.usages().fold(Usage::default(), |sum, (_, it)| Usage {
        leases: sum.leases + it.leases,
        bytes: sum.bytes + it.bytes,
        own_bytes: sum.own_bytes + it.own_bytes,
        blocks: sum.blocks + it.blocks,
    });
    assert_eq!(sums, totals);
}

/// Grants minus ends, as the events tell it.
fn balance(events: &[Event]) -> (i64, i64) {
    events.iter().fold((0, 0), |(leases, sum), event| match event {
        Event::LeaseGranted { bytes, .. } => (leases + 1, sum + bytes.cast_signed()),
        Event::LeaseEnded { bytes, .. } => (leases - 1, sum - bytes.cast_signed()),
        _ => (leases, sum),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_pin_is_given_back_once(operations in vec(operations(), 1..80)) {
        let mut bench = Bench::new();
        let mut world = World::default();
        for operation in operations {
            apply(&mut bench, &mut world, operation);
        }
        // Every lease expires in the end, and every expiry is answered by a cut.
        let end = at(world.now + 10_000);
        for requester in world.cutting.drain(..) {
            bench.table.handle_cut(requester, &bench.shelf);
        }
        while bench.table.poll_timeout().is_some() {
            bench.cut_all(end);
        }
        bench.assert_idle();
        prop_assert_eq!(balance(&bench.log.drain()), (0, 0));
    }
}
