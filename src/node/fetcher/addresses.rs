//! Where owners are. A name is looked up once in a while and not for each read: a name server takes
//! longer than a lend and its transfer, and sometimes says nothing at all.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use crate::limits;
use crate::runtime::clock::Clock;
use crate::sync::{Mutex, lock};
use crate::types::{NodeId, Timestamp};

/// How long an address is used. It matters where a connection is made anew: a node that was started again
/// on another host is found there after this.
const GOOD_FOR: Duration = Duration::from_secs(5);

/// How long a name that leads nowhere is not looked up again. Its owner's blocks are asked of others.
const BAD_FOR: Duration = Duration::from_secs(1);

/// What was found under a name, and until when that counts.
type Found = (Option<SocketAddr>, Timestamp);

/// The names that owners advertise, and their addresses.
#[derive(Debug)]
pub(super) struct Addresses {
    clock: Clock,
    /// Whether an IPv4 address is taken before others.
    ipv4_first: bool,
    /// At most [`limits::REGISTRY_NODES_MAX`].
    found: Mutex<BTreeMap<String, Found>>,
}

impl Addresses {
    /// For a node that listens at `listen`. A name may have addresses of both kinds, and a peer that
    /// listens as this node does has only one of them.
    pub(super) fn new(clock: Clock, listen: SocketAddr) -> Self {
        Self { clock, ipv4_first: listen.is_ipv4(), found: Mutex::default() }
    }

    /// The address of this owner; `None` where its name leads nowhere, which is logged.
    pub(super) async fn of(&self, owner: NodeId, name: &str) -> Option<SocketAddr> {
        if let Ok(address) = name.parse() {
            return Some(address);
        }
        let known = lock(&self.found).get(name).copied();
        if let Some((address, _)) = known.filter(|(_, until)| self.clock.now() < *until) {
            return address;
        }
        let found = self.look_up(name).await;
        if let Err(why) = &found {
            tracing::warn!(%owner, name, why, "an owner of blocks that are wanted cannot be found");
        }
        let address = found.ok();
        let now = self.clock.now();
        let until = now + if address.is_some() { GOOD_FOR } else { BAD_FOR };
        let mut all = lock(&self.found);
        if all.len() >= limits::REGISTRY_NODES_MAX {
            all.retain(|_, (_, until)| now < *until);
        }
        if all.len() < limits::REGISTRY_NODES_MAX {
            all.insert(name.to_owned(), (address, until));
        }
        address
    }

    async fn look_up(&self, name: &str) -> Result<SocketAddr, String> {
        let found = tokio::net::lookup_host(name);
        match tokio::time::timeout(limits::LOOKUP_TIMEOUT, found).await {
            Ok(Ok(found)) => self.choose(found).ok_or_else(|| "it has no address".to_owned()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_elapsed) => Err("the name server does not answer".to_owned()),
        }
    }

    fn choose(&self, found: impl Iterator<Item = SocketAddr>) -> Option<SocketAddr> {
        let found: Vec<SocketAddr> = found.collect();
        let wanted = found.iter().find(|one| one.is_ipv4() && self.ipv4_first);
        wanted.or(found.first()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses() -> Addresses {
        Addresses::new(Clock::start(), "0.0.0.0:7070".parse().unwrap())
    }

    #[test]
    fn a_peer_is_reached_the_way_that_it_listens() {
        let [six, four]: [SocketAddr; 2] =
            ["[fd00::7]:7", "10.0.0.7:7"].map(|it| it.parse().unwrap());
        let any = Addresses::new(Clock::start(), "[::]:7070".parse().unwrap());
        assert_eq!(any.choose([six, four].into_iter()), Some(six));
        assert_eq!(addresses().choose([six, four].into_iter()), Some(four));
        assert_eq!(addresses().choose([six].into_iter()), Some(six));
        assert_eq!(addresses().choose([].into_iter()), None);
    }

    #[tokio::test]
    async fn a_name_is_looked_up_once_in_a_while() {
        let addresses = addresses();
        let owner = NodeId([7; 16]);
        let number: SocketAddr = "127.0.0.1:7".parse().unwrap();
        assert_eq!(addresses.of(owner, "127.0.0.1:7").await, Some(number));
        assert!(lock(&addresses.found).is_empty());

        assert_eq!(addresses.of(owner, "localhost:7").await.map(|it| it.port()), Some(7));
        // What stands there is believed while it counts, and looked up again when it does not.
        let other: SocketAddr = "127.0.0.2:7".parse().unwrap();
        let far = addresses.clock.now() + Duration::from_secs(3600);
        lock(&addresses.found).insert("localhost:7".to_owned(), (Some(other), far));
        assert_eq!(addresses.of(owner, "localhost:7").await, Some(other));
        lock(&addresses.found).insert("localhost:7".to_owned(), (Some(other), Timestamp::ZERO));
        assert_ne!(addresses.of(owner, "localhost:7").await, Some(other));

        // One that no resolver takes.
        assert_eq!(addresses.of(owner, "no port").await, None);
        assert!(lock(&addresses.found).get("no port").is_some_and(|(found, _)| found.is_none()));
    }

    #[tokio::test]
    async fn names_without_end_take_no_memory_without_end() {
        let addresses = addresses();
        let far = addresses.clock.now() + Duration::from_secs(3600);
        for number in 0..limits::REGISTRY_NODES_MAX {
            lock(&addresses.found).insert(number.to_string(), (None, far));
        }
        assert!(addresses.of(NodeId([7; 16]), "localhost:7").await.is_some());
        assert_eq!(lock(&addresses.found).len(), limits::REGISTRY_NODES_MAX);
    }
}
