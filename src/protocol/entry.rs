//! The elements of lists, each both a wire layout and a value: a caller keeps a `Vec` of them from
//! one message to the next, and a decoded list is a slice of the message's own bytes.

use std::fmt;

use bytemuck::{Pod, Zeroable};

use super::{Place, wire};
use crate::event::LendRefusal;
use crate::fabric::{Region, RemoteSpan};
use crate::layout::BlockId;
use crate::limits;
use crate::types::{BlockHash, EvictionRank, Generation};

/// A region that the sender lends from, as its peer must name it.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct RegionEntry(wire::Region);

impl RegionEntry {
    /// The key to present.
    #[must_use]
    pub const fn rkey(&self) -> u32 {
        self.0.rkey.get()
    }

    /// The remote address of the first byte.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.0.address.get()
    }

    /// Length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no region is empty")]
    pub const fn len(&self) -> u64 {
        self.0.len.get()
    }

    /// Whether the span lies in this region: what a lease is checked against before it is read. The
    /// key is its owner's affair, since leases may have keys of their own: by a wrong one nothing is
    /// read.
    #[must_use]
    pub fn contains(&self, span: &RemoteSpan) -> bool {
        let inside = || {
            let offset = span.address.checked_sub(self.address())?;
            let end = offset.checked_add(u64::from(span.len))?;
            Some(end <= self.len())
        };
        inside().unwrap_or(false)
    }

    pub(super) fn is_valid(&self) -> bool {
        self.len() > 0 && self.address().checked_add(self.len()).is_some()
    }
}

impl From<&Region> for RegionEntry {
    fn from(region: &Region) -> Self {
        Self(wire::Region {
            rkey: region.rkey.into(),
            address: region.address.into(),
            len: region.len.into(),
        })
    }
}

impl fmt::Debug for RegionEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionEntry")
            .field("rkey", &self.rkey())
            .field("address", &self.address())
            .field("len", &self.len())
            .finish()
    }
}

/// The hash of a block that is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct HashEntry(wire::Hash);

impl HashEntry {
    /// The hash.
    #[must_use]
    pub fn hash(&self) -> BlockHash {
        BlockHash::padded(&self.0.bytes, self.0.len)
    }

    pub(super) fn is_valid(&self) -> bool {
        *self == Self::from(self.hash())
    }
}

impl From<BlockHash> for HashEntry {
    fn from(hash: BlockHash) -> Self {
        let used = hash.as_bytes();
        let mut entry = wire::Hash {
            // A hash has 1 to 32 bytes.
            len: u8::try_from(used.len()).unwrap_or(u8::MAX),
            bytes: [0; limits::HASH_BYTES_MAX],
        };
        entry.bytes.iter_mut().zip(used).for_each(|(to, from)| *to = *from);
        Self(entry)
    }
}

impl fmt::Debug for HashEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HashEntry({})", self.hash())
    }
}

/// What the holder says about one block that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loan {
    /// Lent: it stays where it is, unchanged, until the lease ends.
    Ready {
        /// Its rank now. The rank in the holder's `Ranks` replaces it; it stands where the holder
        /// dies before it answers.
        rank: EvictionRank,
        /// The tenancy that was lent.
        generation: Generation,
        /// Where to read it; 1 to [`limits::BLOCK_BYTES_MAX`] bytes.
        place: Place,
        /// XXH3-64 of its payload.
        checksum: u64,
    },
    /// Not resident here.
    NotFound,
    /// Resident, but it is not lent now.
    Busy(LendRefusal),
    /// The holder could not lend it for a fault of its own.
    Failed,
}

impl Loan {
    /// Whether the block may be read.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        matches!(self, Self::Ready { .. })
    }
}

const READY: u8 = 1;
const NOT_FOUND: u8 = 2;
const BUSY: u8 = 3;
const FAILED: u8 = 4;
/// Ready, and `rkey` is the layout, `address` the block.
const READY_BLOCK: u8 = 5;

const fn refusal_code(reason: LendRefusal) -> u8 {
    match reason {
        LendRefusal::Quota => 1,
        LendRefusal::Pins => 2,
        LendRefusal::Draining => 3,
        LendRefusal::Pressure => 4,
        LendRefusal::Leases => 5,
        LendRefusal::Windows => 6,
        LendRefusal::Staging => 7,
    }
}

fn refusal(code: u8) -> Option<LendRefusal> {
    LendRefusal::ALL.into_iter().find(|reason| refusal_code(*reason) == code)
}

/// A [`Loan`] as it travels: 32 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct LoanEntry(wire::Loan);

impl LoanEntry {
    /// The loan.
    #[must_use]
    pub fn loan(&self) -> Loan {
        match self.0.status {
            status @ (READY | READY_BLOCK) => Loan::Ready {
                rank: EvictionRank::clamped(u32::from(self.0.rank)),
                generation: Generation(self.0.generation.get()),
                place: self.place(status == READY_BLOCK),
                checksum: self.0.checksum.get(),
            },
            NOT_FOUND => Loan::NotFound,
            BUSY => refusal(self.0.refusal).map_or(Loan::Failed, Loan::Busy),
            _ => Loan::Failed,
        }
    }

    fn place(&self, is_block: bool) -> Place {
        let (rkey, len) = (self.0.rkey.get(), self.0.len.get());
        match is_block {
            false => Place::Span(RemoteSpan { rkey, address: self.0.address.get(), len }),
            // A number beyond 32 bits is no valid entry.
            true => {
                let block = u32::try_from(self.0.address.get()).unwrap_or(u32::MAX);
                Place::Block { layout: rkey, block: BlockId(block), len }
            }
        }
    }

    /// Gives a loan within the span another key.
    pub(super) fn set_key(&mut self, span: &RemoteSpan, key: u32) {
        let (first, len) = (self.0.address.get(), u64::from(self.0.len.get()));
        let within = first >= span.address
            && (first - span.address).checked_add(len).is_some_and(|end| end <= span.len.into());
        if self.0.status == READY && within {
            self.0.rkey = key.into();
        }
    }

    /// Valid is what [`Loan`] can say, in the one form in which it says it, within the limits.
    pub(super) fn is_valid(&self) -> bool {
        let loan = self.loan();
        let within = match loan {
            Loan::Ready { place, .. } => {
                let ends = match place {
                    Place::Span(span) => span.address.checked_add(u64::from(span.len)).is_some(),
                    Place::Block { .. } => true,
                };
                (limits::BLOCK_BYTES_MIN..=limits::BLOCK_BYTES_MAX).contains(&place.len()) && ends
            }
            Loan::NotFound | Loan::Busy(_) | Loan::Failed => true,
        };
        within && *self == Self::from(loan)
    }
}

impl From<Loan> for LoanEntry {
    fn from(loan: Loan) -> Self {
        let mut entry = wire::Loan::zeroed();
        entry.status = match loan {
            Loan::Ready { place: Place::Span(_), .. } => READY,
            Loan::Ready { place: Place::Block { .. }, .. } => READY_BLOCK,
            Loan::NotFound => NOT_FOUND,
            Loan::Busy(_) => BUSY,
            Loan::Failed => FAILED,
        };
        if let Loan::Busy(reason) = loan {
            entry.refusal = refusal_code(reason);
        }
        if let Loan::Ready { rank, generation, place, checksum } = loan {
            entry.rank = rank.get();
            entry.generation = generation.0.into();
            let (rkey, address) = match place {
                Place::Span(span) => (span.rkey, span.address),
                Place::Block { layout, block, .. } => (layout, block.0.into()),
            };
            entry.rkey = rkey.into();
            entry.len = place.len().into();
            entry.address = address.into();
            entry.checksum = checksum.into();
        }
        Self(entry)
    }
}

impl fmt::Debug for LoanEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.loan().fmt(f)
    }
}

/// One bit per block of a lease, the first block in the lowest bit of the first byte: set where the
/// block arrived whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcomes<'a> {
    count: u16,
    bitmap: &'a [u8],
}

impl<'a> Outcomes<'a> {
    /// Outcomes of `count` blocks. `None` unless there are 1 to [`limits::LEND_BLOCKS_MAX`] of
    /// them, the bitmap has exactly the bytes that they need, and unused bits are zero.
    #[must_use]
    pub fn new(count: u16, bitmap: &'a [u8]) -> Option<Self> {
        let blocks = usize::from(count);
        let unused = (bitmap.len() * 8).checked_sub(blocks)?;
        let last = bitmap.last()?;
        let clean = unused < 8 && last.leading_zeros() as usize >= unused;
        (blocks > 0 && blocks <= limits::LEND_BLOCKS_MAX && clean).then_some(Self { count, bitmap })
    }

    /// Writes outcomes to `bitmap`, replacing what it held, and says how many there were. At most
    /// [`limits::LEND_BLOCKS_MAX`] are taken.
    pub fn pack(bitmap: &mut Vec<u8>, good: impl Iterator<Item = bool>) -> u16 {
        bitmap.clear();
        let mut count: u16 = 0;
        for good in good.take(limits::LEND_BLOCKS_MAX) {
            if count.is_multiple_of(8) {
                bitmap.push(0);
            }
            if let Some(last) = bitmap.last_mut() {
                *last |= u8::from(good) << (count % 8);
            }
            count += 1;
        }
        count
    }

    /// Blocks.
    #[must_use]
    pub const fn count(&self) -> u16 {
        self.count
    }

    /// The packed bits.
    #[must_use]
    pub const fn bitmap(&self) -> &'a [u8] {
        self.bitmap
    }

    /// Whether each block arrived, in order.
    pub fn iter(&self) -> impl Iterator<Item = bool> + use<'a> {
        let bits = self.bitmap.iter();
        bits.flat_map(|byte| (0..8).map(move |bit| byte >> bit & 1 == 1))
            .take(usize::from(self.count))
    }
}
