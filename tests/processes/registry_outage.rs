//! The registry is soft state: without it local work goes on, and when it is back, nodes tell it
//! what they hold.

use kvrail::cli::cluster::Process;
use kvrail::protocol::door::Source;

use crate::support::{Blocks, Counts, Port, cluster, read, save, save_unannounced, until};

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
    until("that is logged", || holder.said().contains("without the registry"));
    let mut why = String::new();
    until("it passes the system's answer on", || {
        why = at_holder.stat().unwrap().registry.error;
        why.contains("Connection refused")
    });
    let parts: Vec<&str> = why.split(": ").collect();
    let again = |at: &usize| parts[..*at].contains(&parts[*at]);
    assert!(!(0..parts.len()).any(|at| again(&at)), "{why}");
    // Once, however often it was tried.
    assert_eq!(holder.said().matches("without the registry").count(), 1, "{}", holder.said());

    let _registry = port.registry(&cluster, &[]);
    until("the reader finds the blocks", || read(&at_reader, &blocks, Source::Anywhere) == all);
    assert_eq!(registry_state(&holder), "connected");
    until("its return is logged", || holder.said().contains("the registry answers again"));
}

/// The registry is there, and stat says that the node is what is wrong.
#[test]
fn a_second_node_of_one_identity_is_told_apart_from_an_outage() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let identity = ["--node-id", "0123456789abcdef0123456789abcdef"];
    let first = cluster.node("first", address, &identity).unwrap();
    until("it is connected", || registry_state(&first) == "connected");
    let later = cluster.node("later", address, &identity).unwrap();
    until("the first is refused", || registry_state(&first) == "refused");
    until("the later one is not", || registry_state(&later) == "connected");
    let why = first.client().unwrap().stat().unwrap().registry.error;
    assert!(why.contains("its own node id"), "{why}");
    until("the log says so, too", || first.said().contains("its own node id"));
}

#[test]
fn a_registry_that_comes_back_empty_is_told_everything() {
    let (cluster, port) = (cluster(), Port::new());
    let mut registry = port.registry(&cluster, &[]);
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

    let _registry = port.registry(&cluster, &[]);
    for blocks in [&before, &meanwhile] {
        until("the reader finds the blocks", || read(&at_reader, blocks, Source::Anywhere) == all);
    }
    until("the holder is connected", || registry_state(&holder) == "connected");
    let after = Blocks::small("saved after");
    save(&at_holder, &after);
    assert_eq!(read(&at_reader, &after, Source::Anywhere), all);
}
