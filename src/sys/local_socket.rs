//! Unix sockets between processes of one host and one user: sequenced packets under abstract names.
//!
//! An abstract name is no file: it ends with its socket, however the process ends. It is known within
//! one network namespace, which containers that use the host's network share.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// Connections that the kernel completes before they are accepted.
const BACKLOG: i32 = 128;

/// Longest abstract name, bytes: `sun_path` without its leading zero.
pub const NAME_BYTES_MAX: usize = 107;

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// A socket that listens under a name.
///
/// # Errors
/// What the system answers: `EADDRINUSE` for a name that is taken, `ENAMETOOLONG` beyond
/// [`NAME_BYTES_MAX`].
pub fn listen(name: &str) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let socket = socket()?;
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A socket that is connected to whoever listens under a name.
///
/// # Errors
/// What the system answers: `ECONNREFUSED` where nobody does, `EAGAIN` where too many wait to be
/// accepted.
pub fn dial(name: &str) -> Result<OwnedFd, Errno> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let socket = socket()?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Takes one waiting connection; `None` where none waits.
///
/// # Errors
/// What the system answers: `EMFILE`.
pub fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    match rustix::net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
        Ok(socket) => Ok(Some(socket)),
        Err(Errno::AGAIN) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the process at the other end of a connection belongs to this process's user. The kernel
/// says so, not the process.
#[must_use]
pub fn is_of_this_user(socket: impl AsFd) -> bool {
    let uid = rustix::process::geteuid();
    sockopt::socket_peercred(socket).is_ok_and(|peer| peer.uid == uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unique(what: &str) -> String {
        format!("kvrail-test/{}/{what}", std::process::id())
    }

    #[test]
    fn a_name_leads_to_its_listener_and_ends_with_it() {
        let name = unique("listener");
        assert_eq!(dial(&name).unwrap_err(), Errno::CONNREFUSED);
        let listener = listen(&name).unwrap();
        assert_eq!(listen(&name).unwrap_err(), Errno::ADDRINUSE);
        assert!(accept(&listener).unwrap().is_none());
        let here = dial(&name).unwrap();
        let there = accept(&listener).unwrap().unwrap();
        assert!(is_of_this_user(&here) && is_of_this_user(&there));
        drop((listener, there));
        assert_eq!(dial(&name).unwrap_err(), Errno::CONNREFUSED);
        assert!(listen(&"x".repeat(NAME_BYTES_MAX + 1)).is_err());
    }
}
