//! How fabrics of one host find each other.

use std::sync::Arc;

use super::wire::VERSION;
use crate::types::NodeId;

/// The name under which a fabric is found on its host, and nowhere else: a Unix socket does not leave
/// its kernel, so that whoever can connect has the same boot of the same host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShmName(Arc<str>);

impl ShmName {
    /// The name of a node's fabric.
    #[must_use]
    pub fn of_node(node: NodeId) -> Self {
        Self(format!("kvrail/{VERSION}/{node}").into())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{ShmConfig, ShmFabric};
    use crate::sys::local_socket;

    #[test]
    fn a_node_is_here_while_it_listens() {
        let name = ShmName::of_node(NodeId(*b"kvrail-test-name"));
        let is_here = || local_socket::dial(name.as_str()).is_ok();
        assert!(!is_here());
        let config = ShmConfig { listen: Some(name.clone()), ..ShmConfig::default() };
        let fabric = ShmFabric::new(&config).unwrap();
        assert!(is_here());
        let again = ShmFabric::new(&config).unwrap_err().to_string();
        assert!(again.contains("an identity of its own"), "{again}");
        drop(fabric);
        assert!(!is_here());
    }
}
