//! How often a process and its threads ask for heap memory.
//!
//! A binary that makes [`Counting`] its global allocator is counted; in any other process all counts
//! stay 0. A count costs one addition to a number of the thread's own and one to a number that a few
//! threads share, beside what the allocation itself costs; where nothing is allocated, as on the data
//! path, it costs nothing.
#![expect(unsafe_code, reason = "an allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Numbers that the threads of a process share; more threads than these share one.
const SHARDS: usize = 32;

/// A number on a cache line of its own, so that threads do not wait for each other.
#[repr(align(128))]
struct Shard(AtomicU64);

static PROCESS: [Shard; SHARDS] = [const { Shard(AtomicU64::new(0)) }; SHARDS];
static THREADS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    // Neither needs memory or a destructor, so that an allocation may use them at any time.
    static HERE: Cell<u64> = const { Cell::new(0) };
    static SHARD: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Allocations and reallocations of the calling thread so far.
#[must_use]
pub fn of_thread() -> u64 {
    HERE.get()
}

/// Allocations and reallocations of all threads of this process so far.
#[must_use]
pub fn of_process() -> u64 {
    PROCESS.iter().map(|shard| shard.0.load(Ordering::Relaxed)).sum()
}

fn count() {
    HERE.set(HERE.get().wrapping_add(1));
    if SHARD.get() == usize::MAX {
        SHARD.set(THREADS.fetch_add(1, Ordering::Relaxed) % SHARDS);
    }
    if let Some(shard) = PROCESS.get(SHARD.get()) {
        // A count orders nothing.
        shard.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The system's allocator, which counts what it is asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counting;

// SAFETY: all memory is the system allocator's, under the caller's own promises; the count beside it
// allocates nothing and cannot unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What unit tests ask for is counted, so that they can say of a piece of work that it asks for none.
    #[global_allocator]
    static COUNTING: Counting = Counting;

    #[test]
    fn what_is_asked_for_is_counted_where_it_was_asked() {
        let (thread, process) = (of_thread(), of_process());
        let layout = Layout::from_size_align(64, 8).unwrap();
        // SAFETY: the layout has a size.
        let memory = unsafe { Counting.alloc(layout) };
        // SAFETY: the memory has this layout, and the new size is no zero.
        let memory = unsafe { Counting.realloc(memory, layout, 128) };
        let layout = Layout::from_size_align(128, 8).unwrap();
        // SAFETY: the memory has this layout now, and is freed once.
        unsafe { Counting.dealloc(memory, layout) };
        assert_eq!(of_thread() - thread, 2);
        // Other tests are counted, too.
        assert!(of_process() - process >= 2);
        let there = std::thread::spawn(|| {
            let before = of_thread();
            drop(std::hint::black_box(Box::new(7_u64)));
            of_thread() - before
        });
        assert_eq!(there.join().unwrap(), 1, "another thread's count is its own");
    }
}
