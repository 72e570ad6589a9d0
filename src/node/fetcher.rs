//! Misses: ask the registry who holds them, fetch from several owners at once, and once more from
//! others what failed.
//!
//! Concurrent readers of one block share one fetch (see [`Flights`]). An acquisition is never cancelled
//! while the node runs, whatever became of the client that asked for it, so the death of the first
//! asker takes nothing from the others.

mod plan;
mod shared;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tokio::task::JoinSet;

use super::transport::PeerAddress;
use crate::event::{Event, EventSink, RegistryCall};
use crate::peer::FetchOutcome;
use crate::protocol::door::Source;
use crate::registry::{Missing, OwnerRegistry};
use crate::route::{Flights, Sources};
use crate::runtime::clock::Clock;
use crate::runtime::data::DataHandle;
use crate::store::Store;
use crate::sync::{Mutex, lock};
use crate::types::{BlockHash, BlockKey, Load, NamespaceId, NodeId, Scope};
use plan::Lend;
use shared::Waiter;

/// Leases that one read has in flight.
const LENDS_IN_FLIGHT: usize = 4;

/// Rounds of a read: the plan, one retry of what failed, and as many owners more as turn out not to
/// hold what they are listed for.
const ROUNDS: usize = 4;

/// How often a block may fail or be busy. What did is asked of other owners, or, where there is none,
/// of the same one again: its connection may have been stale.
const TRIES: u8 = 2;

/// What a fetcher works with.
#[derive(Debug)]
pub(super) struct FetcherParts {
    pub(super) node: NodeId,
    pub(super) registry: Arc<dyn OwnerRegistry>,
    pub(super) data: DataHandle<PeerAddress>,
    pub(super) store: Arc<Store>,
    pub(super) clock: Clock,
    pub(super) sink: Arc<dyn EventSink>,
}

/// Fetches blocks from their owners.
#[derive(Debug)]
pub(super) struct Fetcher {
    parts: FetcherParts,
    sources: Mutex<Sources>,
    flights: Mutex<Flights<Waiter>>,
    /// What spreads equal owners: a new number for each plan.
    choice: AtomicU64,
}

/// The blocks of one read that nobody else is fetching.
#[derive(Debug, Clone, Copy)]
struct Wanted<'a> {
    namespace: NamespaceId,
    hashes: &'a [BlockHash],
    source: Source,
}

/// What a read got so far, and whom it does not ask again.
#[derive(Debug)]
struct Got {
    outcomes: Vec<FetchOutcome>,
    /// By position: how often it failed or was busy.
    tries: Vec<u8>,
    avoid: Vec<NodeId>,
}

impl Got {
    fn nothing(blocks: usize) -> Self {
        let (outcomes, tries) = (vec![FetchOutcome::NotFound; blocks], vec![0; blocks]);
        Self { outcomes, tries, avoid: Vec::new() }
    }

    /// Takes the outcomes of a lend; the positions that were busy.
    fn take(&mut self, lend: &Lend, outcomes: Vec<FetchOutcome>) -> Vec<usize> {
        let mut busy = Vec::new();
        for (at, outcome) in lend.positions.iter().zip(outcomes) {
            if outcome == FetchOutcome::Busy {
                busy.push(*at);
            }
            if let Some(slot) = self.outcomes.get_mut(*at) {
                *slot = outcome;
            }
        }
        busy
    }

    fn avoid(&mut self, owner: NodeId) {
        if !self.avoid.contains(&owner) {
            self.avoid.push(owner);
        }
    }

    /// Counts a try of each position that is still open, and keeps those that have another one.
    fn keep_worthy(&mut self, open: &mut Vec<usize>) {
        open.retain(|at| match (self.outcomes.get(*at), self.tries.get_mut(*at)) {
            (Some(FetchOutcome::NotFound), _) => true,
            (Some(FetchOutcome::Busy | FetchOutcome::Failed(_)), Some(tries)) => {
                *tries += 1;
                *tries < TRIES
            }
            _ => false,
        });
    }
}

/// Whether the owner that has it may do better the next time.
fn is_worth_the_same_owner(outcome: &FetchOutcome) -> bool {
    matches!(outcome, FetchOutcome::Busy | FetchOutcome::Failed(_))
}

impl Fetcher {
    pub(super) fn new(parts: FetcherParts) -> Self {
        Self {
            parts,
            sources: Mutex::default(),
            flights: Mutex::default(),
            choice: AtomicU64::new(0),
        }
    }

    /// One outcome per hash of a read whose blocks nobody else is fetching. Those that are ready are
    /// resident and pinned once. `landed` hears of each block as soon as its outcome is final.
    async fn lead(
        self: &Arc<Self>,
        wanted: Wanted<'_>,
        mut landed: impl FnMut(usize, FetchOutcome),
    ) -> Vec<FetchOutcome> {
        let mut got = Got::nothing(wanted.hashes.len());
        let mut open: Vec<usize> = (0..wanted.hashes.len()).collect();
        for round in 0..ROUNDS {
            let mut lends = self.choose(wanted, &open, &got.avoid).await;
            // Nobody else has these: the same owners once more, over a fresh connection where
            // theirs broke. In the first round, those that are left alone, which say so at once.
            let covered = |at| lends.iter().any(|lend| lend.positions.contains(at));
            let lost = |at: &&usize| {
                round == 0 || got.outcomes.get(**at).is_some_and(is_worth_the_same_owner)
            };
            let rest: Vec<usize> =
                open.iter().filter(|at| !covered(at)).filter(lost).copied().collect();
            if !rest.is_empty() && (round > 0 || self.leaves_anyone_alone()) {
                lends.extend(self.choose_whoever(wanted, &rest).await);
            }
            if lends.is_empty() {
                break;
            }
            self.run(wanted, lends, &mut got).await;
            for at in &open {
                if let Some(outcome @ FetchOutcome::Ready { .. }) = got.outcomes.get(*at) {
                    landed(*at, *outcome);
                }
            }
            got.keep_worthy(&mut open);
            if open.is_empty() {
                break;
            }
        }
        got.outcomes
    }

    async fn run(self: &Arc<Self>, wanted: Wanted<'_>, lends: Vec<Lend>, into: &mut Got) {
        let mut waiting = VecDeque::from(lends);
        let mut running = JoinSet::new();
        let mut most = LENDS_IN_FLIGHT;
        loop {
            while running.len() < most
                && let Some(lend) = waiting.pop_front()
            {
                let hashes: Vec<BlockHash> = lend
                    .positions
                    .iter()
                    .filter_map(|at| wanted.hashes.get(*at))
                    .copied()
                    .collect();
                let (fetcher, namespace) = (Arc::clone(self), wanted.namespace);
                running.spawn(async move {
                    let got = fetcher.run_one(namespace, &lend, hashes).await;
                    (lend, got)
                });
            }
            let Some(joined) = running.join_next().await else { return };
            // A lend that panicked leaves its blocks as they were: not found.
            let Ok((lend, got)) = joined else { continue };
            if got.iter().any(FetchOutcome::is_disappointing) {
                into.avoid(lend.owner);
            }
            let left_alone =
                lock(&self.sources).suspended(self.parts.clock.now()).contains(&lend.owner);
            self.report_missing(wanted, &lend, &got);
            let busy = into.take(&lend, got);
            if left_alone {
                // It leaves, or is left alone: others are asked at once.
                into.avoid(lend.owner);
            } else if !busy.is_empty() && !running.is_empty() {
                // What was busy because of our own other lends is asked for again behind them, with
                // fewer at a time. Busy for a lend that was alone is the answer.
                most = (most / 2).max(1);
                waiting.push_back(Lend { positions: busy, ..lend });
            }
        }
    }

    /// Tells the registry which blocks an owner was listed for and does not hold. The read does not
    /// wait for that.
    fn report_missing(self: &Arc<Self>, wanted: Wanted<'_>, lend: &Lend, got: &[FetchOutcome]) {
        let namespace = wanted.namespace;
        let missing = lend.positions.iter().zip(got);
        let keys: Vec<BlockKey> = missing
            .filter(|(_, outcome)| **outcome == FetchOutcome::NotFound)
            .filter_map(|(at, _)| wanted.hashes.get(*at))
            .map(|hash| BlockKey { namespace, hash: *hash })
            .collect();
        if keys.is_empty() {
            return;
        }
        self.parts.sink.emit(Event::OwnerMissed { blocks: keys.len() as u64 });
        let (fetcher, owner, epoch) = (Arc::clone(self), lend.owner, lend.epoch);
        tokio::spawn(async move {
            let call = RegistryCall::Report;
            let missing = Missing { owner, epoch, keys: &keys };
            let event = match fetcher.parts.registry.report_missing(missing).await {
                Ok(_removed) => Event::RegistryAnswered { call },
                Err(_unheard) => Event::RegistryFailed { call },
            };
            fetcher.parts.sink.emit(event);
        });
    }

    async fn run_one(
        &self,
        namespace: NamespaceId,
        lend: &Lend,
        hashes: Vec<BlockHash>,
    ) -> Vec<FetchOutcome> {
        let blocks = hashes.len();
        let answered =
            |load: Load| lock(&self.sources).answered(lend.owner, blocks, load, self.now());
        let address = tokio::net::lookup_host(&lend.address).await.ok();
        let Some(address) = address.and_then(|mut found| found.next()) else {
            tracing::warn!(owner = %lend.owner, address = %lend.address, "no such address");
            answered(Load::default());
            return vec![FetchOutcome::Failed(Scope::Peer); blocks];
        };
        let endpoint = PeerAddress { node: lend.owner, address };
        let Ok(fetched) = self.parts.data.fetch(lend.owner, endpoint, namespace, hashes).await
        else {
            answered(Load::default());
            return vec![FetchOutcome::Failed(Scope::Local); blocks];
        };
        answered(fetched.load);
        let mut sources = lock(&self.sources);
        if let Some(suspended) = fetched.suspended {
            sources.suspend(lend.owner, suspended.until);
        }
        for outcome in &fetched.outcomes {
            if let FetchOutcome::Ready { found, .. } = outcome {
                sources.note_block(found.payload.extent.len);
            }
        }
        drop(sources);
        fetched.outcomes
    }
}
