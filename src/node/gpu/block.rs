//! Blocks on their way into the GPU's memory: its pool, or an engine's layout. The landing and the copy
//! share each: what it lies in is let go when neither needs it, as if in an `Arc`, but in places that are
//! used again, so that in steady state no block allocates anything.

use std::sync::Arc;

use crate::cuda::GpuPool;
use crate::memory::Reservation;
use crate::runtime::door::Imported;
use crate::sync::{Mutex, lock};
use crate::types::Extent;

/// What a block lies in.
#[derive(Debug)]
pub(super) enum Lies {
    /// An extent of the pool.
    Pool(Reservation<GpuPool>),
    /// The layout of an engine; a place that the engine has no other use for now.
    Layout(Arc<Imported>),
}

#[derive(Debug, Default)]
struct Place {
    lies: Option<Lies>,
    holders: u8,
    /// Of the bytes, once they are known.
    checksum: Option<u64>,
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
    pub(super) fn enter(&self, extent: Extent, lies: Lies) -> Block {
        let place = Place { lies: Some(lies), holders: 1, checksum: None, done: false };
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

    /// The layout that it lies in; `None` where that is the pool.
    pub(super) fn layout(&self) -> Option<Arc<Imported>> {
        self.with(|place| match &place.lies {
            Some(Lies::Layout(imported)) => Some(Arc::clone(imported)),
            _ => None,
        })
    }

    /// What the bytes are, wherever they lie.
    pub(super) fn set_checksum(&self, checksum: u64) {
        self.with(|place| place.checksum = Some(checksum));
    }

    /// The same, once it is known.
    pub(super) fn checksum(&self) -> Option<u64> {
        self.with(|place| place.checksum)
    }

    /// The bytes are in place, and their checksum is set.
    pub(super) fn finish(&self) {
        self.with(|place| place.done = true);
    }

    pub(super) fn is_done(&self) -> bool {
        self.with(|place| place.done)
    }

    /// The extent of the pool, for the last one who has it.
    pub(super) fn into_reservation(self) -> Option<Reservation<GpuPool>> {
        let lies = self.with(|place| if place.holders == 1 { place.lies.take() } else { None });
        match lies {
            Some(Lies::Pool(memory)) => Some(memory),
            _ => None,
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut places = lock(&self.blocks.0);
        let Some(place) = places.all.get_mut(self.at) else { return };
        place.holders -= 1;
        if place.holders == 0 {
            let lies = place.lies.take();
            places.free.push(self.at);
            drop(places);
            // An extent goes back to its pool, unless it was taken over.
            drop(lies);
        }
    }
}
