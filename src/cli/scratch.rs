//! A directory for the sockets, ready files and logs of child processes, gone with this process.
//!
//! A process that is killed cannot remove its own: the next one of the same user that makes one does. What
//! is in use says a lock (`flock`) on a file in the directory, which its owner and the owner's children hold
//! and the kernel takes back from the last of them; a process's number would mean another one in another
//! container. The lock is not on the directory itself, which nodes lock while they bind a socket in it.
//!
//! The file is there before it is locked, and the directory before the file: whoever finds an empty
//! directory, or a file that nobody has locked, may be faster than its owner, who makes another one then.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;

/// How the name of such a directory begins.
const PREFIX: &str = "kvrail-run-";

/// The file that is locked.
const LOCK: &str = "in-use";

/// How often to begin again where another process cleared a directory away that was not locked yet.
const ATTEMPTS: u32 = 16;

/// A directory of this process's own. Dropping it removes it with all that is in it.
#[derive(Debug)]
pub(super) struct Scratch {
    path: PathBuf,
    lock: File,
}

impl Scratch {
    /// A new one in `TMPDIR`, after what this user's processes that were killed have left there is gone.
    ///
    /// # Errors
    /// What the system answers where none can be made.
    pub(super) fn new() -> io::Result<Self> {
        let place = std::env::temp_dir();
        clear(&place, geteuid().as_raw());
        Self::within(&place)
    }

    fn within(place: &Path) -> io::Result<Self> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(PREFIX).permissions(Permissions::from_mode(0o700));
        for _attempt in 0..ATTEMPTS {
            let path = builder.tempdir_in(place)?.keep();
            match locked(&path) {
                Ok(Some(lock)) => return Ok(Self { path, lock }),
                // Somebody took it for one that was left behind.
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    fs::remove_dir(&path).ok();
                    return Err(error);
                }
            }
        }
        Err(io::Error::other("other processes remove what is made there"))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Nothing to read, for the standard input of a child: as long as the child lives, the directory is in
    /// use.
    ///
    /// # Errors
    /// What the system answers where there are too many descriptors.
    pub(super) fn empty_input(&self) -> io::Result<Stdio> {
        self.lock.try_clone().map(Stdio::from)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Makes the file, and locks it; `None` where the directory was cleared away meanwhile.
fn locked(directory: &Path) -> io::Result<Option<File>> {
    let path = directory.join(LOCK);
    drop(OpenOptions::new().append(true).create_new(true).open(&path)?);
    // For reading alone: children have it, too.
    hold(File::open(path)?)
}

/// Locks a file; `None` where another process has locked it, or has removed it by now.
fn hold(lock: File) -> io::Result<Option<File>> {
    let is_free = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
    Ok((is_free && lock.metadata()?.nlink() > 0).then_some(lock))
}

/// Removes what `user`'s processes left in `place` and no process uses.
fn clear(place: &Path, user: u32) {
    let entries = fs::read_dir(place).into_iter().flatten().filter_map(Result::ok);
    let is_named = |name: &OsStr| name.as_encoded_bytes().starts_with(PREFIX.as_bytes());
    for entry in entries.filter(|entry| is_named(&entry.file_name())) {
        // Of the entry itself, whatever a link may lead to.
        let is_theirs = |found: fs::Metadata| found.is_dir() && found.uid() == user;
        if entry.metadata().is_ok_and(is_theirs) {
            clear_one(&entry.path());
        }
    }
}

fn clear_one(directory: &Path) {
    match File::open(directory.join(LOCK)).map(hold) {
        // Locked until it is gone.
        Ok(Ok(Some(_lock))) => remove(directory),
        Ok(_used) => {}
        // Its owner was killed at once, or has not come so far yet. One that is not empty stays.
        Err(_none) => drop(fs::remove_dir(directory)),
    }
}

/// Removes a directory whose lock is held. The locked file is the last to go: where this is cut short, the
/// rest is found by it.
fn remove(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_name() != LOCK {
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let remove = if is_directory { fs::remove_dir_all } else { fs::remove_file };
            remove(entry.path()).ok();
        }
    }
    fs::remove_file(directory.join(LOCK)).ok();
    fs::remove_dir(directory).ok();
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;
    use crate::runtime::deadline::Deadline;

    fn names(place: &Path) -> Vec<PathBuf> {
        fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// What a process leaves that is killed.
    fn left_behind(place: &Path) -> PathBuf {
        let killed = Scratch::within(place).unwrap();
        fs::write(killed.path.join("node.log"), "said").unwrap();
        fs::create_dir(killed.path.join("inner")).unwrap();
        fs::write(killed.path.join("inner/file"), "").unwrap();
        let path = killed.path.with_extension("killed");
        fs::rename(&killed.path, &path).unwrap();
        path
    }

    /// Clears until so many are left. A process that another test starts has all of this one's files open
    /// for a moment, and with them the locks.
    fn cleared(place: &Path, left: usize) -> Vec<PathBuf> {
        let deadline = Deadline::after(Duration::from_secs(60));
        loop {
            clear(place, geteuid().as_raw());
            let names = names(place);
            if names.len() <= left || !deadline.pause(Duration::from_millis(5)) {
                return names;
            }
        }
    }

    #[test]
    fn it_goes_with_all_that_is_in_it() {
        let place = tempfile::tempdir().unwrap();
        let scratch = Scratch::within(place.path()).unwrap();
        fs::create_dir(scratch.path().join("inner")).unwrap();
        fs::write(scratch.path().join("inner/file"), "").unwrap();
        assert_eq!(names(place.path()), [scratch.path().to_owned()]);
        drop(scratch);
        assert_eq!(names(place.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn what_is_in_use_stays_and_what_a_killed_process_left_goes() {
        let place = tempfile::tempdir().unwrap();
        let used = Scratch::within(place.path()).unwrap();
        fs::write(used.path().join("node.log"), "").unwrap();
        let left = left_behind(place.path());
        let not_locked_yet = place.path().join(format!("{PREFIX}new"));
        fs::create_dir(&not_locked_yet).unwrap();
        assert_eq!(cleared(place.path(), 1), [used.path().to_owned()], "{left:?}");
        assert!(used.path().join("node.log").exists());
    }

    #[test]
    fn a_child_keeps_it_in_use() {
        let place = tempfile::tempdir().unwrap();
        let scratch = Scratch::within(place.path()).unwrap();
        let input = scratch.empty_input().unwrap();
        let mut child = Command::new("sleep").arg("600").stdin(input).spawn().unwrap();
        let path = scratch.path.with_extension("killed");
        fs::rename(&scratch.path, &path).unwrap();
        drop(scratch);
        assert_eq!(cleared(place.path(), 1), [path]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(cleared(place.path(), 0), Vec::<PathBuf>::new());
    }

    #[test]
    fn others_and_what_only_looks_like_one_are_left_alone() {
        let (place, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let left = left_behind(place.path());
        let target = left_behind(elsewhere.path());
        std::os::unix::fs::symlink(&target, place.path().join(format!("{PREFIX}link"))).unwrap();
        fs::write(place.path().join(format!("{PREFIX}file")), "").unwrap();
        fs::create_dir(place.path().join(format!("{PREFIX}full"))).unwrap();
        fs::write(place.path().join(format!("{PREFIX}full/file")), "").unwrap();
        fs::create_dir(place.path().join("kvrail-runs")).unwrap();
        clear(place.path(), geteuid().as_raw() + 1);
        assert_eq!(names(place.path()).len(), 5, "of another user");
        assert_eq!(cleared(place.path(), 4).len(), 4, "of this one");
        assert!(!left.exists() && target.join("node.log").exists());
    }

    #[test]
    fn one_that_was_cleared_away_before_it_was_locked_is_noticed() {
        let place = tempfile::tempdir().unwrap();
        let gone = locked(&place.path().join("gone")).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
        let other = locked(place.path()).unwrap().unwrap();
        let path = place.path().join(LOCK);
        assert!(hold(File::open(&path).unwrap()).unwrap().is_none(), "it is about to be removed");
        let opened = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        drop(other);
        assert!(hold(opened).unwrap().is_none(), "it was removed");
    }
}
