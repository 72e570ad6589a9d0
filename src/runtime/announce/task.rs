//! The announcer's loop: it makes the calls that are due, several at once, and hands back the answers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{AnnouncerParts, Note, Shared, Stop};
use crate::event::{Event, RegistryCall};
use crate::registry::announcing::{Announcing, Answer, News, Pending};
use crate::registry::{Heartbeat, Presence, RegistryError};
use crate::runtime::clock::Clock;
use crate::sync::lock;
use crate::sys::eventfd::EventFd;
use crate::types::BlockKey;

/// Who waits until everything up to a ticket is answered.
type Waiter = (u64, oneshot::Sender<()>);

/// What others noted since it was asked for last.
struct Noted<'a> {
    shared: &'a Shared,
    waiters: &'a mut Vec<Waiter>,
}

impl News for Noted<'_> {
    fn note_in(&mut self, pending: &mut Pending) {
        // Asked first: a mark that was put in behind a change without room is behind this, too.
        if self.shared.lost.swap(false, Ordering::SeqCst) {
            pending.note_lost();
        }
        let notes = &self.shared.notes;
        let mut taken = notes.take();
        // The newest comes first.
        let noted: Vec<Note> = std::iter::from_fn(|| notes.next(&mut taken)).collect();
        for note in noted.into_iter().rev() {
            match note {
                Note::Change { key, resident } => pending.note(key, resident),
                Note::Flush(done) => self.waiters.push((pending.hurry(), done)),
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Task {
    parts: AnnouncerParts,
    announcing: Announcing,
    shared: Arc<Shared>,
    waiters: Vec<Waiter>,
    /// How it stood at the last answer; `None` before the first.
    was_connected: Option<bool>,
    stop: watch::Receiver<Option<Stop>>,
    clock: Clock,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.shared.running.store(false, Ordering::SeqCst);
        lock(&self.shared.state).connected = false;
        let mut taken = self.shared.notes.take();
        while self.shared.notes.next(&mut taken).is_some() {}
    }
}

impl Task {
    pub(super) fn new(
        parts: AnnouncerParts,
        announcing: Announcing,
        shared: Arc<Shared>,
        stop: watch::Receiver<Option<Stop>>,
    ) -> Self {
        let (waiters, was_connected) = (Vec::new(), None);
        Self { parts, announcing, shared, waiters, was_connected, stop, clock: Clock::start() }
    }

    pub(super) async fn run(mut self, woken: AsyncFd<Arc<EventFd>>) {
        let mut calls = JoinSet::new();
        loop {
            let residents = Arc::clone(&self.parts.residents);
            let mut noted = Noted { shared: &self.shared, waiters: &mut self.waiters };
            while let Some(call) =
                self.announcing.poll_call(&mut noted, residents.as_ref(), self.clock.now())
            {
                let registry = Arc::clone(&self.parts.registry);
                let node = self.parts.identity.clone();
                calls.spawn(async move { call.make(registry.as_ref(), &node).await });
            }
            self.publish();
            let idle = self.announcing.pending().is_empty();
            self.shared.idle.store(idle, Ordering::SeqCst);
            if idle && self.shared.notes.count() > 0 {
                // Noted before it could be seen that this has to be woken.
                continue;
            }
            let now = self.clock.now();
            let wake = self.announcing.next_wake(now);
            tokio::select! {
                changed = self.stop.changed() => {
                    let stop = *self.stop.borrow();
                    if changed.is_err() || stop.is_some() {
                        self.leave(stop).await;
                        return;
                    }
                }
                Some(done) = calls.join_next() => match done {
                    Ok(answer) => self.handle(&answer),
                    // It panicked, and says no more which call it was.
                    Err(_panicked) => {
                        calls.abort_all();
                        self.announcing.handle_loss(self.clock.now());
                    }
                },
                ready = woken.readable() => if let Ok(mut ready) = ready {
                    // It fails for what is no event counter, and this is one.
                    self.shared.wake.drain().ok();
                    ready.clear_ready();
                },
                () = sleep(wake.since(now)) => {}
            }
        }
    }

    fn handle(&mut self, answer: &Answer) {
        let call = match answer {
            Answer::Heartbeat(_) => RegistryCall::Heartbeat,
            Answer::Announce { .. } => RegistryCall::Announce,
            Answer::Withdraw { .. } | Answer::Forget { .. } => RegistryCall::Withdraw,
        };
        let AnnouncerParts { hints, events, .. } = &self.parts;
        events.emit(match answer.error() {
            None => Event::RegistryAnswered { call },
            Some(error) => {
                lock(&self.shared.state).last_error = Some(error.clone());
                Event::RegistryFailed { call }
            }
        });
        let mut hint = |key: &BlockKey, owners| {
            hints.owners(key, owners);
            events.emit(Event::OwnersSeen { owners });
        };
        let now = self.clock.now();
        self.announcing.handle_answer(answer, &mut hint, now);
        self.log_turn(answer.error());
    }

    /// Says when the registry is lost, and when it is there again: nothing else tells a person why peers
    /// find nothing of this node.
    fn log_turn(&mut self, error: Option<&RegistryError>) {
        let connected = self.announcing.is_connected();
        let before = self.was_connected.replace(connected);
        match (before, error) {
            (Some(true) | None, Some(error)) if !connected => tracing::warn!(
                %error,
                "without the registry: what is here is served on, and announced when it answers"
            ),
            (Some(false), None) if connected => tracing::info!("the registry answers again"),
            _ => {}
        }
    }

    /// Tells those who look, then those who wait: who waited sees the state that ended the wait.
    fn publish(&mut self) {
        let pending = self.announcing.pending();
        let (resyncs, repairs) = self.announcing.resyncs();
        let mut state = lock(&self.shared.state);
        state.connected = self.announcing.is_connected();
        state.registration = self.announcing.registration();
        state.resyncing = self.announcing.is_resyncing() || pending.is_dirty();
        state.queued = pending.len();
        (state.resyncs, state.repairs) = (resyncs, repairs);
        drop(state);
        let answered = pending.answered();
        for (_, done) in self.waiters.extract_if(.., |(ticket, _)| *ticket <= answered) {
            // One that does not wait any more needs no answer.
            done.send(()).ok();
        }
    }

    async fn leave(&self, stop: Option<Stop>) {
        if self.announcing.registration().is_none() || stop != Some(Stop { leave: true }) {
            return;
        }
        let heartbeat = Heartbeat { presence: Presence::Leaving, ..Heartbeat::default() };
        let registry = Arc::clone(&self.parts.registry);
        let call = RegistryCall::Heartbeat;
        let event = match registry.heartbeat(&self.parts.identity, heartbeat).await {
            Ok(_left) => Event::RegistryAnswered { call },
            Err(_unheard) => Event::RegistryFailed { call },
        };
        self.parts.events.emit(event);
    }
}
