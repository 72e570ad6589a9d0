//! The calls of the trait, as script calls and commands.

use std::collections::HashMap;

use super::nodes::{Known, Nodes};
use super::owner::Owner;
use super::{Listed, RedisRegistry};
use crate::limits;
use crate::registry::{
    Announced, Batch, Beat, Heartbeat, Missing, NodeIdentity, OwnerRegistry, Partition, Plan,
    PlanQuery, RegistryError, RegistryFuture, Stamp, Standing, Withdrawn, assemble_plan, check_len,
};
use crate::types::BlockKey;

/// The only live owner in a list.
fn sole(nodes: &Nodes, listed: &Listed) -> Option<Owner> {
    let mut live = listed.owners.iter().filter(|owner| nodes.owner(**owner).is_some());
    let first = live.next().copied()?;
    live.next().is_none().then_some(first)
}

impl RedisRegistry {
    async fn add(&self, batch: Batch<'_>) -> Result<Announced, RegistryError> {
        check_len("a batch", batch.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        let (owner, registry) = self.sender(&batch.stamp).await?;
        let order = (batch.stamp.sequence, batch.stamp.settled);
        let lists = self.change("+", owner, order, batch.keys).await?;
        let nodes = self.nodes_for(&lists).await?;
        let count = |listed: &Listed| {
            let is_live = |it: &&Owner| **it == owner || nodes.owner(**it).is_some();
            u32::try_from(listed.owners.iter().filter(is_live).count()).unwrap_or(u32::MAX)
        };
        Ok(Announced { registry, owners: lists.iter().map(count).collect() })
    }

    async fn remove(&self, batch: Batch<'_>) -> Result<Withdrawn, RegistryError> {
        check_len("a batch", batch.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        let (owner, registry) = self.sender(&batch.stamp).await?;
        let order = (batch.stamp.sequence, batch.stamp.settled);
        let lists = self.change("-", owner, order, batch.keys).await?;
        let nodes = self.nodes_for(&lists).await?;
        self.hint(&nodes, &lists, batch.keys).await;
        let positions = (0..).zip(&lists).filter(|(_, listed)| sole(&nodes, listed).is_some());
        Ok(Withdrawn { registry, sole: positions.map(|(position, _)| position).collect() })
    }

    /// Tells whoever is the only owner of a key from which another was removed.
    async fn hint(&self, nodes: &Nodes, lists: &[Listed], keys: &[BlockKey]) {
        let removed = lists.iter().zip(keys).filter(|(listed, _)| listed.removed);
        let left = removed.filter_map(|(listed, key)| Some((sole(nodes, listed)?, *key)));
        self.tell_sole(nodes, &left.collect::<Vec<_>>()).await;
    }

    async fn report(&self, missing: Missing<'_>) -> Result<u32, RegistryError> {
        check_len("a report", missing.keys.len(), limits::REGISTRY_BATCH_MAX)?;
        let nodes = self.nodes().await?;
        let known = nodes.live(missing.owner);
        let Some(known) = known.filter(|known| known.identity.epoch == missing.epoch) else {
            return Ok(0);
        };
        let lists = self.change("!", known.owner, (0, 0), missing.keys).await?;
        let nodes = self.nodes_for(&lists).await?;
        self.hint(&nodes, &lists, missing.keys).await;
        let removed = lists.iter().filter(|listed| listed.removed).count();
        Ok(u32::try_from(removed).unwrap_or(u32::MAX))
    }

    async fn find(&self, query: PlanQuery<'_>) -> Result<Plan, RegistryError> {
        query.check()?;
        let lists = self.lists(query.keys).await?;
        let nodes = self.nodes_for(&lists).await?;
        let skip = |known: &Known| {
            let node = known.identity.node;
            node == query.asker || query.avoid.contains(&node)
        };
        let mut known: Vec<&Known> = Vec::new();
        let mut places = HashMap::<Owner, Option<usize>>::new();
        let mut positions = Vec::with_capacity(lists.len());
        for listed in &lists {
            let mut owners = Vec::new();
            for owner in &listed.owners {
                let place = *places.entry(*owner).or_insert_with(|| {
                    known.push(nodes.owner(*owner).filter(|known| !skip(known))?);
                    Some(known.len() - 1)
                });
                owners.extend(place);
            }
            positions.push(owners);
        }
        let who = |at: usize| {
            let known = known.get(at)?;
            let reach = query.reach(known.identity.node);
            Some((&known.identity, Standing { load: known.load, reach }))
        };
        Ok(assemble_plan(nodes.registry, positions, who, query.choice))
    }
}

impl OwnerRegistry for RedisRegistry {
    fn heartbeat<'a>(
        &'a self,
        node: &'a NodeIdentity,
        heartbeat: Heartbeat<'a>,
    ) -> RegistryFuture<'a, Beat> {
        Box::pin(self.beat(node, heartbeat))
    }

    fn announce<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Announced> {
        Box::pin(self.add(batch))
    }

    fn withdraw<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Withdrawn> {
        Box::pin(self.remove(batch))
    }

    fn forget<'a>(&'a self, stamp: Stamp, partition: Partition) -> RegistryFuture<'a, ()> {
        Box::pin(self.forget_all(stamp, partition))
    }

    fn report_missing<'a>(&'a self, missing: Missing<'a>) -> RegistryFuture<'a, u32> {
        Box::pin(self.report(missing))
    }

    fn plan<'a>(&'a self, query: PlanQuery<'a>) -> RegistryFuture<'a, Plan> {
        Box::pin(self.find(query))
    }
}
