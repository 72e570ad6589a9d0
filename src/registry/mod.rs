//! The owner registry: which nodes hold which blocks.
//!
//! It is a hint with leases, never consensus. It may forget everything (a restart), and a node may be
//! gone before its lease ends; a reader finds out by asking the owner, and nodes announce again.
//!
//! - A node **registers** by its heartbeat, which carries its identity and renews one lease for the
//!   node, not one per block: a block never vanishes because it is old. Each registration has a
//!   number; a node that sees another [`Registration`] than before announces its residents again.
//!   That holds whatever message was lost: the number stays visible in every later heartbeat.
//! - Ownership is kept as (node slot, generation of the registration). The end of a registration, by
//!   expiry, by a later start of the node, or by its leave, changes the generation: all that it owned
//!   is void in O(1), skipped by every answer, and removed when met or swept.
//! - Batches of one node name their registration and carry a [`Stamp`]. A batch from an earlier
//!   registration or start of the node, or one that its sender had settled, changes nothing, so that
//!   an announce and a withdraw of one key are never reordered, however many batches are under way.
//! - Keys fall into [`limits::REGISTRY_PARTITIONS`] **partitions**. For each of them a node and the
//!   registry keep a digest of what the node holds, and compare them in heartbeats: whatever was lost
//!   on either side is found, and told again for that partition alone.
//! - A plan splits the asked positions, in order, into runs that one owner holds whole.
#![forbid(unsafe_code)]

pub mod announcing;
mod calls;
mod directory;
mod fault;
mod fingerprint;
mod in_process;
mod nodes;
mod owners;
mod plan;
mod shard;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

pub use calls::{
    Announced, Batch, Beat, Heartbeat, Missing, NodeIdentity, Plan, PlanQuery, Presence,
    Registration, RegistryEpoch, Segment, Stamp, Withdrawn,
};
pub use directory::{Directory, DirectoryOptions, DirectoryStats};
pub use fingerprint::{Fingerprint, Partition, PartitionDigest};
pub use in_process::InProcess;

pub use crate::types::Load;
pub(crate) use plan::{Standing, assemble_plan};

use crate::limits;
use crate::types::Scope;

/// Why a registry call failed. None of these stops local hits or saves.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// No connection, or it broke.
    #[error("the registry is unreachable ({reason}); check its address and that it runs")]
    Unreachable {
        /// What the transport said.
        reason: String,
    },
    /// No answer in time. The call may or may not have taken effect.
    #[error("the registry did not answer within {0:?}")]
    TimedOut(Duration),
    /// The node is not registered, its lease ended, or the batch is from an earlier registration.
    #[error("the registry does not know this node: send a heartbeat, then announce all again")]
    UnknownNode,
    /// A later start of the same node is registered.
    #[error(
        "a later start of this node is registered; stop this process, or give it its own node id"
    )]
    Superseded,
    /// The node had settled this batch before it came; it changed nothing.
    #[error(
        "the node had given up on this batch, or repeated it, before it came; it changed nothing"
    )]
    Late,
    /// The call can never work as it is.
    #[error("the registry refused the call: {reason}")]
    Refused {
        /// What is wrong with it.
        reason: String,
    },
    /// The registry is at one of its limits.
    #[error("the registry is full: {reason}")]
    Full {
        /// The limit.
        reason: String,
    },
    /// The registry answered what makes no sense.
    #[error("the registry's answer makes no sense ({reason}); are both of one version?")]
    Nonsense {
        /// What is wrong with it.
        reason: String,
    },
}

impl RegistryError {
    /// Whose fault it is; the registry counts as the peer.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Unreachable { .. } | Self::TimedOut(_) | Self::Late => Scope::Path,
            Self::UnknownNode | Self::Full { .. } | Self::Nonsense { .. } => Scope::Peer,
            Self::Superseded => Scope::Local,
            Self::Refused { .. } => Scope::Request,
        }
    }
}

/// The answer of an [`OwnerRegistry`], when it comes.
pub type RegistryFuture<'a, T> =
    Pin<Box<dyn Future<Output = Result<T, RegistryError>> + Send + 'a>>;

/// A registry of owners, wherever it runs. Each call has a deadline of the implementation.
pub trait OwnerRegistry: Send + Sync + Debug {
    /// Registers the node, renews its lease, or ends it.
    ///
    /// # Errors
    /// [`RegistryError::Superseded`] where a later start is registered, [`RegistryError::Full`] where
    /// there are too many nodes, and what the way to the registry brings.
    fn heartbeat<'a>(
        &'a self,
        node: &'a NodeIdentity,
        heartbeat: Heartbeat<'a>,
    ) -> RegistryFuture<'a, Beat>;

    /// Says that the node holds these blocks. Idempotent.
    ///
    /// # Errors
    /// [`RegistryError::UnknownNode`] without a registration, [`RegistryError::Late`] for a batch that
    /// its sender had settled, and what the way to the registry brings.
    fn announce<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Announced>;

    /// Says that the node holds these blocks no longer. Idempotent.
    ///
    /// # Errors
    /// As [`Self::announce`].
    fn withdraw<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Withdrawn>;

    /// Says that what the node announced in this partition is void; it will announce there again.
    /// The sender settles every earlier batch first.
    ///
    /// # Errors
    /// As [`Self::announce`].
    fn forget<'a>(&'a self, stamp: Stamp, partition: Partition) -> RegistryFuture<'a, ()>;

    /// Says that an owner was asked for these blocks and does not hold them, so that nobody else is
    /// sent there. Answers how many it had been listed for. An owner that does hold one of them is
    /// listed again when its digest is compared next.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] beyond the limits, and what the way to the registry brings.
    fn report_missing<'a>(&'a self, missing: Missing<'a>) -> RegistryFuture<'a, u32>;

    /// Asks who holds these blocks.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] beyond the limits, and what the way to the registry brings.
    fn plan<'a>(&'a self, query: PlanQuery<'a>) -> RegistryFuture<'a, Plan>;
}

/// Refuses a list that is longer than its limit.
pub(crate) fn check_len(what: &str, len: usize, max: usize) -> Result<(), RegistryError> {
    if len > max {
        return Err(RegistryError::Refused {
            reason: format!("{what} may have {max} entries, got {len}"),
        });
    }
    Ok(())
}

/// Refuses an address that no node can have.
pub(crate) fn check_address(address: &str) -> Result<(), RegistryError> {
    let max = limits::REGISTRY_ADDRESS_BYTES_MAX;
    let fits = (1..=max).contains(&address.len());
    if !fits || address.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(RegistryError::Refused {
            reason: format!("an address has 1 to {max} bytes, no spaces or control characters"),
        });
    }
    Ok(())
}
