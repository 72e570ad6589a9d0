//! One fetch: a wish for blocks of one owner, from its lend to the residents that it made.

use std::time::Duration;

use super::landing::{Landing, Published};
use super::layouts::HeardLayouts;
use super::outbox::Outbox;
use crate::event::BusyReason;
use crate::fabric::ConnectionId;
use crate::health::{Health, Suspended};
use crate::protocol::{Loan, LoanEntry, Outcomes, Place, RegionEntry};
use crate::store::Found;
use crate::transfer::{ReadList, TransferId};
use crate::types::{
    BlockHash, BlockKey, EvictionRank, Extent, LeaseId, Load, NamespaceId, NodeId, RequestId,
    Scope, Timestamp,
};

/// A fetch, as its asker numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(pub u64);

/// Blocks that are wanted, and where they shall land.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// The blocks' namespace.
    pub namespace: NamespaceId,
    /// The blocks, prefix order, at most [`crate::limits::LEND_BLOCKS_MAX`].
    pub hashes: Vec<BlockHash>,
    /// Where each of them shall land, which nobody else uses until the fetch is over. Empty where that is
    /// the landing's affair.
    pub places: Vec<Extent>,
}

impl Wish {
    /// For blocks that may land wherever there is room.
    #[must_use]
    pub const fn anywhere(namespace: NamespaceId, hashes: Vec<BlockHash>) -> Self {
        Self { namespace, hashes, places: Vec::new() }
    }

    /// The wish for those of its blocks that are at these positions.
    #[must_use]
    pub fn part(&self, positions: &[usize]) -> Self {
        let Self { namespace, hashes, places } = self;
        Self {
            namespace: *namespace,
            hashes: positions.iter().filter_map(|at| hashes.get(*at)).copied().collect(),
            places: positions.iter().filter_map(|at| places.get(*at)).copied().collect(),
        }
    }
}

/// A wish for blocks of one owner.
#[derive(Debug, Clone)]
pub struct FetchRequest {
    /// Its number, unique while it runs.
    pub id: FetchId,
    /// The owner.
    pub node: NodeId,
    /// What is wanted of it.
    pub wish: Wish,
}

/// What became of one block of a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchOutcome {
    /// Resident here now and pinned once for the asker. `fetched` is `false` where it turned out to
    /// be resident already.
    Ready {
        /// The resident.
        found: Found,
        /// Whether this fetch brought it.
        fetched: bool,
    },
    /// The owner does not have it.
    NotFound,
    /// The owner, or this node, has no room for it now.
    Busy(BusyReason),
    /// It did not arrive.
    Failed(Scope),
}

impl FetchOutcome {
    /// Whether another owner may do better.
    #[must_use]
    pub const fn is_disappointing(&self) -> bool {
        matches!(self, Self::NotFound | Self::Failed(_))
    }
}

/// A fetch that is over.
#[derive(Debug)]
pub struct Fetched {
    /// Which.
    pub id: FetchId,
    /// The owner that was asked.
    pub node: NodeId,
    /// One outcome per hash, in the order asked.
    pub outcomes: Vec<FetchOutcome>,
    /// What that owner last said about its load.
    pub load: Load,
    /// Why it is left alone, and until when.
    pub suspended: Option<Suspended>,
}

/// What a loan said of a block that is being read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) position: u16,
    pub(super) rank: EvictionRank,
    pub(super) checksum: u64,
}

/// Where a fetch is; see the picture in [`super::requester`].
#[derive(Debug)]
pub(super) enum Phase<M> {
    Waiting,
    Lending,
    Reading {
        transfer: TransferId,
        wanted: Vec<Wanted>,
        /// The holder's, from its grant.
        ttl: Duration,
        /// When the last request for time was sent.
        asked: Timestamp,
    },
    Completing {
        landed: Vec<(Wanted, M)>,
    },
}

/// A lease as it arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Granted<'a> {
    pub(super) connection: ConnectionId,
    pub(super) request: RequestId,
    pub(super) lease: LeaseId,
    pub(super) ttl: Duration,
    pub(super) loans: &'a [LoanEntry],
    /// What the peer said it lends from.
    pub(super) regions: &'a [RegionEntry],
    /// How it said that blocks lie.
    pub(super) layouts: &'a HeardLayouts,
    /// How long reads of so many bytes may take.
    pub(super) health: &'a Health,
}

impl Granted<'_> {
    /// Whether the peer has said before that it lends from there.
    fn is_known(&self, place: &Place) -> bool {
        match place {
            Place::Span(span) => self.regions.iter().any(|region| region.contains(span)),
            Place::Block { layout, block, len } => {
                self.layouts.spans(*layout, *block, *len).is_some()
            }
        }
    }
}

/// The peer did what no honest peer does; its connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation;

/// Where a lease is taken apart. Kept from one lease to the next, so that its memory is.
#[derive(Debug)]
pub(super) struct Scratch<M> {
    /// Where the owner has them.
    lent: Vec<Place>,
    sizes: Vec<u32>,
    /// The memory that each block of a new transfer lands in.
    pub(super) memory: Vec<M>,
    /// Their READs.
    pub(super) reads: ReadList,
}

impl<M> Default for Scratch<M> {
    fn default() -> Self {
        let (lent, sizes) = (Vec::new(), Vec::new());
        Self { lent, sizes, memory: Vec::new(), reads: ReadList::default() }
    }
}

#[derive(Debug)]
pub(super) struct Fetch<M> {
    pub(super) request: FetchRequest,
    /// The connection that the fetch runs on; `None` while it waits for one, and again when that
    /// one is gone.
    pub(super) connection: Option<ConnectionId>,
    pub(super) outcomes: Vec<FetchOutcome>,
    pub(super) phase: Phase<M>,
    pub(super) lease: LeaseId,
    /// When the lend was sent: what the lease's deadline counts from.
    pub(super) lent: Timestamp,
    /// When the current phase is given up; reads have their own deadline in the transfer.
    pub(super) deadline: Timestamp,
    /// Whether its lend was asked again on a second connection.
    pub(super) moved: bool,
    /// No renewal moves the reads beyond this.
    pub(super) reads_end: Timestamp,
    /// Until when its lend is held back, because the owner asked for that.
    pub(super) held_until: Option<Timestamp>,
}

impl<M> Fetch<M> {
    pub(super) fn new(request: FetchRequest, now: Timestamp, timeout: Duration) -> Self {
        let blocks = request.wish.hashes.len();
        Self {
            request,
            connection: None,
            outcomes: vec![FetchOutcome::Failed(Scope::Local); blocks],
            phase: Phase::Waiting,
            lease: LeaseId::NONE,
            lent: now,
            deadline: now + timeout,
            moved: false,
            reads_end: now,
            held_until: None,
        }
    }

    pub(super) fn lend(
        &mut self,
        id: RequestId,
        (connection, timeout): (ConnectionId, Duration),
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        outbox.lend(connection, id, self.request.wish.namespace, &self.request.wish.hashes);
        self.connection = Some(connection);
        self.held_until = None;
        (self.lent, self.deadline) = (now, now + timeout);
        self.phase = Phase::Lending;
    }

    /// When to ask for more time: halfway through the lease.
    pub(super) fn renewal(&self) -> Option<Timestamp> {
        match &self.phase {
            Phase::Reading { ttl, asked, .. } => Some(*asked + *ttl / 2),
            _ => None,
        }
    }

    pub(super) fn set(&mut self, position: u16, outcome: FetchOutcome) {
        if let Some(slot) = self.outcomes.get_mut(usize::from(position)) {
            *slot = outcome;
        }
    }

    /// Which blocks landed, as the completion says it. Empty unless the reads are over.
    pub(super) fn pack_outcomes(&self, bitmap: &mut Vec<u8>) -> u16 {
        let mut landed = match &self.phase {
            Phase::Completing { landed } => landed.as_slice(),
            _ => &[],
        }
        .iter()
        .map(|(want, _)| usize::from(want.position))
        .peekable();
        let good = (0..self.outcomes.len()).map(|at| landed.next_if_eq(&at).is_some());
        Outcomes::pack(bitmap, good)
    }

    /// Sorts the loans into outcomes and reads, which are left in `scratch`, with memory for the latter.
    pub(super) fn accept<L: Landing<Memory = M>>(
        &mut self,
        granted: &Granted<'_>,
        landing: &mut L,
        scratch: &mut Scratch<M>,
    ) -> Result<Vec<Wanted>, Violation> {
        scratch.memory.clear();
        scratch.reads.clear();
        let mut wanted = self.sort(granted, &mut scratch.lent)?;
        self.make_room(&mut wanted, landing, scratch);
        let Scratch { lent, memory, reads, .. } = scratch;
        let mut landed = lent.iter().zip(memory.iter());
        let is_uneven = |(place, memory): (&Place, &M)| {
            let local = landing.spans(memory);
            let listed = match *place {
                Place::Span(span) => reads.push([span], local),
                Place::Block { layout, block, len } => {
                    let spans = granted.layouts.spans(layout, block, len);
                    reads.push(spans.into_iter().flatten(), local)
                }
            };
            listed.is_err()
        };
        if landed.any(is_uneven) {
            // Memory of another length than was asked for is a bug of the landing's.
            memory.clear();
            return Err(Violation);
        }
        Ok(wanted)
    }

    /// What the loans say of each block; those that can be read, and where their owner has them.
    fn sort(
        &mut self,
        granted: &Granted<'_>,
        lent: &mut Vec<Place>,
    ) -> Result<Vec<Wanted>, Violation> {
        lent.clear();
        if granted.loans.len() != self.outcomes.len() {
            return Err(Violation);
        }
        let mut wanted = Vec::with_capacity(self.outcomes.len());
        let entries = granted.loans.iter().map(LoanEntry::loan);
        for ((position, loan), outcome) in (0..).zip(entries).zip(&mut self.outcomes) {
            *outcome = match loan {
                Loan::Ready { place, .. } if !granted.is_known(&place) => return Err(Violation),
                Loan::Ready { rank, place, checksum, generation: _ } => {
                    let here = self.request.wish.places.get(usize::from(position));
                    if here.is_some_and(|here| here.len != place.len()) {
                        FetchOutcome::Failed(Scope::Request)
                    } else {
                        wanted.push(Wanted { position, rank, checksum });
                        lent.push(place);
                        FetchOutcome::Failed(Scope::Path)
                    }
                }
                Loan::NotFound => FetchOutcome::NotFound,
                Loan::Busy(refusal) => FetchOutcome::Busy(BusyReason::Owner(refusal)),
                Loan::Failed => FetchOutcome::Failed(Scope::Peer),
            };
        }
        Ok(wanted)
    }

    /// Memory for the blocks that can be read: where they shall land, or where the landing has room. What
    /// finds none is wanted no more.
    fn make_room<L: Landing<Memory = M>>(
        &mut self,
        wanted: &mut Vec<Wanted>,
        landing: &mut L,
        scratch: &mut Scratch<M>,
    ) {
        let Scratch { lent, sizes, memory, .. } = scratch;
        let places = &self.request.wish.places;
        let without = if places.is_empty() {
            sizes.clear();
            sizes.extend(lent.iter().map(Place::len));
            landing.reserve(sizes, memory);
            FetchOutcome::Busy(BusyReason::Memory)
        } else {
            let here = wanted.iter().map_while(|want| places.get(usize::from(want.position)));
            memory.extend(here.map_while(|place| landing.land_at(place)));
            FetchOutcome::Failed(Scope::Local)
        };
        for want in wanted.drain(memory.len().min(wanted.len())..) {
            if let Some(outcome) = self.outcomes.get_mut(usize::from(want.position)) {
                *outcome = without;
            }
        }
    }

    /// Makes what landed resident; ranks are the holder's answer, or else those of the loans.
    pub(super) fn publish<L: Landing<Memory = M>>(
        &mut self,
        landing: &mut L,
        answered: impl Fn(u16) -> Option<EvictionRank>,
    ) {
        let Phase::Completing { landed } = std::mem::replace(&mut self.phase, Phase::Waiting)
        else {
            return;
        };
        for (want, memory) in landed {
            let rank = answered(want.position).unwrap_or(want.rank);
            let Wish { namespace, hashes, .. } = &self.request.wish;
            let Some(&hash) = hashes.get(usize::from(want.position)) else { continue };
            let key = BlockKey { namespace: *namespace, hash };
            let outcome = match landing.publish(key, memory, want.checksum, rank) {
                Published::Stored(found) => FetchOutcome::Ready { found, fetched: true },
                Published::AlreadyResident(found) => FetchOutcome::Ready { found, fetched: false },
                Published::Full => FetchOutcome::Busy(BusyReason::Memory),
            };
            self.set(want.position, outcome);
        }
    }

    pub(super) fn finished(self) -> Fetched {
        Fetched {
            id: self.request.id,
            node: self.request.node,
            outcomes: self.outcomes,
            load: Load::default(),
            suspended: None,
        }
    }
}
