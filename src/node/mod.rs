//! One node, put together: pools, store, fabric, data thread, reclaimer, registry, door.
//!
//! Start in the order in which things depend on each other, stop in the opposite one. Who talks to
//! whom:
//!
//! ```text
//! engine --door--> Inner --hits--> Store <--pins, commits-- Peers <--events-- Fabric <--> other nodes
//!                    |               ^                        |
//!                    | misses        | evicts                 | reserves, publishes
//!                    v               |                        v
//!                 Fetcher        Reclaimer ----------> Residency (Store + pools + announcer)
//!                    '--plan--> OwnerRegistry <--announces-- Announcer
//! ```

mod door;
mod evictions;
mod fetcher;
#[cfg(feature = "gpu")]
mod gpu;
#[cfg(not(feature = "gpu"))]
#[path = "no_gpu.rs"]
mod gpu;
mod imports;
mod in_place;
mod landing;
mod options;
mod residency;
mod snapshot;
mod transport;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub use in_place::{Engine, Opened};
pub use options::{GpuOptions, NodeError, NodeOptions, RegistryChoice};
pub use residency::Reserved;
pub use snapshot::NodeSnapshot;
pub use transport::TransportChoice;

use crate::event::EventSink;
use crate::fabric::Fabric;
use crate::health::BreakerConfig;
use crate::limits;
use crate::memory::{ForeignFabric, HostPool, PoolOptions, check_room};
use crate::net::{GrpcRegistry, RedisRegistry, RegistryTimeouts};
use crate::peer::{LocalNode, PeerConfig, Peers, RequesterConfig};
use crate::protocol::door::stat::GpuStat;
use crate::protocol::{RegionEntry, SecretKey};
use crate::registry::{
    Directory, DirectoryOptions, InProcess, Load, NodeIdentity, OwnerRegistry, Partition,
    RegistryEpoch,
};
use crate::runtime::announce::{
    AnnounceOptions, Announcer, AnnouncerHandle, AnnouncerParts, Hints, Residents,
};
use crate::runtime::clock::Clock;
use crate::runtime::data::{self, DataHandle, DataJoin};
use crate::runtime::door::{Door, SocketFile};
use crate::runtime::reclaim::Reclaimer;
use crate::sim::fault::Faulty;
use crate::store::{Store, StoreConfig};
use crate::sync::Mutex;
use crate::sys::memory::prefer_huge_pages;
use crate::sys::watch::Watch;
use crate::types::{BlockKey, Namespace, NamespaceId, NodeId, PoolId, RequesterId};
use tokio::sync::oneshot;

use fetcher::{Fetcher, FetcherParts};
use gpu::{Gpu, Shadows};
use imports::Imports;
use in_place::{Copies, Layouts};
use landing::NodeLanding;
use residency::{DevicePool, Residency};
use transport::{Chosen, PeerAddress, Registered, Served};

/// How long a local client waits for the registry to know what it saved.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest that a holder may take to answer a lend or a completion.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long after its last lease's deadline a node that leaves waits for that lease's end.
const DRAIN_MARGIN: Duration = Duration::from_secs(1);
/// How long each part of a node has to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// How long a silent node stays listed in a registry on Redis, where no registry of its own decides.
const REDIS_LEASE: Duration = Duration::from_secs(10);

/// What the node's threads and tasks share.
#[derive(Debug)]
pub struct Inner {
    identity: NodeIdentity,
    requester: RequesterId,
    transport: &'static str,
    registry_name: String,
    residency: Arc<Residency>,
    fetcher: Arc<Fetcher>,
    data: DataHandle<PeerAddress>,
    announcer: AnnouncerHandle,
    names: Mutex<BTreeMap<NamespaceId, Namespace>>,
    imports: Imports,
    in_place: Layouts,
    copies: Copies,
    gpu: Option<(GpuStat, Arc<Shadows>)>,
    clock: Clock,
}

/// A running node.
#[derive(Debug)]
pub struct Node {
    inner: Arc<Inner>,
    listen: SocketAddr,
    stop_door: oneshot::Sender<()>,
    door: tokio::task::JoinHandle<()>,
    socket: Arc<SocketFile>,
    announcer: Announcer,
    reclaimer: Reclaimer,
    data: DataJoin,
    lease_ttl: Duration,
}

impl Residents for Residency {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let mut views = Vec::with_capacity(max);
        let next = self.store.list(cursor, u32::try_from(max).unwrap_or(u32::MAX), &mut views);
        out.extend(views.iter().map(|view| view.key));
        next
    }

    fn load(&self) -> Load {
        self.lending_load()
    }

    fn digest(&self, partition: Partition) -> Option<u64> {
        Some(self.digest_of(partition))
    }
}

impl Hints for Residency {
    fn owners(&self, key: &BlockKey, owners: u32) {
        self.store.owner_hint(key, owners);
    }
}

impl Node {
    /// Starts a node on the current Tokio runtime. When this returns it serves.
    ///
    /// # Errors
    /// [`NodeError`]; nothing is left running then.
    pub async fn start(
        options: NodeOptions,
        clock: Clock,
        sink: Arc<dyn EventSink>,
    ) -> Result<Self, NodeError> {
        // First, so that a second node at the same place takes no memory.
        let door = Door::bind(&options.socket, options.socket_mode)?;
        let socket = door.file();
        let (residency, gpu) = residency(&options, clock, Arc::clone(&sink))?;
        let reclaimer = Reclaimer::spawn(Arc::clone(&residency)).map_err(NodeError::Thread)?;
        let served = served(&options, &residency)?;
        let memory = gpu.as_ref().map(Gpu::memory);
        let served = Served { pools: &served, gpu: memory.as_ref() };
        let chosen = Chosen::new(&options, served)?;
        let listen = chosen.local_addr().unwrap_or(options.listen);
        let address = options.advertise.clone().unwrap_or_else(|| listen.to_string());
        let requester = options.requester.map_or_else(|| address.parse(), Ok);
        let requester = requester.map_err(NodeError::Requester)?;
        let node = options.node.map_or_else(|| random().map(NodeId), Ok)?;
        let identity = NodeIdentity { node, epoch: clock.epoch(), address };
        let (registry, registry_name) = registry(&options.registry, clock)?;
        let local = local_node(&identity, requester, &options.secret)?;
        let imports = Imports::new(&residency, options.gpu_driver.clone(), gpu.as_ref());
        let stages = gpu.as_ref().map(Gpu::stages);
        let started = start_on(chosen, (served, gpu), local, &options, &residency)?;
        let StartedData { handle: data, thread, transport, gpu } = started;
        let announcer = Announcer::spawn(AnnouncerParts {
            registry: Arc::clone(&registry),
            identity: identity.clone(),
            residents: Arc::clone(&residency) as Arc<dyn Residents>,
            hints: Arc::clone(&residency) as Arc<dyn Hints>,
            events: Arc::clone(&sink),
            options: AnnounceOptions {
                resync_rate: options.announce_rate,
                ..AnnounceOptions::default()
            },
        })
        .map_err(NodeError::Announcer)?;
        residency.connect(announcer.handle(), reclaimer.waker());
        let fetcher = Arc::new(Fetcher::new(FetcherParts {
            node,
            listen,
            registry,
            data: data.clone(),
            store: Arc::clone(&residency.store),
            clock,
            sink,
        }));
        let inner = Arc::new(Inner {
            identity,
            requester,
            transport,
            registry_name,
            residency,
            fetcher,
            data,
            announcer: announcer.handle(),
            names: Mutex::default(),
            imports,
            in_place: Layouts::new(&options, stages),
            copies: Copies::default(),
            gpu,
            clock,
        });
        tokio::spawn(in_place::mind_losses(Arc::downgrade(&inner), inner.residency.losses()));
        let (stop_door, stopped) = oneshot::channel::<()>();
        let serving = door.serve(Arc::clone(&inner), async move {
            // A node that is dropped stops its door as one that shuts down does.
            stopped.await.ok();
        });
        let door = tokio::spawn(serving);
        let lease_ttl = options.lease.ttl;
        let data = thread;
        Ok(Self { inner, listen, stop_door, door, socket, announcer, reclaimer, data, lease_ttl })
    }

    /// Where peers connect.
    #[must_use]
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// The node as its threads share it.
    #[must_use]
    pub fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// The file of its door, for a process that ends without [`Self::shutdown`] being over.
    #[must_use]
    pub const fn socket(&self) -> &Arc<SocketFile> {
        &self.socket
    }

    /// Ends when the node can serve no more, with what went wrong.
    pub async fn failed(&self) -> String {
        self.inner.data.closed().await;
        "the data thread has ended: peers cannot be served any more".to_owned()
    }

    /// Stops: no new leases, out of the registry, running leases to their end, connections closed,
    /// threads joined.
    pub async fn shutdown(self) {
        // New leases are refused from here on; running ones end by their readers, or by the deadline
        // that they have now: none is renewed any more.
        let ttl = self.lease_ttl + DRAIN_MARGIN;
        let drained = tokio::time::timeout(ttl, self.inner.data.drain());
        let left = self.announcer.shutdown(true, STOP_TIMEOUT);
        if let (Err(_elapsed), ()) = tokio::join!(drained, left) {
            tracing::warn!("some readers did not end their leases in time: they are cut off");
        }
        // A door that has ended needs no order to.
        self.stop_door.send(()).ok();
        if tokio::time::timeout(STOP_TIMEOUT, self.door).await.is_err() {
            tracing::warn!("local clients did not leave in time");
        }
        self.inner.data.stop();
        let data = self.data;
        match tokio::task::spawn_blocking(move || data.join()).await {
            Ok(Ok(Ok(()))) => {}
            other => tracing::warn!(?other, "the data thread did not end well"),
        }
        drop(self.reclaimer);
    }
}

/// Memory and residents, empty.
fn residency(
    options: &NodeOptions,
    clock: Clock,
    sink: Arc<dyn EventSink>,
) -> Result<(Arc<Residency>, Option<Gpu>), NodeError> {
    check_room(&options.pools)?;
    let pools = options.pools.iter().map(HostPool::create).collect::<Result<Vec<_>, _>>()?;
    let config = StoreConfig { capacity: options.capacity, policy: options.policy };
    let store = Arc::new(Store::new(config, Arc::clone(&sink))?);
    // Without them it works as well, only slower.
    let huge = store.tables().into_iter().try_for_each(prefer_huge_pages);
    drop(huge.inspect_err(|error| tracing::debug!(%error, "no huge pages for the store")));
    let driver = options.gpu_driver.as_deref();
    let gpu = options.gpu.as_ref().map(|gpu| Gpu::open(gpu, driver, &pools)).transpose()?;
    let device = gpu.as_ref().map(|gpu| DevicePool::new(gpu.uuid(), gpu.pool()));
    let pools = (pools, device);
    let residency = Residency::new(store, pools, options.watermarks, clock, sink);
    Ok((Arc::new(residency), gpu))
}

/// How this node introduces itself; its regions are added as they are registered.
fn local_node(
    identity: &NodeIdentity,
    requester: RequesterId,
    secret: &[u8],
) -> Result<LocalNode, NodeError> {
    Ok(LocalNode {
        node: identity.node,
        epoch: identity.epoch,
        requester,
        secret: SecretKey::derive(secret),
        regions: Vec::new(),
        nonce_seed: random()?,
    })
}

/// What peers may read: the pools, and last a page for those who probe the way here. That it is the last
/// is how they know it. Where leases have keys of their own nothing is served without one, and probes
/// ask for a message alone.
fn served(options: &NodeOptions, residency: &Residency) -> Result<Vec<Arc<HostPool>>, NodeError> {
    let mut served = residency.pools.clone();
    if options.lease_windows {
        return Ok(served);
    }
    served.push(HostPool::create(&PoolOptions {
        id: PoolId::PROBE,
        bytes: limits::PROBE_BYTES.into(),
        huge_pages: None,
        lock: false,
        numa_node: None,
    })?);
    Ok(served)
}

/// A data thread that runs.
#[derive(Debug)]
struct StartedData {
    handle: DataHandle<PeerAddress>,
    thread: DataJoin,
    transport: &'static str,
    gpu: Option<(GpuStat, Arc<Shadows>)>,
}

/// Starts the data thread on the fabric that was chosen.
fn start_on(
    chosen: Chosen,
    (served, gpu): (Served<'_>, Option<Gpu>),
    local: LocalNode,
    options: &NodeOptions,
    residency: &Arc<Residency>,
) -> Result<StartedData, NodeError> {
    match chosen {
        Chosen::Verbs(fabric, registered) => {
            start_data(*fabric, (registered, served, gpu), local, options, residency)
        }
        Chosen::Tcp(fabric, registered) => {
            start_data(*fabric, (registered, served, gpu), local, options, residency)
        }
    }
}

/// Starts the data thread on a fabric with which the memory is registered.
fn start_data<F>(
    fabric: F,
    (registered, served, gpu): (Registered, Served<'_>, Option<Gpu>),
    mut local: LocalNode,
    options: &NodeOptions,
    residency: &Arc<Residency>,
) -> Result<StartedData, NodeError>
where
    F: ForeignFabric + Fabric<Endpoint = SocketAddr> + Watch + Send + 'static,
{
    let fabric = transport::with_neighbours(fabric, (&registered, served), options, local.node)?;
    let fabric = Faulty::new(fabric, options.fault);
    local.regions.extend(registered.served().map(RegionEntry::from));
    let gpu = gpu.zip(registered.gpu.as_ref());
    let known = gpu.as_ref().map(|(gpu, regions)| (gpu.stat(regions), gpu.shadows()));
    let landing = NodeLanding {
        residency: Arc::clone(residency),
        tier: gpu.map(|(gpu, regions)| gpu.into_tier(regions, Arc::clone(residency))),
        regions: registered.pools,
        reserved: Vec::new(),
        layouts: BTreeMap::new(),
        marks: (options.lease.leases_total as u64, options.lease_watermarks),
        quota_grows: options.lease_quota_grows,
    };
    let config = PeerConfig {
        lease: options.lease,
        requester: RequesterConfig {
            lease_margin: options.lease_margin,
            transfer_timeout: options.transfer_timeout,
            answer_timeout: ANSWER_TIMEOUT.min(options.transfer_timeout),
        },
        pressure: landing.marks(),
        breaker: BreakerConfig::default(),
    };
    let store = Arc::clone(&residency.store);
    let sink = Arc::clone(&residency.sink);
    let capabilities = fabric.capabilities();
    let peers = Peers::new(local, config, capabilities, store, sink)?;
    let spawned = data::spawn(fabric, peers, landing, residency.clock);
    let (handle, thread) = spawned.map_err(NodeError::Thread)?;
    let transport = capabilities.transport;
    Ok(StartedData { handle, thread, transport, gpu: known })
}

fn registry(
    choice: &RegistryChoice,
    clock: Clock,
) -> Result<(Arc<dyn OwnerRegistry>, String), NodeError> {
    match choice {
        RegistryChoice::Alone => {
            let epoch = RegistryEpoch(clock.epoch().0);
            let directory = Arc::new(Directory::new(epoch, DirectoryOptions::default()));
            let registry = InProcess::new(directory, move || clock.now());
            Ok((Arc::new(registry), "in-process".to_owned()))
        }
        RegistryChoice::Grpc(endpoint) => {
            let registry = GrpcRegistry::new(endpoint, Default::default())?;
            Ok((Arc::new(registry), endpoint.clone()))
        }
        RegistryChoice::Redis(servers) => {
            let salt = u64::from_le_bytes(random()?);
            let timeouts = RegistryTimeouts::default();
            let registry = RedisRegistry::new(servers, REDIS_LEASE, timeouts, salt)?;
            Ok((Arc::new(registry), format!("redis://{}", servers.join(","))))
        }
    }
}

fn random<const N: usize>() -> Result<[u8; N], NodeError> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| NodeError::Random(error.to_string()))?;
    Ok(bytes)
}
