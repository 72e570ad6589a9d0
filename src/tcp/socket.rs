//! Non-blocking sockets, the epoll set that watches them, and the waker that ends a wait.

use std::fmt;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt;

use crate::fabric::{FabricError, Wake};
use crate::sys;
/// The one clock read of a poll: deadlines of handshakes and of stalled streams are checked by polls,
/// and the port passes no time in.
pub(super) use crate::sys::clock::now;
pub(super) use crate::sys::socket::{accept, connected, dial};

/// Sockets that one wait reports; the others are reported by the next one.
const READY_MAX: usize = 64;

/// Makes an error of a system call.
pub(super) fn os(call: String, source: Errno, remedy: &'static str) -> FabricError {
    FabricError::Os { call, source: source.into(), remedy }
}

/// What to try when the system has no more descriptors.
pub(super) const REMEDY_DESCRIPTORS: &str = "raise the limit of open files (ulimit -n)";

/// A listening socket and the address that it got.
pub(super) fn listen(address: SocketAddr) -> Result<(OwnedFd, SocketAddr), FabricError> {
    sys::socket::listen(address).map_err(|source| {
        os(
            format!("listening on {address}"),
            source,
            "choose an address of this host and a free port (port 0 takes any free one)",
        )
    })
}

/// Closes a socket whose unsent bytes are of no use any more: the kernel drops them and resets.
pub(super) fn reset(socket: OwnedFd) {
    // A failure leaves an orderly close, which is as good a cut, only slower.
    let _outcome = sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
    drop(socket);
}

/// What a socket waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interest {
    /// Bytes to read.
    Read,
    /// Bytes to read, or room to write.
    ReadWrite,
    /// Room to write only: the socket is connecting.
    Write,
    /// Nothing, for a while.
    Nothing,
}

impl Interest {
    fn flags(self) -> EventFlags {
        match self {
            Self::Read => EventFlags::IN,
            Self::ReadWrite => EventFlags::IN | EventFlags::OUT,
            Self::Write => EventFlags::OUT,
            Self::Nothing => EventFlags::empty(),
        }
    }
}

/// A ready socket.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ready {
    /// The token that it was added with.
    pub(super) token: u64,
    /// Bytes, the end or an error can be read.
    pub(super) readable: bool,
    /// There is room to write, or an error.
    pub(super) writable: bool,
}

/// The set of watched sockets. A closed descriptor leaves the set by itself.
#[derive(Debug)]
pub(super) struct Waiter {
    epoll: OwnedFd,
    wake: Arc<EventWake>,
}

/// The token of the waker; no socket may have it.
const WAKE_TOKEN: u64 = u64::MAX;

impl Waiter {
    pub(super) fn new() -> Result<Self, FabricError> {
        let attempt = || -> Result<Self, Errno> {
            let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
            epoll::add(&epoll, &event, EventData::new_u64(WAKE_TOKEN), EventFlags::IN)?;
            Ok(Self { epoll, wake: Arc::new(EventWake(event)) })
        };
        attempt().map_err(|source| os("making an epoll set".to_owned(), source, REMEDY_DESCRIPTORS))
    }

    pub(super) fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.wake) as Arc<dyn Wake>
    }

    pub(super) fn add(&self, socket: impl AsFd, token: u64, want: Interest) -> Result<(), Errno> {
        epoll::add(&self.epoll, socket, EventData::new_u64(token), want.flags())
    }

    pub(super) fn change(
        &self,
        socket: impl AsFd,
        token: u64,
        want: Interest,
    ) -> Result<(), Errno> {
        epoll::modify(&self.epoll, socket, EventData::new_u64(token), want.flags())
    }

    /// Waits for sockets, and lists them in `ready`.
    pub(super) fn wait(
        &self,
        ready: &mut Vec<Ready>,
        timeout: Duration,
    ) -> Result<(), FabricError> {
        // A timeout beyond what a timespec holds is as good as none.
        let limit = Timespec::try_from(timeout).ok();
        let mut buffer = [const { MaybeUninit::uninit() }; READY_MAX];
        let events = match epoll::wait(&self.epoll, &mut buffer, limit.as_ref()) {
            Ok((events, _unused)) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(source) => {
                return Err(os(
                    "epoll_wait".to_owned(),
                    source,
                    "make a new fabric; report this as a defect",
                ));
            }
        };
        for event in events {
            let (flags, data) = (event.flags, event.data);
            if data.u64() == WAKE_TOKEN {
                self.wake.reset();
                continue;
            }
            let failed = flags.intersects(EventFlags::ERR | EventFlags::HUP);
            ready.push(Ready {
                token: data.u64(),
                readable: failed || flags.contains(EventFlags::IN),
                writable: failed || flags.contains(EventFlags::OUT),
            });
        }
        Ok(())
    }
}

/// Ends waits of the set that it was made with.
struct EventWake(OwnedFd);

impl EventWake {
    fn reset(&self) {
        let mut count = [0; 8];
        // Nothing to read means that it is reset already.
        let _outcome = rustix::io::read(&self.0, &mut count);
    }
}

impl Wake for EventWake {
    fn wake(&self) {
        // A full counter refuses the write, and has then woken the set already.
        let _outcome = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl fmt::Debug for EventWake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventWake")
    }
}
