//! The in-process data structure: which live node owns which key, under many locks, each held for the
//! time of one key.
//!
//! Lock order: a node's lane, then a shard; the node table is never held together with either.

use std::time::Duration;

use foldhash::fast::RandomState;

use super::fault::{self, Fault};
use super::nodes::{Candidate, Floor, NodeTable, Sender};
use super::owners::OwnerRef;
use super::plan::{self, OwnerLists};
use super::shard::{Left, Shard, wide};
use super::{
    Announced, Batch, Beat, Fingerprint, Heartbeat, Missing, NodeIdentity, Partition, Plan,
    PlanQuery, Registration, RegistryEpoch, RegistryError, Stamp, Withdrawn, check_address,
    check_len,
};
use crate::limits;
use crate::sync::{Mutex, lock};
use crate::types::{BlockKey, Timestamp};

/// Shards, one for each partition: enough that neither concurrent batches nor the sweep of one shard
/// hold up the rest.
const SHARDS: usize = limits::REGISTRY_PARTITIONS as usize;

/// How a directory behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryOptions {
    /// How long a node stays registered without a heartbeat. Default 10 s. Too short, and a node that
    /// stalls announces everything again; too long, and readers ask a dead node for longer.
    pub lease: Duration,
    /// Most keys. Default 32 Mi, about 3 GiB. Further keys are not taken, and their announcer is told
    /// by an owner count of 0.
    pub keys_max: u64,
}

impl Default for DirectoryOptions {
    fn default() -> Self {
        Self { lease: Duration::from_secs(10), keys_max: 32 << 20 }
    }
}

/// What a directory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirectoryStats {
    /// Live nodes.
    pub nodes: u64,
    /// Keys, those of dead owners that were not swept yet among them.
    pub keys: u64,
    /// Owners over all keys, likewise.
    pub owners: u64,
    /// Memory of the keys and owners, bytes.
    pub bytes: u64,
    /// Keys by the number of their owners: 1 first, the last for that many and more.
    pub by_owners: [u64; limits::OWNERS_SHOWN],
}

/// The owners of blocks in memory.
#[derive(Debug)]
pub struct Directory {
    epoch: RegistryEpoch,
    options: DirectoryOptions,
    nodes: Mutex<NodeTable>,
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
}

impl Directory {
    /// An empty one. `epoch` must differ from that of every earlier start.
    #[must_use]
    pub fn new(epoch: RegistryEpoch, options: DirectoryOptions) -> Self {
        Self {
            epoch,
            options,
            nodes: Mutex::default(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::default(),
        }
    }

    /// This start.
    #[must_use]
    pub const fn epoch(&self) -> RegistryEpoch {
        self.epoch
    }

    /// Registers a node, renews its lease or ends it.
    ///
    /// # Errors
    /// [`RegistryError::Superseded`], [`RegistryError::Full`] (too many nodes), or
    /// [`RegistryError::Refused`] (the address, too many digests).
    pub fn heartbeat(
        &self,
        node: &NodeIdentity,
        heartbeat: Heartbeat<'_>,
        now: Timestamp,
    ) -> Result<Beat, RegistryError> {
        check_address(&node.address)?;
        check_len("a heartbeat's digests", heartbeat.digests.len(), SHARDS)?;
        let lease = self.options.lease;
        let (owner, sole) = lock(&self.nodes).heartbeat(node, heartbeat, now, lease)?;
        let number = owner.map_or(0, |owner| self.number(owner));
        let drifted = owner.map_or_else(Vec::new, |owner| {
            let differs = |told: &&super::PartitionDigest| {
                let kept = self.shard(told.partition).map(|shard| lock(shard).digest(owner));
                kept != Some(told.digest)
            };
            heartbeat.digests.iter().filter(differs).map(|told| told.partition).collect()
        });
        let registration = Registration { registry: self.epoch, number, lease };
        Ok(Beat { registration, drifted, sole })
    }

    /// Adds the node to the owners of each key.
    ///
    /// # Errors
    /// [`RegistryError::UnknownNode`], [`RegistryError::Superseded`], [`RegistryError::Late`], or
    /// [`RegistryError::Refused`] (too long); then nothing changed.
    pub fn announce(&self, batch: Batch<'_>, now: Timestamp) -> Result<Announced, RegistryError> {
        check_len("a batch", batch.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        let keys = batch.keys.iter();
        let owners = self
            .apply(&batch.stamp, now, |sender| keys.map(|key| self.add(key, sender)).collect())?;
        Ok(Announced { registry: self.epoch, owners })
    }

    /// Removes the node from the owners of each key.
    ///
    /// # Errors
    /// As [`Self::announce`].
    pub fn withdraw(&self, batch: Batch<'_>, now: Timestamp) -> Result<Withdrawn, RegistryError> {
        check_len("a batch", batch.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        let mut hints = Vec::new();
        let sole = self.apply(&batch.stamp, now, |sender| {
            let owner = sender.reference;
            let removed = |key| self.remove(key, owner, &sender.floor, &mut hints).owners == 1;
            let mut removed = removed;
            let positions = (0..).zip(batch.keys).filter(|(_, key)| removed(key));
            positions.map(|(position, _)| position).collect()
        })?;
        self.hint(hints);
        Ok(Withdrawn { registry: self.epoch, sole })
    }

    /// Removes the node from all keys of one partition. Holds that partition's lock for about 20 ns
    /// per key in it.
    ///
    /// # Errors
    /// As [`Self::announce`].
    pub fn forget(
        &self,
        stamp: Stamp,
        partition: Partition,
        now: Timestamp,
    ) -> Result<(), RegistryError> {
        self.apply(&stamp, now, |sender| {
            if let Some(shard) = self.shard(partition)
                && !fault::is(Fault::ForgetNothing)
            {
                let outgrown = lock(shard).forget(sender.reference, &self.hasher);
                drop(outgrown);
            }
        })
    }

    /// Removes an owner that was found without these keys; answers how many it was listed for.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] where the list is too long.
    pub fn report_missing(
        &self,
        missing: Missing<'_>,
        now: Timestamp,
    ) -> Result<u32, RegistryError> {
        check_len("a report", missing.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        let owner = lock(&self.nodes).owner(missing.owner, missing.epoch, now);
        let Some((owner, floor)) = owner else {
            return Ok(0);
        };
        let mut hints = Vec::new();
        let removed = missing.keys.iter().map(|key| self.remove(key, owner, &floor, &mut hints));
        let removed = removed.filter(|left| left.removed).count();
        self.hint(hints);
        Ok(u32::try_from(removed).unwrap_or(u32::MAX))
    }

    /// The number of a registration: with half of this start's epoch in it, so that a batch which was
    /// meant for an earlier start is of no registration here.
    fn number(&self, owner: OwnerRef) -> u64 {
        (self.epoch.0 << 32) | u64::from(owner.get())
    }

    fn hint(&self, hints: Vec<(OwnerRef, BlockKey)>) {
        if !hints.is_empty() {
            lock(&self.nodes).hint(hints);
        }
    }

    fn apply<T>(
        &self,
        stamp: &Stamp,
        now: Timestamp,
        change: impl FnOnce(&Sender) -> T,
    ) -> Result<T, RegistryError> {
        let number = |owner| self.number(owner);
        let sender = lock(&self.nodes).sender(stamp, now, number)?;
        let mut settled = lock(&sender.lane);
        if stamp.sequence <= (*settled).max(stamp.settled) && !fault::is(Fault::LateTaken) {
            return Err(RegistryError::Late);
        }
        *settled = (*settled).max(stamp.settled);
        Ok(change(&sender))
    }

    /// Splits the keys into runs by owner.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] where a list is too long.
    pub fn plan(&self, query: PlanQuery<'_>, now: Timestamp) -> Result<Plan, RegistryError> {
        query.check()?;
        let skip = |node| node == query.asker || query.avoid.contains(&node);
        let reach = |node| query.reach(node);
        let candidates = lock(&self.nodes).candidates(now, skip, reach);
        let mut lists = OwnerLists::with_capacity(query.keys.len());
        let mut scratch = Vec::new();
        for key in query.keys {
            self.owners_of(key, &candidates, query.choice, &mut scratch);
            lists.push(&scratch);
        }
        let known = |slot: usize| {
            let candidate = candidates.get(slot)?.as_ref()?;
            Some((candidate.identity.as_ref(), candidate.standing))
        };
        Ok(plan::assemble(self.epoch, &lists, known, query.choice))
    }

    /// Removes dead owners from one shard, the next in turn; returns how many. Called at a steady
    /// pace, so that the keys of dead nodes that nobody asks for go too. Takes that shard's lock again
    /// and again, each time for some tens of microseconds, or, where it has lost most of its keys, for
    /// about 30 ns per key that is left.
    pub fn sweep(&self, now: Timestamp) -> u64 {
        let mut nodes = lock(&self.nodes);
        let at = nodes.sweep_next % SHARDS;
        nodes.sweep_next = at + 1;
        let floor = nodes.floor(now);
        drop(nodes);
        let Some(shard) = self.shards.get(at) else { return 0 };
        let (mut place, mut gone) = (0, 0);
        loop {
            let step = lock(shard).retain(&mut place, |owner| floor.is_live(owner));
            gone += step.owners;
            if !step.is_more {
                break;
            }
        }
        if gone > 0 {
            // Bound first: the lock is not held any more when it is dropped.
            let outgrown = lock(shard).shrink(&self.hasher);
            drop(outgrown);
        }
        gone
    }

    /// What it holds. Takes each lock once.
    #[must_use]
    pub fn stats(&self, now: Timestamp) -> DirectoryStats {
        let mut stats = DirectoryStats {
            nodes: wide(lock(&self.nodes).live(now)),
            ..DirectoryStats::default()
        };
        for shard in &self.shards {
            let shard = lock(shard).stats();
            stats.keys += shard.keys;
            stats.owners += shard.owners;
            stats.bytes += shard.bytes;
            stats.by_owners.iter_mut().zip(shard.by_owners).for_each(|(sum, keys)| *sum += keys);
        }
        stats
    }

    fn shard(&self, partition: Partition) -> Option<&Mutex<Shard>> {
        self.shards.get(partition.index())
    }

    /// Adds the sender; returns the key's live owners, 0 where there is no room for the key.
    fn add(&self, key: &BlockKey, sender: &Sender) -> u32 {
        let print = Fingerprint::of(key);
        let Some(shard) = self.shard(print.partition()) else {
            return 0;
        };
        let keys_max = self.options.keys_max.div_ceil(wide(SHARDS));
        let is_live = |owner| sender.floor.is_live(owner);
        let owners = lock(shard).add(print, sender.reference, is_live, (&self.hasher, keys_max));
        u32::try_from(owners).unwrap_or(u32::MAX)
    }

    /// Removes an owner and dead ones; notes whose only key it is now.
    fn remove(
        &self,
        key: &BlockKey,
        owner: OwnerRef,
        floor: &Floor,
        hints: &mut Vec<(OwnerRef, BlockKey)>,
    ) -> Left {
        let print = Fingerprint::of(key);
        let Some(shard) = self.shard(print.partition()) else {
            return Left::default();
        };
        let left = lock(shard).remove(print, owner, |other| floor.is_live(other), &self.hasher);
        if left.removed
            && let Some(sole) = left.sole
        {
            hints.push((sole, *key));
        }
        left
    }

    /// Puts the slots of the candidates that own the key into `slots`: all, or a sample that is the
    /// same for keys of the same owners, so that runs stay whole.
    fn owners_of(
        &self,
        key: &BlockKey,
        candidates: &[Option<Candidate>],
        choice: u64,
        slots: &mut Vec<usize>,
    ) {
        slots.clear();
        let print = Fingerprint::of(key);
        let Some(shard) = self.shard(print.partition()) else {
            return;
        };
        let candidate = |owner: &OwnerRef| {
            let found = candidates.get(owner.slot())?.as_ref()?;
            (found.reference == *owner).then_some(owner.slot())
        };
        let shard = lock(shard);
        slots.extend(shard.owners(print, &self.hasher).iter().filter_map(candidate));
        drop(shard);
        let near = |slot: usize| {
            let candidate = candidates.get(slot).and_then(Option::as_ref);
            candidate.map(|candidate| candidate.standing.reach)
        };
        plan::sample(slots, near, choice);
    }
}

/// Keeps [`Floor`] small enough to take with every batch.
const _: () = assert!(size_of::<Floor>() <= 32);
