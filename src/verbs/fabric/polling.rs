//! How a poll waits: it spins for a while, then sleeps.

use std::time::Duration;

use super::{LOOK, PollMode, SWEEP, VerbsFabric};
use crate::fabric::{EventBatch, FabricError};
use crate::sys::clock::{coarse, now};
use crate::sys::connections::Breakable;
use crate::types::Timestamp;

/// How long a cut connection is waited for, so that its flushes are seen without delay.
const DRAIN_WAIT: Duration = Duration::from_millis(1);

/// How long an adaptive poll spins after it last found or posted something: a few small READs.
const SPIN: Duration = Duration::from_micros(100);

/// How long a poll that spins keeps the processor to itself. What it waits for may need this one: a
/// software device works in kernel threads, and the scheduler lets a thread that spins finish its
/// slice of milliseconds. So this is a part of the latency of each step of such a device.
const TURNS: Duration = Duration::from_micros(2);

/// The most looks at the queues within that time.
const TURNS_MAX: u32 = 64;

impl VerbsFabric {
    /// How long a poll may sleep, so that deadlines are checked in time.
    pub(super) fn wait_limit(&mut self) -> Duration {
        let paused = self.paused;
        let mut limit = if paused { SWEEP } else { Duration::MAX };
        for (_, connection) in self.table.iter_mut() {
            if connection.is_broken() {
                limit = limit.min(DRAIN_WAIT);
            } else if connection.is_timed() {
                limit = limit.min(SWEEP);
            }
        }
        limit
    }

    /// Looks for completions without sleeping, for as long as the mode says. Answers whether the poll
    /// is over.
    pub(super) fn spin(
        &mut self,
        begun: Timestamp,
        timeout: Duration,
        batch: &mut EventBatch,
    ) -> Result<bool, FabricError> {
        let limit = match self.poll {
            PollMode::Busy => timeout,
            PollMode::Adaptive if self.active => timeout.min(SPIN),
            PollMode::Adaptive | PollMode::Event => return Ok(false),
        };
        let mut at = begun;
        let begun = now();
        let mut last = begun;
        loop {
            for _turn in 0..self.turns {
                if self.drain(at, batch) || self.wake.take() {
                    return Ok(true);
                }
            }
            std::thread::yield_now();
            // What this processor was given away for is here now: it comes before the clock.
            if self.drain(at, batch) {
                return Ok(true);
            }
            at = coarse();
            let precise = now();
            // Looks cost a few nanoseconds on one host and a microsecond on another.
            self.turns = match precise.since(last) {
                took if took > TURNS => (self.turns / 2).max(1),
                took if took < TURNS / 2 => (self.turns * 2).min(TURNS_MAX),
                _ => self.turns,
            };
            last = precise;
            let looks = self.watching.is_some_and(|next| precise >= next);
            if looks {
                self.watching = Some(precise + LOOK);
            }
            if (looks || at >= self.next_service) && self.service(Duration::ZERO, batch)? {
                return Ok(true);
            }
            if precise.since(begun) >= limit {
                self.active = false;
                return Ok(self.poll == PollMode::Busy);
            }
        }
    }

    /// Sleeps until something happens, or the time is up.
    pub(super) fn sleep(
        &mut self,
        at: Timestamp,
        timeout: Duration,
        batch: &mut EventBatch,
    ) -> Result<(), FabricError> {
        self.arm(at);
        // What came before the queues were armed makes no event.
        if self.drain(at, batch) {
            return Ok(());
        }
        let limit = timeout.min(self.wait_limit());
        self.service(limit, batch)?;
        self.drain(coarse(), batch);
        Ok(())
    }
}
