//! Time as the cores see it: an argument, never a clock.

use std::ops::Add;
use std::time::Duration;

/// A moment on the monotonic clock of one process: nanoseconds since an origin that the runtime
/// chose at start. Moments of different processes are not comparable and never travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The origin.
    pub const ZERO: Self = Self(0);

    /// The moment so many nanoseconds after the origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this moment; zero where `earlier` is the later one.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// Saturates after 584 years.
    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_and_differences_saturate() {
        let late = Timestamp::from_nanos(10);
        assert_eq!(Timestamp::ZERO.since(late), Duration::ZERO);
        assert_eq!(late.since(Timestamp::ZERO), Duration::from_nanos(10));
        assert_eq!((late + Duration::MAX).as_nanos(), u64::MAX);
    }
}
