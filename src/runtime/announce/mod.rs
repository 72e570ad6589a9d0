//! The announcer: keeps the owner registry informed of what this node holds.
//!
//! [`crate::registry::announcing`] decides which call comes next and what an answer means; here are the
//! task that makes the calls, several at once, and the handle by which the node notes changes. A
//! registry that is down delays this task alone.
//!
//! Who notes a change, a data thread or the reclaimer, shares no lock with the task, nor with the runtime
//! that the task is on: the change goes through a [`Mailbox`], and what wakes the task is an event
//! counter of the kernel's. So neither waits for the other, wherever that one stops.

mod task;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::event::EventSink;
use crate::limits;
use crate::registry::announcing::Announcing;
use crate::registry::{NodeIdentity, OwnerRegistry, Registration, RegistryError};
use crate::sync::{Mailbox, Mutex, lock};
use crate::sys::eventfd::EventFd;
use crate::types::BlockKey;

pub use crate::registry::announcing::{AnnounceOptions, Residents};

/// Who wants to know how many nodes hold a block.
pub trait Hints: Send + Sync + Debug {
    /// The registry counts `owners` live owners of a block that this node announced, itself among
    /// them, at least 1.
    fn owners(&self, key: &BlockKey, owners: u32);
}

/// What an announcer works with.
#[derive(Debug, Clone)]
pub struct AnnouncerParts {
    /// The registry.
    pub registry: Arc<dyn OwnerRegistry>,
    /// This node.
    pub identity: NodeIdentity,
    /// What it holds.
    pub residents: Arc<dyn Residents>,
    /// Who hears owner counts.
    pub hints: Arc<dyn Hints>,
    /// Where events go.
    pub events: Arc<dyn EventSink>,
    /// Pace.
    pub options: AnnounceOptions,
}

/// How the announcer stands with the registry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnnouncerState {
    /// Whether the last call was answered.
    pub connected: bool,
    /// The registration, the last one while not connected.
    pub registration: Option<Registration>,
    /// Changes that wait.
    pub queued: usize,
    /// Whether all residents are being announced again, or will be.
    pub resyncing: bool,
    /// Times that all residents were announced, to the end.
    pub resyncs: u64,
    /// Times that those of some partitions were, because the registry knew other ones.
    pub repairs: u64,
    /// The last failure, also after it was overcome.
    pub last_error: Option<RegistryError>,
}

/// Why a flush ended before everything was answered. Nothing is lost: the changes stay queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlushError {
    /// The deadline passed.
    #[error("the registry has not heard of these blocks yet ({reason}); they stay queued for it")]
    TimedOut {
        /// The last failure, if any.
        reason: String,
    },
    /// The announcer ended.
    #[error("the node is shutting down")]
    Ended,
}

/// How long a flush waits before it tries again to put its mark among changes that leave no room.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(1);

/// What the announcer is told.
#[derive(Debug)]
enum Note {
    Change {
        key: BlockKey,
        resident: bool,
    },
    /// Somebody waits for the answers to all that was noted before this.
    Flush(oneshot::Sender<()>),
}

#[derive(Debug)]
struct Shared {
    notes: Mailbox<Note>,
    /// Whether a change found no room among the notes.
    lost: AtomicBool,
    /// Whether the task sleeps without a change to tell of, so that the first one has to wake it.
    idle: AtomicBool,
    running: AtomicBool,
    wake: Arc<EventFd>,
    /// Of the task and of those who look; nobody else takes it.
    state: Mutex<AnnouncerState>,
    batch: u64,
}

impl Shared {
    fn wake(&self) {
        // It fails for what is no event counter, and this is one.
        self.wake.notify().ok();
    }
}

/// Tells the announcer what changed. Clones share it.
#[derive(Debug, Clone)]
pub struct AnnouncerHandle {
    shared: Arc<Shared>,
}

impl AnnouncerHandle {
    /// The node now holds this block. Call it after the block became visible; never blocks on IO.
    pub fn resident(&self, key: BlockKey) {
        self.note(key, true);
    }

    /// The node no longer holds this block. Call it after the block became invisible; never blocks on
    /// IO. Calls for one key must come in the order in which its state changed.
    pub fn gone(&self, key: BlockKey) {
        self.note(key, false);
    }

    fn note(&self, key: BlockKey, resident: bool) {
        let shared = &self.shared;
        // Sequentially consistent, like the count: either this sees that the task is idle, or the task,
        // which says so before it looks once more, sees this change.
        let wake = match shared.notes.put(Note::Change { key, resident }) {
            Ok(1) => shared.batch == 1 || shared.idle.load(Ordering::SeqCst),
            Ok(count) => count == shared.batch,
            Err(_no_room) => !shared.lost.swap(true, Ordering::SeqCst),
        };
        if wake {
            shared.wake();
        }
    }

    /// Waits until the registry has answered everything that was queued before this call.
    ///
    /// # Errors
    /// [`FlushError`] where that takes longer than `deadline`, or the announcer ended.
    pub async fn flush(&self, deadline: Duration) -> Result<(), FlushError> {
        let (done, answered) = oneshot::channel();
        let flushed = async {
            let mut mark = Note::Flush(done);
            while let Err(back) = self.shared.notes.put(mark) {
                mark = back;
                self.shared.wake();
                tokio::time::sleep(NO_ROOM_PAUSE).await;
            }
            self.shared.wake();
            // A task that ends says so before it drops the marks that it finds.
            if !self.shared.running.load(Ordering::SeqCst) {
                return Err(FlushError::Ended);
            }
            answered.await.map_err(|_dropped| FlushError::Ended)
        };
        tokio::time::timeout(deadline, flushed).await.unwrap_or_else(|_elapsed| {
            let error = self.state().last_error;
            let passed = || format!("{deadline:?} passed");
            Err(FlushError::TimedOut { reason: error.map_or_else(passed, |it| it.to_string()) })
        })
    }

    /// How it stands with the registry.
    #[must_use]
    pub fn state(&self) -> AnnouncerState {
        let mut state = lock(&self.shared.state).clone();
        state.queued += usize::try_from(self.shared.notes.count()).unwrap_or(usize::MAX);
        state
    }
}

/// The running task. Dropping it stops the task without a word to the registry, as a crash would.
#[derive(Debug)]
pub struct Announcer {
    handle: AnnouncerHandle,
    task: JoinHandle<()>,
    stop: watch::Sender<Option<Stop>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stop {
    leave: bool,
}

impl Announcer {
    /// Starts the task on the current Tokio runtime.
    ///
    /// # Errors
    /// Where the limit on open files is reached.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn spawn(parts: AnnouncerParts) -> io::Result<Self> {
        let batch = parts.options.batch.clamp(1, limits::REGISTRY_BATCH_MAX);
        let wake = Arc::new(EventFd::new()?);
        let woken = wake.watched()?;
        let shared = Arc::new(Shared {
            notes: Mailbox::new(limits::ANNOUNCE_NOTES_MAX),
            lost: AtomicBool::new(false),
            idle: AtomicBool::new(true),
            running: AtomicBool::new(true),
            wake,
            state: Mutex::default(),
            batch: batch as u64,
        });
        let (stop, stopped) = watch::channel(None);
        let announcing = Announcing::new(&parts.identity, parts.options);
        let task = task::Task::new(parts, announcing, Arc::clone(&shared), stopped);
        let task = tokio::spawn(task.run(woken));
        Ok(Self { handle: AnnouncerHandle { shared }, task, stop })
    }

    /// The way to tell it things.
    #[must_use]
    pub fn handle(&self) -> AnnouncerHandle {
        self.handle.clone()
    }

    /// Stops. With `leave`, the registry is told to forget this node first (one call, however many
    /// blocks there are). After `deadline` the task is cut off wherever it is.
    pub async fn shutdown(mut self, leave: bool, deadline: Duration) {
        self.stop.send_replace(Some(Stop { leave }));
        if tokio::time::timeout(deadline, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}
