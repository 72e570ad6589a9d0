//! The registered nodes. Each has a slot; a slot's [`OwnerRef`] is that of the registration that is
//! live in it or else of the one that comes next, so that "dead" is one comparison: an owner below
//! the word of its slot has ended.
//!
//! A lease that ran out is ended here, under the table's lock, by whoever first looks at a later
//! time. No heartbeat can revive what another call already treated as dead.

use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::fault::{self, Fault};
use super::owners::OwnerRef;
use super::plan::Standing;
use super::{Heartbeat, Load, NodeIdentity, Presence, RegistryError, Stamp};
use crate::limits;
use crate::sync::Mutex;
use crate::types::{BlockKey, NodeEpoch, NodeId, Reach, Timestamp};

/// Up to which sequence a registration's changes are settled. Held while a batch is applied, so that
/// one which its sender gives up meanwhile is over before a later one of the same keys begins.
pub(super) type Lane = Arc<Mutex<u64>>;

#[derive(Debug)]
struct Slot {
    reference: OwnerRef,
    live: bool,
    identity: Arc<NodeIdentity>,
    load: Load,
    deadline: Timestamp,
    lane: Lane,
    /// Blocks of which it became the only owner; told with its next heartbeat.
    sole: Vec<BlockKey>,
}

impl Slot {
    /// A slot in which a registration can begin, and end.
    fn usable(&self) -> bool {
        self.reference.next().is_some()
    }

    fn end(&mut self) {
        if self.live {
            self.live = false;
            self.sole = Vec::new();
            if !fault::is(Fault::GenerationKept) {
                // A registration begins only in a usable slot, so there is a next one.
                self.reference = self.reference.next().unwrap_or(self.reference);
            }
        }
    }
}

/// Which registrations had ended when it was taken. One that began later counts as live.
#[derive(Debug)]
pub(super) struct Floor(Vec<OwnerRef>);

impl Floor {
    pub(super) fn is_live(&self, owner: OwnerRef) -> bool {
        self.0.get(owner.slot()).is_none_or(|floor| owner >= *floor)
    }
}

/// A registered node about to apply a batch.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) reference: OwnerRef,
    pub(super) lane: Lane,
    pub(super) floor: Floor,
}

/// A node that a plan may name.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) reference: OwnerRef,
    pub(super) identity: Arc<NodeIdentity>,
    pub(super) standing: Standing,
}

/// The table.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    slots: Vec<Slot>,
    by_id: HashMap<NodeId, usize, RandomState>,
    /// The shard that is swept next.
    pub(super) sweep_next: usize,
}

impl NodeTable {
    fn expire(&mut self, now: Timestamp) {
        for slot in &mut self.slots {
            if slot.live && slot.deadline <= now {
                slot.end();
            }
        }
    }

    /// Which owners are void at `now`.
    pub(super) fn floor(&mut self, now: Timestamp) -> Floor {
        self.expire(now);
        Floor(self.slots.iter().map(|slot| slot.reference).collect())
    }

    /// Nodes live at `now`.
    pub(super) fn live(&mut self, now: Timestamp) -> usize {
        self.expire(now);
        self.slots.iter().filter(|slot| slot.live).count()
    }

    /// Live nodes by slot, without those that `skip` names.
    pub(super) fn candidates(
        &mut self,
        now: Timestamp,
        skip: impl Fn(NodeId) -> bool,
        reach: impl Fn(NodeId) -> Reach,
    ) -> Vec<Option<Candidate>> {
        self.expire(now);
        let candidate = |slot: &Slot| Candidate {
            reference: slot.reference,
            identity: Arc::clone(&slot.identity),
            standing: Standing { load: slot.load, reach: reach(slot.identity.node) },
        };
        self.slots
            .iter()
            .map(|slot| (slot.live && !skip(slot.identity.node)).then(|| candidate(slot)))
            .collect()
    }

    fn live_slot(&self, node: NodeId) -> Option<&Slot> {
        let slot = self.by_id.get(&node).and_then(|at| self.slots.get(*at));
        slot.filter(|slot| slot.live)
    }

    /// The registration that a start of a node has now, and what is void.
    pub(super) fn owner(
        &mut self,
        node: NodeId,
        epoch: NodeEpoch,
        now: Timestamp,
    ) -> Option<(OwnerRef, Floor)> {
        let floor = self.floor(now);
        let slot = self.live_slot(node).filter(|slot| slot.identity.epoch == epoch)?;
        Some((slot.reference, floor))
    }

    /// Keeps for their nodes what they are the only owners of now.
    pub(super) fn hint(&mut self, sole: impl IntoIterator<Item = (OwnerRef, BlockKey)>) {
        for (owner, key) in sole {
            let slot = self.slots.get_mut(owner.slot());
            let slot = slot.filter(|slot| slot.live && slot.reference == owner);
            if let Some(slot) = slot.filter(|slot| slot.sole.len() < limits::REGISTRY_HINTS_MAX) {
                slot.sole.push(key);
            }
        }
    }

    /// The registration that a change of this node belongs to.
    pub(super) fn sender(
        &mut self,
        stamp: &Stamp,
        now: Timestamp,
        number: impl Fn(OwnerRef) -> u64,
    ) -> Result<Sender, RegistryError> {
        let floor = self.floor(now);
        let slot = self.live_slot(stamp.node).ok_or(RegistryError::UnknownNode)?;
        let any_epoch = fault::is(Fault::EpochUnchecked);
        if slot.identity.epoch > stamp.epoch && !any_epoch {
            return Err(RegistryError::Superseded);
        }
        let same = number(slot.reference) == stamp.registration
            || fault::is(Fault::RegistrationUnchecked)
            || (any_epoch && slot.identity.epoch > stamp.epoch);
        if slot.identity.epoch < stamp.epoch || !same {
            return Err(RegistryError::UnknownNode);
        }
        Ok(Sender { reference: slot.reference, lane: Arc::clone(&slot.lane), floor })
    }

    /// Registers, renews or ends; returns the registration, `None` after a leave, and the blocks that
    /// wait for the node to hear that it is their only owner.
    pub(super) fn heartbeat(
        &mut self,
        identity: &NodeIdentity,
        heartbeat: Heartbeat<'_>,
        now: Timestamp,
        lease: Duration,
    ) -> Result<(Option<OwnerRef>, Vec<BlockKey>), RegistryError> {
        self.expire(now);
        let known = self.by_id.get(&identity.node).copied();
        if let Some(slot) = known.and_then(|at| self.slots.get_mut(at)) {
            // Only a live registration refuses an earlier epoch: after a host's clock was set back,
            // its next start would be shut out for good otherwise.
            if slot.live && slot.identity.epoch > identity.epoch {
                return Err(RegistryError::Superseded);
            }
            if slot.identity.epoch != identity.epoch || heartbeat.presence != Presence::Here {
                slot.end();
            }
        }
        if heartbeat.presence == Presence::Leaving {
            return Ok((None, Vec::new()));
        }
        let at = self.slot_for(identity, known)?;
        let slot = self.slots.get_mut(at).ok_or_else(full)?;
        let is_new = !slot.live;
        if is_new {
            slot.live = true;
            slot.lane = Lane::default();
        }
        if *slot.identity != *identity {
            slot.identity = Arc::new(identity.clone());
        }
        slot.load = heartbeat.load;
        if is_new || !fault::is(Fault::LeaseByBlock) {
            slot.deadline = now + lease;
        }
        Ok((Some(slot.reference), std::mem::take(&mut slot.sole)))
    }

    /// The node's slot, a new one, or one whose registration ended longest ago.
    fn slot_for(
        &mut self,
        identity: &NodeIdentity,
        known: Option<usize>,
    ) -> Result<usize, RegistryError> {
        let usable =
            |at: &usize| self.slots.get(*at).is_some_and(|slot| slot.live || slot.usable());
        if let Some(at) = known.filter(usable) {
            return Ok(at);
        }
        let at = if self.slots.len() < limits::REGISTRY_NODES_MAX {
            let at = u32::try_from(self.slots.len()).ok().ok_or_else(full)?;
            let reference = OwnerRef::start(at).next().ok_or_else(full)?;
            self.slots.push(Slot {
                reference,
                live: false,
                identity: Arc::new(identity.clone()),
                load: Load::default(),
                deadline: Timestamp::ZERO,
                lane: Lane::default(),
                sole: Vec::new(),
            });
            reference.slot()
        } else {
            let free = self.slots.iter().enumerate();
            let (at, slot) = free
                .filter(|(_, slot)| !slot.live && slot.usable())
                .min_by_key(|(_, slot)| slot.deadline)
                .ok_or_else(full)?;
            self.by_id.remove(&slot.identity.node);
            at
        };
        self.by_id.insert(identity.node, at);
        Ok(at)
    }
}

fn full() -> RegistryError {
    RegistryError::Full {
        reason: format!("it knows {} live nodes, which is its limit", limits::REGISTRY_NODES_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn knows(table: &mut NodeTable, node: u32, registration: u32, now: Timestamp) -> bool {
        let stamp = Stamp {
            node: identity(node, 1).node,
            epoch: NodeEpoch(1),
            registration: registration.into(),
            sequence: 1,
            settled: 0,
        };
        table.sender(&stamp, now, |owner| owner.get().into()).is_ok()
    }

    const LEASE: Duration = Duration::from_secs(10);

    fn identity(node: u32, epoch: u64) -> NodeIdentity {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&node.to_le_bytes());
        NodeIdentity { node: NodeId(id), epoch: NodeEpoch(epoch), address: format!("node{node}:1") }
    }

    fn here(table: &mut NodeTable, node: u32, at: u64) -> Result<u32, RegistryError> {
        let now = Timestamp::ZERO + Duration::from_secs(at);
        let (registered, _) =
            table.heartbeat(&identity(node, 1), Heartbeat::default(), now, LEASE)?;
        Ok(registered.unwrap().get())
    }

    #[test]
    fn a_full_table_takes_the_slot_of_a_dead_node_and_voids_what_it_owned() {
        let mut table = NodeTable::default();
        let max = u32::try_from(limits::REGISTRY_NODES_MAX).unwrap();
        for node in 0..max {
            here(&mut table, node, u64::from(node != 7)).unwrap();
        }
        assert!(matches!(here(&mut table, max, 5), Err(RegistryError::Full { .. })));
        let old = table.slots[7].reference;
        // At 10 s the lease of node 7 alone has run out.
        let new = here(&mut table, max, 10).unwrap();
        let now = Timestamp::ZERO + Duration::from_secs(10);
        assert!(!table.floor(now).is_live(old));
        assert!(!knows(&mut table, 7, old.get(), now));
        assert!(knows(&mut table, max, new, now));
        assert!(!knows(&mut table, max, old.get(), now));
        assert_eq!(table.by_id.len(), limits::REGISTRY_NODES_MAX);
    }

    #[test]
    fn a_registration_that_began_after_the_floor_was_taken_is_live() {
        let mut table = NodeTable::default();
        let before = table.floor(Timestamp::ZERO);
        here(&mut table, 1, 0).unwrap();
        assert!(before.is_live(table.slots[0].reference));
    }
}
