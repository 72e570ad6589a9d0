//! Nodes of different clusters do not exchange blocks, and say why.

use std::fs;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::protocol::door::Source;

use crate::support::{Blocks, Counts, assert_rank, cluster, read, save, until};

fn node(cluster: &Cluster, registry: &Process, name: &str, secret: Option<&str>) -> Process {
    let mut arguments = Vec::new();
    let file = cluster.path().join(format!("{name}.secret"));
    let path = file.display().to_string();
    if let Some(secret) = secret {
        fs::write(&file, secret).unwrap();
        arguments.extend(["--cluster-secret-file", &path]);
    }
    cluster.node(name, registry.addresses().unwrap().listen, &arguments).unwrap()
}

#[test]
fn one_secret_one_cluster() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let secret = "a secret of the cluster, long enough";
    let holder = node(&cluster, &registry, "holder", Some(secret));
    let friend = node(&cluster, &registry, "friend", Some(secret));
    let stranger = node(&cluster, &registry, "stranger", Some("another secret, as long as that"));
    let open = node(&cluster, &registry, "open", None);
    let at_holder = holder.client().unwrap();
    let blocks = Blocks::small("not for strangers");
    save(&at_holder, &blocks);

    for other in [&stranger, &open] {
        let counts = read(&other.client().unwrap(), &blocks, Source::Anywhere);
        assert_eq!(counts, Counts::all_failed(blocks.len()));
        let told = |process: &Process| process.said().contains("--cluster-secret-file");
        until("the reader's log says why", || told(other));
        until("the holder's log says why", || told(&holder));
    }
    assert_rank(&at_holder, &blocks, 1);
    let counts = read(&friend.client().unwrap(), &blocks, Source::Anywhere);
    assert_eq!(counts, Counts::all_ready(blocks.len()));
    assert_rank(&at_holder, &blocks, 2);
}
