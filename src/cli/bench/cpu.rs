//! Processor time of processes and of their threads.

use std::fs;
use std::ops::{Add, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cli::CliError;
use crate::sys::clock;
use crate::sys::process;

/// Processor time, of user and kernel, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct CpuTime(u64);

impl CpuTime {
    fn from_duration(time: Duration) -> Self {
        Self(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    }

    pub(super) fn seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// What a process has used so far.
    pub(super) fn of(process: u32) -> Result<Self, CliError> {
        let failed = |error| CliError::failed(format!("process {process}: {error}"));
        process::processor_time(process).map(Self::from_duration).map_err(failed)
    }

    /// What this process has used so far.
    pub(super) fn own() -> Result<Self, CliError> {
        Self::of(std::process::id())
    }

    /// What the calling thread has used so far.
    pub(super) fn of_thread() -> Self {
        Self::from_duration(clock::of_thread())
    }

    /// What those threads of a process that live and have this name have used so far; none for a
    /// kernel that does not say.
    pub(super) fn of_threads(process: u32, name: &str) -> Option<Self> {
        let tasks = fs::read_dir(format!("/proc/{process}/task")).ok()?;
        let mut sum = None;
        for task in tasks.filter_map(Result::ok) {
            let read = |file| fs::read_to_string(task.path().join(file)).unwrap_or_default();
            if read("comm").trim_end() == name {
                // The first field is the time on a processor, nanoseconds.
                let used = read("schedstat").split(' ').next().and_then(|it| it.parse().ok());
                sum = Some(Self(sum.map_or(0, |Self(sum)| sum) + used.unwrap_or(0)));
            }
        }
        sum.filter(|Self(time)| *time > 0)
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

    fn work(until: impl Fn() -> bool) {
        let mut sum = 0_u64;
        while !until() {
            sum = std::hint::black_box((0..10_000).sum());
        }
        assert!(sum > 0);
    }

    #[test]
    fn work_takes_time() {
        let (before, thread) = (CpuTime::own().unwrap(), CpuTime::of_thread());
        work(|| (CpuTime::of_thread() - thread).seconds() > 0.02);
        assert!((CpuTime::own().unwrap() - before).seconds() > 0.01);
        assert_eq!((before - CpuTime::own().unwrap()).seconds(), 0.0);
        assert!(CpuTime::of(u32::MAX).is_err());
    }

    #[test]
    fn threads_are_found_by_their_names() {
        let name = "bench-cpu-test";
        let me = std::process::id();
        let thread = std::thread::Builder::new().name(name.into());
        let worker = thread.spawn(move || {
            work(|| CpuTime::of_threads(me, name).is_some_and(|used| used.seconds() > 0.01));
        });
        worker.unwrap().join().unwrap();
        assert_eq!(CpuTime::of_threads(me, name), None, "it is gone");
    }
}
