//! The clock of the process. It is read here and nowhere else; cores get its moments as arguments.

use std::time::{Duration, Instant, SystemTime};

use crate::types::{NodeEpoch, Timestamp};

/// A monotonic clock with its origin at the start of the process, and the wall time of that origin.
/// Copies agree.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: Instant,
    epoch: NodeEpoch,
}

impl Clock {
    /// A clock whose origin is now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is where clocks are read")]
    pub fn start() -> Self {
        let wall =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self {
            origin: Instant::now(),
            epoch: NodeEpoch(u64::try_from(wall.as_micros()).unwrap_or(u64::MAX)),
        }
    }

    /// The time since the origin.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is where clocks are read")]
    pub fn now(&self) -> Timestamp {
        Timestamp::ZERO + Instant::now().duration_since(self.origin)
    }

    /// The start of this process: microseconds of wall time at the origin.
    #[must_use]
    pub const fn epoch(&self) -> NodeEpoch {
        self.epoch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_goes_on_and_the_epoch_is_of_this_century() {
        let clock = Clock::start();
        let first = clock.now();
        while clock.now() == first {}
        assert!(clock.now() > first);
        assert!(clock.epoch() > NodeEpoch(1_577_836_800_000_000));
    }
}
