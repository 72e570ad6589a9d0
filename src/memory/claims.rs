//! Which memory is imported, and by whom.
//!
//! Memory is imported once at a time. Whose client is gone it is until the last copy, and the last peer
//! that reads it, have ended; who asks for it meanwhile is told that it is leaving, and has to wait. That
//! a client is gone is seen by its socket, so that one which dies and is started again at once is not
//! taken for two, whoever deals with its end first.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::ImportError;
use crate::sync::{Mutex, lock};

/// What makes two imports the same memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Identity {
    /// A file.
    File {
        /// Its file system.
        device: u64,
        /// Its number there.
        inode: u64,
    },
    /// What an engine's handle names.
    Handle([u8; 64]),
    /// A device allocation.
    Cuda {
        /// The GPU.
        device: [u8; 16],
        /// Its first address, as this process has it mapped.
        address: u64,
    },
}

impl Identity {
    /// The identity of an open file.
    ///
    /// # Errors
    /// What `fstat` answers.
    pub fn of_file(file: impl AsFd) -> io::Result<Self> {
        let stat = rustix::fs::fstat(file)?;
        Ok(Self::File { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// Who imports memory. The default is the node itself, which stays.
#[derive(Debug, Default)]
pub struct Owner {
    ended: AtomicBool,
    /// Of a client: its connection.
    socket: Mutex<Option<OwnedFd>>,
}

impl Owner {
    /// The client at the other end of a stream.
    ///
    /// # Errors
    /// What `dup` answers.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        Ok(Self { ended: AtomicBool::new(false), socket: Mutex::new(Some(socket)) })
    }

    /// Its connection is over, from whichever side.
    pub fn end(&self) {
        // Relaxed: it carries no data; who sees it late finds the socket closed.
        self.ended.store(true, Ordering::Relaxed);
        lock(&self.socket).take();
    }

    /// Whether it asks for nothing any more: its connection is over, or it has closed its end.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed) || lock(&self.socket).as_ref().is_some_and(is_closed)
    }
}

/// Whether the other end of a stream will say no more.
fn is_closed(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    poll(&mut polled, Some(&now)).is_ok() && polled.iter().any(|it| it.revents().intersects(closed))
}

/// All memory that is imported now, on one node.
#[derive(Debug, Clone, Default)]
pub struct Claims(Arc<Mutex<BTreeMap<Identity, Arc<Owner>>>>);

impl Claims {
    /// Claims memory.
    ///
    /// # Errors
    /// [`ImportError::AlreadyImported`] where it is claimed already, and [`ImportError::Leaving`] where
    /// who has claimed it has ended.
    pub fn claim(&self, identity: Identity, owner: &Arc<Owner>) -> Result<Claim, ImportError> {
        let mut all = lock(&self.0);
        match all.get(&identity) {
            Some(other) if other.has_ended() => return Err(ImportError::Leaving),
            Some(_) => return Err(ImportError::AlreadyImported),
            None => all.insert(identity, Arc::clone(owner)),
        };
        Ok(Claim { identity, claims: self.clone() })
    }

    /// How much is claimed.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.0).len()
    }

    /// Whether nothing is claimed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// As long as it lives, nobody else imports this memory.
#[derive(Debug)]
pub struct Claim {
    identity: Identity,
    claims: Claims,
}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.claims.0).remove(&self.identity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    #[test]
    fn memory_of_who_is_gone_is_leaving_and_all_other_is_taken() {
        let claims = Claims::default();
        let identity = Identity::Handle([1; 64]);
        let (node, other) = (Arc::new(Owner::default()), Arc::new(Owner::default()));
        let claim = claims.claim(identity, &node).unwrap();
        for owner in [&node, &other] {
            let refused = claims.claim(identity, owner).unwrap_err();
            assert!(matches!(refused, ImportError::AlreadyImported), "{refused}");
        }
        node.end();
        let refused = claims.claim(identity, &other).unwrap_err();
        assert!(matches!(refused, ImportError::Leaving), "{refused}");
        drop(claim);
        let _claim = claims.claim(identity, &other).unwrap();
        assert_eq!(claims.len(), 1);
    }

    #[test]
    fn a_client_has_ended_when_it_has_closed_its_end_whoever_knows() {
        let pair = || UnixStream::pair().unwrap();
        let ((ours, theirs), (our_own, still)) = (pair(), pair());
        let (gone, there) = (Owner::of(&ours).unwrap(), Owner::of(&our_own).unwrap());
        assert!(!gone.has_ended() && !there.has_ended());
        drop(theirs);
        assert!(gone.has_ended() && !there.has_ended());
        // Also one that still listens.
        still.shutdown(Shutdown::Write).unwrap();
        assert!(there.has_ended());
        // What it keeps of a connection ends with that, so that the other end sees its end.
        let (ours, mut theirs) = pair();
        let owner = Owner::of(&ours).unwrap();
        owner.end();
        drop(ours);
        assert!(owner.has_ended());
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
    }
}
