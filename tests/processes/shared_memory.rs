//! Nodes of one host that talk over shared memory: chosen where it can be had, and nothing of a dead
//! or hung peer stays.

use std::fs;
use std::process::{Command, Stdio};

use kvrail::cli::cluster::Process;
use kvrail::client::Client;
use kvrail::protocol::door::Source;
use rustix::process::Signal;
use serde_json::Value;

use crate::support::{
    BINARY, Blocks, Counts, IMPATIENT, OVER_SHM, assert_at_rest_over, assert_rank, cluster,
    node_id, read, save, transport, try_read, until, until_stopped,
};

pub(crate) const AUTO: [&str; 2] = ["--transport", "auto"];
const TCP: [&str; 2] = ["--transport", "tcp"];

/// The transports of a node's connections to peers.
pub(crate) fn transports(client: &Client) -> Vec<String> {
    let peers = client.stat().unwrap().peers;
    let mut all: Vec<String> = peers.into_iter().map(|peer| peer.transport).collect();
    all.sort_unstable();
    all
}

/// Open descriptors, and mappings of nodes' pools and pages.
fn held(process: &Process) -> (usize, usize) {
    let of = |what: &str| format!("/proc/{}/{what}", process.id());
    let descriptors = fs::read_dir(of("fd")).unwrap().count();
    let maps = fs::read_to_string(of("maps")).unwrap();
    (descriptors, maps.lines().filter(|line| line.contains("/memfd:kvrail-")).count())
}

#[test]
fn it_is_chosen_for_peers_on_this_host_that_have_it_too() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &AUTO).unwrap();
    let near = cluster.node("near", address, &AUTO).unwrap();
    let far = cluster.node("far", address, &[]).unwrap();
    let (at_holder, at_near, at_far) =
        (holder.client().unwrap(), near.client().unwrap(), far.client().unwrap());
    let blocks = Blocks::small("near and far");
    save(&at_holder, &blocks);
    for client in [&at_near, &at_far] {
        let from = Source::From(node_id(&at_holder));
        assert_eq!(read(client, &blocks, from), Counts::all_ready(blocks.len()));
    }
    assert_eq!(transports(&at_near), ["shm"]);
    assert_eq!(transports(&at_far), [transport()]);
    assert_eq!(transports(&at_holder), ["shm", transport()]);
    assert_rank(&at_holder, &blocks, 3);
    for (name, client) in [("holder", &at_holder), ("near", &at_near), ("far", &at_far)] {
        assert_at_rest_over(transport(), name, client);
    }
    // A pool and a page for probes of each; what is mapped for reading cannot be written to from there.
    let maps = fs::read_to_string(format!("/proc/{}/maps", near.id())).unwrap();
    let pools = maps.lines().filter(|line| line.contains("/memfd:kvrail-pool-"));
    let rights: Vec<&str> = pools.filter_map(|line| line.split(' ').nth(1)).collect();
    assert_eq!(rights.iter().filter(|rights| **rights == "r--s").count(), 2, "{rights:?}");
    assert_eq!(rights.iter().filter(|rights| **rights == "rw-s").count(), 2, "{rights:?}");
}

#[test]
fn of_two_owners_the_one_on_this_host_serves() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let near = cluster.node("near", address, &AUTO).unwrap();
    let far = cluster.node("far", address, &[]).unwrap();
    let reader = cluster.node("reader", address, &AUTO).unwrap();
    let (at_near, at_far, at_reader) =
        (near.client().unwrap(), far.client().unwrap(), reader.client().unwrap());
    // How near an owner is shows when it is connected to.
    for (name, owner) in [("known to be near", &at_near), ("known to be far", &at_far)] {
        let blocks = Blocks::small(name);
        save(owner, &blocks);
        let from = Source::From(node_id(owner));
        assert_eq!(read(&at_reader, &blocks, from), Counts::all_ready(blocks.len()));
    }
    for round in 0..12 {
        let blocks = Blocks::small(&format!("of both, {round}"));
        // Whatever the order of the list.
        let owners = if round % 2 == 0 { [&at_near, &at_far] } else { [&at_far, &at_near] };
        owners.iter().for_each(|owner| save(owner, &blocks));
        assert_eq!(read(&at_reader, &blocks, Source::Anywhere), Counts::all_ready(blocks.len()));
        assert_rank(&at_near, &blocks, 2);
        assert_rank(&at_far, &blocks, 1);
    }
}

#[test]
fn nothing_else_is_used_where_nothing_else_is_wanted() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let arguments = [&IMPATIENT[..], &OVER_SHM].concat();
    let holder = cluster.node("holder", address, &[&IMPATIENT[..], &TCP].concat()).unwrap();
    let reader = cluster.node("reader", address, &arguments).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("out of reach");
    save(&at_holder, &blocks);
    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), Counts::all_failed(blocks.len()));
    assert_at_rest_over("shm", "the reader", &at_reader);
}

#[test]
fn a_peer_that_is_killed_leaves_no_descriptor_and_no_mapping() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let node = cluster.node("node", address, &OVER_SHM).unwrap();
    let at_node = node.client().unwrap();
    let own = Blocks::small("of the one that stays");
    save(&at_node, &own);
    let mut base = None;
    for round in 0..4 {
        let mut peer = cluster.node(&format!("peer-{round}"), address, &OVER_SHM).unwrap();
        let at_peer = peer.client().unwrap();
        let theirs = Blocks::small(&format!("of peer {round}"));
        save(&at_peer, &theirs);
        // Each reads from the other. Peers before this one read the node's blocks, too: the registry may
        // list them still, dead as they are.
        let from_node = Source::From(node_id(&at_node));
        let counts = read(&at_node, &theirs, Source::Anywhere);
        assert_eq!(counts, Counts::all_ready(theirs.len()), "{}", node.said());
        let counts = read(&at_peer, &own, from_node);
        assert_eq!(counts, Counts::all_ready(own.len()), "{}", peer.said());
        assert_eq!(transports(&at_node), ["shm"]);
        let with_peer = held(&node);
        peer.kill();
        until("the peer's end is noticed", || transports(&at_node).is_empty());
        let mut after = (0, 0);
        until("what was the peer's goes", || {
            after = held(&node);
            // The socket; a page each way, the peer's pool and its page for probes. The registry's
            // connection counts as before.
            (after.0 + 1, after.1 + 4) == with_peer
        });
        let base = *base.get_or_insert(after);
        assert_eq!(after, base, "after peer {round}");
    }
    assert_at_rest_over("shm", "the node", &at_node);
}

/// A reader that hangs in the middle of its READs is cut off when its lease ends. Its process still
/// has the holder's memory mapped when it goes on: what it finds there counts for nothing.
#[test]
fn a_reader_that_hangs_is_cut_off_and_never_takes_reused_memory_for_a_block() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let arguments = [&IMPATIENT[..], &OVER_SHM, &["--pool", "8MiB"]].concat();
    let holder = cluster.node("holder", address, &arguments).unwrap();
    let hangs = [&arguments[..], &["--fault", "stop:posted"]].concat();
    let reader = cluster.node("reader", address, &hangs).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::new("hung upon", 8, 512 << 10);
    save(&at_holder, &blocks.apart());
    let counts = std::thread::scope(|scope| {
        let reading = scope.spawn(|| try_read(&at_reader, &blocks, Source::Anywhere));
        until("the holder lends", || !at_holder.stat().unwrap().requesters.is_empty());
        until("the lease is over", || {
            let report = at_holder.stat().unwrap();
            report.residents.pinned == 0 && report.requesters.iter().all(|one| one.leases == 0)
        });
        // The memory is used for other blocks, all of it.
        for set in 0..3 {
            save(&at_holder, &Blocks::new(&format!("others {set}"), 8, 512 << 10));
        }
        until_stopped(&reader);
        reader.signal(Signal::CONT);
        // Bytes that are there are compared: others than were saved fail the test.
        reading.join().unwrap().unwrap()
    });
    assert_eq!(counts.ready, 0, "{counts:?}: {}", reader.said());
    assert_at_rest_over("shm", "the reader", &at_reader);
    assert_at_rest_over("shm", "the holder", &at_holder);
    let fresh = Blocks::small("after that");
    save(&at_holder, &fresh);
    assert_eq!(read(&at_reader, &fresh, Source::Anywhere), Counts::all_ready(fresh.len()));
}

#[test]
fn the_whole_demonstration_runs_over_it() {
    let output = Command::new(BINARY)
        .args(["demo", "--json", "--transport", "shm"])
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["transport"], "shm");
    assert_eq!(report["verified"], true);
}
