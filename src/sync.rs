//! The synchronisation primitives that the cores use: `std`'s, or a model checker's (`--cfg loom`,
//! `--cfg shuttle`), so that a model checks the code that ships.

mod fault;
mod free;
mod mailbox;

pub(crate) use fault::fault_switch;
pub(crate) use free::FreeStack;
pub(crate) use mailbox::{Mailbox, Taken};

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(shuttle)]
use shuttle::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(any(loom, shuttle)))]
use std::sync::atomic::{AtomicU64, Ordering};

use std::ops::Range;
use std::sync::{PoisonError, TryLockError};

/// Locks, also after a holder of the lock panicked: every structure behind a lock here is whole
/// between any two statements that can panic, and a node that stops serving because one thread died
/// would be worse.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks as [`lock`] does where nobody else has the lock; does not wait.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A 64-bit word that threads share without a lock.
pub(crate) type Cell = AtomicU64;

/// How cells are used.
///
/// Loads, exchanges and additions are sequentially consistent: all threads agree on one order of
/// all of them, which is the order that proofs argue in. [`Shared::publish`] is weaker, and enough
/// for what is written before a word makes it visible: whoever reads what was published sees all
/// that its writer did before.
pub(crate) trait Shared {
    fn get(&self) -> u64;

    fn publish(&self, value: u64);

    /// Stores `value` in place of `expected`; whether that was what the cell held.
    fn replace(&self, expected: u64, value: u64) -> bool;

    /// Adds, with wrap-around, and answers the sum.
    fn add(&self, value: u64) -> u64;
}

impl Shared for Cell {
    fn get(&self) -> u64 {
        interference();
        self.load(Ordering::SeqCst)
    }

    fn publish(&self, value: u64) {
        interference();
        self.store(value, Ordering::Release);
    }

    fn replace(&self, expected: u64, value: u64) -> bool {
        interference();
        let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
        self.compare_exchange(expected, value, success, failure).is_ok()
    }

    fn add(&self, value: u64) -> u64 {
        interference();
        self.fetch_add(value, Ordering::SeqCst).wrapping_add(value)
    }
}

/// Cells of zeros. Memory that nobody writes to stays untouched, and costs nothing.
#[cfg(not(any(loom, shuttle)))]
pub(crate) fn zeroed(count: usize) -> Box<[Cell]> {
    bytemuck::zeroed_slice_box(count)
}

/// The model checkers' cells have to be made one by one.
#[cfg(any(loom, shuttle))]
pub(crate) fn zeroed(count: usize) -> Box<[Cell]> {
    (0..count).map(|_| Cell::new(0)).collect()
}

const LINE_CELLS: usize = 8;

/// Groups of `N` cells, zeros at first. Groups of 8, 16 and so on are whole cache lines.
pub(crate) struct Groups<const N: usize> {
    cells: Box<[Cell]>,
    /// The first cell of a line: an allocation of this size is not aligned to lines by itself.
    start: usize,
    count: usize,
}

impl<const N: usize> Groups<N> {
    pub(crate) fn zeroed(count: usize) -> Self {
        let cells = zeroed(count * N + LINE_CELLS);
        let first = cells.as_ptr().addr() / size_of::<u64>();
        // A model checker's cells are larger, and nobody measures them.
        let start = first.next_multiple_of(LINE_CELLS) - first;
        Self { cells, start, count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Where they lie.
    pub(crate) fn addresses(&self) -> Range<*const u8> {
        let Range { start, end } = self.cells.as_ptr_range();
        start.cast()..end.cast()
    }

    pub(crate) fn get(&self, at: usize) -> Option<&[Cell; N]> {
        if at >= self.count {
            return None;
        }
        self.cells.get(self.start + at * N..)?.first_chunk()
    }
}

/// Something that threads write, kept off the cache lines of its neighbours (two lines, because
/// processors fetch them in pairs).
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub(crate) T);

impl<T> std::ops::Deref for Apart<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[cfg(not(test))]
fn interference() {}

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::thread;
#[cfg(all(test, not(shuttle)))]
pub(crate) use std::thread;

#[cfg(test)]
use chaos::interference;
#[cfg(test)]
#[cfg(not(shuttle))]
pub(crate) use chaos::suspend;
#[cfg(test)]
pub(crate) use chaos::{limit_accesses, park_at, set as set_interference};

/// Lets other threads run between any two accesses to shared cells, so that the rare interleavings
/// of a test on real threads are not rare.
#[cfg(test)]
mod chaos {
    use std::cell::{Cell, RefCell};
    use std::sync::mpsc::{Receiver, Sender};

    /// Accesses left, whom to tell, and whom to wait for.
    type Park = (u32, Sender<()>, Receiver<()>);

    thread_local! {
        static STATE: Cell<u64> = const { Cell::new(0) };
        static LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
        static PARK: RefCell<Option<Park>> = const { RefCell::new(None) };
        static SUSPEND: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
    }

    /// From now on this thread gives way at one access in twelve; never where the seed is 0.
    pub(crate) fn set(seed: u64) {
        STATE.set(seed);
    }

    /// From now on this thread panics after so many accesses: an operation has lost its way.
    pub(crate) fn limit_accesses(accesses: u64) {
        LEFT.set(accesses);
    }

    /// At its access with this number from now on, this thread says so and stops, until it hears
    /// something or nobody is there any more to say it.
    pub(crate) fn park_at(access: u32, parked: Sender<()>, resume: Receiver<()>) {
        PARK.set(Some((access, parked, resume)));
    }

    /// From now on this thread, if it gives way now and then, calls `until` at one access in two
    /// thousand: it stands still for as long as that takes.
    #[cfg(not(shuttle))]
    pub(crate) fn suspend(until: impl Fn() + 'static) {
        SUSPEND.set(Some(Box::new(until)));
    }

    fn park() {
        let due = PARK.with_borrow_mut(|park| match park {
            Some((0, ..)) => park.take(),
            Some((left, ..)) => {
                *left -= 1;
                None
            }
            None => None,
        });
        if let Some((_, parked, resume)) = due {
            parked.send(()).ok();
            resume.recv().ok();
        }
    }

    pub(super) fn interference() {
        let left = LEFT.get();
        // What is dropped on the way out of here may have its accesses.
        LEFT.set(left.checked_sub(1).unwrap_or(u64::MAX));
        assert!(left > 0, "this does not come to an end");
        park();
        let mut state = STATE.get();
        if state == 0 {
            return;
        }
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        STATE.set(state);
        if (state >> 11).is_multiple_of(12) {
            super::thread::yield_now();
        }
        if (state >> 20).is_multiple_of(2_000) {
            SUSPEND.with_borrow(|until| until.iter().for_each(|until| until()));
        }
    }
}
