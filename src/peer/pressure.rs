//! When a holder asks its readers to hold back, and when it lends no more.

use super::Peers;
use super::landing::Landing;
use crate::lease::Usage;
use crate::types::Load;

/// How long a requester holds back while leases keep more than the low mark, and more than the high
/// one, milliseconds.
const PAUSE_ABOVE_LOW_MS: u32 = 10;
const PAUSE_ABOVE_HIGH_MS: u32 = 50;

/// Marks of what leases keep from eviction. A block counts once for each lease that lends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pressure {
    /// Nothing is lent that would bring the bytes under leases above this.
    pub high_bytes: u64,
    /// Above so many bytes under leases, requesters are asked to hold back.
    pub low_bytes: u64,
    /// The same for the number of leases; there the lease table's own limit is the high mark.
    pub low_leases: u64,
}

impl Default for Pressure {
    /// No mark.
    fn default() -> Self {
        Self { high_bytes: u64::MAX, low_bytes: u64::MAX, low_leases: u64::MAX }
    }
}

impl Pressure {
    /// Marks at these percentages of a node's memory and of its leases.
    #[must_use]
    pub fn new(bytes: u64, leases: u64, (high, low): (u8, u8)) -> Self {
        let share = |of: u64, percent: u8| of / 100 * u64::from(percent);
        Self {
            high_bytes: share(bytes, high),
            low_bytes: share(bytes, low),
            low_leases: (leases * u64::from(low)).div_ceil(100),
        }
    }

    /// What is said with each reply; `memory_pause_ms` is what the pools ask for.
    pub(super) fn load(&self, lent: Usage, memory_pause_ms: u32) -> Load {
        let pause_ms = if lent.bytes > self.high_bytes {
            PAUSE_ABOVE_HIGH_MS
        } else if lent.bytes > self.low_bytes || lent.leases > self.low_leases {
            PAUSE_ABOVE_LOW_MS
        } else {
            0
        };
        Load { outstanding_bytes: lent.bytes, pause_ms: pause_ms.max(memory_pause_ms) }
    }

    /// Bytes that may be lent beside those that are.
    pub(super) fn room(&self, lent: Usage) -> u64 {
        self.high_bytes.saturating_sub(lent.bytes)
    }
}

impl<L: Landing> Peers<L> {
    /// Moves the marks, for a node whose memory has become more or less.
    pub fn set_pressure(&mut self, pressure: Pressure) {
        self.holder.pressure = pressure;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_hold_back_above_the_low_mark_and_get_nothing_above_the_high_one() {
        let pressure = Pressure::new(1000, 20, (90, 75));
        let lent = |bytes, leases| Usage { bytes, leases, blocks: 0 };
        assert_eq!(pressure.load(lent(750, 15), 0).pause_ms, 0);
        assert_eq!(pressure.load(lent(751, 1), 0).pause_ms, PAUSE_ABOVE_LOW_MS);
        assert_eq!(pressure.load(lent(1, 16), 0).pause_ms, PAUSE_ABOVE_LOW_MS);
        assert_eq!(pressure.load(lent(901, 1), 0).pause_ms, PAUSE_ABOVE_HIGH_MS);
        assert_eq!(pressure.load(lent(901, 1), 70).pause_ms, 70, "the pools ask for more");
        assert_eq!(pressure.load(lent(5, 1), 0).outstanding_bytes, 5);
        assert_eq!(pressure.room(lent(850, 1)), 50);
        assert_eq!(pressure.room(lent(950, 1)), 0);
        assert_eq!(Pressure::default().room(lent(1 << 50, 1)), u64::MAX - (1 << 50));
    }
}
