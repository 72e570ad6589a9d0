//! The table itself.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::book::{Book, Slot, State};
use super::chain::{Chain, Ends};
use super::{
    Borrower, Completed, Completion, Draft, LeaseConfig, LeaseConfigError, QuotaError, Residents,
    Usage,
};
use crate::event::{Event, EventSink, LeaseEnd, LendRefusal};
use crate::types::{LeaseId, NodeEpoch, RequesterIndex, ResidentId, Timestamp};

/// The leases of one holder. Owned by one thread.
#[derive(Debug)]
pub struct LeaseTable {
    config: LeaseConfig,
    /// Bytes that come on top of each requester's quota.
    in_place: u64,
    sink: Arc<dyn EventSink>,
    book: Book,
    by_deadline: Chain,
    /// Live leases, the next to expire first.
    live: Ends,
    /// Requesters with leases that are due and not yet being cut.
    cuts: VecDeque<RequesterIndex>,
}

impl LeaseTable {
    /// An empty table.
    ///
    /// # Errors
    /// [`LeaseConfigError`] for limits that make no sense.
    pub fn new(config: LeaseConfig, sink: Arc<dyn EventSink>) -> Result<Self, LeaseConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            in_place: 0,
            sink,
            book: Book::default(),
            by_deadline: Chain::default(),
            live: Ends::EMPTY,
            cuts: VecDeque::new(),
        })
    }

    /// How long a lease lasts from its grant or renewal.
    #[must_use]
    pub const fn ttl(&self) -> Duration {
        self.config.ttl
    }

    /// What one requester holds.
    #[must_use]
    pub fn usage(&self, requester: RequesterIndex) -> Usage {
        let account = self.book.account(requester);
        account.map_or_else(Usage::default, |account| account.usage)
    }

    /// The limits that it keeps.
    #[must_use]
    pub const fn config(&self) -> LeaseConfig {
        self.config
    }

    /// How many bytes a requester may hold beside its quota, of blocks in engines' memory. In the node's
    /// own it holds no more than the quota, so that what engines open lets nobody pin more of the pools.
    /// Leases that are out stay where this becomes less, and new ones wait.
    pub const fn set_in_place_quota(&mut self, bytes: u64) {
        self.in_place = bytes;
    }

    /// What each requester holds that holds anything.
    pub fn usages(&self) -> impl Iterator<Item = (RequesterIndex, Usage)> {
        self.book
            .accounts()
            .map(|(requester, account)| (requester, account.usage))
            .filter(|(_, usage)| *usage != Usage::default())
    }

    /// What all requesters hold.
    #[must_use]
    pub const fn totals(&self) -> Usage {
        self.book.totals
    }

    /// Opens the lease of a request for so many blocks.
    ///
    /// # Errors
    /// [`QuotaError`] where the requester or the table has too many leases, or the request too
    /// many blocks.
    pub fn draft<'a, R: Residents + ?Sized>(
        &'a mut self,
        borrower: Borrower,
        blocks: usize,
        residents: &'a R,
    ) -> Result<Draft<'a, R>, QuotaError> {
        match self.book.open(borrower, blocks, &self.config) {
            Ok(slot) => Ok(Draft::new(self, residents, slot)),
            Err(error) => {
                self.emit_refused(error.refusal(), blocks as u64);
                Err(error)
            }
        }
    }

    /// Gives the lease another full period from now, and says how long that is. `None` where the
    /// borrower has no such lease, or its deadline was acted on.
    pub fn renew(
        &mut self,
        lease: LeaseId,
        borrower: Borrower,
        now: Timestamp,
    ) -> Option<Duration> {
        let slot = self.find_live(lease, borrower)?;
        self.by_deadline.remove(&mut self.live, slot);
        self.enqueue(slot, now);
        Some(self.config.ttl)
    }

    /// Moves the deadlines of all leases on, which keeps their order: for a holder that could not
    /// hear its requesters.
    pub fn extend_all(&mut self, by: Duration) {
        let mut at = self.live.first();
        while let Some(slot) = at {
            at = self.by_deadline.next(slot);
            if let Some(lease) = self.book.slot_mut(slot) {
                lease.deadline = lease.deadline + by;
            }
        }
    }

    /// Ends a lease as its reader says: good blocks are committed, the others unpinned. `ranks` is
    /// replaced by one rank per position, the rank before the step, 0 for none; it is empty unless
    /// the completion was recorded or replayed.
    pub fn complete<R: Residents + ?Sized>(
        &mut self,
        completion: &Completion<'_>,
        residents: &R,
        ranks: &mut Vec<u8>,
    ) -> Completed {
        ranks.clear();
        let answer = match self.find_live(completion.lease, completion.borrower) {
            Some(slot) if self.fits(slot, completion) => {
                self.record(slot, completion, residents, ranks);
                Completed::Recorded
            }
            Some(_) => Completed::WrongShape,
            None => self.replay(completion, ranks),
        };
        match answer {
            Completed::Recorded => {}
            Completed::Replayed => self.sink.emit(Event::CompletionReplayed),
            Completed::Unknown | Completed::WrongShape => {
                self.sink.emit(Event::CompletionRefused);
            }
        }
        answer
    }

    /// Ends a lease that its requester gives back unread. Says whether there was one.
    pub fn abort<R: Residents + ?Sized>(
        &mut self,
        lease: LeaseId,
        borrower: Borrower,
        residents: &R,
    ) -> bool {
        let slot = self.find_live(lease, borrower);
        if let Some(slot) = slot {
            self.end(slot, LeaseEnd::Aborted, residents);
        }
        slot.is_some()
    }

    /// Ends all leases that the requester holds and that are not being cut: it says that it reads
    /// none of them.
    pub fn abort_all<R: Residents + ?Sized>(&mut self, requester: RequesterIndex, residents: &R) {
        self.end_where(requester, LeaseEnd::Aborted, residents, |lease| {
            matches!(lease.state, State::Live | State::Due)
        });
    }

    /// Ends all leases of the requester's other starts. The caller has closed every connection of
    /// those starts: they read no more.
    pub fn supersede<R: Residents + ?Sized>(
        &mut self,
        requester: RequesterIndex,
        epoch: NodeEpoch,
        residents: &R,
    ) {
        self.end_where(requester, LeaseEnd::Superseded, residents, |lease| {
            lease.borrower.epoch != epoch
        });
    }

    /// When [`LeaseTable::poll_cut`] has something to say next.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        if !self.cuts.is_empty() {
            return Some(Timestamp::ZERO);
        }
        let first = self.live.first()?;
        self.book.slot(first).map(|lease| lease.deadline)
    }

    /// Names a requester whose leases have expired: cut its access, then say so by
    /// [`LeaseTable::handle_cut`]. Call until it is `None`. A requester that is being cut is not
    /// named again before that.
    pub fn poll_cut(&mut self, now: Timestamp) -> Option<RequesterIndex> {
        while let Some(slot) = self.first_due(now) {
            self.fall_due(slot);
        }
        while let Some(requester) = self.cuts.pop_front() {
            // What was due may have ended since, by a later start of the requester, which would
            // be cut off for nothing.
            let cutting = self.book.advance(requester, State::Due, State::Cutting);
            if let Some(account) = self.book.account_mut(requester) {
                account.queued = false;
                account.cutting = cutting;
            }
            if cutting {
                return Some(requester);
            }
        }
        None
    }

    /// Whether a lease lends any of the residents that `which` picks.
    pub fn lends(&self, lease: LeaseId, which: impl Fn(ResidentId) -> bool) -> bool {
        let found = slot_of(lease).and_then(|slot| Some((slot, self.book.slot(slot)?)));
        found.is_some_and(|(slot, it)| {
            it.id(slot) == lease && it.loans.iter().flatten().any(|loan| which(*loan))
        })
    }

    /// Leases that lend any of the residents that `which` picks have expired, whatever their deadline:
    /// [`LeaseTable::poll_cut`] names their requesters. Looks at every loan that is out.
    pub fn expire_where(&mut self, which: impl Fn(ResidentId) -> bool) {
        let mut at = self.live.first();
        while let Some(slot) = at {
            at = self.by_deadline.next(slot);
            let lease = self.book.slot(slot);
            if lease.is_some_and(|it| it.loans.iter().flatten().any(|loan| which(*loan))) {
                self.fall_due(slot);
            }
        }
    }

    /// The leases for whose expiry a requester is being cut.
    pub fn cutting(&self, requester: RequesterIndex) -> impl Iterator<Item = LeaseId> + '_ {
        let slots =
            std::iter::successors(self.book.first_of(requester), |slot| self.book.next_of(*slot));
        slots.filter_map(|slot| {
            let lease = self.book.slot(slot).filter(|lease| lease.state == State::Cutting)?;
            Some(lease.id(slot))
        })
    }

    /// The requester that [`LeaseTable::poll_cut`] named can read nothing more: its expired leases
    /// end.
    pub fn handle_cut<R: Residents + ?Sized>(&mut self, requester: RequesterIndex, residents: &R) {
        self.end_where(requester, LeaseEnd::Expired, residents, |lease| {
            lease.state == State::Cutting
        });
        if let Some(account) = self.book.account_mut(requester) {
            account.cutting = false;
        }
        // Leases that became due meanwhile may have been granted on a connection made after the
        // cut: they need a cut of their own.
        if self.book.any(requester, State::Due) {
            self.queue_cut(requester);
        }
    }

    pub(super) fn lend(
        &mut self,
        slot: u32,
        resident: ResidentId,
        bytes: (u64, u64),
    ) -> Result<(), QuotaError> {
        let own = self.config.bytes_per_requester;
        let limits = (own.saturating_add(self.in_place), own);
        let lent = self.book.lend(slot, resident, bytes, limits);
        if lent.is_err() {
            self.book.skip(slot);
            self.emit_refused(LendRefusal::Quota, 1);
        }
        lent
    }

    pub(super) fn skip(&mut self, slot: u32) {
        self.book.skip(slot);
    }

    pub(super) fn grant(&mut self, slot: u32, now: Timestamp) -> LeaseId {
        let Some(lease) = self.book.slot_mut(slot) else {
            return LeaseId::NONE;
        };
        if lease.blocks == 0 {
            self.book.release(slot);
            return LeaseId::NONE;
        }
        lease.state = State::Live;
        let id = lease.id(slot);
        let granted = Event::LeaseGranted {
            requester: lease.borrower.requester,
            blocks: lease.blocks,
            bytes: lease.bytes,
        };
        self.enqueue(slot, now);
        self.sink.emit(granted);
        id
    }

    pub(super) fn cancel<R: Residents + ?Sized>(&mut self, slot: u32, residents: &R) {
        self.book.unpin_all(slot, residents);
        self.book.release(slot);
    }

    /// Puts a lease at the end of the expiry queue. Where the caller's time has gone backwards, it
    /// may expire as late as the lease ahead of it, never early.
    fn enqueue(&mut self, slot: u32, now: Timestamp) {
        let deadline = now + self.config.ttl;
        if let Some(lease) = self.book.slot_mut(slot) {
            lease.deadline = deadline;
            self.by_deadline.push_back(&mut self.live, slot);
        }
    }

    fn first_due(&self, now: Timestamp) -> Option<u32> {
        let first = self.live.first()?;
        let lease = self.book.slot(first)?;
        (lease.deadline <= now).then_some(first)
    }

    /// The time of a live lease is over.
    fn fall_due(&mut self, slot: u32) {
        self.by_deadline.remove(&mut self.live, slot);
        if let Some(lease) = self.book.slot_mut(slot) {
            lease.state = State::Due;
            let requester = lease.borrower.requester;
            self.queue_cut(requester);
        }
    }

    fn queue_cut(&mut self, requester: RequesterIndex) {
        if let Some(account) = self.book.account_mut(requester)
            && !account.queued
            && !account.cutting
        {
            account.queued = true;
            self.cuts.push_back(requester);
        }
    }

    /// The slot of a live lease of this borrower.
    fn find_live(&self, lease: LeaseId, borrower: Borrower) -> Option<u32> {
        let slot = slot_of(lease)?;
        let found = self.book.slot(slot)?;
        let is_it =
            found.state == State::Live && found.id(slot) == lease && found.borrower == borrower;
        is_it.then_some(slot)
    }

    /// Whether a completion has one bit for each position, and none set where nothing was lent.
    fn fits(&self, slot: u32, completion: &Completion<'_>) -> bool {
        let Some(lease) = self.book.slot(slot) else {
            return false;
        };
        let positions = lease.loans.len();
        let claims_lent = |(position, loan): (usize, &Option<ResidentId>)| {
            loan.is_some() || !completion.is_good(position)
        };
        usize::from(completion.count) == positions
            && completion.bitmap.len() == positions.div_ceil(8)
            && (positions..completion.bitmap.len() * 8).all(|bit| !completion.is_good(bit))
            && lease.loans.iter().enumerate().all(claims_lent)
    }

    fn record<R: Residents + ?Sized>(
        &mut self,
        slot: u32,
        completion: &Completion<'_>,
        residents: &R,
        ranks: &mut Vec<u8>,
    ) {
        let Borrower { requester, epoch } = completion.borrower;
        let Some(lease) = self.book.slot_mut(slot) else {
            return;
        };
        // Leaf first, as every batch is processed, so that a prefix's root is the last to go.
        for (position, loan) in lease.loans.drain(..).enumerate().rev() {
            let rank = match loan {
                Some(resident) if completion.is_good(position) => {
                    residents.commit(resident, requester)
                }
                Some(resident) => {
                    residents.unpin(resident);
                    None
                }
                None => None,
            };
            ranks.push(rank.map_or(0, |rank| rank.get()));
        }
        ranks.reverse();
        if let Some(account) = self.book.account_mut(requester) {
            account.ended.remember(completion.lease, epoch, ranks);
        }
        self.end(slot, LeaseEnd::Completed, residents);
    }

    fn replay(&self, completion: &Completion<'_>, ranks: &mut Vec<u8>) -> Completed {
        let Borrower { requester, epoch } = completion.borrower;
        let account = self.book.account(requester);
        let answer = account.and_then(|account| account.ended.recall(completion.lease, epoch));
        match answer {
            Some(answer) if answer.len() == usize::from(completion.count) => {
                ranks.extend(answer);
                Completed::Replayed
            }
            Some(_) => Completed::WrongShape,
            None => Completed::Unknown,
        }
    }

    /// Ends those of a requester's leases that `which` picks.
    fn end_where<R: Residents + ?Sized>(
        &mut self,
        requester: RequesterIndex,
        how: LeaseEnd,
        residents: &R,
        which: impl Fn(&Slot) -> bool,
    ) {
        let mut at = self.book.first_of(requester);
        while let Some(slot) = at {
            at = self.book.next_of(slot);
            if self.book.slot(slot).is_some_and(&which) {
                self.end(slot, how, residents);
            }
        }
    }

    /// Ends a granted lease; the pins that it still owns are given back.
    fn end<R: Residents + ?Sized>(&mut self, slot: u32, how: LeaseEnd, residents: &R) {
        self.book.unpin_all(slot, residents);
        let Some(lease) = self.book.slot(slot) else {
            return;
        };
        let ended = Event::LeaseEnded {
            requester: lease.borrower.requester,
            end: how,
            blocks: lease.blocks,
            bytes: lease.bytes,
        };
        if lease.state == State::Live {
            self.by_deadline.remove(&mut self.live, slot);
        }
        self.book.release(slot);
        self.sink.emit(ended);
    }

    fn emit_refused(&self, reason: LendRefusal, blocks: u64) {
        self.sink.emit(Event::LendRefused { reason, blocks });
    }
}

fn slot_of(lease: LeaseId) -> Option<u32> {
    u32::try_from(lease.0 & u64::from(u32::MAX)).ok()
}
