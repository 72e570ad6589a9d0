//! Commits: de-duplication of the requester, rank step and unpin as one step, which takes several
//! exchanges and is therefore announced by a ticket that anybody can bring to its end.

use super::claims::{Owned, Ticket};
use super::fault::{self, Fault};
use super::index::Index;
use super::placements::Debt;
use super::resident::{Committed, UnpinError};
use super::table::{Recency, Step, Table};
use super::word::{Flag, State, Word};
use crate::policy::RankEvent;
use crate::types::{EvictionRank, RequesterIndex, ResidentId};

/// What is decided of a commit where it is not the rank that a repeat gets.
const FIRST: u8 = u8::MAX;

impl Table {
    pub(super) fn commit(
        &self,
        claim: &Owned<'_>,
        id: ResidentId,
        requester: RequesterIndex,
    ) -> Result<(Committed, Option<Step>), UnpinError> {
        let entry = self.at(id.slot).ok_or(UnpinError::Stale)?;
        loop {
            let word = self.resolve(id).ok_or(UnpinError::Stale)?;
            if word.pins() == 0 {
                return Err(UnpinError::NotPinned);
            }
            let ticket = claim.say(word.0, u64::from(requester.0));
            let mark = Word::ticket(State::Serving, ticket);
            if !entry.replace(word, mark) {
                continue;
            }
            self.pay(self.serve(id.slot, ticket));
            let decision = self.claims.decide(ticket, FIRST).unwrap_or(FIRST);
            if decision != FIRST {
                let rank = EvictionRank::clamped(u32::from(decision));
                return Ok((Committed { rank, first: false }, None));
            }
            let (_, step) = self.after(word, RankEvent::Served);
            return Ok((Committed { rank: step.from, first: true }, Some(step)));
        }
    }

    /// Finishes a commit: decides whether it is the requester's first, remembers it, and moves the
    /// resident on. Nobody remembers before it is decided, so who decides sees what was before.
    pub(super) fn serve(&self, slot: u32, ticket: Ticket) -> Debt {
        let (Some(entry), Some(said)) = (self.at(slot), self.claims.read(ticket)) else {
            return Debt::NONE;
        };
        let mark = Word::ticket(State::Serving, ticket);
        let requester = RequesterIndex(u16::try_from(said.argument).unwrap_or(u16::MAX));
        let before = Word(said.word);
        let Some(requesters) = self.slots.requesters(slot) else {
            return Debt::NONE;
        };
        let generation = Index::generation(&self.slots, slot);
        let known = requesters.answer(generation, requester, &self.overflow);
        if entry.word() != mark {
            return Debt::NONE;
        }
        let mut decision = self.claims.decide(ticket, known.map_or(FIRST, EvictionRank::get));
        if fault::is(Fault::CommitUndecided) {
            decision = Some(known.map_or(FIRST, EvictionRank::get));
        }
        let Some(unpinned) = before.unpinned() else {
            return Debt::NONE;
        };
        let next = match decision {
            None => return Debt::NONE,
            Some(FIRST) => {
                let given = (requester, before.rank());
                let current = || entry.word() == mark;
                requesters.record(generation, given, &self.overflow, current);
                self.after(unpinned, RankEvent::Served).0.with(Flag::Served)
            }
            Some(_) => unpinned,
        };
        self.complete(slot, mark, Self::placing(before, next, Recency::Keep))
    }
}
