//! The data thread's sign of life, and how it tells its own stalls from those of its peers.
//!
//! The thread stores the moment of each round, which it has read from the clock anyway for its
//! deadlines: one relaxed store of a word that it alone writes, no further clock read and no system
//! call. Nothing else is published by it, so no order is needed: a reader only sees the age. A round
//! waits a second at most, so an age beyond [`crate::limits::HEARTBEAT_MAX`] is a thread that hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::limits::{HEARTBEAT_MAX, OWN_STALL_MIN};
use crate::types::Timestamp;

/// When the data thread last went round. Clones are of the same thread.
#[derive(Debug, Clone, Default)]
pub struct Heartbeat(Arc<AtomicU64>);

impl Heartbeat {
    /// The heartbeat of a thread that starts now.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self(Arc::new(AtomicU64::new(now.as_nanos())))
    }

    /// The thread went round at this moment.
    pub fn beat(&self, now: Timestamp) {
        self.0.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// How long ago the thread last went round, by the same clock.
    #[must_use]
    pub fn age(&self, now: Timestamp) -> Duration {
        now.since(Timestamp::from_nanos(self.0.load(Ordering::Relaxed)))
    }

    /// Whether the thread goes round as it should.
    #[must_use]
    pub fn is_steady(&self, now: Timestamp) -> bool {
        self.age(now) <= HEARTBEAT_MAX
    }
}

/// Measures the data thread's rounds.
#[derive(Debug, Clone, Copy)]
pub struct Rounds {
    last: Timestamp,
}

impl Rounds {
    /// Rounds that begin now.
    #[must_use]
    pub const fn new(now: Timestamp) -> Self {
        Self { last: now }
    }

    /// A round ends, in which the fabric was to wait for `wait` at most. Answers by how much the
    /// thread was late where that is [`OWN_STALL_MIN`] or more: it was stopped, starved of processor
    /// time, or busy, while its peers may have done all that they should.
    pub fn end(&mut self, wait: Duration, now: Timestamp) -> Option<Duration> {
        let late = now.since(self.last).saturating_sub(wait);
        self.last = now;
        (late >= OWN_STALL_MIN).then_some(late)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn a_heartbeat_ages_until_the_next_round() {
        let heartbeat = Heartbeat::new(at(100));
        let seen = heartbeat.clone();
        let bound = u64::try_from(HEARTBEAT_MAX.as_millis()).unwrap();
        assert_eq!(seen.age(at(100)), Duration::ZERO);
        assert!(seen.is_steady(at(100 + bound)));
        assert!(!seen.is_steady(at(101 + bound)));
        heartbeat.beat(at(101 + bound));
        assert!(seen.is_steady(at(101 + bound)));
        // A reader whose clock was read before the thread's.
        assert_eq!(seen.age(at(50)), Duration::ZERO);
    }

    #[test]
    fn a_long_wait_is_no_stall_and_a_late_round_is() {
        let mut rounds = Rounds::new(at(0));
        let wait = Duration::from_secs(1);
        assert_eq!(rounds.end(wait, at(1000)), None, "it waited as it was told");
        assert_eq!(rounds.end(wait, at(1001)), None, "something happened at once");
        assert_eq!(rounds.end(wait, at(2100)), None, "schedulers are not exact");
        let late = rounds.end(wait, at(8100));
        assert_eq!(late, Some(Duration::from_secs(5)), "the second of waiting is not a part of it");
        assert_eq!(rounds.end(wait, at(8200)), None, "a stall is told once");
        assert_eq!(rounds.end(Duration::ZERO, at(8200)), None);
    }
}
