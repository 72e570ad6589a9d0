//! Which fabric a node runs on.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use super::landing::PoolRegion;
use super::options::{NodeError, NodeOptions};
use crate::fabric::{Access, Fabric, FabricError, Region};
use crate::memory::{Climb, ForeignFabric, ForeignMemory, GpuDirect, HostPool, Mapping};
use crate::shm::{PeerEndpoint, ShmConfig, ShmFabric, ShmName, WithShm};
use crate::sys::watch::Watch;
use crate::tcp::{TcpConfig, TcpFabric};
use crate::types::NodeId;
use crate::verbs::{VerbsConfig, VerbsFabric};

/// Where the data thread finds a peer.
pub(super) type PeerAddress = PeerEndpoint<SocketAddr>;

/// What a node may be told about its fabric. The nodes of a cluster that are on different hosts must
/// have the same one: a verbs fabric and a TCP fabric close each other's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TransportChoice {
    /// RDMA where a device works, else TCP, which the log says; shared memory with peers on this host.
    #[default]
    Auto,
    /// RDMA, or no start.
    Verbs,
    /// TCP.
    Tcp,
    /// Shared memory with peers on this host, and no connections to others.
    Shm,
}

impl TransportChoice {
    /// All choices.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Verbs, Self::Tcp, Self::Shm];

    /// The name that settings use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Verbs => "verbs",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }
}

impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for TransportChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.as_str() == text);
        found.ok_or_else(|| format!("a transport is one of auto, verbs, tcp, shm; got {text:?}"))
    }
}

/// What a fabric registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Served<'a> {
    pub(super) pools: &'a [Arc<HostPool>],
    pub(super) gpu: Option<&'a GpuMemory>,
}

/// A GPU's memory as fabrics meet it.
#[derive(Debug, Clone)]
pub(super) struct GpuMemory {
    pub(super) pool: Arc<dyn ForeignMemory>,
    pub(super) direct: GpuDirect,
    /// Where blocks land that go there.
    pub(super) arriving: Arc<Mapping>,
    /// Where blocks are read that are lent from there.
    pub(super) leaving: Arc<Mapping>,
}

/// What was registered with a fabric.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) pools: Vec<PoolRegion>,
    pub(super) gpu: Option<GpuRegions>,
}

impl Registered {
    /// The regions that peers are told of. The pool that probes read stays the last one.
    pub(super) fn served(&self) -> impl Iterator<Item = &Region> {
        let gpu = self.gpu.iter().flat_map(|gpu| gpu.direct.iter().chain([&gpu.leaving]));
        let (pools, last) = self.pools.split_at(self.pools.len().saturating_sub(1));
        pools.iter().map(|pool| &pool.region).chain(gpu).chain(last.iter().map(|pool| &pool.region))
    }
}

/// A GPU's memory, registered.
#[derive(Debug, Clone)]
pub(super) struct GpuRegions {
    /// The pool itself, where every card reaches it.
    pub(super) direct: Option<Region>,
    pub(super) climb: Climb,
    pub(super) arriving: Region,
    pub(super) leaving: Region,
}

/// The fabric that was chosen, with the memory registered.
#[derive(Debug)]
pub(super) enum Chosen {
    Verbs(Box<VerbsFabric>, Registered),
    Tcp(Box<TcpFabric>, Registered),
}

impl Chosen {
    /// Makes the fabric that the options ask for. A device with which the pools cannot be registered
    /// does not work.
    pub(super) fn new(options: &NodeOptions, served: Served<'_>) -> Result<Self, NodeError> {
        let chosen = Self::choose(options, served)?;
        chosen.check_direct(options)?;
        Ok(chosen)
    }

    fn choose(options: &NodeOptions, served: Served<'_>) -> Result<Self, NodeError> {
        // Shared memory has a TCP fabric beside it, whose address is the node's in the registry.
        if matches!(options.transport, TransportChoice::Tcp | TransportChoice::Shm) {
            return tcp(options, served);
        }
        let made = VerbsFabric::new(&VerbsConfig {
            listen: Some(options.listen),
            devices: options.rdma_devices.clone(),
            pairs: options.nic_pairs.clone(),
            gpu_nics: options.gpu_nics.clone(),
            gid_index: options.gid_index,
            lanes: options.streams,
            lease_windows: options.lease_windows,
            poll: options.poll,
            ..VerbsConfig::default()
        });
        let made = made.and_then(|mut fabric| {
            let registered = register(&mut fabric, served, |fabric, gpu| {
                let rungs = gpu.direct.direct();
                fabric.register_foreign(&gpu.pool, Access::RemoteRead, rungs)
            })?;
            Ok(Self::Verbs(Box::new(fabric), registered))
        });
        match made {
            Ok(chosen) => Ok(chosen),
            // TCP would serve by the pools' keys, which is what the node was told not to do.
            Err(error) if options.lease_windows => Err(NodeError::Windows(error)),
            Err(error) if options.transport == TransportChoice::Auto => {
                tracing::warn!(%error, "no RDMA: this node uses TCP");
                tcp(options, served)
            }
            Err(error) => Err(NodeError::Verbs(error)),
        }
    }

    /// Refuses staging where cards must reach the GPU's memory itself.
    fn check_direct(&self, options: &NodeOptions) -> Result<(), NodeError> {
        let (Self::Verbs(_, registered) | Self::Tcp(_, registered)) = self;
        let required = options.gpu.is_some_and(|gpu| gpu.direct == GpuDirect::Require);
        match &registered.gpu {
            Some(GpuRegions { direct: None, climb, .. }) if required => {
                Err(NodeError::GpuDirect { why: climb.why_not() })
            }
            _ => Ok(()),
        }
    }

    /// Where peers connect.
    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Verbs(fabric, _) => fabric.local_addr(),
            Self::Tcp(fabric, _) => fabric.local_addr(),
        }
    }
}

fn tcp(options: &NodeOptions, served: Served<'_>) -> Result<Chosen, NodeError> {
    let mut fabric = TcpFabric::new(TcpConfig {
        listen: Some(options.listen),
        streams: options.streams,
        ..TcpConfig::default()
    })?;
    // It serves in software, from memory that the CPU reads.
    let registered = register(&mut fabric, served, |_, _| Ok((None, Climb::default())))?;
    Ok(Chosen::Tcp(Box::new(fabric), registered))
}

/// Lets peers READ the pools, once they are admitted, and the GPU's memory as far as there is a way.
fn register<F>(
    fabric: &mut F,
    served: Served<'_>,
    climb: impl FnOnce(&mut F, &GpuMemory) -> Result<(Option<Region>, Climb), FabricError>,
) -> Result<Registered, FabricError>
where
    F: Fabric<Memory = Mapping>,
{
    let one = |pool: &Arc<HostPool>| {
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead)?;
        Ok(PoolRegion { pool: pool.id(), region })
    };
    let pools = served.pools.iter().map(one).collect::<Result<_, FabricError>>()?;
    let gpu = served.gpu.map(|gpu| {
        let (direct, climb) = climb(fabric, gpu)?;
        Ok::<_, FabricError>(GpuRegions {
            direct,
            climb,
            arriving: fabric.register(Arc::clone(&gpu.arriving), Access::Local)?,
            leaving: fabric.register(Arc::clone(&gpu.leaving), Access::RemoteRead)?,
        })
    });
    Ok(Registered { pools, gpu: gpu.transpose()? })
}

/// Why there is to be no shared memory with peers on this host; `None` where it is wanted.
fn unwanted(options: &NodeOptions) -> Option<&'static str> {
    match options.transport {
        TransportChoice::Shm => None,
        TransportChoice::Verbs | TransportChoice::Tcp => Some("--transport names another one"),
        TransportChoice::Auto if !options.shared_memory => Some("--no-shm"),
        // A peer that maps a pool needs no key: leases would not end with theirs.
        TransportChoice::Auto if options.lease_windows => Some("--lease-windows"),
        TransportChoice::Auto => None,
    }
}

/// Puts shared memory with peers on this host beside a fabric with which the pools are registered,
/// where the options ask for it. Where it cannot be had and need not, the fabric stays alone.
pub(super) fn with_neighbours<F>(
    far: F,
    (registered, served): (&Registered, Served<'_>),
    options: &NodeOptions,
    node: NodeId,
) -> Result<WithShm<F>, NodeError>
where
    F: ForeignFabric + Watch,
{
    let make = || {
        let listen = Some(ShmName::of_node(node));
        let mut fabric = ShmFabric::new(&ShmConfig { listen, ..ShmConfig::default() })?;
        for (pool, PoolRegion { region, .. }) in served.pools.iter().zip(&registered.pools) {
            fabric.adopt(region, Arc::clone(pool.mapping()), Access::RemoteRead)?;
        }
        if let (Some(gpu), Some(regions)) = (served.gpu, &registered.gpu) {
            fabric.adopt(&regions.arriving, Arc::clone(&gpu.arriving), Access::Local)?;
            fabric.adopt(&regions.leaving, Arc::clone(&gpu.leaving), Access::RemoteRead)?;
        }
        Ok(fabric)
    };
    let only = options.transport == TransportChoice::Shm;
    let near = match unwanted(options) {
        Some(why) => Err(why.to_owned()),
        None if only => Ok(make().map_err(NodeError::Shm)?),
        None => make().map_err(|error| {
            tracing::warn!(%error, "no shared memory with peers on this host");
            error.to_string()
        }),
    };
    let mut fabric = WithShm::new(far, near, only)?;
    // A GPU's pool that cards reach is lent as it is.
    if let Some(region) = registered.gpu.as_ref().and_then(|gpu| gpu.direct) {
        fabric.note_foreign(region.id);
    }
    Ok(fabric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_others_refused() {
        for choice in TransportChoice::ALL {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!("rdma".parse::<TransportChoice>().unwrap_err().contains("auto, verbs, tcp, shm"));
    }
}
