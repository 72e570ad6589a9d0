//! One breaker: closed, open until a probe, half open while the probe runs.

use std::time::Duration;

use arrayvec::ArrayVec;

use crate::types::Timestamp;

/// When a breaker opens and how it comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Outcomes so close together are one piece of evidence: a reset fails all that runs at once, and
    /// is one failure. Default 50 ms.
    pub incident: Duration,
    /// Evidence older than this says nothing any more. Default 60 s.
    pub window: Duration,
    /// Failures that open it, where they are at least half of the evidence in the window, or where
    /// nothing has succeeded since the first of them. Default 6.
    pub failures: u32,
    /// A failure that made its reader wait for so long counts twice among those without a success in
    /// between: a peer that hangs must not cost six timeouts. Default 1 s.
    pub slow: Duration,
    /// From its opening to the first probe. It doubles with each failed probe. Default 250 ms.
    pub probe_first: Duration,
    /// The longest time to the next probe: nothing is given up for good. Default 8 s.
    pub probe_longest: Duration,
    /// A breaker that stayed closed for so long forgets one doubling. Default 30 s.
    pub recovery: Duration,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            incident: Duration::from_millis(50),
            window: Duration::from_secs(60),
            failures: 6,
            slow: Duration::from_secs(1),
            probe_first: Duration::from_millis(250),
            probe_longest: Duration::from_secs(8),
            recovery: Duration::from_secs(30),
        }
    }
}

/// Where a breaker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BreakerState {
    /// In use.
    Closed,
    /// Left alone until its next probe.
    Open,
    /// Being probed, and left alone by everything else.
    HalfOpen,
}

impl BreakerState {
    /// The name that output uses.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half-open",
        }
    }
}

/// How something ended, as evidence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) good: bool,
    /// How long somebody waited for it.
    pub(super) waited: Duration,
}

/// Pieces of evidence that are weighed against each other, at most.
const EVIDENCE_MAX: usize = 20;

/// What happened within one [`BreakerConfig::incident`].
#[derive(Debug, Clone, Copy)]
struct Evidence {
    began: Timestamp,
    good: u32,
    bad: u32,
    slow: bool,
}

impl Evidence {
    const fn is_failure(&self) -> bool {
        self.bad > 0 && self.bad >= self.good
    }
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed { since: Timestamp },
    Open { until: Timestamp },
    HalfOpen { since: Timestamp },
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Breaker {
    config: BreakerConfig,
    evidence: ArrayVec<Evidence, EVIDENCE_MAX>,
    state: State,
    /// How often the time to the next probe was doubled.
    doublings: u32,
}

impl Breaker {
    pub(super) fn new(config: BreakerConfig, now: Timestamp) -> Self {
        let (evidence, state) = (ArrayVec::new(), State::Closed { since: now });
        Self { config, evidence, state, doublings: 0 }
    }

    pub(super) const fn state(&self) -> BreakerState {
        match self.state {
            State::Closed { .. } => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    pub(super) const fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed { .. })
    }

    /// When the next probe is due; `None` unless open.
    pub(super) const fn next_probe(&self) -> Option<Timestamp> {
        match self.state {
            State::Open { until } => Some(until),
            _ => None,
        }
    }

    /// Failures among the evidence that is weighed, and how much there is.
    pub(super) fn weighed(&self) -> (u32, u32) {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let bad = self.evidence.iter().filter(|evidence| evidence.is_failure()).count();
        (count(bad), count(self.evidence.len()))
    }

    /// Takes an outcome; whether the breaker opened. What ends while it is not closed began before,
    /// and only a probe closes it.
    pub(super) fn record(&mut self, outcome: Outcome, now: Timestamp) -> bool {
        let State::Closed { since } = self.state else { return false };
        self.note(outcome, now);
        if outcome.good || !self.is_too_much() {
            return false;
        }
        self.forget_doublings(since, now);
        self.open(now);
        true
    }

    /// Opens it whatever the evidence was before; whether it was closed.
    pub(super) fn trip(&mut self, waited: Duration, now: Timestamp) -> bool {
        let State::Closed { since } = self.state else { return false };
        self.note(Outcome { good: false, waited }, now);
        self.forget_doublings(since, now);
        self.open(now);
        true
    }

    /// One for each [`BreakerConfig::recovery`] that it stayed closed.
    fn forget_doublings(&mut self, since: Timestamp, now: Timestamp) {
        let recovered = now.since(since).as_millis() / self.config.recovery.as_millis().max(1);
        self.doublings =
            self.doublings.saturating_sub(u32::try_from(recovered).unwrap_or(u32::MAX));
    }

    fn note(&mut self, outcome: Outcome, now: Timestamp) {
        let window = self.config.window;
        self.evidence.retain(|evidence| now.since(evidence.began) <= window);
        let incident = self.config.incident;
        if self.evidence.last().is_none_or(|last| now.since(last.began) >= incident) {
            if self.evidence.is_full() {
                self.evidence.remove(0);
            }
            self.evidence.push(Evidence { began: now, good: 0, bad: 0, slow: false });
        }
        if let Some(last) = self.evidence.last_mut() {
            if outcome.good {
                last.good += 1;
            } else {
                last.bad += 1;
                last.slow |= outcome.waited >= self.config.slow;
            }
        }
    }

    fn is_too_much(&self) -> bool {
        let weight = |evidence: &Evidence| 1 + u32::from(evidence.slow);
        let in_a_row: u32 =
            self.evidence.iter().rev().take_while(|it| it.is_failure()).map(weight).sum();
        let (bad, all) = self.weighed();
        in_a_row >= self.config.failures || (bad >= self.config.failures && bad * 2 >= all)
    }

    fn open(&mut self, now: Timestamp) {
        let first = self.config.probe_first;
        let wait = first.saturating_mul(1 << self.doublings.min(16)).min(self.config.probe_longest);
        self.state = State::Open { until: now + wait };
    }

    /// Lets a probe that is due begin; whether it was.
    pub(super) fn begin_probe(&mut self, now: Timestamp) -> bool {
        let due = self.next_probe().is_some_and(|at| at <= now);
        if due {
            self.state = State::HalfOpen { since: now };
        }
        due
    }

    /// A probe ended; whether the breaker closed. The evidence against it is forgotten then.
    pub(super) fn end_probe(&mut self, good: bool, now: Timestamp) -> bool {
        if self.is_closed() {
            return false;
        }
        if good {
            self.state = State::Closed { since: now };
            self.evidence.clear();
            // Should it open again soon, the next probe comes later than the one that was good.
            self.doublings = self.doublings.saturating_add(1).min(16);
        } else {
            self.doublings = self.doublings.saturating_add(1).min(16);
            self.open(now);
        }
        good
    }

    /// Nothing could be found out for a reason of our own: the probe comes again as late as it did.
    pub(super) fn put_probe_off(&mut self, now: Timestamp) {
        if let State::HalfOpen { since } = self.state {
            debug_assert!(since <= now, "a probe that begins after its end");
            self.open(now);
        }
    }

    /// Forgets all; whether it was not closed.
    pub(super) fn reset(&mut self, now: Timestamp) -> bool {
        let was_open = !self.is_closed();
        *self = Self::new(self.config, now);
        was_open
    }
}
