//! What a node is made of, and why one could not be started.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::transport::TransportChoice;
use crate::fabric::FabricError;
use crate::lease::{LeaseConfig, LeaseConfigError};
use crate::memory::{GpuDirect, PoolError, PoolOptions, Watermarks};
use crate::policy::Policy;
use crate::registry::RegistryError;
use crate::runtime::door::BindError;
use crate::sim::fault::FaultSpec;
use crate::store::StoreConfigError;
use crate::types::{NodeId, RequesterId, WordError};
use crate::verbs::{NicPair, PollMode, VerbsError};

/// Where owners are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegistryChoice {
    /// Nowhere but here: the node has no peers.
    Alone,
    /// `kvrail registry` at this URL.
    Grpc(String),
    /// Redis or Valkey at these `host:port`s: a server, or some of a cluster.
    Redis(Vec<String>),
}

/// A GPU and what of it a node takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuOptions {
    /// Its number, as the driver gives it in this process.
    pub ordinal: u32,
    /// Bytes of its memory.
    pub pool_bytes: u64,
    /// Which ways for cards into it may be taken.
    pub direct: GpuDirect,
    /// Bytes of host memory for blocks on their way into it, and as many for those that leave.
    pub staging_bytes: u64,
}

/// What a node is made of. `config` documents each setting as users see it.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    /// Where peers connect; port 0 lets the kernel choose.
    pub listen: SocketAddr,
    /// What peers are told to connect to; the bound address where absent.
    pub advertise: Option<String>,
    /// Its identity; random where absent.
    pub node: Option<NodeId>,
    /// Its identity as a reader; the advertised address where absent.
    pub requester: Option<RequesterId>,
    /// What all nodes of the cluster know; empty for an open cluster.
    pub secret: Vec<u8>,
    /// Which fabric.
    pub transport: TransportChoice,
    /// Whether peers on this host may be reached over shared memory where the choice is automatic.
    pub shared_memory: bool,
    /// The RDMA devices; all that work and are as fast as the fastest where empty.
    pub rdma_devices: Vec<String>,
    /// Which device of a peer ours talk to; by NUMA node where empty.
    pub nic_pairs: Vec<NicPair>,
    /// The RDMA devices that GPU memory goes over; empty for those nearest to the GPU.
    pub gpu_nics: Vec<String>,
    /// The index of the GID to use on each; the best one where absent.
    pub gid_index: Option<u32>,
    /// How the data thread waits on an RDMA device.
    pub poll: PollMode,
    /// Whether leases have keys of their own.
    pub lease_windows: bool,
    /// Data streams per peer: sockets, or queue pairs.
    pub streams: usize,
    /// Memory pools, at least one.
    pub pools: Vec<PoolOptions>,
    /// The GPU whose memory blocks may live in.
    pub gpu: Option<GpuOptions>,
    /// The library of the GPU's driver, where it is not the one that the loader finds.
    pub gpu_driver: Option<PathBuf>,
    /// Most residents.
    pub capacity: u32,
    /// Ranks and victims.
    pub policy: Policy,
    /// When to reclaim.
    pub watermarks: Watermarks,
    /// As a holder.
    pub lease: LeaseConfig,
    /// Whether half of what engines open to peers comes on top of the bytes that each requester may have
    /// under leases, for blocks that lie there.
    pub lease_quota_grows: bool,
    /// Percentages of the memory, and of the leases, that leases may take: nothing more is lent above
    /// the first, and readers are asked to hold back above the second, lower one.
    pub lease_watermarks: (u8, u8),
    /// As a requester: how long before the holder's deadline a lease is no longer used.
    pub lease_margin: Duration,
    /// The longest that the READs of one lease may take, beside what their bytes need.
    pub transfer_timeout: Duration,
    /// Where owners are known.
    pub registry: RegistryChoice,
    /// Most blocks a second that are announced again to a registry that lost them.
    pub announce_rate: u32,
    /// The door's socket.
    pub socket: PathBuf,
    /// Its permissions.
    pub socket_mode: u32,
    /// A fault that a test injects.
    pub fault: Option<FaultSpec>,
}

/// Why a node could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// A memory pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The GPU.
    #[error("--gpu {ordinal} cannot be had: {why}")]
    Gpu {
        /// Its number.
        ordinal: u32,
        /// Why not, and what to do.
        why: String,
    },
    /// The GPU's memory must be reached by cards, and is not.
    #[error(
        "--gpu-direct require cannot be had: {why}; any other choice lets blocks go through staging memory"
    )]
    GpuDirect {
        /// What was refused, by whom.
        why: String,
    },
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreConfigError),
    /// The fabric.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// RDMA was asked for and cannot be had.
    #[error("--transport verbs cannot be had: {0}")]
    Verbs(#[source] VerbsError),
    /// Leases cannot have keys of their own.
    #[error("--lease-windows needs RDMA, which cannot be had: {0}")]
    Windows(#[source] VerbsError),
    /// Shared memory was asked for and cannot be had.
    #[error("--transport shm cannot be had: {0}")]
    Shm(#[source] FabricError),
    /// The leases.
    #[error(transparent)]
    Lease(#[from] LeaseConfigError),
    /// The local door.
    #[error(transparent)]
    Door(#[from] BindError),
    /// The registry's address.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The advertised address is no name for a requester.
    #[error(
        "the advertised address cannot name this node as a requester ({0}): set --requester-id"
    )]
    Requester(#[source] WordError),
    /// No thread could be started.
    #[error("cannot start a thread ({0}): raise the limit on processes (ulimit -u)")]
    Thread(#[source] std::io::Error),
    /// The announcer has no event counter.
    #[error("cannot open an event counter ({0}): raise the limit on open files (ulimit -n)")]
    Announcer(#[source] std::io::Error),
    /// The system has no random bytes.
    #[error("the system gives no random bytes ({0})")]
    Random(String),
}
