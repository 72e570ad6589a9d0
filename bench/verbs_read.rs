//! READs of the verbs fabric, two fabrics on one device: bandwidth and latency of bare READs in one
//! thread, and latency of leased reads between two data threads.
//!
//! `KVRAIL_RDMA_DEVICE=rxe0 cargo bench --bench verbs_read -- MEASURE SIZE`, where MEASURE is
//! `bandwidth` (MiB/s), or in typical microseconds `latency` of a bare READ, `leased` (from when the data
//! thread takes a fetch up to the READ's completion; one read after the other, each asked for by that
//! thread itself 50 µs after the holder's last word about the one before), `whole` (from the command of
//! a caller on another thread until the bytes are compared) or `profile` (the parts of a leased read),
//! prints `MEASURE SIZE VALUE`; without the two, all measures. Behind the value of a latency stand the least
//! and the tenth percentile: other work on the machine moves them least. `register` is the milliseconds
//! that it takes to register so many bytes in one piece, and behind them those in eight pieces by several
//! threads.
//!
//! `BENCH_QPS`, `BENCH_DEPTH` and `BENCH_SECONDS` are the lanes, the READs outstanding on each and the
//! length of a bandwidth's run; `BENCH_POLL` and `BENCH_HOLDER_POLL` (`busy`, `adaptive` or `event`) are how
//! the two ends of a leased read poll. With `BENCH_LEASE_WINDOWS=1` leases have keys of their own, as by
//! `--lease-windows`; only `leased` can be measured then. `bench/rxe/compare` holds the values against
//! perftest's.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a measurement reads the clock and prints; a failure in it may panic"
)]

mod leased;
mod timed;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::fabric::{
    Access, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent, ReadBatch, ReadWork,
    Region, RegisteredSpan, WrId,
};
use kvrail::memory::Mapping;
use kvrail::verbs::{PollMode, VerbsConfig, VerbsFabric};

use leased::{Parts, Times};

/// Twice the longest READ: what the compared tools use.
const POOL_BYTES: u64 = 4 << 20;
const SIZES: [u32; 3] = [4 << 10, 64 << 10, 1 << 20];

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

struct Reader {
    fabric: VerbsFabric,
    connection: ConnectionId,
    local: Region,
    remote: Region,
    posts: ReadBatch,
    events: EventBatch,
    cursor: u64,
}

impl Reader {
    fn post(&mut self, size: u32, count: usize) {
        if count == 0 {
            return;
        }
        self.posts.clear();
        for _read in 0..count {
            let offset = self.cursor % (POOL_BYTES / u64::from(size)) * u64::from(size);
            self.cursor += 1;
            self.posts.works.push(ReadWork {
                wr_id: WrId { slot: u32::try_from(self.cursor % 1024).unwrap(), generation: 1 },
                remote: self.remote.remote(offset, size).unwrap(),
                segments: 1,
            });
            self.posts.segments.push(RegisteredSpan { region: self.local.id, offset, len: size });
        }
        self.fabric.post(self.connection, &self.posts).unwrap();
    }

    fn poll(&mut self) -> usize {
        self.events.clear();
        self.fabric.poll(&mut self.events, Duration::from_millis(20)).unwrap();
        for event in &self.events.events {
            let FabricEvent::Completed(done) = event else {
                panic!("{event:?}");
            };
            assert_eq!(done.status, CompletionStatus::Success);
        }
        self.events.events.len()
    }

    /// Bytes per second with `depth` READs outstanding.
    fn bandwidth(&mut self, size: u32, depth: usize, seconds: u64) -> f64 {
        self.post(size, depth);
        let start = Instant::now();
        let mut reads = 0;
        while start.elapsed() < Duration::from_secs(seconds) {
            let done = self.poll();
            reads += done;
            self.post(size, done);
        }
        let rate = reads as f64 * f64::from(size) / start.elapsed().as_secs_f64();
        let mut left = depth;
        while left > 0 {
            left -= self.poll();
        }
        rate
    }

    /// Times of single READs, one after the other.
    fn latency(&mut self, size: u32, count: u32) -> Vec<Duration> {
        let mut times = Vec::new();
        for _read in 0..count {
            let start = Instant::now();
            self.post(size, 1);
            while self.poll() == 0 {}
            times.push(start.elapsed());
        }
        times
    }
}

/// Two connected fabrics of which one reads. The holder has no part in READs, and is not polled.
struct Bare {
    _holder: VerbsFabric,
    reader: Reader,
}

impl Bare {
    fn new(lanes: usize) -> Self {
        let (mut holder, mut fabric) =
            (fabric(lanes, PollMode::Busy), fabric(lanes, PollMode::Busy));
        let remote = holder.register(pool(POOL_BYTES), Access::RemoteRead).unwrap();
        let local = fabric.register(pool(POOL_BYTES), Access::Local).unwrap();
        let connection = fabric.connect(&holder.local_addr().unwrap()).unwrap();
        let (mut events, mut up) = (EventBatch::default(), 0);
        while up < 2 {
            events.clear();
            holder.poll(&mut events, Duration::from_millis(1)).unwrap();
            for event in &events.events {
                if let FabricEvent::Accepted { connection } = event {
                    holder.admit(*connection).unwrap();
                    up += 1;
                }
            }
            events.clear();
            fabric.poll(&mut events, Duration::from_millis(1)).unwrap();
            up += events.events.len();
        }
        fabric.admit(connection).unwrap();
        let (posts, events) = (ReadBatch::default(), EventBatch::default());
        let reader = Reader { fabric, connection, local, remote, posts, events, cursor: 0 };
        Self { _holder: holder, reader }
    }
}

/// How much of it there is of everything.
struct Setting {
    lanes: usize,
    depth: usize,
    seconds: u64,
}

impl Setting {
    fn from_environment() -> Self {
        let number = |name: &str, default| {
            std::env::var(name).map_or(default, |text| text.parse::<usize>().unwrap())
        };
        Self {
            lanes: number("BENCH_QPS", 2),
            depth: number("BENCH_DEPTH", 128),
            seconds: u64::try_from(number("BENCH_SECONDS", 2)).unwrap(),
        }
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

    /// A measure in the unit that perftest gives it in; of a latency, also the least and the tenth
    /// percentile.
    fn measure(&self, measure: &str, size: u32) -> Vec<f64> {
        match measure {
            "bandwidth" => {
                let mut bare = Bare::new(self.lanes);
                let most = bare.reader.fabric.capabilities().reads_outstanding;
                let outstanding = (self.lanes * self.depth).min(most);
                let rate = bare.reader.bandwidth(size, outstanding, self.seconds);
                vec![rate / f64::from(1 << 20)]
            }
            "latency" => {
                let times = Bare::new(self.lanes).reader.latency(size, READS);
                percentiles(times.iter().map(|time| time.as_secs_f64() * 1e6))
            }
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
                panic!("{other} is none of bandwidth, latency, leased, whole, profile, register")
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
    for size in SIZES {
        print("bandwidth", size);
    }
    print("latency", 4096);
    print("leased", 4096);
    print("whole", 4096);
    print("register", 512 << 20);
}
