//! The announcer's loop: it makes the calls that are due, several at once, and hands back the answers.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{AnnouncerParts, Progress, Shared, Stop};
use crate::event::{Event, RegistryCall};
use crate::registry::announcing::{Announcing, Answer};
use crate::registry::{Heartbeat, Presence};
use crate::runtime::clock::Clock;
use crate::sync::lock;
use crate::types::BlockKey;

#[derive(Debug)]
pub(super) struct Task {
    parts: AnnouncerParts,
    announcing: Announcing,
    shared: Arc<Shared>,
    stop: watch::Receiver<Option<Stop>>,
    clock: Clock,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.shared.progress.send_modify(|progress| progress.running = false);
        lock(&self.shared.state).connected = false;
    }
}

impl Task {
    pub(super) fn new(
        parts: AnnouncerParts,
        announcing: Announcing,
        shared: Arc<Shared>,
        stop: watch::Receiver<Option<Stop>>,
    ) -> Self {
        Self { parts, announcing, shared, stop, clock: Clock::start() }
    }

    pub(super) async fn run(mut self) {
        let mut calls = JoinSet::new();
        loop {
            let residents = Arc::clone(&self.parts.residents);
            while let Some(call) = self.announcing.poll_call(
                &self.shared.pending,
                residents.as_ref(),
                self.clock.now(),
            ) {
                let registry = Arc::clone(&self.parts.registry);
                let node = self.parts.identity.clone();
                calls.spawn(async move { call.make(registry.as_ref(), &node).await });
            }
            self.publish();
            let now = self.clock.now();
            let wake = self.announcing.next_wake(&self.shared.pending, now);
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
                        self.announcing.handle_loss(&self.shared.pending, self.clock.now());
                    }
                },
                () = self.shared.wake.notified() => {}
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
                lock(&self.shared.state).last_error = Some(error.to_string());
                Event::RegistryFailed { call }
            }
        });
        let mut hint = |key: &BlockKey, owners| {
            hints.owners(key, owners);
            events.emit(Event::OwnersSeen { owners });
        };
        let now = self.clock.now();
        self.announcing.handle_answer(answer, &self.shared.pending, &mut hint, now);
    }

    /// Tells those who look, then those who wait: who waited sees the state that ended the wait.
    fn publish(&self) {
        let (resyncs, repairs) = self.announcing.resyncs();
        let mut state = lock(&self.shared.state);
        state.connected = self.announcing.is_connected();
        state.registration = self.announcing.registration();
        state.resyncing = self.announcing.is_resyncing();
        (state.resyncs, state.repairs) = (resyncs, repairs);
        drop(state);
        let answered = lock(&self.shared.pending).answered();
        self.shared.progress.send_if_modified(|progress: &mut Progress| {
            let moved = progress.answered != answered;
            progress.answered = answered;
            moved
        });
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
