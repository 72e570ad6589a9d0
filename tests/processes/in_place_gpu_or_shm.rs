//! GPU memory of an engine that peers read where it lies, on nodes that are told nothing of how to reach
//! each other: those of one host talk over shared memory, which makes way as long as that memory is there.
//! The driver is a stand-in over host memory, `ffi/cuda_standin.c`, whose pointers a NIC can be let
//! register: no GPU has part in this.

use std::process::Command;

use kvrail::client::Client;
use kvrail::protocol::door::Source;
use rustix::process::Signal;

use crate::cuda_standin::StandIn;
use crate::engine_gpu::{By, Engine, Gpu, cluster, publish, within_reach};
use crate::engine_memory::{blocks, by_layers};
use crate::gpu_over_shm::CANNOT_BE_MAPPED;
use crate::shared_memory::{AUTO, transports};
use crate::support::{
    BINARY, Blocks, Counts, assert_at_rest, assert_rank, holder_and_reader, is_lending, node_id,
    read, save, try_read, until, until_stopped,
};

/// What a node says of shared memory.
fn no_shared_memory(client: &Client) -> String {
    client.stat().unwrap().node.no_shared_memory
}

/// Whom a node has blamed for anything.
fn blamed(client: &Client) -> Vec<String> {
    let health = client.stat().unwrap().health;
    health.into_iter().map(|one| one.reason).filter(|reason| !reason.is_empty()).collect()
}

/// An engine's GPU memory, with all of these blocks published in it.
fn published<'c>(client: &'c Client, gpu: &'c Gpu, blocks: &Blocks) -> Engine<'c> {
    let engine = Engine::new(client, gpu, (By::Handle, &by_layers()));
    publish(client, &engine, blocks);
    engine
}

/// Nodes of one host, told nothing of how to reach each other.
#[test]
fn shared_memory_makes_way_for_gpu_memory_and_comes_back() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster(&standin);
    let (registry, holder, reader) = holder_and_reader(&cluster, &AUTO);
    let address = registry.addresses().unwrap().listen;
    let other = cluster.node("other", address, &AUTO).unwrap();
    let [at_holder, at_reader, at_other] =
        [&holder, &reader, &other].map(|node| node.client().unwrap());
    let from = Source::From(node_id(&at_holder));
    let comes = |to: &Client, what: &str| {
        let blocks = Blocks::small(what);
        save(&at_holder, &blocks);
        assert_eq!(read(to, &blocks, from), Counts::all_ready(blocks.len()), "{what}");
    };
    let goes = |to: &Client, what: &str, over: &str| {
        comes(to, what);
        assert_eq!(transports(to), [over], "{what}");
    };
    goes(&at_reader, "before an engine comes", "shm");
    assert_eq!(no_shared_memory(&at_holder), "");

    let (client, gpu) = (holder.client().unwrap(), Gpu::new(standin.library()));
    let in_place = blocks("in place");
    let engine = published(&client, &gpu, &in_place);
    assert_eq!(no_shared_memory(&at_holder), CANNOT_BE_MAPPED);
    assert_eq!(no_shared_memory(&at_reader), "");
    standin.log();
    assert_eq!(read(&at_reader, &in_place, from), Counts::all_ready(in_place.len()));
    let log = standin.logged();
    assert!(log.iter().all(|line| !line.contains("cuMemcpy")), "the card reads it: {log:?}");
    assert_eq!(transports(&at_reader), ["verbs"]);
    goes(&at_reader, "while it is there", "verbs");
    goes(&at_other, "to a node that comes then", "verbs");
    assert_eq!(transports(&at_holder), ["verbs", "verbs"]);
    let said = Command::new(BINARY)
        .args(["stat", "--socket"])
        .arg(holder.addresses().unwrap().socket.as_ref().unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains(&format!("none: {CANNOT_BE_MAPPED}")), "{said}");

    drop(engine);
    drop(client);
    until("its memory is let go", || no_shared_memory(&at_holder).is_empty());
    comes(&at_reader, "over the connection that is there");
    let late = cluster.node("late", address, &AUTO).unwrap();
    let at_late = late.client().unwrap();
    goes(&at_late, "to a node that comes later", "shm");
    for (name, client) in
        [("holder", &at_holder), ("reader", &at_reader), ("other", &at_other), ("late", &at_late)]
    {
        assert_eq!(blamed(client), Vec::<String>::new(), "{name}");
        assert_at_rest(name, client);
    }
}

/// Where no card reaches the memory it is copied to where peers can map it.
#[test]
fn copies_of_gpu_memory_go_over_shared_memory() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let stages = [&AUTO[..], &["--gpu", "0", "--gpu-pool", "4MiB"]].concat();
    let holder = cluster.node("holder", address, &stages).unwrap();
    let reader = cluster.node("reader", address, &AUTO).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let (client, gpu) = (holder.client().unwrap(), Gpu::new(standin.library()));
    let in_place = blocks("as copies");
    let engine = published(&client, &gpu, &in_place);
    let layouts = at_holder.stat().unwrap().in_place.layouts;
    assert_eq!((layouts.len(), layouts[0].way.as_str()), (1, "staging"));
    let from = Source::From(node_id(&at_holder));
    assert_eq!(read(&at_reader, &in_place, from), Counts::all_ready(in_place.len()));
    assert_eq!(
        (transports(&at_reader), no_shared_memory(&at_holder)),
        (vec!["shm".to_owned()], String::new())
    );
    drop(engine);
    drop(client);
    until("all of it is taken back", || at_holder.stat().unwrap().in_place.layouts.is_empty());
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

#[test]
fn reads_that_shared_memory_leaves_undone_are_done_over_the_nics() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &AUTO).unwrap();
    let stops = [&AUTO[..], &["--fault", "stop:posted"]].concat();
    let reader = cluster.node("reader", address, &stops).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let (host, in_place) = (Blocks::small("under way"), blocks("in place"));
    save(&at_holder, &host);
    let (client, gpu) = (holder.client().unwrap(), Gpu::new(standin.library()));
    let engine = std::thread::scope(|scope| {
        let reading = scope.spawn(|| try_read(&at_reader, &host, Source::Anywhere));
        // Its READs are posted, and none of them is done.
        until("the holder lends", || is_lending(&at_holder));
        until_stopped(&reader);
        assert_eq!(transports(&at_holder), ["shm"]);
        let engine = published(&client, &gpu, &in_place);
        assert_eq!(transports(&at_holder), Vec::<String>::new());
        reader.signal(Signal::CONT);
        let counts = reading.join().unwrap().unwrap();
        assert_eq!(counts, Counts::all_ready(host.len()), "{}", reader.said());
        engine
    });
    assert_eq!(transports(&at_reader), ["verbs"]);
    assert_rank(&at_holder, &host, 2);
    for (name, client) in [("holder", &at_holder), ("reader", &at_reader)] {
        assert_eq!(blamed(client), Vec::<String>::new(), "{name}");
        assert_at_rest(name, client);
    }
    drop(engine);
}
