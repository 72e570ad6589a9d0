//! Blocks that peers hold, read straight into the GPU memory where an engine wants them. The driver is a
//! stand-in over host memory, `ffi/cuda_standin.c`, whose pointers no NIC can register unless it is told
//! to: no GPU has part in this.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::protocol::door::stat::InPlaceStat;
use kvrail::protocol::door::{LoadOutcome, MovedBlock, Source};

use crate::cuda_standin::StandIn;
use crate::engine_gpu::{By, Engine, Gpu, cluster, device_memory, first, publish, within_reach};
use crate::engine_memory::{BLOCK, at, blocks, by_blocks, by_layers};
use crate::in_place::{Left, connect, numbers};
use crate::in_place_staged::until_closed;
use crate::load_in_place::loaded;
use crate::nics::{Lost, setting};
use crate::support::{
    Blocks, Counts, IMPATIENT, PATIENCE, TestProcess, assert_at_rest, assert_rank, metric,
    namespace, node_id, read, save, transport, until,
};

/// Arguments of a node with that GPU, whose peers on the same host come over the network.
const WITH_GPU: [&str; 5] = ["--no-shm", "--gpu", "0", "--gpu-pool", "4MiB"];
const WITHOUT_GPU: [&str; 1] = ["--no-shm"];

/// A registry, a node that holds blocks in its host pool, and a reader with these arguments.
fn pair(cluster: &Cluster, reader: &[&str]) -> (Process, Process, Process) {
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &WITHOUT_GPU).unwrap();
    let scraped = [reader, &["--metrics-listen", "127.0.0.1:0"]].concat();
    let reader = cluster.node("reader", address, &scraped).unwrap();
    (registry, holder, reader)
}

fn in_place(client: &Client) -> InPlaceStat {
    client.stat().unwrap().in_place
}

/// What an engine loads that wants it in place, and what the node says of that: the only layout, if one is
/// open.
fn copied(standin: &StandIn, arguments: &[&str]) -> InPlaceStat {
    let cluster = cluster(standin);
    let (_registry, holder, reader) = pair(&cluster, arguments);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let before = device_memory(&reader);
    let client = reader.client().unwrap();
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_blocks()));
    let blocks = blocks("copied");
    save(&at_holder, &blocks);
    let moved = at(&blocks, |at| at);
    let outcomes = engine.imported.load_in_place(&namespace(), &moved, Source::Anywhere).unwrap();
    assert_eq!(loaded(&outcomes), (0, 16), "{outcomes:?}");
    engine.assert_bytes(&moved, &blocks);
    let stat = in_place(&at_reader);
    assert_eq!((stat.blocks, stat.landed, stat.copied), (0, 0, 16), "{stat:?}");
    assert_eq!(metric(&reader, "kvrail_loaded_blocks_total{way=\"copied\"}"), 16.0);
    assert_rank(&at_holder, &blocks, 2);
    assert_rank(&at_reader, &blocks, 1);
    drop(client);
    until_closed(&at_reader, &reader, before);
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
    stat
}

#[test]
fn where_no_card_reaches_gpu_memory_loads_are_copied_and_the_node_says_why() {
    let Some(standin) = StandIn::new() else { return };
    let stat = copied(&standin, &WITHOUT_GPU);
    assert!(stat.layouts.is_empty(), "{stat:?}");
    assert!(stat.not_opened.contains("this node has no GPU of its own (--gpu)"), "{stat:?}");
    if transport() == "verbs" {
        assert!(stat.refused.iter().any(|one| one.errno == Some(14)), "{stat:?}");
    } else {
        assert!(stat.not_opened.contains("no RDMA device is in use"), "{stat:?}");
    }
    // Where peers read copies of what lies there, nothing can land either.
    let stat = copied(&standin, &WITH_GPU);
    let [layout] = &stat.layouts[..] else { panic!("{stat:?}") };
    assert_eq!(layout.way, "staging");
    assert_eq!(layout.not_landed, "no card reaches its memory");
    let with_errno = layout.refused.iter().any(|one| one.errno == Some(14));
    assert_eq!(with_errno, transport() == "verbs", "{stat:?}");
}

#[test]
fn without_a_gpu_of_its_own_a_node_verifies_nothing_that_lands_in_one() {
    let Some(standin) = within_reach() else { return };
    let stat = copied(&standin, &WITHOUT_GPU);
    let [layout] = &stat.layouts[..] else { panic!("{stat:?}") };
    assert_eq!(layout.way, "direct");
    assert_eq!(layout.not_landed, "this node has no GPU of its own (--gpu)");
    // Nothing lands where no layout is open to peers, whatever the reason.
    let stat = copied(&standin, &["--no-shm", "--lease-windows"]);
    assert!(stat.layouts.is_empty() && stat.refused.is_empty(), "{stat:?}");
    assert!(stat.not_opened.contains("(--lease-windows)"), "{stat:?}");
}

#[test]
fn what_peers_hold_lands_in_gpu_memory() {
    let Some(standin) = StandIn::new() else { return };
    if transport() != "verbs" {
        return;
    }
    standin.control("set registrable 1\nset ordering 0");
    let cluster = cluster(&standin);
    let (registry, holder, reader) = pair(&cluster, &WITH_GPU);
    let address = registry.addresses().unwrap().listen;
    let third = cluster.node("third", address, &WITHOUT_GPU).unwrap();
    let (at_holder, at_reader, at_third) =
        (holder.client().unwrap(), reader.client().unwrap(), third.client().unwrap());
    let gpu = Gpu::new(standin.library());
    for (by, name) in [(By::Handle, "by handle"), (By::Descriptor, "by descriptor")] {
        // One half lies in the holder's host pool, the other one on its GPU, as an engine has it.
        let all = blocks(name);
        let (pooled, lying) = (all.part(0..8), all.part(8..16));
        let (at_source, at_sink) = (holder.client().unwrap(), reader.client().unwrap());
        let writer = Engine::new(&at_source, &gpu, (by, &by_layers()));
        save(&at_holder, &pooled);
        publish(&at_source, &writer, &lying);

        let engine = Engine::new(&at_sink, &gpu, (by, &by_blocks()));
        let to = at(&all, |at| (at * 5 + 2) % crate::engine_memory::BLOCKS);
        standin.log();
        let outcomes = engine.imported.load_in_place(&namespace(), &to, Source::Anywhere).unwrap();
        let log = standin.logged();
        assert_eq!(loaded(&outcomes), (16, 0), "{outcomes:?}");
        let (flushed, summed) = (
            first(&log, "call cuFlushGPUDirectRDMAWrites").expect("the card's writes are flushed"),
            first(&log, "call cuMemcpy2DAsync_v2").expect("the block is brought together"),
        );
        assert!(flushed < summed, "{log:?}");
        assert!(log.iter().all(|line| !line.contains("HtoD")), "nothing is copied there: {log:?}");
        engine.assert_bytes(&to, &all);
        let stat = in_place(&at_reader);
        let [layout] = &stat.layouts[..] else { panic!("{stat:?}") };
        assert_eq!((layout.way.as_str(), layout.not_landed.as_str()), ("direct", ""), "{stat:?}");
        let peermem = layout.nics.iter().all(|nic| nic.rung == "peermem");
        assert!(peermem && !layout.nics.is_empty(), "{stat:?}");
        assert_eq!(stat.blocks, 16);
        assert_rank(&at_holder, &all, 2);
        assert_rank(&at_reader, &all, 1);

        // It is a replica like any other: a card reads it where it landed.
        assert!(at_reader.flush(PATIENCE).unwrap());
        standin.log();
        let from_reader = Source::From(node_id(&at_reader));
        assert_eq!(read(&at_third, &all, from_reader), Counts::all_ready(16));
        let log = standin.logged();
        assert!(log.iter().all(|line| !line.contains("cuMemcpy")), "{log:?}");
        assert_rank(&at_reader, &all, 2);
        assert_eq!(engine.imported.withdraw(&numbers(&to)[..8]).unwrap(), 8);
        drop((at_source, at_sink));
        until("both engines are gone", || {
            in_place(&at_holder).layouts.is_empty() && in_place(&at_reader).layouts.is_empty()
        });
        until("its memory is closed", || device_memory(&holder) == 0);
    }
    let stat = in_place(&at_reader);
    assert_eq!((stat.landed, stat.copied), (32, 0));
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
    assert_at_rest("third", &at_third);
}

#[test]
fn a_gpu_that_is_lost_in_mid_load_fails_its_blocks_and_the_node_goes_on() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &WITH_GPU);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let client = reader.client().unwrap();
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let all = blocks("lost");
    save(&at_holder, &all);
    let moved = at(&all, |at| at);
    standin.control("set registrable 1\ncuMemcpy2DAsync_v2 lose 719");
    let outcomes = engine.imported.load_in_place(&namespace(), &moved, Source::Anywhere).unwrap();
    assert_eq!(outcomes, vec![LoadOutcome::Failed; 16]);
    standin.control("set registrable 1");
    assert!(at_reader.stat().unwrap().gpu.unwrap().lost);
    assert_eq!(in_place(&at_reader).blocks, 0, "what failed is not published");
    drop(client);
    until("its layout is closed", || in_place(&at_reader).layouts.is_empty());
    assert_eq!(read(&at_reader, &all, Source::Anywhere), Counts::all_ready(16), "it goes on");
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

/// What a child process is told: the node's door, and the driver.
const DOOR: &str = "KVRAIL_TEST_GPU_LOADING_DOOR";
const LIBRARY: &str = "KVRAIL_TEST_GPU_LOADING_LIBRARY";

fn engine_process(node: &Process, standin: &StandIn) -> TestProcess {
    let door: PathBuf = node.addresses().unwrap().socket.clone().unwrap();
    let library = standin.library();
    let told: [(&str, &OsStr); 2] = [(DOOR, door.as_os_str()), (LIBRARY, library.as_os_str())];
    TestProcess::start("load_in_place_gpu::an_engine_for_ever", &told)
}

/// No test of its own: what the child of the test below runs. What it loads it gives back, and gets from
/// its peer anew where that landed; where that was copied the node has it then.
#[test]
#[expect(clippy::disallowed_methods, reason = "the parent says by variables what a child is to do")]
fn an_engine_for_ever() {
    let (Some(door), Some(library)) = (std::env::var_os(DOOR), std::env::var_os(LIBRARY)) else {
        return;
    };
    TestProcess::begin();
    let client = Client::connect(Path::new(&door)).unwrap();
    let gpu = Gpu::new(library);
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let moved = at(&blocks("killed"), |at| at);
    loop {
        engine.imported.load_in_place(&namespace(), &moved, Source::Anywhere).unwrap();
        engine.imported.withdraw(&numbers(&moved)).unwrap();
    }
}

/// Engines that are killed at whatever they are just about.
const ROUNDS: usize = 4;

#[test]
fn the_gpu_memory_of_an_engine_that_is_killed_in_mid_load_is_closed() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("set registrable 1");
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &WITH_GPU);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    save(&at_holder, &blocks("killed"));
    let before = device_memory(&reader);
    for _round in 0..ROUNDS {
        let loads = |stat: InPlaceStat| stat.landed + stat.copied;
        let so_far = loads(in_place(&at_reader));
        let mut engine = engine_process(&reader, &standin);
        until("it loads", || loads(in_place(&at_reader)) > so_far);
        engine.kill();
        until_closed(&at_reader, &reader, before);
    }
    let InPlaceStat { landed, copied, .. } = in_place(&at_reader);
    assert_eq!((landed > 0, copied > 0), (transport() == "verbs", transport() != "verbs"));
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

/// Engines that come, load, and go.
const VISITS: usize = 50;

#[test]
fn engines_that_load_into_gpu_memory_leave_nothing_behind() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &WITH_GPU);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let before = device_memory(&reader);
    let from = Source::From(node_id(&at_holder));
    let mut left = None;
    let set = Blocks::new("visited", 4, BLOCK);
    save(&at_holder, &set);
    let moved = at(&set, |at| at);
    for visit in 0..VISITS {
        let client = reader.client().unwrap();
        let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
        let outcomes = engine.imported.load_in_place(&namespace(), &moved, from).unwrap();
        assert_eq!(loaded(&outcomes), (set.len(), 0), "visit {visit}: {outcomes:?}");
        drop(client);
        until_closed(&at_reader, &reader, before);
        connect(&format!("visit {visit}"), (&at_holder, &at_reader));
        left.get_or_insert_with(|| Left::of(&reader)).assert_most(&reader);
    }
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

#[test]
fn nothing_lands_any_more_once_a_load_has_failed_for_want_of_a_link() {
    let Some(standin) = StandIn::new() else { return };
    let Ok([_lone, first, second]) = <[String; 3]>::try_from(setting("KVRAIL_RDMA_NICS")) else {
        return;
    };
    standin.control("set registrable 1");
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let on =
        |device: &'static str| [&WITH_GPU[..], &IMPATIENT, &["--rdma-device", device]].concat();
    let holder = cluster.node("holder", address, &on(second.leak())).unwrap();
    let reader = cluster.node("reader", address, &on(first.leak())).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let (gpu, before) = (Gpu::new(standin.library()), device_memory(&reader));
    let [all, other, marks] = ["cut off", "afterwards", "marks"].map(blocks);
    save(&at_holder, &all);
    save(&at_holder, &other);
    save(&at_holder, &blocks("killed"));
    let from = Source::From(node_id(&at_holder));
    let moved = at(&all, |at| at);
    let beside: Vec<MovedBlock> = at(&other, |at| 16 + at)[..8].to_vec();
    let wire = setting("KVRAIL_TEST_NETDEVS");
    for by_link in [true, false] {
        let client = reader.client().unwrap();
        let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
        let load = |moved: &[MovedBlock]| {
            let outcomes = engine.imported.load_in_place(&namespace(), moved, from).unwrap();
            engine.imported.withdraw(&numbers(moved)).unwrap();
            loaded(&outcomes).0
        };
        until("it loads", || load(&moved) == moved.len());
        let so_far = in_place(&at_reader).landed;
        let lost = std::thread::scope(|scope| {
            // As often as it takes until one is cut off, at whatever it is about.
            let loading = scope.spawn(|| while load(&moved) == moved.len() {});
            until("it loads on", || in_place(&at_reader).landed > so_far);
            let lost = Lost::new(&wire, by_link);
            loading.join().unwrap();
            lost
        });
        engine.fill_all(&marks, &moved);
        drop(lost);
        until("it loads again", || load(&beside) == beside.len());
        engine.assert_bytes(&moved, &marks);
        // An engine that dies while nothing crosses the wire has its memory closed without that.
        let mut killed = engine_process(&reader, &standin);
        until("another one loads", || in_place(&at_reader).layouts.len() == 2);
        let lost = Lost::new(&wire, by_link);
        killed.kill();
        drop(client);
        until_closed(&at_reader, &reader, before);
        drop(lost);
    }
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}
