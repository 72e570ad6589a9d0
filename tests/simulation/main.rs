//! Seeded simulation of a cluster: nodes that save, fetch and evict at random, plan their reads by an
//! owner registry and announce to it, on networks that reset, split, lose, delay and kill at random.
//!
//! Between any two rounds `Cluster::check` holds: no destination is let go of while a READ may land
//! in it, no READ can reach memory that is not pinned, and every resident has the bytes of its key.
//! Whenever a node and the registry compare digests, they agree, unless somebody else has changed the
//! node's list. When the networks are whole again and all has come to rest, nothing is left over,
//! every rank step is explained by one reader of one resident, the registry lists and counts exactly
//! those who hold a block, and a read finds whatever anybody holds.
//!
//! A failing seed is printed; `KVRAIL_SIM_SEED=17 cargo test --test simulation` runs it alone, and
//! `KVRAIL_SIM_SEEDS=5000` runs more of them than the default.

mod krate {
    pub(crate) use kvrail::{
        event, fabric, health, layout, lease, limits, memory, peer, policy, protocol, registry,
        route, sim, store, types,
    };
}

#[cfg(test)]
#[path = "../../src/peer/tests/cluster/mod.rs"]
#[expect(dead_code, unused_imports, reason = "the tests of the peer core use more of it")]
mod cluster;
#[cfg(test)]
mod account;
#[cfg(test)]
mod client;
#[cfg(test)]
mod readers;
#[cfg(test)]
mod registry;
#[cfg(test)]
mod seen;
#[cfg(test)]
mod world;

use std::panic::{catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

#[cfg(test)]
use cluster::node_id;
use seen::{Seen, setting};
use world::World;

/// Seeds of a default run.
const SEEDS: u64 = 2000;

#[test]
fn nodes_survive_what_a_network_does_to_them() {
    let seeds = match setting("KVRAIL_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..setting("KVRAIL_SIM_SEEDS").unwrap_or(SEEDS),
    };
    let next = AtomicU64::new(seeds.start);
    let work = || {
        let mut seen = Seen::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if !seeds.contains(&seed) {
                return seen;
            }
            match catch_unwind(|| World::new(seed).run()) {
                Ok(run) => seen.add(&run),
                Err(panic) => {
                    eprintln!("seed {seed} failed; replay it with KVRAIL_SIM_SEED={seed}");
                    next.store(seeds.end, Ordering::Relaxed);
                    resume_unwind(panic);
                }
            }
        }
    };
    let seen = thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        let mut seen = Seen::default();
        for worker in workers {
            seen.add(&worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        seen
    });
    println!("{seen:?}");
    if seeds.end - seeds.start >= 100 {
        seen.assert_it_all_happened();
    }
}

#[test]
fn one_seed_is_one_run() {
    let run = |seed| format!("{:?}", World::new(seed).run());
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
}
