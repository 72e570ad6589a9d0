//! READ throughput of the shm fabric beside a plain `memcpy` of the same sizes, in one run.
//!
//! `cargo bench --bench shm_read`, optionally followed by `-- MILLISECONDS ROUNDS`. The pools are
//! larger than the caches. Each round measures memcpy and READ of a size one after the other, so that
//! both meet the same neighbours; the medians of the rounds are shown. `memcpy` goes from one mapped
//! memory file to another, as a READ does, and `heap` from one private buffer to another.
//!
//! Nothing here waits, so that seconds are those of the thread's processor time: what other processes
//! take of a shared machine does not count.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    unsafe_code,
    reason = "a measurement copies as memcpy does, and prints; it may panic"
)]

use std::sync::Arc;
use std::time::Duration;

use kvrail::fabric::{
    Access, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent, ReadBatch, ReadWork,
    Region, RegisteredSpan, WrId,
};
use kvrail::memory::Mapping;
use kvrail::shm::{ShmConfig, ShmFabric, ShmName};
use rustix::time::{ClockId, clock_gettime};

const POOL_BYTES: u64 = 256 << 20;
const SIZES: [u32; 7] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20];

fn pool() -> Arc<Mapping> {
    let pool = Mapping::anonymous("kvrail-bench", POOL_BYTES).unwrap();
    let page = [7; 4096];
    for offset in (0..POOL_BYTES).step_by(page.len()) {
        pool.write(offset, &page).unwrap();
    }
    Arc::new(pool)
}

/// Processor time that a thread has taken since this was made.
struct Watch(Duration);

impl Watch {
    fn start() -> Self {
        Self(processor_time())
    }

    fn elapsed(&self) -> Duration {
        processor_time() - self.0
    }
}

fn processor_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap()
}

struct Reader {
    fabric: ShmFabric,
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
            let offset = next(&mut self.cursor, size);
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
    fn measure(&mut self, size: u32, depth: usize, time: Duration) -> f64 {
        self.post(size, depth);
        let start = Watch::start();
        let mut reads = 0;
        while start.elapsed() < time {
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

/// The next place of a block, from the pool's start to its end and again.
fn next(cursor: &mut u64, size: u32) -> u64 {
    let offset = *cursor % (POOL_BYTES / u64::from(size)) * u64::from(size);
    *cursor += 1;
    offset
}

/// Bytes per second of `copy`, which is told where.
fn rate(size: u32, time: Duration, cursor: &mut u64, mut copy: impl FnMut(u64)) -> f64 {
    let start = Watch::start();
    let mut copies = 0;
    // As many copies between looks at the clock as a READ's poll makes.
    let burst = (256 << 10) / u64::from(size) + 1;
    while start.elapsed() < time {
        for _copy in 0..burst {
            copy(next(cursor, size));
        }
        copies += burst;
    }
    copies as f64 * f64::from(size) / start.elapsed().as_secs_f64()
}

fn memcpy(from: &Mapping, to: &Mapping, size: u32, time: Duration, cursor: &mut u64) -> f64 {
    rate(size, time, cursor, |offset| {
        let source = from.pointer(offset, size.into()).unwrap();
        let destination = to.pointer(offset, size.into()).unwrap();
        // SAFETY: both pointers are valid for `size` bytes while the mappings are borrowed, and are of
        // different mappings.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr(), destination.as_ptr(), size as usize);
        }
    })
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_unstable_by(f64::total_cmp);
    rates[rates.len() / 2]
}

fn connect(held: &Arc<Mapping>, lands: &Arc<Mapping>) -> (Reader, ShmFabric) {
    let name = ShmName::new(&format!("kvrail-bench/{}", std::process::id()));
    let config = ShmConfig { listen: Some(name.clone()), ..ShmConfig::default() };
    let mut holder = ShmFabric::new(&config).unwrap();
    let remote = holder.register(Arc::clone(held), Access::RemoteRead).unwrap();
    let mut fabric = ShmFabric::new(&ShmConfig::default()).unwrap();
    let local = fabric.register(Arc::clone(lands), Access::Local).unwrap();
    let connection = fabric.connect(&name).unwrap();
    let mut events = EventBatch::default();
    let mut is_up = false;
    while !is_up {
        events.clear();
        holder.poll(&mut events, Duration::ZERO).unwrap();
        for event in &events.events {
            if let FabricEvent::Accepted { connection } = event {
                holder.admit(*connection).unwrap();
            }
        }
        events.clear();
        fabric.poll(&mut events, Duration::ZERO).unwrap();
        is_up = events.events.iter().any(|event| matches!(event, FabricEvent::Connected { .. }));
    }
    fabric.admit(connection).unwrap();
    let (posts, cursor) = (ReadBatch::default(), 0);
    (Reader { fabric, connection, local, remote, posts, events, cursor }, holder)
}

fn main() {
    let numbers: Vec<u64> = std::env::args().filter_map(|arg| arg.parse().ok()).collect();
    let time = Duration::from_millis(numbers.first().copied().unwrap_or(200));
    let rounds = numbers.get(1).copied().unwrap_or(5);
    let (held, lands) = (pool(), pool());
    let bytes = usize::try_from(POOL_BYTES).unwrap();
    let (from, mut to) = (vec![7_u8; bytes], vec![7_u8; bytes]);
    let (mut reader, _holder) = connect(&held, &lands);
    // Once over everything, so that both ends' pages are mapped.
    reader.measure(1 << 20, 16, Duration::from_millis(300));
    let mut cursor = 0;
    memcpy(&held, &lands, 1 << 20, Duration::from_millis(300), &mut cursor);
    println!("     size   heap GB/s  memcpy GB/s  READ GB/s  READ/memcpy    us/READ");
    for size in SIZES {
        let depth = usize::try_from((16 << 20) / size).unwrap().min(256);
        let (mut heap, mut plain, mut read, mut ratio) = (vec![], vec![], vec![], vec![]);
        for _round in 0..rounds {
            let len = size as usize;
            heap.push(rate(size, time, &mut cursor, |offset| {
                let at = usize::try_from(offset).unwrap();
                to[at..at + len].copy_from_slice(&from[at..at + len]);
            }));
            plain.push(memcpy(&held, &lands, size, time, &mut cursor));
            read.push(reader.measure(size, depth, time));
            ratio.push(read[read.len() - 1] / plain[plain.len() - 1]);
        }
        let read = median(read);
        println!(
            "{:>5} KiB  {:>10.2}  {:>11.2}  {:>9.2}  {:>11.2}  {:>9.2}",
            size >> 10,
            median(heap) / 1e9,
            median(plain) / 1e9,
            read / 1e9,
            median(ratio),
            f64::from(size) / read * 1e6
        );
    }
    let one = reader.measure(SIZES[1], 1, time) / f64::from(SIZES[1]);
    println!("    4 KiB, one at a time: {:.2} us per READ", 1e6 / one);
}
