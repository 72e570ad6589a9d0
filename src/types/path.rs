//! The ways between two nodes.

use arrayvec::ArrayVec;

/// A NIC of a node, by its place in that node's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Nic(pub u8);

/// A path to a peer. A fabric that does not tell NICs apart has the default one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Path {
    /// Ours.
    pub local: Nic,
    /// The peer's.
    pub remote: Nic,
}

impl Path {
    /// Stands for the way that messages take, whatever NICs that is: no node has as many NICs.
    pub const MESSAGES: Self = Self { local: Nic(u8::MAX), remote: Nic(u8::MAX) };
}

/// Paths that are told apart in one account: more than the NIC pairs of a connection.
const PATHS_MAX: usize = 16;

/// The paths that something went over, each once. Further ones than it has room for are left out: they
/// get no credit, which costs them nothing but that.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Paths(ArrayVec<Path, PATHS_MAX>);

impl Paths {
    /// Adds a path.
    pub fn add(&mut self, path: Path) {
        if !self.0.contains(&path) {
            // Where there is no room it is left out, as said above.
            self.0.try_push(path).ok();
        }
    }

    /// The paths.
    #[must_use]
    pub fn as_slice(&self) -> &[Path] {
        &self.0
    }

    /// Whether none is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

impl From<Path> for Paths {
    fn from(path: Path) -> Self {
        Self(std::iter::once(path).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_is_there_once_and_those_beyond_the_room_are_left_out() {
        let mut paths = Paths::default();
        assert!(paths.is_empty());
        for nic in 0..40 {
            let path = Path { local: Nic(nic / 2), remote: Nic(0) };
            paths.add(path);
            assert!(paths.as_slice().contains(&path) || nic >= 32);
        }
        assert_eq!(paths.as_slice().len(), PATHS_MAX);
        paths.clear();
        assert_eq!(paths, Paths::default());
    }
}
