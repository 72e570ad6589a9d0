//! Whom to ask for what.

use std::sync::atomic::Ordering;

use super::{Fetcher, Wanted};
use crate::event::{Event, RegistryCall};
use crate::limits;
use crate::protocol::door::Source;
use crate::registry::PlanQuery;
use crate::sync::lock;
use crate::types::{BlockKey, NodeEpoch, NodeId, Timestamp};

/// Blocks of one lend: few enough that several leases of one read overlap, so that the holder's
/// answer to one hides behind the bytes of another.
const BLOCKS_PER_LEND: usize = 64;

/// Positions of one lend in the list that was asked for.
#[derive(Debug)]
pub(super) struct Lend {
    pub(super) owner: NodeId,
    /// The start of it that the registry named.
    pub(super) epoch: NodeEpoch,
    pub(super) address: String,
    pub(super) positions: Vec<usize>,
}

impl Fetcher {
    pub(super) fn now(&self) -> Timestamp {
        self.parts.clock.now()
    }

    pub(super) fn leaves_anyone_alone(&self) -> bool {
        !lock(&self.sources).suspended(self.now()).is_empty()
    }

    /// Who to ask for what, among those that the read's source allows, without those to `avoid` and
    /// those that are left alone now. Each lend counts as asked of its owner.
    pub(super) async fn choose(
        &self,
        wanted: Wanted<'_>,
        open: &[usize],
        avoid: &[NodeId],
    ) -> Vec<Lend> {
        if let Source::From(node) = wanted.source {
            let lends = self.choose_from(wanted, open, (node, avoid)).await;
            return self.assign(lends, &[]);
        }
        let mut avoid = avoid.to_vec();
        avoid.extend(lock(&self.sources).suspended(self.now()));
        avoid.truncate(limits::REGISTRY_AVOID_MAX);
        let first = self.plan(wanted, open, &avoid).await;
        let second = self.second_choice(wanted, &first, avoid).await;
        self.assign(first, &second)
    }

    /// The same without regard to who is left alone.
    pub(super) async fn choose_whoever(&self, wanted: Wanted<'_>, open: &[usize]) -> Vec<Lend> {
        let lends = match wanted.source {
            Source::From(node) => self.choose_from(wanted, open, (node, &[])).await,
            _ => self.plan(wanted, open, &[]).await,
        };
        self.assign(lends, &[])
    }

    /// Other owners of what busy ones are to be asked for.
    async fn second_choice(
        &self,
        wanted: Wanted<'_>,
        first: &[Lend],
        mut avoid: Vec<NodeId>,
    ) -> Vec<Lend> {
        let mut positions = Vec::new();
        {
            let (sources, now) = (lock(&self.sources), self.now());
            // A read that is long enough makes its owner busy by itself.
            let long = |owner: NodeId| first.iter().filter(|lend| lend.owner == owner).count() > 1;
            for lend in first {
                if sources.is_busy(lend.owner, now) || long(lend.owner) {
                    positions.extend_from_slice(&lend.positions);
                    avoid.push(lend.owner);
                }
            }
        }
        avoid.sort_unstable();
        avoid.dedup();
        if positions.is_empty() || avoid.len() > limits::REGISTRY_AVOID_MAX {
            return Vec::new();
        }
        self.plan(wanted, &positions, &avoid).await
    }

    /// Gives each lend to the less busy of its two owners.
    fn assign(&self, mut lends: Vec<Lend>, second: &[Lend]) -> Vec<Lend> {
        let (mut sources, now) = (lock(&self.sources), self.now());
        for lend in &mut lends {
            let holds =
                |other: &&Lend| lend.positions.iter().all(|at| other.positions.contains(at));
            let other = second.iter().find(holds);
            let owner = other.map(|other| other.owner);
            let chosen = sources.choose(lend.owner, owner, lend.positions.len(), now);
            if let Some(other) = other.filter(|other| other.owner == chosen) {
                lend.owner = other.owner;
                (lend.epoch, lend.address) = (other.epoch, other.address.clone());
            }
        }
        lends
    }

    /// Asks one owner alone: whoever is preferred to it is left out until it is named.
    async fn choose_from(
        &self,
        wanted: Wanted<'_>,
        open: &[usize],
        (node, avoid): (NodeId, &[NodeId]),
    ) -> Vec<Lend> {
        let mut avoid = avoid.to_vec();
        let mut lends = self.plan(wanted, open, &avoid).await;
        while lends.iter().any(|lend| lend.owner != node)
            && avoid.len() < limits::REGISTRY_AVOID_MAX
        {
            let others = lends.iter().map(|lend| lend.owner).filter(|it| *it != node);
            avoid.extend(others);
            avoid.sort_unstable();
            avoid.dedup();
            avoid.truncate(limits::REGISTRY_AVOID_MAX);
            lends = self.plan(wanted, open, &avoid).await;
        }
        lends.retain(|lend| lend.owner == node);
        lends
    }

    /// What the registry says. One that does not answer leaves every block without an owner.
    async fn plan(&self, wanted: Wanted<'_>, open: &[usize], avoid: &[NodeId]) -> Vec<Lend> {
        let namespace = wanted.namespace;
        let keys: Vec<BlockKey> = open
            .iter()
            .filter_map(|at| wanted.hashes.get(*at))
            .map(|hash| BlockKey { namespace, hash: *hash })
            .collect();
        let choice = self.choice.fetch_add(1, Ordering::Relaxed);
        let query = PlanQuery { asker: self.parts.node, keys: &keys, avoid, choice };
        let call = RegistryCall::Plan;
        let plan = match self.parts.registry.plan(query).await {
            Ok(plan) => plan,
            Err(error) => {
                tracing::debug!(%error, "no plan: only local blocks can be read");
                self.parts.sink.emit(Event::RegistryFailed { call });
                return Vec::new();
            }
        };
        self.parts.sink.emit(Event::RegistryAnswered { call });
        let mut lends = Vec::new();
        for (owner, segment) in plan.runs() {
            let first = segment.first as usize;
            let run = open.get(first..first + segment.count as usize).unwrap_or_default();
            lends.extend(run.chunks(BLOCKS_PER_LEND).map(|positions| Lend {
                owner: owner.node,
                epoch: owner.epoch,
                address: owner.address.clone(),
                positions: positions.to_vec(),
            }));
        }
        lends
    }
}
