use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::fabric::{RegionId, RegisteredSpan, RemoteSpan};
use crate::types::Nic;

/// Memory that counts how much of it is owned by somebody.
#[derive(Debug)]
struct Memory(Rc<Cell<usize>>);

impl Memory {
    fn new(live: &Rc<Cell<usize>>) -> Self {
        live.set(live.get() + 1);
        Self(Rc::clone(live))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

const CONNECTION: ConnectionId = ConnectionId { slot: 3, generation: 1 };
const SECOND: Duration = Duration::from_secs(1);

fn capabilities(reads_outstanding: usize) -> Capabilities {
    Capabilities {
        transport: "test",
        reads_outstanding,
        segments: 4,
        read_bytes: 1 << 20,
        windows: 0,
        opening: std::time::Duration::ZERO,
    }
}

/// Begins a transfer of blocks that cannot coalesce, so that each is one READ.
fn begin(
    table: &mut Transfers<Memory>,
    until: Timestamp,
    live: &Rc<Cell<usize>>,
    count: u64,
) -> TransferId {
    let mut list = ReadList::default();
    for i in 0..count {
        let remote = RemoteSpan { rkey: 1, address: i * 1000, len: 100 };
        let local = RegisteredSpan { region: RegionId(0), offset: i * 100, len: 100 };
        list.push([remote], [local]).unwrap();
    }
    table.begin(CONNECTION, until, &list, (0..count).map(|_| Memory::new(live)))
}

fn complete(work: &ReadWork, status: CompletionStatus) -> Completion {
    let path = Path::default();
    Completion { connection: CONNECTION, wr_id: work.wr_id, status, path }
}

fn until(seconds: u64) -> Timestamp {
    Timestamp::ZERO + SECOND * u32::try_from(seconds).unwrap()
}

#[test]
fn a_read_that_ends_after_the_deadline_has_failed() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(8));
    begin(&mut table, until(1), &live, 3);
    let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
    table.poll_post(&mut batch);
    let success = |at: usize| complete(&batch.works[at], CompletionStatus::Success);
    assert!(table.handle_completion(&success(0), Timestamp::ZERO));
    assert!(table.handle_completion(&success(1), until(1)));
    // The other READ is out too long, whatever became of the one before it.
    table.handle_timeout(Scope::Path, until(1));
    assert_eq!((table.poll_break(), table.poll_break()), (Some(CONNECTION), None));
    assert!(table.poll_finished(&mut out).is_none());
    assert!(table.handle_completion(&success(2), until(2)));
    assert!(table.poll_finished(&mut out).is_some());
    let outcomes: Vec<_> = out.iter().map(|block| block.outcome).collect();
    assert_eq!(outcomes, [Ok(()), Err(Scope::Path), Err(Scope::Path)]);
}

#[test]
fn a_failed_read_takes_the_blocks_that_it_carries_whatever_their_order() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(8));
    let mut list = ReadList::default();
    // Two runs, asked for in turn: the first one's blocks are 0, 2 and 4.
    for (address, offset) in [100, 1100, 0, 1000, 200].into_iter().zip((0..).step_by(500)) {
        let remote = RemoteSpan { rkey: 1, address, len: 100 };
        list.push([remote], [RegisteredSpan { region: RegionId(0), offset, len: 100 }]).unwrap();
    }
    table.begin(CONNECTION, until(1), &list, (0..5).map(|_| Memory::new(&live)));
    let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
    table.poll_post(&mut batch);
    let spans: Vec<_> = batch.works.iter().map(|it| (it.remote.address, it.segments)).collect();
    assert_eq!(spans, [(0, 3), (1000, 2)]);
    let (first, second) = (&batch.works[0], &batch.works[1]);
    let now = Timestamp::ZERO;
    assert!(table.handle_completion(&complete(second, CompletionStatus::Success), now));
    assert!(table.handle_completion(&complete(first, CompletionStatus::RemoteAccess), now));
    assert!(table.poll_finished(&mut out).is_some());
    let failed: Vec<_> = out.iter().map(|block| block.outcome.is_err()).collect();
    assert_eq!(failed, [true, false, true, false, true]);
}

#[test]
fn a_transfer_ends_when_its_last_read_does() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(8));
    let id = begin(&mut table, until(1), &live, 3);
    let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
    assert_eq!(table.poll_post(&mut batch), Some(CONNECTION));
    assert_eq!((batch.works.len(), batch.segments.len()), (3, 3));
    for (index, work) in batch.works.iter().enumerate() {
        assert!(table.poll_finished(&mut out).is_none(), "after {index} completions");
        assert!(
            table.handle_completion(&complete(work, CompletionStatus::Success), Timestamp::ZERO)
        );
    }
    assert_eq!(
        table.poll_finished(&mut out),
        Some(Finished { id, connection: CONNECTION, paths: Path::default().into() })
    );
    assert!(out.iter().all(|block| block.outcome.is_ok()));
    assert_eq!((out.len(), live.get(), table.running()), (3, 3, 0));
}

#[test]
fn credits_bound_what_is_outstanding() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(2));
    begin(&mut table, until(1), &live, 5);
    let (mut first, mut more) = (ReadBatch::default(), ReadBatch::default());
    table.poll_post(&mut first);
    assert_eq!(first.works.len(), 2);
    assert_eq!(table.poll_post(&mut more), None);
    assert!(
        table.handle_completion(
            &complete(&first.works[0], CompletionStatus::Success),
            Timestamp::ZERO
        )
    );
    assert_eq!(table.poll_post(&mut more), Some(CONNECTION));
    assert_eq!(more.works.len(), 1);
}

/// DESIGN §6, invariant 1: a deadline frees nothing. Memory comes back when the flush of its last
/// READ has been polled, and the connection is asked to break so that flushes come.
#[test]
fn invariant_1_memory_comes_back_with_the_flush_not_with_the_timeout() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(8));
    begin(&mut table, until(1), &live, 2);
    let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
    table.poll_post(&mut batch);
    assert!(
        table.handle_completion(
            &complete(&batch.works[0], CompletionStatus::Success),
            Timestamp::ZERO
        )
    );
    assert_eq!(table.poll_timeout(), Some(until(1)));
    table.handle_timeout(Scope::Path, until(1));
    assert_eq!(table.poll_break(), Some(CONNECTION));
    assert_eq!(table.poll_break(), None);
    table.handle_timeout(Scope::Path, until(100));
    assert!(table.poll_finished(&mut out).is_none(), "READs are still in flight");
    assert_eq!(live.get(), 2);
    assert!(
        table.handle_completion(
            &complete(&batch.works[1], CompletionStatus::Flushed),
            Timestamp::ZERO
        )
    );
    assert!(table.poll_finished(&mut out).is_some());
    let outcomes: Vec<_> = out.iter().map(|block| block.outcome).collect();
    assert_eq!(outcomes, [Ok(()), Err(Scope::Path)], "a flush that we caused blames the path");
}

#[test]
fn a_transfer_says_what_it_went_over_what_it_failed_on_and_what_hung() {
    let (live, path) = (Rc::default(), |nic| Path { local: Nic(nic), remote: Nic(nic) });
    let run = |ends: &[(u8, CompletionStatus)], late: bool| {
        let mut table = Transfers::new(capabilities(8));
        begin(&mut table, until(1), &live, ends.len() as u64);
        let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
        table.poll_post(&mut batch);
        for (work, (nic, status)) in batch.works.iter().zip(ends) {
            if late && *status == CompletionStatus::Flushed {
                table.handle_timeout(Scope::Path, until(1));
            }
            let done = Completion { path: path(*nic), ..complete(work, *status) };
            assert!(table.handle_completion(&done, Timestamp::ZERO));
        }
        table.poll_finished(&mut out).unwrap().paths
    };
    let (good, gone) = (CompletionStatus::Success, CompletionStatus::Unreachable);
    let flushed = CompletionStatus::Flushed;
    assert_eq!(run(&[(0, good), (1, good), (0, good)], false).as_slice(), [path(0), path(1)]);
    assert_eq!(run(&[(0, good), (1, gone), (0, flushed)], false).as_slice(), [path(1)]);
    assert_eq!(run(&[(0, good), (1, flushed)], true).as_slice(), [path(1)]);
}

/// DESIGN §6, invariant 4: a completion of an earlier tenant of a slot credits nothing.
#[test]
fn invariant_4_a_stale_completion_is_dropped() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(8));
    let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
    begin(&mut table, until(1), &live, 1);
    table.poll_post(&mut batch);
    let old = complete(&batch.works[0], CompletionStatus::Success);
    assert!(table.handle_completion(&old, Timestamp::ZERO));
    table.poll_finished(&mut out);
    begin(&mut table, until(1), &live, 1);
    table.poll_post(&mut batch);
    assert!(!table.handle_completion(&old, Timestamp::ZERO), "the slot has a new tenant");
    let unknown = WrId { slot: 77, generation: 0 };
    assert!(!table.handle_completion(&Completion { wr_id: unknown, ..old }, Timestamp::ZERO));
    out.clear();
    assert!(table.poll_finished(&mut out).is_none());
    assert!(
        table.handle_completion(
            &complete(&batch.works[0], CompletionStatus::Success),
            Timestamp::ZERO
        )
    );
    assert!(table.poll_finished(&mut out).is_some());
}

#[test]
fn the_first_failure_names_the_fault_of_the_rest() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(2));
    begin(&mut table, until(1), &live, 3);
    let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
    table.poll_post(&mut batch);
    assert!(table.handle_completion(
        &complete(&batch.works[0], CompletionStatus::RemoteAccess),
        Timestamp::ZERO
    ));
    assert!(
        table.handle_completion(
            &complete(&batch.works[1], CompletionStatus::Flushed),
            Timestamp::ZERO
        )
    );
    assert!(table.poll_finished(&mut out).is_some(), "the third READ is never posted");
    assert!(out.iter().all(|block| block.outcome == Err(Scope::Peer)));
}

#[test]
fn a_refused_post_fails_its_blocks_at_once() {
    let live = Rc::default();
    let mut table = Transfers::new(capabilities(8));
    begin(&mut table, until(1), &live, 2);
    let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
    table.poll_post(&mut batch);
    table.handle_post_refused(CONNECTION, &batch, Scope::Path);
    assert!(table.poll_finished(&mut out).is_some());
    assert!(out.iter().all(|block| block.outcome == Err(Scope::Path)));
}

#[test]
fn a_transfer_without_blocks_is_finished() {
    let mut table = Transfers::<Memory>::new(capabilities(8));
    table.begin(CONNECTION, until(1), &ReadList::default(), std::iter::empty());
    assert!(table.poll_finished(&mut Vec::new()).is_some());
}

#[derive(Debug, Clone)]
enum Step {
    Begin(u64),
    Post,
    Complete { pick: usize, ok: bool },
    Timeout,
    Close,
    Finish,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_u64..6).prop_map(Step::Begin),
        Just(Step::Post),
        (any::<prop::sample::Index>(), any::<bool>())
            .prop_map(|(pick, ok)| Step::Complete { pick: pick.index(1 << 16), ok }),
        Just(Step::Timeout),
        Just(Step::Close),
        Just(Step::Finish),
    ]
}

proptest! {
    /// Whatever happens in whatever order: no destination comes back while a READ of its transfer is
    /// outstanding, and in the end every one has come back once.
    #[test]
    fn destinations_are_owned_while_reads_are_outstanding(
        steps in prop::collection::vec(step(), 0..60),
    ) {
        let live = Rc::default();
        let mut table = Transfers::new(capabilities(3));
        let mut outstanding: Vec<ReadWork> = Vec::new();
        let (mut batch, mut out) = (ReadBatch::default(), Vec::new());
        let (mut begun, mut now) = (0, 1);
        let drain = |outstanding: &mut Vec<ReadWork>, table: &mut Transfers<Memory>| {
            for work in outstanding.drain(..) {
                assert!(table.handle_completion(&complete(&work, CompletionStatus::Flushed), Timestamp::ZERO));
            }
        };
        for step in steps {
            match step {
                Step::Begin(count) => {
                    begun += usize::try_from(count).unwrap();
                    begin(&mut table, until(now), &live, count);
                }
                Step::Post => {
                    table.poll_post(&mut batch);
                    outstanding.extend(batch.works.iter().copied());
                    prop_assert!(outstanding.len() <= 3);
                }
                Step::Complete { pick, ok } if !outstanding.is_empty() => {
                    let work = outstanding.swap_remove(pick % outstanding.len());
                    let status =
                        if ok { CompletionStatus::Success } else { CompletionStatus::RemoteAccess };
                    prop_assert!(table.handle_completion(&complete(&work, status), Timestamp::ZERO));
                    prop_assert!(!table.handle_completion(&complete(&work, status), Timestamp::ZERO));
                }
                Step::Timeout => {
                    table.handle_timeout(Scope::Path, until(now));
                    now += 1;
                }
                Step::Close => {
                    drain(&mut outstanding, &mut table);
                    table.handle_closed(CONNECTION, Scope::Path);
                }
                Step::Complete { .. } | Step::Finish => {
                    while table.poll_finished(&mut out).is_some() {}
                }
            }
        }
        drain(&mut outstanding, &mut table);
        while table.poll_post(&mut batch).is_some() {
            outstanding.extend(batch.works.iter().copied());
            drain(&mut outstanding, &mut table);
        }
        while table.poll_finished(&mut out).is_some() {}
        prop_assert_eq!((out.len(), table.running()), (begun, 0));
    }
}
