//! Processor time of processes.

use std::fs;
use std::ops::{Add, Sub};

use crate::cli::CliError;

/// Clock ticks of `/proc` in a second, on every Linux that runs this.
const TICKS: u64 = 100;

/// Processor time, of user and kernel, in microseconds. Counted in ticks of 10 ms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct CpuTime(u64);

impl CpuTime {
    pub(super) const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    pub(super) const fn as_micros(self) -> u64 {
        self.0
    }

    pub(super) fn seconds(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// What a process has used so far.
    pub(super) fn of(process: u32) -> Result<Self, CliError> {
        let text = fs::read_to_string(format!("/proc/{process}/stat"));
        let text = text.map_err(|error| CliError::failed(format!("process {process}: {error}")))?;
        // utime and stime are the 14th and 15th fields; the name, the second one, may have spaces.
        let rest = text.rsplit(')').next().unwrap_or_default();
        let fields = rest.split_whitespace().skip(11).take(2);
        let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(Self(ticks * 1_000_000 / TICKS))
    }

    /// What this process has used so far.
    pub(super) fn own() -> Result<Self, CliError> {
        Self::of(std::process::id())
    }
}

impl Add for CpuTime {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl Sub for CpuTime {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_time() {
        let before = CpuTime::own().unwrap();
        let mut sum = 0_u64;
        while (CpuTime::own().unwrap() - before).as_micros() < 30_000 {
            sum = std::hint::black_box((0..10_000).sum());
        }
        assert!(sum > 0);
        assert_eq!((before - CpuTime::own().unwrap()).seconds(), 0.0);
        assert!(CpuTime::of(0).is_err());
    }
}
