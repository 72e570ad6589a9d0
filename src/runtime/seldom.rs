//! Lines of the log that a stranger, or a fault that lasts, would have written without end.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::types::Timestamp;

/// The shortest time between two lines of one kind.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// When a kind of line may be written next. Shared by all who write it.
#[derive(Debug, Default)]
pub(super) struct Seldom {
    /// In nanoseconds. A number of its own: nothing else is ordered by it.
    next: AtomicU64,
}

impl Seldom {
    /// Whether to write the line now: once in a [`PAUSE`], for whoever asks first.
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        let then = (now + PAUSE).as_nanos();
        let (relaxed, now) = (Ordering::Relaxed, now.as_nanos());
        now >= next && self.next.compare_exchange(next, then, relaxed, relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_due_once_in_a_while() {
        let (seldom, now) = (Seldom::default(), Timestamp::ZERO);
        assert!(seldom.is_due(now));
        assert!(!seldom.is_due(now) && !seldom.is_due(now + PAUSE / 2));
        assert!(seldom.is_due(now + PAUSE));
        assert!(!seldom.is_due(now + PAUSE));
    }
}
