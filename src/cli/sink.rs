//! Where a command's product goes: standard output, or a file that appears whole or not at all.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use tempfile::NamedTempFile;

use super::CliError;

/// Permissions of a new file, before the umask.
const MODE: u32 = 0o666;

/// What names standard output.
pub(super) const STDOUT: &str = "-";

/// A file in the making.
#[derive(Debug)]
enum Draft {
    /// Without a name until it is whole, so that even a kill leaves nothing behind.
    Nameless(File),
    /// Where the file system has no nameless files: a hidden one, removed unless it is kept.
    Hidden(NamedTempFile),
}

impl Draft {
    fn file(&self) -> &File {
        match self {
            Self::Nameless(file) => file,
            Self::Hidden(file) => file.as_file(),
        }
    }
}

/// A file that has its name only once it is whole.
#[derive(Debug)]
pub(super) struct Target {
    draft: Draft,
    directory: PathBuf,
    path: PathBuf,
    /// The flag that names it.
    flag: &'static str,
}

impl Target {
    /// Begins a file that is to be named `path`; one that has the name stays until then, and passes its
    /// permissions on.
    pub(super) fn new(path: &Path, flag: &'static str) -> Result<Self, CliError> {
        // A link is followed: what it points to is replaced, not the link.
        let path = std::fs::canonicalize(path).unwrap_or_else(|_new| path.to_owned());
        let refuse = |why: &str| {
            let sentence = format!("{flag}: {} {why}", path.display());
            Err(CliError::usage(sentence))
        };
        let old = std::fs::metadata(&path).ok();
        if let Some(found) = &old {
            if found.is_dir() {
                return refuse("is a directory: name a file");
            }
            if !found.is_file() {
                return refuse("is not a regular file: name one that is, or a new one");
            }
        }
        if path.file_name().is_none() {
            return refuse("is no name of a file: name one");
        }
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new(".")).to_owned();
        let draft = draft(&directory).map_err(|error| {
            let place = directory.display();
            CliError::usage(format_args!("{flag}: cannot write into {place}: {error}"))
        })?;
        let target = Self { draft, directory, path, flag };
        if let Some(found) = old {
            // What was for a few people's eyes stays so.
            let kept = target.draft.file().set_permissions(found.permissions());
            kept.map_err(|error| target.unwritten(&error))?;
        }
        Ok(target)
    }

    /// What to say of a write that failed.
    pub(super) fn unwritten(&self, error: &io::Error) -> CliError {
        unwritten(self.flag, &self.path, error)
    }

    /// Gives the file its name.
    pub(super) fn keep(self) -> Result<(), CliError> {
        let Self { draft, directory, path, flag } = self;
        let kept = match draft {
            Draft::Hidden(file) => file.persist(&path).map(drop).map_err(|error| error.error),
            Draft::Nameless(file) => name(&file, &directory, &path),
        };
        kept.map_err(|error| unwritten(flag, &path, &error))
    }
}

fn unwritten(flag: &str, path: &Path, error: &io::Error) -> CliError {
    CliError::failed(format_args!("{flag}: cannot write {}: {error}", path.display()))
}

impl Write for Target {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.draft.file().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.draft.file().flush()
    }
}

fn draft(directory: &Path) -> io::Result<Draft> {
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    match rustix::fs::open(directory, flags, Mode::from_raw_mode(MODE)) {
        Ok(file) => Ok(Draft::Nameless(file.into())),
        Err(_no_nameless_files) => hidden_in(directory).map(Draft::Hidden),
    }
}

/// A file in the making with a hidden name, removed unless it gets another one.
pub(super) fn hidden_in(directory: &Path) -> io::Result<NamedTempFile> {
    // Made here and not by `tempfile`, whose errors tell the hidden name to people.
    hidden().make_in(directory, |path| {
        File::options().write(true).create_new(true).mode(MODE).open(path)
    })
}

fn hidden() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".kvrail-");
    builder
}

/// Links the file under a hidden name and renames that: a link alone cannot replace a file.
fn name(file: &File, directory: &Path, path: &Path) -> io::Result<()> {
    let nameless = format!("/proc/self/fd/{}", file.as_raw_fd());
    let linked = hidden().make_in(directory, |hidden| {
        rustix::fs::linkat(CWD, &nameless, CWD, hidden, AtFlags::SYMLINK_FOLLOW)
            .map_err(io::Error::from)
    })?;
    linked.persist(path).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::runtime::door::stand_in::names;

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out");
        let mut target = Target::new(&path, "-o").unwrap();
        target.write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(target);
        assert_eq!(names(directory.path()), [""; 0]);

        std::fs::write(&path, b"old").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let mut target = Target::new(&path, "-o").unwrap();
        target.write_all(b"whole").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        target.keep().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"whole");
        assert_eq!(names(directory.path()), ["out"]);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    }

    #[test]
    fn a_link_stays_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let (file, link) = (directory.path().join("file"), directory.path().join("link"));
        std::fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let mut target = Target::new(&link, "-o").unwrap();
        target.write_all(b"new").unwrap();
        target.keep().unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read(&file).unwrap(), b"new");
    }

    #[test]
    fn what_cannot_be_a_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let absent = directory.path().join("absent/out");
        for path in [directory.path(), Path::new("/dev/null"), &absent] {
            let refused = Target::new(path, "-o").unwrap_err();
            assert!(matches!(refused, CliError::Usage(_)), "{refused}");
            // Nobody has heard of the hidden file.
            assert!(!refused.to_string().contains(".kvrail-"), "{refused}");
        }
    }
}
