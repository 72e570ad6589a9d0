//! The source of all chance in a simulation.

use std::ops::RangeInclusive;
use std::time::Duration;

/// SplitMix64 (Steele, Lea, Flood 2014): one seed, one sequence, on every machine.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// The next number below `bound`, which is not 0.
    pub const fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// A span within the range; its start where the range is empty.
    pub(super) fn between(&mut self, range: &RangeInclusive<Duration>) -> Duration {
        let nanos = |span: &Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let (start, end) = (nanos(range.start()), nanos(range.end()));
        let width = end.saturating_sub(start).saturating_add(1);
        Duration::from_nanos(start.saturating_add(self.below(width)))
    }
}
