//! The registry on Redis or Valkey, one server or a cluster, for users who outgrow one machine. It
//! keeps to what both share.
//!
//! | key | holds |
//! | --- | --- |
//! | `{kvrail}:meta` | the registry's epoch, made when it is first found absent; how many slots there are |
//! | `{kvrail}:nodes` | node → registration, epoch, load, address |
//! | `{kvrail}:lease:NODE` | there while the node's lease lasts; refreshed by heartbeats |
//! | `{kvrail}:sole:NODE` | blocks of which the node became the only owner, until its next heartbeat |
//! | `{kvrail:G}:owners` | fingerprint → the registrations of its owners |
//! | `{kvrail:G}:lanes` | slot → the registration that last sent something, and up to where it had settled |
//! | `{kvrail:G}:digests` | slot and partition → registration, digest |
//!
//! Partitions are in 32 groups, each with a hash tag. A batch is one script call on a server, and one
//! for each group on a cluster, all at once. Scripts see no other group and no node: they keep owners
//! as registrations, and whoever asks counts those whose node has a lease. So the end of a lease voids
//! all that the node announced, whatever keys there are; its registrations are swept out bit by bit,
//! by every node's heartbeats.

mod calls;
mod link;
mod nodes;
mod owner;
mod upkeep;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::Poll;
use std::time::Duration;

use redis::cmd;

use super::RegistryTimeouts;
use crate::registry::{Fingerprint, RegistryEpoch, RegistryError, Stamp};
use crate::sync::{Mutex, lock};
use crate::types::{BlockKey, NodeId};
use link::{Arguments, Code, Link};
use nodes::Nodes;
use owner::{GROUPS, Grouped, Owner, key, owners};

/// A registry on Redis or Valkey. Nodes share nothing but the servers.
#[derive(Debug)]
pub struct RedisRegistry {
    link: Link,
    lease: Duration,
    codes: Codes,
    nodes: Mutex<Option<Arc<Nodes>>>,
    /// Where the sweep goes on: a group, and a cursor in it.
    sweep: Mutex<(usize, u64)>,
    /// What makes the epochs of this process's registries differ.
    salt: AtomicU64,
}

#[derive(Debug)]
struct Codes {
    heartbeat: Code,
    nodes: Code,
    change: Code,
    purge: Code,
}

/// The owners of one key, dead ones among them.
#[derive(Debug, Clone, Default)]
struct Listed {
    /// Whether the change that was asked for took one away.
    removed: bool,
    owners: Vec<Owner>,
}

impl Listed {
    /// The next list of a script's answer: one byte with the number of owners, of which the highest
    /// bit says whether one was removed, and the owners.
    fn take(rest: &mut &[u8]) -> Result<Self, RegistryError> {
        let taken = rest.split_first().and_then(|(head, list)| {
            let (list, behind) = list.split_at_checked(usize::from(head & 0x7f) * 8)?;
            *rest = behind;
            Some(Self { removed: head & 0x80 != 0, owners: owners(list).collect() })
        });
        taken.ok_or_else(|| nonsense("a list of owners that is cut off"))
    }
}

/// Waits for all of these at once.
async fn join_all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut open: Vec<Pin<Box<F>>> = futures.map(Box::pin).collect();
    let mut done: Vec<Option<F::Output>> = open.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, done) in open.iter_mut().zip(&mut done).filter(|(_, done)| done.is_none()) {
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                *done = Some(output);
            }
        }
        if done.iter().all(Option::is_some) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

fn nonsense(reason: &str) -> RegistryError {
    RegistryError::Nonsense { reason: reason.to_owned() }
}

fn of_node(table: &str, node: NodeId) -> Vec<u8> {
    format!("{{kvrail}}:{table}:{node}").into_bytes()
}

impl RedisRegistry {
    /// A registry on the server, or on the cluster of the servers, at these `host:port`s. `lease` is
    /// how long this node stays registered without a heartbeat; `salt` is a random number.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] without an address.
    pub fn new(
        seeds: &[String],
        lease: Duration,
        timeouts: RegistryTimeouts,
        salt: u64,
    ) -> Result<Self, RegistryError> {
        if seeds.is_empty() {
            let reason = "a Redis registry needs an address".to_owned();
            return Err(RegistryError::Refused { reason });
        }
        let seeds = seeds.iter().map(|seed| format!("redis://{seed}")).collect();
        Ok(Self {
            link: Link::new(seeds, timeouts),
            lease,
            codes: Codes {
                heartbeat: Code::new(include_str!("heartbeat.lua")),
                nodes: Code::new(include_str!("nodes.lua")),
                change: Code::new(include_str!("change.lua")),
                purge: Code::new(include_str!("purge.lua")),
            },
            nodes: Mutex::new(None),
            sweep: Mutex::new((0, 0)),
            salt: AtomicU64::new(salt),
        })
    }

    /// The nodes, as they were a moment ago.
    async fn nodes(&self) -> Result<Arc<Nodes>, RegistryError> {
        let kept = lock(&self.nodes).clone();
        match kept.filter(|nodes| nodes.is_fresh()) {
            Some(nodes) => Ok(nodes),
            None => self.read_nodes().await,
        }
    }

    async fn read_nodes(&self) -> Result<Arc<Nodes>, RegistryError> {
        let arguments = Arguments {
            keys: vec![
                b"{kvrail}:meta".to_vec(),
                b"{kvrail}:nodes".to_vec(),
                of_node("lease", NodeId([0; 16])),
            ],
            values: Vec::new(),
        };
        let listed: Vec<redis::Value> = self.link.run(&self.codes.nodes, &arguments).await?;
        let mut listed = listed.into_iter();
        let bad = |_| nonsense("a list of nodes that is none");
        let epoch: String =
            listed.next().map_or(Ok(String::new()), redis::from_redis_value).map_err(bad)?;
        let mut nodes = Vec::new();
        while let (Some(node), Some(record), Some(left)) =
            (listed.next(), listed.next(), listed.next())
        {
            let take = |value| redis::from_redis_value::<Vec<u8>>(value).map_err(bad);
            nodes.push((take(node)?, take(record)?, redis::from_redis_value(left).map_err(bad)?));
        }
        let nodes = Arc::new(Nodes::new(u64::from_str_radix(&epoch, 16).unwrap_or(0), nodes));
        *lock(&self.nodes) = Some(Arc::clone(&nodes));
        Ok(nodes)
    }

    /// The nodes, read again where `lists` name one that registered since.
    async fn nodes_for(&self, lists: &[Listed]) -> Result<Arc<Nodes>, RegistryError> {
        let nodes = self.nodes().await?;
        if lists.iter().flat_map(|it| &it.owners).any(|owner| nodes.is_news(*owner)) {
            return self.read_nodes().await;
        }
        Ok(nodes)
    }

    /// The registration that a change of this node belongs to.
    async fn sender(&self, stamp: &Stamp) -> Result<(Owner, RegistryEpoch), RegistryError> {
        let mut nodes = self.nodes().await?;
        if nodes.live(stamp.node).is_none_or(|known| known.owner.number() != stamp.registration) {
            nodes = self.read_nodes().await?;
        }
        let known = nodes.live(stamp.node).ok_or(RegistryError::UnknownNode)?;
        if known.identity.epoch > stamp.epoch {
            return Err(RegistryError::Superseded);
        }
        if known.identity.epoch < stamp.epoch || known.owner.number() != stamp.registration {
            return Err(RegistryError::UnknownNode);
        }
        Ok((known.owner, nodes.registry))
    }

    /// Adds or removes a registration; the owners of each key then.
    async fn change(
        &self,
        op: &str,
        owner: Owner,
        order: (u64, u64),
        keys: &[BlockKey],
    ) -> Result<Vec<Listed>, RegistryError> {
        let grouped = Grouped::new(keys.iter().map(Fingerprint::of));
        let head = || {
            let (sequence, settled) = (order.0.to_string(), order.1.to_string());
            vec![op.into(), owner.to_bytes().to_vec(), sequence.into(), settled.into()]
        };
        let add = |arguments: &mut Arguments, group: usize, prints: &[[u8; 16]]| {
            let tables = ["owners", "lanes", "digests"];
            arguments.keys.extend(tables.map(|table| key(group, table)));
            arguments.values.push(prints.len().to_string().into_bytes());
            arguments.values.extend(prints.iter().map(|print| print.to_vec()));
        };
        let mut calls: Vec<(Vec<usize>, Arguments)> = Vec::new();
        let cluster = self.link.is_cluster().await?;
        for (group, prints) in grouped.groups() {
            if cluster || calls.is_empty() {
                calls.push((Vec::new(), Arguments { keys: Vec::new(), values: head() }));
            }
            if let Some((groups, arguments)) = calls.last_mut() {
                groups.push(group);
                add(arguments, group, prints);
            }
        }
        let run = |(groups, arguments): (Vec<usize>, Arguments)| async move {
            let answer: Vec<u8> = self.link.run(&self.codes.change, &arguments).await?;
            Ok((groups, answer))
        };
        let mut by_group: Vec<Vec<Listed>> = vec![Vec::new(); GROUPS];
        for answer in join_all(calls.into_iter().map(run)).await {
            let (groups, answer) = answer?;
            let mut rest = answer.as_slice();
            for group in groups {
                let asked = grouped.prints.get(group).map_or(0, Vec::len);
                let lists = by_group.get_mut(group).ok_or_else(|| nonsense("no such group"))?;
                for _ in 0..asked {
                    lists.push(Listed::take(&mut rest)?);
                }
            }
        }
        let list = |(group, at): &(usize, usize)| by_group.get(*group)?.get(*at).cloned();
        Ok(grouped.places.iter().map(|place| list(place).unwrap_or_default()).collect())
    }

    /// The owners of each key.
    async fn lists(&self, keys: &[BlockKey]) -> Result<Vec<Listed>, RegistryError> {
        let grouped = Grouped::new(keys.iter().map(Fingerprint::of));
        let get = |(group, prints): (usize, &[[u8; 16]])| {
            let mut get = cmd("HMGET");
            get.arg(key(group, "owners"));
            prints.iter().for_each(|print| {
                get.arg(&print[..]);
            });
            async move {
                let lists: Vec<Option<Vec<u8>>> = self.link.command(&get).await?;
                Ok((group, lists))
            }
        };
        let mut by_group: Vec<Vec<Option<Vec<u8>>>> = vec![Vec::new(); GROUPS];
        for answer in join_all(grouped.groups().map(get)).await {
            let (group, lists) = answer?;
            if let Some(of_group) = by_group.get_mut(group) {
                *of_group = lists;
            }
        }
        let list = |(group, at): &(usize, usize)| by_group.get(*group)?.get(*at)?.as_ref();
        let read = |place| {
            let owners = list(place).map_or_else(Vec::new, |list| owners(list).collect());
            Listed { removed: false, owners }
        };
        Ok(grouped.places.iter().map(read).collect())
    }
}
