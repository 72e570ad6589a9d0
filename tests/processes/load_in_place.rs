//! Blocks that peers hold, read straight into an engine's layout, and published there.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::thread;

use kvrail::cli::cluster::Process;
use kvrail::client::{Client, ClientError};
use kvrail::layout::BlockId;
use kvrail::protocol::door::{BlockOrigin, LoadOutcome, MovedBlock, Source};
use rustix::process::Signal;

use crate::engine_memory::{BLOCKS, Engine, at, blocks, by_blocks, by_layers, caches};
use crate::in_place::{numbers, publish, refusal};
use crate::support::{
    Blocks, Counts, IMPATIENT, OVER_SHM, PATIENCE, TestProcess, assert_at_rest,
    assert_at_rest_over, assert_rank, cluster, holder_and_reader, namespace, node_id, read, save,
    stop, transport, until,
};

/// How many blocks landed in place, and how many were copied.
pub(crate) fn loaded(outcomes: &[LoadOutcome]) -> (usize, usize) {
    let count = |wanted| {
        let is = |it: &&LoadOutcome| matches!(it, LoadOutcome::Loaded { in_place, .. } if *in_place == wanted);
        outcomes.iter().filter(is).count()
    };
    (count(true), count(false))
}

/// Blocks in engines' memory, and whether a node's pools are empty.
fn held(client: &Client) -> (u64, bool) {
    let stat = client.stat().unwrap();
    let empty = stat.pools.iter().all(|pool| pool.free_bytes == pool.bytes);
    (stat.in_place.blocks, empty)
}

fn travels(over: &[&str]) {
    let cluster = cluster();
    let (registry, source, reader) = holder_and_reader(&cluster, over);
    let third = cluster.node("third", registry.addresses().unwrap().listen, over).unwrap();
    let (at_source, at_reader, at_third) =
        (source.client().unwrap(), reader.client().unwrap(), third.client().unwrap());
    // One half lies in a pool of the source, the other half in an engine's memory there.
    let all = blocks("straight into a layout");
    let (pooled, lying) = (all.part(0..8), all.part(8..16));
    let writer = Engine::new(&at_source, &by_layers());
    save(&at_source, &pooled);
    let from = at(&lying, |at| BLOCKS - 1 - at);
    writer.fill_all(&lying, &from);
    publish(&writer, &at_source, &from);

    let engine = Engine::new(&at_reader, &by_blocks());
    let to = at(&all, |at| (at * 5 + 2) % BLOCKS);
    let outcomes = engine.imported.load_in_place(&namespace(), &to, Source::Anywhere).unwrap();
    assert_eq!(loaded(&outcomes), (16, 0), "{outcomes:?}");
    engine.assert_bytes(&to, &all);
    assert_eq!(held(&at_reader), (16, true), "no pool has a copy");
    // One step at the source; the copy has the rank that the source had before it.
    assert_rank(&at_source, &all, 2);
    assert_rank(&at_reader, &all, 1);

    // It is a replica like any other: peers read it where it landed.
    assert!(at_reader.flush(PATIENCE).unwrap());
    let from_reader = Source::From(node_id(&at_reader));
    assert_eq!(read(&at_third, &all, from_reader), Counts::all_ready(16));
    assert_rank(&at_reader, &all, 2);
    let into = refusal(engine.imported.load_in_place(&namespace(), &to[3..4], Source::Anywhere));
    assert!(into.contains("is published in place"), "{into}");

    // Taken back, the places can be used again; what is on the node by then is copied.
    assert_eq!(engine.imported.withdraw(&numbers(&to)).unwrap(), 16);
    assert_eq!(held(&at_reader), (0, true));
    assert_eq!(read(&at_reader, &pooled, Source::Anywhere), Counts::all_ready(8));
    let outcomes = engine.imported.load_in_place(&namespace(), &to, Source::Anywhere).unwrap();
    assert_eq!(loaded(&outcomes), (8, 8), "{outcomes:?}");
    engine.assert_bytes(&to, &all);
    assert_eq!(engine.imported.withdraw(&numbers(&to)).unwrap(), 8);
    let by = if over.is_empty() { transport() } else { "shm" };
    assert_at_rest_over(by, "source", &at_source);
    assert_at_rest_over(by, "reader", &at_reader);
    assert_at_rest_over(by, "third", &at_third);
}

#[test]
fn what_peers_hold_lands_in_a_layout() {
    travels(&[]);
}

#[test]
fn what_peers_hold_lands_in_a_layout_over_shm() {
    travels(&OVER_SHM);
}

#[test]
fn each_block_of_a_load_has_its_own_end() {
    let cluster = cluster();
    let (_registry, holder, reader) = holder_and_reader(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let writer = Engine::new(&at_holder, &by_layers());
    let (good, wrong, unknown, short) =
        (blocks("good"), blocks("wrong"), blocks("unknown"), Blocks::new("short", 16, 4096));
    let [lies, breaks] = [(&good, 0), (&wrong, 8)].map(|(set, first)| {
        let moved = at(set, |at| first + at)[..8].to_vec();
        writer.fill_all(set, &moved);
        publish(&writer, &at_holder, &moved);
        moved
    });
    save(&at_holder, &short);
    assert!(at_holder.flush(PATIENCE).unwrap());
    // An engine that overwrites what it has published makes it a failure for all readers.
    writer.fill_all(&good, &breaks);

    let engine = Engine::new(&at_reader, &by_blocks());
    let named = [(&lies[0], 0), (&breaks[0], 1), (&lies[1], 2)];
    let mut moved: Vec<MovedBlock> =
        named.map(|(it, block)| MovedBlock { block: BlockId(block), ..*it }).to_vec();
    moved.push(MovedBlock { hash: unknown.hashes[0], block: BlockId(3) });
    moved.push(MovedBlock { hash: short.hashes[0], block: BlockId(4) });
    let from = Source::From(node_id(&at_holder));
    let outcomes = engine.imported.load_in_place(&namespace(), &moved, from).unwrap();
    let landed = |outcome: &LoadOutcome| {
        matches!(outcome, LoadOutcome::Loaded { in_place: true, origin: BlockOrigin::Fetched, .. })
    };
    assert!(landed(&outcomes[0]) && landed(&outcomes[2]), "{outcomes:?}");
    let ends = [LoadOutcome::Failed, LoadOutcome::NotFound, LoadOutcome::Failed];
    assert_eq!([outcomes[1], outcomes[3], outcomes[4]], ends, "{outcomes:?}");
    assert!(engine.bytes(BlockId(0)) == good.bytes[0] && engine.bytes(BlockId(2)) == good.bytes[1]);
    assert_eq!(held(&at_reader), (2, true), "what failed is not published");
    // Its place is free for another one.
    let again = [MovedBlock { block: BlockId(1), ..lies[2] }];
    let outcomes = engine.imported.load_in_place(&namespace(), &again, from).unwrap();
    assert_eq!(loaded(&outcomes), (1, 0), "{outcomes:?}");
    assert_eq!(engine.imported.withdraw(&numbers(&moved)).unwrap(), 3);
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

#[test]
fn a_place_that_a_load_may_land_in_is_nobody_elses() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &[]).unwrap();
    let reader = cluster.node("reader", address, &IMPATIENT).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let all = blocks("nobody else's");
    save(&at_holder, &all);
    let engine = Engine::new(&at_reader, &by_blocks());
    let moved = at(&all, |at| at);
    let from = Source::From(node_id(&at_holder));
    let outcomes = thread::scope(|scope| {
        stop(&holder);
        let loading = scope.spawn(|| engine.imported.load_in_place(&namespace(), &moved, from));
        // It ends when the holder is given up, so this may come before or behind it.
        until("the places are taken, or it is over", || {
            let own = engine.imported.load_in_place(&namespace(), &moved[..1], Source::Here);
            let taken = matches!(&own, Err(ClientError::Refused { sentence }) if sentence.contains("block 0 is being loaded already"));
            if taken {
                let publish = engine.imported.publish(&namespace(), &moved[..1], false);
                let refused = matches!(&publish, Err(ClientError::Refused { sentence }) if sentence.contains("block 0 is being loaded"));
                assert!(refused || loading.is_finished(), "{publish:?}");
            }
            taken || loading.is_finished()
        });
        holder.signal(Signal::CONT);
        loading.join().unwrap().unwrap()
    });
    let landed = loaded(&outcomes).0;
    let failed = outcomes.iter().filter(|outcome| **outcome == LoadOutcome::Failed).count();
    assert_eq!(landed + failed, 16, "{outcomes:?}");
    engine.imported.withdraw(&numbers(&moved)).unwrap();
    until("it reads again", || {
        let outcomes = engine.imported.load_in_place(&namespace(), &moved, from).unwrap();
        let landed = loaded(&outcomes).0;
        engine.imported.withdraw(&numbers(&moved)).unwrap();
        landed == 16
    });
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

/// What a child process does for ever, as an engine of the node at `door`: it loads the blocks of this
/// name and gives them back.
const DOOR: &str = "KVRAIL_TEST_LOADING_DOOR";
const NAME: &str = "KVRAIL_TEST_LOADING_NAME";

fn engine_process(node: &Process, name: &str) -> TestProcess {
    let door: PathBuf = node.addresses().unwrap().socket.clone().unwrap();
    let told = [(DOOR, door.as_os_str()), (NAME, OsStr::new(name))];
    TestProcess::start("load_in_place::an_engine_for_ever", &told)
}

/// No test of its own: what the children of the tests below run.
#[test]
#[expect(clippy::disallowed_methods, reason = "the parent says by variables what a child is to do")]
fn an_engine_for_ever() {
    let (Some(door), Ok(name)) = (std::env::var_os(DOOR), std::env::var(NAME)) else { return };
    TestProcess::begin();
    let client = Client::connect(Path::new(&door)).unwrap();
    let engine = Engine::new(&client, &by_layers());
    let moved = at(&blocks(&name), |at| at);
    loop {
        engine.imported.load_in_place(&namespace(), &moved, Source::Anywhere).unwrap();
        engine.imported.withdraw(&numbers(&moved)).unwrap();
    }
}

/// Engines that are killed at whatever they are just about.
const ROUNDS: usize = 4;

#[test]
fn nothing_stays_of_an_engine_that_is_killed_in_mid_load() {
    let cluster = cluster();
    let (_registry, holder, reader) = holder_and_reader(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let all = blocks("killed");
    save(&at_holder, &all);
    for _round in 0..ROUNDS {
        let mut engine = engine_process(&reader, "killed");
        until("blocks land", || held(&at_reader).0 > 0);
        engine.kill();
        until("all of it is taken back", || held(&at_reader) == (0, true));
        until("the cache is let go", || caches(&reader) == 0);
        assert_eq!(
            read(&at_reader, &all, Source::Here),
            Counts { not_found: 16, ..Counts::default() }
        );
    }
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

#[test]
fn memory_that_reads_may_land_in_stays_after_its_engine_until_they_have_ended() {
    let cluster = cluster();
    let (_registry, holder, reader) = holder_and_reader(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let all = blocks("outlived");
    save(&at_holder, &all);
    let mut engine = engine_process(&reader, "outlived");
    until("it loads", || held(&at_reader).0 > 0);
    stop(&holder);
    engine.kill();
    holder.signal(Signal::CONT);
    until("all of it is taken back", || held(&at_reader) == (0, true));
    until("the cache is let go", || caches(&reader) == 0);
    // Both go on.
    let next = Engine::new(&at_reader, &by_blocks());
    let moved = at(&all, |at| at);
    until("it reads again", || {
        let outcomes = next.imported.load_in_place(&namespace(), &moved, Source::Anywhere).unwrap();
        let landed = loaded(&outcomes).0;
        next.imported.withdraw(&numbers(&moved)).unwrap();
        landed == 16
    });
    next.assert_bytes(&moved, &all);
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}
