//! A simulated fabric: seeded, deterministic, on virtual time.
//!
//! A [`SimNetwork`] joins any number of nodes, each with its [`SimFabric`]. It keeps one agenda of
//! what is to happen (a message arrives, a READ is served, bytes land) and one clock, which moves
//! only by [`SimNetwork::step`] and [`SimNetwork::advance_to`]. Two runs with one seed and the same
//! calls are the same run, so a failure is replayed by its seed.
//!
//! It keeps the contract of [`crate::fabric`] and is as unkind as that contract allows:
//!
//! - A READ is served in two halves, at random moments after it was posted, out of the memory as it
//!   is then: a holder that reuses memory too early is read torn or stale. Its bytes land later
//!   still, also after the connection was closed, until the flush is polled: a reader that reuses
//!   memory too early gets it overwritten.
//! - [`SimNetwork::partition`] holds back everything between two nodes; what is stalled for too long
//!   breaks its connection at the sender's end alone. News of a closed connection is lost in a
//!   partition: the other end learns it from the answer to what it sends next.
//! - A dropped [`SimFabric`] is a dead node; a new one for the same [`SimEndpoint`] is its restart.
//!
//! Delays are drawn per message, and messages of one connection stay in order. A byte costs nothing,
//! unless [`SimConfig::read_rate`] says what it costs its READ.
//!
//! ```
//! use std::time::Duration;
//! use kvrail::fabric::{EventBatch, Fabric, FabricEvent};
//! use kvrail::sim::{SimConfig, SimEndpoint, SimNetwork};
//!
//! let network = SimNetwork::new(7, SimConfig::default());
//! let mut a = network.fabric(SimEndpoint(0));
//! let mut b = network.fabric(SimEndpoint(1));
//! let connection = a.connect(&SimEndpoint(1))?;
//! while network.step().is_some() {}
//! let mut events = EventBatch::default();
//! a.poll(&mut events, Duration::ZERO)?;
//! assert_eq!(events.events, [FabricEvent::Connected { connection }]);
//! events.clear();
//! b.poll(&mut events, Duration::ZERO)?;
//! assert!(matches!(events.events[..], [FabricEvent::Accepted { .. }]));
//! # Ok::<(), kvrail::fabric::FabricError>(())
//! ```
//!
//! Beside it, [`fault`] wraps any fabric and dies, or loses a message, at a chosen step.
#![forbid(unsafe_code)]

mod fabric;
pub mod fault;
mod happening;
mod random;
mod reads;
mod state;
mod windows;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::time::Duration;

pub use fabric::SimFabric;
pub use random::Random;

use crate::fabric::{CloseReason, RegionId, RegisteredSpan};
use crate::types::Timestamp;
use state::State;

/// A node's address in its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimEndpoint(pub u32);

/// How a network behaves.
#[derive(Debug, Clone)]
pub struct SimConfig {
    /// How long a message, the news of a closed connection, and each part of a READ is under way.
    pub delay: RangeInclusive<Duration>,
    /// How long a closed connection takes to flush its READs.
    pub drain: RangeInclusive<Duration>,
    /// What is stalled by a partition for so long breaks its connection at the sender's end.
    pub give_up: Duration,
    /// READs that a connection can have outstanding.
    pub reads_outstanding: usize,
    /// Local segments of one READ.
    pub read_segments: usize,
    /// Longest READ, bytes.
    pub read_bytes: u32,
    /// Keys of its own that a connection can give out; 0: peers read by the regions' keys. Default: 0.
    pub windows: u16,
    /// Bytes per second of each READ, whatever others there are. Default: no limit.
    pub read_rate: Option<NonZeroU64>,
}

impl SimConfig {
    /// How long a READ takes for so many bytes, beside its delays.
    fn reading_time(&self, bytes: u64) -> Duration {
        let nanos = |rate: NonZeroU64| bytes.saturating_mul(1_000_000_000) / rate;
        Duration::from_nanos(self.read_rate.map_or(0, nanos))
    }
}

impl Default for SimConfig {
    /// A slow network, 20 to 500 µs for each leg, that gives up after a second.
    fn default() -> Self {
        Self {
            delay: Duration::from_micros(20)..=Duration::from_micros(500),
            drain: Duration::from_micros(20)..=Duration::from_millis(5),
            give_up: Duration::from_secs(1),
            reads_outstanding: 64,
            read_segments: 4,
            read_bytes: 64 << 10,
            windows: 0,
            read_rate: None,
        }
    }
}

/// Memory that a READ can still read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExposedSpan {
    /// The node that serves it.
    pub holder: SimEndpoint,
    /// Its region.
    pub region: RegionId,
    /// Bytes from the region's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// A simulated network. Clones are handles on the same one.
#[derive(Debug, Clone)]
pub struct SimNetwork(Rc<RefCell<State>>);

impl SimNetwork {
    /// A network without nodes, at [`Timestamp::ZERO`].
    #[must_use]
    pub fn new(seed: u64, config: SimConfig) -> Self {
        Self(Rc::new(RefCell::new(State::new(seed, config))))
    }

    /// Starts the node at this address. One that runs there dies first.
    #[must_use]
    pub fn fabric(&self, at: SimEndpoint) -> SimFabric {
        let life = self.0.borrow_mut().start(at);
        SimFabric::new(self.clone(), at, life)
    }

    /// The virtual time.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.0.borrow().now
    }

    /// When the next thing happens by itself; `None` where nothing will.
    #[must_use]
    pub fn next_event(&self) -> Option<Timestamp> {
        self.0.borrow().next_event()
    }

    /// Moves the clock to the next thing that happens and lets it happen. Answers that moment;
    /// `None` where nothing is left.
    pub fn step(&self) -> Option<Timestamp> {
        self.0.borrow_mut().step()
    }

    /// Moves the clock to `to`, and lets all happen that is due by then. A moment in the past
    /// changes nothing.
    pub fn advance_to(&self, to: Timestamp) {
        self.0.borrow_mut().advance_to(to);
    }

    /// Holds back everything between two nodes until [`Self::heal`].
    pub fn partition(&self, a: SimEndpoint, b: SimEndpoint) {
        self.0.borrow_mut().partition(a, b);
    }

    /// Ends a partition: what was held back arrives now, in order.
    pub fn heal(&self, a: SimEndpoint, b: SimEndpoint) {
        self.0.borrow_mut().heal(a, b);
    }

    /// Breaks every connection between two nodes, as a reset on the way does: access ends at once,
    /// each end learns it in its own time.
    pub fn reset(&self, a: SimEndpoint, b: SimEndpoint) {
        self.0.borrow_mut().end_between((a, b), CloseReason::Unreachable);
    }

    /// Ends every connection between two nodes as a fabric does that has another way between them: access
    /// ends at once, and each end learns in its own time that it is to connect again.
    pub fn move_on(&self, a: SimEndpoint, b: SimEndpoint) {
        self.0.borrow_mut().end_between((a, b), CloseReason::Moved);
    }

    /// From now on connections are made over so many pairs of NICs (1 at first); those that are there
    /// keep theirs.
    pub fn set_rails(&self, rails: usize) {
        self.0.borrow_mut().rails = rails;
    }

    /// Connections between two nodes that are open at both ends.
    #[must_use]
    pub fn connections(&self, a: SimEndpoint, b: SimEndpoint) -> usize {
        self.0.borrow().connections(a, b)
    }

    /// Local spans of a node that the fabric may still write to.
    #[must_use]
    pub fn landing(&self, at: SimEndpoint) -> Vec<RegisteredSpan> {
        self.0.borrow().landing(at)
    }

    /// Memory that READs which are posted now can still read, over connections whose holder has
    /// not ended their access.
    #[must_use]
    pub fn exposed(&self) -> Vec<ExposedSpan> {
        self.0.borrow().exposed()
    }
}
