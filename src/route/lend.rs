//! What is asked of one owner, and what it answers.

use crate::peer::FetchOutcome;
use crate::registry::Plan;
use crate::types::{Load, NodeEpoch, NodeId, Reach, Timestamp};

/// Blocks of one lend: few enough that several leases of one read overlap, so that the holder's
/// answer to one hides behind the bytes of another.
pub(super) const BLOCKS_PER_LEND: usize = 64;

/// Blocks to ask one owner for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lend {
    /// The owner.
    pub owner: NodeId,
    /// The start of it that the registry named.
    pub epoch: NodeEpoch,
    /// Where it is.
    pub address: String,
    /// The blocks, as positions in the read.
    pub positions: Vec<usize>,
}

/// How a lend ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lent {
    /// One for each position of the lend.
    pub outcomes: Vec<FetchOutcome>,
    /// What the owner said about its load.
    pub load: Load,
    /// What lies between; `None` where there is no connection to tell by.
    pub reach: Option<Reach>,
    /// Until when it is left alone, if it is.
    pub suspended: Option<Timestamp>,
}

/// The lends of a plan for these positions of a read.
pub(super) fn lends_of(plan: &Plan, positions: &[usize]) -> Vec<Lend> {
    let mut lends = Vec::new();
    for (owner, segment) in plan.runs() {
        let first = segment.first as usize;
        let run = positions.get(first..first + segment.count as usize).unwrap_or_default();
        lends.extend(run.chunks(BLOCKS_PER_LEND).map(|positions| Lend {
            owner: owner.node,
            epoch: owner.epoch,
            address: owner.address.clone(),
            positions: positions.to_vec(),
        }));
    }
    lends
}
