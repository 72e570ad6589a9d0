//! `kvrail serve`.

use std::process::ExitCode;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::process::{Stop, runtime};
use super::{CliError, Ready, announce_ready, end_with_parent, start_logging};
use crate::config::{HugePages, MemoryConfig, ServeConfig, ServeSettings};
use crate::event::EventSink;
use crate::lease::LeaseConfig;
use crate::limits;
use crate::memory::{HugePageSize, PoolOptions, Watermarks};
use crate::metrics::{GaugeSnapshot, MetricsSink, PoolGauge, RequesterGauge, SuspendedGauge};
use crate::node::{GpuOptions, Inner, Node, NodeError, NodeOptions, RegistryChoice};
use crate::policy::Policy;
use crate::protocol::millis;
use crate::runtime::clock::Clock;
use crate::runtime::http::{self, Observation, Observed};
use crate::sys::allocations;
use crate::types::PoolId;

/// Checks the settings and runs a node until it is told to stop.
pub(super) fn run(settings: ServeSettings) -> Result<ExitCode, CliError> {
    let config = ServeConfig::load(settings)?;
    end_with_parent(&config.process)?;
    start_logging(&config.process)?;
    runtime()?.block_on(serve(config))
}

async fn serve(config: ServeConfig) -> Result<ExitCode, CliError> {
    let stop = Stop::listen()?;
    let metrics = Arc::new(MetricsSink::new());
    let sink: Arc<dyn EventSink> = Arc::clone(&metrics) as Arc<dyn EventSink>;
    let process = config.process.clone();
    // Bound before the node takes its memory: an address in use is known at once.
    let scrape = match process.metrics_listen {
        Some(address) => Some(TcpListener::bind(address).await.map_err(|error| {
            CliError::usage(format!("--metrics-listen: cannot listen on {address}: {error}"))
        })?),
        None => None,
    };
    let open = config.peers.secret.is_none() && !config.peers.listen.ip().is_loopback();
    let socket = config.door.socket.clone();
    let options = node_options(config)?;
    let node = Node::start(options, Clock::start(), sink).await.map_err(from_node)?;
    let metrics_address = scrape.as_ref().and_then(|listener| listener.local_addr().ok());
    let (stop_scrapes, stopped) = oneshot::channel::<()>();
    let observed = Arc::new(ObservedNode { metrics, inner: Arc::clone(node.inner()) });
    let scrapes = scrape.map(|listener| {
        tokio::spawn(http::serve(listener, observed, async move {
            stopped.await.ok();
        }))
    });
    let listen = node.listen();
    let pid = std::process::id();
    let door = socket.display().to_string();
    let ready = Ready { listen, socket: Some(socket), metrics: metrics_address, pid };
    let outcome = match announce_ready(&process, &ready) {
        Ok(ready) => {
            tracing::info!(%listen, socket = door, metrics = ?metrics_address, "serving");
            if open {
                tracing::warn!(
                    %listen,
                    "whoever reaches this address can read blocks: give all nodes one \
                     --cluster-secret-file"
                );
            }
            let outcome = stop.wait(node.failed()).await;
            drop(ready);
            tracing::info!("stopping; a second signal stops at once");
            outcome
        }
        Err(error) => Err(error),
    };
    let socket = Arc::clone(node.socket());
    Stop::exit_on_second(move || socket.remove());
    node.shutdown().await;
    stop_scrapes.send(()).ok();
    if let Some(scrapes) = scrapes {
        scrapes.await.ok();
    }
    outcome
}

/// A node that cannot start for what it was told is its caller's to correct.
fn from_node(error: NodeError) -> CliError {
    match error {
        NodeError::Thread(_) | NodeError::Announcer(_) | NodeError::Random(_) => {
            CliError::failed(error)
        }
        _ => CliError::usage(error),
    }
}

fn node_options(config: ServeConfig) -> Result<NodeOptions, CliError> {
    let ServeConfig { peers, door, memory, store, lease, registry, announce_rate, .. } = config;
    let fault = config.fault;
    let gpu = config.gpu.map(|gpu| GpuOptions {
        ordinal: gpu.ordinal,
        pool_bytes: gpu.pool,
        direct: gpu.direct,
        staging_bytes: gpu.staging,
    });
    let watermarks = Watermarks::new(
        u16::from(memory.watermark_high.get()) * 10,
        u16::from(memory.watermark_low.get()) * 10,
    )
    .ok_or_else(|| CliError::usage("--watermark-low must be below --watermark-high"))?;
    Ok(NodeOptions {
        listen: peers.listen,
        advertise: peers.advertise.map(|address| address.as_str().to_owned()),
        node: peers.node_id,
        requester: peers.requester_id,
        secret: peers.secret.map(|secret| secret.as_bytes().to_vec()).unwrap_or_default(),
        transport: peers.transport,
        shared_memory: peers.shared_memory,
        rdma_devices: peers.rdma_devices,
        nic_pairs: peers.nic_pairs,
        gpu_nics: peers.gpu_nics,
        gid_index: peers.gid_index,
        poll: peers.poll,
        lease_windows: peers.lease_windows,
        streams: peers.streams,
        pools: pools(&memory),
        gpu,
        gpu_driver: config.gpu_driver,
        capacity: store.capacity,
        policy: Policy { kind: store.policy, hit_promotion: store.hit_promotion },
        watermarks,
        lease: LeaseConfig {
            ttl: lease.ttl,
            leases_per_requester: lease.leases,
            bytes_per_requester: lease.bytes,
            leases_total: LeaseConfig::default().leases_total.max(lease.leases as usize),
        },
        lease_quota_grows: lease.bytes_grow,
        lease_watermarks: (lease.watermark_high.get(), lease.watermark_low.get()),
        lease_margin: lease.margin,
        transfer_timeout: peers.transfer_timeout,
        registry: match registry {
            Some(url) if url.redis_servers().is_empty() => {
                RegistryChoice::Grpc(url.as_str().to_owned())
            }
            Some(url) => RegistryChoice::Redis(url.redis_servers().to_vec()),
            None => RegistryChoice::Alone,
        },
        announce_rate,
        socket: door.socket,
        socket_mode: door.mode.0,
        fault: fault.map(|spec| spec.parse()).transpose().map_err(CliError::usage)?,
    })
}

fn pools(memory: &MemoryConfig) -> Vec<PoolOptions> {
    let huge_pages = memory.huge_pages.map(|pages| match pages {
        HugePages::Mib2 => HugePageSize::TwoMiB,
        HugePages::Gib1 => HugePageSize::OneGiB,
    });
    let lock = memory.lock;
    (0..)
        .zip(&memory.pools)
        .map(|(id, pool)| PoolOptions {
            id: PoolId(id),
            bytes: pool.size.0,
            huge_pages,
            lock,
            numa_node: pool.numa,
        })
        .collect()
}

/// A node as scrapers and probers see it.
#[derive(Debug)]
struct ObservedNode {
    metrics: Arc<MetricsSink>,
    inner: Arc<Inner>,
}

impl Observed for ObservedNode {
    fn render(&self) -> Observation<'_, String> {
        Box::pin(async {
            let now = self.inner.snapshot().await;
            let mut residents = [0; limits::RANK_MAX as usize];
            residents.iter_mut().zip(&now.report.residents.ranks).for_each(|(to, at)| *to = *at);
            let pools = now.report.pools.iter().map(|pool| PoolGauge {
                used: pool.bytes.saturating_sub(pool.free_bytes),
                size: pool.bytes,
            });
            let requesters = now.peers.leases.iter().map(|held| RequesterGauge {
                requester: held.requester,
                leases: held.usage.leases,
                bytes: held.usage.bytes,
            });
            self.metrics.render(&GaugeSnapshot {
                residents,
                pinned: now.report.residents.pinned,
                pools: pools.collect(),
                requesters: requesters.collect(),
                connections: now.peers.connected.len() as u64,
                suspended: {
                    let [path, peer, leaving] = now.suspended();
                    SuspendedGauge { path, peer, leaving }
                },
                registry_up: now.registry_up,
                heartbeat_age: self.inner.heartbeat_age(),
                allocations: allocations::of_process(),
            })
        })
    }

    fn health(&self) -> Observation<'_, (bool, serde_json::Value)> {
        Box::pin(async {
            // A node without its registry still serves what it has: healthy, and said so.
            let alive = self.inner.is_alive();
            let body = serde_json::json!({
                "healthy": alive,
                "registry_up": self.inner.registry_up(),
                "heartbeat_age_ms": millis(self.inner.heartbeat_age()),
            });
            (alive, body)
        })
    }
}
