//! The peer protocol: what two nodes say to each other, sans-IO.
//!
//! A message is a header of eight bytes (kind, version, two zero bytes, length of the body) and a
//! body of fixed layout: little-endian, alignment 1, no padding, followed by at most two lists whose
//! lengths the body says. [`decode`] judges every byte before it hands anything out and allocates
//! nothing: a [`Message`] borrows its list from the bytes that arrived. [`Message::encode`] is its
//! inverse, and each message has exactly one encoding: unused bytes are zero, lengths are exact.
//!
//! The handshake has three steps, so that each end answers a nonce of the other before it is given
//! anything: `Hello`, `Welcome` with the acceptor's proof, `Confirm` with the initiator's. A node
//! says `Reject` where it refuses. `Beside` is the `Hello` of a connection that is made beside one that is
//! up, to take its place once nothing runs on that; the end that did not open that one asks by `Widen`.
//!
//! A holder whose blocks lie in pieces says `Layout` before the first lease that names one of them.
//!
//! A lease is a conversation of its own: `Lend` → `Lease`, then `Renew` → `Renewed` any number of
//! times, then `Complete` → `Ranks` (which may be repeated: the holder remembers) or `Abort`.

#![forbid(unsafe_code)]

pub mod door;

mod auth;
mod decode;
mod encode;
mod entry;
mod kind;
mod strided;
#[cfg(test)]
mod tests;
mod wire;

pub use auth::{Proof, Role, SecretKey};
pub use decode::{DecodeError, decode};
pub use encode::set_loan_keys;
pub use entry::{HashEntry, Loan, LoanEntry, Outcomes, RegionEntry};
pub use kind::{AbortReason, GoodbyeReason, Kind, RanksStatus, RejectReason};
pub use strided::{Place, TensorEntry};

use std::time::Duration;

use crate::limits;
use crate::types::{
    EvictionRank, LeaseId, Load, NamespaceId, NodeEpoch, NodeId, RequestId, RequesterId,
};

/// The version that this build speaks; it is in every message.
pub const PROTOCOL_VERSION: u8 = 4;

/// How a `Hello` begins, so that a stray client is told apart from a node of another version.
pub const MAGIC: [u8; 8] = *b"kvrail\r\n";

const _: () = {
    let largest = size_of::<wire::Header>()
        + size_of::<wire::Lease>()
        + limits::LEND_BLOCKS_MAX * size_of::<LoanEntry>();
    assert!(largest <= limits::MESSAGE_BYTES_MAX);
    let hashes = size_of::<wire::Header>()
        + size_of::<wire::Lend>()
        + limits::LEND_BLOCKS_MAX * size_of::<HashEntry>();
    assert!(hashes <= limits::MESSAGE_BYTES_MAX);
    let regions = size_of::<wire::Header>()
        + size_of::<wire::Welcome>()
        + limits::REGIONS_MAX * size_of::<RegionEntry>();
    assert!(regions <= limits::MESSAGE_BYTES_MAX);
    let layout = size_of::<wire::Header>()
        + size_of::<wire::Layout>()
        + limits::REGIONS_MAX * size_of::<RegionEntry>()
        + limits::LAYOUT_TENSORS_MAX * size_of::<TensorEntry>();
    assert!(layout <= limits::MESSAGE_BYTES_MAX);
};

/// What a node says about itself in the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Introduction {
    /// Who it is.
    pub node: NodeId,
    /// Which start of it.
    pub epoch: NodeEpoch,
    /// The identity under which it reads.
    pub requester: RequesterId,
    /// Random, new for each connection.
    pub nonce: [u8; 16],
}

/// A message. Lists borrow from the caller's scratch or from the bytes that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// First step of the handshake.
    Hello(Introduction),
    /// First step where the sender's connection to this node is up and shall stay until nothing runs on
    /// it: then this one takes its place.
    Beside(Introduction),
    /// Second step.
    Welcome {
        /// The acceptor.
        introduction: Introduction,
        /// Its proof, as [`Role::Acceptor`].
        proof: Proof,
        /// What it lends from; at most [`limits::REGIONS_MAX`].
        regions: &'a [RegionEntry],
    },
    /// Third step.
    Confirm {
        /// The initiator's proof, as [`Role::Initiator`].
        proof: Proof,
        /// What it lends from; at most [`limits::REGIONS_MAX`].
        regions: &'a [RegionEntry],
    },
    /// The handshake ends here; the sender closes the connection.
    Reject {
        /// Why.
        reason: RejectReason,
    },
    /// Asks for blocks.
    Lend {
        /// The requester's number for it.
        request: RequestId,
        /// The blocks' namespace.
        namespace: NamespaceId,
        /// Their hashes; 1 to [`limits::LEND_BLOCKS_MAX`].
        hashes: &'a [HashEntry],
    },
    /// Answers `Lend`.
    Lease {
        /// The request.
        request: RequestId,
        /// The lease; [`LeaseId::NONE`] exactly where no loan is ready.
        lease: LeaseId,
        /// Milliseconds from the holder's grant to its end.
        ttl_ms: u32,
        /// How busy the holder is.
        load: Load,
        /// One per hash, in its order.
        loans: &'a [LoanEntry],
    },
    /// Asks for another full period.
    Renew {
        /// Which lease.
        lease: LeaseId,
    },
    /// Answers `Renew`.
    Renewed {
        /// The lease.
        lease: LeaseId,
        /// Milliseconds from the holder's renewal to the new end; 0 where the lease is unknown, or
        /// the holder is shutting down.
        ttl_ms: u32,
        /// How busy the holder is.
        load: Load,
    },
    /// Ends a lease: says which blocks arrived.
    Complete {
        /// The lease.
        lease: LeaseId,
        /// The start of the requester to which it was granted.
        epoch: NodeEpoch,
        /// One per loan, in its order; not set for a loan that was not ready.
        outcomes: Outcomes<'a>,
    },
    /// Answers `Complete`.
    Ranks {
        /// The lease.
        lease: LeaseId,
        /// How the completion was taken.
        status: RanksStatus,
        /// How busy the holder is.
        load: Load,
        /// One per loan, in its order: the rank before the step, 0 for none ([`rank`]). Empty
        /// where the lease is unknown.
        ranks: &'a [u8],
    },
    /// Gives a lease back unread.
    Abort {
        /// The lease; [`LeaseId::NONE`] exactly where the reason is [`AbortReason::Reconnected`].
        lease: LeaseId,
        /// Why.
        reason: AbortReason,
    },
    /// Asks for a `Pong`.
    Ping {
        /// Comes back in the answer.
        token: u64,
    },
    /// Answers `Ping`.
    Pong {
        /// The ping's token.
        token: u64,
        /// How busy the sender is.
        load: Load,
    },
    /// Says how blocks lie that later leases name by their numbers ([`Place::Block`]). It replaces
    /// what the same number meant. Either end remembers the [`limits::PEER_LAYOUTS_MAX`] layouts that
    /// were told last.
    Layout {
        /// The layout's number, which is the holder's to choose.
        number: u32,
        /// Blocks, at least 1.
        blocks: u32,
        /// The regions that the tensors lie in; 1 to [`limits::REGIONS_MAX`].
        regions: &'a [RegionEntry],
        /// The tensors, in the order of a block's logical bytes; 1 to
        /// [`limits::LAYOUT_TENSORS_MAX`].
        tensors: &'a [TensorEntry],
    },
    /// A connection that is made now could go over more NICs than this one does: whoever opened this one
    /// is asked to make one, by `Beside`.
    Widen,
    /// The sender closes the connection next.
    Goodbye {
        /// Why.
        reason: GoodbyeReason,
    },
}

impl Message<'_> {
    /// Its kind.
    #[must_use]
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Hello(_) => Kind::Hello,
            Self::Beside(_) => Kind::Beside,
            Self::Widen => Kind::Widen,
            Self::Welcome { .. } => Kind::Welcome,
            Self::Confirm { .. } => Kind::Confirm,
            Self::Reject { .. } => Kind::Reject,
            Self::Lend { .. } => Kind::Lend,
            Self::Lease { .. } => Kind::Lease,
            Self::Renew { .. } => Kind::Renew,
            Self::Renewed { .. } => Kind::Renewed,
            Self::Complete { .. } => Kind::Complete,
            Self::Ranks { .. } => Kind::Ranks,
            Self::Abort { .. } => Kind::Abort,
            Self::Ping { .. } => Kind::Ping,
            Self::Pong { .. } => Kind::Pong,
            Self::Goodbye { .. } => Kind::Goodbye,
            Self::Layout { .. } => Kind::Layout,
        }
    }
}

/// The kind that these bytes claim, without a look at the rest.
#[must_use]
pub fn kind_of(bytes: &[u8]) -> Option<Kind> {
    bytes.first().copied().and_then(Kind::from_code)
}

/// A rank out of [`Message::Ranks`]; `None` for a block without one.
#[must_use]
pub fn rank(byte: u8) -> Option<EvictionRank> {
    (byte > 0).then(|| EvictionRank::clamped(u32::from(byte)))
}

/// Whole milliseconds of a span, rounded down so that the reader of a lease never counts on time
/// that its holder did not give; saturates after 49 days.
#[must_use]
pub fn millis(span: Duration) -> u32 {
    u32::try_from(span.as_millis()).unwrap_or(u32::MAX)
}

/// Writes a golden file anew where `KVRAIL_WRITE_GOLDEN` is set: after a deliberate change of a
/// protocol and its version.
#[cfg(test)]
#[expect(
    clippy::disallowed_methods,
    reason = "a developer asks for new golden files by a variable"
)]
fn rewrite_golden(path: &std::path::Path, text: &str) {
    if std::env::var_os("KVRAIL_WRITE_GOLDEN").is_some() {
        std::fs::write(path, text).unwrap();
    }
}
