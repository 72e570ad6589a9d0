//! How much of an engine's memory one peer may have under leases.

use std::thread;

use kvrail::protocol::door::Source;
use rustix::process::Signal;

use crate::engine_memory::{BLOCK, BLOCKS, Engine, at, by_layers};
use crate::in_place::{in_place, numbers, publish};
use crate::support::{
    Blocks, Counts, assert_at_rest, cluster, node_id, read, until, until_stopped,
};

/// A node with pools of 256 KiB, and an engine with 24 blocks of 48 KiB; how many of these a peer has under
/// a lease that asks for all.
fn at_once(arguments: &[&str]) -> u64 {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let small = [&["--pool", "256KiB"], arguments].concat();
    let (holder, reader) = (
        cluster.node("holder", address, &small).unwrap(),
        // It stops with the READs of its first lease under way, or done and not told.
        cluster.node("reader", address, &["--fault", "stop:posted"]).unwrap(),
    );
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let client = holder.client().unwrap();
    let engine = Engine::new(&client, &by_layers());
    let all = Blocks::new("more than the pools", BLOCKS, BLOCK);
    let moved = at(&all, |at| at);
    engine.fill_all(&all, &moved);
    publish(&engine, &client, &moved);
    let from = Source::From(node_id(&at_holder));
    let lent = thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_reader, &all, from));
        until_stopped(&reader);
        let requesters = at_holder.stat().unwrap().requesters;
        reader.signal(Signal::CONT);
        reading.join().unwrap();
        requesters.iter().map(|requester| requester.blocks).sum()
    });
    until("all blocks have come", || read(&at_reader, &all, from) == Counts::all_ready(all.len()));
    // What the node copies for its own readers is bound by its pools.
    let here = read(&at_holder, &all, Source::Here);
    assert!(here.ready > 0 && here.busy > 0 && here.ready + here.busy == all.len(), "{here:?}");
    assert_eq!(engine.imported.withdraw(&numbers(&moved)).unwrap(), BLOCKS);
    drop(client);
    until("it is gone", || in_place(&at_holder) == (0, 0));
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
    lent
}

#[test]
fn a_node_with_small_pools_lends_as_much_as_its_engines_have() {
    // Half of the pools are 128 KiB, and of the layout 576 KiB.
    assert_eq!(at_once(&[]), 14);
}

#[test]
fn what_a_node_was_told_to_lend_stays_whatever_its_engines_open() {
    assert_eq!(at_once(&["--lease-bytes", "96KiB"]), 2);
    assert_eq!(at_once(&["--lease-bytes", "4MiB"]), u64::from(BLOCKS));
}
