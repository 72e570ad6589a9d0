//! Copies between registered host memory and a device's, or within a device, in the order asked.
//!
//! A [`CopyQueue`] has one stream and a fixed number of slots. Each submission takes a slot, which
//! holds its memories until the event behind its copies has completed: none is unregistered, freed
//! or closed while the device may touch it. Slots are made once, with their events; submitting and
//! polling wait for nothing, and allocate nothing once a slot has held as many memories. Who waits for everything anyway begins copies without
//! a slot ([`CopyQueue::begin`]), which saves their events; the queue holds their memories until it was
//! drained. Dropping the queue waits for the stream, and only then lets the memories go.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

use super::{Bound, CudaError, DeviceMemory, Event, HostRegistration, Stream};
use crate::memory::OutOfBounds;

/// Where copies come from or go to.
#[derive(Debug, Clone)]
pub enum End {
    /// Host memory.
    Host(Arc<HostRegistration>),
    /// A device's memory.
    Device(Arc<DeviceMemory>),
}

/// One copy of `rows` rows of `width` bytes each. A contiguous copy has one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where the first row begins in the source, bytes.
    pub from: u64,
    /// From one row's start to the next one's in the source, bytes; at least `width`, where there are
    /// several rows.
    pub from_pitch: u64,
    /// Where the first row begins in the target, bytes.
    pub to: u64,
    /// As `from_pitch`, in the target.
    pub to_pitch: u64,
    /// Bytes of a row.
    pub width: u64,
    /// How many rows.
    pub rows: u64,
}

impl Piece {
    /// A contiguous copy of `len` bytes.
    #[must_use]
    pub const fn contiguous(from: u64, to: u64, len: u64) -> Self {
        Self { from, from_pitch: len, to, to_pitch: len, width: len, rows: 1 }
    }

    /// What is wrong with a target of `len` bytes for this copy.
    pub(super) fn outside(&self, len: u64) -> Option<OutOfBounds> {
        let span = Self::span(self.to_pitch, self.width, self.rows);
        let end = span.and_then(|span| self.to.checked_add(span));
        let outside = OutOfBounds { offset: self.to, len: span.unwrap_or(u64::MAX), size: len };
        end.is_none_or(|end| end > len).then_some(outside)
    }

    /// The bytes from a first row's start to the last row's end.
    const fn span(pitch: u64, width: u64, rows: u64) -> Option<u64> {
        if rows == 0 || width == 0 {
            return Some(0);
        }
        if rows > 1 && pitch < width {
            return None;
        }
        match pitch.checked_mul(rows - 1) {
            Some(before) => before.checked_add(width),
            None => None,
        }
    }
}

/// A place as the driver is told it.
#[derive(Debug, Clone, Copy)]
enum Address {
    Host(*mut c_void),
    Device(u64),
}

impl End {
    /// The place of `span` bytes at `offset`. A `span` that no memory has is out of bounds.
    fn at(&self, offset: u64, span: Option<u64>) -> Result<Address, CudaError> {
        let overlong = OutOfBounds { offset, len: u64::MAX, size: self.len() };
        let span = span.ok_or(overlong)?;
        Ok(match self {
            Self::Host(host) => Address::Host(host.pointer(offset, span)?.as_ptr()),
            Self::Device(device) => Address::Device(device.pointer(offset, span)?),
        })
    }

    /// Whether both are the same memory.
    fn is(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(one), Self::Host(other)) => Arc::ptr_eq(one, other),
            (Self::Device(one), Self::Device(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    fn len(&self) -> u64 {
        match self {
            Self::Host(host) => host.mapping().len(),
            Self::Device(device) => device.len(),
        }
    }
}

#[derive(Debug)]
struct Slot {
    event: Event,
    token: u64,
    ends: Vec<(End, End)>,
}

impl Slot {
    /// Holds both memories of a copy. Copies between the same ones come one after the other.
    fn hold(&mut self, from: &End, to: &End) {
        if self
            .ends
            .last()
            .is_none_or(|(last_from, last_to)| !(last_from.is(from) && last_to.is(to)))
        {
            self.ends.push((from.clone(), to.clone()));
        }
    }
}

/// A stream of copies. See the module's documentation.
#[derive(Debug)]
pub struct CopyQueue {
    /// First, so that it is dropped first: that waits for what is in flight.
    stream: Stream,
    /// In flight, oldest first; as long as `free` lasts.
    flying: VecDeque<Slot>,
    free: Vec<Slot>,
    /// The memories of copies without a slot.
    begun: Vec<(End, End)>,
    limit: usize,
}

impl CopyQueue {
    /// A queue with so many slots, at least 1.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(bound: &Bound<'_>, slots: usize) -> Result<Self, CudaError> {
        let limit = slots.max(1);
        let slot = |_| Ok(Slot { event: Event::new(bound)?, token: 0, ends: Vec::new() });
        let free = (0..limit).map(slot).collect::<Result<Vec<_>, CudaError>>()?;
        let stream = Stream::new(bound)?;
        let flying = VecDeque::with_capacity(limit);
        Ok(Self { stream, flying, free, begun: Vec::new(), limit })
    }

    /// What is submitted from here on begins when what is recorded in the event by now has run.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait_for(&mut self, bound: &Bound<'_>, event: &Event) -> Result<(), CudaError> {
        self.stream.wait_for(bound, event)
    }

    /// Begins copies, whose common end [`Self::poll`] tells by `token`. They run after this call; the
    /// source must hold its bytes until then, and nobody else may count on the target's.
    ///
    /// # Errors
    /// [`CudaError::Full`], [`CudaError::Bounds`]: nothing was begun. [`CudaError::Call`]: some copies
    /// may run, and their end is told by `token` where the device is not lost.
    pub fn submit(
        &mut self,
        bound: &Bound<'_>,
        ends: (&End, &End),
        pieces: &[Piece],
        token: u64,
    ) -> Result<(), CudaError> {
        self.submit_all(bound, pieces.iter().map(|piece| (ends, *piece)), token)
    }

    /// As [`Self::submit`], for copies between several memories.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub fn submit_all<'a>(
        &mut self,
        bound: &Bound<'_>,
        mut copies: impl Iterator<Item = ((&'a End, &'a End), Piece)> + Clone,
        token: u64,
    ) -> Result<(), CudaError> {
        copies.clone().try_for_each(|(ends, piece)| check(ends, &[piece]))?;
        let mut slot = self.free.pop().ok_or(CudaError::Full { limit: self.limit })?;
        slot.token = token;
        copies.clone().for_each(|((from, to), _)| slot.hold(from, to));
        let begun = copies.try_for_each(|(ends, piece)| copy(bound, &self.stream, ends, &piece));
        // Even where a copy was refused those before it run, and hold the memories.
        let recorded = slot.event.record(bound, &self.stream);
        self.flying.push_back(slot);
        begun.and(recorded)
    }

    /// Begins copies that are asked for by nobody until [`Self::drain`]: any number of them, as far as
    /// host memory goes. Else as [`Self::submit`].
    ///
    /// # Errors
    /// [`CudaError::Bounds`]: nothing was begun. [`CudaError::Call`]: some copies may run.
    pub fn begin(
        &mut self,
        bound: &Bound<'_>,
        ends: (&End, &End),
        pieces: &[Piece],
    ) -> Result<(), CudaError> {
        check(ends, pieces)?;
        // Before the first copy: where one is refused those before it run, and hold the memories.
        self.begun.push((ends.0.clone(), ends.1.clone()));
        pieces.iter().try_for_each(|piece| copy(bound, &self.stream, ends, piece))
    }

    /// Appends the tokens of the submissions that have ended, in their order. Does not wait.
    ///
    /// # Errors
    /// [`CudaError::Call`] with what copies failed with: the device is lost, and no submission in
    /// flight will end well.
    pub fn poll(&mut self, bound: &Bound<'_>, ended: &mut Vec<u64>) -> Result<(), CudaError> {
        while let Some(slot) = self.flying.front() {
            if !slot.event.is_complete(bound)? {
                break;
            }
            let Some(mut slot) = self.flying.pop_front() else { break };
            slot.ends.clear();
            ended.push(slot.token);
            self.free.push(slot);
        }
        Ok(())
    }

    /// Waits for all copies. Never on the data thread.
    ///
    /// # Errors
    /// As [`Self::poll`].
    pub fn drain(&mut self, bound: &Bound<'_>, ended: &mut Vec<u64>) -> Result<(), CudaError> {
        self.stream.synchronize(bound)?;
        self.begun.clear();
        self.poll(bound, ended)
    }

    /// Whether the queue holds no memory: all submissions have been polled, and it was drained after
    /// what was begun without one.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.flying.is_empty() && self.begun.is_empty()
    }

    /// Submissions that have not been polled yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flying.len()
    }

    /// Submissions that can be made before one must end.
    #[must_use]
    pub fn room(&self) -> usize {
        self.free.len()
    }
}

/// Refuses pieces that leave their memory, before any of them is begun.
fn check((from, to): (&End, &End), pieces: &[Piece]) -> Result<(), CudaError> {
    for piece in pieces {
        from.at(piece.from, Piece::span(piece.from_pitch, piece.width, piece.rows))?;
        to.at(piece.to, Piece::span(piece.to_pitch, piece.width, piece.rows))?;
    }
    Ok(())
}

/// Begins one copy.
fn copy(
    bound: &Bound<'_>,
    stream: &Stream,
    (from, to): (&End, &End),
    piece: &Piece,
) -> Result<(), CudaError> {
    if piece.rows == 0 || piece.width == 0 {
        return Ok(());
    }
    let source = from.at(piece.from, Piece::span(piece.from_pitch, piece.width, piece.rows))?;
    let target = to.at(piece.to, Piece::span(piece.to_pitch, piece.width, piece.rows))?;
    if piece.rows > 1 {
        return copy_rows(bound, stream, (source, target), piece);
    }
    let driver = bound.context().driver();
    let library = driver.library();
    let bytes = usize::try_from(piece.width).unwrap_or(usize::MAX);
    let (call, result) = match (source, target) {
        (Address::Host(from), Address::Device(to)) => {
            // SAFETY: a context is current, the stream is live; both ranges are inside memories that
            // the caller's slot holds until the copy has run.
            let result =
                unsafe { (library.memcpy_htod_async)(to, from.cast_const(), bytes, stream.raw()) };
            ("cuMemcpyHtoDAsync", result)
        }
        (Address::Device(from), Address::Host(to)) => {
            // SAFETY: as above; the host's range is shared memory that no Rust reference covers.
            let result = unsafe { (library.memcpy_dtoh_async)(to, from, bytes, stream.raw()) };
            ("cuMemcpyDtoHAsync", result)
        }
        (Address::Device(from), Address::Device(to)) => {
            // SAFETY: as above.
            let result = unsafe { (library.memcpy_dtod_async)(to, from, bytes, stream.raw()) };
            ("cuMemcpyDtoDAsync", result)
        }
        (Address::Host(_), Address::Host(_)) => return Err(BETWEEN_HOSTS),
    };
    driver.check(result, || format!("{call} of {bytes} bytes"))
}

const BETWEEN_HOSTS: CudaError =
    CudaError::Unsupported { what: "a copy within host memory", why: "no GPU takes part" };

fn copy_rows(
    bound: &Bound<'_>,
    stream: &Stream,
    (source, target): (Address, Address),
    piece: &Piece,
) -> Result<(), CudaError> {
    let driver = bound.context().driver();
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let split = |address| match address {
        Address::Host(pointer) => (CUmemorytype::CU_MEMORYTYPE_HOST, pointer, 0),
        Address::Device(pointer) => {
            (CUmemorytype::CU_MEMORYTYPE_DEVICE, std::ptr::null_mut(), pointer)
        }
    };
    let (from_kind, from_host, from_device) = split(source);
    let (to_kind, to_host, to_device) = split(target);
    let rows = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: from_kind,
        srcHost: from_host.cast_const(),
        srcDevice: from_device,
        srcArray: std::ptr::null_mut(),
        srcPitch: size(piece.from_pitch),
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: to_kind,
        dstHost: to_host,
        dstDevice: to_device,
        dstArray: std::ptr::null_mut(),
        dstPitch: size(piece.to_pitch),
        WidthInBytes: size(piece.width),
        Height: size(piece.rows),
    };
    // SAFETY: a context is current, the stream is live; reads `rows`; all rows are inside memories
    // that the caller's slot holds until the copy has run.
    let result = unsafe { (driver.library().memcpy_2d_async)(&raw const rows, stream.raw()) };
    driver.check(result, || format!("cuMemcpy2DAsync of {} × {} bytes", piece.rows, piece.width))
}
