//! What happened in the runs.

use std::collections::BTreeMap;

use crate::krate::peer::{FetchOutcome, Fetched};
use crate::krate::types::Scope;

/// A number from the environment.
#[expect(clippy::disallowed_methods, reason = "a test's replay is not a setting of the program")]
pub(crate) fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().expect("a number"))
}

/// What must happen in some run: a simulation in which nothing goes wrong proves nothing.
const MUST_HAPPEN: [&str; 52] = [
    "aborted",
    "already resident",
    "announced all",
    "busy",
    "call of an earlier start",
    "crash",
    "crowded node",
    "direct fetch",
    "drift found",
    "drift repaired",
    "evicted",
    "expired",
    "failed by the path",
    "failed by the peer",
    "failed locally",
    "fetched",
    "large cluster",
    "late batch refused",
    "late call",
    "list harmed",
    "lost message",
    "made wider",
    "no plan",
    "node cut from the registry",
    "moved",
    "not found",
    "owner hint",
    "owner reported",
    "partition",
    "pause obeyed",
    "paused node",
    "peer left alone",
    "planned lend",
    "planned read",
    "probe that was good",
    "rank step",
    "read of one node",
    "refused",
    "registered afresh",
    "registry down",
    "registry lost",
    "repeated message",
    "replayed",
    "reset",
    "restart",
    "shared fetch",
    "sole owner told",
    "stall",
    "superseded",
    "withdrawn",
    "withdrawn in use",
    "wrong report",
];

/// How often what happened, over all runs.
#[derive(Debug, Default)]
pub(crate) struct Seen(BTreeMap<&'static str, u64>);

impl Seen {
    pub(crate) fn count(&mut self, what: &'static str, times: u64) {
        *self.0.entry(what).or_default() += times;
    }

    /// Adds what another thread's runs saw.
    pub(crate) fn add(&mut self, other: &Self) {
        for (what, times) in &other.0 {
            self.count(what, *times);
        }
    }

    pub(crate) fn assert_it_all_happened(&self) {
        for what in MUST_HAPPEN {
            assert!(self.0.get(what).is_some_and(|times| *times > 0), "no {what}: {self:?}");
        }
    }
}

/// What became of the blocks of a fetch.
pub(crate) fn count(fetched: &Fetched, seen: &mut Seen) {
    for outcome in &fetched.outcomes {
        let what = match outcome {
            FetchOutcome::Ready { fetched: true, .. } => "fetched",
            FetchOutcome::Ready { fetched: false, .. } => "already resident",
            FetchOutcome::NotFound => "not found",
            FetchOutcome::Busy(_) => "busy",
            FetchOutcome::Failed(Scope::Local) => "failed locally",
            FetchOutcome::Failed(Scope::Path) => "failed by the path",
            FetchOutcome::Failed(Scope::Peer) => "failed by the peer",
            FetchOutcome::Failed(Scope::Request) => "failed by the request",
        };
        seen.count(what, 1);
    }
}
