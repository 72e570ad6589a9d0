//! Leased reads over the verbs fabric between two data threads on one device, and what registration costs.
//!
//! `KVRAIL_RDMA_DEVICE=rxe0 cargo bench --bench verbs_read -- MEASURE SIZE`, where MEASURE is, in typical
//! microseconds, `leased` (from when the data thread takes a fetch up to the READ's completion; one read
//! after the other, each asked for by that thread itself 50 µs after the holder's last word about the one
//! before), `whole` (from the command of a caller on another thread until the bytes are compared) or
//! `profile` (the parts of a leased read), prints `MEASURE SIZE VALUE`; without the two, all measures.
//! Behind the value stand the least and the tenth percentile: other work on the machine moves them least.
//! `register` is the milliseconds that it takes to register so many bytes in one piece, and behind them
//! those in eight pieces by several threads.
//!
//! `BENCH_QPS` is the lanes; `BENCH_POLL` and `BENCH_HOLDER_POLL` (`busy`, `adaptive` or `event`) are how
//! the two ends poll. With `BENCH_LEASE_WINDOWS=1` leases have keys of their own, as by `--lease-windows`.
//! `bench/peers/perftest` holds the values against perftest's; READs without a lease are `kvrail bench read`'s.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a measurement reads the clock and prints; a failure in it may panic"
)]

mod leased;
#[path = "../tests/leased/member.rs"]
mod member;
mod timed;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use kvrail::fabric::{Access, Fabric};
use kvrail::memory::Mapping;
use kvrail::verbs::{PollMode, VerbsConfig, VerbsFabric};

use leased::{Parts, Times};

/// Reads of one latency.
const READS: u32 = 1000;

fn pool(bytes: u64) -> Arc<Mapping> {
    let pool = Mapping::anonymous("kvrail-bench", bytes).unwrap();
    for offset in (0..bytes).step_by(4096) {
        pool.write(offset, &[7; 4096]).unwrap();
    }
    Arc::new(pool)
}

fn config(lanes: usize, poll: PollMode) -> VerbsConfig {
    VerbsConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        devices: std::env::var("KVRAIL_RDMA_DEVICE").into_iter().collect(),
        lanes,
        lease_windows: std::env::var_os("BENCH_LEASE_WINDOWS").is_some(),
        poll,
        ..VerbsConfig::default()
    }
}

fn fabric(lanes: usize, poll: PollMode) -> VerbsFabric {
    VerbsFabric::new(&config(lanes, poll)).unwrap()
}

/// The least milliseconds of five that a registration in pieces of at most `chunk_bytes` takes.
fn registration(memory: &Arc<Mapping>, chunk_bytes: u64) -> f64 {
    let mut fabric =
        VerbsFabric::new(&VerbsConfig { chunk_bytes, ..config(1, PollMode::Busy) }).unwrap();
    let mut times: Vec<f64> = (0..5)
        .map(|_| {
            let start = Instant::now();
            let region = fabric.register(Arc::clone(memory), Access::RemoteRead).unwrap();
            let took = start.elapsed().as_secs_f64() * 1e3;
            fabric.deregister(region.id);
            took
        })
        .collect();
    times.sort_unstable_by(f64::total_cmp);
    times.first().copied().unwrap_or_default()
}

/// What the environment says.
struct Setting {
    lanes: usize,
}

impl Setting {
    fn from_environment() -> Self {
        Self { lanes: std::env::var("BENCH_QPS").map_or(2, |text| text.parse().unwrap()) }
    }

    /// The two ends of a leased read, by default polled as perftest polls.
    fn ends(&self) -> (VerbsFabric, VerbsFabric) {
        let mode = |name| match std::env::var(name).as_deref() {
            Ok("adaptive") => PollMode::Adaptive,
            Ok("event") => PollMode::Event,
            _ => PollMode::Busy,
        };
        (fabric(self.lanes, mode("BENCH_HOLDER_POLL")), fabric(self.lanes, mode("BENCH_POLL")))
    }

    /// Times of leased reads.
    fn leased(&self, size: u32, in_parts: bool) -> Vec<Times> {
        leased::latencies(self.ends(), (size, READS), in_parts)
    }

    /// A measure's typical value, and what stands behind it.
    fn measure(&self, measure: &str, size: u32) -> Vec<f64> {
        match measure {
            "leased" => percentiles(self.leased(size, false).iter().map(|times| times.leased)),
            "register" => {
                let memory = pool(size.into());
                vec![registration(&memory, u64::MAX), registration(&memory, u64::from(size) / 8)]
            }
            "whole" => percentiles(leased::of_a_caller(self.ends(), (size, READS)).into_iter()),
            "profile" => {
                let all = self.leased(size, true);
                for (name, part) in PARTS {
                    let parts = all.iter().filter_map(|times| times.parts.as_ref());
                    let columns = percentiles(parts.map(part));
                    let columns: String = columns.iter().map(|it| format!(" {it:>8.1}")).collect();
                    println!("    {name:<8}{columns}");
                }
                percentiles(all.iter().map(|times| times.leased))
            }
            other => {
                panic!("{other} is none of leased, whole, profile, register")
            }
        }
    }
}

/// A part of a leased read, µs.
type Part = fn(&Parts) -> f64;

/// The parts, in order.
const PARTS: [(&str, Part); 9] = [
    ("take up", |parts| parts.take_up),
    ("send", |parts| parts.send),
    ("ask", |parts| parts.ask),
    ("lend", |parts| parts.lend),
    ("reply", |parts| parts.reply),
    ("answer", |parts| parts.answer),
    ("plan", |parts| parts.plan),
    ("post", |parts| parts.post),
    ("read", |parts| parts.read),
];

/// Of microseconds the median, the least and the tenth percentile.
fn percentiles(micros: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = micros.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    vec![at(sorted.len() / 2), at(0), at(sorted.len() / 10)]
}

fn main() {
    let setting = Setting::from_environment();
    // `cargo bench` passes a flag of its own.
    let words: Vec<String> = std::env::args().skip(1).filter(|it| !it.starts_with('-')).collect();
    let print = |measure: &str, size| {
        let values = setting.measure(measure, size);
        let values: Vec<String> = values.iter().map(|value| format!("{value:.2}")).collect();
        println!("{measure} {size} {}", values.join(" "));
    };
    if let [measure, size] = words.as_slice() {
        print(measure, size.parse().unwrap());
        return;
    }
    print("leased", 4096);
    print("whole", 4096);
    print("register", 512 << 20);
}
