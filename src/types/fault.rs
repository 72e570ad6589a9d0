//! Whose fault an error is.

use std::fmt;

/// Where a failure lies. Health, retries and metrics ask this and never match on texts: a local
/// fault blames no peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// This process or host: a full pool, a bad local key, a flush that we caused.
    Local,
    /// The way between two nodes: a timeout, a reset, a retry count used up.
    Path,
    /// The other node: it broke the protocol, refused, or lent what it does not hold.
    Peer,
    /// The caller: an argument that can never work.
    Request,
}

impl Scope {
    /// All scopes.
    pub const ALL: [Self; 4] = [Self::Local, Self::Path, Self::Peer, Self::Request];

    /// The name that metrics use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Path => "path",
            Self::Peer => "peer",
            Self::Request => "request",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
