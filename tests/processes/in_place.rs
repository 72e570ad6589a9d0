//! Blocks that peers read where an engine has them: published, withdrawn, and gone with the engine.

use std::ffi::OsStr;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::{Client, ClientError};
use kvrail::layout::BlockId;
use kvrail::memory::Mapping;
use kvrail::protocol::door::{BlockOrigin, LoadOutcome, MovedBlock, PublishOutcome, Source};
use rustix::process::Signal;

use crate::engine_memory::{
    BLOCKS, BYTES, Engine, at, blocks, by_blocks, by_layers, cache, caches, loaded,
};
use crate::support::{
    Blocks, Counts, IMPATIENT, OVER_SHM, PATIENCE, TestProcess, assert_at_rest,
    assert_at_rest_over, assert_rank, cluster, holder_and_reader, is_lending, namespace, node_id,
    read, save, transport, until, until_stopped,
};

/// Blocks that lie in engines' memory, and layouts that these may lie in.
pub(crate) fn in_place(client: &Client) -> (u64, usize) {
    let stat = client.stat().unwrap().in_place;
    (stat.blocks, stat.layouts.len())
}

pub(crate) fn numbers(moved: &[MovedBlock]) -> Vec<BlockId> {
    moved.iter().map(|moved| moved.block).collect()
}

fn stored(count: usize) -> Vec<PublishOutcome> {
    vec![PublishOutcome::Stored; count]
}

/// Publishes blocks until the registry knows them.
pub(crate) fn publish(engine: &Engine<'_>, client: &Client, moved: &[MovedBlock]) {
    let outcomes = engine.imported.publish(&namespace(), moved, false).unwrap();
    assert_eq!(outcomes, stored(moved.len()));
    assert!(client.flush(PATIENCE).unwrap());
}

pub(crate) fn refusal(result: Result<impl std::fmt::Debug, ClientError>) -> String {
    match result {
        Err(ClientError::Refused { sentence }) => sentence,
        other => panic!("{other:?}"),
    }
}

fn travels(over: &[&str]) {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let (prefill, decode) = (
        cluster.node("prefill", address, over).unwrap(),
        cluster.node("decode", address, over).unwrap(),
    );
    let (at_prefill, at_decode) = (prefill.client().unwrap(), decode.client().unwrap());
    let blocks = blocks("read where they lie");
    let (writer, reader) =
        (Engine::new(&at_prefill, &by_layers()), Engine::new(&at_decode, &by_blocks()));
    let (from, to) = (at(&blocks, |at| BLOCKS - 1 - at), at(&blocks, |at| (at * 5 + 2) % BLOCKS));
    writer.fill_all(&blocks, &from);
    publish(&writer, &at_prefill, &from);
    assert_eq!(in_place(&at_prefill), (blocks.len() as u64, 1));
    let pools = at_prefill.stat().unwrap().pools;
    assert!(pools.iter().all(|pool| pool.free_bytes == pool.bytes), "no copy is kept: {pools:?}");

    let outcomes = reader.imported.load(&namespace(), &to, Source::Anywhere).unwrap();
    assert_eq!(loaded(&outcomes, BlockOrigin::Fetched), blocks.len(), "{outcomes:?}");
    reader.assert_bytes(&to, &blocks);
    assert_rank(&at_prefill, &blocks, 2);
    assert_rank(&at_decode, &blocks, 1);
    let all = Counts::all_ready(blocks.len());
    let by = if over.is_empty() { transport() } else { "shm" };
    assert_at_rest_over(by, "prefill", &at_prefill);

    // A local reader gets copies, and keeps no block from being taken back while it holds them.
    let hashes = &blocks.hashes;
    let held = at_prefill.acquire(&namespace(), hashes, Source::Here).unwrap();
    assert_eq!(at_prefill.stat().unwrap().residents.pinned, 0);
    let outcomes = writer.imported.save(&namespace(), &from, false).unwrap();
    assert!(outcomes.iter().all(|it| matches!(it, PublishOutcome::AlreadyResident(_))));
    assert_eq!(writer.imported.withdraw(&numbers(&from)).unwrap(), 16);
    assert_eq!(writer.imported.withdraw(&numbers(&from)).unwrap(), 0, "that was all");
    assert_eq!(in_place(&at_prefill), (0, 1));
    writer.cache.write(0, &vec![0; crate::engine_memory::CACHE_LEN]).unwrap();
    for (held, want) in held.iter().zip(&blocks.bytes) {
        let kvrail::client::Acquired::Ready(held) = held else { panic!("{held:?}") };
        let mut bytes = vec![0; want.len()];
        held.read_into(&mut bytes).unwrap();
        assert!(bytes == *want);
    }
    drop(held);
    // Nobody has them here any more, and the registry knows.
    assert!(at_prefill.flush(PATIENCE).unwrap() && at_decode.flush(PATIENCE).unwrap());
    let none = Counts { not_found: blocks.len(), ..Counts::default() };
    assert_eq!(read(&at_prefill, &blocks, Source::Here), none);
    assert_eq!(read(&at_prefill, &blocks, Source::Anywhere), all, "from where they were read to");
    assert_at_rest_over(by, "prefill", &at_prefill);
    assert_at_rest_over(by, "decode", &at_decode);
}

#[test]
fn blocks_travel_from_where_they_lie() {
    travels(&[]);
}

#[test]
fn blocks_travel_from_where_they_lie_over_shm() {
    travels(&OVER_SHM);
}

#[test]
fn what_cannot_be_published_is_refused_with_the_reason() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &[]).unwrap();
    let (client, other) = (node.client().unwrap(), node.client().unwrap());
    let engine = Engine::new(&client, &by_layers());
    let (first, second) = (blocks("first"), blocks("second"));
    let moved = at(&first, |at| at);
    engine.fill_all(&first, &moved);
    publish(&engine, &client, &moved[..8]);
    let again = engine.imported.publish(&namespace(), &moved[..8], false).unwrap();
    assert!(again.iter().all(|it| matches!(it, PublishOutcome::AlreadyResident(_))), "{again:?}");
    let under_another =
        refusal(engine.imported.publish(&namespace(), &at(&second, |at| at), false));
    assert!(under_another.contains("block 0 is published in place as"), "{under_another}");
    let into = refusal(engine.imported.load(&namespace(), &moved[7..9], Source::Here));
    assert!(into.contains("block 7 is published in place"), "{into}");
    // What is here already is not published a second time, wherever it lies.
    let elsewhere = at(&first, |at| BLOCKS - 1 - at);
    let outcomes = engine.imported.publish(&namespace(), &elsewhere[..1], false).unwrap();
    assert!(matches!(outcomes[..], [PublishOutcome::AlreadyResident(_)]), "{outcomes:?}");
    assert_eq!(engine.imported.withdraw(&numbers(&elsewhere[..1])).unwrap(), 0);
    let far = BlockId(BLOCKS);
    assert!(refusal(engine.imported.withdraw(&[far])).contains("is not in layout"));
    assert_eq!(in_place(&client), (8, 1));
    // One that is overwritten without having been withdrawn is a failure for whoever reads it.
    engine.fill_all(&second, &at(&second, |at| at)[..1]);
    let counts = read(&other, &first, Source::Here);
    assert_eq!((counts.ready, counts.failed, counts.not_found), (7, 1, 8));
    drop(client);
    until("all of it is taken back", || in_place(&other) == (0, 0));
    until("the cache is let go", || caches(&node) == 0);
    assert_at_rest("node", &other);
}

/// Sets of blocks that are published one after the other where the last one was.
const TURNS: u32 = 12;

#[test]
fn blocks_that_are_taken_back_and_overwritten_while_peers_read_are_never_read_wrong() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let (holder, one, two) = (
        cluster.node("holder", address, &[]).unwrap(),
        cluster.node("one", address, &[]).unwrap(),
        cluster.node("two", address, &[]).unwrap(),
    );
    let (at_holder, at_one, at_two) =
        (holder.client().unwrap(), one.client().unwrap(), two.client().unwrap());
    let writer = Engine::new(&at_holder, &by_layers());
    let from = Source::From(node_id(&at_holder));
    let sets: Vec<Blocks> = (0..TURNS).map(|turn| blocks(&format!("turn {turn}"))).collect();
    let (began, turn) = std::sync::mpsc::channel();
    // What a reader gets is what was published, or nothing: `read` compares the bytes. It reads each set
    // from its publication on, while that is taken back and overwritten.
    let reads = thread::scope(|scope| {
        let (sets, readers) = (&sets, [&at_one, &at_two]);
        let reading = scope.spawn(move || {
            let mut counts = Counts::default();
            while let Ok(turn) = turn.recv() {
                for client in readers {
                    let got = read(client, &sets[turn], from);
                    counts.ready += got.ready;
                    counts.not_found += got.not_found;
                    counts.failed += got.failed;
                    counts.busy += got.busy;
                }
            }
            counts
        });
        for (set, turn) in sets.iter().zip(0..) {
            let moved = at(set, |at| at);
            writer.fill_all(set, &moved);
            publish(&writer, &at_holder, &moved);
            began.send(turn).unwrap();
            if turn == 0 {
                // One set is read whole, so that the rest is not about nothing.
                let all = Counts::all_ready(set.len());
                until("somebody reads", || read(&at_one, set, from) == all);
            }
            assert_eq!(writer.imported.withdraw(&numbers(&moved)).unwrap(), 16);
        }
        drop(began);
        reading.join().unwrap()
    });
    let answered = reads.ready + reads.not_found + reads.failed + reads.busy;
    assert_eq!(answered, 2 * 16 * TURNS as usize, "{reads:?}");
    assert_eq!(in_place(&at_holder), (0, 1));
    for (name, client) in [("holder", &at_holder), ("one", &at_one), ("two", &at_two)] {
        assert_at_rest(name, client);
    }
}

/// A registry, a holder, and a reader that stops with its READs under way, or done and not told.
fn holder_and_hanging_reader(cluster: &Cluster) -> (Process, Process, Process) {
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &[]).unwrap();
    let hanging = [&IMPATIENT[..], &["--fault", "stop:posted"]].concat();
    let reader = cluster.node("reader", address, &hanging).unwrap();
    (registry, holder, reader)
}

#[test]
fn a_reader_that_hangs_is_cut_off_and_the_engine_has_its_blocks_back() {
    let cluster = cluster();
    let (registry, holder, reader) = holder_and_hanging_reader(&cluster);
    let other = cluster.node("other", registry.addresses().unwrap().listen, &[]).unwrap();
    let (at_holder, at_reader, at_other) =
        (holder.client().unwrap(), reader.client().unwrap(), other.client().unwrap());
    let writer = Engine::new(&at_holder, &by_layers());
    let (first, second) = (blocks("first"), blocks("second"));
    let moved = at(&first, |at| at);
    writer.fill_all(&first, &moved);
    publish(&writer, &at_holder, &moved);
    let from = Source::From(node_id(&at_holder));
    let counts = thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_reader, &first, from));
        until_stopped(&reader);
        // The lease would last longer than this test may take; the grace does not.
        assert_eq!(writer.imported.withdraw(&numbers(&moved)).unwrap(), 16);
        let again = at(&second, |at| at);
        writer.fill_all(&second, &again);
        publish(&writer, &at_holder, &again);
        assert_eq!(read(&at_other, &second, from), Counts::all_ready(second.len()));
        reader.signal(Signal::CONT);
        reading.join().unwrap()
    });
    // Bytes that it has got are the first ones, whatever came of them.
    assert_eq!(counts.ready + counts.failed + counts.not_found + counts.busy, first.len());
    until("the reader reads again", || {
        read(&at_reader, &second, from) == Counts::all_ready(second.len())
    });
    for (name, client) in [("holder", &at_holder), ("reader", &at_reader), ("other", &at_other)] {
        assert_at_rest(name, client);
    }
}

/// What a child process does for ever, as an engine of the node at `door`.
const DOOR: &str = "KVRAIL_TEST_IN_PLACE_DOOR";
/// The name of the blocks that it keeps published.
const NAME: &str = "KVRAIL_TEST_IN_PLACE_NAME";
/// The memory file of its cache, where that is its parent's.
const CACHE: &str = "KVRAIL_TEST_IN_PLACE_CACHE";

fn engine_process(node: &Process, name: &str, cache: Option<&Mapping>) -> TestProcess {
    let door: PathBuf = node.addresses().unwrap().socket.clone().unwrap();
    let mut told = vec![(DOOR, door.as_os_str()), (NAME, OsStr::new(name))];
    let file = cache.map(|cache| cache.file().unwrap().as_raw_fd());
    let path = file.map(|file| format!("/proc/{}/fd/{file}", std::process::id()));
    told.extend(path.iter().map(|path| (CACHE, OsStr::new(path))));
    TestProcess::start("in_place::an_engine_for_ever", &told)
}

/// No test of its own: what the children of the tests below run.
#[test]
#[expect(clippy::disallowed_methods, reason = "the parent says by variables what a child is to do")]
fn an_engine_for_ever() {
    let (Some(door), Ok(name)) = (std::env::var_os(DOOR), std::env::var(NAME)) else { return };
    TestProcess::begin();
    let client = Client::connect(Path::new(&door)).unwrap();
    let cache = std::env::var_os(CACHE).map_or_else(cache, |path| {
        let file = fs::File::options().read(true).write(true).open(path).unwrap();
        Mapping::keeping(file, BYTES).unwrap()
    });
    let engine = Engine::with_cache(&client, cache, &by_layers());
    let kept = blocks(&name);
    let keeps = at(&kept, |at| at);
    engine.fill_all(&kept, &keeps);
    // Others come and go beside them, so that a kill meets a publication or a withdrawal.
    for turn in 0_u64.. {
        engine.imported.publish(&namespace(), &keeps, false).unwrap();
        let passing =
            Blocks::new(&format!("{name}, passing {turn}"), 8, crate::engine_memory::BLOCK);
        let passes = at(&passing, |at| 16 + at);
        engine.fill_all(&passing, &passes);
        engine.imported.publish(&namespace(), &passes, false).unwrap();
        engine.imported.withdraw(&numbers(&passes)).unwrap();
    }
}

/// Files that a process has open.
fn files(process: &Process) -> usize {
    fs::read_dir(format!("/proc/{}/fd", process.id())).unwrap().count()
}

/// Memory that drivers of a process hold fast, kilobytes: what it has registered with a NIC.
fn pinned(process: &Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// What an engine leaves behind where it does: files, and pinned memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left {
    files: usize,
    pinned: u64,
}

impl Left {
    pub(crate) fn of(process: &Process) -> Self {
        Self { files: files(process), pinned: pinned(process) }
    }

    /// Waits until a process has no more than this.
    pub(crate) fn assert_most(self, process: &Process) {
        until("files are closed", || files(process) <= self.files);
        until("registrations are ended", || pinned(process) <= self.pinned);
    }
}

/// Makes sure that a peer has its connection, whatever came of the last one: what that takes is no leak.
pub(crate) fn connect(name: &str, (at_holder, at_reader): (&Client, &Client)) {
    let beside = Blocks::new(&format!("beside {name}"), 1, 4096);
    save(at_holder, &beside);
    let from = Source::From(node_id(at_holder));
    until("they are connected", || read(at_reader, &beside, from) == Counts::all_ready(1));
}

/// Rounds of an engine that is killed.
const ROUNDS: usize = 3;

#[test]
fn nothing_stays_of_an_engine_that_is_killed_while_peers_read_its_memory() {
    let cluster = cluster();
    let (_registry, holder, reader) = holder_and_reader(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let peer = Engine::new(&at_reader, &by_blocks());
    let from = Source::From(node_id(&at_holder));
    let mut first = None;
    for round in 0..ROUNDS {
        let name = format!("round {round}");
        let kept = blocks(&name);
        let mut engine = engine_process(&holder, &name, None);
        until("it has published", || in_place(&at_holder).0 >= 16);
        assert!(at_holder.flush(PATIENCE).unwrap());
        let moved = at(&kept, |at| at);
        let outcomes = thread::scope(|scope| {
            let reading = scope.spawn(|| peer.imported.load(&namespace(), &moved, from).unwrap());
            until("it lends, or has lent", || is_lending(&at_holder) || reading.is_finished());
            engine.kill();
            reading.join().unwrap()
        });
        for (moved, (outcome, want)) in moved.iter().zip(outcomes.iter().zip(&kept.bytes)) {
            if matches!(outcome, LoadOutcome::Loaded { .. }) {
                assert!(peer.bytes(moved.block) == *want, "{moved:?}");
            }
        }
        until("all of it is taken back", || in_place(&at_holder) == (0, 0));
        until("the cache is let go", || caches(&holder) == 0);
        assert!(at_holder.flush(PATIENCE).unwrap());
        let none = Counts { not_found: kept.len(), ..Counts::default() };
        assert_eq!(read(&at_holder, &kept, Source::Here), none);
        assert_at_rest("holder", &at_holder);
        assert_at_rest("reader", &at_reader);
        connect(&name, (&at_holder, &at_reader));
        first.get_or_insert_with(|| Left::of(&holder)).assert_most(&holder);
    }
}

#[test]
fn a_hanging_reader_keeps_no_memory_of_a_killed_engine() {
    let cluster = cluster();
    let (_registry, holder, reader) = holder_and_hanging_reader(&cluster);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let kept = blocks("kept");
    let mut engine = engine_process(&holder, "kept", None);
    until("it has published", || in_place(&at_holder).0 >= 16);
    assert!(at_holder.flush(PATIENCE).unwrap());
    let from = Source::From(node_id(&at_holder));
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_reader, &kept, from));
        until_stopped(&reader);
        engine.kill();
        until("all of it is taken back", || in_place(&at_holder) == (0, 0));
        until("the cache is let go", || caches(&holder) == 0);
        reader.signal(Signal::CONT);
        reading.join().unwrap();
    });
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

#[test]
fn an_engine_that_comes_back_with_its_memory_waits_for_its_last_readers() {
    let cluster = cluster();
    let (registry, holder, reader) = holder_and_hanging_reader(&cluster);
    let other = cluster.node("other", registry.addresses().unwrap().listen, &[]).unwrap();
    let (at_holder, at_reader, at_other) =
        (holder.client().unwrap(), reader.client().unwrap(), other.client().unwrap());
    let (cache, kept, next) = (cache(), blocks("kept"), blocks("after it came back"));
    let mut engine = engine_process(&holder, "kept", Some(&cache));
    until("it has published", || in_place(&at_holder).0 >= 16);
    assert!(at_holder.flush(PATIENCE).unwrap());
    let from = Source::From(node_id(&at_holder));
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_reader, &kept, from));
        until_stopped(&reader);
        // As long as it is there its memory is nobody else's.
        let taken =
            holder.client().unwrap().import_memfd(cache.file().unwrap(), BYTES).unwrap_err();
        assert!(taken.to_string().contains("import each allocation once"), "{taken}");
        engine.kill();
        let client = holder.client().unwrap();
        let again = Engine::with_cache(&client, cache, &by_layers());
        assert_eq!(in_place(&at_holder), (0, 0), "all that it published before is taken back");
        let moved = at(&next, |at| at);
        again.fill_all(&next, &moved);
        publish(&again, &client, &moved);
        assert_eq!(read(&at_other, &next, from), Counts::all_ready(next.len()));
        reader.signal(Signal::CONT);
        reading.join().unwrap();
    });
    until("the last one is taken back, too", || in_place(&at_holder) == (0, 0));
    for (name, client) in [("holder", &at_holder), ("reader", &at_reader), ("other", &at_other)] {
        assert_at_rest(name, client);
    }
}

/// Engines that come, publish, are read from, and go.
const VISITS: usize = 50;

#[test]
fn engines_that_come_and_go_leave_nothing_behind() {
    let cluster = cluster();
    let (_registry, holder, reader) = holder_and_reader(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let from = Source::From(node_id(&at_holder));
    let mut first = None;
    for visit in 0..VISITS {
        let client = holder.client().unwrap();
        let engine = Engine::new(&client, &by_layers());
        let set = Blocks::new(&format!("visit {visit}"), 4, crate::engine_memory::BLOCK);
        let moved = at(&set, |at| at);
        engine.fill_all(&set, &moved);
        publish(&engine, &client, &moved);
        assert_eq!(read(&at_reader, &set, from), Counts::all_ready(set.len()), "visit {visit}");
        drop(client);
        until("it is gone", || in_place(&at_holder) == (0, 0) && caches(&holder) == 0);
        connect(&format!("visit {visit}"), (&at_holder, &at_reader));
        first.get_or_insert_with(|| Left::of(&holder)).assert_most(&holder);
    }
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}
