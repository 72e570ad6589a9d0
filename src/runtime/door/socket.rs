//! The socket's file: made without a moment in which the wrong people can connect, taken over only
//! from the dead, removed at the end.
//!
//! Whoever binds holds an exclusive lock of the directory from the look at an old file to `listen`,
//! so that of two nodes that start at once and find the same dead socket, the second one finds the
//! first one alive. Permissions are set between `bind` and `listen`: before `listen`, every attempt
//! to connect is refused.

use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::limits;
use crate::runtime::deadline::Deadline;
use crate::sync::{Mutex, lock};
use crate::types::Scope;

/// How long to wait for another process that binds in the same directory.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// How often to look whether it is done.
const LOCK_POLL: Duration = Duration::from_millis(5);

/// Why no socket was bound.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// A live process listens there.
    #[error("a process answers at {} already: stop it, or choose another socket path", path.display())]
    Taken {
        /// The socket's path.
        path: PathBuf,
    },
    /// Something else has that name.
    #[error("{} exists and is not a socket: remove it, or choose another socket path", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The path does not fit a socket address.
    #[error("the socket path {} is longer than a socket address takes (107 bytes): choose a shorter one", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Os {
        /// What was tried.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl BindError {
    pub(super) fn os(action: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Os { action, path: path.to_owned(), source: source.into() }
    }

    /// Whose fault it is.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Os { .. } => Scope::Local,
            Self::Taken { .. } | Self::NotASocket { .. } | Self::PathTooLong { .. } => {
                Scope::Request
            }
        }
    }
}

/// The file of a bound socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
    /// Whether it was not removed yet: afterwards another socket may have its name and its number.
    is_there: Mutex<bool>,
}

impl SocketFile {
    /// Removes the file, unless another one has its name by now. Nothing the second time; whoever comes
    /// back from here knows that it is done.
    pub fn remove(&self) {
        let mut is_there = lock(&self.is_there);
        let is_ours = |found: Metadata| (found.dev(), found.ino()) == self.identity;
        if *is_there
            && std::fs::symlink_metadata(&self.path).is_ok_and(is_ours)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "the socket file stays behind");
        }
        *is_there = false;
    }
}

/// The file, which is removed when this is dropped.
#[derive(Debug)]
pub(super) struct OwnedFile(Arc<SocketFile>);

impl OwnedFile {
    pub(super) const fn file(&self) -> &Arc<SocketFile> {
        &self.0
    }
}

impl Drop for OwnedFile {
    fn drop(&mut self) {
        self.0.remove();
    }
}

/// Binds and listens. The listener does not block.
pub(super) fn bind(path: &Path, mode: u32) -> Result<(UnixListener, OwnedFile), BindError> {
    let address = SocketAddrUnix::new(path)
        .map_err(|_too_long| BindError::PathTooLong { path: path.to_owned() })?;
    let _lock = lock_directory(path)?;
    remove_dead(path, &address)?;
    let socket = socket().map_err(|error| BindError::os("make a socket for", path, error))?;
    rustix::net::bind(&socket, &address).map_err(|error| BindError::os("bind", path, error))?;
    let found = std::fs::symlink_metadata(path)
        .map_err(|error| BindError::os("look at the new socket", path, error))?;
    let identity = (found.dev(), found.ino());
    let file = SocketFile { path: path.to_owned(), identity, is_there: Mutex::new(true) };
    let file = OwnedFile(Arc::new(file));
    std::fs::set_permissions(path, Permissions::from_mode(mode))
        .map_err(|error| BindError::os("set the permissions of", path, error))?;
    let backlog = i32::try_from(limits::DOOR_CLIENTS_MAX).unwrap_or(i32::MAX);
    rustix::net::listen(&socket, backlog)
        .map_err(|error| BindError::os("listen on", path, error))?;
    Ok((UnixListener::from(socket), file))
}

fn socket() -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// The lock ends with the returned file.
fn lock_directory(path: &Path) -> Result<File, BindError> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let directory = File::open(parent)
        .map_err(|error| BindError::os("open the socket's directory", parent, error))?;
    let deadline = Deadline::after(LOCK_WAIT);
    loop {
        match rustix::fs::flock(directory.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(directory),
            Err(Errno::AGAIN | Errno::INTR) if deadline.pause(LOCK_POLL) => {}
            Err(error) => {
                return Err(BindError::os("lock the socket's directory", parent, error));
            }
        }
    }
}

/// Makes way where a dead process left its socket.
fn remove_dead(path: &Path, address: &SocketAddrUnix) -> Result<(), BindError> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(BindError::os("look at", path, error)),
    };
    if !found.file_type().is_socket() {
        return Err(BindError::NotASocket { path: path.to_owned() });
    }
    let probe = socket().map_err(|error| BindError::os("make a socket for", path, error))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path)
            .map_err(|error| BindError::os("remove the dead socket", path, error)),
        // A full queue of waiting clients is an answer, too.
        Ok(()) | Err(Errno::AGAIN) => Err(BindError::Taken { path: path.to_owned() }),
        Err(error) => Err(BindError::os("probe the socket", path, error)),
    }
}
