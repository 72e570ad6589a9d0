//! How a node keeps the registry informed of what it holds: which call comes next, and what an answer
//! means. Without threads, sockets or clocks; [`crate::runtime`] makes the calls.
//!
//! - Changes wait in a bounded set, at most one per key. Several batches are under way at once, no two
//!   of them with a key in common (see [`Stamp`]).
//! - A registration that differs from the one before means that the registry knows nothing: all
//!   residents are announced again, at a paced rate, between the changes.
//! - Heartbeats carry the digests of partitions of which everything was told. No batch is under way
//!   then, so that both sides speak of the same moment. What differs is announced again.
//! - A registry that is down delays nothing here but its own calls: they back off, and the set stays.

mod calls;
mod digests;
mod drift;
mod flights;
mod partitions;
mod pending;
mod resync;

use std::fmt::Debug;
use std::time::Duration;

pub use calls::{Answer, Call};
pub use digests::Digests;
pub use pending::Pending;

use super::{
    Beat, Load, Partition, PartitionDigest, Presence, Registration, RegistryEpoch, RegistryError,
    Stamp,
};
use crate::limits;
use crate::registry::fault::{self, Fault};
use crate::registry::{Fingerprint, NodeIdentity};
use crate::types::{BlockKey, NodeEpoch, NodeId, Timestamp};
use drift::Drift;
use flights::Flights;
use pending::Change;
use resync::Resync;

/// What the node holds.
pub trait Residents: Send + Sync + Debug {
    /// Adds up to `max` resident keys to `out`, beginning at `cursor` (0 at first); returns the cursor
    /// to go on from, `None` at the end. A block that stays resident throughout is listed at least
    /// once; one that was noted as gone before is not listed.
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32>;

    /// How busy the node is, for the next heartbeat.
    fn load(&self) -> Load {
        Load::default()
    }

    /// The digest of the residents of a partition: each one's [`Fingerprint::digest`] is in it from
    /// before its note until before the note that it is gone. `None` where the node keeps none; then
    /// drift goes unnoticed.
    fn digest(&self, partition: Partition) -> Option<u64> {
        let _ = partition;
        None
    }
}

/// How the announcer paces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnnounceOptions {
    /// Between heartbeats. Default 1 s; a third of the registry's lease where that is shorter.
    pub heartbeat_interval: Duration,
    /// How long a change may wait for others to share its call. Default 20 ms.
    pub flush_interval: Duration,
    /// Hashes in one call, and what ends the wait for more. Default 1,024; at most
    /// [`limits::REGISTRY_BATCH_MAX`].
    pub batch: usize,
    /// Batches under way at once. Default 4; at most [`limits::REGISTRY_IN_FLIGHT_MAX`].
    pub in_flight: usize,
    /// Hashes per second while all residents are announced again. Default 200,000.
    pub resync_rate: u32,
    /// First and longest pause after a failure; doubles in between. Default 100 ms and 2 s.
    pub backoff: (Duration, Duration),
    /// Changes that may wait; see [`limits::ANNOUNCE_PENDING_MAX`], the default.
    pub pending_max: usize,
}

impl Default for AnnounceOptions {
    fn default() -> Self {
        Self {
            heartbeat_interval: Duration::from_secs(1),
            flush_interval: Duration::from_millis(20),
            batch: 1024,
            in_flight: 4,
            resync_rate: 200_000,
            backoff: (Duration::from_millis(100), Duration::from_secs(2)),
            pending_max: limits::ANNOUNCE_PENDING_MAX,
        }
    }
}

/// Changes that were noted elsewhere and that the [`Pending`] set does not know yet.
pub trait News {
    /// Notes them in the set, in the order in which they came.
    fn note_in(&mut self, pending: &mut Pending);
}

/// The state of one node's announcements. One owner makes the calls that [`Self::poll_call`] gives,
/// in any order of answers. Nothing here is shared: whoever changes residents hands that over as
/// [`News`], which are asked for where they have to be known.
#[derive(Debug)]
pub struct Announcing {
    /// Changes that the registry has not answered yet.
    pending: Pending,
    node: NodeId,
    epoch: NodeEpoch,
    options: AnnounceOptions,
    /// The last registration; `None` before the first.
    registration: Option<Registration>,
    connected: bool,
    /// When the next heartbeat is due; while not connected, when the next attempt is.
    beat_at: Timestamp,
    /// The digests that the heartbeat under way carries; `None` where none is under way.
    beating: Option<Vec<PartitionDigest>>,
    /// When the changes that wait are sent at the latest.
    batch_at: Option<Timestamp>,
    /// What was taken together with a batch of announces.
    withdraws: Option<Call>,
    /// Whether all changes that wait are of keys in batches under way.
    blocked: bool,
    flights: Flights,
    resync: Resync,
    drift: Drift,
    failures: u32,
}

impl Announcing {
    /// The announcements of a node that is not registered. A heartbeat is due at once.
    #[must_use]
    pub fn new(identity: &NodeIdentity, options: AnnounceOptions) -> Self {
        let batch = options.batch.clamp(1, limits::REGISTRY_BATCH_MAX);
        let in_flight = options.in_flight.clamp(1, limits::REGISTRY_IN_FLIGHT_MAX);
        Self {
            pending: Pending::new(options.pending_max),
            node: identity.node,
            epoch: identity.epoch,
            options: AnnounceOptions { batch, in_flight, ..options },
            registration: None,
            connected: false,
            beat_at: Timestamp::ZERO,
            beating: None,
            batch_at: None,
            withdraws: None,
            blocked: false,
            flights: Flights::default(),
            resync: Resync::default(),
            drift: Drift::default(),
            failures: 0,
        }
    }

    /// Whether the last call was answered.
    #[must_use]
    pub const fn is_connected(&self) -> bool {
        self.connected
    }

    /// The last registration.
    #[must_use]
    pub const fn registration(&self) -> Option<Registration> {
        self.registration
    }

    /// Whether residents are being announced again.
    #[must_use]
    pub fn is_resyncing(&self) -> bool {
        self.registration.is_none() || self.resync.is_running()
    }

    /// Times that all residents were announced to the end, and times that some partitions were.
    #[must_use]
    pub const fn resyncs(&self) -> (u64, u64) {
        self.resync.counts()
    }

    /// The changes that the registry has not answered yet.
    #[must_use]
    pub const fn pending(&self) -> &Pending {
        &self.pending
    }

    /// Asks for haste with the changes so far; the ticket up to which they have to be answered.
    pub fn hurry(&mut self) -> u64 {
        self.pending.hurry()
    }

    /// Takes note of what changed.
    pub fn handle_news(&mut self, news: &mut dyn News) {
        news.note_in(&mut self.pending);
    }

    /// The next call to make now, if any. Ask again until there is none.
    pub fn poll_call(
        &mut self,
        news: &mut dyn News,
        residents: &dyn Residents,
        now: Timestamp,
    ) -> Option<Call> {
        self.handle_news(news);
        if self.beating.is_some() {
            return None;
        }
        if let Some(withdraws) = self.withdraws.take() {
            return Some(withdraws);
        }
        let dirty = self.pending.is_dirty();
        if now >= self.beat_at || (self.connected && dirty) {
            // With batches under way the digests would be of no one moment.
            if self.flights.is_empty() || fault::is(Fault::DigestsAmidBatches) {
                return Some(self.beat(news, residents, dirty));
            }
            let late = self.connected && !dirty && now >= self.beat_at + self.grace();
            return late.then(|| self.heartbeat(Presence::Here, residents, Vec::new()));
        }
        if !self.connected {
            return None;
        }
        if self.flights.len() >= self.options.in_flight || self.resync.is_forgetting() {
            return None;
        }
        if let Some(call) = self.changes(now) {
            return Some(call);
        }
        self.residents(residents, now)
    }

    /// When [`Self::poll_call`] may give a call without an answer or a note coming first.
    pub fn next_wake(&mut self, now: Timestamp) -> Timestamp {
        let never = now + Duration::from_secs(3600);
        let quiet = self.flights.is_empty();
        let waits = !self.connected || self.pending.is_dirty();
        if self.beating.is_some() || (waits && !quiet) {
            return never;
        }
        let beat_at = if quiet { self.beat_at } else { self.beat_at + self.grace() };
        if !self.connected || now >= self.beat_at || self.flights.len() >= self.options.in_flight {
            return beat_at;
        }
        // What cannot begin before a batch under way ends is begun when that one is answered.
        let due = !self.blocked && self.batch_is_due(now);
        let batch = if due { Some(now) } else { self.batch_at.filter(|_| !self.blocked) };
        let free = quiet || self.resync.to_forget().is_none();
        let resync = self.resync.next().filter(|_| free && !self.resync.is_forgetting());
        batch.into_iter().chain(resync).fold(self.beat_at, Timestamp::min)
    }

    /// The answer to a call. `hint` hears of owner counts: a block that this node announced, and how
    /// many live owners it has, this node among them.
    pub fn handle_answer(
        &mut self,
        answer: &Answer,
        hint: &mut dyn FnMut(&BlockKey, u32),
        now: Timestamp,
    ) {
        match answer {
            Answer::Heartbeat(Ok(beat)) => {
                beat.sole.iter().for_each(|key| hint(key, 1));
                self.handle_beat(beat, now);
            }
            Answer::Heartbeat(Err(error)) => {
                self.beating = None;
                self.failed(error, now);
            }
            Answer::Announce { stamp, keys, result } => {
                for (key, owners) in keys.iter().zip(result.iter().flat_map(|told| &told.owners)) {
                    if *owners > 0 {
                        hint(key, *owners);
                    } else {
                        self.drift.refuse(Fingerprint::of(key).partition());
                    }
                }
                let epoch = result.as_ref().map(|announced| Some(announced.registry));
                self.ended(stamp, epoch, now);
            }
            Answer::Withdraw { stamp, result } => {
                let epoch = result.as_ref().map(|withdrawn| Some(withdrawn.registry));
                self.ended(stamp, epoch, now);
            }
            Answer::Forget { stamp, result } => {
                self.ended(stamp, result.as_ref().map(|()| None), now);
            }
        }
    }

    fn handle_beat(&mut self, beat: &Beat, now: Timestamp) {
        let told = self.beating.take().unwrap_or_default();
        let interval = self.options.heartbeat_interval;
        self.beat_at = now + interval.min(beat.registration.lease / 3);
        self.connected = true;
        if self.registration != Some(beat.registration) {
            self.registration = Some(beat.registration);
            // Changes count from here on, and the listing begins after this: a change is in one or
            // the other.
            self.pending.begin_resync();
            self.drift.reset();
            if !fault::is(Fault::NotAnnouncedAgain) {
                self.resync.all(now);
            }
            return;
        }
        if let Some(repair) = self.drift.compared(&told, &beat.drifted)
            && !fault::is(Fault::DriftLeft)
        {
            self.resync.some(repair, now);
        }
        if !self.resync.is_running() && self.pending.is_empty() {
            self.failures = 0;
        }
    }

    /// No answer to any call under way will come.
    pub fn handle_loss(&mut self, now: Timestamp) {
        let error = RegistryError::Unreachable { reason: "a call ended without an answer".into() };
        self.beating = None;
        let number = self.registration.map_or(0, |known| known.number);
        self.flights.abandon(number, &mut self.pending);
        self.failed(&error, now);
    }

    /// A batch ended; an answer may say of which start of the registry it is.
    fn ended(
        &mut self,
        stamp: &Stamp,
        answer: Result<Option<RegistryEpoch>, &RegistryError>,
        now: Timestamp,
    ) {
        let known = self.registration.map_or(0, |known| known.number);
        self.blocked = false;
        self.flights.end(stamp.sequence, answer.is_ok(), known, &mut self.pending);
        if self.resync.settled(self.flights.settled()) {
            self.pending.end_resync();
        }
        match answer {
            Ok(epoch) => {
                self.failures = 0;
                // A registry of another start answered: it will not know us; find out now.
                let known = self.registration.map(|known| known.registry);
                if epoch.is_some() && epoch != known {
                    self.beat_at = now;
                }
            }
            Err(error) => self.failed(error, now),
        }
    }

    /// Backs off. Only a registry that does not know us is asked again at once, and only once.
    fn failed(&mut self, error: &RegistryError, now: Timestamp) {
        let (first, longest) = self.options.backoff;
        let pause = first.saturating_mul(1 << self.failures.min(16)).min(longest);
        let at_once = *error == RegistryError::UnknownNode && self.failures == 0;
        // Batches that were under way together fail together: that is one failure.
        if self.connected || self.flights.is_empty() {
            self.beat_at = if at_once { now } else { now + pause };
            self.failures = self.failures.saturating_add(1);
        }
        self.connected = false;
        // A repair that may have been lost half-way is found necessary again.
        self.resync.interrupt();
    }

    fn grace(&self) -> Duration {
        self.options.heartbeat_interval / 4
    }

    fn heartbeat(
        &mut self,
        presence: Presence,
        residents: &dyn Residents,
        digests: Vec<PartitionDigest>,
    ) -> Call {
        self.beating = Some(digests.clone());
        Call::Heartbeat { presence, load: residents.load(), digests }
    }

    fn beat(&mut self, news: &mut dyn News, residents: &dyn Residents, dirty: bool) -> Call {
        if self.registration.is_none() || dirty {
            return self.heartbeat(Presence::Afresh, residents, Vec::new());
        }
        let mut digests = Vec::new();
        if self.connected && !self.resync.is_running() {
            let read = |partition| {
                let digest = residents.digest(partition)?;
                Some(PartitionDigest { partition, digest })
            };
            digests = self.drift.due().into_iter().filter_map(read).collect();
            // Asked for behind the digests: a change between is found here.
            self.handle_news(news);
            let busy = self.pending.partitions(limits::REGISTRY_BATCH_MAX);
            match busy {
                Some(busy) => digests.retain(|told| {
                    !busy.contains(told.partition) || fault::is(Fault::DigestsAmidBatches)
                }),
                None => digests.clear(),
            }
        }
        self.heartbeat(Presence::Here, residents, digests)
    }

    fn batch_is_due(&mut self, now: Timestamp) -> bool {
        if self.pending.is_empty() {
            self.batch_at = None;
            return false;
        }
        let at = *self.batch_at.get_or_insert(now + self.options.flush_interval);
        now >= at || self.pending.len() >= self.options.batch || self.pending.in_a_hurry()
    }

    /// The changes that wait, if it is time.
    fn changes(&mut self, now: Timestamp) -> Option<Call> {
        if !self.batch_is_due(now) {
            return None;
        }
        self.batch_at = None;
        let (announce, withdraw) = self.pending.take(self.flights.next(), self.options.batch);
        self.blocked = announce.is_empty() && withdraw.is_empty();
        let keys = |changes: &[Change]| changes.iter().map(|change| change.key).collect();
        if self.blocked {
            return None;
        }
        if announce.is_empty() {
            let (keys, stamp) = (keys(&withdraw), self.start(withdraw));
            return Some(Call::Withdraw { stamp, keys });
        }
        let call = Call::Announce { keys: keys(&announce), stamp: self.start(announce) };
        if !withdraw.is_empty() {
            let (keys, stamp) = (keys(&withdraw), self.start(withdraw));
            self.withdraws = Some(Call::Withdraw { stamp, keys });
        }
        Some(call)
    }

    fn start(&mut self, batch: Vec<Change>) -> Stamp {
        let registration = self.registration.map_or(0, |known| known.number);
        self.flights.start(registration, batch);
        Stamp {
            node: self.node,
            epoch: self.epoch,
            registration,
            sequence: self.flights.next() - 1,
            settled: self.flights.settled(),
        }
    }

    /// The next step of announcing residents again. The listing is true when it is taken, and a change
    /// that comes after it is sent after it.
    fn residents(&mut self, residents: &dyn Residents, now: Timestamp) -> Option<Call> {
        if let Some(partition) = self.resync.to_forget() {
            // Nothing else may be under way.
            if !self.flights.is_empty() {
                return None;
            }
            let stamp = self.start(Vec::new());
            self.resync.forgets(stamp.sequence);
            return Some(Call::Forget { stamp, partition });
        }
        let listed = self.resync.list(residents, &self.options, now)?;
        let batch = self.pending.claim(self.flights.next(), listed);
        let keys: Vec<BlockKey> = batch.iter().map(|change| change.key).collect();
        let call = (!keys.is_empty()).then(|| Call::Announce { stamp: self.start(batch), keys });
        self.resync.listed(self.flights.next() - 1, keys_in(call.as_ref()), &self.options, now);
        if self.resync.settled(self.flights.settled()) {
            self.pending.end_resync();
        }
        call
    }
}

fn keys_in(call: Option<&Call>) -> usize {
    match call {
        Some(Call::Announce { keys, .. }) => keys.len(),
        _ => 0,
    }
}
