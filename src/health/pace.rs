//! How long a transfer may take: a floor, and its bytes at the rate that was measured.

use std::time::Duration;

/// The shortest deadline of a transfer, whatever the rate: a host may stall for so long and still be
/// well.
const FLOOR: Duration = Duration::from_secs(2);

/// A transfer may be so many times slower than those before it: others may share the wire now.
const SLACK: u64 = 10;

/// Shorter transfers tell of latency, not of rate.
const TELLING_BYTES: u64 = 64 << 10;

/// The rate of transfers from one peer.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Pace {
    /// Bytes per second; 0 before the first transfer that tells.
    rate: u64,
}

impl Pace {
    /// Bytes per second; `None` before there is a measure.
    pub(super) const fn rate(&self) -> Option<u64> {
        if self.rate > 0 { Some(self.rate) } else { None }
    }

    /// Takes note of a transfer. A slower one counts more than a faster one, so that deadlines grow
    /// sooner than they shrink.
    pub(super) fn note(&mut self, bytes: u64, took: Duration) {
        if bytes < TELLING_BYTES {
            return;
        }
        let nanos = took.as_nanos().max(1);
        let rate = u128::from(bytes) * 1_000_000_000 / nanos;
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).max(1);
        self.rate = match self.rate {
            0 => rate,
            before if rate < before => before / 2 + rate / 2,
            before => before + (rate - before) / 8,
        }
        .max(1);
    }

    /// How long a transfer of so many bytes may take, at most `bound`; that bound itself before there
    /// is a measure.
    pub(super) fn allowance(&self, bytes: u64, bound: Duration) -> Duration {
        let Some(rate) = self.rate() else { return bound };
        let nanos = u128::from(bytes) * u128::from(SLACK) * 1_000_000_000 / u128::from(rate);
        let at_rate = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        FLOOR.saturating_add(at_rate).min(bound)
    }
}
