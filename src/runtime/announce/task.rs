//! The announcer's loop: one call at a time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::pending::Change;
use super::{AnnouncerParts, Progress, Shared, Stop};
use crate::event::{Event, RegistryCall};
use crate::registry::{Batch, Heartbeat, Presence, Registration, RegistryEpoch, RegistryError};
use crate::sync::lock;
use crate::types::BlockKey;

/// How far the pace of a resync may lag behind before the lag is forgiven.
const PACE_SLACK: Duration = Duration::from_millis(20);

/// All residents are being announced.
#[derive(Debug)]
struct Resync {
    cursor: u32,
    next: Instant,
}

#[derive(Debug)]
pub(super) struct Task {
    parts: AnnouncerParts,
    shared: Arc<Shared>,
    stop: watch::Receiver<Option<Stop>>,
    /// The last registration; `None` before the first.
    registration: Option<Registration>,
    connected: bool,
    /// When the next heartbeat is due; while not connected, when the next attempt is.
    beat_at: Instant,
    /// When the changes that wait are sent at the latest.
    batch_at: Option<Instant>,
    resync: Option<Resync>,
    sequence: u64,
    failures: u32,
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
        shared: Arc<Shared>,
        stop: watch::Receiver<Option<Stop>>,
    ) -> Self {
        Self {
            parts,
            shared,
            stop,
            registration: None,
            connected: false,
            beat_at: Instant::now(),
            batch_at: None,
            resync: None,
            sequence: 0,
            failures: 0,
        }
    }

    pub(super) async fn run(mut self) {
        loop {
            let dirty = lock(&self.shared.pending).is_dirty();
            if Instant::now() >= self.beat_at || (self.connected && dirty) {
                self.beat().await;
            }
            if self.connected && self.batch_is_due() {
                self.send_changes().await;
            }
            if self.connected && self.resync_is_due() {
                self.announce_residents().await;
            }
            self.publish();
            let until = self.next_wake();
            tokio::select! {
                changed = self.stop.changed() => {
                    let stop = *self.stop.borrow();
                    if changed.is_err() || stop.is_some() {
                        self.leave(stop).await;
                        return;
                    }
                }
                () = self.shared.wake.notified() => {}
                () = sleep_until(until) => {}
            }
        }
    }

    fn next_wake(&mut self) -> Instant {
        if !self.connected {
            return self.beat_at;
        }
        if self.batch_is_due() {
            return Instant::now();
        }
        let resync = self.resync.as_ref().map(|resync| resync.next);
        let others = [self.batch_at, resync].into_iter().flatten();
        others.fold(self.beat_at, Instant::min)
    }

    fn batch_is_due(&mut self) -> bool {
        let pending = lock(&self.shared.pending);
        if pending.len() == 0 {
            self.batch_at = None;
            return false;
        }
        let now = Instant::now();
        let at = *self.batch_at.get_or_insert(now + self.parts.options.flush_interval);
        now >= at || pending.len() >= self.shared.batch || pending.in_a_hurry()
    }

    fn resync_is_due(&self) -> bool {
        let resync = self.resync.as_ref();
        resync.is_some_and(|resync| resync.next <= Instant::now())
    }

    async fn beat(&mut self) {
        let afresh = self.registration.is_none() || lock(&self.shared.pending).is_dirty();
        let heartbeat = Heartbeat {
            presence: if afresh { Presence::Afresh } else { Presence::Here },
            load: self.parts.residents.load(),
        };
        let registry = Arc::clone(&self.parts.registry);
        match registry.heartbeat(&self.parts.identity, heartbeat).await {
            Ok(registration) => self.registered(registration),
            Err(error) => self.failed(RegistryCall::Heartbeat, &error),
        }
    }

    fn registered(&mut self, registration: Registration) {
        self.emit_answered(RegistryCall::Heartbeat);
        let interval = self.parts.options.heartbeat_interval;
        self.beat_at = Instant::now() + interval.min(registration.lease / 3);
        self.connected = true;
        if self.registration != Some(registration) {
            self.registration = Some(registration);
            // Changes count from here on, and the listing begins after this: a change is in one or
            // the other.
            lock(&self.shared.pending).begin_resync();
            self.resync = Some(Resync { cursor: 0, next: Instant::now() });
        } else if self.resync.is_none() && lock(&self.shared.pending).len() == 0 {
            self.failures = 0;
        }
    }

    /// Backs off. Only a registry that does not know us is asked again at once, and only once.
    fn failed(&mut self, call: RegistryCall, error: &RegistryError) {
        self.parts.events.emit(Event::RegistryFailed { call });
        let (first, longest) = self.parts.options.backoff;
        let pause = first.saturating_mul(1 << self.failures.min(16)).min(longest);
        let at_once = *error == RegistryError::UnknownNode && self.failures == 0;
        let pause = if at_once { Duration::ZERO } else { pause };
        self.failures = self.failures.saturating_add(1);
        self.connected = false;
        self.beat_at = Instant::now() + pause;
        lock(&self.shared.state).last_error = Some(error.to_string());
    }

    fn emit_answered(&self, call: RegistryCall) {
        self.parts.events.emit(Event::RegistryAnswered { call });
    }

    /// A registry of another start answered: it will not know us; find out now.
    fn check_epoch(&mut self, epoch: RegistryEpoch) {
        if self.registration.is_some_and(|known| known.registry != epoch) {
            self.beat_at = Instant::now();
        }
    }

    async fn send_changes(&mut self) {
        self.batch_at = None;
        let batch = lock(&self.shared.pending).take(self.shared.batch);
        let (mut announce, mut withdraw): (Vec<_>, Vec<_>) =
            batch.into_iter().partition(|change| change.resident);
        let keys = |changes: &[Change]| changes.iter().map(|c| c.key).collect::<Vec<_>>();
        if announce.is_empty() || self.announce(&keys(&announce)).await {
            announce.clear();
        }
        if self.connected && (withdraw.is_empty() || self.withdraw(&keys(&withdraw)).await) {
            withdraw.clear();
        }
        announce.append(&mut withdraw);
        announce.sort_unstable_by_key(Change::ticket);
        lock(&self.shared.pending).settle(&announce);
    }

    async fn announce(&mut self, keys: &[BlockKey]) -> bool {
        let registry = Arc::clone(&self.parts.registry);
        let answer = registry.announce(self.batch(keys)).await;
        match answer {
            Ok(answer) => {
                self.emit_answered(RegistryCall::Announce);
                self.failures = 0;
                for (key, owners) in keys.iter().zip(answer.owners).filter(|(_, n)| *n > 0) {
                    self.parts.hints.owners(key, owners);
                    self.parts.events.emit(Event::OwnersSeen { owners });
                }
                self.check_epoch(answer.registry);
                true
            }
            Err(error) => {
                self.failed(RegistryCall::Announce, &error);
                false
            }
        }
    }

    async fn withdraw(&mut self, keys: &[BlockKey]) -> bool {
        let registry = Arc::clone(&self.parts.registry);
        let answer = registry.withdraw(self.batch(keys)).await;
        match answer {
            Ok(answer) => {
                self.emit_answered(RegistryCall::Withdraw);
                self.failures = 0;
                self.check_epoch(answer.registry);
                true
            }
            Err(error) => {
                self.failed(RegistryCall::Withdraw, &error);
                false
            }
        }
    }

    fn batch<'a>(&mut self, keys: &'a [BlockKey]) -> Batch<'a> {
        self.sequence += 1;
        Batch {
            node: self.parts.identity.node,
            epoch: self.parts.identity.epoch,
            registration: self.registration.map_or(0, |known| known.number),
            sequence: self.sequence,
            keys,
        }
    }

    /// One step of a resync. The listing is true when it is taken, and a change that comes after it is
    /// sent after it, because this task sends one call at a time.
    async fn announce_residents(&mut self) {
        let Some(mut resync) = self.resync.take() else {
            return;
        };
        let mut keys = Vec::with_capacity(self.shared.batch);
        let residents = Arc::clone(&self.parts.residents);
        let next = residents.list(resync.cursor, self.shared.batch, &mut keys);
        for chunk in keys.chunks(self.shared.batch) {
            if !self.announce(chunk).await {
                // The same place is listed again later.
                self.resync = Some(resync);
                return;
            }
        }
        let Some(cursor) = next else {
            lock(&self.shared.pending).end_resync();
            lock(&self.shared.state).resyncs += 1;
            return;
        };
        let count = u32::try_from(keys.len()).unwrap_or(u32::MAX).max(1);
        let cost = Duration::from_secs(1) * count / self.parts.options.resync_rate.max(1);
        resync.cursor = cursor;
        let now = Instant::now();
        resync.next = resync.next.max(now.checked_sub(PACE_SLACK).unwrap_or(now)) + cost;
        self.resync = Some(resync);
    }

    /// Tells those who look, then those who wait: who waited sees the state that ended the wait.
    fn publish(&self) {
        let mut state = lock(&self.shared.state);
        state.connected = self.connected;
        state.registration = self.registration;
        state.resyncing = self.resync.is_some() || self.registration.is_none();
        drop(state);
        let answered = lock(&self.shared.pending).answered();
        self.shared.progress.send_if_modified(|progress: &mut Progress| {
            let moved = progress.answered != answered;
            progress.answered = answered;
            moved
        });
    }

    async fn leave(&self, stop: Option<Stop>) {
        if self.registration.is_none() || stop != Some(Stop { leave: true }) {
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
