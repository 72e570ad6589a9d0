//! A registry on Redis that is killed under load, comes back empty, or loses a part: local work goes on,
//! and what nodes hold is found again.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::protocol::door::Source;

use crate::redis_server::{self, RedisServer};
use crate::support::{Blocks, Counts, cluster, read, save, save_unannounced, try_read, until};

/// Sets of blocks that one engine saves; then it only reads.
const SETS: usize = 24;

fn node(cluster: &Cluster, name: &str, redis: &RedisServer) -> Process {
    let nowhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let url = format!("redis://{}", redis.address());
    cluster.node(name, nowhere, &["--registry", &url, "--pool", "64MiB"]).unwrap()
}

fn found_everywhere(nodes: &[Process], blocks: &Blocks) {
    let all = Counts::all_ready(blocks.len());
    for node in nodes {
        let client = node.client().unwrap();
        until(&format!("{} reads all blocks", node.name()), || {
            read(&client, blocks, Source::Anywhere) == all
        });
    }
}

#[test]
fn redis_killed_and_restarted_under_load_loses_nothing_for_good() {
    if !redis_server::is_there() {
        return;
    }
    let (cluster, mut redis) = (cluster(), RedisServer::start());
    let nodes = ["a", "b", "c"].map(|name| node(&cluster, name, &redis));
    let (stop, saved) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let (stop, saved) = (&stop, &saved);
    let count = || saved.lock().unwrap().len();
    thread::scope(|scope| {
        for process in &nodes {
            scope.spawn(move || {
                let client = process.client().unwrap();
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    if number < SETS {
                        let blocks = Blocks::new(&format!("{} {number}", process.name()), 4, 4096);
                        save_unannounced(&client, &blocks);
                        saved.lock().unwrap().push(blocks);
                    }
                    number += 1;
                    let last = saved.lock().unwrap().len();
                    let name = ["a", "b", "c"][number % 3];
                    let theirs = format!("{name} {}", number / 2 % SETS);
                    // Bytes are compared in there; who has it, the registry may not know now.
                    try_read(&client, &Blocks::new(&theirs, 4, 4096), Source::Anywhere).unwrap();
                    assert!(last > 0);
                }
            });
        }
        for round in 1..=2 {
            until("there is a load", || count() >= 6 * round);
            redis.kill();
            let before = count();
            until("saves and reads go on", || count() > before || count() == 3 * SETS);
            redis.restart();
        }
        until("all is saved", || count() == 3 * SETS);
        stop.store(true, Ordering::Relaxed);
    });
    for blocks in saved.lock().unwrap().iter() {
        found_everywhere(&nodes, blocks);
    }
}

#[test]
fn a_part_that_redis_lost_is_announced_again_because_digests_differ() {
    if !redis_server::is_there() {
        return;
    }
    let (cluster, redis) = (cluster(), RedisServer::start());
    let nodes = ["a", "b"].map(|name| node(&cluster, name, &redis));
    let blocks = Blocks::new("held", 64, 4096);
    save(&nodes[0].client().unwrap(), &blocks);
    let epoch = redis.say(&["HGET", "{kvrail}:meta", "epoch"]);
    for group in 0..32 {
        for table in ["owners", "lanes", "digests"] {
            redis.say(&["DEL", &format!("{{kvrail:{group}}}:{table}")]);
        }
    }
    found_everywhere(&nodes, &blocks);
    assert_eq!(redis.say(&["HGET", "{kvrail}:meta", "epoch"]), epoch, "the rest was there");
}
