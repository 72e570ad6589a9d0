//! The two that the bench always has: the store that `serve` runs, and the same ranks under a mutex.

use std::sync::Arc;

use super::contender::{Contender, Ranked};
use super::mutexed::Mutexed;
use crate::cli::CliError;
use crate::event::Discard;
use crate::policy::{Origin, Policy};
use crate::store::{
    Committed, Evicted, Found, InsertError, Payload, PinError, Store, StoreConfig, UnpinError,
};
use crate::sys::memory::prefer_huge_pages;
use crate::types::{BlockKey, MemoryKind, RequesterIndex, ResidentId};

/// Buffers of a thread.
#[derive(Debug, Default)]
pub struct Buffers {
    found: Vec<Result<Found, PinError>>,
    victims: Vec<Evicted>,
    ids: Vec<ResidentId>,
    committed: Vec<Result<Committed, UnpinError>>,
}

const SAVED: Origin = Origin::Saved { owners: None };

fn config(capacity: u32) -> StoreConfig {
    StoreConfig { capacity, policy: Policy::default() }
}

/// Both have the same operations under the same names.
macro_rules! contends {
    ($type:ty, $new:expr) => {
        impl Contender for $type {
            type Pin = ResidentId;
            type Hand = Buffers;

            fn new(capacity: u32) -> Result<Self, CliError> {
                $new(config(capacity))
            }

            fn read(&self, hand: &mut Buffers, key: &BlockKey) -> Option<ResidentId> {
                self.hit_batch(std::slice::from_ref(key), true, &mut hand.found);
                hand.found.first()?.as_ref().ok().map(|found| found.id)
            }

            fn insert(
                &self,
                hand: &mut Buffers,
                key: &BlockKey,
                payload: Payload,
            ) -> Option<ResidentId> {
                loop {
                    match self.insert(*key, payload, SAVED, true) {
                        Ok(found) => return Some(found.id),
                        Err(InsertError::Full) => {
                            hand.victims.clear();
                            self.evict_batch(MemoryKind::Host, 1, &mut hand.victims);
                        }
                        Err(InsertError::AlreadyResident(_)) => return None,
                    }
                }
            }

            fn release(&self, pin: ResidentId) {
                let refused = self.unpin_batch(&[pin]);
                debug_assert_eq!(refused, 0);
            }

            fn lend(&self, hand: &mut Buffers, keys: &[BlockKey], pins: &mut Vec<ResidentId>) {
                self.pin_batch(keys, &mut hand.found);
                pins.extend(hand.found.iter().flatten().map(|found| found.id));
            }

            fn give_back(&self, pins: &mut Vec<ResidentId>) {
                let refused = self.unpin_batch(pins);
                debug_assert_eq!(refused, 0);
                pins.clear();
            }

            fn reclaim(&self, hand: &mut Buffers, max: usize) -> Option<usize> {
                hand.victims.clear();
                Some(self.evict_batch(MemoryKind::Host, max, &mut hand.victims))
            }
        }

        impl Ranked for $type {
            fn touch(&self, hand: &mut Buffers, keys: &[BlockKey]) {
                self.hit_batch(keys, false, &mut hand.found);
            }

            fn commit(
                &self,
                hand: &mut Buffers,
                pins: &mut Vec<ResidentId>,
                requester: RequesterIndex,
            ) {
                hand.ids.clear();
                hand.ids.append(pins);
                self.commit_batch(&hand.ids, requester, &mut hand.committed);
            }
        }
    };
}

/// The store as a node sets it up.
fn store(config: StoreConfig) -> Result<Store, CliError> {
    let store = Store::new(config, Arc::new(Discard)).map_err(CliError::usage)?;
    // A kernel without huge pages measures what its nodes have.
    drop(store.tables().into_iter().try_for_each(prefer_huge_pages));
    Ok(store)
}

contends!(Store, store);
contends!(Mutexed, |config| Ok(Mutexed::new(config)));
