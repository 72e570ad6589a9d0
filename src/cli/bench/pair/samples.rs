//! What reads brought, and when.

use crate::cli::CliError;
use crate::cli::bench::latency::Latency;
use crate::types::Timestamp;

/// What became of the blocks of one read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub(in crate::cli::bench) struct Outcome {
    /// Blocks that came from the holder.
    pub(in crate::cli::bench) fetched: u64,
    /// Blocks that were at the reader.
    pub(in crate::cli::bench) hits: u64,
    pub(in crate::cli::bench) busy: u64,
    pub(in crate::cli::bench) not_found: u64,
    pub(in crate::cli::bench) failed: u64,
    /// Blocks with other bytes than were saved.
    pub(in crate::cli::bench) wrong: u64,
}

impl Outcome {
    /// Whether every block came.
    pub(in crate::cli::bench) const fn is_good(&self) -> bool {
        self.busy + self.not_found + self.failed + self.wrong == 0
    }

    fn add(&mut self, other: &Self) {
        let Self { fetched, hits, busy, not_found, failed, wrong } = other;
        self.fetched += fetched;
        self.hits += hits;
        self.busy += busy;
        self.not_found += not_found;
        self.failed += failed;
        self.wrong += wrong;
    }
}

/// One read of a batch.
#[derive(Debug, Clone, Copy)]
pub(in crate::cli::bench) struct Sample {
    pub(in crate::cli::bench) begun: Timestamp,
    pub(in crate::cli::bench) ended: Timestamp,
    pub(in crate::cli::bench) outcome: Outcome,
}

/// The reads that were under way at some moment of a span.
#[derive(Debug, Clone)]
pub(in crate::cli::bench) struct Window {
    pub(in crate::cli::bench) latency: Latency,
    pub(in crate::cli::bench) reads: u64,
    pub(in crate::cli::bench) outcome: Outcome,
}

impl Window {
    pub(in crate::cli::bench) fn of(
        samples: &[Sample],
        (from, to): (Timestamp, Timestamp),
    ) -> Result<Self, CliError> {
        let mut window = Self { latency: Latency::new()?, reads: 0, outcome: Outcome::default() };
        for sample in samples.iter().filter(|it| it.ended >= from && it.begun < to) {
            window.reads += 1;
            window.outcome.add(&sample.outcome);
            window.latency.record(sample.ended.since(sample.begun));
        }
        Ok(window)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_window_has_all_that_was_under_way_in_it() {
        let at = |millis| Timestamp::ZERO + Duration::from_millis(millis);
        let outcome = Outcome { fetched: 1, failed: 1, ..Outcome::default() };
        let sample = |begun, ended| Sample { begun: at(begun), ended: at(ended), outcome };
        let samples = [sample(0, 9), sample(5, 15), sample(12, 14), sample(15, 99), sample(20, 30)];
        let window = Window::of(&samples, (at(10), at(20))).unwrap();
        assert_eq!((window.reads, window.outcome.fetched, window.outcome.failed), (3, 3, 3));
        assert!((window.latency.at(1.0) / 84e6 - 1.0).abs() < 0.01);
        assert!(!outcome.is_good() && Outcome { hits: 3, ..Outcome::default() }.is_good());
    }
}
