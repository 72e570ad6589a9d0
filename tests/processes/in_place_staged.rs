//! Blocks in an engine's GPU memory that no card reaches: peers read copies of them out of the holder's
//! staging memory. The driver is a stand-in over host memory, `ffi/cuda_standin.c`, whose pointers no NIC
//! can register unless it is told to: no GPU has part in this.

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::protocol::door::Source;

use crate::cuda_standin::StandIn;
use crate::engine_gpu::{By, Engine, Gpu, cluster, device_memory, publish};
use crate::engine_memory::{BLOCK, at, blocks, by_blocks, by_layers};
use crate::in_place::numbers;
use crate::in_place_gpu::{assert_lost, engine_process};
use crate::support::{
    Blocks, Counts, PATIENCE, assert_at_rest, assert_rank, is_lending, namespace, node_id, read,
    save, transport, until,
};

/// Bad address: what a NIC's driver answers for memory that it cannot reach.
const EFAULT: i32 = 14;

/// A node with a GPU, and one that reads from it over the network.
fn pair(cluster: &Cluster, arguments: &[&str]) -> (Process, Process, Process) {
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let gpu = ["--no-shm", "--gpu", "0", "--gpu-pool", "4MiB"];
    let holder = cluster.node("holder", address, &[&gpu, arguments].concat()).unwrap();
    let reader = cluster.node("reader", address, &["--no-shm"]).unwrap();
    (registry, holder, reader)
}

/// Nothing of an engine is left at a node.
pub(crate) fn until_closed(at_node: &Client, node: &Process, before: usize) {
    until("all of it is taken back", || at_node.stat().unwrap().in_place.layouts.is_empty());
    until("its memory is closed", || device_memory(node) == before);
}

#[test]
fn gpu_memory_that_no_card_reaches_is_read_as_copies() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let before = device_memory(&holder);
    let from = Source::From(node_id(&at_holder));
    for (tensors, by, name) in
        [(by_layers(), By::Handle, "by layers"), (by_blocks(), By::Descriptor, "by blocks")]
    {
        let client = holder.client().unwrap();
        let engine = Engine::new(&client, &gpu, (by, &tensors));
        let blocks = blocks(name);
        let moved = publish(&client, &engine, &blocks);
        let stat = client.stat().unwrap().in_place;
        assert_eq!((stat.blocks, stat.layouts.len()), (blocks.len() as u64, 1));
        assert_eq!((stat.layouts[0].way.as_str(), stat.refused.len()), ("staging", 0), "{stat:?}");
        let refused = &stat.layouts[0].refused;
        if transport() == "verbs" {
            let of = |rung: &str| refused.iter().find(|it| it.rung == rung).unwrap();
            let peermem = of("peermem");
            assert!(peermem.call.starts_with("ibv_reg_mr"), "{peermem:?}");
            assert_eq!(peermem.errno, Some(EFAULT));
            let dma_buf = of("dma-buf");
            // The card refuses what the driver exports, or the driver exports nothing.
            let by_card = dma_buf.call.starts_with("ibv_reg_dmabuf_mr") && dma_buf.errno.is_some();
            let by_driver = dma_buf.call.contains("cuMemGetHandleForAddressRange");
            assert!(by_card || by_driver, "{dma_buf:?}");
        }
        standin.log();
        assert_eq!(read(&at_reader, &blocks, from), Counts::all_ready(blocks.len()));
        let copied = |line: &String| line.starts_with("ran cuMemcpy");
        assert!(standin.logged().iter().any(copied), "what is lent is a copy");
        assert_rank(&at_holder, &blocks, 2);
        assert_eq!(read(&at_holder, &blocks, Source::Here), Counts::all_ready(blocks.len()));
        assert_eq!(engine.imported.withdraw(&numbers(&moved)[..8]).unwrap(), 8);
        let left = Counts { not_found: 8, ..Counts::all_ready(8) };
        assert_eq!(read(&at_holder, &blocks, Source::Here), left);
        drop(client);
        until_closed(&at_holder, &holder, before);
    }
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

/// Sets of blocks that are published one after the other where the last one was.
const TURNS: u32 = 8;

#[test]
fn copies_of_gpu_blocks_that_are_taken_back_and_overwritten_are_never_read_wrong() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let engine = Engine::new(&at_holder, &gpu, (By::Handle, &by_layers()));
    let from = Source::From(node_id(&at_holder));
    let sets: Vec<Blocks> = (0..TURNS).map(|turn| blocks(&format!("turn {turn}"))).collect();
    let (began, turn) = std::sync::mpsc::channel::<usize>();
    // What a reader gets is what was published, or nothing: `read` compares the bytes.
    let ready: usize = std::thread::scope(|scope| {
        let (sets, at_reader) = (&sets, &at_reader);
        let reading = scope
            .spawn(move || turn.iter().map(|turn| read(at_reader, &sets[turn], from).ready).sum());
        for (turn, set) in sets.iter().enumerate() {
            let moved = publish(&at_holder, &engine, set);
            began.send(turn).unwrap();
            if turn == 0 {
                // One set is read whole, so that the rest is not about nothing.
                until("somebody reads", || at_reader.stat().unwrap().residents.blocks >= 16);
            }
            assert_eq!(engine.imported.withdraw(&numbers(&moved)).unwrap(), 16);
        }
        drop(began);
        reading.join().unwrap()
    });
    assert!(ready >= 16, "{ready}");
    assert_at_rest("holder", &at_holder);
    assert_at_rest("reader", &at_reader);
}

/// Rounds of an engine that is killed.
const ROUNDS: usize = 3;

#[test]
fn a_killed_engines_gpu_memory_is_closed_once_nobody_reads_copies_of_it() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let before = device_memory(&holder);
    let from = Source::From(node_id(&at_holder));
    for round in 0..ROUNDS {
        let name = format!("round {round}");
        let kept = blocks(&name);
        let mut engine = engine_process(&holder, &standin, &name);
        until("it has published", || at_holder.stat().unwrap().in_place.blocks == 16);
        assert!(at_holder.flush(PATIENCE).unwrap());
        let counts = std::thread::scope(|scope| {
            let reading = scope.spawn(|| read(&at_reader, &kept, from));
            until("it lends, or has lent", || is_lending(&at_holder) || reading.is_finished());
            engine.kill();
            reading.join().unwrap()
        });
        let told = counts.ready + counts.failed + counts.not_found + counts.busy;
        assert_eq!(told, kept.len(), "{counts:?}");
        until_closed(&at_holder, &holder, before);
        let none = Counts { not_found: kept.len(), ..Counts::default() };
        assert_eq!(read(&at_holder, &kept, Source::Here), none);
        assert_at_rest("holder", &at_holder);
        assert_at_rest("reader", &at_reader);
    }
}

#[test]
fn copies_that_do_not_end_make_readers_wait_and_keep_the_memory_until_they_do() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    // A place for one block at a time.
    let (_registry, holder, reader) = pair(&cluster, &["--gpu-staging", "64KiB"]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let before = device_memory(&holder);
    let from = Source::From(node_id(&at_holder));
    let client = holder.client().unwrap();
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let (blocks, host) = (blocks("one at a time"), Blocks::small("in host memory"));
    publish(&client, &engine, &blocks);
    save(&at_holder, &host);
    standin.control("cuMemcpy2DAsync_v2 hold 1");
    let counts = read(&at_reader, &blocks, from);
    assert_eq!(counts, Counts { busy: blocks.len(), ..Counts::default() });
    assert_eq!(read(&at_reader, &host, from), Counts::all_ready(host.len()), "others go on");
    // Whose engine is gone is taken back, but for the one that is being copied.
    drop(client);
    until("all but one is gone", || at_holder.stat().unwrap().residents.blocks == 16 + 1);
    assert!(device_memory(&holder) > before, "a copy reads it");
    standin.control("");
    until_closed(&at_holder, &holder, before);
    assert_eq!(read(&at_reader, &host, from), Counts::all_ready(host.len()));
    assert_at_rest("holder", &at_holder);
}

#[test]
fn a_block_at_a_time_is_read_where_staging_holds_no_more() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &["--gpu-staging", "64KiB"]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let from = Source::From(node_id(&at_holder));
    let client = holder.client().unwrap();
    let engine = Engine::new(&client, &gpu, (By::Descriptor, &by_blocks()));
    let blocks = Blocks::new("one place", 3, BLOCK);
    publish(&client, &engine, &blocks);
    let mut rounds = 0;
    until("all blocks have come", || {
        let counts = read(&at_reader, &blocks, from);
        assert_eq!(counts.ready + counts.busy, blocks.len(), "{counts:?}");
        rounds += 1;
        counts.ready == blocks.len()
    });
    assert!(rounds > 1, "there is room for one block of a lend");
    assert_rank(&at_holder, &blocks, 2);
}

#[test]
fn a_gpu_that_is_lost_in_a_lend_takes_what_is_published_there_along_and_nothing_else() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let from = Source::From(node_id(&at_holder));
    let client = holder.client().unwrap();
    let engine = Engine::new(&client, &gpu, (By::Handle, &by_layers()));
    let (blocks, host) = (blocks("on a lost GPU"), Blocks::small("in host memory"));
    let moved = publish(&client, &engine, &blocks);
    save(&at_holder, &host);
    standin.control("cuMemcpy2DAsync_v2 fail 719");
    let counts = read(&at_reader, &blocks, from);
    assert_eq!(counts.failed + counts.not_found, blocks.len(), "{counts:?}");
    assert!(at_holder.stat().unwrap().gpu.unwrap().lost);
    assert_eq!(read(&at_reader, &host, from), Counts::all_ready(host.len()));
    assert_lost((&at_holder, &at_reader), &engine, (&blocks, &moved));
    // Whatever the driver says now: a process does not get it back.
    standin.control("");
    assert_lost((&at_holder, &at_reader), &engine, (&blocks, &moved));
    drop(client);
    until("its connection is over", || at_holder.stat().unwrap().in_place.layouts.is_empty());
    assert_eq!(read(&at_reader, &host, from), Counts::all_ready(host.len()));
    assert_at_rest("reader", &at_reader);
}

#[test]
fn a_gpu_that_is_lost_in_a_save_takes_what_is_published_there_along_though_nobody_reads_it() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster(&standin);
    let (_registry, holder, reader) = pair(&cluster, &[]);
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let gpu = Gpu::new(standin.library());
    let engine = Engine::new(&at_holder, &gpu, (By::Handle, &by_layers()));
    let blocks = blocks("on a lost GPU");
    let moved = publish(&at_holder, &engine, &blocks);
    standin.control("cuMemcpy2DAsync_v2 fail 719");
    let unsaved = at(&Blocks::new("unsaved", 4, BLOCK), |at| 16 + at);
    engine.imported.save(&namespace(), &unsaved, false).unwrap_err();
    assert_lost((&at_holder, &at_reader), &engine, (&blocks, &moved));
    assert_at_rest("holder", &at_holder);
}
