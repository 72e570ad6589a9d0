//! Which fabric a node runs on.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use super::landing::PoolRegion;
use super::options::{NodeError, NodeOptions};
use crate::fabric::{Access, Fabric, FabricError};
use crate::memory::{HostPool, Mapping};
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

/// The fabric that was chosen, with the pools registered.
#[derive(Debug)]
pub(super) enum Chosen {
    Verbs(Box<VerbsFabric>, Vec<PoolRegion>),
    Tcp(Box<TcpFabric>, Vec<PoolRegion>),
}

impl Chosen {
    /// Makes the fabric that the options ask for. A device with which the pools cannot be registered
    /// does not work.
    pub(super) fn new(options: &NodeOptions, pools: &[Arc<HostPool>]) -> Result<Self, NodeError> {
        // Shared memory has a TCP fabric beside it, whose address is the node's in the registry.
        if matches!(options.transport, TransportChoice::Tcp | TransportChoice::Shm) {
            return tcp(options, pools);
        }
        let made = VerbsFabric::new(&VerbsConfig {
            listen: Some(options.listen),
            devices: options.rdma_devices.clone(),
            pairs: options.nic_pairs.clone(),
            gid_index: options.gid_index,
            lanes: options.streams,
            lease_windows: options.lease_windows,
            poll: options.poll,
            ..VerbsConfig::default()
        });
        let made = made.and_then(|mut fabric| {
            let regions = register(&mut fabric, pools)?;
            Ok(Self::Verbs(Box::new(fabric), regions))
        });
        match made {
            Ok(chosen) => Ok(chosen),
            // TCP would serve by the pools' keys, which is what the node was told not to do.
            Err(error) if options.lease_windows => Err(NodeError::Windows(error)),
            Err(error) if options.transport == TransportChoice::Auto => {
                tracing::warn!(%error, "no RDMA: this node uses TCP");
                tcp(options, pools)
            }
            Err(error) => Err(NodeError::Verbs(error)),
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

fn tcp(options: &NodeOptions, pools: &[Arc<HostPool>]) -> Result<Chosen, NodeError> {
    let mut fabric = TcpFabric::new(TcpConfig {
        listen: Some(options.listen),
        streams: options.streams,
        ..TcpConfig::default()
    })?;
    let regions = register(&mut fabric, pools)?;
    Ok(Chosen::Tcp(Box::new(fabric), regions))
}

/// Lets peers READ the pools, once they are admitted.
fn register<F>(fabric: &mut F, pools: &[Arc<HostPool>]) -> Result<Vec<PoolRegion>, FabricError>
where
    F: Fabric<Memory = Mapping>,
{
    let one = |pool: &Arc<HostPool>| {
        let region = fabric.register(Arc::clone(pool.mapping()), Access::RemoteRead)?;
        Ok(PoolRegion { pool: pool.id(), region })
    };
    pools.iter().map(one).collect()
}

/// Puts shared memory with peers on this host beside a fabric with which the pools are registered,
/// where the options ask for it. Where it cannot be had and need not, the fabric stays alone.
pub(super) fn with_neighbours<F>(
    far: F,
    (regions, pools): (&[PoolRegion], &[Arc<HostPool>]),
    options: &NodeOptions,
    node: NodeId,
) -> Result<WithShm<F>, NodeError>
where
    F: Fabric<Memory = Mapping> + Watch,
{
    let make = || {
        let listen = Some(ShmName::of_node(node));
        let mut fabric = ShmFabric::new(&ShmConfig { listen, ..ShmConfig::default() })?;
        for (pool, PoolRegion { region, .. }) in pools.iter().zip(regions) {
            fabric.adopt(region, Arc::clone(pool.mapping()), Access::RemoteRead)?;
        }
        Ok(fabric)
    };
    let only = options.transport == TransportChoice::Shm;
    let near = match options.transport {
        TransportChoice::Shm => Some(make().map_err(NodeError::Shm)?),
        // A peer that maps a pool needs no key: leases would not end with theirs.
        TransportChoice::Auto if options.shared_memory && !options.lease_windows => make()
            .inspect_err(|error: &FabricError| {
                tracing::warn!(%error, "no shared memory with peers on this host");
            })
            .ok(),
        _ => None,
    };
    Ok(WithShm::new(far, near, only)?)
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
