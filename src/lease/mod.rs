//! The holder's leases: what was lent to whom, until when, and what each completion answered.
//!
//! A lease owns the pins of its blocks. They leave it in exactly one of these ways, each of them
//! once, whatever a peer repeats, loses or makes up:
//!
//! - a **completion** commits each good block (unpin and rank step in one) and unpins the others;
//! - an **abort**, or a later start of the requester, unpins all;
//! - an **expiry** unpins all, but in two steps, because the requester may be reading at that
//!   moment: [`LeaseTable::poll_cut`] names the requester whose access must be cut first, and only
//!   [`LeaseTable::handle_cut`] unpins. From the first step on the lease is neither renewed nor
//!   completed: expiry is not completion, and moves no rank. A lease expires at its deadline, or when what
//!   it lends is to be given back ([`LeaseTable::expire_where`]).
//!
//! A pin that is not yet in a lease is in a [`Draft`], which gives it back when it is dropped.
//!
//! Answers to completions are remembered per requester, so that a replay gets the same ranks and
//! moves nothing. Deadlines are in order of grant and renewal, because all leases of a table last
//! equally long: a list in that order is the expiry queue, and no operation looks at more than its
//! own requester's leases. Storage is kept from one lease to the next.

#![forbid(unsafe_code)]

mod book;
mod chain;
mod draft;
mod ended;
mod table;
#[cfg(test)]
mod tests;

pub use draft::Draft;
pub use table::LeaseTable;

use std::time::Duration;

use crate::event::LendRefusal;
use crate::store::Store;
use crate::types::{EvictionRank, LeaseId, NodeEpoch, RequesterIndex, ResidentId, Scope};

/// What a lease needs of the store. Both calls give back one pin that the lease owned.
pub trait Residents {
    /// Unpins; no rank moves.
    fn unpin(&self, resident: ResidentId);

    /// Unpins and, in the same step, counts the requester as a new reader of the resident. Answers
    /// the rank before the step that this requester's first completion made; `None` where the
    /// store does not know the resident any more.
    fn commit(&self, resident: ResidentId, requester: RequesterIndex) -> Option<EvictionRank>;
}

impl Residents for Store {
    fn unpin(&self, resident: ResidentId) {
        let unpinned = Self::unpin(self, resident);
        // The lease owned a pin, and a pinned resident is never evicted.
        debug_assert!(unpinned.is_ok(), "{resident:?}: {unpinned:?}");
    }

    fn commit(&self, resident: ResidentId, requester: RequesterIndex) -> Option<EvictionRank> {
        let committed = Self::commit(self, resident, requester);
        debug_assert!(committed.is_ok(), "{resident:?}: {committed:?}");
        committed.ok().map(|committed| committed.rank)
    }
}

/// Limits of a lease table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseConfig {
    /// How long a lease lasts from its grant or latest renewal. Default 30 s; 100 ms to 1 h. A
    /// reader that dies keeps its blocks pinned for so long.
    pub ttl: Duration,
    /// Leases that one requester may hold. Default 64.
    pub leases_per_requester: u32,
    /// Payload bytes that one requester's leases may hold, a block counted once for each lease
    /// that lends it. Default 4 GiB; it should be well below the node's pools, because these bytes
    /// cannot be evicted. What engines open may come on top of it, for blocks that lie there
    /// ([`LeaseTable::set_in_place_quota`]).
    pub bytes_per_requester: u64,
    /// Leases in all. Default 4096. Below the number of requesters times their quota, requesters
    /// together can run out of it.
    pub leases_total: usize,
}

impl Default for LeaseConfig {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(30),
            leases_per_requester: 64,
            bytes_per_requester: 4 << 30,
            leases_total: 4096,
        }
    }
}

/// Shortest and longest lease that a configuration may ask for.
pub const TTL: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(3600);

/// Most leases that a configuration may ask for: their slots fit 20 bits, with their links and
/// lists of blocks in well under 16 GiB even if each lends the most blocks at once.
const LEASES_TOTAL_MAX: usize = 1 << 20;

impl LeaseConfig {
    /// Checks that the limits make sense, alone and together.
    ///
    /// # Errors
    /// [`LeaseConfigError`], which says what to change.
    pub fn validate(&self) -> Result<(), LeaseConfigError> {
        if !TTL.contains(&self.ttl) {
            return Err(LeaseConfigError::Ttl { got: self.ttl });
        }
        if self.leases_per_requester == 0 || self.bytes_per_requester == 0 {
            return Err(LeaseConfigError::NoQuota);
        }
        let per_requester = self.leases_per_requester as usize;
        if !(per_requester..=LEASES_TOTAL_MAX).contains(&self.leases_total) {
            return Err(LeaseConfigError::Total { got: self.leases_total, per_requester });
        }
        Ok(())
    }
}

/// Limits that make no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseConfigError {
    /// The duration is out of range.
    #[error("a lease lasts from {:?} to {:?}, got {got:?}", TTL.start(), TTL.end())]
    Ttl {
        /// What was asked for.
        got: Duration,
    },
    /// A requester could hold nothing.
    #[error("leases and bytes per requester must be at least 1")]
    NoQuota,
    /// The total is below one requester's quota, or out of range.
    #[error(
        "leases in all must be at least those of one requester ({per_requester}) and at most {LEASES_TOTAL_MAX}, got {got}"
    )]
    Total {
        /// What was asked for.
        got: usize,
        /// The quota of one requester.
        per_requester: usize,
    },
    /// The requester's margin eats the lease (invariant 3 cannot hold).
    #[error(
        "a lease of {ttl:?} (--lease-ttl) leaves too little time beside a margin of {margin:?} \
         (--lease-margin): make it more than twice the margin"
    )]
    Margin {
        /// How long a lease lasts.
        ttl: Duration,
        /// How long before its end the requester stops using it.
        margin: Duration,
    },
}

/// Why a block is not lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuotaError {
    /// The requester holds as many leases as it may.
    #[error("this requester holds {limit} leases, its limit: complete some first")]
    Leases {
        /// The limit.
        limit: u32,
    },
    /// The requester's leases hold as many bytes as they may.
    #[error(
        "this requester's leases would hold more than {limit} bytes, its limit: complete some first"
    )]
    Bytes {
        /// The limit.
        limit: u64,
    },
    /// The table is full.
    #[error("this holder has {limit} leases out, its limit: ask again later")]
    Table {
        /// The limit.
        limit: usize,
    },
    /// More blocks than one request may name, or than the draft was opened for.
    #[error("a lease over more than {limit} blocks")]
    Blocks {
        /// The limit.
        limit: usize,
    },
    /// The number is beyond those that a holder gives to requesters.
    #[error("a requester beyond number {limit}")]
    Requester {
        /// The limit.
        limit: usize,
    },
}

impl QuotaError {
    /// Whose fault it is.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Leases { .. } | Self::Bytes { .. } => Scope::Peer,
            Self::Table { .. } => Scope::Local,
            Self::Blocks { .. } | Self::Requester { .. } => Scope::Request,
        }
    }

    /// What the requester is told.
    #[must_use]
    pub const fn refusal(&self) -> LendRefusal {
        match self {
            Self::Table { .. } => LendRefusal::Leases,
            _ => LendRefusal::Quota,
        }
    }

    /// Whether the same request can succeed later: it is answered `Busy` with a pause.
    #[must_use]
    pub const fn is_backpressure(&self) -> bool {
        matches!(self, Self::Leases { .. } | Self::Bytes { .. } | Self::Table { .. })
    }
}

/// One start of a requester: whom a lease belongs to. The connection vouches for the requester.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Borrower {
    /// The requester.
    pub requester: RequesterIndex,
    /// Its start.
    pub epoch: NodeEpoch,
}

/// What a requester says about a lease that it has read.
#[derive(Debug, Clone, Copy)]
pub struct Completion<'a> {
    /// Who says so.
    pub borrower: Borrower,
    /// The lease.
    pub lease: LeaseId,
    /// Positions of the lease, those that were not lent among them.
    pub count: u16,
    /// One bit per position, the first in the lowest bit of the first byte; set where the block
    /// arrived whole.
    pub bitmap: &'a [u8],
}

impl Completion<'_> {
    fn is_good(&self, position: usize) -> bool {
        let byte = self.bitmap.get(position / 8).copied().unwrap_or(0);
        byte >> (position % 8) & 1 == 1
    }
}

/// How a completion was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completed {
    /// The lease has ended and ranks have moved.
    Recorded,
    /// The lease had ended by a completion before; the ranks are of that time and nothing moved.
    Replayed,
    /// No such lease of this borrower, or not any more. Nothing moved.
    Unknown,
    /// The count or bitmap does not fit the lease, which goes on. Nothing moved.
    WrongShape,
}

/// What is lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Leases, those that wait for their requester to be cut among them.
    pub leases: u64,
    /// Payload bytes of their blocks.
    pub bytes: u64,
    /// Of these, bytes in the node's own memory: their leases keep them from eviction.
    pub own_bytes: u64,
    /// Pins that they own.
    pub blocks: u64,
}
