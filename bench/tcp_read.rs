//! READ throughput of the TCP fabric over loopback: two fabrics, two threads, one process.
//!
//! `cargo bench --bench tcp_read`, optionally followed by `-- STREAMS SECONDS`. Compare with
//! `iperf3 -c 127.0.0.1 -P 2` on the same machine at the same time of day: both copy each byte into
//! the kernel once and out of it once.
#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a measurement reads the clock and prints; a failure in it may panic"
)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvrail::fabric::{
    Access, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent, ReadBatch, ReadWork,
    Region, RegisteredSpan, WrId,
};
use kvrail::memory::Mapping;
use kvrail::tcp::{TcpConfig, TcpFabric};

const POOL_BYTES: u64 = 64 << 20;
const SIZES: [u32; 4] = [4 << 10, 64 << 10, 256 << 10, 1 << 20];
const WAIT: Duration = Duration::from_millis(20);

fn pool() -> Arc<Mapping> {
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(POOL_BYTES).unwrap();
    let pool = Mapping::new(&file, POOL_BYTES).unwrap();
    let page = [7; 4096];
    for offset in (0..POOL_BYTES).step_by(page.len()) {
        pool.write(offset, &page).unwrap();
    }
    Arc::new(pool)
}

fn fabric(streams: usize) -> TcpFabric {
    TcpFabric::new(TcpConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        streams,
        ..TcpConfig::default()
    })
    .unwrap()
}

fn serve(mut fabric: TcpFabric, stop: &AtomicBool) {
    let mut batch = EventBatch::default();
    while !stop.load(Ordering::Relaxed) {
        batch.clear();
        fabric.poll(&mut batch, WAIT).unwrap();
        for event in &batch.events {
            if let FabricEvent::Accepted { connection } = event {
                fabric.admit(*connection).unwrap();
                fabric.send(*connection, b"go").unwrap();
            }
        }
    }
}

struct Reader {
    fabric: TcpFabric,
    connection: ConnectionId,
    local: Region,
    remote: Region,
    posts: ReadBatch,
    events: EventBatch,
    cursor: u64,
}

impl Reader {
    fn post(&mut self, size: u32, count: usize) {
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
        self.fabric.poll(&mut self.events, WAIT).unwrap();
        for event in &self.events.events {
            let FabricEvent::Completed(done) = event else {
                panic!("{event:?}");
            };
            assert_eq!(done.status, CompletionStatus::Success);
        }
        self.events.events.len()
    }

    /// Answers bytes per second with `depth` READs outstanding.
    fn measure(&mut self, size: u32, depth: usize, seconds: u64) -> f64 {
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
}

fn main() {
    let numbers: Vec<u64> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let streams = numbers.first().map_or(2, |n| usize::try_from(*n).unwrap());
    let seconds = numbers.get(1).copied().unwrap_or(2);
    let mut holder = fabric(streams);
    let remote = holder.register(pool(), Access::RemoteRead).unwrap();
    let to = holder.local_addr().unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| serve(holder, &stop));
        let mut fabric = fabric(streams);
        let local = fabric.register(pool(), Access::Local).unwrap();
        let connection = fabric.connect(&to).unwrap();
        let mut events = EventBatch::default();
        let go = |event: &FabricEvent| matches!(event, FabricEvent::Message { .. });
        while !events.events.iter().any(go) {
            fabric.poll(&mut events, WAIT).unwrap();
        }
        fabric.admit(connection).unwrap();
        let mut reader = Reader {
            fabric,
            connection,
            local,
            remote,
            posts: ReadBatch::default(),
            events: EventBatch::default(),
            cursor: 0,
        };
        for size in SIZES {
            let depth = usize::try_from((16 << 20) / size).unwrap().min(256);
            let rate = reader.measure(size, depth, seconds);
            println!(
                "{:>5} KiB x {depth:>3} outstanding, {streams} streams: {:6.2} GB/s {:9.0} READ/s",
                size >> 10,
                rate / 1e9,
                rate / f64::from(size)
            );
        }
        let one = reader.measure(SIZES[0], 1, seconds) / f64::from(SIZES[0]);
        println!("    4 KiB x   1 outstanding: {:.1} us per READ", 1e6 / one);
        stop.store(true, Ordering::Relaxed);
    });
}
