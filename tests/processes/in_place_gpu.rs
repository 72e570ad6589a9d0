//! Blocks that peers read out of the GPU memory where an engine has them. The driver is a stand-in over
//! host memory, `ffi/cuda_standin.c`, whose pointers a NIC can be let register: no GPU has part in this.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use kvrail::cli::cluster::Process;
use kvrail::client::{Client, ClientError};
use kvrail::cuda::{Event, Stream};
use kvrail::protocol::door::{EngineEvent, MovedBlock, PublishOutcome, Source};

use crate::cuda_standin::StandIn;
use crate::engine_gpu::{By, Engine, Gpu, cluster, device_memory, first, publish, within_reach};
use crate::engine_memory::{BLOCK, at, blocks, by_layers};
use crate::support::{
    Blocks, Counts, PATIENCE, TestProcess, assert_at_rest, assert_rank, holder_and_reader,
    is_lending, namespace, node_id, read, save, transport, until,
};

/// Nodes whose peers on the same host come over the network: GPU memory cannot be mapped.
const APART: [&str; 1] = ["--no-shm"];

#[test]
fn gpu_memory_that_no_card_reaches_is_not_published_and_the_sentence_says_why() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &APART).unwrap();
    let client = node.client().unwrap();
    let gpu = Gpu::new(standin.library());
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let blocks = blocks("out of reach");
    let moved = at(&blocks, |at| at);
    engine.fill_all(&blocks, &moved);
    let said = match engine.imported.publish(&namespace(), &moved, false) {
        Err(ClientError::Refused { sentence }) => sentence,
        other => panic!("{other:?}"),
    };
    assert!(said.contains("save its blocks instead"), "{said}");
    let stat = client.stat().unwrap().in_place;
    if transport() == "verbs" {
        assert!(said.contains("ibv_reg_mr") && said.contains("(errno 14)"), "{said}");
        let refused: Vec<&str> = stat.refused.iter().map(|one| one.rung.as_str()).collect();
        assert!(refused.contains(&"dma-buf") && refused.contains(&"peermem"), "{stat:?}");
    } else {
        assert!(said.contains("no RDMA device is in use"), "{said}");
    }
    assert_eq!((stat.blocks, stat.layouts.len()), (0, 0));
    let saved = engine.imported.save(&namespace(), &moved, false).unwrap();
    assert_eq!(saved, vec![PublishOutcome::Stored; blocks.len()]);
    assert_at_rest("node", &client);
}

#[test]
fn peers_read_gpu_memory_where_it_lies_behind_the_engines_event() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = holder_and_reader(&cluster, &APART);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    for (by, name) in [(By::Handle, "by handle"), (By::Descriptor, "by descriptor")] {
        let client = holder.client().unwrap();
        let engine = Engine::new(&client, &gpu, (by, &by_layers()));
        let blocks = blocks(name);
        let moved = at(&blocks, |at| at);
        engine.fill_all(&blocks, &moved);
        let bound = gpu.context.bind().unwrap();
        let event = Event::for_other_processes(&bound).unwrap();
        standin.log();
        event.record(&bound, &Stream::new(&bound).unwrap()).unwrap();
        let handle = EngineEvent(event.ipc_handle(&bound).unwrap().0);
        let published = engine.imported.publish_after(Some(handle), &namespace(), &moved, false);
        assert_eq!(published.unwrap(), vec![PublishOutcome::Stored; blocks.len()]);
        let log = standin.logged();
        let waited = first(&log, "ran cuStreamWaitEvent").expect("the node waits for the event");
        let copied = first(&log, "ran cuMemcpy2DAsync_v2").expect("it sums the blocks up");
        assert!(waited < copied, "{log:?}");
        assert!(client.flush(PATIENCE).unwrap());
        let stat = client.stat().unwrap().in_place;
        assert_eq!((stat.blocks, stat.layouts.len()), (blocks.len() as u64, 1));
        let rungs: Vec<&str> =
            stat.layouts.iter().flat_map(|it| &it.nics).map(|nic| nic.rung.as_str()).collect();
        let direct = !rungs.is_empty() && rungs.iter().all(|rung| *rung == "peermem");
        assert!(direct, "{stat:?}");
        standin.log();
        let from = Source::From(node_id(&at_holder));
        assert_eq!(read(&at_reader, &blocks, from), Counts::all_ready(blocks.len()));
        let log = standin.logged();
        assert!(log.iter().all(|line| !line.contains("cuMemcpy")), "the card reads it: {log:?}");
        assert_rank(&at_holder, &blocks, 2);
        // A local reader has no card: it gets copies.
        assert_eq!(read(&at_holder, &blocks, Source::Here), Counts::all_ready(blocks.len()));
        let numbers: Vec<_> = moved.iter().map(|moved| moved.block).collect();
        assert_eq!(engine.imported.withdraw(&numbers[..8]).unwrap(), 8);
        drop(client);
        until("the rest is taken back", || {
            let stat = at_holder.stat().unwrap().in_place;
            (stat.blocks, stat.layouts.len()) == (0, 0)
        });
        until("its memory is closed", || device_memory(&holder) == 0);
    }
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

/// What an engine published on a GPU that is lost is taken back by the node itself, and the engine is
/// told so when it asks for something there.
pub(crate) fn assert_lost(
    (at_holder, at_reader): (&Client, &Client),
    engine: &Engine<'_>,
    (blocks, moved): (&Blocks, &[MovedBlock]),
) {
    until("it is taken back", || at_holder.stat().unwrap().in_place.blocks == 0);
    let stat = at_holder.stat().unwrap().in_place;
    assert_eq!((stat.bytes, stat.layouts.len()), (0, 1));
    assert!(stat.layouts[0].lost, "{stat:?}");
    let none = Counts { not_found: blocks.len(), ..Counts::default() };
    assert_eq!(read(at_holder, blocks, Source::Here), none);
    assert!(at_holder.flush(PATIENCE).unwrap());
    assert_eq!(read(at_reader, blocks, Source::Anywhere), none, "the registry knows");
    let listed = at_holder.list(Some(&namespace()), None, 1000).unwrap().entries;
    assert!(!listed.iter().any(|entry| blocks.hashes.contains(&entry.hash)), "{listed:?}");
    let numbers: Vec<_> = moved.iter().map(|moved| moved.block).collect();
    assert_eq!(
        engine.imported.withdraw(&numbers).unwrap(),
        0,
        "there is nothing left to take back"
    );
    match engine.imported.publish(&namespace(), moved, false) {
        Err(ClientError::Refused { sentence }) => {
            assert!(sentence.contains("is lost to the node"), "{sentence}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_gpu_that_only_engines_use_takes_what_is_published_there_along_when_it_is_lost() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = holder_and_reader(&cluster, &APART);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let engine = Engine::new(&at_holder, &gpu, (By::Handle, &by_layers()));
    let (published, host) = (blocks("on a lost GPU"), Blocks::small("in host memory"));
    let moved = publish(&at_holder, &engine, &published);
    save(&at_holder, &host);
    standin.control("set registrable 1\ncuMemcpy2DAsync_v2 fail 719");
    let unsaved = at(&Blocks::new("unsaved", 4, BLOCK), |at| 16 + at);
    engine.imported.save(&namespace(), &unsaved, false).unwrap_err();
    assert_lost((&at_holder, &at_reader), &engine, (&published, &moved));
    let from = Source::From(node_id(&at_holder));
    assert_eq!(
        read(&at_reader, &host, from),
        Counts::all_ready(host.len()),
        "host memory serves on"
    );
    assert_at_rest("holder", &at_holder);
}

/// What a child process is told: the node's door, and the driver.
const DOOR: &str = "KVRAIL_TEST_GPU_IN_PLACE_DOOR";
const LIBRARY: &str = "KVRAIL_TEST_GPU_IN_PLACE_LIBRARY";
/// The name of the blocks that it keeps published.
const NAME: &str = "KVRAIL_TEST_GPU_IN_PLACE_NAME";

/// An engine of this node, in a process of its own, that keeps blocks of this name published.
pub(crate) fn engine_process(node: &Process, standin: &StandIn, name: &str) -> TestProcess {
    let door: PathBuf = node.addresses().unwrap().socket.clone().unwrap();
    let library = standin.library();
    let told: [(&str, &OsStr); 3] =
        [(DOOR, door.as_os_str()), (LIBRARY, library.as_os_str()), (NAME, OsStr::new(name))];
    TestProcess::start("in_place_gpu::an_engine_for_ever", &told)
}

/// No test of its own: what the children of tests run.
#[test]
#[expect(clippy::disallowed_methods, reason = "the parent says by variables what a child is to do")]
fn an_engine_for_ever() {
    let variables = [DOOR, LIBRARY].map(std::env::var_os);
    let ([Some(door), Some(library)], Ok(name)) = (variables, std::env::var(NAME)) else { return };
    TestProcess::begin();
    let client = Client::connect(Path::new(&door)).unwrap();
    let gpu = Gpu::new(library);
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let kept = blocks(&name);
    let moved = at(&kept, |at| at);
    engine.fill_all(&kept, &moved);
    loop {
        engine.imported.publish(&namespace(), &moved, false).unwrap();
    }
}

#[test]
fn a_killed_engines_gpu_memory_is_closed_once_no_card_reads_it() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster(&standin);
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let (holder, reader) = (
        cluster.node("holder", address, &APART).unwrap(),
        cluster.node("reader", address, &APART).unwrap(),
    );
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let kept = blocks("kept");
    let from = Source::From(node_id(&at_holder));
    let mut engine = engine_process(&holder, &standin, "kept");
    until("it has published", || at_holder.stat().unwrap().in_place.blocks == 16);
    assert!(at_holder.flush(PATIENCE).unwrap());
    let counts = std::thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_reader, &kept, from));
        until("it lends, or has lent", || is_lending(&at_holder) || reading.is_finished());
        engine.kill();
        reading.join().unwrap()
    });
    assert_eq!(counts.ready + counts.failed + counts.not_found, kept.len(), "{counts:?}");
    until("all of it is taken back", || at_holder.stat().unwrap().in_place.layouts.is_empty());
    until("its memory is closed", || device_memory(&holder) == 0);
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}
