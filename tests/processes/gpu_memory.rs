//! Blocks in GPU memory, which is the stand-in's: they land there, are served from there, and are read
//! by programs that have no part in it.
#![cfg(feature = "gpu")]

use std::process::Command;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::protocol::door::Source;
use kvrail::protocol::door::stat::{PoolStat, StatReport};

use crate::cuda_standin::StandIn;
use crate::support::{
    BINARY, Blocks, Counts, IMPATIENT, assert_at_rest, assert_rank, cluster, node_id, read, save,
    until,
};

/// The number of the GPU's pool.
const GPU_POOL: u16 = 0x8000;

/// What a node with a GPU is told.
fn gpu(standin: &StandIn) -> Vec<String> {
    let driver = standin.library().display().to_string();
    ["--gpu", "0", "--gpu-pool", "4MiB", "--gpu-driver", &driver].map(str::to_owned).to_vec()
}

fn node(cluster: &Cluster, name: &str, registry: &Process, arguments: &[String]) -> Process {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    cluster.node(name, registry.addresses().unwrap().listen, &arguments).unwrap()
}

fn gpu_pool(report: &StatReport) -> &PoolStat {
    report.pools.iter().find(|pool| pool.id == GPU_POOL).unwrap()
}

/// Bytes of a node's GPU pool that blocks take.
fn on_gpu(client: &Client) -> u64 {
    let report = client.stat().unwrap();
    gpu_pool(&report).bytes - gpu_pool(&report).free_bytes
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
}

#[test]
fn blocks_that_find_no_room_on_the_way_land_in_host_memory() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("cuMemcpyHtoDAsync_v2 late 20");
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let narrow = [gpu(&standin), vec!["--gpu-staging".to_owned(), "64KiB".to_owned()]].concat();
    let b = node(&cluster, "B", &registry, &narrow);
    let (at_a, at_b) = (a.client().unwrap(), b.client().unwrap());
    let blocks = Blocks::small("more than staging holds");
    save(&at_a, &blocks);
    assert_eq!(read(&at_b, &blocks, Source::From(node_id(&at_a))), Counts::all_ready(blocks.len()));
    assert_eq!(on_gpu(&at_b), 64 << 10, "as many as fit");
    assert_at_rest("B", &at_b);
    assert_at_rest("A", &at_a);
}

#[test]
fn a_gpu_that_is_lost_takes_its_blocks_along_and_nothing_else() {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &[]);
    let impatient: Vec<String> = IMPATIENT.map(str::to_owned).to_vec();
    let b = node(&cluster, "B", &registry, &[gpu(&standin), impatient].concat());
    let (at_a, at_b) = (a.client().unwrap(), b.client().unwrap());
    let (lost, kept) = (Blocks::small("lost"), Blocks::small("kept"));
    save(&at_a, &lost);
    save(&at_b, &kept);
    standin.control("cuMemcpyHtoDAsync_v2 lose 719");
    let from_a = Source::From(node_id(&at_a));
    let counts = read(&at_b, &lost, from_a);
    assert_eq!(counts.ready, 0, "{counts:?}");
    standin.control("");
    // The node goes on without it: what was in host memory is there, and what arrives lands there.
    assert_eq!(read(&at_b, &kept, Source::Here), Counts::all_ready(kept.len()));
    let mut counts = Counts::default();
    until("blocks land in host memory", || {
        counts = read(&at_b, &lost, from_a);
        counts == Counts::all_ready(lost.len())
    });
    assert_at_rest("A", &at_a);
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
    standin.control("set devices 0");
    let none = with(&[]);
    assert!(none.contains("--gpu 0 cannot be had") && none.contains("no GPU"), "{none}");
    let absent = ["--gpu", "0", "--gpu-pool", "4MiB", "--gpu-driver", "/nowhere/libcuda.so.1"];
    let absent = refused(&absent.map(str::to_owned));
    assert!(absent.contains("cannot load /nowhere/libcuda.so.1"), "{absent}");
    let half = refused(&["--gpu-pool", "1GiB"].map(str::to_owned));
    assert!(half.contains("--gpu"), "{half}");
}
