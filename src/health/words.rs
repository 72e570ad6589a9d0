//! What health is told, and what it tells.

use std::time::Duration;

use super::BreakerState;
use crate::types::{Load, NodeId, Path, Scope, Timestamp};

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// No connection could be made.
    Unreachable,
    /// The peer did not answer in time.
    NoAnswer,
    /// READs were not over by the transfer's deadline.
    TooSlow,
    /// READs failed, or their connection broke on the way.
    Broken,
    /// The peer refused the connection or ended it.
    Refused,
    /// The peer refused keys that it had just given.
    KeysRefused,
    /// Other bytes arrived than the peer's checksum says.
    WrongBytes,
    /// This node: its memory, its keys, its limits.
    Own,
}

impl Cause {
    /// What failed, by whose fault it is; `path` where it is the path's.
    #[must_use]
    pub const fn of(scope: Scope, path: Self) -> Self {
        match scope {
            Scope::Path => path,
            Scope::Peer | Scope::Request => Self::Refused,
            Scope::Local => Self::Own,
        }
    }

    /// All causes.
    pub const ALL: [Self; 8] = [
        Self::Unreachable,
        Self::NoAnswer,
        Self::TooSlow,
        Self::Broken,
        Self::Refused,
        Self::KeysRefused,
        Self::WrongBytes,
        Self::Own,
    ];

    /// What it blames.
    #[must_use]
    pub const fn scope(self) -> Scope {
        match self {
            Self::Unreachable | Self::NoAnswer | Self::TooSlow | Self::Broken => Scope::Path,
            Self::Refused | Self::KeysRefused | Self::WrongBytes => Scope::Peer,
            Self::Own => Scope::Local,
        }
    }

    /// The words that output uses.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unreachable => "no connection",
            Self::NoAnswer => "no answer in time",
            Self::TooSlow => "transfer past its deadline",
            Self::Broken => "connection broke",
            Self::Refused => "refused or ended by the peer",
            Self::KeysRefused => "fresh keys refused",
            Self::WrongBytes => "other bytes than their checksum",
            Self::Own => "a fault of this node",
        }
    }
}

/// How something that was asked of a peer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It answered.
    Answered,
    /// It sent so many bytes in so much time.
    Sent {
        /// Payload.
        bytes: u64,
        /// From the lend to the last byte.
        took: Duration,
    },
    /// It did not, after so much time.
    Failed {
        /// Why.
        cause: Cause,
        /// How long the asker waited.
        waited: Duration,
    },
    /// It refused keys: fresh ones may do.
    StaleKeys,
    /// It said nothing at all for so long although it was asked, not even that it is there: it is left
    /// alone at once.
    Silent {
        /// How long the asker waited.
        waited: Duration,
    },
}

/// Why a peer is left alone, and until when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Suspended {
    /// [`Scope::Path`] or [`Scope::Peer`] where a breaker is open; [`Scope::Request`] where the peer
    /// said that it leaves: nobody's fault.
    pub scope: Scope,
    /// When to ask again.
    pub until: Timestamp,
}

/// One line of [`Health::report`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Which kind of thing it is about.
    pub scope: Scope,
    /// The peer; `None` for a local NIC.
    pub peer: Option<NodeId>,
    /// The NICs, those that its scope has.
    pub path: Path,
    /// Where its breaker stands.
    pub state: BreakerState,
    /// Whether the peer has said that it leaves.
    pub leaving: bool,
    /// The last failure that it was blamed for.
    pub cause: Option<Cause>,
    /// Failures among the evidence that is weighed, and how much there is.
    pub weighed: (u32, u32),
    /// When the next probe is due.
    pub next_probe: Option<Timestamp>,
    /// Bytes per second, as measured; peers only.
    pub rate: Option<u64>,
    /// What the peer last said; peers only.
    pub load: Load,
}
