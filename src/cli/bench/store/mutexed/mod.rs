//! What the store is compared with: the same residents, ranks and answers, in order, under one mutex.

mod index;
mod lists;
mod requesters;
mod slab;
mod word;

use parking_lot::{Mutex, MutexGuard};

use crate::policy::Origin;
use crate::store::{
    Committed, Evicted, Found, InsertError, Payload, PinError, StoreConfig, UnpinError,
};
use crate::types::{BlockKey, MemoryKind, RequesterIndex, ResidentId};
use slab::Slab;

/// The mutexed store.
#[derive(Debug)]
pub(super) struct Mutexed(Mutex<Slab>);

impl Mutexed {
    pub(super) fn new(config: StoreConfig) -> Self {
        Self(Mutex::new(Slab::new(config)))
    }

    fn lock(&self) -> MutexGuard<'_, Slab> {
        self.0.lock()
    }

    pub(super) fn insert(
        &self,
        key: BlockKey,
        payload: Payload,
        origin: Origin,
        pinned: bool,
    ) -> Result<Found, InsertError> {
        self.lock().insert(key, payload, origin, pinned)
    }

    pub(super) fn pin_batch(&self, keys: &[BlockKey], out: &mut Vec<Result<Found, PinError>>) {
        out.clear();
        let mut slab = self.lock();
        out.extend(keys.iter().map(|key| slab.pin(key)));
    }

    pub(super) fn hit_batch(
        &self,
        keys: &[BlockKey],
        pin: bool,
        out: &mut Vec<Result<Found, PinError>>,
    ) {
        out.clear();
        let mut slab = self.lock();
        out.extend(keys.iter().rev().map(|key| Ok(slab.hit(key, pin)?.0)));
        out.reverse();
    }

    pub(super) fn unpin_batch(&self, ids: &[ResidentId]) -> usize {
        let mut slab = self.lock();
        ids.iter().rev().filter(|id| slab.unpin(**id).is_err()).count()
    }

    pub(super) fn commit_batch(
        &self,
        ids: &[ResidentId],
        requester: RequesterIndex,
        out: &mut Vec<Result<Committed, UnpinError>>,
    ) {
        out.clear();
        let mut slab = self.lock();
        out.extend(ids.iter().rev().map(|id| Ok(slab.commit(*id, requester)?.0)));
        out.reverse();
    }

    /// All its residents are in host memory.
    pub(super) fn evict_batch(
        &self,
        _kind: MemoryKind,
        max: usize,
        out: &mut Vec<Evicted>,
    ) -> usize {
        let before = out.len();
        while out.len() - before < max {
            // A lend waits for so many victims at most.
            let mut slab = self.lock();
            let step = 16.min(max - (out.len() - before));
            let had = out.len();
            out.extend(std::iter::from_fn(|| slab.evict()).take(step));
            if out.len() - had < step {
                break;
            }
        }
        out.len() - before
    }
}
