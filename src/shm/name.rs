//! How fabrics of one host find each other.

use std::sync::Arc;

use super::wire::VERSION;
use crate::sys::local_socket;
use crate::types::NodeId;

/// The name under which a fabric is found on its host, and nowhere else: a Unix socket does not leave
/// its kernel, so that whoever can connect has the same boot of the same host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShmName(Arc<str>);

impl ShmName {
    /// The name of a node's fabric.
    #[must_use]
    pub fn of_node(node: NodeId) -> Self {
        Self(format!("{}{node}", prefix()).into())
    }

    /// A name of its own kind, for a fabric that belongs to no node.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// What the names of nodes of this version begin with.
fn prefix() -> String {
    format!("kvrail/{VERSION}/")
}

/// The nodes that listen on this host, this process's own among them. Reads a table of the kernel's:
/// some 100 µs on a busy host, so ask once in a while and remember.
#[must_use]
pub fn nodes_here() -> Vec<NodeId> {
    local_socket::names(&prefix()).iter().filter_map(|name| name.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{ShmConfig, ShmFabric};

    #[test]
    fn a_node_is_here_while_it_listens() {
        let node = NodeId(*b"kvrail-test-name");
        assert!(!nodes_here().contains(&node));
        let config = ShmConfig { listen: Some(ShmName::of_node(node)), ..ShmConfig::default() };
        let fabric = ShmFabric::new(&config).unwrap();
        assert!(nodes_here().contains(&node));
        let again = ShmFabric::new(&config).unwrap_err().to_string();
        assert!(again.contains("an identity of its own"), "{again}");
        drop(fabric);
        assert!(!nodes_here().contains(&node));
    }
}
