//! The in-process data structure: which live node owns which key, under many locks, each held for the
//! time of one key.
//!
//! Lock order: a node's lane, then a shard; the node table is never held together with either.

use std::hash::BuildHasher;
use std::time::Duration;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry as TableEntry;

use super::nodes::{Candidate, Floor, NodeTable, Sender};
use super::owners::{OwnerRef, Owners};
use super::plan::{self, OwnerLists};
use super::{
    Announced, Batch, Heartbeat, NodeIdentity, Plan, PlanQuery, Registration, RegistryEpoch,
    RegistryError, Segment, Withdrawn, check_address, check_len,
};
use crate::limits;
use crate::sync::{Mutex, lock};
use crate::types::{BlockKey, Timestamp};

/// Shards: enough that neither concurrent batches nor the sweep of one shard hold up the rest.
const SHARDS: usize = 1024;

/// How a directory behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirectoryOptions {
    /// How long a node stays registered without a heartbeat. Default 10 s. Too short, and a node that
    /// stalls announces everything again; too long, and readers ask a dead node for longer.
    pub lease: Duration,
    /// Most keys. Default 32 Mi, about 4 GiB. Further keys are not taken, and their announcer is told
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

#[derive(Debug)]
struct Entry {
    key: BlockKey,
    owners: Owners,
}

#[derive(Debug, Default)]
struct Shard {
    table: HashTable<Entry>,
    owners: u64,
    spilled: u64,
    by_owners: [u64; limits::OWNERS_SHOWN],
}

fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Where a key with so many owners is counted; `None` without owners.
fn shown(owners: u64) -> Option<usize> {
    usize::try_from(owners).unwrap_or(usize::MAX).min(limits::OWNERS_SHOWN).checked_sub(1)
}

impl Shard {
    /// Notes how an entry's owners changed.
    fn account(&mut self, before: (u64, u64), after: (u64, u64)) {
        self.owners = self.owners.wrapping_add(after.0).wrapping_sub(before.0);
        self.spilled = self.spilled.wrapping_add(after.1).wrapping_sub(before.1);
        for (owners, change) in [(before.0, u64::MAX), (after.0, 1)] {
            if let Some(keys) = shown(owners).and_then(|at| self.by_owners.get_mut(at)) {
                *keys = keys.wrapping_add(change);
            }
        }
    }
}

fn size(owners: &Owners) -> (u64, u64) {
    (wide(owners.as_slice().len()), wide(owners.spilled_bytes()))
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
    /// [`RegistryError::Refused`] (the address).
    pub fn heartbeat(
        &self,
        node: &NodeIdentity,
        heartbeat: Heartbeat,
        now: Timestamp,
    ) -> Result<Registration, RegistryError> {
        check_address(&node.address)?;
        let lease = self.options.lease;
        let number = lock(&self.nodes).heartbeat(node, heartbeat, now, lease)?;
        Ok(Registration { registry: self.epoch, number, lease })
    }

    /// Adds the node to the owners of each key.
    ///
    /// # Errors
    /// [`RegistryError::UnknownNode`], [`RegistryError::Superseded`], [`RegistryError::Late`], or
    /// [`RegistryError::Refused`] (too long); then nothing changed.
    pub fn announce(&self, batch: Batch<'_>, now: Timestamp) -> Result<Announced, RegistryError> {
        let keys = batch.keys.iter();
        let owners =
            self.apply(batch, now, |sender| keys.map(|key| self.add(key, sender)).collect())?;
        Ok(Announced { registry: self.epoch, owners })
    }

    /// Removes the node from the owners of each key.
    ///
    /// # Errors
    /// As [`Self::announce`].
    pub fn withdraw(&self, batch: Batch<'_>, now: Timestamp) -> Result<Withdrawn, RegistryError> {
        let sole = self.apply(batch, now, |sender| {
            (0..)
                .zip(batch.keys)
                .filter(|(_, key)| self.remove(key, sender) == 1)
                .map(|(position, _)| position)
                .collect()
        })?;
        Ok(Withdrawn { registry: self.epoch, sole })
    }

    fn apply<T>(
        &self,
        batch: Batch<'_>,
        now: Timestamp,
        change: impl FnOnce(&Sender) -> T,
    ) -> Result<T, RegistryError> {
        check_len("a batch", batch.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        let sender = lock(&self.nodes).sender(&batch, now)?;
        let mut last = lock(&sender.lane);
        if batch.sequence <= *last {
            return Err(RegistryError::Late);
        }
        *last = batch.sequence;
        Ok(change(&sender))
    }

    /// Splits the keys into runs by owner.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] where a list is too long.
    pub fn plan(&self, query: PlanQuery<'_>, now: Timestamp) -> Result<Plan, RegistryError> {
        check_len("a plan", query.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        check_len("avoid", query.avoid.len(), limits::REGISTRY_AVOID_MAX)?;
        let skip = |node| node == query.asker || query.avoid.contains(&node);
        let candidates = lock(&self.nodes).candidates(now, skip);
        let mut lists = OwnerLists::with_capacity(query.keys.len());
        let mut scratch = Vec::new();
        for key in query.keys {
            self.owners_of(key, &candidates, query.choice, &mut scratch);
            lists.push(&scratch);
        }
        let candidate = |slot: usize| candidates.get(slot)?.as_ref();
        let load = |slot| candidate(slot).map(|c| c.load).unwrap_or_default();
        let mut plan =
            Plan { registry: self.epoch, owners: Vec::new(), segments: Vec::new(), missing: 0 };
        let mut slots: Vec<usize> = Vec::new();
        let mut covered = 0;
        for (slot, segment) in plan::split(&lists, load, query.choice) {
            let Some(candidate) = candidate(slot) else {
                continue;
            };
            let owner = slots.iter().position(|s| *s == slot).unwrap_or_else(|| {
                slots.push(slot);
                plan.owners.push(candidate.identity.as_ref().clone());
                slots.len() - 1
            });
            let owner = u32::try_from(owner).unwrap_or(u32::MAX);
            covered += segment.count;
            plan.segments.push(Segment { owner, ..segment });
        }
        plan.missing = u32::try_from(query.keys.len()).unwrap_or(u32::MAX) - covered;
        Ok(plan)
    }

    /// Removes dead owners from one shard, the next in turn; returns how many. Called at a steady
    /// pace, so that the keys of dead nodes that nobody asks for go too. Holds one shard's lock for
    /// about 20 ns per key in it.
    pub fn sweep(&self, now: Timestamp) -> u64 {
        let mut nodes = lock(&self.nodes);
        let at = nodes.sweep_next % SHARDS;
        nodes.sweep_next = at + 1;
        let floor = nodes.floor(now);
        drop(nodes);
        let Some(mut shard) = self.shards.get(at).map(lock) else {
            return 0;
        };
        let before = shard.owners;
        let (mut owners, mut spilled) = (0, 0);
        let mut by_owners = [0; limits::OWNERS_SHOWN];
        shard.table.retain(|entry| {
            entry.owners.retain(|owner| floor.is_live(owner));
            let size = size(&entry.owners);
            owners += size.0;
            spilled += size.1;
            if let Some(keys) = shown(size.0).and_then(|at| by_owners.get_mut(at)) {
                *keys += 1;
            }
            size.0 > 0
        });
        if shard.table.len() < shard.table.capacity() / 4 {
            shard.table.shrink_to_fit(|entry| self.hasher.hash_one(entry.key));
        }
        shard.owners = owners;
        shard.spilled = spilled;
        shard.by_owners = by_owners;
        before - owners
    }

    /// What it holds. Takes each lock once.
    #[must_use]
    pub fn stats(&self, now: Timestamp) -> DirectoryStats {
        let mut stats = DirectoryStats {
            nodes: wide(lock(&self.nodes).live(now)),
            ..DirectoryStats::default()
        };
        for shard in &self.shards {
            let shard = lock(shard);
            stats.keys += wide(shard.table.len());
            stats.owners += shard.owners;
            stats.bytes += wide(shard.table.allocation_size()) + shard.spilled;
            stats.by_owners.iter_mut().zip(shard.by_owners).for_each(|(sum, keys)| *sum += keys);
        }
        stats
    }

    /// The key's hash and shard. The shard takes bits from the middle: the table inside uses both
    /// ends.
    fn shard(&self, key: &BlockKey) -> Option<(u64, &Mutex<Shard>)> {
        let hash = self.hasher.hash_one(key);
        let at = usize::try_from((hash >> 40) % wide(SHARDS)).ok()?;
        Some((hash, self.shards.get(at)?))
    }

    /// Adds the sender; returns the key's live owners, 0 where there is no room for the key.
    fn add(&self, key: &BlockKey, sender: &Sender) -> u32 {
        let Some((hash, shard)) = self.shard(key) else {
            return 0;
        };
        let mut shard = lock(shard);
        let room = wide(shard.table.len()) < self.options.keys_max.div_ceil(wide(SHARDS));
        let same = |entry: &Entry| entry.key == *key;
        let rehash = |entry: &Entry| self.hasher.hash_one(entry.key);
        let mut entry = match shard.table.entry(hash, same, rehash) {
            TableEntry::Occupied(entry) => entry,
            TableEntry::Vacant(_) if !room => return 0,
            TableEntry::Vacant(entry) => {
                entry.insert(Entry { key: *key, owners: Owners::default() })
            }
        };
        let owners = &mut entry.get_mut().owners;
        let before = size(owners);
        owners.insert(sender.reference, |owner| sender.floor.is_live(owner));
        let after = size(owners);
        shard.account(before, after);
        u32::try_from(after.0).unwrap_or(u32::MAX)
    }

    /// Removes the sender and dead owners; returns how many are left.
    fn remove(&self, key: &BlockKey, sender: &Sender) -> usize {
        self.keep(key, |owner| owner != sender.reference && sender.floor.is_live(owner))
    }

    fn keep(&self, key: &BlockKey, keep: impl Fn(OwnerRef) -> bool) -> usize {
        let Some((hash, shard)) = self.shard(key) else {
            return 0;
        };
        let mut shard = lock(shard);
        let Ok(mut entry) = shard.table.find_entry(hash, |entry| entry.key == *key) else {
            return 0;
        };
        let owners = &mut entry.get_mut().owners;
        let before = size(owners);
        owners.retain(keep);
        let after = size(owners);
        let left = owners.as_slice().len();
        if left == 0 {
            drop(entry.remove());
        }
        shard.account(before, after);
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
        let Some((hash, shard)) = self.shard(key) else {
            return;
        };
        let candidate = |owner: &OwnerRef| {
            let found = candidates.get(owner.slot())?.as_ref()?;
            (found.reference == *owner).then_some(owner.slot())
        };
        let shard = lock(shard);
        let entry = shard.table.find(hash, |entry| entry.key == *key);
        let owners = entry.map_or(&[][..], |entry| entry.owners.as_slice());
        slots.extend(owners.iter().filter_map(candidate));
        drop(shard);
        if slots.len() > limits::REGISTRY_PLAN_OWNERS_MAX {
            slots.sort_unstable_by_key(|slot| plan::mix(choice, wide(*slot)));
            slots.truncate(limits::REGISTRY_PLAN_OWNERS_MAX);
        }
    }
}

/// Keeps [`Floor`] small enough to take with every batch.
const _: () = assert!(size_of::<Floor>() <= 32);
