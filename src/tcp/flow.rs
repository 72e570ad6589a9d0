//! Small parts that control and data streams share: bytes that wait to be sent, the watch over a
//! stream's progress, and what a socket's error means.

use std::io;
use std::time::Duration;

use crate::sys::connections::Broken;
use crate::types::Timestamp;

/// Bytes handled per ready stream and poll; the rest waits for the next poll, so that a bulk stream
/// does not keep the messages of others waiting. One block of 1 MiB per turn costs no throughput.
pub(super) const BYTES_PER_POLL: usize = 1 << 20;

/// System calls per ready stream and poll, where frames are small.
pub(super) const CALLS_PER_POLL: usize = 16;

impl Broken {
    /// What a socket's error means on a connection that was up. A reset is how TCP tells of a close
    /// while bytes were under way, so it is the peer's close, not a failure of the path.
    pub(super) fn from_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::PEER_CLOSED,
            _ => Self::UNREACHABLE,
        }
    }
}

/// Whether an error only says "not now".
pub(super) fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Bytes that wait for room in a socket. Whoever pushes keeps the bound.
#[derive(Debug, Default)]
pub(super) struct ByteQueue {
    bytes: Vec<u8>,
    head: usize,
}

impl ByteQueue {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub(super) fn pending(&self) -> &[u8] {
        self.bytes.get(self.head..).unwrap_or_default()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending().is_empty()
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.head += count;
        if self.head >= self.bytes.len() {
            self.bytes.clear();
            self.head = 0;
        } else if self.head > self.bytes.len() / 2 {
            // More is behind the head than before it, so each byte moves at most once on average.
            self.bytes.drain(..self.head);
            self.head = 0;
        }
    }
}

/// Notices that something owed makes no progress, from sweeps alone: nothing reads a clock per READ.
#[derive(Debug, Default)]
pub(super) struct Watch {
    seen: u64,
    since: Option<Timestamp>,
}

impl Watch {
    /// Whether `progress` has stood still for longer than `limit` while something was owed. Precise to
    /// one interval between sweeps.
    pub(super) fn stalled(
        &mut self,
        now: Timestamp,
        owed: bool,
        progress: u64,
        limit: Duration,
    ) -> bool {
        match self.since {
            Some(since) if owed && progress == self.seen => now.since(since) > limit,
            _ => {
                self.seen = progress;
                self.since = owed.then_some(now);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_gives_back_what_was_pushed_in_order() {
        let mut queue = ByteQueue::default();
        let mut taken = Vec::new();
        for round in 0..50_u8 {
            queue.push(&[round; 7]);
            let count = usize::from(round % 6).min(queue.pending().len());
            taken.extend_from_slice(&queue.pending()[..count]);
            queue.consume(count);
        }
        taken.extend_from_slice(queue.pending());
        let expected: Vec<u8> = (0..50).flat_map(|round| [round; 7]).collect();
        assert_eq!(taken, expected);
        queue.consume(queue.pending().len());
        assert!(queue.is_empty());
    }

    #[test]
    fn a_watch_counts_from_the_moment_that_something_is_owed() {
        let at = |seconds: u64| Timestamp::ZERO + Duration::from_secs(seconds);
        let limit = Duration::from_secs(5);
        let mut watch = Watch::default();
        assert!(!watch.stalled(at(100), false, 0, limit));
        assert!(!watch.stalled(at(200), true, 0, limit));
        assert!(!watch.stalled(at(205), true, 0, limit));
        assert!(!watch.stalled(at(206), true, 1, limit));
        assert!(!watch.stalled(at(211), true, 1, limit));
        assert!(watch.stalled(at(212), true, 1, limit));
    }
}
