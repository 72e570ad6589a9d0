//! READ bandwidth and latency of the verbs fabric: two fabrics on one device, one thread.
//!
//! `KVRAIL_RDMA_DEVICE=rxe0 cargo bench --bench verbs_read`, optionally followed by
//! `-- LANES DEPTH SECONDS`. Compare with `ib_read_bw -q LANES -t DEPTH` and `ib_read_lat` on the
//! same device at the same time of day.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a measurement reads the clock and prints; a failure in it may panic"
)]

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

fn pool() -> Arc<Mapping> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(POOL_BYTES).unwrap();
    let pool = Mapping::new(&file, POOL_BYTES).unwrap();
    for offset in (0..POOL_BYTES).step_by(4096) {
        pool.write(offset, &[7; 4096]).unwrap();
    }
    Arc::new(pool)
}

fn fabric(lanes: usize) -> VerbsFabric {
    VerbsFabric::new(&VerbsConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        devices: std::env::var("KVRAIL_RDMA_DEVICE").into_iter().collect(),
        lanes,
        poll: PollMode::Busy,
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
    fn latency(&mut self, size: u32, count: usize) -> Vec<Duration> {
        let mut times = Vec::with_capacity(count);
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

fn main() {
    let numbers: Vec<u64> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let number = |at: usize, default| numbers.get(at).copied().unwrap_or(default);
    let (lanes, depth) = (usize::try_from(number(0, 2)), usize::try_from(number(1, 128)));
    let (lanes, depth, seconds) = (lanes.unwrap(), depth.unwrap(), number(2, 2));
    let (mut holder, mut fabric) = (fabric(lanes), fabric(lanes));
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
    let mut reader = Reader { fabric, connection, local, remote, posts, events, cursor: 0 };
    for size in SIZES {
        let outstanding = (lanes * depth).min(reader.fabric.capabilities().reads_outstanding);
        let rate = reader.bandwidth(size, outstanding, seconds);
        println!("read_bw {size} bytes x {outstanding} on {lanes} lanes: {:.2} MB/s", rate / 1e6);
    }
    let times = reader.latency(4096, 1000);
    let typical = times.get(times.len() / 2).copied().unwrap_or_default();
    println!("read_lat 4096 bytes: typical {:.2} us", typical.as_secs_f64() * 1e6);
}
