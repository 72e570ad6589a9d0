//! The reclaimer: a thread of its own that keeps memory free before anyone has to wait for it.
//!
//! It holds nothing that lending, polling, the handshake or the registry needs. Each step takes a bounded
//! number of victims from the store, which has no lock, and hands over what follows from that through
//! mailboxes, which have none either: their memory to the pool, their keys to the announcer. So a
//! reclaimer that stops anywhere, for however long, stops nobody; what it does not free is taken by those
//! who reserve, a bounded number of victims at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::Duration;

/// The name of the reclaimer's thread.
pub const RECLAIM_THREAD: &str = "kvrail-reclaim";

/// What a step of reclaim found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaimed {
    /// Memory came free and there is more to do.
    Some,
    /// There is enough free memory.
    Enough,
    /// More is needed and every resident is pinned.
    Stuck,
}

/// What the reclaimer drives.
pub trait Reclaim: Send + Sync + 'static {
    /// Takes a bounded number of victims, if memory is short.
    fn reclaim(&self) -> Reclaimed;
}

/// How long an idle reclaimer sleeps where nobody wakes it.
const IDLE: Duration = Duration::from_secs(1);

/// How long a stuck one waits for pins to go before it looks again.
const STUCK: Duration = Duration::from_millis(20);

/// Wakes the reclaimer. Cheap, and never waits.
#[derive(Debug, Clone)]
pub struct ReclaimWaker(Thread);

impl ReclaimWaker {
    /// Memory is getting short.
    pub fn wake(&self) {
        self.0.unpark();
    }
}

/// The reclaimer's thread. Dropping it stops the thread.
#[derive(Debug)]
pub struct Reclaimer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reclaimer {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where the system refuses a thread.
    pub fn spawn(reclaim: Arc<impl Reclaim>) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name(RECLAIM_THREAD.into()).spawn(move || {
            // Relaxed: the flag carries no data, and unparking orders enough to see it in time.
            while !stopping.load(Ordering::Relaxed) {
                match reclaim.reclaim() {
                    Reclaimed::Some => {}
                    Reclaimed::Enough => std::thread::park_timeout(IDLE),
                    Reclaimed::Stuck => std::thread::park_timeout(STUCK),
                }
            }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// A handle that wakes it.
    #[must_use]
    pub fn waker(&self) -> Option<ReclaimWaker> {
        self.thread.as_ref().map(|thread| ReclaimWaker(thread.thread().clone()))
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A reclaimer that panicked has been reported by the panic itself.
            drop(thread.join());
        }
    }
}
