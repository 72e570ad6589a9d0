//! The forms, each started afresh.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::Duration;

use kvrail::net::{GrpcRegistry, RedisRegistry, RegistryTimeouts};
use kvrail::registry::{
    Batch, Beat, Directory, DirectoryOptions, Heartbeat, InProcess, NodeIdentity, OwnerRegistry,
    PartitionDigest, Plan, PlanQuery, Presence, RegistryEpoch, RegistryError, Stamp,
};
use kvrail::registryd::{Registryd, RegistrydOptions};
use kvrail::runtime::clock::Clock;
use kvrail::types::{BlockHash, BlockKey, NamespaceId, NodeEpoch, NodeId};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use crate::redis_server::{self, RedisServer};

/// A running registry of one form.
pub(crate) struct Form {
    pub(crate) registry: Arc<dyn OwnerRegistry>,
    pub(crate) runtime: Runtime,
    /// Whether the registry may be full at some thousand keys, and its answers be counted on.
    _server: Box<dyn Any>,
    nodes: AtomicU16,
    namespaces: AtomicU64,
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Longer than any call takes on a loaded machine.
fn timeouts() -> RegistryTimeouts {
    RegistryTimeouts { connect: Duration::from_secs(10), call: Duration::from_secs(30) }
}

impl Form {
    fn new(runtime: Runtime, registry: Arc<dyn OwnerRegistry>, server: Box<dyn Any>) -> Self {
        let (nodes, namespaces) = (AtomicU16::new(1), AtomicU64::new(1));
        Self { registry, runtime, _server: server, nodes, namespaces }
    }

    pub(crate) fn in_process(lease: Duration) -> Self {
        let options = DirectoryOptions { lease, ..DirectoryOptions::default() };
        let directory = Arc::new(Directory::new(RegistryEpoch(1), options));
        let clock = Clock::start();
        let registry = InProcess::new(directory, move || clock.now());
        Self::new(runtime(), Arc::new(registry), Box::new(()))
    }

    pub(crate) fn grpc(lease: Duration) -> Self {
        let runtime = runtime();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let directory = DirectoryOptions { lease, ..DirectoryOptions::default() };
        let options = RegistrydOptions { directory, ..RegistrydOptions::default() };
        let server = Registryd::new(Clock::start(), options);
        drop(runtime.spawn(async move { server.serve(listener, std::future::pending()).await }));
        let entered = runtime.enter();
        let registry = GrpcRegistry::new(&address.to_string(), timeouts()).unwrap();
        drop(entered);
        Self::new(runtime, Arc::new(registry), Box::new(()))
    }

    fn on_redis(lease: Duration, servers: Vec<RedisServer>) -> Self {
        let seeds: Vec<String> = servers.iter().map(RedisServer::address).collect();
        let registry = RedisRegistry::new(&seeds, lease, timeouts(), 7).unwrap();
        Self::new(runtime(), Arc::new(registry), Box::new(servers))
    }

    pub(crate) fn redis(lease: Duration) -> Self {
        Self::on_redis(lease, vec![RedisServer::start()])
    }

    pub(crate) fn redis_cluster(lease: Duration) -> Self {
        Self::on_redis(lease, redis_server::cluster().into())
    }

    /// Keys that no other case has.
    pub(crate) fn keyspace(&self) -> Keyspace {
        Keyspace(NamespaceId(self.namespaces.fetch_add(1, Ordering::Relaxed)))
    }

    /// A node that no other case has, not registered.
    pub(crate) fn stranger(&self) -> Node {
        let number = self.nodes.fetch_add(1, Ordering::Relaxed);
        let mut id = [0; 16];
        id[..2].copy_from_slice(&number.to_be_bytes());
        let identity = NodeIdentity {
            node: NodeId(id),
            epoch: NodeEpoch(1),
            address: format!("host{number}:7070"),
        };
        Node { registry: Arc::clone(&self.registry), identity, number: 0, sequence: 0 }
    }

    /// As [`Self::stranger`], registered.
    pub(crate) async fn node(&self) -> Node {
        let mut node = self.stranger();
        node.join(Presence::Afresh).await;
        node
    }
}

/// Keys of one case.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Keyspace(NamespaceId);

impl Keyspace {
    pub(crate) fn key(self, number: u32) -> BlockKey {
        BlockKey { namespace: self.0, hash: BlockHash::new(&number.to_le_bytes()).unwrap() }
    }

    pub(crate) fn keys(self, numbers: impl IntoIterator<Item = u32>) -> Vec<BlockKey> {
        numbers.into_iter().map(|number| self.key(number)).collect()
    }
}

/// A node of a case: it numbers its batches, and settles each before the next.
#[derive(Debug)]
pub(crate) struct Node {
    registry: Arc<dyn OwnerRegistry>,
    pub(crate) identity: NodeIdentity,
    pub(crate) number: u64,
    pub(crate) sequence: u64,
}

impl Node {
    pub(crate) fn id(&self) -> NodeId {
        self.identity.node
    }

    pub(crate) async fn join(&mut self, presence: Presence) {
        let heartbeat = Heartbeat { presence, ..Heartbeat::default() };
        let beat = self.registry.heartbeat(&self.identity, heartbeat).await.unwrap();
        self.number = beat.registration.number;
    }

    pub(crate) async fn beat(&self, digests: &[PartitionDigest]) -> Beat {
        let heartbeat = Heartbeat { digests, ..Heartbeat::default() };
        self.registry.heartbeat(&self.identity, heartbeat).await.unwrap()
    }

    pub(crate) fn stamp(&mut self) -> Stamp {
        self.sequence += 1;
        Stamp {
            node: self.identity.node,
            epoch: self.identity.epoch,
            registration: self.number,
            sequence: self.sequence,
            settled: self.sequence - 1,
        }
    }

    pub(crate) async fn announce(&mut self, keys: &[BlockKey]) -> Result<Vec<u32>, RegistryError> {
        let batch = Batch { stamp: self.stamp(), keys };
        Ok(self.registry.announce(batch).await?.owners)
    }

    pub(crate) async fn withdraw(&mut self, keys: &[BlockKey]) -> Result<Vec<u32>, RegistryError> {
        let batch = Batch { stamp: self.stamp(), keys };
        Ok(self.registry.withdraw(batch).await?.sole)
    }

    /// A plan for this node.
    pub(crate) async fn plan(&self, keys: &[BlockKey], choice: u64) -> Plan {
        let query = PlanQuery { choice, ..PlanQuery::new(self.identity.node, keys) };
        self.registry.plan(query).await.unwrap()
    }
}

/// The runs of a plan: owner, first position, count.
pub(crate) fn runs(plan: &Plan) -> Vec<(NodeId, u32, u32)> {
    plan.runs().map(|(owner, segment)| (owner.node, segment.first, segment.count)).collect()
}
