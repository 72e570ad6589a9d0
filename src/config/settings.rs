//! The settings of `kvrail serve`, as they may be given. The first sentence of each is its line in
//! `--help` and in README's table; the rest tells cost and danger.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::layers::Settings;
use super::values::{
    HostPort, HugePages, Percent, PoolSpec, RegistryUrl, Size, SocketMode, device_name, duration,
    log_filter, nic_pair, rate, socket_address,
};
use crate::limits;
use crate::memory::GpuDirect;
use crate::node::TransportChoice;
use crate::types::{NodeId, PolicyKind, RequesterId};
use crate::verbs::{NicPair, PollMode};

/// What `kvrail serve` may be told.
#[derive(Debug, Clone, Default, Args)]
pub struct ServeSettings {
    /// TOML file with settings under the names of the flags; flags and variables win over it
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// Address that peers connect to (default 0.0.0.0:7070)
    ///
    /// Whoever reaches it can ask for blocks: keep it inside the cluster's network, or set a
    /// cluster secret.
    #[arg(long, value_name = "IP:PORT", value_parser = socket_address)]
    pub listen: Option<SocketAddr>,

    /// Address that peers are told to connect to (default: the listen address)
    ///
    /// Needed where the listen address names no host and there is a registry.
    #[arg(long, value_name = "HOST:PORT")]
    pub advertise: Option<HostPort>,

    /// Unix socket of the local door (default $XDG_RUNTIME_DIR/kvrail.sock, else /run/kvrail.sock)
    ///
    /// Whoever may connect reads and writes all blocks: its mode and directory are the only guard.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// Permission bits of that socket, octal (default 600)
    ///
    /// 660 lets the group in, 666 everyone on the host.
    #[arg(long, value_name = "OCTAL")]
    pub socket_mode: Option<SocketMode>,

    /// Memory pool, such as 512MiB or 30GiB@numa=1; repeat it, or separate several by commas
    ///
    /// All of it is taken at start and given back at exit. Required; at most 16.
    #[arg(long, value_name = "SIZE[@numa=NODE]", value_delimiter = ',')]
    pub pool: Vec<PoolSpec>,

    /// Page size of the pools, 2MiB or 1GiB (default: the host's usual pages)
    ///
    /// Fewer pages make registration and address translation cheaper. The host must have reserved
    /// enough of them, and each pool must be a multiple of the page.
    #[arg(long, value_name = "2MiB|1GiB")]
    pub huge_pages: Option<HugePages>,

    /// Lock the pools in memory, so that they are never swapped (default false)
    ///
    /// Needs a memlock limit of at least the pools' size. Start takes as long as touching every page.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub lock: Option<bool>,

    /// GPU whose memory blocks may live in too, as the driver numbers it (default: none)
    ///
    /// Needs --gpu-pool. The pools are pinned for the driver as well then.
    #[arg(long, value_name = "NUMBER")]
    pub gpu: Option<u32>,

    /// GPU memory to take for blocks from peers, such as 8GiB (default: none)
    ///
    /// What an engine has left on that GPU. Blocks that find no room there land in the pools.
    #[arg(long, value_name = "SIZE")]
    pub gpu_pool: Option<Size>,

    /// Way for RDMA devices into GPU memory: auto, dmabuf, peermem, staging or require (default auto)
    ///
    /// Where none of the direct ones works, blocks go through pinned host memory, which costs a copy;
    /// require does not start then. kvrail stat says which way is taken, and what was refused.
    #[arg(long, value_name = "WAY")]
    pub gpu_direct: Option<GpuDirect>,

    /// RDMA device that GPU memory goes over, such as mlx5_0; several by commas (default: nearest by PCIe)
    ///
    /// The default goes by sysfs: the devices that share most of the way from the processor with the GPU,
    /// then those on its NUMA node. A connection that has none of them takes another one.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = device_name)]
    pub gpu_nics: Vec<String>,

    /// Pinned host memory for blocks on their way into GPU memory, and as much for those on their way out (default 64MiB)
    ///
    /// A block must fit. More lets more blocks be under way at once.
    #[arg(long, value_name = "SIZE")]
    pub gpu_staging: Option<Size>,

    /// Most blocks held at once (default: one per 64KiB of pool, from 1024 to 16777216)
    ///
    /// Costs bookkeeping memory for each, used or not. Too few waste pool memory on small blocks.
    #[arg(long, value_name = "BLOCKS", value_parser = clap::value_parser!(u32).range(1..=i64::from(limits::RESIDENTS_MAX)))]
    pub capacity: Option<u32>,

    /// Eviction policy: rank, segmented, aged or lru (default rank)
    #[arg(long, value_name = "POLICY")]
    pub policy: Option<PolicyKind>,

    /// Leave a block's rank as it is when a local engine reads it (default false)
    ///
    /// Blocks in local use then go as early as copies that nobody reads.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub no_hit_promotion: Option<bool>,

    /// Owner registry, http://host:port, or redis://host:port,… of Redis or Valkey (default: none, the node finds no peers)
    ///
    /// http is kvrail registry. With redis, whoever reaches the servers can list and remove owners.
    #[arg(long, value_name = "URL")]
    pub registry: Option<RegistryUrl>,

    /// Most blocks a second that the node announces again to a registry that lost them (default 200000)
    ///
    /// A higher rate loads the registry more when all nodes do so at once; a lower one leaves readers
    /// longer without what this node holds.
    #[arg(long, value_name = "BLOCKS", value_parser = rate)]
    pub announce_rate: Option<u32>,

    /// Identity of this node, 32 hexadecimal digits (default: random at each start)
    ///
    /// Two nodes with one identity drive each other out of the registry.
    #[arg(long, value_name = "HEX")]
    pub node_id: Option<NodeId>,

    /// Name under which holders account for this node, 1 to 64 bytes (default: the advertised address)
    ///
    /// Keep it over restarts: a new name counts as a new reader of every block.
    #[arg(long, value_name = "NAME")]
    pub requester_id: Option<RequesterId>,

    /// File with the secret that peers prove to each other, 16 to 4096 bytes (default: none)
    ///
    /// Without it any host that reaches the listen address is believed to be who it says.
    #[arg(long, value_name = "PATH")]
    pub cluster_secret_file: Option<PathBuf>,

    /// How long a lent block stays put for its reader without renewal (default 10s)
    ///
    /// 100ms to 1h. A reader that dies keeps blocks from eviction for that long; a shorter time fails
    /// slow reads.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub lease_ttl: Option<Duration>,

    /// How long before a lease's end a reader stops to use it (default 1s)
    ///
    /// Must exceed the time by which a host may stall or its clock drift within one lease, or reads
    /// may race with reuse; less than half the lease.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub lease_margin: Option<Duration>,

    /// Longest that the reads of one lease may take (default 30s)
    ///
    /// 10ms to 1h. It is a bound. Once transfers from a peer have been measured, their deadline is 2s
    /// and ten times what the bytes need at the measured rate, and never more than this; the lease's
    /// own end, less its margin, comes first where it is earlier and not renewed. A peer has this long,
    /// and at most 5s, to answer a request; one that says nothing at all meanwhile, not even that it is
    /// there, is left alone within a second.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub transfer_timeout: Option<Duration>,

    /// Fabric to peers: auto, verbs, tcp or shm (default auto)
    ///
    /// auto takes RDMA where a device works, else TCP, and logs why; all hosts of a cluster must end
    /// up with the same one. Peers on this host are reached over shared memory. verbs and tcp use
    /// nothing else; shm connects to no other host.
    #[arg(long, value_name = "TRANSPORT")]
    pub transport: Option<TransportChoice>,

    /// Let auto reach peers on this host as it reaches others (default false)
    ///
    /// Without it, nodes of one user on one host map each other's pools for reading.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub no_shm: Option<bool>,

    /// RDMA device, such as mlx5_0; repeat it, or separate several by commas (default: all of the fastest)
    ///
    /// The default takes every device that works and is as fast as the fastest one, and logs which it
    /// left out and why. At most 8.
    #[arg(long, value_name = "NAME", value_delimiter = ',', value_parser = device_name)]
    pub rdma_device: Vec<String>,

    /// Device of a peer that one of ours talks to, such as mlx5_0=mlx5_2; several by commas (default: by NUMA node)
    ///
    /// For networks where not every device reaches every other. Where both ends are told, the one that
    /// connects decides; a peer without that device is paired as by default. The log shows the pairs.
    #[arg(long, value_name = "OURS=THEIRS", value_delimiter = ',', value_parser = nic_pair)]
    pub nic_pairs: Vec<NicPair>,

    /// Index of the GID that peers are told, on each device (default: RoCE v2 on IPv4 before other addresses)
    #[arg(long, value_name = "INDEX", value_parser = clap::value_parser!(u32).range(0..=255))]
    pub gid_index: Option<u32>,

    /// How the data thread waits on an RDMA device: busy, adaptive or event (default adaptive)
    ///
    /// busy has the lowest latency and takes a core for good; event takes the least processor time.
    #[arg(long, value_name = "MODE")]
    pub poll: Option<PollMode>,

    /// Give each lease keys of its own, which end with it; needs RDMA with memory windows (default false)
    ///
    /// Without it a peer reads by its pool's one key, and the end of an expired lease cuts the peer's
    /// connection. With it only that lease ends, and a key reads nothing but what its lease lends. A
    /// lend then waits for the device to make the key, and a lease needs one key for each run of
    /// blocks that lie next to each other, of 128 that a peer can have at once; blocks beyond that are
    /// busy. On SoftRoCE a leased read of 4 KiB took about 23 us more, of 185. Peers on this host are
    /// not reached over shared memory then. All of a cluster need not have the same.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub lease_windows: Option<bool>,

    /// Data streams to each peer, 1 to 16 (default 2)
    ///
    /// Each costs a socket, or a queue pair, on both sides; more help where one stream does not fill
    /// the network.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=i64::try_from(limits::STREAMS_MAX).unwrap_or(1)))]
    pub streams: Option<u8>,

    /// Leases that one requester may hold at once (default 64)
    ///
    /// 1 to 65536; what it asks for beyond that is busy until it ends one.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub lease_quota: Option<u32>,

    /// Bytes that one requester may hold under leases at once (default: half the pools)
    ///
    /// What is leased cannot be evicted: a large share lets one reader stop the others' saves. Unless this
    /// is given, half of what local engines open to peers in their own memory comes on top, for blocks
    /// that lie there.
    #[arg(long, value_name = "SIZE")]
    pub lease_bytes: Option<Size>,

    /// Percentage of the memory under leases above which nothing more is lent (default 90)
    ///
    /// A block counts once for each lease. What is refused is asked of another owner, or again later.
    #[arg(long, value_name = "PERCENT")]
    pub lease_watermark_high: Option<Percent>,

    /// Percentage of the memory under leases above which readers are told to pause (default 75)
    ///
    /// The same share of all leases that the node can keep makes them pause, too.
    #[arg(long, value_name = "PERCENT")]
    pub lease_watermark_low: Option<Percent>,

    /// Percentage of a pool in use at which reclaim begins (default 95)
    ///
    /// 1 to 100, above the low watermark.
    #[arg(long, value_name = "PERCENT")]
    pub watermark_high: Option<Percent>,

    /// Percentage of a pool in use at which reclaim ends (default 90)
    ///
    /// The gap to the high watermark is what one round of reclaim frees.
    #[arg(long, value_name = "PERCENT")]
    pub watermark_low: Option<Percent>,

    /// Address of /metrics and /health (default: none)
    ///
    /// Anyone who reaches it can read both.
    #[arg(long, value_name = "IP:PORT", value_parser = socket_address)]
    pub metrics_listen: Option<SocketAddr>,

    /// Log filter, such as warn or kvrail=debug (default info)
    #[arg(long, value_name = "FILTER", value_parser = log_filter)]
    pub log: Option<String>,

    /// File that gets one JSON line with the addresses and the pid once the node serves (default: none)
    ///
    /// It is whole or not there, and removed when the process is told to stop.
    #[arg(long, value_name = "PATH")]
    pub ready_file: Option<PathBuf>,

    /// Library of the GPU's driver, for tests and the demo (default libcuda.so.1).
    #[arg(long, value_name = "PATH", hide = true)]
    pub gpu_driver: Option<PathBuf>,

    /// A fault to inject, for tests.
    #[arg(long, value_name = "SPEC", hide = true)]
    pub fault: Option<String>,

    /// End when this process, the parent, ends, for tests and the demo.
    #[arg(long, value_name = "PID", hide = true)]
    pub parent_death: Option<u32>,
}

/// The upper list, unless it was not given.
fn given<T>(upper: Vec<T>, lower: Vec<T>) -> Vec<T> {
    if upper.is_empty() { lower } else { upper }
}

impl Settings for ServeSettings {
    fn over(self, lower: Self) -> Self {
        Self {
            config: self.config.or(lower.config),
            listen: self.listen.or(lower.listen),
            advertise: self.advertise.or(lower.advertise),
            socket: self.socket.or(lower.socket),
            socket_mode: self.socket_mode.or(lower.socket_mode),
            pool: given(self.pool, lower.pool),
            huge_pages: self.huge_pages.or(lower.huge_pages),
            lock: self.lock.or(lower.lock),
            gpu: self.gpu.or(lower.gpu),
            gpu_pool: self.gpu_pool.or(lower.gpu_pool),
            gpu_direct: self.gpu_direct.or(lower.gpu_direct),
            gpu_nics: given(self.gpu_nics, lower.gpu_nics),
            gpu_staging: self.gpu_staging.or(lower.gpu_staging),
            capacity: self.capacity.or(lower.capacity),
            policy: self.policy.or(lower.policy),
            no_hit_promotion: self.no_hit_promotion.or(lower.no_hit_promotion),
            registry: self.registry.or(lower.registry),
            announce_rate: self.announce_rate.or(lower.announce_rate),
            node_id: self.node_id.or(lower.node_id),
            requester_id: self.requester_id.or(lower.requester_id),
            cluster_secret_file: self.cluster_secret_file.or(lower.cluster_secret_file),
            lease_ttl: self.lease_ttl.or(lower.lease_ttl),
            lease_margin: self.lease_margin.or(lower.lease_margin),
            transfer_timeout: self.transfer_timeout.or(lower.transfer_timeout),
            transport: self.transport.or(lower.transport),
            no_shm: self.no_shm.or(lower.no_shm),
            rdma_device: given(self.rdma_device, lower.rdma_device),
            nic_pairs: given(self.nic_pairs, lower.nic_pairs),
            gid_index: self.gid_index.or(lower.gid_index),
            poll: self.poll.or(lower.poll),
            lease_windows: self.lease_windows.or(lower.lease_windows),
            streams: self.streams.or(lower.streams),
            lease_quota: self.lease_quota.or(lower.lease_quota),
            lease_bytes: self.lease_bytes.or(lower.lease_bytes),
            lease_watermark_high: self.lease_watermark_high.or(lower.lease_watermark_high),
            lease_watermark_low: self.lease_watermark_low.or(lower.lease_watermark_low),
            watermark_high: self.watermark_high.or(lower.watermark_high),
            watermark_low: self.watermark_low.or(lower.watermark_low),
            metrics_listen: self.metrics_listen.or(lower.metrics_listen),
            log: self.log.or(lower.log),
            ready_file: self.ready_file.or(lower.ready_file),
            gpu_driver: self.gpu_driver.or(lower.gpu_driver),
            fault: self.fault.or(lower.fault),
            parent_death: self.parent_death.or(lower.parent_death),
        }
    }

    fn file(&self) -> Option<&Path> {
        self.config.as_deref()
    }
}
