//! Two ways to move the same bytes, in turn.

use std::time::Duration;

use crate::cli::CliError;
use crate::cli::bench::median;
use crate::runtime::clock::Clock;

use super::Run;

/// Rounds that a median is made of, at least and at most.
const ROUNDS_MIN: usize = 5;
const ROUNDS_MAX: usize = 2000;

/// Medians of both ways' times, seconds, and how many rounds those are of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Medians {
    pub(super) driver: f64,
    pub(super) kvrail: f64,
    pub(super) rounds: usize,
}

/// What moves the bytes once; the time that it took, where not all of the call counts.
pub(super) type Way<'w> = &'w mut dyn FnMut(&mut Run<'_>) -> Result<Option<Duration>, CliError>;

/// Measures both, in turn. Each runs once before that.
pub(super) fn in_turn<'w>(
    run: &mut Run<'_>,
    driver: Way<'w>,
    kvrail: Way<'w>,
) -> Result<Medians, CliError> {
    let clock = Clock::start();
    let timed = |run: &mut Run<'_>, way: &mut Way<'_>| {
        let begun = clock.now();
        let said = way(run)?;
        Ok::<_, CliError>(said.unwrap_or_else(|| clock.now().since(begun)).as_secs_f64())
    };
    let mut ways = [driver, kvrail];
    for way in &mut ways {
        timed(run, way)?;
    }
    let (begun, mut times) = (clock.now(), [Vec::new(), Vec::new()]);
    loop {
        for (way, times) in ways.iter_mut().zip(&mut times) {
            times.push(timed(run, way)?);
        }
        let rounds = times.first().map_or(0, Vec::len);
        let enough = clock.now().since(begun) >= run.time && rounds >= ROUNDS_MIN;
        if enough || rounds >= ROUNDS_MAX || run.is_over() {
            let [driver, kvrail] = times.map(|times| median(times).unwrap_or(f64::NAN));
            return Ok(Medians { driver, kvrail, rounds });
        }
    }
}
