//! A thread of the holder that stands still.
//!
//! Symptom in the field: transfers time out while eviction runs, or while the control plane is busy.
//! Cause: they share a thread or a lock. Here each one is stopped in the middle of its work, at another
//! place each time, and while it stands whole reads go on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use kvrail::cli::cluster::Process;
use kvrail::client::{Acquired, Client};
use kvrail::limits::SILENCE_MAX;
use kvrail::protocol::door::{BlockOrigin, Source};
use kvrail::runtime::deadline::Deadline;
use kvrail::sys::thread_stop::{StoppedThread, threads_named};

use crate::support::{
    Blocks, Counts, PATIENCE, assert_at_rest, cluster, namespace, read, save, save_unannounced,
    until,
};

/// Blocks that are read: four times as many as the reader has room for.
const READ_BLOCKS: u32 = 256;
const BLOCK_BYTES: usize = 16 << 10;
const READER_POOL: &str = "1MiB";
const HOLDER_POOL: &str = "8MiB";

/// Blocks of one read.
const BATCH: usize = 16;

/// Reads while a thread stands still.
const READS: usize = 6;

struct Scene {
    holder: Process,
    reader: Client,
    blocks: Blocks,
    next: usize,
    /// Blocks that came from the holder.
    fetched: usize,
}

impl Scene {
    /// The next read, whole, from the holder for the most part.
    fn read(&mut self) {
        let at = self.next % self.blocks.len();
        self.next += BATCH;
        let (hashes, bytes) = (&self.blocks.hashes[at..at + BATCH], &self.blocks.bytes[at..]);
        let deadline = Deadline::after(PATIENCE);
        loop {
            let got = self.reader.acquire(&namespace(), hashes, Source::Anywhere).unwrap();
            let mut busy = 0;
            for (block, want) in got.iter().zip(bytes) {
                match block {
                    Acquired::Ready(held) => {
                        let mut bytes = vec![0; want.len()];
                        held.read_into(&mut bytes).unwrap();
                        assert!(bytes == *want, "other bytes than were saved");
                        self.fetched += usize::from(held.origin() == BlockOrigin::Fetched);
                    }
                    Acquired::Busy(_) => busy += 1,
                    other => panic!("{other:?}"),
                }
            }
            if busy == 0 {
                return;
            }
            assert!(deadline.pause(std::time::Duration::from_millis(5)), "busy for ever");
        }
    }

    /// Stops all threads of the holder with this name and reads meanwhile.
    fn read_amid_stop(&mut self, threads: &str) {
        let numbers = threads_named(self.holder.id(), threads).unwrap();
        assert!(!numbers.is_empty(), "no thread is named {threads}");
        let stopped: Vec<_> =
            numbers.into_iter().map(|number| StoppedThread::stop(number).unwrap()).collect();
        (0..READS).for_each(|_| self.read());
        drop(stopped);
    }
}

/// Saves into the holder until it is told to stop; counts.
fn save_on(client: &Client, stop: &AtomicBool, saved: &AtomicU64) {
    for round in 0_u32.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        save_unannounced(client, &Blocks::new(&format!("pressure {round}"), 8, BLOCK_BYTES));
        saved.fetch_add(8, Ordering::Relaxed);
    }
}

fn amid_stops(threads: &str, rounds: usize) {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let registry = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", registry, &["--pool", HOLDER_POOL]).unwrap();
    let reader = cluster.node("reader", registry, &["--pool", READER_POOL]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::new("read", READ_BLOCKS, BLOCK_BYTES);
    save(&at_holder, &blocks);
    // They stay, whatever else is saved.
    let kept = at_holder.acquire(&namespace(), &blocks.hashes, Source::Here).unwrap();
    assert!(kept.iter().all(|block| matches!(block, Acquired::Ready(_))));

    let (stop, saved, saver) =
        (AtomicBool::new(false), AtomicU64::new(0), holder.client().unwrap());
    let mut scene = Scene { holder, reader: at_reader, blocks, next: 0, fetched: 0 };
    thread::scope(|scope| {
        scope.spawn(|| save_on(&saver, &stop, &saved));
        until("the holder evicts", || !at_holder.evictions(0).unwrap().is_empty());
        for _ in 0..rounds {
            let before = saved.load(Ordering::Relaxed);
            scene.read_amid_stop(threads);
            // It goes on, so that the next stop finds it elsewhere.
            until("saves go on", || saved.load(Ordering::Relaxed) > before);
        }
        stop.store(true, Ordering::Relaxed);
    });
    let asked = rounds * READS * BATCH;
    assert!(scene.fetched > asked / 2, "{} of {asked} came from the holder", scene.fetched);
    drop(kept);
    assert_at_rest("the holder", &at_holder);
    assert_at_rest("the reader", &scene.reader);
    assert_eq!(read(&at_holder, &scene.blocks, Source::Here).failed, 0);
}

#[test]
fn a_reclaimer_that_stands_still_holds_up_no_read() {
    amid_stops("kvrail-reclaim", 40);
}

#[test]
fn control_threads_that_stand_still_hold_up_no_read() {
    amid_stops("kvrail-control", 20);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long a thread stood")]
fn reads_go_on_behind_a_poller_that_stood_still() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let registry = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", registry, &[]).unwrap();
    let reader = cluster.node("reader", registry, &[]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    // Clients of their own: calls of one client take turns.
    let beside = reader.client().unwrap();
    let mut round = 0;
    until("a read goes on behind a poller that stood for a moment", || {
        round += 1;
        let blocks = Blocks::small(&format!("behind a poller, {round}"));
        let all = Counts::all_ready(blocks.len());
        save(&at_holder, &blocks);
        let poller = threads_named(holder.id(), "kvrail-data").unwrap();
        let since = Instant::now();
        let stopped: Vec<_> =
            poller.into_iter().map(|number| StoppedThread::stop(number).unwrap()).collect();
        assert_eq!(stopped.len(), 1);
        let (counts, stood) = thread::scope(|scope| {
            let reading = scope.spawn(|| read(&at_reader, &blocks, Source::Anywhere));
            // Time for the read to be under way; it must end well also where it is not.
            (0..20).for_each(|_| drop(beside.stat().unwrap()));
            drop(stopped);
            let stood = since.elapsed();
            (reading.join().unwrap(), stood)
        });
        if counts != all {
            // This thread stood still itself, and the poller so long that its readers left it alone.
            let said = (holder.said(), reader.said());
            assert!(stood > SILENCE_MAX / 2, "{counts:?} after {stood:?}: {said:?}");
            until("it is used again", || read(&at_reader, &blocks, Source::Anywhere) == all);
        }
        counts == all
    });
    assert_at_rest("the holder", &at_holder);
}
