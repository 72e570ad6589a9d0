//! The configuration of `kvrail serve`: complete, in range, without contradiction.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use super::ConfigError;
use super::gpu::{self, GpuConfig};
use super::layers::{Environment, gather};
use super::lease::{self, LeaseConfig};
use super::settings::ServeSettings;
use super::values::{
    ClusterSecret, HostPort, HugePages, Percent, PoolSpec, ProcessConfig, RegistryUrl, Size,
    SocketMode,
};
use crate::limits;
use crate::node::TransportChoice;
use crate::types::{NodeId, PolicyKind, RequesterId};
use crate::verbs::{NicPair, PollMode};

/// Longest path of a Unix socket, bytes: `sun_path` without its terminating zero.
const SOCKET_PATH_MAX: usize = 107;

/// Shortest and longest bound of a transfer: below the first not even a network within a host answers
/// every time, and above the second nobody waits.
const TRANSFER_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(3600);

/// A node's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServeConfig {
    /// Peers and the way to them.
    pub peers: PeerConfig,
    /// The local door.
    pub door: DoorConfig,
    /// The memory pools.
    pub memory: MemoryConfig,
    /// The GPU whose memory blocks may live in.
    pub gpu: Option<GpuConfig>,
    /// The store of residents.
    pub store: StoreConfig,
    /// What is lent, to whom, for how long.
    pub lease: LeaseConfig,
    /// The owner registry; without one the node is alone.
    pub registry: Option<RegistryUrl>,
    /// Most blocks a second that are announced again to a registry that lost them.
    pub announce_rate: u32,
    /// Metrics, logs, life.
    pub process: ProcessConfig,
    /// The library of the GPU's driver, where it is not the one that the loader finds.
    pub gpu_driver: Option<PathBuf>,
    /// A fault that a test injects, in the words of whoever injects it.
    pub fault: Option<String>,
}

/// Peers and the way to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerConfig {
    /// Where peers connect; port 0 lets the kernel choose.
    pub listen: SocketAddr,
    /// What peers are told to connect to, where it is not the listen address.
    pub advertise: Option<HostPort>,
    /// This node's identity; `None` for a random one.
    pub node_id: Option<NodeId>,
    /// The name that holders know this node by, where it is not the advertised address.
    pub requester_id: Option<RequesterId>,
    /// What peers prove to each other.
    pub secret: Option<ClusterSecret>,
    /// Which fabric.
    pub transport: TransportChoice,
    /// Whether peers on this host may be reached over shared memory where the choice is automatic.
    pub shared_memory: bool,
    /// The RDMA devices; empty for all that work and are as fast as the fastest.
    pub rdma_devices: Vec<String>,
    /// Which device of a peer ours talk to; empty for by NUMA node.
    pub nic_pairs: Vec<NicPair>,
    /// The RDMA devices that GPU memory goes over; empty for the nearest ones.
    pub gpu_nics: Vec<String>,
    /// The index of the GID to use on each; `None` for the best one.
    pub gid_index: Option<u32>,
    /// How the data thread waits on an RDMA device.
    pub poll: PollMode,
    /// Whether leases have keys of their own.
    pub lease_windows: bool,
    /// Data streams to each peer, 1 to [`limits::STREAMS_MAX`].
    pub streams: usize,
    /// Longest wait for a block from a peer.
    pub transfer_timeout: Duration,
}

impl PeerConfig {
    /// What peers are told, once the listener is bound to `bound`.
    #[must_use]
    pub fn advertised(&self, bound: SocketAddr) -> HostPort {
        self.advertise.clone().unwrap_or_else(|| HostPort::from(bound))
    }

    /// The name that holders know this node by, once the listener is bound to `bound`.
    ///
    /// # Errors
    /// The advertised address is no such name. It never happens after [`ServeConfig::load`].
    pub fn requester(&self, bound: SocketAddr) -> Result<RequesterId, crate::types::WordError> {
        self.requester_id.map_or_else(|| self.advertised(bound).as_str().parse(), Ok)
    }
}

/// The local door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoorConfig {
    /// The Unix socket's path, at most 107 bytes.
    pub socket: PathBuf,
    /// Its permission bits.
    pub mode: SocketMode,
}

/// The memory pools.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryConfig {
    /// 1 to [`limits::POOLS_MAX`] pools.
    pub pools: Vec<PoolSpec>,
    /// The size of their pages; every pool is a multiple of it.
    pub huge_pages: Option<HugePages>,
    /// Whether they are locked in memory.
    pub lock: bool,
    /// Reclaim begins at this share of a pool in use.
    pub watermark_high: Percent,
    /// Reclaim ends at this one, below the high one.
    pub watermark_low: Percent,
}

/// The store of residents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreConfig {
    /// Most residents, 1 to [`limits::RESIDENTS_MAX`].
    pub capacity: u32,
    /// Which rank transitions and victim order it runs.
    pub policy: PolicyKind,
    /// Whether a local read improves a block's rank.
    pub hit_promotion: bool,
}

impl ServeConfig {
    /// The configuration that `flags`, this process's variables and the file together make.
    ///
    /// # Errors
    /// [`ConfigError`], where a value is out of range or two settings contradict each other.
    pub fn load(flags: ServeSettings) -> Result<Self, ConfigError> {
        Self::load_from(flags, Environment::process())
    }

    /// As [`Self::load`], with variables from elsewhere.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_from(flags: ServeSettings, from: Environment<'_>) -> Result<Self, ConfigError> {
        let settings = gather(flags, from)?;
        let memory = memory(&settings)?;
        let bytes = memory
            .pools
            .iter()
            .try_fold(0_u64, |sum, pool| sum.checked_add(pool.size.0))
            .ok_or_else(|| ConfigError::Value {
            origin: "--pool".to_owned(),
            reason: "the pools together are more bytes than 64 bits can count".to_owned(),
        })?;
        Ok(Self {
            store: store(&settings, bytes),
            lease: lease::resolve(&settings, bytes)?,
            memory,
            gpu: gpu::resolve(&settings)?,
            door: door(&settings, from)?,
            process: ProcessConfig {
                metrics_listen: settings.metrics_listen,
                log: settings.log.clone().unwrap_or_else(|| "info".to_owned()),
                ready_file: settings.ready_file.clone(),
                parent_death: settings.parent_death,
            },
            registry: settings.registry.clone(),
            announce_rate: settings.announce_rate.unwrap_or(200_000),
            gpu_driver: settings.gpu_driver.clone(),
            fault: settings.fault.clone(),
            peers: peers(settings)?,
        })
    }
}

fn peers(settings: ServeSettings) -> Result<PeerConfig, ConfigError> {
    let listen = settings.listen.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, 7070)));
    if let (Some(url), true, None) =
        (&settings.registry, listen.ip().is_unspecified(), &settings.advertise)
    {
        return Err(ConfigError::Contradiction {
            first: "--registry",
            second: "--listen",
            reason: format!(
                "{url} would tell peers to connect to {listen}, which names no host; give \
                 --advertise HOST:PORT"
            ),
        });
    }
    if let Some(address) = settings.advertise.as_ref().filter(|it| it.is_unspecified()) {
        return Err(ConfigError::Value {
            origin: "--advertise".to_owned(),
            reason: format!("{address} names no host that a peer could connect to"),
        });
    }
    if let (Some(address), None) = (&settings.advertise, settings.requester_id)
        && address.as_str().parse::<RequesterId>().is_err()
    {
        return Err(ConfigError::Contradiction {
            first: "--advertise",
            second: "--requester-id",
            reason: format!(
                "the first is the default of the second, and {address} is longer than the {} \
                 bytes of a requester's name; give --requester-id NAME",
                limits::NAME_BYTES_MAX
            ),
        });
    }
    refuse_one_port(settings.metrics_listen, listen)?;
    let transport = transport(&settings)?;
    check_nics(&settings)?;
    let transfer_timeout = settings.transfer_timeout.unwrap_or(Duration::from_secs(30));
    lease::within("--transfer-timeout", transfer_timeout, &TRANSFER_TIMEOUT)?;
    Ok(PeerConfig {
        listen,
        advertise: settings.advertise,
        node_id: settings.node_id,
        requester_id: settings.requester_id,
        secret: settings.cluster_secret_file.map(ClusterSecret::read).transpose()?,
        transport,
        shared_memory: !settings.no_shm.unwrap_or(false),
        rdma_devices: settings.rdma_device,
        nic_pairs: settings.nic_pairs,
        gpu_nics: settings.gpu_nics,
        gid_index: settings.gid_index,
        poll: settings.poll.unwrap_or_default(),
        lease_windows: settings.lease_windows.unwrap_or(false),
        streams: settings.streams.map_or(2, usize::from),
        transfer_timeout,
    })
}

/// Settings of an RDMA device contradict a fabric without one.
fn transport(settings: &ServeSettings) -> Result<TransportChoice, ConfigError> {
    let choice = settings.transport.unwrap_or_default();
    if choice == TransportChoice::Shm && settings.no_shm == Some(true) {
        return Err(ConfigError::Contradiction {
            first: "--transport",
            second: "--no-shm",
            reason: "the first is shm, and the second leaves that out; leave one out".to_owned(),
        });
    }
    let given = [
        ("--rdma-device", !settings.rdma_device.is_empty()),
        ("--nic-pairs", !settings.nic_pairs.is_empty()),
        ("--gpu-nics", !settings.gpu_nics.is_empty()),
        ("--gid-index", settings.gid_index.is_some()),
        ("--poll", settings.poll.is_some()),
        ("--lease-windows", settings.lease_windows == Some(true)),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((second, _)) if matches!(choice, TransportChoice::Tcp | TransportChoice::Shm) => {
            Err(ConfigError::Contradiction {
                first: "--transport",
                second,
                reason: format!(
                    "the first is {choice}, and the second is about an RDMA device; leave one out"
                ),
            })
        }
        _ => Ok(choice),
    }
}

/// Each device is named once, and what is paired is used.
fn check_nics(settings: &ServeSettings) -> Result<(), ConfigError> {
    let refused = |origin: &str, reason: String| {
        Err(ConfigError::Value { origin: origin.to_owned(), reason })
    };
    let named = &settings.rdma_device;
    if named.len() > limits::NICS_MAX {
        return refused(
            "--rdma-device",
            format!("a node uses at most {} devices", limits::NICS_MAX),
        );
    }
    let twice = |at: &usize| named.iter().take(*at).any(|other| Some(other) == named.get(*at));
    if let Some(name) = (0..named.len()).find(twice).and_then(|at| named.get(at)) {
        return refused("--rdma-device", format!("{name} is named twice"));
    }
    if let Some(left_out) = settings.gpu_nics.iter().find(|name| !named.contains(name))
        && !named.is_empty()
    {
        return Err(ConfigError::Contradiction {
            first: "--rdma-device",
            second: "--gpu-nics",
            reason: format!("the second names {left_out}, which the first leaves out"),
        });
    }
    for (at, pair) in settings.nic_pairs.iter().enumerate() {
        if settings.nic_pairs.iter().take(at).any(|other| other.ours == pair.ours) {
            let name = &pair.ours;
            return refused(
                "--nic-pairs",
                format!("{name} talks to one device of a peer, not two"),
            );
        }
        if !named.is_empty() && !named.contains(&pair.ours) {
            return Err(ConfigError::Contradiction {
                first: "--rdma-device",
                second: "--nic-pairs",
                reason: format!(
                    "the second pairs {}, which the first leaves out: a pair is OURS=THEIRS",
                    pair.ours
                ),
            });
        }
    }
    Ok(())
}

/// Two listeners of one process cannot have the same port of one address. `0.0.0.0` is every IPv4
/// address, and `[::]` every address.
pub(super) fn refuse_one_port(
    metrics: Option<SocketAddr>,
    listen: SocketAddr,
) -> Result<(), ConfigError> {
    let covers = |one: IpAddr, other: IpAddr| {
        one == other || (one.is_unspecified() && (one.is_ipv6() || other.is_ipv4()))
    };
    let Some(metrics) = metrics.filter(|it| it.port() == listen.port() && it.port() != 0) else {
        return Ok(());
    };
    if !covers(metrics.ip(), listen.ip()) && !covers(listen.ip(), metrics.ip()) {
        return Ok(());
    }
    Err(ConfigError::Contradiction {
        first: "--metrics-listen",
        second: "--listen",
        reason: format!("{metrics} and {listen} share a port; give them different ones"),
    })
}

fn door(settings: &ServeSettings, from: Environment<'_>) -> Result<DoorConfig, ConfigError> {
    let socket = settings.socket.clone().unwrap_or_else(|| from.door());
    let length = socket.as_os_str().len();
    if length > SOCKET_PATH_MAX {
        return Err(ConfigError::Value {
            origin: "--socket".to_owned(),
            reason: format!(
                "the path of a Unix socket has at most {SOCKET_PATH_MAX} bytes, {} has {length}",
                socket.display()
            ),
        });
    }
    Ok(DoorConfig { socket, mode: settings.socket_mode.unwrap_or(SocketMode(0o600)) })
}

fn memory(settings: &ServeSettings) -> Result<MemoryConfig, ConfigError> {
    let pools = settings.pool.clone();
    if pools.is_empty() {
        return Err(ConfigError::Missing {
            setting: "--pool",
            reason: "a node serves from at least one memory pool, such as --pool 1GiB",
        });
    }
    if pools.len() > limits::POOLS_MAX {
        return Err(ConfigError::Value {
            origin: "--pool".to_owned(),
            reason: format!(
                "a node has at most {} pools, {} are given",
                limits::POOLS_MAX,
                pools.len()
            ),
        });
    }
    if let Some(page) = settings.huge_pages.map(HugePages::bytes)
        && let Some(odd) = pools.iter().find(|pool| !pool.size.0.is_multiple_of(page))
    {
        return Err(ConfigError::Contradiction {
            first: "--pool",
            second: "--huge-pages",
            reason: format!("a pool of {} is no multiple of a page of {}", odd.size, Size(page)),
        });
    }
    let watermark_high = settings.watermark_high.unwrap_or(Percent::clamped(95));
    let watermark_low = settings.watermark_low.unwrap_or(Percent::clamped(90));
    if watermark_low >= watermark_high {
        return Err(ConfigError::Contradiction {
            first: "--watermark-low",
            second: "--watermark-high",
            reason: format!(
                "reclaim begins at {} percent and must end below it, not at {}",
                watermark_high.get(),
                watermark_low.get()
            ),
        });
    }
    Ok(MemoryConfig {
        pools,
        huge_pages: settings.huge_pages,
        lock: settings.lock.unwrap_or(false),
        watermark_high,
        watermark_low,
    })
}

fn store(settings: &ServeSettings, bytes: u64) -> StoreConfig {
    let derived = u32::try_from(bytes / (64 << 10))
        .unwrap_or(limits::RESIDENTS_MAX)
        .clamp(1024, limits::RESIDENTS_MAX);
    StoreConfig {
        capacity: settings.capacity.unwrap_or(derived),
        policy: settings.policy.unwrap_or_default(),
        hit_promotion: !settings.no_hit_promotion.unwrap_or(false),
    }
}
