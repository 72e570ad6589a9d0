//! The host's small text files, below a directory that stands for its root.
//!
//! What `/proc`, `/sys` and `/etc` say is read from here where a test has to say something else: it
//! builds a tree of its own. A file that is absent and one that cannot be read are the same to the
//! reader, since the kernel refuses to read some attributes that have no value.

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The root directory of a host, or of a tree that imitates one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoot(PathBuf);

impl HostRoot {
    /// This host's own.
    #[must_use]
    pub fn host() -> Self {
        Self(PathBuf::from("/"))
    }

    /// A tree that imitates a host's.
    #[must_use]
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self(directory.into())
    }

    /// Where a path of the host lies, whether or not it begins with a slash.
    #[must_use]
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.0.join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// A file's text without the white space around it; `None` where it cannot be read or is empty.
    #[must_use]
    pub fn text(&self, inside: impl AsRef<Path>) -> Option<String> {
        // Environments and maps need not be UTF-8, and what is wanted from them is.
        let bytes = fs::read(self.path(inside)).ok()?;
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// The value that is all of a file.
    #[must_use]
    pub fn value<T: FromStr>(&self, inside: impl AsRef<Path>) -> Option<T> {
        self.text(inside)?.parse().ok()
    }

    /// The names in a directory, in order; none where there is no directory.
    #[must_use]
    pub fn names(&self, inside: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(inside)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The last word of what a symbolic link points to.
    #[must_use]
    pub fn link_name(&self, inside: impl AsRef<Path>) -> Option<String> {
        let target = fs::read_link(self.path(inside)).ok()?;
        target.file_name()?.to_str().map(ToOwned::to_owned)
    }

    /// Whether something is there.
    #[must_use]
    pub fn exists(&self, inside: impl AsRef<Path>) -> bool {
        self.path(inside).exists()
    }
}

#[cfg(test)]
impl HostRoot {
    /// A tree of these files, which lives as long as the directory.
    pub(crate) fn imitation(files: &[(&str, &str)]) -> (tempfile::TempDir, Self) {
        let directory = tempfile::tempdir().unwrap();
        let root = Self::at(directory.path());
        for (path, text) in files {
            root.write(path, text);
        }
        (directory, root)
    }

    /// Writes a file of such a tree, replacing the one that is there.
    pub(crate) fn write(&self, inside: &str, text: &str) {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Makes a symbolic link of such a tree.
    pub(crate) fn link(&self, inside: &str, target: &str) {
        let path = self.path(inside);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_stay_below_the_root() {
        let (_directory, root) = HostRoot::imitation(&[("etc/b", " 7 \n"), ("etc/a", "\n")]);
        root.link("etc/link", "../x/driver");
        assert_eq!(root.value::<u64>("/etc/b"), Some(7));
        assert_eq!(root.text("etc/b").as_deref(), Some("7"));
        assert_eq!(root.text("etc/a"), None, "nothing but white space");
        assert_eq!(root.text("/etc/passwd"), None, "the tree has none");
        assert_eq!(root.names("/etc"), ["a", "b", "link"]);
        assert_eq!(root.names("/usr"), [""; 0]);
        assert_eq!(root.link_name("etc/link").as_deref(), Some("driver"));
        assert!(root.exists("etc/b") && !root.exists("etc/c"));
    }
}
