//! The nodes as the servers know them, kept for a moment: who is live decides which owners count.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::owner::Owner;
use crate::registry::{Load, NodeIdentity, RegistryEpoch};
use crate::types::{NodeEpoch, NodeId};

/// How long the nodes are taken to be as they were read. So long may a node that left, or that
/// registered afresh, be taken for an owner yet.
const FRESH: Duration = Duration::from_millis(200);

/// One node, live or not.
#[derive(Debug, Clone)]
pub(super) struct Known {
    pub(super) owner: Owner,
    pub(super) identity: NodeIdentity,
    pub(super) load: Load,
    /// When its lease ends, unless it was renewed since.
    lease_ends: Option<Instant>,
}

/// All nodes at one moment.
#[derive(Debug)]
pub(super) struct Nodes {
    pub(super) registry: RegistryEpoch,
    read: Instant,
    by_slot: HashMap<u64, Known>,
    slots: HashMap<NodeId, u64>,
}

fn hex(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// What a heartbeat writes of a node's load, 24 hexadecimal digits.
pub(super) fn load_text(load: Load) -> String {
    format!("{:016x}{:08x}", load.outstanding_bytes, load.pause_ms)
}

fn decode(node: &[u8], record: &[u8], left_ms: i64, now: Instant) -> Option<Known> {
    let node = NodeId(node.try_into().ok()?);
    let (owner, rest) = record.split_first_chunk::<8>()?;
    let (epoch, rest) = rest.split_at_checked(16)?;
    let (bytes, rest) = rest.split_at_checked(16)?;
    let (pause, address) = rest.split_at_checked(8)?;
    let left = u64::try_from(left_ms).ok().filter(|left| *left > 0);
    let address = String::from_utf8(address.to_vec()).ok()?;
    Some(Known {
        owner: Owner::new(u64::from_be_bytes(*owner)),
        identity: NodeIdentity { node, epoch: NodeEpoch(hex(epoch)?), address },
        load: Load { outstanding_bytes: hex(bytes)?, pause_ms: u32::try_from(hex(pause)?).ok()? },
        lease_ends: left.map(|left| now + Duration::from_millis(left)),
    })
}

impl Nodes {
    /// Nodes as `nodes.lua` lists them; what makes no sense is left out.
    pub(super) fn new(registry: u64, listed: Vec<(Vec<u8>, Vec<u8>, i64)>) -> Self {
        let read = Instant::now();
        let known = listed.iter().filter_map(|(node, record, left)| {
            let known = decode(node, record, *left, read)?;
            Some((known.owner.slot(), known))
        });
        let by_slot: HashMap<u64, Known> = known.collect();
        let slots = by_slot.iter().map(|(slot, known)| (known.identity.node, *slot)).collect();
        Self { registry: RegistryEpoch(registry), read, by_slot, slots }
    }

    /// Whether they may be taken as they are.
    pub(super) fn is_fresh(&self) -> bool {
        self.read.elapsed() < FRESH
    }

    /// A node with a lease.
    pub(super) fn live(&self, node: NodeId) -> Option<&Known> {
        self.slots.get(&node).and_then(|slot| self.in_slot(*slot))
    }

    fn in_slot(&self, slot: u64) -> Option<&Known> {
        let known = self.by_slot.get(&slot)?;
        (known.lease_ends? > Instant::now()).then_some(known)
    }

    /// The live node whose registration this is.
    pub(super) fn owner(&self, owner: Owner) -> Option<&Known> {
        self.in_slot(owner.slot()).filter(|known| known.owner == owner)
    }

    /// Whether this registration began after the nodes were read.
    pub(super) fn is_news(&self, owner: Owner) -> bool {
        let known = self.by_slot.get(&owner.slot());
        known.is_none_or(|known| known.owner.generation() < owner.generation())
    }

    /// Whether this registration is over for good: a later one of its slot began, or its lease ended.
    pub(super) fn is_over(&self, owner: Owner) -> bool {
        !self.is_news(owner) && self.owner(owner).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(number: u64, epoch: u64) -> Vec<u8> {
        let load = Load { outstanding_bytes: 7, pause_ms: 3 };
        let text = format!("{epoch:016x}{}host:1", load_text(load));
        [&number.to_be_bytes()[..], text.as_bytes()].concat()
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_a_lease_counts() {
        let (one, two) = (5 << 48 | 9, 6 << 48 | 9);
        let listed = vec![
            (vec![1; 16], record(one, 2), 10_000),
            (vec![2; 16], record(two, 2), -2),
            (vec![3; 16], b"nonsense".to_vec(), 1),
        ];
        let nodes = Nodes::new(4, listed);
        let known = nodes.live(NodeId([1; 16])).unwrap();
        assert_eq!((known.identity.epoch, known.load.pause_ms), (NodeEpoch(2), 3));
        assert_eq!(known.identity.address, "host:1");
        assert!(nodes.live(NodeId([2; 16])).is_none(), "its lease ended");
        assert!(nodes.owner(Owner::new(one)).is_some() && nodes.owner(Owner::new(two)).is_none());
        assert!(nodes.is_over(Owner::new(two)) && nodes.is_over(Owner::new(one - 1)));
        assert!(!nodes.is_over(Owner::new(one + 1)) && nodes.is_news(Owner::new(one + 1)));
        assert!(!nodes.is_over(Owner::new(7 << 48)), "a slot that was free");
    }
}
