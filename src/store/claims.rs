//! What a thread says about its own operation on a slot, so that any other can finish it.
//!
//! A claim belongs to one operation at a time. Its owner writes the word that it means to replace
//! and an argument, and then puts a [`Ticket`] into the slot's word: the claim's index and a number
//! that this claim never used before. Whoever meets the ticket reads the claim and then the word
//! again: while the word still holds the ticket, the owner has not gone on, so what was read belongs
//! to it. A ticket is never used twice, so an exchange that expects one cannot succeed late.

use super::fault::{self, Fault};
use crate::sync::{Apart, Cell, Shared};
use std::sync::atomic::{AtomicU64, Ordering};

const INDEX_BITS: u32 = if cfg!(any(test, shuttle)) { 4 } else { 10 };
/// Threads that may evict or commit at the same time, stopped ones included. One more waits.
const CLAIMS: u64 = 1 << INDEX_BITS;

/// Names one use of one claim, in 61 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ticket {
    index: u64,
    number: u64,
}

impl Ticket {
    pub(super) fn bits(self) -> u64 {
        self.number << INDEX_BITS | self.index
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        Self { index: bits & (CLAIMS - 1), number: bits >> INDEX_BITS }
    }
}

#[derive(Debug)]
struct Claim {
    taken: Cell,
    number: Cell,
    word: Cell,
    argument: Cell,
    /// The ticket's number and what was decided, in the low byte; 0 while nothing was.
    verdict: Cell,
}

#[derive(Debug)]
pub(super) struct Claims(Box<[Apart<Claim>]>);

/// Threads that have taken a claim so far.
static THREADS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Where this thread looks first, so that it finds its last claim free again, and cached.
    static START: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
}

/// A claim in the hands of its owner.
#[derive(Debug)]
pub(super) struct Owned<'a> {
    claim: &'a Claim,
    index: u64,
}

/// What a claim says, as read by anybody.
#[derive(Debug, Clone, Copy)]
pub(super) struct Said {
    pub(super) word: u64,
    pub(super) argument: u64,
}

const DECISION_BITS: u32 = 8;

impl Claims {
    pub(super) fn new() -> Self {
        let claim = || Claim {
            taken: Cell::new(0),
            number: Cell::new(0),
            word: Cell::new(0),
            argument: Cell::new(0),
            verdict: Cell::new(0),
        };
        Self((0..CLAIMS).map(|_| Apart(claim())).collect())
    }

    /// A claim that nobody uses.
    pub(super) fn take(&self) -> Owned<'_> {
        let mut at = START.with(|start| *start);
        loop {
            let index = at & (CLAIMS - 1);
            let claim = usize::try_from(index).ok().and_then(|index| self.0.get(index));
            if let Some(claim) = claim
                && claim.taken.get() == 0
                && claim.taken.replace(0, 1)
            {
                return Owned { claim, index };
            }
            at = at.wrapping_add(1);
        }
    }

    fn at(&self, ticket: Ticket) -> Option<&Claim> {
        self.0.get(usize::try_from(ticket.index).ok()?).map(|claim| &claim.0)
    }

    /// What the ticket's claim says; to be believed where the slot's word holds the ticket after.
    pub(super) fn read(&self, ticket: Ticket) -> Option<Said> {
        let claim = self.at(ticket)?;
        Some(Said { word: claim.word.get(), argument: claim.argument.get() })
    }

    /// Decides for the ticket, unless somebody did before, and answers what was decided. `None`
    /// where the ticket is over.
    pub(super) fn decide(&self, ticket: Ticket, decision: u8) -> Option<u8> {
        let claim = self.at(ticket)?;
        let open = ticket.number << DECISION_BITS;
        claim.verdict.replace(open, open | u64::from(decision));
        let verdict = claim.verdict.get();
        let byte = u8::try_from(verdict & 0xff).ok()?;
        (verdict >> DECISION_BITS == ticket.number && byte > 0).then_some(byte)
    }
}

impl Owned<'_> {
    /// Says it, under a new ticket.
    pub(super) fn say(&self, word: u64, argument: u64) -> Ticket {
        let number = self.claim.number.get() + u64::from(!fault::is(Fault::TicketRepeated));
        self.claim.number.publish(number);
        self.claim.word.publish(word);
        self.claim.argument.publish(argument);
        self.claim.verdict.publish(number << DECISION_BITS);
        Ticket { index: self.index, number }
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        self.claim.taken.publish(0);
    }
}
