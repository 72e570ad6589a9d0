//! What is said to a registry, and what it answers: plain data.

use std::time::Duration;

use super::fingerprint::{Partition, PartitionDigest};
use super::{RegistryError, check_len};
use crate::limits;
use crate::types::{BlockKey, Load, NodeEpoch, NodeId, Reach};

/// A node as it registers and as plans name it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    /// Who it is.
    pub node: NodeId,
    /// Which start of it.
    pub epoch: NodeEpoch,
    /// Where peers connect to it, `host:port`, 1 to [`crate::limits::REGISTRY_ADDRESS_BYTES_MAX`] bytes.
    pub address: String,
}

/// One start of a registry. Another one knows nothing of what was announced before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RegistryEpoch(pub u64);

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
pub struct Heartbeat<'a> {
    /// What it is for.
    pub presence: Presence,
    /// How busy the node is.
    pub load: Load,
    /// What the node holds in some partitions, at most one entry for each. Only those of which it has
    /// told everything, with no batch under way: the registry compares them with its own.
    pub digests: &'a [PartitionDigest],
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Beat {
    /// How the node stands.
    pub registration: Registration,
    /// Partitions, of those whose digests came with the heartbeat, in which the registry has other
    /// blocks for this node than the node says that it holds.
    pub drifted: Vec<Partition>,
    /// Blocks of which this node became the only live owner since its last heartbeat, because another
    /// withdrew them or was reported without them. A hint: at most
    /// [`crate::limits::REGISTRY_HINTS_MAX`] wait for one node, and further ones are left out.
    pub sole: Vec<BlockKey>,
}

/// A node's standing in a registry. Where it differs from the one seen before, the registry holds
/// nothing that the node announced earlier, and the node announces everything again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Registration {
    /// The registry's start.
    pub registry: RegistryEpoch,
    /// The number of the registration within it; 0 is none (the node just left).
    pub number: u64,
    /// How long the registration lasts without another heartbeat.
    pub lease: Duration,
}

/// Who sends a change, and where in the order of the sender's changes it stands.
///
/// A sender may have several batches under way. None of them shares a key with another, and a key
/// of a batch goes into a later one only when that batch is **settled**: answered, or given up, and
/// all before it likewise. Each batch says up to where its sender had settled, and the registry
/// changes nothing for a batch up to there, whenever it comes. So whatever is lost, late or repeated,
/// two changes of one key are never applied in another order than that in which they were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// The node.
    pub node: NodeId,
    /// Its start.
    pub epoch: NodeEpoch,
    /// The [`Registration::number`] that the change belongs to; in another one it changes nothing.
    pub registration: u64,
    /// Greater than that of every earlier change of this registration; from 1.
    pub sequence: u64,
    /// Up to this number every change of the registration is settled; below `sequence`.
    pub settled: u64,
}

/// Blocks that a node announces or withdraws.
#[derive(Debug, Clone, Copy)]
pub struct Batch<'a> {
    /// Its sender and its place.
    pub stamp: Stamp,
    /// At most [`crate::limits::REGISTRY_BATCH_MAX`] keys.
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
    /// In the order of reading, at most [`crate::limits::REGISTRY_BATCH_MAX`].
    pub keys: &'a [BlockKey],
    /// Nodes to leave out, at most [`crate::limits::REGISTRY_AVOID_MAX`].
    pub avoid: &'a [NodeId],
    /// Nodes on the asker's host, which come first among owners that reach about as far; at most
    /// [`crate::limits::REGISTRY_NEAR_MAX`].
    pub same_host: &'a [NodeId],
    /// Nodes on a rail of the asker's, which come next; as many.
    pub same_rail: &'a [NodeId],
    /// Decides among equals: askers that give different numbers spread over the owners; the same
    /// number and state give the same plan.
    pub choice: u64,
}

impl<'a> PlanQuery<'a> {
    /// A question without preferences.
    #[must_use]
    pub const fn new(asker: NodeId, keys: &'a [BlockKey]) -> Self {
        Self { asker, keys, avoid: &[], same_host: &[], same_rail: &[], choice: 0 }
    }

    /// How near a node is to the asker.
    pub(crate) fn reach(&self, node: NodeId) -> Reach {
        if self.same_host.contains(&node) {
            Reach::SameHost
        } else if self.same_rail.contains(&node) {
            Reach::SameRail
        } else {
            Reach::Far
        }
    }

    /// Refuses what is beyond the limits.
    pub(crate) fn check(&self) -> Result<(), RegistryError> {
        check_len("a plan", self.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        check_len("avoid", self.avoid.len(), limits::REGISTRY_AVOID_MAX)?;
        check_len("same host", self.same_host.len(), limits::REGISTRY_NEAR_MAX)?;
        check_len("same rail", self.same_rail.len(), limits::REGISTRY_NEAR_MAX)
    }
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

/// Blocks that an owner was asked for and did not hold.
#[derive(Debug, Clone, Copy)]
pub struct Missing<'a> {
    /// The owner, as the plan named it.
    pub owner: NodeId,
    /// The start of it that was asked; another one owns what it says.
    pub epoch: NodeEpoch,
    /// At most [`crate::limits::REGISTRY_BATCH_MAX`] keys.
    pub keys: &'a [BlockKey],
}
