//! Which fabric a node runs on.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use super::landing::PoolRegion;
use super::options::{NodeError, NodeOptions};
use crate::fabric::{Access, Fabric, FabricError};
use crate::memory::{HostPool, Mapping};
use crate::tcp::{TcpConfig, TcpFabric};
use crate::verbs::{VerbsConfig, VerbsFabric};

/// What a node may be told about its fabric. All nodes of a cluster must have the same one: a verbs
/// fabric and a TCP fabric close each other's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TransportChoice {
    /// RDMA where a device works, else TCP, which the log says.
    #[default]
    Auto,
    /// RDMA, or no start.
    Verbs,
    /// TCP.
    Tcp,
}

impl TransportChoice {
    /// All choices.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Verbs, Self::Tcp];

    /// The name that settings use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Verbs => "verbs",
            Self::Tcp => "tcp",
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
        found.ok_or_else(|| format!("a transport is one of auto, verbs, tcp; got {text:?}"))
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
        if options.transport == TransportChoice::Tcp {
            return tcp(options, pools);
        }
        let made = VerbsFabric::new(&VerbsConfig {
            listen: Some(options.listen),
            devices: options.rdma_devices.clone(),
            pairs: options.nic_pairs.clone(),
            gid_index: options.gid_index,
            lanes: options.streams,
            poll: options.poll,
            ..VerbsConfig::default()
        });
        let made = made.and_then(|mut fabric| {
            let regions = register(&mut fabric, pools)?;
            Ok(Self::Verbs(Box::new(fabric), regions))
        });
        match made {
            Ok(chosen) => Ok(chosen),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_others_refused() {
        for choice in TransportChoice::ALL {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert!("rdma".parse::<TransportChoice>().unwrap_err().contains("auto, verbs, tcp"));
    }
}
