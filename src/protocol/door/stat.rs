//! The node's state as `Stat` answers it: the one schema that the node fills in and that
//! `kvrail stat` prints. Fields that a reader does not know are ignored and missing ones are empty,
//! so that a client and a node of neighbouring releases still understand each other.

use serde::{Deserialize, Serialize};

/// The whole state. Counts are of blocks unless a name says otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatReport {
    /// Who answers.
    pub node: NodeStat,
    /// Its memory.
    pub pools: Vec<PoolStat>,
    /// Its GPU.
    pub gpu: Option<GpuStat>,
    /// What it holds.
    pub residents: ResidentStat,
    /// What of that lies in engines' memory.
    pub in_place: InPlaceStat,
    /// Who has leases here.
    pub requesters: Vec<RequesterStat>,
    /// What it knows of the registry.
    pub registry: RegistryStat,
    /// Its connections to other nodes.
    pub peers: Vec<PeerStat>,
    /// What it knows of the health of other nodes, of the ways to them, and of its own NICs.
    pub health: Vec<HealthStat>,
}

/// The node itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStat {
    /// Its identity, 32 hexadecimal digits.
    pub id: String,
    /// Its start, microseconds of wall-clock time.
    pub epoch: u64,
    /// Its identity as a reader.
    pub requester: String,
    /// Where peers reach it.
    pub address: String,
    /// `rank`, `segmented`, `aged` or `lru`.
    pub policy: String,
    /// The way to peers on other hosts, `tcp` or `verbs`; `shm` where there is none.
    pub transport: String,
    /// Why peers on this host are not connected to over shared memory now; empty where they are.
    pub no_shared_memory: String,
    /// Since its data thread last went round, milliseconds: at most 1000 where it is idle.
    pub heartbeat_age_ms: u64,
}

/// One memory pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PoolStat {
    /// Its number.
    pub id: u16,
    /// Its length, bytes.
    pub bytes: u64,
    /// What no block and no reservation occupies, bytes.
    pub free_bytes: u64,
}

/// A GPU and the way into its memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuStat {
    /// Its number in the node's process.
    pub ordinal: u32,
    /// The product.
    pub name: String,
    /// Its place on the PCI bus.
    pub pci: String,
    /// The number of its pool among [`StatReport::pools`].
    pub pool: u16,
    /// Whether it is lost to the node: nothing lies in its memory then, and nothing goes there.
    pub lost: bool,
    /// `direct` where every NIC reaches its memory, else `staging`.
    pub way: String,
    /// The way of each NIC.
    pub nics: Vec<GpuWayStat>,
    /// The ways that were refused.
    pub refused: Vec<GpuWayRefused>,
}

/// The way of a NIC into a GPU's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuWayStat {
    /// The NIC.
    pub nic: String,
    /// `dma-buf`, `peermem` or `staging`.
    pub rung: String,
    /// Whether it is among those nearest to the GPU: where NICs reach the GPU's memory itself, bytes go
    /// over these.
    pub near: bool,
    /// How near it is by the PCI path and the NUMA nodes, or by which setting.
    pub near_why: String,
}

/// A way into a GPU's memory that was refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuWayRefused {
    /// The NIC.
    pub nic: String,
    /// `dma-buf` or `peermem`.
    pub rung: String,
    /// The call that refused it.
    pub call: String,
    /// The system's error number, where there is one.
    pub errno: Option<i32>,
    /// What was answered.
    pub why: String,
}

/// Blocks that engines have published in place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InPlaceStat {
    /// How many.
    pub blocks: u64,
    /// Their payload.
    pub bytes: u64,
    /// Blocks from peers that engines loaded and that landed in their memory, since the start.
    pub landed: u64,
    /// Blocks that engines loaded and that were copied there, since the start.
    pub copied: u64,
    /// The layouts that they lie in, or may land in.
    pub layouts: Vec<LayoutStat>,
    /// Why a layout last could not be opened to peers; empty where that has not happened.
    pub not_opened: String,
    /// The ways into the engine's memory that were refused then.
    pub refused: Vec<GpuWayRefused>,
}

/// A layout of an engine that peers read from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayoutStat {
    /// The number that stands for it where pools have theirs.
    pub pool: u16,
    /// How peers read its blocks: "direct", where they lie, or "staging", as copies in pinned memory.
    pub way: String,
    /// Whether a GPU that it lies on is lost to the node: no block stays in it then, and none comes.
    pub lost: bool,
    /// Blocks in it.
    pub blocks: u64,
    /// Their payload, bytes.
    pub bytes: u64,
    /// Why no blocks from peers land in it, and loads are copied; empty where they do.
    pub not_landed: String,
    /// The way of each NIC into its memory, where that is a GPU's.
    pub nics: Vec<GpuWayStat>,
    /// The ways that were refused.
    pub refused: Vec<GpuWayRefused>,
}

/// Residents and their ranks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ResidentStat {
    /// How many.
    pub blocks: u64,
    /// How many there may be at once, however small they are; 0 from a node that does not say.
    pub capacity: u64,
    /// Their payload.
    pub bytes: u64,
    /// Those that a lease or a local reader keeps.
    pub pinned: u64,
    /// Residents by rank: the first entry counts rank 1.
    pub ranks: Vec<u64>,
}

/// What one requester has under leases.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequesterStat {
    /// Its identity.
    pub name: String,
    /// Its live leases.
    pub leases: u64,
    /// Blocks under them.
    pub blocks: u64,
    /// Their payload.
    pub bytes: u64,
}

/// The registry as this node sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegistryStat {
    /// Where it is; `in-process` where the node is its own.
    pub endpoint: String,
    /// `connected`; `unreachable`; `refused` where it answers, but not as it should.
    pub state: String,
    /// Why it is not connected; empty where it is.
    pub error: String,
    /// Announcements and withdrawals that it has not confirmed.
    pub pending: u64,
}

/// A connection to another node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerStat {
    /// The peer's identity, 32 hexadecimal digits.
    pub id: String,
    /// Its identity as a reader.
    pub requester: String,
    /// `connected`.
    pub state: String,
    /// The way to it: `tcp`, `verbs`, `shm`.
    pub transport: String,
    /// The pairs of NICs that `verbs` goes over.
    pub rails: Vec<RailStat>,
    /// RDMA devices of this node that it goes without, since they did not work when it was made.
    pub lacks: Vec<LackStat>,
    /// Milliseconds until it is tried to take them back into use; `None` where none of them works.
    pub widens_in_ms: Option<u64>,
}

/// A NIC that a connection goes without.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LackStat {
    /// The RDMA device of this node.
    pub local: String,
    /// Why: `the device is gone`, `the port is down`, `the way to the peer failed lately`, or that it
    /// `works again`.
    pub reason: String,
}

/// A pair of NICs that a connection goes over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RailStat {
    /// The RDMA device of this node.
    pub local: String,
    /// The peer's, as it calls it.
    pub remote: String,
    /// Queue pairs of READs over it.
    pub queue_pairs: usize,
    /// Why these two: `the same NUMA node`, `balance`, or whose `--nic-pairs`.
    pub reason: String,
}

/// The health of a peer, of a path to one, or of a NIC of this node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HealthStat {
    /// `peer`, `path`, or `local` for a NIC of this node.
    pub scope: String,
    /// The peer's identity, 32 hexadecimal digits; empty for a NIC of this node.
    pub peer: String,
    /// The NIC of this node, by its place in the configuration; of a path or by itself. 255 where the path
    /// is that of messages, whatever NIC they take.
    pub local_nic: u8,
    /// The peer's NIC; of a path.
    pub peer_nic: u8,
    /// `closed` (in use), `open` (left alone), `half-open` (being probed), or `leaving` for a peer that
    /// said that it shuts down.
    pub state: String,
    /// The last failure that it was blamed for; empty where there was none.
    pub reason: String,
    /// Failures among the evidence that is weighed.
    pub failures: u32,
    /// How much evidence is weighed: at most twenty pieces, each of which stands for all that ended
    /// within 50 ms.
    pub weighed: u32,
    /// When it is probed next, milliseconds from now; where it is open.
    pub next_probe_ms: Option<u64>,
    /// The rate of transfers from a peer, where it was measured.
    pub bytes_per_second: Option<u64>,
    /// Bytes that a peer has lent, as it last said.
    pub outstanding_bytes: u64,
    /// How long a peer asked to be spared when it last said so, milliseconds.
    pub pause_ms: u32,
}
