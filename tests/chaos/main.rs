//! Eight nodes and a registry as real processes over TCP, each with an engine that saves and reads
//! without pause, while processes are killed, stopped and started again at random.
//!
//! Every byte that an engine is given is compared. When the killing is over and all has come to
//! rest, no lease, pin or memory is left over, no node kept a descriptor for a peer that died, the
//! registry counts what the nodes hold, and every node reads from every other.
//!
//! `KVRAIL_CHAOS_SECONDS=600 cargo test --test chaos` goes on for longer than the default, and
//! `KVRAIL_CHAOS_SEED` draws other victims. Threads and processes are the machine's, so a seed does
//! not replay a run; what the nodes logged is printed with a failure.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests and their helpers fail by panicking"
)]

mod engine;
mod victims;

#[path = "../processes/support.rs"]
#[expect(dead_code, reason = "the tests of real processes use more of it")]
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use engine::{Engine, Work};
use kvrail::protocol::door::Source;
use kvrail::runtime::deadline::Deadline;
use support::{Blocks, Counts, assert_at_rest, metric, read, save, until};
use victims::Victims;

const NODES: usize = 8;

/// How long processes are killed for.
const SECONDS: u64 = 120;

/// Descriptors that a node may have beyond two streams and a message connection for each other
/// node: listeners, the door and its engines, the pool, the registry, the runtime's own.
const DESCRIPTORS_BESIDE_PEERS: usize = 64;

#[expect(clippy::disallowed_methods, reason = "a test's length is not a setting of the program")]
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

#[test]
fn nodes_that_are_killed_at_random_lose_nothing_but_their_own_memory() {
    let seed = setting("KVRAIL_CHAOS_SEED", u64::from(std::process::id()));
    let seconds = Duration::from_secs(setting("KVRAIL_CHAOS_SECONDS", SECONDS));
    println!("{NODES} nodes for {seconds:?}, seed {seed}");
    let mut victims = Victims::start(NODES, seed);
    let over = Arc::new(AtomicBool::new(false));
    let engines: Vec<_> = (0..NODES)
        .map(|at| {
            let engine = Engine::new(victims.socket(at), seed ^ (at as u64 + 1) << 32);
            let over = Arc::clone(&over);
            thread::spawn(move || engine.run(&over))
        })
        .collect();

    let deadline = Deadline::after(seconds);
    while deadline.pause(victims.next_pause()) {
        let failed = engines.iter().any(thread::JoinHandle::is_finished);
        assert!(!failed, "an engine gave up:\n{}", victims.said());
        victims.strike();
    }
    victims.all_run();
    over.store(true, Ordering::Relaxed);
    let mut done = Work::default();
    for engine in engines {
        done += engine.join().unwrap_or_else(|_| panic!("an engine failed:\n{}", victims.said()));
    }
    println!("{:?}; {done:?}", victims.struck());
    assert!(done.saved > 0 && done.local > 0 && done.fetched > 0, "{done:?}");
    assert_nothing_is_left(&victims);
    assert_all_reach_all(&victims);
    victims.stop();
}

/// What every node has when nobody asks it for anything.
fn assert_nothing_is_left(victims: &Victims) {
    let mut held = 0;
    for node in victims.nodes() {
        let client = node.client().unwrap();
        assert_at_rest(node.name(), &client);
        held += client.stat().unwrap().residents.blocks;
        let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", node.id())).unwrap().count();
        let allowed = DESCRIPTORS_BESIDE_PEERS + 4 * NODES;
        until(&format!("{} closes what it held of the dead", node.name()), || {
            descriptors() <= allowed
        });
        assert!(!node.said().contains("panicked"), "{}: {}", node.name(), node.said());
    }
    let registry = victims.registry();
    let counted = || {
        let series = |owners: &str| format!("kvrail_registry_blocks{{owners=\"{owners}\"}}");
        let one_to_many = ["1", "2", "3", "4", "5", "6", "7", "8"].iter().zip(1_u32..);
        one_to_many
            .map(|(owners, times)| f64::from(times) * metric(registry, &series(owners)))
            .sum::<f64>()
    };
    #[expect(clippy::cast_precision_loss, reason = "a few thousand blocks")]
    let held = held as f64;
    until(&format!("the registry counts {held} owners"), || (counted() - held).abs() < 0.5);
}

/// Each node saves something new, and all the others read it.
fn assert_all_reach_all(victims: &Victims) {
    for node in victims.nodes() {
        let blocks = Blocks::new(&format!("saved at last by {}", node.name()), 4, 4096);
        save(&node.client().unwrap(), &blocks);
        for other in victims.nodes() {
            let all = Counts::all_ready(blocks.len());
            let client = other.client().unwrap();
            until(&format!("{} reads from {}", other.name(), node.name()), || {
                read(&client, &blocks, Source::Anywhere) == all
            });
        }
    }
}
