//! What every fabric must do, written against the trait alone. A fabric's test file brings a
//! [`Harness`] and calls [`conformance_tests!`].
//!
//! Both ends live in the test's own thread and are polled in turn, so a test decides what each end
//! has seen and done at any moment; nothing sleeps.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "helpers of tests: they fail by panicking, sizes are small, a wait has a deadline"
)]

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvrail::fabric::{
    Access, CloseReason, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent,
    ReadBatch, ReadWork, Region, RegisteredSpan, RemoteSpan, WindowId, WrId,
};
use kvrail::memory::Mapping;

mod access;
mod closing;
mod messages;
mod reads;
#[allow(dead_code, reason = "only whole suites run these")]
mod strided;
#[allow(dead_code, reason = "only fabrics with windows run these")]
mod windows;

pub(crate) use access::*;
pub(crate) use closing::*;
pub(crate) use messages::*;
pub(crate) use reads::*;
#[allow(unused_imports, reason = "only whole suites run these")]
pub(crate) use strided::*;
#[allow(unused_imports, reason = "only fabrics with windows run these")]
pub(crate) use windows::*;

/// How a test makes fabrics.
pub(crate) trait Harness {
    /// The fabric under test.
    type Fabric: Fabric<Memory = Mapping>;

    /// A fabric that others can connect to.
    fn fabric() -> Self::Fabric;
    /// Where others find it.
    fn endpoint(fabric: &Self::Fabric) -> <Self::Fabric as Fabric>::Endpoint;
    /// Lets a moment pass, where time is not the machine's.
    fn pass() {}
    #[allow(dead_code, reason = "only fabrics with windows are asked")]
    /// Whether a key of a window reads no byte outside of it, as it must not.
    fn windows_have_bounds() -> bool {
        true
    }
    /// A place where no fabric is.
    fn nowhere() -> <Self::Fabric as Fabric>::Endpoint;
}

/// Memory that holds these bytes, as a pool's is: a memory file.
pub(crate) fn memory_of(bytes: &[u8]) -> Arc<Mapping> {
    let memory = Mapping::anonymous("kvrail-test", bytes.len() as u64).unwrap();
    memory.write(0, bytes).unwrap();
    Arc::new(memory)
}

/// What lies in memory.
pub(crate) fn bytes_of(memory: &Mapping, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read(offset, &mut bytes).unwrap();
    bytes
}

/// How long a condition may take to come true.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// An event, with the message's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Seen {
    Accepted(ConnectionId),
    Connected(ConnectionId),
    Message(ConnectionId, Vec<u8>),
    Completed(ConnectionId, WrId, CompletionStatus),
    Revoked(ConnectionId, WindowId),
    Closed(ConnectionId, CloseReason),
}

/// A fabric and everything that it has reported.
pub(crate) struct End<H: Harness> {
    pub(crate) fabric: H::Fabric,
    pub(crate) seen: Vec<Seen>,
    batch: EventBatch,
}

impl<H: Harness> End<H> {
    pub(crate) fn new() -> Self {
        Self::of(H::fabric())
    }

    /// One with a fabric that the test made.
    pub(crate) fn of(fabric: H::Fabric) -> Self {
        Self { fabric, seen: Vec::new(), batch: EventBatch::default() }
    }

    pub(crate) fn poll(&mut self) {
        self.poll_for(Duration::from_millis(1));
    }

    /// Polls once, waiting at most so long.
    pub(crate) fn poll_for(&mut self, wait: Duration) {
        self.batch.clear();
        H::pass();
        self.fabric.poll(&mut self.batch, wait).unwrap();
        for event in &self.batch.events {
            self.seen.push(match *event {
                FabricEvent::Accepted { connection } => Seen::Accepted(connection),
                FabricEvent::Connected { connection } => Seen::Connected(connection),
                FabricEvent::Message { connection, start, end } => {
                    Seen::Message(connection, self.batch.message(start, end).to_vec())
                }
                FabricEvent::Completed(done) => {
                    Seen::Completed(done.connection, done.wr_id, done.status)
                }
                FabricEvent::Revoked { connection, window } => Seen::Revoked(connection, window),
                FabricEvent::Closed { connection, reason } => Seen::Closed(connection, reason),
            });
        }
    }

    /// Polls alone until what its peer must take first is stuck.
    pub(crate) fn get_stuck(&mut self) {
        for _poll in 0..50 {
            self.poll();
        }
    }

    /// How the READs of a connection ended, in the order of their completions.
    pub(crate) fn completions(&self, of: ConnectionId) -> Vec<(u32, CompletionStatus)> {
        let one = |seen: &Seen| match *seen {
            Seen::Completed(id, wr_id, status) if id == of => Some((wr_id.slot, status)),
            _ => None,
        };
        self.seen.iter().filter_map(one).collect()
    }

    /// Why a connection ended, once it has.
    pub(crate) fn closed(&self, of: ConnectionId) -> Option<CloseReason> {
        self.seen.iter().find_map(|seen| match *seen {
            Seen::Closed(id, reason) if id == of => Some(reason),
            _ => None,
        })
    }

    /// The messages of a connection.
    pub(crate) fn messages(&self, of: ConnectionId) -> Vec<&[u8]> {
        let one = |seen: &'_ Seen| matches!(seen, Seen::Message(id, _) if *id == of);
        let all = self.seen.iter().filter(|seen| one(seen));
        all.map(|seen| match seen {
            Seen::Message(_, bytes) => bytes.as_slice(),
            _ => &[],
        })
        .collect()
    }

    /// Registers fresh memory that holds `bytes`.
    pub(crate) fn region(&mut self, bytes: &[u8], access: Access) -> (Region, Weak<Mapping>) {
        let memory = memory_of(bytes);
        let weak = Arc::downgrade(&memory);
        (self.fabric.register(memory, access).unwrap(), weak)
    }
}

/// Polls both ends until `done`; fails at the deadline.
pub(crate) fn pump<H: Harness>(
    a: &mut End<H>,
    b: &mut End<H>,
    mut done: impl FnMut(&mut End<H>, &mut End<H>) -> bool,
) {
    let start = Instant::now();
    while !done(a, b) {
        assert!(start.elapsed() < DEADLINE, "a: {:?} b: {:?}", a.seen, b.seen);
        a.poll();
        b.poll();
    }
}

/// Two connected fabrics: `a` reads, `b` holds.
pub(crate) struct Pair<H: Harness> {
    pub(crate) a: End<H>,
    pub(crate) b: End<H>,
    /// The connection as `a` names it.
    pub(crate) at_a: ConnectionId,
    /// The same one as `b` names it.
    pub(crate) at_b: ConnectionId,
}

impl<H: Harness> Pair<H> {
    /// Connected, and admitted at both ends.
    pub(crate) fn new() -> Self {
        let mut pair = Self::strangers();
        pair.a.fabric.admit(pair.at_a).unwrap();
        pair.b.fabric.admit(pair.at_b).unwrap();
        pair
    }

    /// Connected, nobody admitted.
    pub(crate) fn strangers() -> Self {
        Self::between(End::new(), End::new())
    }

    /// Connects `a` to `b`, admits nobody.
    pub(crate) fn between(mut a: End<H>, mut b: End<H>) -> Self {
        let (at_a, at_b) = connect(&mut a, &mut b);
        Self { a, b, at_a, at_b }
    }

    /// Reads one byte and forgets it. A fabric may have to learn about a region first; what follows is
    /// under way as soon as it is posted.
    pub(crate) fn warm_up(&mut self, remote: &Region, local: &Region) {
        self.post(&[Read::same(u32::MAX, remote, local, 0, 1)]);
        self.succeed(1);
        self.a.seen.clear();
    }

    pub(crate) fn pump(&mut self, mut done: impl FnMut(&mut End<H>, &mut End<H>) -> bool) {
        pump(&mut self.a, &mut self.b, |a, b| done(a, b));
    }

    /// Posts READs from `a`.
    pub(crate) fn post(&mut self, reads: &[Read]) {
        let batch = batch(reads);
        self.a.fabric.post(self.at_a, &batch).unwrap();
    }

    /// Polls until `a` has seen so many completions; all must be successes.
    pub(crate) fn succeed(&mut self, count: usize) {
        let at_a = self.at_a;
        self.pump(|a, _| a.completions(at_a).len() >= count);
        let done = self.a.completions(at_a);
        assert_eq!(done.len(), count);
        let success = |(_, status): &(u32, _)| *status == CompletionStatus::Success;
        assert!(done.iter().all(success), "{done:?}");
    }

    /// What lies in a registered region's memory.
    pub(crate) fn bytes(memory: &Weak<Mapping>, offset: u64, len: usize) -> Vec<u8> {
        bytes_of(&memory.upgrade().unwrap(), offset, len)
    }
}

/// Connects `a` to `b`; answers the connection's id at either end.
pub(crate) fn connect<H: Harness>(a: &mut End<H>, b: &mut End<H>) -> (ConnectionId, ConnectionId) {
    let at_a = a.fabric.connect(&H::endpoint(&b.fabric)).unwrap();
    let before = b.seen.len();
    let mut at_b = None;
    pump(a, b, |a, b| {
        at_b = b.seen[before..].iter().find_map(|seen| match *seen {
            Seen::Accepted(id) => Some(id),
            _ => None,
        });
        at_b.is_some() && a.seen.contains(&Seen::Connected(at_a))
    });
    (at_a, at_b.unwrap())
}

/// One READ of a test.
#[derive(Debug, Clone)]
pub(crate) struct Read {
    pub(crate) slot: u32,
    pub(crate) remote: RemoteSpan,
    pub(crate) into: Vec<RegisteredSpan>,
}

impl Read {
    /// Reads a span of `from` into the same offset of `into`.
    pub(crate) fn same(slot: u32, from: &Region, into: &Region, offset: u64, len: u32) -> Self {
        Self {
            slot,
            remote: from.remote(offset, len).unwrap(),
            into: vec![span(into, offset, len)],
        }
    }
}

/// A local span.
pub(crate) fn span(region: &Region, offset: u64, len: u32) -> RegisteredSpan {
    RegisteredSpan { region: region.id, offset, len }
}

/// READs as a fabric takes them.
pub(crate) fn batch(reads: &[Read]) -> ReadBatch {
    let mut batch = ReadBatch::default();
    for read in reads {
        batch.works.push(ReadWork {
            wr_id: WrId { slot: read.slot, generation: 7 },
            remote: read.remote,
            segments: u16::try_from(read.into.len()).unwrap(),
        });
        batch.segments.extend(&read.into);
    }
    batch
}

/// A small generator of numbers that look random and are the same in every run.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.below(u64::MAX).to_le_bytes());
        words.flatten().take(len).collect()
    }
}

/// Makes one `#[test]` per function of the suite: for all that every fabric passes, or for those that
/// are named. Where the second argument is not so, they do nothing.
#[macro_export]
macro_rules! conformance_tests {
    ($harness:ty) => {
        $crate::conformance_tests!($harness, true);
    };
    ($harness:ty, $there:expr) => {
        $crate::conformance_tests!($harness, $there;
            messages_arrive_whole_and_in_order_both_ways,
            a_peer_that_does_not_drain_messages_fills_a_bounded_queue,
            a_message_beyond_the_limit_is_refused_and_harms_nothing,
            last_words_before_a_close_arrive,
            a_connect_to_nowhere_ends_as_unreachable,
            one_fabric_has_many_peers_at_once,
            a_wake_ends_a_poll,
            a_read_scatters_over_its_segments_and_touches_nothing_else,
            blocks_are_read_between_any_two_layouts,
            a_segment_that_leaves_its_region_is_refused_at_either_end,
            the_longest_read_arrives_whole,
            a_read_of_nothing_succeeds_under_any_key,
            thousands_of_small_reads_in_random_order,
            both_ends_read_from_each_other_at_once,
            reads_of_a_holder_whose_own_data_is_stuck_succeed,
            reads_of_all_sizes_cross_in_both_directions,
            messages_pass_while_bulk_data_flows,
            posting_beyond_the_limit_posts_nothing,
            a_wrong_key_is_refused,
            a_span_that_leaves_its_region_is_refused,
            a_local_region_is_refused,
            a_key_is_stale_after_deregistration,
            nobody_reads_before_being_admitted,
            after_a_refusal_the_rest_is_flushed,
            wrong_local_spans_are_a_local_fault,
            a_connection_that_we_did_not_admit_takes_no_reads,
            a_close_flushes_and_holds_memory_until_the_flush_is_polled,
            after_the_holder_closes_nothing_new_can_be_read,
            a_deregistration_in_mid_read_ends_it,
            a_dead_peer_ends_what_is_outstanding,
            a_fresh_connection_works_and_an_old_id_stays_dead,
            a_close_of_an_unfinished_connect_is_reported_once,
            connections_come_and_go,
        );
    };
    ($harness:ty, $there:expr; $($name:ident $(($argument:expr))?),+ $(,)?) => {
        $(
            #[test]
            fn $name() {
                if $there {
                    $crate::conformance::$name::<$harness>($($argument)?);
                }
            }
        )+
    };
}

/// The same for fabrics with windows; one of them is granted so many times.
#[macro_export]
macro_rules! window_tests {
    ($harness:ty, $there:expr, $grants:expr) => {
        $crate::conformance_tests!($harness, $there;
            a_key_reads_its_span_and_no_byte_more,
            a_regions_own_key_reads_nothing,
            a_key_ends_and_the_others_of_its_peer_go_on,
            a_key_of_another_connection_reads_nothing,
            a_window_is_granted_again_and_again($grants),
            a_message_after_a_grant_finds_the_key_at_work,
            windows_are_bounded_and_granted_once,
            a_deregistration_ends_the_keys_of_its_region,
            a_closed_connection_takes_its_keys_along,
        );
    };
}
