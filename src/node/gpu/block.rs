//! Blocks on their way into the GPU's pool. The landing and the copy share each: its extent is free again
//! when neither needs it, as if in an `Arc`, but in places that are used again, so that in steady state no
//! block allocates anything.

use std::sync::Arc;

use crate::cuda::GpuPool;
use crate::memory::Reservation;
use crate::sync::{Mutex, lock};
use crate::types::Extent;

#[derive(Debug, Default)]
struct Place {
    memory: Option<Reservation<GpuPool>>,
    holders: u8,
    /// Of the bytes, where they are known.
    checksum: u64,
    /// Whether the bytes are in place and known.
    done: bool,
}

#[derive(Debug, Default)]
struct Places {
    all: Vec<Place>,
    free: Vec<usize>,
}

/// The places: as many as blocks were under way at once. The data thread alone uses them; the lock, which
/// nobody else asks for, is what makes that safe.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks(Arc<Mutex<Places>>);

impl Blocks {
    /// A block that will lie there.
    pub(super) fn enter(&self, memory: Reservation<GpuPool>) -> Block {
        let extent = memory.extent();
        let place = Place { memory: Some(memory), holders: 1, checksum: 0, done: false };
        let mut places = lock(&self.0);
        let Places { all, free } = &mut *places;
        let reused = free.pop().and_then(|at| Some((at, all.get_mut(at)?)));
        let at = match reused {
            Some((at, old)) => {
                *old = place;
                at
            }
            None => {
                all.push(place);
                all.len() - 1
            }
        };
        drop(places);
        Block { blocks: self.clone(), at, extent }
    }
}

/// One of those who share a block.
#[derive(Debug)]
pub(super) struct Block {
    blocks: Blocks,
    at: usize,
    extent: Extent,
}

impl Block {
    fn with<R: Default>(&self, act: impl FnOnce(&mut Place) -> R) -> R {
        lock(&self.blocks.0).all.get_mut(self.at).map(act).unwrap_or_default()
    }

    /// One more.
    pub(super) fn share(&self) -> Self {
        self.with(|place| place.holders += 1);
        Self { blocks: self.blocks.clone(), at: self.at, extent: self.extent }
    }

    pub(super) fn extent(&self) -> Extent {
        self.extent
    }

    /// What the bytes are, wherever they lie.
    pub(super) fn set_checksum(&self, checksum: u64) {
        self.with(|place| place.checksum = checksum);
    }

    pub(super) fn checksum(&self) -> u64 {
        self.with(|place| place.checksum)
    }

    /// The bytes are in place, and their checksum is set.
    pub(super) fn finish(&self) {
        self.with(|place| place.done = true);
    }

    pub(super) fn is_done(&self) -> bool {
        self.with(|place| place.done)
    }

    /// The extent, for the last one who has it.
    pub(super) fn into_reservation(self) -> Option<Reservation<GpuPool>> {
        self.with(|place| if place.holders == 1 { place.memory.take() } else { None })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut places = lock(&self.blocks.0);
        let Some(place) = places.all.get_mut(self.at) else { return };
        place.holders -= 1;
        if place.holders == 0 {
            let memory = place.memory.take();
            places.free.push(self.at);
            drop(places);
            // It goes back to its pool, unless it was taken over.
            drop(memory);
        }
    }
}
