//! Fields as they lie on the wire: little-endian, without alignment, zero-padded; and the checked
//! steps from bytes to them.

use bytemuck::{AnyBitPattern, NoUninit, Pod, Zeroable};

use super::{DecodeError, HEADER_BYTES, Header, TooMany};
use crate::event::{BusyReason, LendRefusal};
use crate::limits;
use crate::types::{BlockHash, EvictionRank, Extent, Generation, Namespace, PoolId, ResidentId};

macro_rules! little_endian {
    ($name:ident, $int:ty) => {
        /// An integer as the wire carries it.
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(transparent)]
        pub(super) struct $name([u8; size_of::<$int>()]);

        impl $name {
            pub(super) const fn new(value: $int) -> Self {
                Self(value.to_le_bytes())
            }

            pub(super) const fn get(self) -> $int {
                <$int>::from_le_bytes(self.0)
            }
        }
    };
}

little_endian!(U16, u16);
little_endian!(U32, u32);
little_endian!(U64, u64);

/// A namespace's name; length 0 is "none" where a message allows it.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct NameWire {
    len: u8,
    bytes: [u8; limits::NAME_BYTES_MAX],
}

impl NameWire {
    pub(super) fn new(name: Option<&Namespace>) -> Self {
        let mut wire = Self::zeroed();
        let text = name.map_or("", Namespace::as_str).as_bytes();
        for (to, from) in wire.bytes.iter_mut().zip(text) {
            *to = *from;
            wire.len += 1;
        }
        wire
    }

    pub(super) fn optional(&self) -> Result<Option<Namespace>, DecodeError> {
        let bad = DecodeError::Field { field: "namespace" };
        let text = padded(&self.bytes, self.len).ok_or(bad)?;
        if text.is_empty() {
            return Ok(None);
        }
        let text = std::str::from_utf8(text).map_err(|_not_text| bad)?;
        text.parse().map(Some).map_err(|_not_a_name| bad)
    }

    pub(super) fn get(&self) -> Result<Namespace, DecodeError> {
        self.optional()?.ok_or(DecodeError::Field { field: "namespace" })
    }
}

/// The first `len` bytes, where all others are zero.
fn padded(bytes: &[u8], len: u8) -> Option<&[u8]> {
    let (head, tail) = bytes.split_at_checked(usize::from(len))?;
    tail.iter().all(|byte| *byte == 0).then_some(head)
}

/// A block's hash.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct HashWire {
    len: u8,
    bytes: [u8; limits::HASH_BYTES_MAX],
}

impl HashWire {
    pub(super) fn new(hash: &BlockHash) -> Self {
        let mut wire = Self::zeroed();
        for (to, from) in wire.bytes.iter_mut().zip(hash.as_bytes()) {
            *to = *from;
            wire.len += 1;
        }
        wire
    }

    pub(super) fn get(&self) -> Result<BlockHash, DecodeError> {
        padded(&self.bytes, self.len)
            .and_then(BlockHash::new)
            .ok_or(DecodeError::Field { field: "hash" })
    }
}

/// A range of a pool. What it may name is the receiver's to check; here only a length is needed.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ExtentWire {
    pool: U16,
    len: U32,
    offset: U64,
}

impl ExtentWire {
    pub(super) fn new(extent: &Extent) -> Self {
        Self {
            pool: U16::new(extent.pool.0),
            len: U32::new(extent.len),
            offset: U64::new(extent.offset),
        }
    }

    pub(super) fn get(&self) -> Result<Extent, DecodeError> {
        let extent = Extent {
            pool: PoolId(self.pool.get()),
            offset: self.offset.get(),
            len: self.len.get(),
        };
        let ends = extent.offset.checked_add(u64::from(extent.len));
        if extent.len == 0 || extent.len > limits::BLOCK_BYTES_MAX || ends.is_none() {
            return Err(DecodeError::Field { field: "extent" });
        }
        Ok(extent)
    }
}

/// A resident that a client holds.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct HoldWire {
    slot: U32,
    generation: U32,
}

impl HoldWire {
    pub(super) fn new(hold: ResidentId) -> Self {
        Self { slot: U32::new(hold.slot), generation: U32::new(hold.generation.0) }
    }

    pub(super) fn get(&self) -> ResidentId {
        ResidentId { slot: self.slot.get(), generation: Generation(self.generation.get()) }
    }
}

/// A flag: 0 or 1.
pub(super) fn flag(byte: u8, field: &'static str) -> Result<bool, DecodeError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Field { field }),
    }
}

/// A rank that exists.
pub(super) fn rank(byte: u8) -> Result<EvictionRank, DecodeError> {
    let rank = EvictionRank::clamped(u32::from(byte));
    if rank.get() == byte { Ok(rank) } else { Err(DecodeError::Field { field: "rank" }) }
}

/// What is left of a body.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    /// The fixed part at the front.
    pub(super) fn head<T: AnyBitPattern>(&mut self) -> Result<T, DecodeError> {
        let (head, rest) = self.0.split_at_checked(size_of::<T>()).ok_or(DecodeError::Length)?;
        self.0 = rest;
        bytemuck::try_pod_read_unaligned(head).map_err(|_wrong_size| DecodeError::Length)
    }

    /// The list that fills the rest, behind its count.
    pub(super) fn list<T: AnyBitPattern>(mut self, limit: usize) -> Result<&'a [T], DecodeError> {
        let count = self.head::<U32>()?.get();
        if count as usize > limit {
            return Err(DecodeError::Count { count, limit });
        }
        if Some(self.0.len()) != size_of::<T>().checked_mul(count as usize) {
            return Err(DecodeError::Length);
        }
        bytemuck::try_cast_slice(self.0).map_err(|_wrong_size| DecodeError::Length)
    }

    /// The list that fills the rest, each entry made into what it stands for.
    pub(super) fn list_of<T: AnyBitPattern, V>(
        self,
        limit: usize,
        entry: impl Fn(&T) -> Result<V, DecodeError>,
    ) -> Result<Vec<V>, DecodeError> {
        self.list(limit)?.iter().map(entry).collect()
    }

    /// The whole rest, as text.
    pub(super) fn text(self) -> Result<&'a str, DecodeError> {
        std::str::from_utf8(self.0).map_err(|_not_text| DecodeError::Field { field: "text" })
    }

    /// Nothing may be left.
    pub(super) fn end(self) -> Result<(), DecodeError> {
        if self.0.is_empty() { Ok(()) } else { Err(DecodeError::Length) }
    }
}

/// Appends one frame; the header is filled in when the body's length is known.
pub(super) struct Writer<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
}

impl<'a> Writer<'a> {
    pub(super) fn new(out: &'a mut Vec<u8>) -> Self {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER_BYTES]);
        Self { out, start }
    }

    pub(super) fn head<T: NoUninit>(&mut self, head: &T) {
        self.out.extend_from_slice(bytemuck::bytes_of(head));
    }

    pub(super) fn bytes(&mut self, bytes: &[u8], limit: usize) -> Result<(), TooMany> {
        let count = bytes.len();
        if count > limit {
            return Err(TooMany { count, limit });
        }
        self.out.extend_from_slice(bytes);
        Ok(())
    }

    pub(super) fn list<V, T: NoUninit>(
        &mut self,
        entries: &[V],
        limit: usize,
        wire: impl Fn(&V) -> T,
    ) -> Result<(), TooMany> {
        let count = entries.len();
        let too_many = TooMany { count, limit };
        if count > limit {
            return Err(too_many);
        }
        self.head(&U32::new(u32::try_from(count).map_err(|_beyond_any_limit| too_many)?));
        for entry in entries {
            self.head(&wire(entry));
        }
        Ok(())
    }

    /// Writes the header in front. `done` is what the body came to; after an error nothing of the
    /// frame is left behind.
    pub(super) fn finish(
        self,
        kind: u8,
        request: u32,
        done: Result<(), TooMany>,
    ) -> Result<(), TooMany> {
        let body = self.out.len() - self.start - HEADER_BYTES;
        let too_many = TooMany { count: body, limit: limits::DOOR_MESSAGE_BYTES_MAX };
        let len = u32::try_from(body).map_err(|_beyond_any_limit| too_many);
        let fits =
            done.and(if body > limits::DOOR_MESSAGE_BYTES_MAX { Err(too_many) } else { len });
        match fits {
            Ok(len) => {
                let header = Header { len, kind, request }.encode();
                if let Some(place) =
                    self.out.get_mut(self.start..).and_then(<[u8]>::first_chunk_mut)
                {
                    *place = header;
                }
                Ok(())
            }
            Err(error) => {
                self.out.truncate(self.start);
                Err(error)
            }
        }
    }
}

/// The byte that stands for a reason.
pub(super) const fn busy_code(reason: BusyReason) -> u8 {
    match reason {
        BusyReason::Memory => 1,
        BusyReason::Pins => 2,
        BusyReason::Waits => 3,
        BusyReason::Owner(LendRefusal::Quota) => 0x10,
        BusyReason::Owner(LendRefusal::Pins) => 0x11,
        BusyReason::Owner(LendRefusal::Windows) => 0x12,
        BusyReason::Owner(LendRefusal::Draining) => 0x13,
        BusyReason::Owner(LendRefusal::Pressure) => 0x14,
        BusyReason::Owner(LendRefusal::Leases) => 0x15,
        BusyReason::Owner(LendRefusal::Staging) => 0x16,
    }
}

/// The reason that a byte stands for.
pub(super) fn busy_reason(code: u8) -> Result<BusyReason, DecodeError> {
    let known = BusyReason::ALL.into_iter().find(|reason| busy_code(*reason) == code);
    known.ok_or(DecodeError::Field { field: "reason" })
}
