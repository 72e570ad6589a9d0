//! Waiting for many descriptors at once, level-triggered: what is not finished is reported again.

#![expect(unsafe_code, reason = "says that a set may change threads")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

/// What to be woken for. Errors and hang-ups are always reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Errors and hang-ups alone.
    None,
    /// Bytes or connections to take.
    Read,
    /// Room to write.
    Write,
    /// Either.
    ReadWrite,
}

impl Interest {
    /// Reading, writing, both or neither.
    #[must_use]
    pub const fn new(read: bool, write: bool) -> Self {
        match (read, write) {
            (false, false) => Self::None,
            (true, false) => Self::Read,
            (false, true) => Self::Write,
            (true, true) => Self::ReadWrite,
        }
    }

    fn flags(self) -> EventFlags {
        match self {
            Self::None => EventFlags::empty(),
            Self::Read => EventFlags::IN | EventFlags::RDHUP,
            Self::Write => EventFlags::OUT,
            Self::ReadWrite => EventFlags::IN | EventFlags::RDHUP | EventFlags::OUT,
        }
    }
}

/// A descriptor that can go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// The number that it was added with.
    pub token: u64,
    /// A read returns at once: with bytes, the end, or the error.
    pub readable: bool,
    /// A write returns at once.
    pub writable: bool,
    /// The connection is broken in both directions or failed; a read tells how.
    pub closed: bool,
}

/// A set of descriptors to wait for. A descriptor leaves it by [`delete`](Self::delete), or when its
/// last copy is closed.
pub struct Epoll {
    fd: OwnedFd,
    events: Vec<epoll::Event>,
}

// SAFETY: the events, which keep the set from being `Send` by itself, may hold a pointer where their
// data is one; here it is always a number that `add` and `modify` took, and nothing is followed.
unsafe impl Send for Epoll {}

impl Epoll {
    /// An empty set that reports at most `batch` descriptors per wait, at least 1.
    ///
    /// # Errors
    /// What `epoll_create1` answers: `EMFILE` at the limit on open files.
    pub fn new(batch: usize) -> io::Result<Self> {
        Ok(Self {
            fd: epoll::create(CreateFlags::CLOEXEC)?,
            events: Vec::with_capacity(batch.max(1)),
        })
    }

    /// Adds a descriptor under a number of the caller's choice.
    ///
    /// # Errors
    /// What `epoll_ctl` answers: `EEXIST` for one that is in the set.
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(token);
        epoll::add(&self.fd, fd, data, interest.flags())?;
        Ok(())
    }

    /// Changes what a descriptor is waited for, and its number.
    ///
    /// # Errors
    /// What `epoll_ctl` answers: `ENOENT` for one that is not in the set.
    pub fn modify(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        let data = EventData::new_u64(token);
        epoll::modify(&self.fd, fd, data, interest.flags())?;
        Ok(())
    }

    /// Takes a descriptor out of the set. A wait that returned before may still have named it.
    ///
    /// # Errors
    /// What `epoll_ctl` answers: `ENOENT` for one that is not in the set.
    pub fn delete(&self, fd: impl AsFd) -> io::Result<()> {
        epoll::delete(&self.fd, fd)?;
        Ok(())
    }

    /// Waits until a descriptor can go on or `timeout` has passed (`None`: for ever; fractions of a
    /// millisecond are rounded up), and appends what can. Appends nothing after the timeout, and
    /// where a signal ended the wait.
    ///
    /// # Errors
    /// What `epoll_wait` answers, for reasons other than a signal.
    pub fn wait(&mut self, ready: &mut Vec<Ready>, timeout: Option<Duration>) -> io::Result<()> {
        // A span that no clock can hold is a wait for ever.
        let timeout = timeout.and_then(|span| Timespec::try_from(span).ok());
        self.events.clear();
        match epoll::wait(&self.fd, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        ready.extend(self.events.iter().map(|event| {
            // The record is packed: its fields are copied, never borrowed.
            let (flags, data) = (event.flags, event.data);
            let closed = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            Ready {
                token: data.u64(),
                readable: flags.intersects(EventFlags::IN | EventFlags::RDHUP) || closed,
                writable: flags.contains(EventFlags::OUT) || closed,
                closed,
            }
        }));
        Ok(())
    }
}

impl fmt::Debug for Epoll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoll").field("fd", &self.fd).finish_non_exhaustive()
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::sys::eventfd::EventFd;

    fn wait(epoll: &mut Epoll) -> Vec<Ready> {
        let mut ready = Vec::new();
        epoll.wait(&mut ready, Some(Duration::ZERO)).unwrap();
        ready
    }

    #[test]
    fn a_notified_counter_is_reported_until_drained() {
        let mut epoll = Epoll::new(4).unwrap();
        let event = EventFd::new().unwrap();
        epoll.add(&event, 42, Interest::Read).unwrap();
        assert_eq!(wait(&mut epoll), []);
        event.notify().unwrap();
        for _again in 0..2 {
            let ready = wait(&mut epoll);
            assert_eq!((ready.len(), ready[0].token), (1, 42));
            assert!(ready[0].readable && !ready[0].closed);
        }
        event.drain().unwrap();
        assert_eq!(wait(&mut epoll), []);
    }

    #[test]
    fn another_thread_ends_a_wait_without_timeout() {
        let mut epoll = Epoll::new(1).unwrap();
        let event = EventFd::new().unwrap();
        epoll.add(&event, 1, Interest::Read).unwrap();
        let mut ready = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| event.notify().unwrap());
            while ready.is_empty() {
                epoll.wait(&mut ready, None).unwrap();
            }
        });
        assert_eq!(ready[0].token, 1);
    }

    #[test]
    fn interest_and_tokens_change_and_hang_ups_are_told() {
        let mut epoll = Epoll::new(4).unwrap();
        let (mut here, mut there) = UnixStream::pair().unwrap();
        epoll.add(&here, 1, Interest::ReadWrite).unwrap();
        let ready = wait(&mut epoll);
        assert!(ready[0].writable && !ready[0].readable);
        epoll.modify(&here, 2, Interest::None).unwrap();
        there.write_all(b"x").unwrap();
        assert_eq!(wait(&mut epoll), []);
        epoll.modify(&here, 3, Interest::Read).unwrap();
        let expected = Ready { token: 3, readable: true, writable: false, closed: false };
        assert_eq!(wait(&mut epoll), [expected]);
        here.read_exact(&mut [0]).unwrap();
        drop(there);
        assert!(wait(&mut epoll)[0].closed);
        epoll.delete(&here).unwrap();
        assert_eq!(wait(&mut epoll), []);
        assert!(epoll.delete(&here).is_err());
    }

    #[test]
    fn a_wait_reports_at_most_its_batch() {
        let mut epoll = Epoll::new(2).unwrap();
        let events: Vec<_> = (0..3).map(|_| EventFd::new().unwrap()).collect();
        for (token, event) in events.iter().enumerate() {
            epoll.add(event, token as u64, Interest::Read).unwrap();
            event.notify().unwrap();
        }
        assert_eq!(wait(&mut epoll).len(), 2);
    }
}
