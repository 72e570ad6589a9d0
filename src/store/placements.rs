//! Placements: what was announced is taken to its end, by an append and an exchange, and whoever made a log
//! longer by that pays for it.

use super::fault::{self, Fault};
use super::log::{Appended, List, Placed, Worth};
use super::table::Table;
use super::word::{State, Word};
use crate::types::EvictionRank;

/// Sweeps that are owed for chunks that logs grew by, beside those within the appends ([`Table::pay`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub(super) struct Debt(u32);

impl Debt {
    pub(super) const NONE: Self = Self(0);

    const fn and(self, more: Self) -> Self {
        Self(self.0 + more.0)
    }
}

impl Table {
    /// The word of a slot on which no operation is under way: finishes the ones that are.
    pub(super) fn settled(&self, slot: u32) -> Word {
        let (word, debt) = self.settle(slot);
        self.pay(debt);
        word
    }

    fn settle(&self, slot: u32) -> (Word, Debt) {
        let mut debt = Debt::NONE;
        let Some(entry) = self.at(slot) else {
            return (Word::FREE, debt);
        };
        loop {
            let word = entry.word();
            debt = debt.and(match word.state() {
                State::Placing => self.place(slot, word),
                State::Serving => self.serve(slot, word.as_ticket()),
                State::Claimed => {
                    self.judge(slot, word.as_ticket());
                    Debt::NONE
                }
                State::Arriving if fault::is(Fault::ArrivalByAnybody) => self.arrive(slot, word),
                State::Free | State::Arriving | State::Live | State::Evicted => {
                    return (word, debt);
                }
            });
        }
    }

    /// Sweeps for what the logs grew by, behind the exchanges that it was for. As long as a slot's
    /// operation is under way all its earlier places are undecided; so whoever sweeps finishes what it
    /// meets, and finds of any slot one place that counts, and those of the touches under way. Otherwise
    /// the logs of a slot that is placed over and over, while nothing else is, would have nothing but
    /// undecided places in them in the end, and no room.
    pub(super) fn pay(&self, mut debt: Debt) {
        while let Some(rest) = debt.0.checked_sub(1) {
            let more = std::cell::Cell::new(Debt(rest));
            self.logs.sweep(&|placed: Placed| {
                let (word, owed) = self.settle(placed.slot);
                more.set(more.get().and(owed));
                self.worth_by(placed, word)
            });
            debt = more.get();
        }
    }

    /// Finishes a placement.
    pub(super) fn place(&self, slot: u32, word: Word) -> Debt {
        self.complete(slot, word, word)
    }

    /// Takes what `announced` says to its end, which is `next`, placed where it is to be placed.
    /// Whoever does it appends anew: at an entry that it came across, the resident would be at an old
    /// place.
    pub(super) fn complete(&self, slot: u32, announced: Word, next: Word) -> Debt {
        let Some(entry) = self.at(slot).filter(|entry| entry.word() == announced) else {
            return Debt::NONE;
        };
        if next.state() != State::Placing {
            entry.replace(announced, next);
            return Debt::NONE;
        }
        // Of another tenancy only where the exchange below fails.
        let list = List { kind: entry.kind(), rank: next.rank() };
        let (position, debt) = self.append(list, slot);
        if list.rank > EvictionRank::FIRST {
            self.guard.raise(list);
        }
        entry.replace(announced, next.placed_at(position));
        debt
    }

    pub(super) fn append(&self, list: List, slot: u32) -> (u64, Debt) {
        let Appended { position, owes } =
            self.logs.append(list, slot, &|placed| self.worth(placed));
        let owes = owes && !fault::is(Fault::PaidEarly);
        (position, Debt(u32::from(owes)))
    }

    /// What an entry is worth, without a helping hand.
    fn worth(&self, placed: Placed) -> Worth {
        self.at(placed.slot).map_or(Worth::Garbage, |entry| self.worth_by(placed, entry.word()))
    }

    /// What an entry is worth by the word that its slot had after the entry was read. What is garbage by
    /// one word is so by all later ones.
    fn worth_by(&self, placed: Placed, word: Word) -> Worth {
        let Placed { list, slot, position } = placed;
        let is_of_kind = || self.at(slot).is_some_and(|entry| entry.kind() == list.kind);
        match word {
            word if word.is_at(position) => Worth::Counts(word),
            word if word.is_pending() => Worth::Undecided,
            // A tenancy never changes its kind, so an append for another kind was an earlier one's.
            word if word.is_before(list.rank, position) && is_of_kind() => {
                if fault::is(Fault::TouchForgotten) { Worth::Garbage } else { Worth::Undecided }
            }
            _ => Worth::Garbage,
        }
    }

    /// What an entry is worth once nothing that was announced is under way.
    pub(super) fn settled_worth(&self, placed: Placed) -> Worth {
        let Placed { slot, position, .. } = placed;
        if fault::is(Fault::PendingSkipped)
            && self.at(slot).is_some_and(|it| it.word().is_pending())
        {
            return Worth::Garbage;
        }
        if fault::is(Fault::PlacedWhereMet)
            && let Some(entry) = self.at(slot)
            && let word = entry.word()
            && word.state() == State::Placing
        {
            entry.replace(word, word.placed_at(position));
        }
        self.settled(slot);
        self.worth(placed)
    }

    /// Takes a slot that is in its chain on to where operations find it.
    pub(super) fn arrive(&self, slot: u32, word: Word) -> Debt {
        let Some(entry) = self.at(slot) else {
            return Debt::NONE;
        };
        let state = if word.pins() == 0 { State::Placing } else { State::Live };
        let next = word.with_state(state);
        entry.replace(word, next);
        if state == State::Placing { self.place(slot, next) } else { Debt::NONE }
    }
}
