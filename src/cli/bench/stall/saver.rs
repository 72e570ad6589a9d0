//! An engine that saves into the holder without end, so that it always has to evict.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::cli::CliError;
use crate::cli::bench::pair::to_save;
use crate::client::Client;
use crate::runtime::deadline::Deadline;

/// Blocks of one save, and the pause between two: work for the reclaimer all the time, and a processor
/// left for the reads.
const BLOCKS: usize = 16;
const PAUSE: Duration = Duration::from_millis(2);

/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    saved: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Saver {
    shared: Arc<Shared>,
    watch: Client,
    thread: Option<JoinHandle<Result<(), CliError>>>,
}

impl Saver {
    pub(super) fn start(watch: Client, client: Client) -> Result<Self, CliError> {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let work = move || save(&client, &own);
        let thread = std::thread::Builder::new().name("saver".into()).spawn(work);
        Ok(Self { shared, watch, thread: Some(thread.map_err(CliError::failed)?) })
    }

    /// Blocks saved so far.
    pub(super) fn saved(&self) -> u64 {
        self.shared.saved.load(Ordering::Relaxed)
    }

    /// Waits until the holder has begun to evict.
    pub(super) fn wait_for_pressure(
        &self,
        within: Duration,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<(), CliError> {
        let deadline = Deadline::after(within);
        while self.watch.evictions(0)?.is_empty() && !interrupted() {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) || !deadline.pause(LOOK) {
                return Err(CliError::failed("the holder's pool does not fill"));
            }
        }
        Ok(())
    }

    pub(super) fn end(mut self) -> Result<(), CliError> {
        self.shared.stop.store(true, Ordering::Relaxed);
        match self.thread.take() {
            Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => Ok(()),
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // What went wrong before is told already.
            drop(thread.join());
        }
    }
}

fn save(client: &Client, shared: &Shared) -> Result<(), CliError> {
    let mut next = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        next = to_save(client, next, BLOCKS)?;
        shared.saved.store(next, Ordering::Relaxed);
        // The loop looks whether it is to end.
        let _more = Deadline::after(PAUSE).pause(PAUSE);
    }
    Ok(())
}
