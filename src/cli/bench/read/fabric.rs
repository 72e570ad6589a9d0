//! The fabrics that are measured, set up as `serve` does: each with what it takes to have shared memory
//! beside it, and with that alone for `--transport shm`.

use std::net::SocketAddr;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cli::CliError;
use crate::fabric::Fabric;
use crate::memory::Mapping;
use crate::shm::{PeerEndpoint, ShmConfig, ShmFabric, ShmName, WithShm};
use crate::tcp::{TcpConfig, TcpFabric};
use crate::types::NodeId;
use crate::verbs::{PollMode, Posts, VerbsConfig, VerbsFabric};

/// Why a fabric that is measured has no shared memory beside it.
const NOT_MEASURED: &str = "--transport names another one";

/// The device, on each end by itself.
#[derive(Debug, Clone, Default, Args)]
pub struct DeviceArgs {
    /// RDMA devices, such as mlx5_0 [default: all of the fastest]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub rdma_device: Vec<String>,
    /// Index of the GID on each of them [default: RoCE v2 on IPv4 before others]
    #[arg(long, value_name = "INDEX")]
    pub gid_index: Option<u32>,
    /// How a thread waits on an RDMA device: busy, adaptive or event [default: adaptive]
    #[arg(long, value_name = "MODE")]
    pub poll: Option<PollMode>,
}

impl DeviceArgs {
    /// Whether any is given: then there must be a device.
    pub(in crate::cli::bench) const fn is_named(&self) -> bool {
        !self.rdma_device.is_empty() || self.gid_index.is_some() || self.poll.is_some()
    }

    /// What to say where they are given and no device is asked for.
    pub(in crate::cli::bench) fn pointless() -> CliError {
        CliError::usage(
            "--rdma-device, --gid-index and --poll are about verbs: ask for --transport verbs too, or \
             leave them out",
        )
    }

    /// The same settings as arguments of another process.
    pub(in crate::cli::bench) fn arguments(&self) -> Vec<String> {
        let Self { rdma_device, gid_index, poll } = self;
        let device = rdma_device.iter().flat_map(|name| ["--rdma-device".to_owned(), name.clone()]);
        let index = gid_index.iter().flat_map(|at| ["--gid-index".to_owned(), at.to_string()]);
        let poll = poll.iter().flat_map(|mode| ["--poll".to_owned(), mode.to_string()]);
        device.chain(index).chain(poll).collect()
    }
}

/// A fabric that can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Transport {
    Verbs,
    Tcp,
    Shm,
}

impl Transport {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Verbs => "verbs",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }
}

/// What all of them have here.
pub(super) trait Wire:
    Fabric<Endpoint = PeerEndpoint<SocketAddr>, Memory = Mapping> + Send
{
    /// Where peers connect.
    fn listens(&self) -> Option<SocketAddr>;

    /// READs that the network carries at once for this many streams; none where it has no such
    /// limit of its own.
    fn reads_at_once(&self, streams: usize) -> Option<usize>;

    /// What a device was given so far; none where there is no device.
    fn posts(&self) -> Option<Posts>;
}

impl Wire for WithShm<TcpFabric> {
    fn listens(&self) -> Option<SocketAddr> {
        self.far().local_addr()
    }

    fn reads_at_once(&self, _streams: usize) -> Option<usize> {
        None
    }

    fn posts(&self) -> Option<Posts> {
        None
    }
}

impl Wire for WithShm<VerbsFabric> {
    fn listens(&self) -> Option<SocketAddr> {
        self.far().local_addr()
    }

    fn reads_at_once(&self, streams: usize) -> Option<usize> {
        Some(usize::from(self.far().reads_issued()) * streams)
    }

    fn posts(&self) -> Option<Posts> {
        Some(self.far().posts())
    }
}

/// Sockets, and no shared memory.
pub(super) fn tcp(
    listen: Option<SocketAddr>,
    streams: usize,
) -> Result<WithShm<TcpFabric>, CliError> {
    let fabric = TcpFabric::new(TcpConfig { listen, streams, ..TcpConfig::default() });
    WithShm::new(fabric.map_err(CliError::failed)?, Err(NOT_MEASURED.to_owned()), false)
        .map_err(CliError::failed)
}

/// Shared memory alone, beside a TCP fabric that has no connections, as a node has it. One that
/// listens does so as this node.
pub(super) fn shm(
    listen: Option<(SocketAddr, NodeId)>,
    streams: usize,
) -> Result<WithShm<TcpFabric>, CliError> {
    let (address, node) = listen.unzip();
    let config = TcpConfig { listen: address, streams, ..TcpConfig::default() };
    let far = TcpFabric::new(config).map_err(CliError::failed)?;
    let config = ShmConfig { listen: node.map(ShmName::of_node), ..ShmConfig::default() };
    let near = ShmFabric::new(&config).map_err(CliError::failed)?;
    WithShm::new(far, Ok(near), true).map_err(CliError::failed)
}

/// RDMA devices, and no shared memory.
pub(super) fn verbs(
    device: &DeviceArgs,
    listen: Option<SocketAddr>,
    streams: usize,
) -> Result<WithShm<VerbsFabric>, CliError> {
    let made = VerbsFabric::new(&VerbsConfig {
        listen,
        devices: device.rdma_device.clone(),
        gid_index: device.gid_index,
        lanes: streams,
        poll: device.poll.unwrap_or_default(),
        ..VerbsConfig::default()
    });
    let cannot = |error| CliError::failed(format!("--transport verbs cannot be had: {error}"));
    WithShm::new(made.map_err(cannot)?, Err(NOT_MEASURED.to_owned()), false)
        .map_err(CliError::failed)
}
