//! What a scraper and a prober see of processes that did everything once.

use std::ffi::OsStr;
use std::fs::File;
use std::process::Command;

use kvrail::client::Client;
use kvrail::metrics::{FAMILIES, REGISTRY_FAMILIES};
use kvrail::protocol::door::Source;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::support::{
    BINARY, Blocks, Counts, PATIENCE, assert_at_rest, cluster, http_get, metric, read, save,
    scrape, until,
};

/// Fails unless the series has this value.
fn assert_metric(process: &kvrail::cli::cluster::Process, series: &str, value: f64) {
    let got = metric(process, series);
    assert!((got - value).abs() < 0.5, "{} has {series} {got}, not {value}", process.name());
}

#[test]
fn metrics_tell_what_happened() {
    let cluster = cluster();
    let scraped = ["--metrics-listen", "127.0.0.1:0", "--pool", "4MiB"];
    let registry = cluster.registry("registry", &scraped[..2]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &scraped).unwrap();
    let reader = cluster.node("reader", address, &scraped).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("travel");
    let all = Counts::all_ready(blocks.len());
    save(&at_holder, &blocks);
    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), all);
    assert!(at_reader.flush(PATIENCE).unwrap());
    assert_metric(&holder, "kvrail_residents{rank=\"2\"}", 16.0);
    assert_metric(&holder, "kvrail_rank_max", 2.0);
    assert_metric(&registry, "kvrail_registry_blocks{owners=\"2\"}", 16.0);
    assert_eq!(read(&at_holder, &blocks, Source::Here), all);
    assert_metric(&holder, "kvrail_residents{rank=\"1\"}", 16.0);
    save(&at_holder, &blocks);

    let size = f64::from(16 << 10);
    for (series, value) in [
        ("kvrail_inserted_blocks_total{origin=\"saved\"}", 16.0),
        ("kvrail_already_resident_blocks_total{cause=\"partial_hit\"}", 16.0),
        ("kvrail_rank_moves_total{direction=\"raised\"}", 16.0),
        ("kvrail_rank_moves_total{direction=\"lowered\"}", 16.0),
        ("kvrail_local_hit_blocks_total", 16.0),
        ("kvrail_local_miss_blocks_total", 0.0),
        ("kvrail_leases_granted_total", 1.0),
        ("kvrail_leases_ended_total{end=\"completed\"}", 1.0),
        ("kvrail_lent_blocks_total", 16.0),
        ("kvrail_lent_bytes_total", 16.0 * size),
        ("kvrail_returned_bytes_total", 16.0 * size),
        ("kvrail_requester_leases{requester=\"reader\"}", 0.0),
        ("kvrail_requester_leased_bytes{requester=\"reader\"}", 0.0),
        ("kvrail_peer_connections", 1.0),
        ("kvrail_pool_used_bytes{pool=\"0\"}", 16.0 * size),
        ("kvrail_pool_size_bytes{pool=\"0\"}", f64::from(4 << 20)),
        ("kvrail_store_info{policy=\"rank\"}", 1.0),
        ("kvrail_registry_up", 1.0),
        ("kvrail_pinned_residents", 0.0),
    ] {
        assert_metric(&holder, series, value);
    }
    for (series, value) in [
        ("kvrail_inserted_blocks_total{origin=\"fetched\"}", 16.0),
        ("kvrail_inserted_bytes_total{origin=\"fetched\"}", 16.0 * size),
        ("kvrail_local_miss_blocks_total", 16.0),
        ("kvrail_transferred_blocks_total", 16.0),
        ("kvrail_transferred_bytes_total", 16.0 * size),
        ("kvrail_transfer_seconds_count", 1.0),
        ("kvrail_peer_connections_opened_total", 1.0),
        ("kvrail_registry_owners_count", 16.0),
        ("kvrail_registry_calls_total{call=\"plan\",outcome=\"answered\"}", 1.0),
    ] {
        assert_metric(&reader, series, value);
    }
    assert_metric(&registry, "kvrail_registry_nodes", 2.0);
    assert!(metric(&registry, "kvrail_registry_served_total{call=\"plan\"}") > 0.0);

    // Pressure at the reader: evictions by rank, and a fetch soon after one.
    save(&at_reader, &Blocks::new("pressure", 300, 16 << 10));
    until("the copies are evicted", || read(&at_reader, &blocks, Source::Here).ready == 0);
    // Evictions are counted before their memory is free again, and after nobody finds the blocks.
    assert_at_rest("the reader", &at_reader);
    assert!(metric(&reader, "kvrail_evicted_blocks_total{rank=\"1\"}") > 16.0);
    assert!(metric(&reader, "kvrail_evicted_bytes_total") > 16.0 * size);
    assert_eq!(read(&at_reader, &blocks, Source::Anywhere), all);
    assert_metric(&reader, "kvrail_refetched_blocks_total", 16.0);
}

#[test]
fn every_listed_metric_is_served_and_every_process_is_healthy() {
    let cluster = cluster();
    let scraped = ["--metrics-listen", "127.0.0.1:0"];
    let registry = cluster.registry("registry", &scraped).unwrap();
    let node = cluster.node("node", registry.addresses().unwrap().listen, &scraped).unwrap();
    let client = node.client().unwrap();
    save(&client, &Blocks::small("something to count"));
    // A requester has series of its own from its first lease on.
    let later = ["kvrail_requester_leases", "kvrail_requester_leased_bytes"];
    for (process, families) in [(&node, &FAMILIES[..]), (&registry, &REGISTRY_FAMILIES)] {
        let series = scrape(process);
        for family in families.iter().filter(|family| !later.contains(&family.name)) {
            let is_there = series.keys().any(|series| series.starts_with(family.name));
            assert!(is_there, "{} does not serve {}", process.name(), family.name);
        }
        let (status, body) = http_get(process.addresses().unwrap().metrics.unwrap(), "/health");
        assert_eq!(status, 200, "{body}");
        let health: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(health["healthy"], true);
    }
}

/// A log on a full disk, or with a reader that has died, is no reason to stop serving.
#[test]
fn a_node_whose_log_takes_nothing_serves_on() {
    let directory = TempDir::with_prefix("kvrail-test-").unwrap();
    let path = |name: &str| directory.path().join(name);
    let (socket, ready) = (path("node.sock"), path("ready"));
    let mut node = Command::new(BINARY)
        .args(["serve", "--pool", "4MiB", "--listen", "127.0.0.1:0", "--transport", "tcp"])
        .args(["--log", "trace", "--parent-death", &std::process::id().to_string()])
        .args([OsStr::new("--socket"), socket.as_ref(), "--ready-file".as_ref(), ready.as_ref()])
        .env_clear()
        .stderr(File::options().write(true).open("/dev/full").unwrap())
        .spawn()
        .unwrap();
    until("it serves", || ready.exists() || node.try_wait().unwrap().is_some());
    let client = Client::connect(&socket).unwrap();
    let blocks = Blocks::small("unlogged");
    save(&client, &blocks);
    assert_eq!(read(&client, &blocks, Source::Here), Counts::all_ready(blocks.len()));
    let pid = Pid::from_child(&node);
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(node.wait().unwrap().code(), Some(0));
}

#[test]
fn a_node_that_is_told_to_stop_leaves_the_registry_and_no_socket() {
    for signal in [Signal::TERM, Signal::INT] {
        let cluster = cluster();
        let scraped = ["--metrics-listen", "127.0.0.1:0"];
        let mut registry = cluster.registry("registry", &scraped).unwrap();
        let address = registry.addresses().unwrap().listen;
        let mut leaver = cluster.node("leaver", address, &[]).unwrap();
        let stayer = cluster.node("stayer", address, &[]).unwrap();
        let blocks = Blocks::small("gone with their node");
        save(&leaver.client().unwrap(), &blocks);
        let socket = leaver.addresses().unwrap().socket.clone().unwrap();
        assert!(socket.exists());
        until("both are listed", || metric(&registry, "kvrail_registry_nodes") > 1.5);

        leaver.signal(signal);
        let status = leaver.wait(PATIENCE);
        assert_eq!(status.and_then(|status| status.code()), Some(0), "{}", leaver.said());
        assert!(!socket.exists());
        assert_metric(&registry, "kvrail_registry_nodes", 1.0);
        let nothing = Counts { not_found: blocks.len(), ..Counts::default() };
        let counts = read(&stayer.client().unwrap(), &blocks, Source::Anywhere);
        assert_eq!(counts, nothing);

        registry.signal(signal);
        let status = registry.wait(PATIENCE);
        assert_eq!(status.and_then(|status| status.code()), Some(0), "{}", registry.said());
    }
}
