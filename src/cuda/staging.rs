//! Staging: pinned host memory that a card reads and writes where it does not reach a device's, and
//! the copies between the two.
//!
//! A [`StagingSlot`] is a piece of a ring of host memory that is registered with the driver and with
//! the cards once. READs land in slots while copies of earlier ones run: [`Staging::begin`] hands both
//! ends of a copy to the driver and returns, [`Staging::poll`] tells what has ended. Both ends belong
//! to the copy until then, whoever else has lost interest: a slot is not taken again, and an extent
//! is nobody else's, while the device may touch it.
//!
//! In steady state nothing is allocated: slots come from a ring, copies from a [`CopyQueue`]. A ring
//! that is exhausted answers `None`; whoever wants a slot waits with a deadline of its own and tells
//! its peers to hold back.
//!
//! The ring's memory is ordinary cached memory: checksums are read from it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Bound, CopyQueue, CudaError, DeviceMemory, End, HostRegistration, Piece};
use crate::memory::{Mapping, Ring, RingPiece};
use crate::sync::{Mutex, lock};

/// Slots of one ring, and copies in flight on it.
const SLOTS: usize = 256;

/// Which way a copy goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StagingCopy {
    /// From the slot into the device's memory.
    ToDevice,
    /// From the device's memory into the slot.
    FromDevice,
}

/// A piece of the ring, given back when dropped.
#[derive(Debug)]
pub struct StagingSlot {
    piece: RingPiece,
    /// Locked for a few additions, by the one thread that stages and by whoever drops a slot late.
    ring: Arc<Mutex<Ring>>,
}

impl StagingSlot {
    /// Bytes from the start of the staging memory.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.piece.offset
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.piece.len
    }

    /// Whether it has no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.piece.len == 0
    }
}

impl Drop for StagingSlot {
    fn drop(&mut self) {
        lock(&self.ring).give(self.piece);
    }
}

/// The staging of one device, for one thread. `T` is what a copy owns besides its slot: the extent.
#[derive(Debug)]
pub struct Staging<T> {
    /// First, so that it is dropped first: that waits for the copies, whose ends go after.
    queue: CopyQueue,
    flying: VecDeque<(StagingSlot, T)>,
    ring: Arc<Mutex<Ring>>,
    host: Arc<HostRegistration>,
    device: End,
    staged: End,
    ended: Vec<u64>,
    /// The pieces of one block, kept for the next one.
    gathered: Vec<(End, Piece)>,
}

impl<T> Staging<T> {
    /// Takes `bytes` bytes of host memory for copies from and to `device`.
    ///
    /// # Errors
    /// [`CudaError::Call`]; [`CudaError::Host`] where the host has no such memory.
    pub fn new(
        bound: &Bound<'_>,
        device: &Arc<DeviceMemory>,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let mapping = Mapping::anonymous("kvrail-staging", bytes)
            .map_err(|source| CudaError::Host { what: "staging memory", source })?;
        let host = HostRegistration::new(bound, &Arc::new(mapping))?;
        Ok(Self {
            queue: CopyQueue::new(bound, SLOTS)?,
            flying: VecDeque::with_capacity(SLOTS),
            ring: Arc::new(Mutex::new(Ring::new(bytes, SLOTS))),
            device: End::Device(Arc::clone(device)),
            staged: End::Host(Arc::clone(&host)),
            host,
            ended: Vec::with_capacity(SLOTS),
            gathered: Vec::new(),
        })
    }

    /// The host memory, to register with cards and to read.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.host.mapping()
    }

    /// A slot of `len` bytes; `None` while the ring is exhausted.
    #[must_use]
    pub fn take(&mut self, len: u64) -> Option<StagingSlot> {
        let piece = lock(&self.ring).take(len)?;
        Some(StagingSlot { piece, ring: Arc::clone(&self.ring) })
    }

    /// Whether a slot of `len` bytes can ever be had.
    #[must_use]
    pub fn fits(&self, len: u64) -> bool {
        lock(&self.ring).fits(len)
    }

    /// Bytes of the ring that slots take.
    #[must_use]
    pub fn used(&self) -> u64 {
        lock(&self.ring).used()
    }

    /// Begins a copy of a whole slot from or to the device's memory at `offset`. Slot and `owned` come
    /// back by [`Self::poll`].
    ///
    /// # Errors
    /// As [`CopyQueue::submit`], with what was handed in where nothing was begun.
    pub fn begin(
        &mut self,
        bound: &Bound<'_>,
        way: StagingCopy,
        (slot, offset): (StagingSlot, u64),
        owned: T,
    ) -> Result<(), (CudaError, Option<(StagingSlot, T)>)> {
        let (at, len) = (slot.offset(), slot.len());
        let (ends, piece) = match way {
            StagingCopy::ToDevice => {
                ((&self.staged, &self.device), Piece::contiguous(at, offset, len))
            }
            StagingCopy::FromDevice => {
                ((&self.device, &self.staged), Piece::contiguous(offset, at, len))
            }
        };
        let before = self.queue.in_flight();
        let begun = self.queue.submit(bound, ends, &[piece], slot.piece.number);
        self.fly(begun, before, (slot, owned))
    }

    /// Begins copies of these pieces of other memory of the device into a slot, where their targets count
    /// from its start. Slot and `owned` come back by [`Self::poll`], when all of them have ended.
    ///
    /// # Errors
    /// As [`Self::begin`]; a piece that leaves the slot is out of bounds.
    pub fn gather(
        &mut self,
        bound: &Bound<'_>,
        slot: StagingSlot,
        pieces: impl Iterator<Item = (Arc<DeviceMemory>, Piece)>,
        owned: T,
    ) -> Result<(), (CudaError, Option<(StagingSlot, T)>)> {
        let (at, len) = (slot.offset(), slot.len());
        let mut gathered = std::mem::take(&mut self.gathered);
        gathered.extend(pieces.map(|(memory, piece)| (End::Device(memory), piece)));
        let outside = gathered.iter().find_map(|(_, piece)| piece.outside(len));
        let before = self.queue.in_flight();
        let begun = match outside {
            Some(outside) => Err(CudaError::from(outside)),
            None => {
                let copies = gathered.iter().map(|(from, piece)| {
                    let to = at + piece.to;
                    ((from, &self.staged), Piece { to, ..*piece })
                });
                self.queue.submit_all(bound, copies, slot.piece.number)
            }
        };
        gathered.clear();
        self.gathered = gathered;
        self.fly(begun, before, (slot, owned))
    }

    /// Keeps what a copy owns that may have begun; `before` says how many copies were in flight.
    fn fly(
        &mut self,
        begun: Result<(), CudaError>,
        before: usize,
        (slot, owned): (StagingSlot, T),
    ) -> Result<(), (CudaError, Option<(StagingSlot, T)>)> {
        if self.queue.in_flight() > before {
            // Even where the driver refused it may have begun.
            self.flying.push_back((slot, owned));
            return begun.map_err(|error| (error, None));
        }
        begun.map_err(|error| (error, Some((slot, owned))))
    }

    /// Hands the ends of copies that have ended to `take`, oldest first. Does not wait.
    ///
    /// # Errors
    /// As [`CopyQueue::poll`]: the device is lost, and no copy in flight will end well.
    pub fn poll(
        &mut self,
        bound: &Bound<'_>,
        mut take: impl FnMut(StagingSlot, T),
    ) -> Result<(), CudaError> {
        let polled = self.queue.poll(bound, &mut self.ended);
        for _copy in self.ended.drain(..) {
            if let Some((slot, owned)) = self.flying.pop_front() {
                take(slot, owned);
            }
        }
        polled
    }

    /// Copies in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flying.len()
    }
}
