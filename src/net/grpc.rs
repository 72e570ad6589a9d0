//! The client of `kvrail registry`.

use std::time::Duration;

use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status};

use super::codec::{decode_keys, decode_node, encode_digests, encode_keys, error_of};
use super::wire::owner_registry_client::OwnerRegistryClient;
use super::wire::{self, HeartbeatRequest, PlanRequest};
use crate::limits;
use crate::registry::{
    Announced, Batch, Beat, Heartbeat, Missing, NodeIdentity, OwnerRegistry, Partition, Plan,
    PlanQuery, Presence, Registration, RegistryEpoch, RegistryError, RegistryFuture, Segment,
    Stamp, Withdrawn, check_len,
};
use crate::types::{NodeEpoch, NodeId};

/// How long the client waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistryTimeouts {
    /// For a connection. Default 1 s.
    pub connect: Duration,
    /// For an answer, a connection included. Default 2 s: a plan that takes longer is worth less than
    /// the prefill that goes on without it.
    pub call: Duration,
}

impl Default for RegistryTimeouts {
    fn default() -> Self {
        Self { connect: Duration::from_secs(1), call: Duration::from_secs(2) }
    }
}

/// A registry over gRPC. It connects when first asked, and again after a failure when next asked;
/// clones share the connection.
#[derive(Debug, Clone)]
pub struct GrpcRegistry {
    client: OwnerRegistryClient<Channel>,
    timeouts: RegistryTimeouts,
}

impl GrpcRegistry {
    /// A client for `endpoint`, `host:port` or `http://host:port`. Call it within a Tokio runtime: the
    /// connection's task lives there.
    ///
    /// # Errors
    /// [`RegistryError::Refused`] where `endpoint` is no address.
    pub fn new(endpoint: &str, timeouts: RegistryTimeouts) -> Result<Self, RegistryError> {
        let uri = if endpoint.contains("://") {
            endpoint.to_owned()
        } else {
            format!("http://{endpoint}")
        };
        let refused = |_: &dyn std::error::Error| RegistryError::Refused {
            reason: format!("{endpoint:?} is no address of the form host:port"),
        };
        let endpoint = Endpoint::from_shared(uri).map_err(|error| refused(&error))?;
        if endpoint.uri().port().is_none() {
            return Err(refused(&std::fmt::Error));
        }
        let channel = endpoint
            .connect_timeout(timeouts.connect)
            .tcp_nodelay(true)
            // A registry that vanished without a word is noticed within seconds, also while idle.
            .http2_keep_alive_interval(Duration::from_secs(5))
            .keep_alive_timeout(timeouts.call)
            .keep_alive_while_idle(true)
            .connect_lazy();
        let client = OwnerRegistryClient::new(channel)
            .max_decoding_message_size(limits::REGISTRY_MESSAGE_BYTES_MAX)
            .max_encoding_message_size(limits::REGISTRY_MESSAGE_BYTES_MAX);
        Ok(Self { client, timeouts })
    }

    async fn call<T>(
        &self,
        answer: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, RegistryError> {
        match tokio::time::timeout(self.timeouts.call, answer).await {
            Err(_elapsed) => Err(RegistryError::TimedOut(self.timeouts.call)),
            Ok(Err(status)) => Err(error_of(&status)),
            Ok(Ok(response)) => Ok(response.into_inner()),
        }
    }
}

fn stamp_message(stamp: &Stamp) -> wire::Batch {
    wire::Batch {
        node: stamp.node.0.to_vec().into(),
        epoch: stamp.epoch.0,
        registration: stamp.registration,
        sequence: stamp.sequence,
        settled: stamp.settled,
        ..wire::Batch::default()
    }
}

fn batch_message(batch: Batch<'_>) -> Result<wire::Batch, RegistryError> {
    check_len("a batch", batch.keys.len(), limits::REGISTRY_BATCH_MAX)?;
    Ok(wire::Batch { keys: encode_keys(batch.keys).into(), ..stamp_message(&batch.stamp) })
}

/// A heartbeat's answer as it came, checked.
fn beat_of(reply: wire::HeartbeatReply) -> Result<Beat, RegistryError> {
    let drifted = reply.drifted.iter().map(|number| {
        let number = u16::try_from(*number).ok();
        number.and_then(Partition::new).ok_or_else(|| nonsense("a partition that is none"))
    });
    Ok(Beat {
        registration: Registration {
            registry: RegistryEpoch(reply.registry_epoch),
            number: reply.number,
            lease: Duration::from_millis(reply.lease_ms.into()),
        },
        drifted: drifted.collect::<Result<_, _>>()?,
        sole: decode_keys(&reply.sole).map_err(|_cut| nonsense("keys that are cut off"))?,
    })
}

fn nonsense(reason: &str) -> RegistryError {
    RegistryError::Nonsense { reason: reason.to_owned() }
}

/// A plan as it came, checked: every segment within the positions asked, in order, and of a known
/// owner.
fn plan_of(reply: wire::PlanReply, asked: usize) -> Result<Plan, RegistryError> {
    let owners = reply.owners.into_iter().map(|owner| {
        Ok(NodeIdentity {
            node: decode_node(&owner.node)?,
            epoch: NodeEpoch(owner.epoch),
            address: owner.address,
        })
    });
    let owners: Vec<_> = owners
        .collect::<Result<_, RegistryError>>()
        .map_err(|_bad_id| nonsense("an owner without a node id"))?;
    let known = u32::try_from(owners.len()).unwrap_or(u32::MAX);
    let (triples, rest) = reply.segments.as_chunks::<3>();
    if !rest.is_empty() {
        return Err(nonsense("a segment that is cut off"));
    }
    let mut segments = Vec::with_capacity(triples.len());
    let (mut end, mut covered) = (0_u64, 0_u64);
    for &[owner, first, count] in triples {
        let (from, len) = (u64::from(first), u64::from(count));
        if owner >= known || len == 0 || from < end {
            return Err(nonsense("segments out of order, or of nobody"));
        }
        end = from + len;
        covered += len;
        segments.push(Segment { owner, first, count });
    }
    let asked = u64::try_from(asked).unwrap_or(u64::MAX);
    if end > asked || covered + u64::from(reply.missing) != asked {
        return Err(nonsense("segments that do not add up to what was asked"));
    }
    Ok(Plan {
        registry: RegistryEpoch(reply.registry_epoch),
        owners,
        segments,
        missing: reply.missing,
    })
}

impl OwnerRegistry for GrpcRegistry {
    fn heartbeat<'a>(
        &'a self,
        node: &'a NodeIdentity,
        heartbeat: Heartbeat<'a>,
    ) -> RegistryFuture<'a, Beat> {
        let presence = match heartbeat.presence {
            Presence::Here => wire::Presence::Here,
            Presence::Afresh => wire::Presence::Afresh,
            Presence::Leaving => wire::Presence::Leaving,
        };
        let request = HeartbeatRequest {
            identity: Some(wire::NodeIdentity {
                node: node.node.0.to_vec().into(),
                epoch: node.epoch.0,
                address: node.address.clone(),
            }),
            presence: presence.into(),
            outstanding_bytes: heartbeat.load.outstanding_bytes,
            pause_ms: heartbeat.load.pause_ms,
            digests: encode_digests(heartbeat.digests).into(),
        };
        let mut client = self.client.clone();
        Box::pin(async move { beat_of(self.call(client.heartbeat(request)).await?) })
    }

    fn announce<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Announced> {
        let mut client = self.client.clone();
        Box::pin(async move {
            let reply = self.call(client.announce(batch_message(batch)?)).await?;
            if reply.owners.len() != batch.keys.len() {
                return Err(nonsense("not one count for each key"));
            }
            Ok(Announced { registry: RegistryEpoch(reply.registry_epoch), owners: reply.owners })
        })
    }

    fn withdraw<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Withdrawn> {
        let mut client = self.client.clone();
        Box::pin(async move {
            let reply = self.call(client.withdraw(batch_message(batch)?)).await?;
            let within = |at: &u32| usize::try_from(*at).is_ok_and(|at| at < batch.keys.len());
            if !reply.sole.iter().all(within) {
                return Err(nonsense("a position that was not asked"));
            }
            Ok(Withdrawn { registry: RegistryEpoch(reply.registry_epoch), sole: reply.sole })
        })
    }

    fn forget<'a>(&'a self, stamp: Stamp, partition: Partition) -> RegistryFuture<'a, ()> {
        let mut client = self.client.clone();
        let request = wire::ForgetRequest {
            stamp: Some(stamp_message(&stamp)),
            partition: partition.get().into(),
        };
        Box::pin(async move {
            let _nothing = self.call(client.forget(request)).await?;
            Ok(())
        })
    }

    fn report_missing<'a>(&'a self, missing: Missing<'a>) -> RegistryFuture<'a, u32> {
        let mut client = self.client.clone();
        Box::pin(async move {
            check_len("a report", missing.keys.len(), limits::REGISTRY_BATCH_MAX)?;
            let request = wire::MissingRequest {
                owner: missing.owner.0.to_vec().into(),
                epoch: missing.epoch.0,
                keys: encode_keys(missing.keys).into(),
            };
            Ok(self.call(client.report_missing(request)).await?.removed)
        })
    }

    fn plan<'a>(&'a self, query: PlanQuery<'a>) -> RegistryFuture<'a, Plan> {
        let mut client = self.client.clone();
        Box::pin(async move {
            query.check()?;
            let packed = |nodes: &[NodeId]| {
                let packed: Vec<u8> = nodes.iter().flat_map(|node| node.0).collect();
                packed.into()
            };
            let request = PlanRequest {
                node: query.asker.0.to_vec().into(),
                keys: encode_keys(query.keys).into(),
                avoid: packed(query.avoid),
                same_host: packed(query.same_host),
                same_rail: packed(query.same_rail),
                choice: query.choice,
            };
            let reply = self.call(client.plan(request)).await?;
            plan_of(reply, query.keys.len())
        })
    }
}
