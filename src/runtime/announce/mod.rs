//! The announcer: keeps the owner registry informed of what this node holds.
//!
//! [`crate::registry::announcing`] decides which call comes next and what an answer means; here are the
//! task that makes the calls, several at once, and the handle by which the node notes changes. A
//! registry that is down delays this task alone.

mod task;
#[cfg(test)]
mod tests;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::event::EventSink;
use crate::limits;
use crate::registry::announcing::{Announcing, Pending};
use crate::registry::{NodeIdentity, OwnerRegistry, Registration};
use crate::sync::{Mutex, lock};
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
    pub last_error: Option<String>,
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

#[derive(Debug, Clone, Copy)]
struct Progress {
    answered: u64,
    running: bool,
}

#[derive(Debug)]
struct Shared {
    pending: Mutex<Pending>,
    state: Mutex<AnnouncerState>,
    wake: Notify,
    progress: watch::Sender<Progress>,
    batch: usize,
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
        let mut pending = lock(&self.shared.pending);
        let (before, was_dirty) = (pending.len(), pending.is_dirty());
        pending.note(key, resident);
        let (after, is_dirty) = (pending.len(), pending.is_dirty());
        drop(pending);
        let crossed = |bound| before < bound && after >= bound;
        if crossed(1) || crossed(self.shared.batch) || is_dirty != was_dirty {
            self.shared.wake.notify_one();
        }
    }

    /// Waits until the registry has answered everything that was queued before this call.
    ///
    /// # Errors
    /// [`FlushError`] where that takes longer than `deadline`, or the announcer ended.
    pub async fn flush(&self, deadline: Duration) -> Result<(), FlushError> {
        let target = lock(&self.shared.pending).hurry();
        self.shared.wake.notify_one();
        let mut progress = self.shared.progress.subscribe();
        let done = progress.wait_for(|now| now.answered >= target || !now.running);
        let Ok(progress) = tokio::time::timeout(deadline, done).await else {
            let reason = self.state().last_error;
            return Err(FlushError::TimedOut {
                reason: reason.unwrap_or_else(|| format!("{deadline:?} passed")),
            });
        };
        match progress {
            Ok(now) if now.answered >= target => Ok(()),
            _ => Err(FlushError::Ended),
        }
    }

    /// How it stands with the registry.
    #[must_use]
    pub fn state(&self) -> AnnouncerState {
        let (queued, dirty) = {
            let pending = lock(&self.shared.pending);
            (pending.len(), pending.is_dirty())
        };
        let mut state = lock(&self.shared.state).clone();
        state.queued = queued;
        state.resyncing |= dirty;
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
    /// # Panics
    /// Outside a Tokio runtime.
    #[must_use]
    pub fn spawn(parts: AnnouncerParts) -> Self {
        let batch = parts.options.batch.clamp(1, limits::REGISTRY_BATCH_MAX);
        let (progress, _) = watch::channel(Progress { answered: 0, running: true });
        let shared = Arc::new(Shared {
            pending: Mutex::new(Pending::new(parts.options.pending_max)),
            state: Mutex::default(),
            wake: Notify::new(),
            progress,
            batch,
        });
        let (stop, stopped) = watch::channel(None);
        let announcing = Announcing::new(&parts.identity, parts.options);
        let task = task::Task::new(parts, announcing, Arc::clone(&shared), stopped);
        Self { handle: AnnouncerHandle { shared }, task: tokio::spawn(task.run()), stop }
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
