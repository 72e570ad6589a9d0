//! Latencies, and the four numbers that stand for them.

use std::time::Duration;

use hdrhistogram::Histogram;
use hdrhistogram::errors::AdditionError;

use crate::cli::CliError;

/// A histogram of times, in nanoseconds with three significant digits.
#[derive(Debug, Clone)]
pub(super) struct Latency(Histogram<u64>);

impl Latency {
    /// The longest that is told apart.
    const LONGEST: Duration = Duration::from_secs(600);

    pub(super) fn new() -> Result<Self, CliError> {
        let longest = u64::try_from(Self::LONGEST.as_nanos()).unwrap_or(u64::MAX);
        Histogram::new_with_bounds(1, longest, 3).map(Self).map_err(CliError::failed)
    }

    pub(super) fn record(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(super) fn add(&mut self, other: &Self) -> Result<(), CliError> {
        self.0.add(&other.0).map_err(|error: AdditionError| CliError::failed(error))
    }

    /// How many were recorded.
    #[cfg(test)]
    fn count(&self) -> u64 {
        self.0.len()
    }

    /// The nanoseconds that this share of them took at most.
    pub(super) fn at(&self, share: f64) -> f64 {
        self.0.value_at_quantile(share) as f64
    }

    /// Median, 99th and 99.9th percentile and the longest, in nanoseconds.
    pub(super) fn percentiles(&self) -> [f64; 4] {
        [self.at(0.5), self.at(0.99), self.at(0.999), self.0.max() as f64]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_what_was_recorded() {
        let (mut one, mut other) = (Latency::new().unwrap(), Latency::new().unwrap());
        (1..=900).for_each(|micros| one.record(Duration::from_micros(micros)));
        (901..=1000).for_each(|micros| other.record(Duration::from_micros(micros)));
        one.add(&other).unwrap();
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 0.01, "{got} {want}");
        let [p50, p99, p999, max] = one.percentiles();
        near(p50, 500e3);
        near(p99, 990e3);
        near(p999, 999e3);
        near(max, 1000e3);
        assert_eq!(one.count(), 1000);
    }
}
