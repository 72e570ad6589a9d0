//! The owner registry in its three forms, beside a plain loop over a Redis server on the same batches:
//! hashes per CPU second of whoever serves, memory per entry, what a node's death blocks, and what
//! announcing five million residents again does to lends.
//!
//! `cargo bench --bench registry`, optionally followed by `-- KEYS RESIDENTS`. Needs `redis-server`; what
//! needs it is left out where there is none. Each figure is a ratio to measure by: the columns of one run
//! belong together.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a measurement reads the clock and prints; a failure in it may panic"
)]

mod measure;
mod processes;
#[path = "../../tests/registry/redis_server.rs"]
#[expect(dead_code, reason = "the tests of registries use more of it")]
mod redis_server;
mod resync;

use measure::Rates;
use redis_server::RedisServer;

fn print(name: &str, rates: &Rates) {
    println!(
        "{name:<34} {:>7.2} {:>7.2} {:>7.2} {:>8.0}",
        rates.announce / 1e6,
        rates.withdraw / 1e6,
        rates.plan / 1e6,
        rates.bytes_per_entry
    );
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|word| word == processes::SERVE) {
        return processes::serve();
    }
    let numbers: Vec<u32> = arguments.iter().filter_map(|word| word.parse().ok()).collect();
    let keys = numbers.first().copied().unwrap_or(1_000_000);
    let residents = numbers.get(1).copied().unwrap_or(5_000_000);
    println!("{keys} keys of 32-byte hashes, batches of {}", measure::BATCH);
    println!(
        "{:<34} {:>7} {:>7} {:>7} {:>8}",
        "million hashes per CPU second", "announce", "withdraw", "plan", "B/entry"
    );
    print("in this process", &measure::in_process(keys));
    let server = processes::Server::start();
    print("kvrail registry, over gRPC", &measure::over_grpc(&server, keys));
    drop(server);
    if redis_server::is_there() {
        let redis = RedisServer::start();
        print("on Redis", &measure::on_redis(&redis, keys));
        drop(redis);
        let redis = RedisServer::start();
        print("plain loop over Redis (ZADD, ZCARD)", &measure::plain_redis(&redis, keys));
    }
    let death = measure::death(keys);
    println!(
        "death of a node with {keys} keys: {:.1} us until all are void; then {} steps of a sweep, the \
         longest {:.0} us",
        death.void.as_secs_f64() * 1e6,
        death.steps,
        death.longest_step.as_secs_f64() * 1e6
    );
    let lends = resync::lends(residents);
    println!(
        "{} residents announced again in {:.1} s: a lend of {} blocks takes p50 {:.1} us, p99 {:.1} us \
         meanwhile; {:.1} us and {:.1} us before",
        residents,
        lends.took.as_secs_f64(),
        resync::LEND,
        lends.during.0,
        lends.during.1,
        lends.before.0,
        lends.before.1
    );
}
