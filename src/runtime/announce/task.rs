//! The announcer's loop: it makes the calls that are due, several at once, and hands back the answers.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{AnnouncerParts, Progress, Shared, Stop};
use crate::event::{Event, RegistryCall};
use crate::registry::announcing::{Announcing, Call};
use crate::registry::{
    Announced, Batch, Beat, Heartbeat, NodeIdentity, OwnerRegistry, Presence, RegistryError, Stamp,
    Withdrawn,
};
use crate::runtime::clock::Clock;
use crate::sync::lock;
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
                calls.spawn(make(registry, self.parts.identity.clone(), call));
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
                    Ok(done) => self.handle(done),
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

    fn handle(&mut self, done: Done) {
        let (pending, now) = (&self.shared.pending, self.clock.now());
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
                self.announcing.handle_beat(answer.as_ref(), pending, now);
            }
            Done::Announce(stamp, keys, answer) => {
                let owners = answer.iter().flat_map(|answer| &answer.owners);
                let counted = keys.iter().zip(owners).filter(|(_, owners)| **owners > 0);
                counted.for_each(|(key, owners)| self.hint(key, *owners));
                let answer = answer.as_ref().map(|answer| (answer, keys.as_slice()));
                self.announcing.handle_announced(stamp, answer, pending, now);
            }
            Done::Withdraw(stamp, answer) => {
                let answer = answer.as_ref().map(|answer| Some(answer.registry));
                self.announcing.handle_withdrawn(stamp, answer, pending, now);
            }
            Done::Forget(stamp, answer) => {
                let answer = answer.as_ref().map(|()| None);
                self.announcing.handle_withdrawn(stamp, answer, pending, now);
            }
        }
    }

    fn hint(&self, key: &BlockKey, owners: u32) {
        self.parts.hints.owners(key, owners);
        self.parts.events.emit(Event::OwnersSeen { owners });
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
