//! What this process may use.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Bytes that this process may lock in memory, which is also what it may register with a NIC;
/// `None` where unlimited. A process with `CAP_IPC_LOCK` is not held to it.
#[must_use]
pub fn memlock() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// File descriptors that this process may have open; `None` where unlimited.
#[must_use]
pub fn open_files() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Raises the limit on open files to the most that the system lets this process have, and answers
/// it. A node has one descriptor for each stream of each connection.
///
/// # Errors
/// What `setrlimit` answers.
pub fn raise_open_files() -> io::Result<Option<u64>> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = maximum;
    setrlimit(Resource::Nofile, Rlimit { current, maximum })?;
    Ok(open_files())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_raised_to_the_hard_limit() {
        let raised = raise_open_files().unwrap();
        assert_eq!(raised, getrlimit(Resource::Nofile).maximum);
        assert_eq!(raised, open_files());
    }
}
