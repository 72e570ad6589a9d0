//! A counter that wakes a poller, across threads and processes.
#![expect(
    unsafe_code,
    reason = "Tokio takes the caller's word that a descriptor stays open while it is registered"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;

/// An event counter: readable while notified and not drained. Never blocks; closed on `exec`.
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
}

impl EventFd {
    /// A counter at zero.
    ///
    /// # Errors
    /// What `eventfd` answers: `EMFILE` at the limit on open files.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let fd = rustix::event::eventfd(0, flags)?;
        Ok(Self { fd })
    }

    /// Takes over a descriptor that another process made and passed on. One that is no event counter
    /// fails at the first use.
    ///
    /// # Errors
    /// What `fcntl` answers.
    pub fn from_passed(fd: OwnedFd) -> io::Result<Self> {
        // The flag belongs to the open file, which the other process shares and may have set
        // otherwise; without it a drain would block.
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self { fd })
    }

    /// Wakes whoever waits for the descriptor to become readable, now or when it next waits.
    ///
    /// # Errors
    /// What `write` answers, for a descriptor that is no event counter.
    pub fn notify(&self) -> io::Result<()> {
        match rustix::io::retry_on_intr(|| rustix::io::write(&self.fd, &1_u64.to_ne_bytes())) {
            // At its maximum the counter is readable already, which is all that is asked.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The counter, watched by the current Tokio runtime.
    ///
    /// # Errors
    /// What `epoll_ctl` answers, at the limit on watches.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn watched(self: &Arc<Self>) -> io::Result<AsyncFd<Arc<Self>>> {
        // SAFETY: `as_raw_fd` answers the same descriptor at every call, that of a field which is never
        // replaced, and the counter owns it: it stays open until the last handle on the counter is
        // dropped, and the one that is handed over here lives as long as the registration.
        let watched = unsafe { AsyncFd::register(Arc::clone(self)) };
        watched.map_err(|refused| refused.into_parts().1)
    }

    /// Takes all notifications so far and answers how many there were; 0 where there were none.
    ///
    /// # Errors
    /// What `read` answers, for a descriptor that is no event counter.
    pub fn drain(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.fd, &mut count)) {
            Ok(_) => Ok(u64::from_ne_bytes(count)),
            Err(Errno::AGAIN) => Ok(0),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_add_up_and_are_taken_together() {
        let event = EventFd::new().unwrap();
        assert_eq!(event.drain().unwrap(), 0);
        event.notify().unwrap();
        event.notify().unwrap();
        assert_eq!(event.drain().unwrap(), 2);
        assert_eq!(event.drain().unwrap(), 0);
    }

    #[test]
    fn a_full_counter_still_counts_as_notified() {
        let event = EventFd::new().unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.notify().unwrap();
        assert_eq!(event.drain().unwrap(), u64::MAX - 1);
    }

    #[test]
    fn a_passed_counter_never_blocks() {
        let blocking = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
        let event = EventFd::from_passed(blocking).unwrap();
        assert_eq!(event.drain().unwrap(), 0);
    }
}
