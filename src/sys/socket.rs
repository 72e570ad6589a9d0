//! Non-blocking TCP sockets. Frames are written whole, so none waits for more bytes; buffer sizes are left
//! to the kernel: a size that we set would switch off its tuning, and be cut to `net.core.wmem_max`, which
//! by default lies far below what tuning reaches.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// Connections that the kernel completes before they are accepted.
const BACKLOG: i32 = 1024;

fn stream_socket(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// A listening socket and the address that it got.
///
/// # Errors
/// What the system answers: `EADDRINUSE`, `EADDRNOTAVAIL`, `EMFILE`.
pub fn listen(address: SocketAddr) -> Result<(OwnedFd, SocketAddr), Errno> {
    let socket = stream_socket(&address)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
    Ok((socket, bound))
}

/// A socket that has begun to connect. The outcome is known when it becomes writable.
///
/// # Errors
/// What the system answers: `ENETUNREACH`, `EMFILE`.
pub fn dial(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = stream_socket(address)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    match rustix::net::connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(error) => Err(error),
    }
}

/// Takes one waiting connection; `None` where none waits.
///
/// # Errors
/// What the system answers: `EMFILE`, or the end of a connection that has gone already.
pub fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    match rustix::net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok(socket) => {
            sockopt::set_tcp_nodelay(&socket, true)?;
            Ok(Some(socket))
        }
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a socket that became writable is connected.
///
/// # Errors
/// Why the connection could not be made.
pub fn connected(socket: &OwnedFd) -> io::Result<()> {
    sockopt::socket_error(socket)??;
    Ok(())
}

/// Makes the kernel ask an idle peer whether it is there, every `interval`; three unanswered
/// questions end the connection.
///
/// # Errors
/// What `setsockopt` answers.
pub fn keep_alive(socket: &OwnedFd, interval: Duration) -> Result<(), Errno> {
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, interval)?;
    sockopt::set_tcp_keepintvl(socket, interval)?;
    sockopt::set_tcp_keepcnt(socket, 3)
}
