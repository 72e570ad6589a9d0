//! GPU memory, which is the stand-in's, of nodes that share a host and talk over shared memory: blocks go
//! through staging memory, which peers map, and `stat` says so.
#![cfg(feature = "gpu")]

use std::process::{Command, Stdio};

use kvrail::client::Client;
use kvrail::protocol::door::Source;
use serde_json::Value;

use crate::cuda_standin::StandIn;
use crate::gpu_memory::{gpu, node, on_gpu};
use crate::shared_memory::{AUTO, transports};
use crate::support::{
    BINARY, Blocks, Counts, OVER_SHM, PATIENCE, assert_at_rest_over, assert_rank, cluster, node_id,
    read, save, transport,
};

/// Why a node has no shared memory whose GPU's memory RDMA devices reach themselves.
pub(crate) const CANNOT_BE_MAPPED: &str =
    "RDMA devices reach GPU memory of this node where it lies, and peers cannot map that";

/// What a node is told: its GPU, and how it reaches its peers.
fn told(standin: Option<&StandIn>, way: [&str; 2]) -> Vec<String> {
    [standin.map(gpu).unwrap_or_default(), way.map(str::to_owned).to_vec()].concat()
}

/// What a node says of shared memory, and of the way into its GPU's memory.
fn ways(client: &Client) -> (String, String) {
    let report = client.stat().unwrap();
    (report.node.no_shared_memory, report.gpu.unwrap_or_default().way)
}

/// From host memory into GPU memory, from there into another GPU's memory, and from there into host memory.
fn travels(way: [&str; 2], named: &str) {
    let Some(standin) = StandIn::new() else { return };
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let start = |name, gpu| node(&cluster, name, &registry, &told(gpu, way));
    let (a, d) = (start("A", None), start("D", None));
    let (b, c) = (start("B", Some(&standin)), start("C", Some(&standin)));
    let [at_a, at_b, at_c, at_d] = [&a, &b, &c, &d].map(|node| node.client().unwrap());
    let blocks = Blocks::small("through shared memory");
    let bytes: u64 = blocks.bytes.iter().map(|block| block.len() as u64).sum();
    save(&at_a, &blocks);
    let all = Counts::all_ready(blocks.len());
    for (from, to) in [(&at_a, &at_b), (&at_b, &at_c), (&at_c, &at_d)] {
        assert_eq!(read(to, &blocks, Source::From(node_id(from))), all);
        assert!(to.flush(PATIENCE).unwrap());
    }
    assert_eq!((on_gpu(&at_b), on_gpu(&at_c)), (bytes, bytes));
    // Each rank is that of a block in any memory: one reader more for A, B and C.
    for (client, rank) in [(&at_a, 2), (&at_d, 1)] {
        assert_rank(client, &blocks, rank);
    }
    for client in [&at_b, &at_c] {
        assert_eq!(transports(client), ["shm", "shm"]);
        assert_eq!(ways(client), (String::new(), "staging".to_owned()));
    }
    for (name, client) in [("A", &at_a), ("B", &at_b), ("C", &at_c), ("D", &at_d)] {
        assert_at_rest_over(named, name, client);
    }
    let said = Command::new(BINARY)
        .args(["stat", "--socket"])
        .arg(b.addresses().unwrap().socket.as_ref().unwrap())
        .output()
        .unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("with peers on this host") && said.contains("staging"), "{said}");
}

#[test]
fn blocks_in_gpu_memory_go_over_shared_memory_alone() {
    travels(OVER_SHM, "shm");
}

#[test]
fn blocks_in_gpu_memory_go_over_shared_memory_where_it_is_chosen() {
    travels(AUTO, transport());
}

#[test]
fn a_node_says_why_it_has_no_shared_memory_with_its_neighbours() {
    let Some(standin) = StandIn::new() else { return };
    // Where NICs reach the GPU's memory itself, it is lent where it is, and peers cannot map it.
    standin.control("set registrable 1");
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let a = node(&cluster, "A", &registry, &told(None, AUTO));
    let b = node(&cluster, "B", &registry, &told(Some(&standin), AUTO));
    let c = node(&cluster, "C", &registry, &[]);
    let [at_a, at_b, at_c] = [&a, &b, &c].map(|node| node.client().unwrap());
    let direct = transport() == "verbs";
    let why = if direct { CANNOT_BE_MAPPED } else { "" };
    let way = if direct { "direct" } else { "staging" };
    assert_eq!(ways(&at_b), (why.to_owned(), way.to_owned()));
    assert_eq!(ways(&at_a).0, "");
    assert_eq!(ways(&at_c).0, "--no-shm");
    let blocks = Blocks::small("with and without");
    save(&at_a, &blocks);
    let all = Counts::all_ready(blocks.len());
    assert_eq!(read(&at_b, &blocks, Source::From(node_id(&at_a))), all);
    assert_eq!(transports(&at_b), [if direct { "verbs" } else { "shm" }]);
}

#[test]
fn the_whole_demonstration_runs_over_it() {
    let Some(standin) = StandIn::new() else { return };
    let output = Command::new(BINARY)
        .args(["demo", "--json", "--transport", "shm", "--gpu", "--gpu-driver"])
        .arg(standin.library())
        .env_clear()
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["transport"], &report["gpu"]), (&"shm".into(), &"staging".into()));
    assert_eq!(report["verified"], true);
}
