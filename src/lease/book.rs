//! Which slots there are, whose they are, and what that adds up to.

use super::chain::{Chain, Ends};
use super::ended::Ended;
use super::{Borrower, LeaseConfig, QuotaError, Residents, Usage};
use crate::limits;
use crate::types::{LeaseId, RequesterIndex, ResidentId, Timestamp};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// In the free list, or retired.
    Free,
    /// Its draft is open.
    Draft,
    /// Granted; the only state in which it is renewed or completed.
    Live,
    /// Its deadline has passed; its requester waits to be cut.
    Due,
    /// Its requester is being cut.
    Cutting,
}

/// One lease, or the storage of one. `loans` keeps its memory when the lease ends.
#[derive(Debug)]
pub(super) struct Slot {
    /// Which lease of this slot; with the slot's number it makes the id.
    generation: u32,
    pub(super) state: State,
    pub(super) borrower: Borrower,
    pub(super) deadline: Timestamp,
    /// One per position of the request.
    pub(super) loans: Vec<Option<ResidentId>>,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    own_bytes: u64,
}

impl Slot {
    pub(super) const fn id(&self, slot: u32) -> LeaseId {
        LeaseId((self.generation as u64) << 32 | slot as u64)
    }
}

/// What belongs to one requester.
#[derive(Debug)]
pub(super) struct Account {
    pub(super) usage: Usage,
    /// Its slots.
    slots: Ends,
    /// Whether it is in the queue of requesters to cut.
    pub(super) queued: bool,
    /// Whether it is being cut. It is not queued meanwhile.
    pub(super) cutting: bool,
    pub(super) ended: Ended,
}

/// Slots and accounts.
#[derive(Debug, Default)]
pub(super) struct Book {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// By requester number.
    accounts: Vec<Account>,
    by_requester: Chain,
    pub(super) totals: Usage,
}

impl Book {
    pub(super) fn slot(&self, slot: u32) -> Option<&Slot> {
        self.slots.get(slot as usize)
    }

    pub(super) fn slot_mut(&mut self, slot: u32) -> Option<&mut Slot> {
        self.slots.get_mut(slot as usize)
    }

    pub(super) fn account(&self, requester: RequesterIndex) -> Option<&Account> {
        self.accounts.get(usize::from(requester.0))
    }

    pub(super) fn account_mut(&mut self, requester: RequesterIndex) -> Option<&mut Account> {
        self.accounts.get_mut(usize::from(requester.0))
    }

    pub(super) fn accounts(&self) -> impl Iterator<Item = (RequesterIndex, &Account)> {
        let numbers = (0..=u16::MAX).map(RequesterIndex);
        numbers.zip(&self.accounts)
    }

    /// The slots of one requester, in the order of their requests. A slot may be released while
    /// it is the current one: [`Book::next_of`] is asked first.
    pub(super) fn first_of(&self, requester: RequesterIndex) -> Option<u32> {
        self.account(requester)?.slots.first()
    }

    /// See [`Book::first_of`].
    pub(super) fn next_of(&self, slot: u32) -> Option<u32> {
        self.by_requester.next(slot)
    }

    /// Moves the requester's slots of one state to another; says whether there were any.
    pub(super) fn advance(&mut self, requester: RequesterIndex, from: State, to: State) -> bool {
        let mut any = false;
        let mut at = self.first_of(requester);
        while let Some(slot) = at {
            at = self.next_of(slot);
            if let Some(lease) = self.slot_mut(slot)
                && lease.state == from
            {
                lease.state = to;
                any = true;
            }
        }
        any
    }

    /// Whether any of the requester's slots is in this state.
    pub(super) fn any(&self, requester: RequesterIndex, state: State) -> bool {
        std::iter::successors(self.first_of(requester), |slot| self.next_of(*slot))
            .filter_map(|slot| self.slot(slot))
            .any(|lease| lease.state == state)
    }

    /// Takes a slot for the draft of a request for so many blocks.
    pub(super) fn open(
        &mut self,
        borrower: Borrower,
        blocks: usize,
        config: &LeaseConfig,
    ) -> Result<u32, QuotaError> {
        if blocks > limits::LEND_BLOCKS_MAX {
            let limit = limits::LEND_BLOCKS_MAX;
            return Err(QuotaError::Blocks { limit });
        }
        let index = usize::from(borrower.requester.0);
        if index >= limits::REQUESTERS_MAX {
            let limit = limits::REQUESTERS_MAX;
            return Err(QuotaError::Requester { limit });
        }
        while self.accounts.len() <= index {
            self.accounts.push(Account {
                usage: Usage::default(),
                slots: Ends::EMPTY,
                queued: false,
                cutting: false,
                ended: Ended::default(),
            });
        }
        let limit = config.leases_per_requester;
        let usage = self.account(borrower.requester).map(|it| it.usage);
        if usage.is_some_and(|usage| usage.leases >= u64::from(limit)) {
            return Err(QuotaError::Leases { limit });
        }
        let slot = self.vacant(borrower, config.leases_total)?;
        if let Some(lease) = self.slots.get_mut(slot as usize) {
            lease.state = State::Draft;
            lease.borrower = borrower;
        }
        if let Some(account) = self.accounts.get_mut(index) {
            self.by_requester.push_back(&mut account.slots, slot);
            account.usage.leases += 1;
            self.totals.leases += 1;
        }
        Ok(slot)
    }

    /// A free slot, a new one where there is none.
    fn vacant(&mut self, borrower: Borrower, limit: usize) -> Result<u32, QuotaError> {
        if let Some(slot) = self.free.pop() {
            return Ok(slot);
        }
        let full = QuotaError::Table { limit };
        if self.slots.len() >= limit {
            return Err(full);
        }
        let slot = u32::try_from(self.slots.len()).map_err(|_many| full)?;
        self.slots.push(Slot {
            generation: 1,
            state: State::Free,
            borrower,
            deadline: Timestamp::ZERO,
            loans: Vec::new(),
            blocks: 0,
            bytes: 0,
            own_bytes: 0,
        });
        Ok(slot)
    }

    /// Gives the next position of a draft to a pinned block: of so many bytes, so many of them in the
    /// node's own memory; `limits` are a requester's for each of the two sums.
    pub(super) fn lend(
        &mut self,
        slot: u32,
        resident: ResidentId,
        (bytes, own): (u64, u64),
        limits: (u64, u64),
    ) -> Result<(), QuotaError> {
        let limit = limits::LEND_BLOCKS_MAX;
        let full = QuotaError::Blocks { limit };
        let lease = self.slots.get_mut(slot as usize).ok_or(full)?;
        if lease.loans.len() >= limit {
            return Err(full);
        }
        let index = usize::from(lease.borrower.requester.0);
        let account = self.accounts.get_mut(index).ok_or(full)?;
        let usage = account.usage;
        for (held, more, limit) in
            [(usage.bytes, bytes, limits.0), (usage.own_bytes, own, limits.1)]
        {
            // Where nothing is added to a sum it does not matter how large it is.
            if more > 0 && held.checked_add(more).is_none_or(|sum| sum > limit) {
                return Err(QuotaError::Bytes { limit });
            }
        }
        lease.loans.push(Some(resident));
        lease.blocks += 1;
        lease.bytes += bytes;
        lease.own_bytes += own;
        for usage in [&mut account.usage, &mut self.totals] {
            usage.blocks += 1;
            usage.bytes += bytes;
            usage.own_bytes += own;
        }
        Ok(())
    }

    /// Leaves the next position of a draft empty.
    pub(super) fn skip(&mut self, slot: u32) {
        if let Some(lease) = self.slots.get_mut(slot as usize)
            && lease.loans.len() < limits::LEND_BLOCKS_MAX
        {
            lease.loans.push(None);
        }
    }

    /// Gives back all pins that a slot still owns.
    pub(super) fn unpin_all<R: Residents + ?Sized>(&mut self, slot: u32, residents: &R) {
        if let Some(lease) = self.slots.get_mut(slot as usize) {
            lease.loans.drain(..).rev().flatten().for_each(|resident| residents.unpin(resident));
        }
    }

    /// Returns a slot that owns no pin and is in no expiry queue. Its id never names a lease again.
    pub(super) fn release(&mut self, slot: u32) {
        let Some(lease) = self.slots.get_mut(slot as usize) else {
            return;
        };
        debug_assert!(lease.loans.iter().all(Option::is_none), "a pin was lost");
        let index = usize::from(lease.borrower.requester.0);
        if let Some(account) = self.accounts.get_mut(index) {
            self.by_requester.remove(&mut account.slots, slot);
            for usage in [&mut account.usage, &mut self.totals] {
                usage.leases -= 1;
                usage.blocks -= lease.blocks;
                usage.bytes -= lease.bytes;
                usage.own_bytes -= lease.own_bytes;
            }
        }
        lease.state = State::Free;
        lease.loans.clear();
        lease.blocks = 0;
        lease.bytes = 0;
        lease.own_bytes = 0;
        // A slot whose generations are used up is retired, so that no id comes back.
        if let Some(next) = lease.generation.checked_add(1) {
            lease.generation = next;
            self.free.push(slot);
        }
    }
}
