//! Blocks in GPU memory, which is the stand-in's: they land there, are served from there, and are read
//! by programs that have no part in it.
#![cfg(feature = "gpu")]

use std::process::Command;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::{Acquired, Client};
use kvrail::event::{BusyReason, LendRefusal};
use kvrail::protocol::door::Source;
use kvrail::protocol::door::stat::{GpuWayStat, PoolStat, StatReport};

use crate::cuda_standin::StandIn;
use crate::engine_gpu::within_reach;
use crate::support::{
    BINARY, Blocks, Counts, IMPATIENT, PATIENCE, assert_at_rest, assert_rank, cluster, namespace,
    node_id, ranks, read, save, transport, until,
};

/// The number of the GPU's pool.
const GPU_POOL: u16 = 0x8000;

/// What a node with a GPU is told.
pub(crate) fn gpu(standin: &StandIn) -> Vec<String> {
    let driver = standin.library().display().to_string();
    ["--gpu", "0", "--gpu-pool", "4MiB", "--gpu-driver", &driver].map(str::to_owned).to_vec()
}

pub(crate) fn node(
    cluster: &Cluster,
    name: &str,
    registry: &Process,
    arguments: &[String],
) -> Process {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    cluster.node(name, registry.addresses().unwrap().listen, &arguments).unwrap()
}

fn gpu_pool(report: &StatReport) -> &PoolStat {
    report.pools.iter().find(|pool| pool.id == GPU_POOL).unwrap()
}

/// Bytes of a node's GPU pool that blocks take.
pub(crate) fn on_gpu(client: &Client) -> u64 {
    let report = client.stat().unwrap();
    gpu_pool(&report).bytes - gpu_pool(&report).free_bytes
}

/// Bytes of all of a node's pools that blocks take.
fn taken(client: &Client) -> u64 {
    client.stat().unwrap().pools.iter().map(|pool| pool.bytes - pool.free_bytes).sum()
}

#[test]
fn blocks_land_in_gpu_memory_and_are_served_from_there() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let b = node(&cluster, "B", &registry, &gpu(&standin));
    let c = node(&cluster, "C", &registry, &gpu(&standin));
    let (at_a, at_b, at_c) = (a.client().unwrap(), b.client().unwrap(), c.client().unwrap());
    let blocks = Blocks::small("on the GPU");
    let bytes: u64 = blocks.bytes.iter().map(|block| block.len() as u64).sum();
    save(&at_a, &blocks);
    let all = Counts::all_ready(blocks.len());
    // What the program reads there is a copy of what landed.
    assert_eq!(read(&at_b, &blocks, Source::From(node_id(&at_a))), all);
    assert_eq!(on_gpu(&at_b), bytes, "all of them are in the GPU's memory");
    assert!(at_b.flush(PATIENCE).unwrap(), "the registry knows what is on B");
    assert_eq!(read(&at_c, &blocks, Source::From(node_id(&at_b))), all);
    assert_eq!(on_gpu(&at_c), bytes);
    assert_rank(&at_a, &blocks, 2);
    assert_rank(&at_c, &blocks, 1);
    assert_eq!(read(&at_c, &blocks, Source::Here), all);
    for (name, client) in [("A", &at_a), ("B", &at_b), ("C", &at_c)] {
        assert_at_rest(name, client);
    }
    let told = at_b.stat().unwrap().gpu.unwrap();
    assert_eq!((told.way.as_str(), told.pool), ("staging", GPU_POOL), "{told:?}");
    assert!(told.name.contains("stand-in"), "{told:?}");
    let told = Command::new(BINARY)
        .args(["stat", "--socket"])
        .arg(b.addresses().unwrap().socket.as_ref().unwrap())
        .output()
        .unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains("kvrail stand-in 0") && told.contains("staging"), "{told}");
    if transport() == "verbs" {
        // Each step that was refused, with the call and the error number, as the NIC's driver has it.
        let gpu = at_b.stat().unwrap().gpu.unwrap();
        let rungs: Vec<&str> = gpu.refused.iter().map(|refused| refused.rung.as_str()).collect();
        assert!(rungs.contains(&"dma-buf") && rungs.contains(&"peermem"), "{gpu:?}");
        let peermem = gpu.refused.iter().find(|refused| refused.rung == "peermem").unwrap();
        assert!(peermem.call.starts_with("ibv_reg_mr"), "{gpu:?}");
        assert_eq!(peermem.errno, Some(libc::EFAULT), "{gpu:?}");
        assert!(told.contains("no dma-buf on") && told.contains("(errno 14)"), "{told}");
        // The stand-in's place on the bus is nobody's, so that no NIC is nearer to it than another one.
        let near =
            |nic: &GpuWayStat| nic.near && nic.near_why.contains("sysfs has no 0000:40:00.0");
        assert!(!gpu.nics.is_empty() && gpu.nics.iter().all(near), "{gpu:?}");
        assert!(told.contains("is near: sysfs has no 0000:40:00.0"), "{told}");
    }
}

#[test]
fn what_cards_write_into_gpu_memory_is_flushed_before_it_is_looked_at() {
    let Some(standin) = within_reach() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let b = node(&cluster, "B", &registry, &gpu(&standin));
    let (at_a, at_b) = (a.client().unwrap(), b.client().unwrap());
    assert_eq!(at_b.stat().unwrap().gpu.unwrap().way, "direct");
    let blocks = Blocks::small("straight into the GPU");
    save(&at_a, &blocks);
    standin.log();
    let from_a = Source::From(node_id(&at_a));
    assert_eq!(read(&at_b, &blocks, from_a), Counts::all_ready(blocks.len()));
    let log = standin.logged();
    let first = |line: &str| log.iter().position(|logged| logged == line);
    let flushed = first("call cuFlushGPUDirectRDMAWrites").expect("a flush");
    let looked_at = first("call cuMemcpyDtoHAsync_v2").expect("a look at the bytes");
    assert!(flushed < looked_at, "{log:?}");
    assert_eq!(first("call cuMemcpyHtoDAsync_v2"), None, "nothing goes through staging");
    assert_at_rest("B", &at_b);
}

#[test]
fn blocks_that_find_no_room_on_the_way_land_in_host_memory() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let narrow = [gpu(&standin), vec!["--gpu-staging".to_owned(), "64KiB".to_owned()]].concat();
    let b = node(&cluster, "B", &registry, &narrow);
    let (at_a, at_b) = (a.client().unwrap(), b.client().unwrap());
    let blocks = Blocks::small("more than staging holds");
    save(&at_a, &blocks);
    let from_a = Source::From(node_id(&at_a));
    // No copy ends, and none gives its place to another block, before all blocks have a place.
    standin.control("cuMemcpyHtoDAsync_v2 hold 1");
    let counts = std::thread::scope(|scope| {
        let reader = b.client().unwrap();
        let (reader, blocks) = (reader, &blocks);
        let reading = scope.spawn(move || read(&reader, blocks, from_a));
        until("all blocks have a place", || taken(&at_b) >= 16 * (16 << 10));
        standin.control("");
        reading.join().unwrap()
    });
    assert_eq!(counts, Counts::all_ready(blocks.len()));
    assert_eq!(on_gpu(&at_b), 64 << 10, "as many as fit");
    assert_at_rest("B", &at_b);
    assert_at_rest("A", &at_a);
}

/// What a node was last told by another one: how long to hold back, milliseconds.
fn pause_ms(client: &Client, peer: &Client) -> u32 {
    let (report, peer) = (client.stat().unwrap(), peer.stat().unwrap().node.id);
    report.health.iter().filter(|it| it.peer == peer).map(|it| it.pause_ms).max().unwrap()
}

#[test]
fn blocks_that_find_no_room_on_the_way_out_are_busy_and_their_reader_is_told_to_hold_back() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let narrow = [gpu(&standin), vec!["--gpu-staging".to_owned(), "64KiB".to_owned()]].concat();
    let b = node(&cluster, "B", &registry, &narrow);
    let c = node(&cluster, "C", &registry, &[]);
    let (at_a, at_b, at_c) = (a.client().unwrap(), b.client().unwrap(), c.client().unwrap());
    let blocks = Blocks::new("more than staging holds", 32, 16 << 10);
    save(&at_a, &blocks);
    // As many at a time as there is room for on their way in.
    for (hashes, bytes) in blocks.hashes.chunks(4).zip(blocks.bytes.chunks(4)) {
        let some = Blocks { hashes: hashes.to_vec(), bytes: bytes.to_vec() };
        assert_eq!(read(&at_b, &some, Source::From(node_id(&at_a))), Counts::all_ready(4));
    }
    assert_eq!(on_gpu(&at_b), 32 * (16 << 10));
    assert!(at_b.flush(PATIENCE).unwrap(), "the registry knows what is on B");
    let from_b = Source::From(node_id(&at_b));
    let acquired = at_c.acquire(&namespace(), &blocks.hashes, from_b).unwrap();
    let is_ready = |block: &&Acquired<'_>| matches!(block, Acquired::Ready(_));
    let ready = acquired.iter().filter(is_ready).count();
    assert!(ready < 32, "no more than staging holds, and once again: {acquired:?}");
    let waits = BusyReason::Owner(LendRefusal::Staging);
    let others = acquired.iter().filter(|block| !is_ready(block));
    assert!(others.clone().all(|block| matches!(block, Acquired::Busy(why) if *why == waits)));
    assert!(pause_ms(&at_c, &at_b) > 0, "the reader is told to hold back");
    drop(acquired);
    until("each read brings some more", || {
        let counts = read(&at_c, &blocks, from_b);
        assert_eq!(counts.ready + counts.busy, 32, "{counts:?}");
        counts.busy == 0
    });
    assert_eq!(pause_ms(&at_c, &at_b), 0, "no more than it takes");
    assert_at_rest("B", &at_b);
    assert_at_rest("C", &at_c);
}

#[test]
fn a_gpu_that_is_lost_takes_its_blocks_along_and_nothing_else() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let impatient: Vec<String> = IMPATIENT.map(str::to_owned).to_vec();
    let c = node(&cluster, "C", &registry, &impatient);
    let b = node(&cluster, "B", &registry, &[gpu(&standin), impatient].concat());
    let (at_a, at_b, at_c) = (a.client().unwrap(), b.client().unwrap(), c.client().unwrap());
    let [landed, lost, kept] = ["landed", "lost", "kept"].map(Blocks::small);
    save(&at_a, &landed);
    save(&at_a, &lost);
    save(&at_b, &kept);
    let (from_a, from_b) = (Source::From(node_id(&at_a)), Source::From(node_id(&at_b)));
    assert_eq!(read(&at_b, &landed, from_a), Counts::all_ready(landed.len()));
    assert!(at_b.flush(PATIENCE).unwrap(), "the registry knows what is on B");
    assert!(!at_b.stat().unwrap().gpu.unwrap().lost);
    // In the middle of a transfer, once some of its blocks are in place. What fails is read again, and
    // lands in host memory then.
    standin.control("cuMemcpyHtoDAsync_v2 lose 719 20");
    let counts = read(&at_b, &lost, from_a);
    assert_eq!(counts.ready + counts.failed, lost.len(), "{counts:?}");
    assert!(at_b.stat().unwrap().gpu.unwrap().lost);
    standin.control("");
    until("what was in the GPU's memory is here no more", || ranks(&at_b, &landed).0 == 0);
    let in_flight: u64 = lost.bytes.iter().map(|block| block.len() as u64).sum();
    assert!(on_gpu(&at_b) <= in_flight, "but for what copies in flight may touch, all is free");
    // The registry was told: nobody comes to B for those blocks, and A still has them.
    assert!(at_b.flush(PATIENCE).unwrap());
    let none = Counts { not_found: landed.len(), ..Counts::default() };
    assert_eq!(read(&at_c, &landed, from_b), none);
    assert_eq!(read(&at_c, &landed, Source::Anywhere), Counts::all_ready(landed.len()));
    // The node goes on without it: what was in host memory is there, and what arrives lands there.
    assert_eq!(read(&at_b, &kept, Source::Here), Counts::all_ready(kept.len()));
    assert_eq!(read(&at_c, &kept, from_b), Counts::all_ready(kept.len()));
    let mut counts = Counts::default();
    until("blocks land in host memory", || {
        counts = read(&at_b, &lost, from_a);
        counts == Counts::all_ready(lost.len())
    });
    assert_at_rest("A", &at_a);
}

#[test]
fn a_block_of_a_gpu_that_was_just_lost_counts_as_missing() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let b = node(&cluster, "B", &registry, &gpu(&standin));
    let (at_a, at_b) = (a.client().unwrap(), b.client().unwrap());
    let [held, here, fetched] = ["held", "here", "fetched"].map(Blocks::small);
    for blocks in [&held, &here, &fetched] {
        save(&at_a, blocks);
        let from_a = Source::From(node_id(&at_a));
        let landed = at_b.acquire(&namespace(), &blocks.hashes, from_a).unwrap();
        assert!(landed.iter().all(|block| matches!(block, Acquired::Ready(_))), "{landed:?}");
    }
    assert_eq!(on_gpu(&at_b), 3 * 16 * (16 << 10));
    let kept = at_b.acquire(&namespace(), &held.hashes, Source::Here).unwrap();
    // The loss shows first by a copy for a local reader: nothing of the GPU's is evicted before that.
    standin.control("cuMemcpyDtoHAsync_v2 fail 719");
    let none = Counts { not_found: here.len(), ..Counts::default() };
    assert_eq!(read(&at_b, &here, Source::Here), none);
    assert!(at_b.stat().unwrap().gpu.unwrap().lost);
    assert_eq!(read(&at_b, &fetched, Source::Anywhere), Counts::all_ready(fetched.len()));
    // What a program holds is a copy, which is as good as before; what it let go of is gone.
    let all = Counts::all_ready(held.len());
    assert_eq!(read(&at_b, &held, Source::Here), all);
    drop(kept);
    assert_eq!(read(&at_b, &held, Source::Anywhere), all);
    until("all of them lie in host memory", || on_gpu(&at_b) == 0);
    assert_at_rest("B", &at_b);
}

#[test]
fn a_block_of_a_lost_gpu_is_fetched_by_the_read_that_meets_the_loss() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let b = node(&cluster, "B", &registry, &gpu(&standin));
    let (at_a, at_b) = (a.client().unwrap(), b.client().unwrap());
    let blocks = Blocks::small("on both");
    let all = Counts::all_ready(blocks.len());
    save(&at_a, &blocks);
    assert_eq!(read(&at_b, &blocks, Source::Anywhere), all);
    standin.control("cuMemcpyDtoHAsync_v2 fail 719");
    assert_eq!(read(&at_b, &blocks, Source::Anywhere), all);
    assert!(at_b.stat().unwrap().gpu.unwrap().lost);
    until("all of them lie in host memory", || on_gpu(&at_b) == 0);
}

/// What `kvrail doctor` says where the driver is the library of this directory.
fn doctor(library: &std::path::Path) -> String {
    let output = Command::new(BINARY)
        .arg("doctor")
        .env("LD_LIBRARY_PATH", library.parent().unwrap())
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_doctor_says_what_the_driver_says_and_why_there_is_none() {
    let directory = tempfile::tempdir().unwrap();
    let nothing = directory.path().join("libcuda.so.1");
    std::fs::write(&nothing, "").unwrap();
    let said = doctor(&nothing);
    assert!(said.contains("cannot load libcuda.so.1"), "{said}");
    assert!(said.contains("install the NVIDIA driver"), "{said}");
    let Some(standin) = StandIn::new() else { return };
    standin.control("set devices 0");
    let said = doctor(&standin.library());
    assert!(said.contains("the driver sees no GPU"), "{said}");
    standin.control("set version 11020");
    let said = doctor(&standin.library());
    assert!(said.contains("the driver is for CUDA 11.2"), "{said}");
    standin.control("");
    let said = doctor(&standin.library());
    assert!(said.contains("CUDA 12.8, GPU 0: kvrail stand-in 0"), "{said}");
    if transport() == "verbs" {
        assert!(said.contains("reaches GPU 0 by staging"), "{said}");
        assert!(said.contains("no dma-buf on") && said.contains("no peermem on"), "{said}");
        assert!(said.contains("ibv_reg_mr") && said.contains("(errno 14)"), "{said}");
        standin.control("set registrable 1");
        let said = doctor(&standin.library());
        assert!(said.contains("reaches GPU 0 by peermem; no dma-buf on"), "{said}");
    }
    let Some(old) = StandIn::without(&["cuMemGetInfo_v2"]) else { return };
    let said = doctor(&old.library());
    assert!(said.contains("has no cuMemGetInfo_v2"), "{said}");
}

#[test]
fn a_node_that_must_reach_the_gpu_directly_starts_where_it_does_and_says_what_refused_it_elsewhere()
{
    let Some(standin) = StandIn::new() else { return };
    if transport() != "verbs" {
        return;
    }
    let require = || {
        let more = ["--gpu-direct", "require"].map(str::to_owned).to_vec();
        [gpu(&standin), more].concat()
    };
    let said = refused(&require());
    assert!(said.contains("--gpu-direct require cannot be had"), "{said}");
    assert!(said.contains("ibv_reg_mr") && said.contains("(errno 14)"), "{said}");
    standin.control("set registrable 1");
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let b = node(&cluster, "B", &registry, &require());
    let told = b.client().unwrap().stat().unwrap().gpu.unwrap();
    assert_eq!(told.way, "direct", "{told:?}");
    let nic = told.nics.first().unwrap().nic.clone();
    let named = ["--rdma-device", &nic, "--gpu-nics", &nic].map(str::to_owned).to_vec();
    let c = node(&cluster, "C", &registry, &[require(), named].concat());
    let told = c.client().unwrap().stat().unwrap().gpu.unwrap();
    let only = GpuWayStat { near_why: "--gpu-nics".to_owned(), ..told.nics[0].clone() };
    assert!(only.near && told.nics == [only.clone()], "{told:?}");
}

/// What `kvrail serve` says where it does not start.
fn refused(arguments: &[String]) -> String {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(BINARY)
        .args(["serve", "--pool", "1MiB", "--listen", "127.0.0.1:0", "--socket"])
        .arg(directory.path().join("door"))
        .args(arguments)
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_node_that_cannot_have_the_gpu_says_why() {
    let Some(standin) = StandIn::new() else { return };
    let with = |more: &[&str]| {
        let more = more.iter().map(|one| (*one).to_owned());
        refused(&gpu(&standin).into_iter().chain(more).collect::<Vec<_>>())
    };
    let needed =
        with(&["--gpu-direct", "require", "--transport", "auto", "--rdma-device", "none0"]);
    assert!(needed.contains("--gpu-direct require"), "{needed}");
    assert!(needed.contains("no RDMA device is in use"), "{needed}");
    let contradiction = with(&["--gpu-direct", "require", "--transport", "tcp"]);
    assert!(contradiction.contains("--transport"), "{contradiction}");
    standin.control("set memory_bytes 2097152");
    let full = with(&[]);
    assert!(full.contains("CUDA_ERROR_OUT_OF_MEMORY") && full.contains("--gpu-pool"), "{full}");
    assert!(
        full.contains("of 4.0 MiB (4194304 bytes), where 2.0 MiB of 2.0 MiB are free"),
        "{full}"
    );
    standin.control("set devices 0");
    let none = with(&[]);
    assert!(none.contains("--gpu 0 cannot be had") && none.contains("no GPU"), "{none}");
    let absent = ["--gpu", "0", "--gpu-pool", "4MiB", "--gpu-driver", "/nowhere/libcuda.so.1"];
    let absent = refused(&absent.map(str::to_owned));
    assert!(absent.contains("cannot load /nowhere/libcuda.so.1"), "{absent}");
    let half = refused(&["--gpu-pool", "1GiB"].map(str::to_owned));
    assert!(half.contains("--gpu"), "{half}");
}
