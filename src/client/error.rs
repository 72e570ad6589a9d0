//! What can go wrong at the local door, and what to do then.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::event::BusyReason;
use crate::memory::OutOfBounds;
use crate::protocol::door::{DecodeError, ImportRefusal, TooMany};
use crate::types::{BlockHash, Scope};

/// An error of a [`super::Client`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens there.
    #[error("no kvrail node answers at {path}: start one with `kvrail serve --socket {path}`", path = path.display())]
    NoNode {
        /// The socket's path.
        path: PathBuf,
    },
    /// The socket is not for this user.
    #[error("the socket {} is not open to this user: run as the node's user, or start the node with a wider socket mode", path.display())]
    NotAllowed {
        /// The socket's path.
        path: PathBuf,
    },
    /// The path does not fit a socket address, or names something that is no socket.
    #[error("{} is no socket of a kvrail node: give the path that the node serves at, of at most 107 bytes", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The node did not answer in time. The connection is closed: connect again.
    #[error("the node did not answer within {} ms: it is overloaded or stuck; try again, or look at its log", within.as_millis())]
    TimedOut {
        /// The call's deadline.
        within: Duration,
    },
    /// The connection is closed: the node ended it, or an earlier call failed. Connect again.
    #[error(
        "the node closed the connection: it is shutting down or serves as many local clients as it takes; connect again"
    )]
    Closed,
    /// The node sent what this protocol does not know.
    #[error("the node's answer is not understood: {0}")]
    Protocol(#[from] DecodeError),
    /// The node's answer does not fit the question.
    #[error("the node's answer does not fit the request: use client and node of one release")]
    Unexpected,
    /// The node has no room now.
    #[error("the node is busy: {}; try again in {} ms", reason.as_str(), pause.as_millis())]
    Busy {
        /// When to ask again.
        pause: Duration,
        /// Why.
        reason: BusyReason,
    },
    /// The node will not do this.
    #[error("the node refused: {sentence}")]
    Refused {
        /// The node's reason.
        sentence: String,
    },
    /// The node will not import this memory or layout.
    #[error("the node did not import it: {sentence}")]
    ImportRefused {
        /// Why.
        reason: ImportRefusal,
        /// The node's words, with the numbers.
        sentence: String,
    },
    /// A list is longer than a request takes.
    #[error(transparent)]
    TooMany(#[from] TooMany),
    /// A range lies outside its block, or a block outside its pool.
    #[error("{0}")]
    OutOfBounds(#[from] OutOfBounds),
    /// A buffer does not have the block's length.
    #[error("a block of {block} bytes does not fit a buffer of {buffer}")]
    Length {
        /// The block's length, bytes.
        block: u32,
        /// The buffer's length, bytes.
        buffer: usize,
    },
    /// The bytes of a block are not those that were saved.
    #[error(
        "block {hash} does not have the checksum it was saved with: its bytes are not used; acquire it again"
    )]
    Checksum {
        /// Which block.
        hash: BlockHash,
    },
}

impl ClientError {
    /// Whose fault it is: `Peer` is the node here.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::NoNode { .. } | Self::TimedOut { .. } | Self::Closed => Scope::Path,
            Self::NotAllowed { .. }
            | Self::NotASocket { .. }
            | Self::TooMany(_)
            | Self::OutOfBounds(_)
            | Self::Length { .. }
            | Self::Refused { .. } => Scope::Request,
            Self::ImportRefused {
                reason: ImportRefusal::NoGpu | ImportRefusal::System, ..
            } => Scope::Local,
            Self::ImportRefused { .. } => Scope::Request,
            Self::Io { .. } => Scope::Local,
            Self::Protocol(_) | Self::Unexpected | Self::Busy { .. } | Self::Checksum { .. } => {
                Scope::Peer
            }
        }
    }

    /// How long to wait before the same request, where only time is missing.
    #[must_use]
    pub const fn backpressure(&self) -> Option<Duration> {
        match self {
            Self::Busy { pause, .. } => Some(*pause),
            _ => None,
        }
    }
}
