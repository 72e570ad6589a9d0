//! The monotonic clock, for machines whose port passes no time in.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::types::Timestamp;

/// Now, on a clock that never runs backwards; its origin is the host's.
#[must_use]
pub fn now() -> Timestamp {
    read(ClockId::Monotonic)
}

/// Now as of the kernel's last tick, up to 10 ms ago: a memory read on every host, where [`now`] is a
/// system call on those whose processors have no steady counter. Good for deadlines.
#[must_use]
pub fn coarse() -> Timestamp {
    read(ClockId::MonotonicCoarse)
}

/// Processor time, of user and kernel, that the calling thread has used so far.
#[must_use]
pub fn of_thread() -> Duration {
    Duration::from_nanos(read(ClockId::ThreadCPUTime).as_nanos())
}

fn read(clock: ClockId) -> Timestamp {
    let time = clock_gettime(clock);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Timestamp::from_nanos(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
}
