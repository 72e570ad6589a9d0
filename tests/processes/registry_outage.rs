//! The registry is soft state: without it local work goes on, and when it is back, nodes tell it
//! what they hold.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::protocol::door::Source;
use rustix::net::{AddressFamily, SocketType};

use crate::support::{Blocks, Counts, cluster, read, save, save_unannounced, until};

/// A port that nobody else is given, and on which nobody listens yet.
struct Port {
    address: SocketAddr,
    _bound: OwnedFd,
}

impl Port {
    fn new() -> Self {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        // A listener with the same option may bind the port as long as this one does not listen.
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = rustix::net::getsockname(&socket).unwrap().try_into().unwrap();
        Self { address, _bound: socket }
    }

    fn registry(&self, cluster: &Cluster) -> Process {
        cluster.registry("registry", &["--listen", &self.address.to_string()]).unwrap()
    }
}

fn registry_state(process: &Process) -> String {
    process.client().unwrap().stat().unwrap().registry.state
}

#[test]
fn nodes_start_without_a_registry_and_announce_when_it_comes() {
    let (cluster, port) = (cluster(), Port::new());
    let holder = cluster.node("holder", port.address, &[]).unwrap();
    let reader = cluster.node("reader", port.address, &[]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("saved before there was a registry");
    save_unannounced(&at_holder, &blocks);
    let all = Counts::all_ready(blocks.len());
    assert_eq!(read(&at_holder, &blocks, Source::Anywhere), all);
    let nothing = Counts { not_found: blocks.len(), ..Counts::default() };
    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), nothing);
    assert_eq!(registry_state(&holder), "unreachable");

    let _registry = port.registry(&cluster);
    until("the reader finds the blocks", || read(&at_reader, &blocks, Source::Anywhere) == all);
    assert_eq!(registry_state(&holder), "connected");
}

#[test]
fn a_registry_that_comes_back_empty_is_told_everything() {
    let (cluster, port) = (cluster(), Port::new());
    let mut registry = port.registry(&cluster);
    let holder = cluster.node("holder", port.address, &[]).unwrap();
    let reader = cluster.node("reader", port.address, &[]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let before = Blocks::small("saved before");
    save(&at_holder, &before);
    let all = Counts::all_ready(before.len());

    registry.kill();
    let meanwhile = Blocks::small("saved meanwhile");
    save_unannounced(&at_holder, &meanwhile);
    assert_eq!(read(&at_holder, &before, Source::Anywhere), all);
    assert_eq!(read(&at_holder, &meanwhile, Source::Anywhere), all);
    let nothing = Counts { not_found: before.len(), ..Counts::default() };
    assert_eq!(read(&at_reader, &before, Source::Anywhere), nothing);
    until("the loss is noticed", || registry_state(&holder) == "unreachable");

    let _registry = port.registry(&cluster);
    for blocks in [&before, &meanwhile] {
        until("the reader finds the blocks", || read(&at_reader, blocks, Source::Anywhere) == all);
    }
    until("the holder is connected", || registry_state(&holder) == "connected");
    let after = Blocks::small("saved after");
    save(&at_holder, &after);
    assert_eq!(read(&at_reader, &after, Source::Anywhere), all);
}
