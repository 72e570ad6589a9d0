//! Heartbeats, and what they do besides: digests are compared, hints fetched, and registrations that
//! are over swept out.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use redis::cmd;

use super::link::Arguments;
use super::nodes::{Nodes, load_text};
use super::owner::{GROUPS, Owner, group_of, key, owners};
use super::{RedisRegistry, nonsense, of_node};
use crate::limits;
use crate::net::codec::{decode_keys, encode_keys};
use crate::registry::{
    Beat, Fingerprint, Heartbeat, NodeIdentity, Partition, PartitionDigest, Presence, Registration,
    RegistryEpoch, RegistryError, Stamp, check_address, check_len,
};
use crate::sync::lock;
use crate::types::BlockKey;

/// Fields that one step of a sweep, or of a forgetting, looks at.
const SCAN_FIELDS: usize = 1024;

/// How long blocks wait to be told to the only owner that is left, milliseconds: far longer than any
/// heartbeat takes to come.
const SOLE_MS: u64 = 60_000;

/// What `heartbeat.lua` answers: the registry's epoch, the registration's number, and blocks of which
/// the node is the only owner.
fn standing(answer: Vec<redis::Value>) -> Result<(u64, u64, Vec<BlockKey>), RegistryError> {
    let bad = |_| nonsense("a heartbeat's answer that is none");
    let mut answer = answer.into_iter();
    let mut next = || answer.next().ok_or_else(|| nonsense("a heartbeat's answer that is cut off"));
    let status: String = redis::from_redis_value(next()?).map_err(bad)?;
    match status.as_str() {
        "ok" => {}
        "superseded" => return Err(RegistryError::Superseded),
        _ => {
            let reason = format!("it knows {} live nodes, its limit", limits::REGISTRY_NODES_MAX);
            return Err(RegistryError::Full { reason });
        }
    }
    let epoch: String = redis::from_redis_value(next()?).map_err(bad)?;
    let epoch = u64::from_str_radix(&epoch, 16).ok();
    let epoch = epoch.ok_or_else(|| nonsense("an epoch that is none"))?;
    let number: Vec<u8> = redis::from_redis_value(next()?).map_err(bad)?;
    let number = owners(&number).next().map_or(0, Owner::number);
    let sole: Vec<Vec<u8>> = redis::from_redis_value(next()?).map_err(bad)?;
    let mut keys = Vec::with_capacity(sole.len());
    for packed in sole {
        keys.extend(decode_keys(&packed)?);
    }
    Ok((epoch, number, keys))
}

impl RedisRegistry {
    /// Leaves word for nodes that became the only owners of blocks.
    pub(super) async fn tell_sole(&self, nodes: &Nodes, sole: &[(Owner, BlockKey)]) {
        let mut by_owner = BTreeMap::<Owner, Vec<BlockKey>>::new();
        for (owner, key) in sole {
            by_owner.entry(*owner).or_default().push(*key);
        }
        for (owner, keys) in by_owner {
            let Some(known) = nodes.owner(owner) else { continue };
            let list = of_node("sole", known.identity.node);
            let keys = keys.get(..keys.len().min(limits::REGISTRY_HINTS_MAX)).unwrap_or(&keys);
            let packed: Vec<Vec<u8>> = keys.iter().map(|key| encode_keys(&[*key])).collect();
            let most = -i64::try_from(limits::REGISTRY_HINTS_MAX).unwrap_or(1);
            let mut push = cmd("RPUSH");
            let mut trim = cmd("LTRIM");
            let mut expire = cmd("PEXPIRE");
            push.arg(&list).arg(packed);
            trim.arg(&list).arg(most).arg(-1);
            expire.arg(&list).arg(SOLE_MS);
            for command in [push, trim, expire] {
                // A hint that is lost is found when the block is announced the next time.
                if self.link.command::<redis::Value>(&command).await.is_err() {
                    return;
                }
            }
        }
    }

    pub(super) async fn beat(
        &self,
        node: &NodeIdentity,
        heartbeat: Heartbeat<'_>,
    ) -> Result<Beat, RegistryError> {
        check_address(&node.address)?;
        check_len("digests", heartbeat.digests.len(), limits::REGISTRY_PARTITIONS.into())?;
        let presence = match heartbeat.presence {
            Presence::Here => "here",
            Presence::Afresh => "afresh",
            Presence::Leaving => "leaving",
        };
        let salt = self.salt.fetch_add(1, Ordering::Relaxed);
        let arguments = Arguments {
            keys: vec![
                b"{kvrail}:meta".to_vec(),
                b"{kvrail}:nodes".to_vec(),
                of_node("lease", node.node),
                of_node("sole", node.node),
            ],
            values: vec![
                node.node.0.to_vec(),
                format!("{:016x}", node.epoch.0).into_bytes(),
                presence.into(),
                load_text(heartbeat.load).into_bytes(),
                node.address.clone().into_bytes(),
                self.lease.as_millis().max(1).to_string().into_bytes(),
                format!("{salt:016x}").into_bytes(),
            ],
        };
        let answer: Vec<redis::Value> = self.link.run(&self.codes.heartbeat, &arguments).await?;
        let (epoch, number, sole) = standing(answer)?;
        let owner = Owner::new(number);
        let kept = lock(&self.nodes).clone();
        let news = kept.is_none_or(|nodes| nodes.owner(owner).is_none());
        if news {
            *lock(&self.nodes) = None;
        }
        // The node is registered, whatever becomes of the rest: a part of a cluster may be down.
        let drifted =
            if number == 0 { Ok(Vec::new()) } else { self.drifted(owner, heartbeat).await };
        let drifted = drifted.unwrap_or_default();
        if presence == "here" {
            self.sweep().await.ok();
        }
        let registration =
            Registration { registry: RegistryEpoch(epoch), number, lease: self.lease };
        Ok(Beat { registration, drifted, sole })
    }

    /// The partitions whose digests are not those that the node tells.
    async fn drifted(
        &self,
        owner: Owner,
        heartbeat: Heartbeat<'_>,
    ) -> Result<Vec<Partition>, RegistryError> {
        let mut drifted = Vec::new();
        let same = |a: &PartitionDigest, b: &PartitionDigest| {
            group_of(a.partition) == group_of(b.partition)
        };
        for told in heartbeat.digests.chunk_by(same) {
            let Some(first) = told.first() else { continue };
            let mut get = cmd("HMGET");
            get.arg(key(group_of(first.partition), "digests"));
            for told in told {
                get.arg(owner.digest_field(told.partition));
            }
            let kept: Vec<Option<Vec<u8>>> = self.link.command(&get).await?;
            for (told, kept) in told.iter().zip(kept) {
                let kept = kept.as_deref().and_then(|kept| {
                    let (of, digest) = kept.split_first_chunk::<8>()?;
                    (*of == owner.to_bytes())
                        .then(|| digest.try_into().map(u64::from_be_bytes).ok())?
                });
                if kept.unwrap_or(0) != told.digest {
                    drifted.push(told.partition);
                }
            }
        }
        Ok(drifted)
    }

    async fn scan(
        &self,
        group: usize,
        cursor: u64,
    ) -> Result<(u64, Vec<(Vec<u8>, Vec<u8>)>), RegistryError> {
        let mut scan = cmd("HSCAN");
        scan.arg(key(group, "owners")).arg(cursor).arg("COUNT").arg(SCAN_FIELDS);
        self.link.command(&scan).await
    }

    /// One step of taking out registrations that are over.
    async fn sweep(&self) -> Result<(), RegistryError> {
        let (group, cursor) = *lock(&self.sweep);
        let nodes = self.nodes().await?;
        let (next, fields) = self.scan(group, cursor).await?;
        let group_next = if next == 0 { (group + 1) % GROUPS } else { group };
        *lock(&self.sweep) = (group_next, next);
        let mut values = Vec::new();
        for (print, list) in fields {
            let kept: Vec<u8> = owners(&list)
                .filter(|owner| !nodes.is_over(*owner))
                .flat_map(Owner::to_bytes)
                .collect();
            if kept.len() != list.len() {
                values.extend([print, list, kept]);
            }
        }
        if values.is_empty() {
            return Ok(());
        }
        let arguments = Arguments { keys: vec![key(group, "owners")], values };
        let _purged: u64 = self.link.run(&self.codes.purge, &arguments).await?;
        Ok(())
    }

    pub(super) async fn forget_all(
        &self,
        stamp: Stamp,
        partition: Partition,
    ) -> Result<(), RegistryError> {
        let (owner, _) = self.sender(&stamp).await?;
        let group = group_of(partition);
        let mut cursor = 0;
        loop {
            let (next, fields) = self.scan(group, cursor).await?;
            let mine = fields.into_iter().filter_map(|(print, list)| {
                let print = print.try_into().ok()?;
                let listed = owners(&list).any(|listed| listed == owner);
                let here = Fingerprint::from_bytes(print).partition() == partition;
                (listed && here).then(|| print.to_vec())
            });
            let mine: Vec<Vec<u8>> = mine.collect();
            let (sequence, settled) = (stamp.sequence.to_string(), stamp.settled.to_string());
            let mut values = vec![b"-".to_vec(), owner.to_bytes().to_vec()];
            values.extend([sequence.into_bytes(), settled.into_bytes()]);
            values.push(mine.len().to_string().into_bytes());
            values.extend(mine);
            let keys = ["owners", "lanes", "digests"].map(|table| key(group, table)).to_vec();
            let arguments = Arguments { keys, values };
            let _left: Vec<u8> = self.link.run(&self.codes.change, &arguments).await?;
            cursor = next;
            if cursor == 0 {
                break;
            }
        }
        let mut clear = cmd("HDEL");
        clear.arg(key(group, "digests")).arg(owner.digest_field(partition));
        let _cleared: u64 = self.link.command(&clear).await?;
        Ok(())
    }
}
