//! READs of the verbs fabric, two fabrics on one device: bandwidth and latency of bare READs in one
//! thread, and latency of leased reads between two data threads.
//!
//! `KVRAIL_RDMA_DEVICE=rxe0 cargo bench --bench verbs_read -- MEASURE SIZE`, where MEASURE is
//! `bandwidth` (MiB/s), `latency` or `leased` (typical microseconds), prints `MEASURE SIZE VALUE`; without
//! the two, all measures. Behind the value of a latency stand the least and the tenth percentile: other
//! work on the machine moves them least. `BENCH_QPS`, `BENCH_DEPTH` and `BENCH_SECONDS` are the lanes, the READs
//! outstanding on each and the length of a bandwidth's run. With `BENCH_LEASE_WINDOWS=1` leases have keys of
//! their own, as by `--lease-windows`; only `leased` can be measured then. `bench/rxe/compare` holds the values against
//! perftest's.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a measurement reads the clock and prints; a failure in it may panic"
)]

mod leased;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::fabric::{
    Access, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent, ReadBatch, ReadWork,
    Region, RegisteredSpan, WrId,
};
use kvrail::memory::Mapping;
use kvrail::verbs::{PollMode, VerbsConfig, VerbsFabric};

/// Twice the longest READ: what the compared tools use.
const POOL_BYTES: u64 = 4 << 20;
const SIZES: [u32; 3] = [4 << 10, 64 << 10, 1 << 20];

/// Reads of one latency.
const READS: u32 = 1000;

fn pool() -> Arc<Mapping> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(POOL_BYTES).unwrap();
    let pool = Mapping::new(&file, POOL_BYTES).unwrap();
    for offset in (0..POOL_BYTES).step_by(4096) {
        pool.write(offset, &[7; 4096]).unwrap();
    }
    Arc::new(pool)
}

fn fabric(lanes: usize, poll: PollMode) -> VerbsFabric {
    VerbsFabric::new(&VerbsConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        devices: std::env::var("KVRAIL_RDMA_DEVICE").into_iter().collect(),
        lanes,
        lease_windows: std::env::var_os("BENCH_LEASE_WINDOWS").is_some(),
        poll,
        ..VerbsConfig::default()
    })
    .unwrap()
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

    /// Times of single READs, one after the other, sorted.
    fn latency(&mut self, size: u32, count: u32) -> Vec<Duration> {
        let mut times = Vec::new();
        for _read in 0..count {
            let start = Instant::now();
            self.post(size, 1);
            while self.poll() == 0 {}
            times.push(start.elapsed());
        }
        times.sort_unstable();
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
        let remote = holder.register(pool(), Access::RemoteRead).unwrap();
        let local = fabric.register(pool(), Access::Local).unwrap();
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
            "latency" => percentiles(&Bare::new(self.lanes).reader.latency(size, READS)),
            "leased" => {
                // The reader's thread waits for nothing else; the holder's serves others, too.
                let (holder, reader) = (PollMode::Adaptive, PollMode::Busy);
                let (holder, reader) = (fabric(self.lanes, holder), fabric(self.lanes, reader));
                percentiles(&leased::latencies(holder, reader, size, READS))
            }
            other => panic!("{other} is none of bandwidth, latency, leased"),
        }
    }
}

/// Of sorted times the median, the least and the tenth percentile, microseconds.
fn percentiles(times: &[Duration]) -> Vec<f64> {
    let at = |index: usize| times.get(index).copied().unwrap_or_default().as_secs_f64() * 1e6;
    vec![at(times.len() / 2), at(0), at(times.len() / 10)]
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
}
