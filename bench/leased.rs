//! Leased reads of one block: the requester's data thread asks the holder's for a loan, READs the
//! block, and compares its checksum. Two data threads with all that they have in a node, in one
//! process: handshake, leases, store, landing, the command's way to the thread.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Waker};
use std::time::Duration;

use kvrail::event::{Event, EventSink};
use kvrail::types::NodeId;
use kvrail::verbs::VerbsFabric;
use tokio::runtime::Runtime;

use crate::member::{Blocks, Member, Watch};
use crate::timed::{Asks, Detail, Mark, Marks, Timed, nanos};

/// The node of whoever lends, and of whoever reads.
const HOLDER: NodeId = NodeId([1; 16]);
const REQUESTER: NodeId = NodeId([2; 16]);

/// Between two reads of a caller's.
const PAUSE: Duration = Duration::from_micros(200);

/// How often a caller that lets a data thread ask looks whether it has ended.
const LOOK: Duration = Duration::from_millis(50);

/// When a reader's latest transfer was over: all bytes here and compared.
#[derive(Debug, Default)]
struct Stopwatch {
    nanos: AtomicU64,
}

impl EventSink for Stopwatch {
    fn emit(&self, event: Event) {
        if matches!(event, Event::TransferSucceeded { .. }) {
            self.nanos.store(nanos(), Ordering::Release);
        }
    }
}

impl Watch for Arc<Asks> {
    fn published(&self) {
        // The holder's answer is here: that was the end of a read.
        self.let_go();
    }
}

/// One of the two, timed.
struct End {
    member: Member<SocketAddr>,
    address: SocketAddr,
    watch: Arc<Stopwatch>,
    marks: Marks,
    asks: Arc<Asks>,
}

impl End {
    fn new(fabric: VerbsFabric, node: NodeId, blocks: Blocks, detail: Detail) -> Self {
        let (watch, asks) = (Arc::<Stopwatch>::default(), Arc::<Asks>::default());
        let address = fabric.local_addr().unwrap();
        let (fabric, marks) = Timed::new(fabric, detail, Arc::clone(&asks));
        let sink: Arc<dyn EventSink> = Arc::clone(&watch) as _;
        let member = Member::new(fabric, node, blocks, sink, Arc::clone(&asks));
        Self { member, address, watch, marks, asks }
    }

    /// A wish for one of the holder's blocks.
    fn fetch(&self, holder: &Self, block: u32) -> impl Future<Output = ()> + Send + use<> {
        self.member.fetch((HOLDER, holder.address), block..block + 1)
    }
}

/// Of one read, microseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// From when the requester's data thread takes the fetch up to the READ's completion.
    pub(crate) leased: f64,
    /// Its parts, where they were asked for.
    pub(crate) parts: Option<Parts>,
}

/// Of one read, microseconds. They follow each other without a gap.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// The requester's data thread takes the fetch up and prepares the lend.
    pub(crate) take_up: f64,
    /// It posts the lend.
    pub(crate) send: f64,
    /// Until the holder's data thread has it. Below 0 where that had it before the post returned.
    pub(crate) ask: f64,
    /// The holder pins, leases and prepares the answer.
    pub(crate) lend: f64,
    /// It posts the answer.
    pub(crate) reply: f64,
    /// Until the requester has it.
    pub(crate) answer: f64,
    /// The requester plans the READ.
    pub(crate) plan: f64,
    /// It posts it.
    pub(crate) post: f64,
    /// Until it has the READ's completion.
    pub(crate) read: f64,
}

fn first(marks: &[(u64, Mark)], after: u64, which: impl Fn(Mark) -> bool) -> Option<u64> {
    marks.iter().find(|(at, mark)| *at >= after && which(*mark)).map(|(at, _)| *at)
}

/// The end of the last poll before a moment.
fn polled(marks: &[(u64, Mark)], before: u64) -> Option<u64> {
    let polled = |(at, mark): &&(u64, Mark)| *at <= before && matches!(mark, Mark::Polled { .. });
    marks.iter().rev().find(polled).map(|(at, _)| *at)
}

fn between(from: u64, to: u64) -> f64 {
    (to as f64 - from as f64) / 1e3
}

fn is_landing(mark: Mark) -> bool {
    matches!(mark, Mark::Polled { completed: true, .. })
}

/// From when a fetch was taken up to its READ's completion. `None` where no poll had ended before.
fn leased(requester: &[(u64, Mark)]) -> Option<f64> {
    let sending = first(requester, 0, |mark| mark == Mark::Sending)?;
    let landed = first(requester, sending, is_landing)?;
    Some(between(polled(requester, sending)?, landed))
}

/// The parts of a leased read.
fn parts(requester: &[(u64, Mark)], holder: &[(u64, Mark)]) -> Option<Parts> {
    let sending = first(requester, 0, |mark| mark == Mark::Sending)?;
    let sent = first(requester, sending, |mark| mark == Mark::Sent)?;
    let taken = polled(requester, sending)?;
    let replying = first(holder, sending, |mark| mark == Mark::Sending)?;
    let replied = first(holder, replying, |mark| mark == Mark::Sent)?;
    let asked = polled(holder, replying)?;
    let posting = first(requester, sending, |mark| mark == Mark::Posting)?;
    let posted = first(requester, posting, |mark| mark == Mark::Posted)?;
    let answered = polled(requester, posting)?;
    let landed = first(requester, posted, is_landing)?;
    Some(Parts {
        take_up: between(taken, sending),
        send: between(sending, sent),
        ask: between(sent, asked),
        lend: between(asked, replying),
        reply: between(replying, replied),
        answer: between(replied, answered),
        plan: between(answered, posting),
        post: between(posting, posted),
        read: between(posted, landed),
    })
}

/// Two data threads, and the runtime that passes their answers on.
struct Two {
    runtime: Runtime,
    holder: End,
    requester: End,
}

impl Two {
    /// Connected: a first block was read.
    fn new(
        (holder, requester): (VerbsFabric, VerbsFabric),
        (size, count): (u32, u32),
        (ends, inner): (Detail, Detail),
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let entered = runtime.enter();
        let of = |held| Blocks { held, most: count, size };
        let holder = End::new(holder, HOLDER, of(count), inner);
        let requester = End::new(requester, REQUESTER, of(0), ends);
        drop(entered);
        runtime.block_on(requester.fetch(&holder, 0));
        Self { runtime, holder, requester }
    }

    fn stop(self) {
        self.requester.member.stop();
        self.holder.member.stop();
    }
}

/// Times of single leased reads of `size` bytes, one after the other, that the requester's data thread
/// asks for itself ([`Asks`]). What follows a read, the completion and the holder's answer, is waited
/// for and not counted.
pub(crate) fn latencies(
    fabrics: (VerbsFabric, VerbsFabric),
    (size, count): (u32, u32),
    in_parts: bool,
) -> Vec<Times> {
    let detail = if in_parts { (Detail::All, Detail::All) } else { (Detail::Ends, Detail::None) };
    let two = Two::new(fabrics, (size, count), detail);
    let Two { runtime, holder, requester } = &two;
    let (begun, running) = mpsc::channel();
    for block in 1..count {
        let (mut fetch, begun) = (Box::pin(requester.fetch(holder, block)), begun.clone());
        requester.asks.add(Box::new(move || {
            // The first poll gives the command; its answer is the caller's.
            let polled = fetch.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(polled.is_pending());
            begun.send(fetch).unwrap();
        }));
    }
    drop(begun);
    requester.asks.let_go();
    // Its next poll finds that.
    runtime.block_on(requester.member.handle.snapshot()).unwrap();
    while !requester.asks.are_over() {
        std::thread::sleep(LOOK);
    }
    running.into_iter().for_each(|fetch| runtime.block_on(fetch));
    let mine = requester.marks.lock().unwrap().clone();
    let theirs = holder.marks.lock().unwrap().clone();
    two.stop();
    let asked = |(_, mark): &(u64, Mark)| *mark == Mark::Asked;
    let mut all = Vec::new();
    let mut rest = mine.as_slice();
    while let Some(begin) = rest.iter().position(asked) {
        let (_, after) = rest.split_at(begin + 1);
        let end = after.iter().position(asked).unwrap_or(after.len());
        let (one, next) = after.split_at(end);
        all.extend(leased(one).map(|leased| Times { leased, parts: parts(one, &theirs) }));
        rest = next;
    }
    all
}

/// Times of single leased reads, microseconds: from the caller's command, on a thread of its own, until
/// the block is compared.
pub(crate) fn of_a_caller(
    fabrics: (VerbsFabric, VerbsFabric),
    (size, count): (u32, u32),
) -> Vec<f64> {
    let two = Two::new(fabrics, (size, count), (Detail::None, Detail::None));
    let read = |block| {
        // The data threads come to rest.
        std::thread::sleep(PAUSE);
        let begun = nanos();
        two.runtime.block_on(two.requester.fetch(&two.holder, block));
        between(begun, two.requester.watch.nanos.load(Ordering::Acquire))
    };
    let all = (1..count).map(read).collect();
    two.stop();
    all
}
