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
//! - Batches of one node name their registration and carry rising sequence numbers. A batch that
//!   arrives after a later one, or from an earlier registration or start of the node, changes nothing,
//!   so that an announce and a withdraw of one key are never reordered.
//! - A plan splits the asked positions, in order, into runs that one owner holds whole.
#![forbid(unsafe_code)]

mod directory;
mod in_process;
mod nodes;
mod owners;
mod plan;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::pin::Pin;
use std::time::Duration;

pub use directory::{Directory, DirectoryOptions, DirectoryStats};
pub use in_process::InProcess;

use crate::limits;
use crate::types::{BlockKey, NodeEpoch, NodeId, Scope};

/// A node as it registers and as plans name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Who it is.
    pub node: NodeId,
    /// Which start of it.
    pub epoch: NodeEpoch,
    /// Where peers connect to it, `host:port`, 1 to [`limits::REGISTRY_ADDRESS_BYTES_MAX`] bytes.
    pub address: String,
}

/// One start of a registry. Another one knows nothing of what was announced before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegistryEpoch(pub u64);

/// What a node says about itself with a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Bytes that it has lent and that are still being read.
    pub outstanding_bytes: u64,
    /// How long askers should spare it, milliseconds; 0 where it is not under pressure.
    pub pause_ms: u32,
}

/// What a heartbeat is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Presence {
    /// Renew the lease, or register where there is none.
    #[default]
    Here,
    /// Register anew: void all that this node announced, in one step. A node does so at its start,
    /// and when it lost track of what it announced.
    Afresh,
    /// End the registration, which voids all that the node announced.
    Leaving,
}

/// A sign of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Heartbeat {
    /// What it is for.
    pub presence: Presence,
    /// How busy the node is.
    pub load: Load,
}

/// A node's standing in a registry. Where it differs from the one seen before, the registry holds
/// nothing that the node announced earlier, and the node announces everything again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Registration {
    /// The registry's start.
    pub registry: RegistryEpoch,
    /// The number of the registration within it; 0 is none (the node just left).
    pub number: u32,
    /// How long the registration lasts without another heartbeat.
    pub lease: Duration,
}

/// Blocks that a node announces or withdraws.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// The node.
    pub node: NodeId,
    /// Its start.
    pub epoch: NodeEpoch,
    /// The [`Registration::number`] that the batch belongs to; in another one it changes nothing.
    pub registration: u32,
    /// Greater than that of every earlier batch, announce or withdraw, of this registration.
    pub sequence: u64,
    /// At most [`limits::REGISTRY_BATCH_MAX`] keys.
    pub keys: &'a [BlockKey],
}

/// The answer to an announce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announced {
    /// The registry's start.
    pub registry: RegistryEpoch,
    /// Live owners of each key, in the positions asked, the announcer among them. 0: the registry is
    /// full and did not take this key.
    pub owners: Vec<u32>,
}

/// The answer to a withdraw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withdrawn {
    /// The registry's start.
    pub registry: RegistryEpoch,
    /// Positions of the keys that have exactly one live owner left, rising.
    pub sole: Vec<u32>,
}

/// The question of who holds these blocks.
#[derive(Debug, Clone, Copy)]
pub struct PlanQuery<'a> {
    /// Who asks; it is left out of the answer.
    pub asker: NodeId,
    /// In the order of reading, at most [`limits::REGISTRY_BATCH_MAX`].
    pub keys: &'a [BlockKey],
    /// Nodes to leave out, at most [`limits::REGISTRY_AVOID_MAX`].
    pub avoid: &'a [NodeId],
    /// Decides among equals: askers that give different numbers spread over the owners; the same
    /// number and state give the same plan.
    pub choice: u64,
}

/// A run of positions that one owner holds whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index in [`Plan::owners`].
    pub owner: u32,
    /// The first position.
    pub first: u32,
    /// How many positions, at least 1.
    pub count: u32,
}

/// Who holds what, in the order asked. Positions in no segment have no owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The registry's start.
    pub registry: RegistryEpoch,
    /// The owners that segments refer to.
    pub owners: Vec<NodeIdentity>,
    /// Runs of positions, rising, without overlap.
    pub segments: Vec<Segment>,
    /// Positions that no segment covers.
    pub missing: u32,
}

impl Plan {
    /// The segments with their owners.
    pub fn runs(&self) -> impl Iterator<Item = (&NodeIdentity, Segment)> {
        self.segments.iter().filter_map(|segment| {
            let at = usize::try_from(segment.owner).ok()?;
            Some((self.owners.get(at)?, *segment))
        })
    }
}

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
    /// A later batch of this node was there first; this one changed nothing.
    #[error("a later batch of this node arrived first; this one changed nothing")]
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
        heartbeat: Heartbeat,
    ) -> RegistryFuture<'a, Registration>;

    /// Says that the node holds these blocks. Idempotent.
    ///
    /// # Errors
    /// [`RegistryError::UnknownNode`] without a registration, [`RegistryError::Late`] behind a later
    /// batch, and what the way to the registry brings.
    fn announce<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Announced>;

    /// Says that the node holds these blocks no longer. Idempotent.
    ///
    /// # Errors
    /// As [`Self::announce`].
    fn withdraw<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Withdrawn>;

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
fn check_address(address: &str) -> Result<(), RegistryError> {
    let max = limits::REGISTRY_ADDRESS_BYTES_MAX;
    let fits = (1..=max).contains(&address.len());
    if !fits || address.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err(RegistryError::Refused {
            reason: format!("an address has 1 to {max} bytes, no spaces or control characters"),
        });
    }
    Ok(())
}
