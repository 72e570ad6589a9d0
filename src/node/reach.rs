//! How near an owner of blocks is, for whoever chooses among several.

use std::collections::HashSet;
use std::time::Duration;

use crate::shm;
use crate::sync::{Mutex, lock};
use crate::types::{NodeId, Timestamp};

/// How old knowledge of who is on this host may be: less than a node takes to start and announce its
/// first blocks.
const FRESH: Duration = Duration::from_secs(1);

/// What lies between this node and an owner; the order is that of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reach {
    /// Memory: both are on one host, and the owner can be read over shared memory.
    SameHost,
    /// A network.
    Far,
}

/// Who else is on this host.
#[derive(Debug)]
pub struct Neighbours {
    /// Whether this node reads over shared memory at all.
    enabled: bool,
    known: Mutex<(Option<Timestamp>, HashSet<NodeId>)>,
}

impl Neighbours {
    /// The neighbours of a node that reads over shared memory, or, not `enabled`, does not.
    #[must_use]
    pub fn new(enabled: bool) -> Self {
        Self { enabled, known: Mutex::default() }
    }

    /// How near an owner is, as of a second ago at the worst. It is advice: a connection goes the way
    /// that works.
    pub fn reach(&self, owner: NodeId, now: Timestamp) -> Reach {
        if !self.enabled {
            return Reach::Far;
        }
        let mut known = lock(&self.known);
        let (asked, here) = &mut *known;
        if asked.is_none_or(|asked| now.since(asked) >= FRESH) {
            *here = shm::nodes_here().into_iter().collect();
            *asked = Some(now);
        }
        if here.contains(&owner) { Reach::SameHost } else { Reach::Far }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{ShmConfig, ShmFabric, ShmName};

    #[test]
    fn a_node_that_listens_here_is_near_and_preferred() {
        let node = NodeId(*b"kvrail-testreach");
        let at = |millis| Timestamp::ZERO + Duration::from_millis(millis);
        let neighbours = Neighbours::new(true);
        assert_eq!(neighbours.reach(node, at(0)), Reach::Far);
        let listen = Some(ShmName::of_node(node));
        let fabric = ShmFabric::new(&ShmConfig { listen, ..ShmConfig::default() }).unwrap();
        assert_eq!(neighbours.reach(node, at(999)), Reach::Far, "what was known");
        assert_eq!(neighbours.reach(node, at(1000)), Reach::SameHost);
        assert_eq!(Neighbours::new(false).reach(node, at(0)), Reach::Far);
        drop(fabric);
        assert_eq!(neighbours.reach(node, at(2000)), Reach::Far);
        assert!(Reach::SameHost < Reach::Far);
    }
}
