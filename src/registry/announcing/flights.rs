//! The batches under way, and up to where they are settled.
//!
//! A batch is settled when it and all before it were answered. After a failure nothing new starts until
//! every batch under way has ended, one way or the other; then all are settled at once, and what was
//! not answered waits again.

use std::collections::VecDeque;

use super::pending::{Change, Pending};
use crate::registry::fault::{self, Fault};

#[derive(Debug)]
struct Flight {
    sequence: u64,
    /// The registration that it belongs to: what another one was told is void.
    registration: u64,
    batch: Vec<Change>,
    /// Whether it was answered; `None` while it is under way.
    answered: Option<bool>,
}

/// The batches under way.
#[derive(Debug, Default)]
pub(super) struct Flights {
    flights: VecDeque<Flight>,
    /// The last sequence.
    last: u64,
    failed: bool,
}

impl Flights {
    /// The number of the next batch.
    pub(super) const fn next(&self) -> u64 {
        self.last + 1
    }

    /// Up to where all are settled.
    pub(super) fn settled(&self) -> u64 {
        self.flights.front().map_or(self.last, |first| first.sequence - 1)
    }

    pub(super) fn len(&self) -> usize {
        self.flights.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Batch [`Self::next`] starts.
    pub(super) fn start(&mut self, registration: u64, batch: Vec<Change>) {
        self.last += 1;
        let flight = Flight { sequence: self.last, registration, batch, answered: None };
        self.flights.push_back(flight);
    }

    /// A batch ended; settles what can be. `registration` is the one that counts now.
    pub(super) fn end(
        &mut self,
        sequence: u64,
        answered: bool,
        registration: u64,
        pending: &mut Pending,
    ) {
        if let Some(flight) = self.flights.iter_mut().find(|flight| flight.sequence == sequence) {
            flight.answered = Some(answered);
        }
        self.failed |= !answered;
        if self.failed {
            if self.flights.iter().all(|flight| flight.answered.is_some()) {
                self.failed = false;
                while let Some(flight) = self.flights.pop_back() {
                    settle(flight, registration, pending);
                }
                pending.sort();
            }
            return;
        }
        while self.flights.front().is_some_and(|flight| flight.answered.is_some()) {
            if let Some(flight) = self.flights.pop_front() {
                settle(flight, registration, pending);
            }
        }
    }

    /// No answer will come any more.
    pub(super) fn abandon(&mut self, registration: u64, pending: &mut Pending) {
        let open = self.flights.iter().filter(|flight| flight.answered.is_none());
        let open: Vec<u64> = open.map(|flight| flight.sequence).collect();
        for sequence in open {
            self.end(sequence, false, registration, pending);
        }
    }
}

fn settle(flight: Flight, registration: u64, pending: &mut Pending) {
    let is_told = flight.answered == Some(true) && flight.registration == registration;
    if is_told || fault::is(Fault::UnansweredTold) {
        pending.told(flight.sequence, &flight.batch);
    } else {
        pending.untold(flight.sequence, &flight.batch);
        pending.sort();
    }
}
