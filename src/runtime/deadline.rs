//! Deadlines for code that blocks: client calls and commands.
#![expect(
    clippy::disallowed_methods,
    reason = "the runtime is where a clock is read and a thread is paused"
)]

use std::time::{Duration, Instant};

/// A moment by which something must be done.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Option<Instant>);

impl Deadline {
    /// So much time from now. A span that the clock cannot add never ends.
    #[must_use]
    pub fn after(span: Duration) -> Self {
        Self(Instant::now().checked_add(span))
    }

    /// The time that is left; `None` once there is none.
    #[must_use]
    pub fn remaining(self) -> Option<Duration> {
        match self.0 {
            Some(end) => end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()),
            None => Some(Duration::MAX),
        }
    }

    /// Sleeps for `pause`, but not beyond the deadline. Whether there is time left afterwards.
    #[must_use]
    pub fn pause(self, pause: Duration) -> bool {
        if let Some(left) = self.remaining() {
            std::thread::sleep(pause.min(left));
        }
        self.remaining().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_ends_at_the_deadline() {
        let deadline = Deadline::after(Duration::from_millis(5));
        assert!(!deadline.pause(Duration::from_secs(3600)));
        assert_eq!(deadline.remaining(), None);
    }

    #[test]
    fn a_pause_within_the_deadline_leaves_time() {
        assert!(Deadline::after(Duration::MAX).pause(Duration::from_millis(1)));
        assert!(Deadline::after(Duration::from_secs(3600)).pause(Duration::from_millis(1)));
    }
}
