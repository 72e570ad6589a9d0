//! The announcer's loop: it makes the calls that are due, several at once, and hands back the answers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{AnnouncerParts, Note, Shared, Stop};
use crate::event::{Event, RegistryCall};
use crate::registry::announcing::{Announcing, Call, News, Pending};
use crate::registry::{
    Announced, Batch, Beat, Heartbeat, NodeIdentity, OwnerRegistry, Presence, RegistryError, Stamp,
    Withdrawn,
};
use crate::runtime::clock::Clock;
use crate::sync::lock;
use crate::sys::eventfd::EventFd;
use crate::types::BlockKey;

/// A call that ended.
#[derive(Debug)]
enum Done {
    Heartbeat(Result<Beat, RegistryError>),
    Announce(Stamp, Vec<BlockKey>, Result<Announced, RegistryError>),
    Withdraw(Stamp, Result<Withdrawn, RegistryError>),
    Forget(Stamp, Result<(), RegistryError>),
}

async fn make(registry: Arc<dyn OwnerRegistry>, node: NodeIdentity, call: Call) -> Done {
    match call {
        Call::Heartbeat { presence, load, digests } => {
            let heartbeat = Heartbeat { presence, load, digests: &digests };
            Done::Heartbeat(registry.heartbeat(&node, heartbeat).await)
        }
        Call::Announce { stamp, keys } => {
            let answer = registry.announce(Batch { stamp, keys: &keys }).await;
            Done::Announce(stamp, keys, answer)
        }
        Call::Withdraw { stamp, keys } => {
            let answer = registry.withdraw(Batch { stamp, keys: &keys }).await;
            Done::Withdraw(stamp, answer)
        }
        Call::Forget { stamp, partition } => {
            Done::Forget(stamp, registry.forget(stamp, partition).await)
        }
    }
}

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
        Self { parts, announcing, shared, waiters: Vec::new(), stop, clock: Clock::start() }
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
                calls.spawn(make(registry, self.parts.identity.clone(), call));
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
                    Ok(done) => self.handle(done),
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

    fn handle(&mut self, done: Done) {
        let now = self.clock.now();
        let (call, error) = match &done {
            Done::Heartbeat(answer) => (RegistryCall::Heartbeat, answer.as_ref().err()),
            Done::Announce(_, _, answer) => (RegistryCall::Announce, answer.as_ref().err()),
            Done::Withdraw(_, answer) => (RegistryCall::Withdraw, answer.as_ref().err()),
            Done::Forget(_, answer) => (RegistryCall::Withdraw, answer.as_ref().err()),
        };
        self.parts.events.emit(match error {
            None => Event::RegistryAnswered { call },
            Some(error) => {
                lock(&self.shared.state).last_error = Some(error.to_string());
                Event::RegistryFailed { call }
            }
        });
        match &done {
            Done::Heartbeat(answer) => {
                let sole = answer.iter().flat_map(|beat| &beat.sole);
                sole.for_each(|key| self.hint(key, 1));
                self.announcing.handle_beat(answer.as_ref(), now);
            }
            Done::Announce(stamp, keys, answer) => {
                let owners = answer.iter().flat_map(|answer| &answer.owners);
                let counted = keys.iter().zip(owners).filter(|(_, owners)| **owners > 0);
                counted.for_each(|(key, owners)| self.hint(key, *owners));
                let answer = answer.as_ref().map(|answer| (answer, keys.as_slice()));
                self.announcing.handle_announced(stamp, answer, now);
            }
            Done::Withdraw(stamp, answer) => {
                let answer = answer.as_ref().map(|answer| Some(answer.registry));
                self.announcing.handle_withdrawn(stamp, answer, now);
            }
            Done::Forget(stamp, answer) => {
                let answer = answer.as_ref().map(|()| None);
                self.announcing.handle_withdrawn(stamp, answer, now);
            }
        }
    }

    fn hint(&self, key: &BlockKey, owners: u32) {
        self.parts.hints.owners(key, owners);
        self.parts.events.emit(Event::OwnersSeen { owners });
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
