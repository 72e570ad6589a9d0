//! Misses: ask the registry who holds them, fetch from several owners at once, and once more from
//! others what failed.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinSet;

use super::transport::PeerAddress;
use crate::event::{Event, EventSink, RegistryCall};
use crate::limits;
use crate::peer::FetchOutcome;
use crate::protocol::door::Source;
use crate::registry::{OwnerRegistry, PlanQuery};
use crate::runtime::clock::Clock;
use crate::runtime::data::DataHandle;
use crate::sync::{Mutex, lock};
use crate::types::{BlockHash, BlockKey, NamespaceId, NodeId, Scope, Timestamp};

/// Blocks of one lend: few enough that several leases of one read overlap, so that the holder's
/// answer to one hides behind the bytes of another.
const BLOCKS_PER_LEND: usize = 64;

/// Leases that one read has in flight.
const LENDS_IN_FLIGHT: usize = 4;

/// The longest that a read waits for an owner that asked for a pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Rounds of a read: the plan, and one retry. What failed is asked of other owners, or, where
/// there is none, of the same one again: its connection may have been stale. What was busy is asked
/// again, too.
const ROUNDS: usize = 2;

/// Fetches blocks from their owners.
#[derive(Debug)]
pub(super) struct Fetcher {
    node: NodeId,
    registry: Arc<dyn OwnerRegistry>,
    data: DataHandle<PeerAddress>,
    clock: Clock,
    sink: Arc<dyn EventSink>,
    /// Owners that asked for a pause, and until when.
    pauses: Mutex<HashMap<NodeId, Timestamp>>,
    /// What spreads equal owners: a new number for each plan.
    choice: AtomicU64,
}

/// Positions of one lend in the list that was asked for.
#[derive(Debug)]
struct Lend {
    owner: NodeId,
    address: String,
    positions: Vec<usize>,
}

/// What a read got so far, and whom it does not ask again.
#[derive(Debug)]
struct Got {
    outcomes: Vec<FetchOutcome>,
    avoid: Vec<NodeId>,
}

impl Got {
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
}

fn is_worth_a_retry(outcome: &FetchOutcome) -> bool {
    outcome.is_disappointing() || *outcome == FetchOutcome::Busy
}

/// Whether the owner that has it may do better the next time.
fn is_worth_the_same_owner(outcome: &FetchOutcome) -> bool {
    matches!(outcome, FetchOutcome::Busy | FetchOutcome::Failed(_))
}

impl Fetcher {
    pub(super) fn new(
        node: NodeId,
        registry: Arc<dyn OwnerRegistry>,
        data: DataHandle<PeerAddress>,
        clock: Clock,
        sink: Arc<dyn EventSink>,
    ) -> Self {
        let pauses = Mutex::default();
        Self { node, registry, data, clock, sink, pauses, choice: AtomicU64::new(0) }
    }

    /// One outcome per hash. Those that are ready are resident and pinned once.
    pub(super) async fn fetch(
        self: &Arc<Self>,
        namespace: NamespaceId,
        hashes: &[BlockHash],
        source: Source,
    ) -> Vec<FetchOutcome> {
        let mut got =
            Got { outcomes: vec![FetchOutcome::NotFound; hashes.len()], avoid: Vec::new() };
        let mut open: Vec<usize> = (0..hashes.len()).collect();
        for round in 0..ROUNDS {
            let mut lends = self.choose(namespace, hashes, (&open, source), &got.avoid).await;
            if round > 0 {
                // Nobody else has these: the same owners once more, over a fresh connection where
                // theirs broke.
                let covered = |at| lends.iter().any(|lend| lend.positions.contains(at));
                let lost =
                    |at: &&usize| got.outcomes.get(**at).is_some_and(is_worth_the_same_owner);
                let rest: Vec<usize> =
                    open.iter().filter(|at| !covered(at)).filter(lost).copied().collect();
                if !rest.is_empty() {
                    lends.extend(self.choose(namespace, hashes, (&rest, source), &[]).await);
                }
            }
            if lends.is_empty() {
                break;
            }
            self.run(namespace, hashes, lends, &mut got).await;
            open.retain(|at| got.outcomes.get(*at).is_some_and(is_worth_a_retry));
            if open.is_empty() {
                break;
            }
        }
        got.outcomes
    }

    /// Who to ask for what, among those that `source` allows and without those to `avoid`.
    async fn choose(
        &self,
        namespace: NamespaceId,
        hashes: &[BlockHash],
        (open, source): (&[usize], Source),
        avoid: &[NodeId],
    ) -> Vec<Lend> {
        let mut lends = self.plan(namespace, hashes, open, avoid).await;
        if let Source::From(node) = source {
            let mut avoid = avoid.to_vec();
            // Whoever is preferred to the one that is wanted is left out until it is named.
            while lends.iter().any(|lend| lend.owner != node)
                && avoid.len() < limits::REGISTRY_AVOID_MAX
            {
                let others = lends.iter().map(|lend| lend.owner).filter(|it| *it != node);
                avoid.extend(others);
                avoid.sort_unstable();
                avoid.dedup();
                avoid.truncate(limits::REGISTRY_AVOID_MAX);
                lends = self.plan(namespace, hashes, open, &avoid).await;
            }
            lends.retain(|lend| lend.owner == node);
        }
        lends
    }

    /// Who to ask for what. A registry that does not answer leaves every block without an owner.
    async fn plan(
        &self,
        namespace: NamespaceId,
        hashes: &[BlockHash],
        open: &[usize],
        avoid: &[NodeId],
    ) -> Vec<Lend> {
        let keys: Vec<BlockKey> = open
            .iter()
            .filter_map(|at| hashes.get(*at))
            .map(|hash| BlockKey { namespace, hash: *hash })
            .collect();
        let choice = self.choice.fetch_add(1, Ordering::Relaxed);
        let query = PlanQuery { asker: self.node, keys: &keys, avoid, choice };
        let call = RegistryCall::Plan;
        let plan = match self.registry.plan(query).await {
            Ok(plan) => plan,
            Err(error) => {
                tracing::debug!(%error, "no plan: only local blocks can be read");
                self.sink.emit(Event::RegistryFailed { call });
                return Vec::new();
            }
        };
        self.sink.emit(Event::RegistryAnswered { call });
        let mut lends = Vec::new();
        for (owner, segment) in plan.runs() {
            let first = segment.first as usize;
            let run = open.get(first..first + segment.count as usize).unwrap_or_default();
            lends.extend(run.chunks(BLOCKS_PER_LEND).map(|positions| Lend {
                owner: owner.node,
                address: owner.address.clone(),
                positions: positions.to_vec(),
            }));
        }
        lends
    }

    async fn run(
        self: &Arc<Self>,
        namespace: NamespaceId,
        hashes: &[BlockHash],
        lends: Vec<Lend>,
        into: &mut Got,
    ) {
        let mut waiting = VecDeque::from(lends);
        let mut running = JoinSet::new();
        let mut most = LENDS_IN_FLIGHT;
        loop {
            while running.len() < most
                && let Some(lend) = waiting.pop_front()
            {
                let wanted: Vec<BlockHash> =
                    lend.positions.iter().filter_map(|at| hashes.get(*at)).copied().collect();
                let fetcher = Arc::clone(self);
                running.spawn(async move {
                    let got = fetcher.run_one(namespace, &lend, wanted).await;
                    (lend, got)
                });
            }
            let Some(joined) = running.join_next().await else { return };
            // A lend that panicked leaves its blocks as they were: not found.
            let Ok((lend, got)) = joined else { continue };
            if got.iter().any(FetchOutcome::is_disappointing) && !into.avoid.contains(&lend.owner) {
                into.avoid.push(lend.owner);
            }
            let busy = into.take(&lend, got);
            // What was busy because of our own other lends is asked for again behind them, with
            // fewer at a time. Busy for a lend that was alone is the answer.
            if !busy.is_empty() && !running.is_empty() {
                most = (most / 2).max(1);
                waiting.push_back(Lend { positions: busy, ..lend });
            }
        }
    }

    async fn run_one(
        &self,
        namespace: NamespaceId,
        lend: &Lend,
        hashes: Vec<BlockHash>,
    ) -> Vec<FetchOutcome> {
        let blocks = hashes.len();
        self.obey_pause(lend.owner).await;
        let address = tokio::net::lookup_host(&lend.address).await.ok();
        let Some(address) = address.and_then(|mut found| found.next()) else {
            tracing::warn!(owner = %lend.owner, address = %lend.address, "no such address");
            return vec![FetchOutcome::Failed(Scope::Peer); blocks];
        };
        let endpoint = PeerAddress { node: lend.owner, address };
        match self.data.fetch(lend.owner, endpoint, namespace, hashes).await {
            Ok(fetched) => {
                self.note_pause(lend.owner, fetched.pause_ms);
                fetched.outcomes
            }
            Err(_stopped) => vec![FetchOutcome::Failed(Scope::Local); blocks],
        }
    }

    async fn obey_pause(&self, owner: NodeId) {
        let now = self.clock.now();
        let until = lock(&self.pauses).get(&owner).copied();
        if let Some(until) = until {
            tokio::time::sleep(until.since(now).min(PAUSE_MAX)).await;
        }
    }

    fn note_pause(&self, owner: NodeId, pause_ms: u32) {
        let mut pauses = lock(&self.pauses);
        let now = self.clock.now();
        pauses.retain(|_, until| *until > now);
        if pause_ms > 0 {
            pauses.insert(owner, now + Duration::from_millis(pause_ms.into()));
        }
    }
}
