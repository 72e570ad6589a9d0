//! The synchronisation primitives that the cores use: `std`'s, or loom's under `--cfg loom`, so that
//! a model checks the code that ships.

#[cfg(loom)]
pub(crate) use loom::sync::{Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Mutex, MutexGuard};

use std::sync::PoisonError;

/// Locks, also after a holder of the lock panicked: every structure behind a lock here is whole
/// between any two statements that can panic, and a node that stops serving because one thread died
/// would be worse.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
