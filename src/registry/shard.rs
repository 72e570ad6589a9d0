//! One partition of the directory: the keys in it with their owners, and each node's digest.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry as TableEntry;

use super::fault::{self, Fault};
use super::fingerprint::Fingerprint;
use super::owners::{OwnerRef, Owners};
use crate::limits;

#[derive(Debug)]
struct Entry {
    print: Fingerprint,
    owners: Owners,
}

/// What is left of a key's owners after one was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Left {
    /// Live owners.
    pub(super) owners: usize,
    /// The only one.
    pub(super) sole: Option<OwnerRef>,
    /// Whether the one to be removed was there.
    pub(super) removed: bool,
}

/// The keys of one partition. All of its methods take the hash state of the directory, which differs
/// from process to process, so that nobody can choose keys that fall onto one place of the table.
#[derive(Debug, Default)]
pub(super) struct Shard {
    table: HashTable<Entry>,
    owners: u64,
    spilled: u64,
    by_owners: [u64; limits::OWNERS_SHOWN],
    /// By slot: the registration that is meant, and the digest of what it announced here.
    digests: Vec<(OwnerRef, u64)>,
}

/// Places of a shard's table that one step of a sweep looks at: some tens of microseconds.
const PLACES_PER_STEP: usize = 2048;

/// What a step of a sweep did.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retained {
    /// Owners that went.
    pub(super) owners: u64,
    /// Whether there are places that this round has not looked at.
    pub(super) is_more: bool,
}

/// Memory that a shard needs no more. To be dropped without a lock.
#[derive(Debug, Default)]
#[must_use = "it is to be dropped once no lock is held"]
pub(super) struct Outgrown {
    _table: HashTable<Entry>,
}

/// What a shard holds, in numbers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ShardStats {
    pub(super) keys: u64,
    pub(super) owners: u64,
    pub(super) bytes: u64,
    pub(super) by_owners: [u64; limits::OWNERS_SHOWN],
}

pub(super) fn wide(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Where a key with so many owners is counted; `None` without owners.
fn shown(owners: u64) -> Option<usize> {
    usize::try_from(owners).unwrap_or(usize::MAX).min(limits::OWNERS_SHOWN).checked_sub(1)
}

fn size(owners: &Owners) -> (u64, u64) {
    (wide(owners.as_slice().len()), wide(owners.spilled_bytes()))
}

impl Shard {
    /// Notes how an entry's owners changed.
    fn account(&mut self, before: (u64, u64), after: (u64, u64)) {
        self.owners = self.owners.wrapping_add(after.0).wrapping_sub(before.0);
        self.spilled = self.spilled.wrapping_add(after.1).wrapping_sub(before.1);
        if before.0 == after.0 {
            return;
        }
        for (owners, change) in [(before.0, u64::MAX), (after.0, 1)] {
            if let Some(keys) = shown(owners).and_then(|at| self.by_owners.get_mut(at)) {
                *keys = keys.wrapping_add(change);
            }
        }
    }

    fn digest_mut(&mut self, owner: OwnerRef) -> Option<&mut u64> {
        let slot = owner.slot();
        if self.digests.len() <= slot {
            self.digests.resize(slot + 1, Default::default());
        }
        let (of, digest) = self.digests.get_mut(slot)?;
        if *of != owner {
            (*of, *digest) = (owner, 0);
        }
        Some(digest)
    }

    /// The digest of what a registration announced here.
    pub(super) fn digest(&self, owner: OwnerRef) -> u64 {
        let found = self.digests.get(owner.slot()).filter(|(of, _)| *of == owner);
        found.map_or(0, |(_, digest)| *digest)
    }

    /// Adds an owner and removes those that are dead; answers how many there are, 0 where the key is
    /// new and there is room for `keys_max` only.
    pub(super) fn add(
        &mut self,
        print: Fingerprint,
        owner: OwnerRef,
        is_live: impl Fn(OwnerRef) -> bool,
        (hasher, keys_max): (&RandomState, u64),
    ) -> u64 {
        let room = wide(self.table.len()) < keys_max;
        let same = |entry: &Entry| entry.print == print;
        let rehash = |entry: &Entry| hasher.hash_one(entry.print);
        let mut entry = match self.table.entry(hasher.hash_one(print), same, rehash) {
            TableEntry::Occupied(entry) => entry,
            TableEntry::Vacant(_) if !room => return 0,
            TableEntry::Vacant(entry) => entry.insert(Entry { print, owners: Owners::default() }),
        };
        let owners = &mut entry.get_mut().owners;
        let before = size(owners);
        let is_new = owners.insert(owner, is_live);
        let after = size(owners);
        self.account(before, after);
        if is_new && let Some(digest) = self.digest_mut(owner) {
            *digest ^= print.digest();
        }
        after.0
    }

    /// Removes an owner, and those that are dead.
    pub(super) fn remove(
        &mut self,
        print: Fingerprint,
        owner: OwnerRef,
        is_live: impl Fn(OwnerRef) -> bool,
        hasher: &RandomState,
    ) -> Left {
        let same = |entry: &Entry| entry.print == print;
        let Ok(mut entry) = self.table.find_entry(hasher.hash_one(print), same) else {
            return Left::default();
        };
        let owners = &mut entry.get_mut().owners;
        let before = size(owners);
        let removed = owners.as_slice().contains(&owner);
        let goes = |other| other == owner || fault::is(Fault::RemovesOthers);
        owners.retain(|other| !goes(other) && is_live(other));
        let after = size(owners);
        let slice = owners.as_slice();
        let sole = slice.first().copied().filter(|_| slice.len() == 1);
        let left = Left { owners: slice.len(), sole, removed };
        if left.owners == 0 {
            drop(entry.remove());
        }
        self.account(before, after);
        if removed && let Some(digest) = self.digest_mut(owner) {
            *digest ^= print.digest();
        }
        left
    }

    /// A key's owners, the dead ones among them.
    pub(super) fn owners(&self, print: Fingerprint, hasher: &RandomState) -> &[OwnerRef] {
        let same = |entry: &Entry| entry.print == print;
        let found = self.table.find(hasher.hash_one(print), same);
        found.map_or(&[][..], |entry| entry.owners.as_slice())
    }

    /// Removes an owner from every key.
    pub(super) fn forget(&mut self, owner: OwnerRef, hasher: &RandomState) -> Outgrown {
        let mut at = 0;
        while self.retain(&mut at, |other| other != owner).is_more {}
        if let Some(digest) = self.digest_mut(owner) {
            *digest = 0;
        }
        self.shrink(hasher)
    }

    /// Removes the owners that `keep` denies from the keys in the next few places of the table, from
    /// `at` on, which it moves. A table that grows between two steps may hide keys from a round of them:
    /// the next round finds those.
    pub(super) fn retain(&mut self, at: &mut usize, keep: impl Fn(OwnerRef) -> bool) -> Retained {
        let (before, end) = (self.owners, *at + PLACES_PER_STEP);
        for place in *at..end.min(self.table.num_buckets()) {
            let Ok(mut entry) = self.table.get_bucket_entry(place) else { continue };
            let owners = &mut entry.get_mut().owners;
            let size_before = size(owners);
            owners.retain(&keep);
            let size_after = size(owners);
            if size_after.0 == 0 {
                drop(entry.remove());
            }
            self.account(size_before, size_after);
        }
        *at = end;
        Retained { owners: before - self.owners, is_more: end < self.table.num_buckets() }
    }

    /// Moves what is left into a table that fits it, where that is much less. The old one is the
    /// caller's to drop once it holds no lock: how long the allocator takes is nothing to wait for.
    pub(super) fn shrink(&mut self, hasher: &RandomState) -> Outgrown {
        if self.table.len() >= self.table.capacity() / 4 {
            return Outgrown::default();
        }
        let mut old = std::mem::take(&mut self.table);
        self.table.reserve(old.len(), |entry| hasher.hash_one(entry.print));
        for entry in old.drain() {
            let hash = hasher.hash_one(entry.print);
            self.table.insert_unique(hash, entry, |entry| hasher.hash_one(entry.print));
        }
        Outgrown { _table: old }
    }

    pub(super) fn stats(&self) -> ShardStats {
        let digests = self.digests.capacity() * size_of::<(OwnerRef, u64)>();
        ShardStats {
            keys: wide(self.table.len()),
            owners: self.owners,
            bytes: wide(self.table.allocation_size()) + self.spilled + wide(digests),
            by_owners: self.by_owners,
        }
    }
}

const _: () = assert!(size_of::<Entry>() <= 40, "about 80 bytes an entry with the table's slack");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{BlockHash, BlockKey, NamespaceId};

    fn print(number: u32) -> Fingerprint {
        let hash = BlockHash::new(&number.to_le_bytes()).unwrap();
        Fingerprint::of(&BlockKey { namespace: NamespaceId(1), hash })
    }

    #[test]
    fn a_sweep_looks_at_a_bounded_number_of_places_at_a_time_and_leaves_what_lives() {
        let (mut shard, hasher) = (Shard::default(), RandomState::default());
        let [dead, live] = [0, 1].map(|slot| OwnerRef::start(slot).next().unwrap());
        let keys = u32::try_from(PLACES_PER_STEP).unwrap() * 4;
        for number in 0..keys {
            shard.add(print(number), dead, |_| true, (&hasher, u64::MAX));
            if number % 16 == 0 {
                shard.add(print(number), live, |_| true, (&hasher, u64::MAX));
            }
        }
        let (mut place, mut steps, mut gone) = (0, 0, 0);
        loop {
            let step = shard.retain(&mut place, |owner| owner == live);
            steps += 1;
            gone += step.owners;
            if !step.is_more {
                break;
            }
        }
        assert!(steps >= 4, "{steps}");
        assert_eq!(gone, u64::from(keys));
        drop(shard.shrink(&hasher));
        assert!(shard.table.capacity() < PLACES_PER_STEP);
        let stats = shard.stats();
        assert_eq!((stats.keys, stats.owners), (u64::from(keys / 16), u64::from(keys / 16)));
        assert_eq!(stats.by_owners[0], u64::from(keys / 16));
        for number in 0..keys {
            let owners = shard.owners(print(number), &hasher);
            let left = if number % 16 == 0 { vec![live] } else { Vec::new() };
            assert_eq!(owners, left);
        }
    }
}
