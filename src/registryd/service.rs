//! The calls: decoded, passed to the directory, encoded, counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tonic::{Request, Response, Status};

use super::RegistrydStats;
use crate::event::RegistryCall;
use crate::limits;
use crate::net::wire::owner_registry_server::OwnerRegistry;
use crate::net::wire::{self, AnnounceReply, HeartbeatReply, HeartbeatRequest};
use crate::net::wire::{ForgetReply, ForgetRequest, MissingReply, MissingRequest};
use crate::net::wire::{PlanReply, PlanRequest, WithdrawReply};
use crate::net::{decode_digests, decode_keys, decode_node, encode_keys, status_of};
use crate::registry::{
    Batch, Directory, Heartbeat, Load, Missing, NodeIdentity, Partition, PlanQuery, Presence,
    RegistryError, Stamp,
};
use crate::runtime::clock::Clock;
use crate::types::{NodeEpoch, NodeId};

/// How often each call came. The counts are statistics: no order among them is needed.
#[derive(Debug, Default)]
pub(super) struct Calls {
    answered: [AtomicU64; RegistryCall::ALL.len()],
    refused: [AtomicU64; RegistryCall::ALL.len()],
    keys: AtomicU64,
}

impl Calls {
    fn note(&self, call: RegistryCall, answered: bool, keys: usize) {
        let counts = if answered {
            let keys = u64::try_from(keys).unwrap_or(u64::MAX);
            self.keys.fetch_add(keys, Ordering::Relaxed);
            &self.answered
        } else {
            &self.refused
        };
        let at = RegistryCall::ALL.iter().position(|known| *known == call);
        if let Some(count) = at.and_then(|at| counts.get(at)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn read(&self, stats: &mut RegistrydStats) {
        stats.answered = self.answered.each_ref().map(|c| c.load(Ordering::Relaxed));
        stats.refused = self.refused.each_ref().map(|c| c.load(Ordering::Relaxed));
        stats.keys = self.keys.load(Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(super) struct Service {
    directory: Arc<Directory>,
    calls: Arc<Calls>,
    clock: Clock,
}

impl Service {
    pub(super) const fn new(directory: Arc<Directory>, calls: Arc<Calls>, clock: Clock) -> Self {
        Self { directory, calls, clock }
    }

    fn answer<T>(
        &self,
        call: RegistryCall,
        answer: Result<(T, usize), RegistryError>,
    ) -> Result<Response<T>, Status> {
        let keys = answer.as_ref().map_or(0, |(_, keys)| *keys);
        self.calls.note(call, answer.is_ok(), keys);
        match answer {
            Ok((reply, _)) => Ok(Response::new(reply)),
            Err(error) => Err(status_of(&error)),
        }
    }

    fn on_heartbeat(&self, request: HeartbeatRequest) -> Result<HeartbeatReply, RegistryError> {
        let refused = |reason: &str| RegistryError::Refused { reason: reason.to_owned() };
        let presence = match wire::Presence::try_from(request.presence) {
            Ok(wire::Presence::Here) => Presence::Here,
            Ok(wire::Presence::Afresh) => Presence::Afresh,
            Ok(wire::Presence::Leaving) => Presence::Leaving,
            Err(_unknown) => return Err(refused("a presence is 0, 1 or 2")),
        };
        let identity =
            request.identity.ok_or_else(|| refused("a heartbeat needs the node's identity"))?;
        let node = NodeIdentity {
            node: decode_node(&identity.node)?,
            epoch: NodeEpoch(identity.epoch),
            address: identity.address,
        };
        let load =
            Load { outstanding_bytes: request.outstanding_bytes, pause_ms: request.pause_ms };
        let digests = decode_digests(&request.digests)?;
        let heartbeat = Heartbeat { presence, load, digests: &digests };
        let beat = self.directory.heartbeat(&node, heartbeat, self.clock.now())?;
        let standing = beat.registration;
        Ok(HeartbeatReply {
            registry_epoch: standing.registry.0,
            number: standing.number,
            lease_ms: millis(standing.lease),
            drifted: beat.drifted.iter().map(|partition| partition.get().into()).collect(),
            sole: encode_keys(&beat.sole).into(),
        })
    }

    fn with_batch<T>(
        message: &wire::Batch,
        apply: impl FnOnce(Batch<'_>) -> Result<T, RegistryError>,
    ) -> Result<(T, usize), RegistryError> {
        let keys = decode_keys(&message.keys)?;
        let reply = apply(Batch { stamp: stamp_of(message)?, keys: &keys })?;
        Ok((reply, keys.len()))
    }

    fn on_forget(&self, request: &ForgetRequest) -> Result<ForgetReply, RegistryError> {
        let refused = |reason: &str| RegistryError::Refused { reason: reason.to_owned() };
        let message = request.stamp.as_ref().ok_or_else(|| refused("a change needs its stamp"))?;
        let number = u16::try_from(request.partition).ok();
        let partition =
            number.and_then(Partition::new).ok_or_else(|| refused("there is no such partition"))?;
        self.directory.forget(stamp_of(message)?, partition, self.clock.now())?;
        Ok(ForgetReply {})
    }

    fn on_report(&self, request: &MissingRequest) -> Result<(MissingReply, usize), RegistryError> {
        let keys = decode_keys(&request.keys)?;
        let owner = decode_node(&request.owner)?;
        let missing = Missing { owner, epoch: NodeEpoch(request.epoch), keys: &keys };
        let removed = self.directory.report_missing(missing, self.clock.now())?;
        Ok((MissingReply { removed }, keys.len()))
    }

    fn on_plan(&self, request: &PlanRequest) -> Result<(PlanReply, usize), RegistryError> {
        let keys = decode_keys(&request.keys)?;
        let near = |what, bytes| decode_nodes(what, bytes, limits::REGISTRY_NEAR_MAX);
        let query = PlanQuery {
            asker: decode_node(&request.node)?,
            keys: &keys,
            avoid: &decode_nodes("avoid", &request.avoid, limits::REGISTRY_AVOID_MAX)?,
            same_host: &near("same_host", &request.same_host)?,
            same_rail: &near("same_rail", &request.same_rail)?,
            choice: request.choice,
        };
        let plan = self.directory.plan(query, self.clock.now())?;
        let owner = |owner: NodeIdentity| wire::NodeIdentity {
            node: owner.node.0.to_vec().into(),
            epoch: owner.epoch.0,
            address: owner.address,
        };
        let reply = PlanReply {
            registry_epoch: plan.registry.0,
            segments: plan
                .segments
                .iter()
                .flat_map(|segment| [segment.owner, segment.first, segment.count])
                .collect(),
            owners: plan.owners.into_iter().map(owner).collect(),
            missing: plan.missing,
        };
        Ok((reply, keys.len()))
    }
}

fn stamp_of(message: &wire::Batch) -> Result<Stamp, RegistryError> {
    Ok(Stamp {
        node: decode_node(&message.node)?,
        epoch: NodeEpoch(message.epoch),
        registration: message.registration,
        sequence: message.sequence,
        settled: message.settled,
    })
}

fn millis(span: Duration) -> u32 {
    u32::try_from(span.as_millis()).unwrap_or(u32::MAX)
}

fn decode_nodes(what: &str, bytes: &[u8], max: usize) -> Result<Vec<NodeId>, RegistryError> {
    let (nodes, rest) = bytes.as_chunks::<16>();
    if !rest.is_empty() || nodes.len() > max {
        return Err(RegistryError::Refused {
            reason: format!(
                "{what} holds at most {max} node ids of 16 bytes each, got {} bytes",
                bytes.len()
            ),
        });
    }
    Ok(nodes.iter().copied().map(NodeId).collect())
}

#[tonic::async_trait]
impl OwnerRegistry for Service {
    async fn heartbeat(
        &self,
        request: Request<HeartbeatRequest>,
    ) -> Result<Response<HeartbeatReply>, Status> {
        let reply = self.on_heartbeat(request.into_inner());
        self.answer(RegistryCall::Heartbeat, reply.map(|reply| (reply, 0)))
    }

    async fn announce(
        &self,
        request: Request<wire::Batch>,
    ) -> Result<Response<AnnounceReply>, Status> {
        let reply = Self::with_batch(request.get_ref(), |batch| {
            let answer = self.directory.announce(batch, self.clock.now())?;
            Ok(AnnounceReply { registry_epoch: answer.registry.0, owners: answer.owners })
        });
        self.answer(RegistryCall::Announce, reply)
    }

    async fn withdraw(
        &self,
        request: Request<wire::Batch>,
    ) -> Result<Response<WithdrawReply>, Status> {
        let reply = Self::with_batch(request.get_ref(), |batch| {
            let answer = self.directory.withdraw(batch, self.clock.now())?;
            Ok(WithdrawReply { registry_epoch: answer.registry.0, sole: answer.sole })
        });
        self.answer(RegistryCall::Withdraw, reply)
    }

    async fn forget(
        &self,
        request: Request<ForgetRequest>,
    ) -> Result<Response<ForgetReply>, Status> {
        let reply = self.on_forget(request.get_ref());
        self.answer(RegistryCall::Withdraw, reply.map(|reply| (reply, 0)))
    }

    async fn report_missing(
        &self,
        request: Request<MissingRequest>,
    ) -> Result<Response<MissingReply>, Status> {
        let reply = self.on_report(request.get_ref());
        self.answer(RegistryCall::Report, reply)
    }

    async fn plan(&self, request: Request<PlanRequest>) -> Result<Response<PlanReply>, Status> {
        let reply = self.on_plan(request.get_ref());
        self.answer(RegistryCall::Plan, reply)
    }
}
