//! Two data threads with all that a node's have, one of which reads what the other lends. What each of
//! them asks of the heap is counted on the thread itself.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a harness of tests fails by panicking; the limit is small"
)]

mod member;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvrail::event::Discard;
use kvrail::fabric::Fabric;
use kvrail::limits::ENDED_LEASES_MAX;
use kvrail::memory::ForeignFabric;
use kvrail::sys::allocations;
use kvrail::types::NodeId;

use member::{Blocks, Member, Watch};

/// Blocks of the longest lease that is measured, and of the shortest.
const LONG: u32 = 64;
const SHORT: u32 = 8;

/// Leases until all buffers have grown to what they need: a holder remembers its answers to so many,
/// and a bit. Then leases that are counted.
const WARM: u32 = ENDED_LEASES_MAX as u32 + 16;
const COUNTED: u32 = 32;

/// Blocks that one thread holds, or has room for.
const BLOCKS: u32 = LONG * (WARM + COUNTED) + SHORT * COUNTED;

/// What a data thread had allocated when it was last looked at.
#[derive(Debug, Clone, Default)]
struct Allocations(Arc<AtomicU64>);

impl Allocations {
    fn note(&self) {
        self.0.store(allocations::of_thread(), Ordering::Relaxed);
    }

    fn noted(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Watch for Allocations {
    fn asked(&self) {
        self.note();
    }

    fn published(&self) {
        self.note();
    }
}

/// Reads of one owner, one after the other.
struct Reader<'a, E> {
    requester: &'a Member<E>,
    to: (NodeId, E),
    counts: (Allocations, Allocations),
    runtime: &'a tokio::runtime::Runtime,
    next: u32,
}

impl<E: Clone + Send + 'static> Reader<'_, E> {
    fn counts(&self) -> (u64, u64) {
        (self.counts.0.noted(), self.counts.1.noted())
    }

    /// Reads so many leases of so many blocks; what that made the holder's and the reader's thread
    /// allocate.
    fn read(&mut self, leases: u32, blocks: u32) -> (u64, u64) {
        let before = self.counts();
        for _lease in 0..leases {
            let those = self.next..self.next + blocks;
            self.next = those.end;
            self.runtime.block_on(self.requester.fetch(self.to.clone(), those));
        }
        let after = self.counts();
        (after.0 - before.0, after.1 - before.1)
    }
}

/// Fails where a block costs an allocation on either end.
///
/// # Panics
/// Where it does.
pub(crate) fn a_leased_block_costs_no_allocation<F, E>(
    (holder, requester): (F, F),
    (nodes, endpoint): ((NodeId, NodeId), E),
) where
    F: ForeignFabric + Fabric<Endpoint = E> + Send + 'static,
    E: Clone + Send + 'static,
{
    // Passes the answers of both data threads on.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    let entered = runtime.enter();
    let counts = (Allocations::default(), Allocations::default());
    let of = |held| Blocks { held, most: BLOCKS + LONG, size: 512 };
    let holder = Member::new(holder, nodes.0, of(BLOCKS), Arc::new(Discard), counts.0.clone());
    let requester = Member::new(requester, nodes.1, of(0), Arc::new(Discard), counts.1.clone());
    drop(entered);
    let to = (nodes.0, endpoint);
    let mut reader = Reader { requester: &requester, to, counts, runtime: &runtime, next: 0 };
    let grown = reader.read(WARM, LONG);
    assert!(grown.0 > 0 && grown.1 > 0, "a thread that begins allocates, and is counted");
    let long = reader.read(COUNTED, LONG);
    let short = reader.read(COUNTED, SHORT);
    // Less than one a lease: now and then one end is slow, and is asked whether it is there.
    let few = u64::from(COUNTED);
    assert!(long.0 < few, "the holder's: {} for {COUNTED} leases of {LONG} blocks", long.0);
    // A fetch has an answer and a list of its own, however long.
    let (long, short) = (long.1, short.1);
    assert!(
        long.abs_diff(short) < few,
        "{long} for {COUNTED} leases of {LONG} blocks, {short} of {SHORT}"
    );
    assert!(long <= u64::from(COUNTED * 8), "{long} for {COUNTED} fetches");
    requester.stop();
    holder.stop();
}
