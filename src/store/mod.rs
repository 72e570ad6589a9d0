//! Which blocks are here, who keeps them, and which one goes next.
//!
//! The store maps a [`BlockKey`] to a resident: a payload in memory that it never touches, an
//! eviction rank, a count of pins, and the set of requesters that the resident was served to. It
//! keeps the unpinned residents in one least-recently-used list per rank; the [`Policy`] moves
//! them between the lists and says which list loses its head (DESIGN §5).
//!
//! [`Policy`]: crate::policy::Policy
//!
//! # Semantics
//!
//! Each operation takes effect in one step, as if alone, and a batch in one step for all its
//! members, except [`Store::evict_batch`] and [`Store::list`], which are sequences of small steps.
//!
//! - **A pinned resident is in no list**: never a victim, never in the search's way. Its last unpin
//!   makes it the newest of the rank that it has by then. A pin itself is no touch and moves no
//!   rank; a touch of a pinned resident changes no list; its rank changes in place.
//! - **A rank change makes the resident the newest of its new list.** A hit, and an "already
//!   resident" that recovers, make it the newest also where the rank stays. `finished_sending` and
//!   an owner hint that change nothing leave it where it is.
//! - **[`Store::commit`] is one step**: de-duplication of (resident, requester), rank step, unpin.
//!   A repeat answers the rank that the first one got and moves nothing.
//! - **A victim** is the least recently used resident of the list that the policy names. Nothing
//!   else happens; a search that finds none changes nothing.
//! - **A slot's generation changes when its resident is evicted**, so an id of a tenancy that
//!   ended matches nothing. (After 2^32 - 1 tenancies of one slot its generations come round; an id
//!   would have to be kept for that long to mislead.)
//! - A batch is given root first, as prefixes are, and is processed from its end: leaf first, so
//!   that the root of a prefix is the last to go. A key that occurs twice counts twice.
//!
//! # Today
//!
//! One mutex over a sequential slab: every operation is a short critical section without system
//! calls, and without allocation except where a requester's number exceeds the inline set of a
//! resident (`requesters`). Events are emitted outside of it. The semantics above are those that a
//! lock-free store can keep, and the oracle in the tests is written for both.
#![forbid(unsafe_code)]

mod index;
mod lists;
mod requesters;
mod resident;
mod slab;
mod word;

#[cfg(test)]
mod history;
#[cfg(test)]
mod history_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod stress_tests;
#[cfg(test)]
mod subject;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use arrayvec::ArrayVec;

pub use resident::{
    Committed, Evicted, Found, InsertError, Payload, PinError, ResidentView, StoreConfig,
    StoreConfigError, StoreStats, UnpinError,
};

use crate::event::{Event, EventSink};
use crate::limits;
use crate::policy::{Origin, RankEvent};
use crate::sync::{Mutex, lock};
use crate::types::{BlockKey, EvictionRank, RequesterIndex, ResidentCause, ResidentId};
use slab::{Slab, Step};

/// Victims per critical section of [`Store::evict_batch`]: a lend waits for so many at most.
const VICTIMS_PER_STEP: usize = 16;

/// The resident blocks of one node. All methods take `&self`; any thread may call any of them.
pub struct Store {
    config: StoreConfig,
    sink: Arc<dyn EventSink>,
    slab: Mutex<Slab>,
}

/// The rank steps of one event over a batch, counted by the rank that they left, so that they can
/// be told after the critical section without a list of them.
struct Steps([u32; limits::RANK_MAX as usize + 1]);

impl Steps {
    fn add(&mut self, step: Step) {
        if let Some(count) = self.0.get_mut(usize::from(step.from.get())) {
            *count += 1;
        }
    }
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    ///
    /// [`StoreConfigError::Capacity`] outside of 1 to [`limits::RESIDENTS_MAX`].
    pub fn new(config: StoreConfig, sink: Arc<dyn EventSink>) -> Result<Self, StoreConfigError> {
        let got = config.capacity;
        if !(1..=limits::RESIDENTS_MAX).contains(&got) {
            return Err(StoreConfigError::Capacity { got });
        }
        let policy = config.policy.kind;
        sink.emit(Event::StoreStarted { policy });
        let slab = Mutex::new(Slab::new(config));
        Ok(Self { config, sink, slab })
    }

    /// What it was built with.
    #[must_use]
    pub fn config(&self) -> StoreConfig {
        self.config
    }

    /// Makes a block resident, as the newest of its first rank, or with one pin where `pinned`: for
    /// a local reader that waits for it, so that nothing evicts it in between. A pinned admission
    /// counts as untouched: an owner hint may still apply.
    ///
    /// # Errors
    ///
    /// [`InsertError::AlreadyResident`] or [`InsertError::Full`]; nothing changed, and the payload's
    /// memory is still the caller's.
    pub fn insert(
        &self,
        key: BlockKey,
        payload: Payload,
        origin: Origin,
        pinned: bool,
    ) -> Result<Found, InsertError> {
        let found = lock(&self.slab).insert(key, payload, origin, pinned)?;
        self.sink.emit(Event::Inserted {
            rank: found.rank,
            bytes: u64::from(payload.extent.len),
            fetched: matches!(origin, Origin::Fetched { .. }),
        });
        Ok(found)
    }

    /// Finds a block and changes nothing. Without a pin it may be gone right after.
    #[must_use]
    pub fn lookup(&self, key: &BlockKey) -> Option<Found> {
        lock(&self.slab).lookup(key)
    }

    /// Pins a block, to lend it: neither a touch nor a rank change.
    ///
    /// # Errors
    ///
    /// [`PinError`]; nothing changed.
    pub fn pin(&self, key: &BlockKey) -> Result<Found, PinError> {
        lock(&self.slab).pin(key)
    }

    /// [`Store::pin`] for each of `keys`. `out` is cleared and gets one answer per key, in their
    /// order.
    pub fn pin_batch(&self, keys: &[BlockKey], out: &mut Vec<Result<Found, PinError>>) {
        out.clear();
        out.reserve(keys.len());
        let mut slab = lock(&self.slab);
        out.extend(keys.iter().map(|key| slab.pin(key)));
    }

    /// A local reader asks for `keys`: each one that is here is touched, moves its rank as the
    /// policy says for a local hit, and gets a pin where `pin`. Leaf (last) first. `out` is cleared
    /// and gets one answer per key, in the order of `keys`.
    pub fn hit_batch(&self, keys: &[BlockKey], pin: bool, out: &mut Vec<Result<Found, PinError>>) {
        out.clear();
        out.reserve(keys.len());
        let mut steps = Steps([0; _]);
        {
            let mut slab = lock(&self.slab);
            out.extend(keys.iter().rev().map(|key| {
                let (found, step) = slab.hit(key, pin)?;
                steps.add(step);
                Ok(found)
            }));
        }
        out.reverse();
        self.emit_steps(&steps, RankEvent::LocalHit);
    }

    /// Gives one pin back. The last one makes the resident the newest of its rank.
    ///
    /// # Errors
    ///
    /// [`UnpinError`]; nothing changed.
    pub fn unpin(&self, id: ResidentId) -> Result<(), UnpinError> {
        lock(&self.slab).unpin(id)
    }

    /// [`Store::unpin`] for each of `ids`, leaf (last) first. Answers how many were refused, which
    /// is 0 unless the caller's accounting of pins is broken.
    pub fn unpin_batch(&self, ids: &[ResidentId]) -> usize {
        let mut slab = lock(&self.slab);
        let refused = ids.iter().rev().filter(|id| slab.unpin(**id).is_err());
        refused.count()
    }

    /// A transfer of this resident to `requester` is complete, and the pin that it held ends: if
    /// this requester had not been served this resident, its rank moves by one step.
    ///
    /// # Errors
    ///
    /// [`UnpinError`]; nothing changed.
    pub fn commit(
        &self,
        id: ResidentId,
        requester: RequesterIndex,
    ) -> Result<Committed, UnpinError> {
        let (committed, step) = lock(&self.slab).commit(id, requester)?;
        self.emit_step(step);
        Ok(committed)
    }

    /// [`Store::commit`] for each of `ids`, leaf (last) first. `out` is cleared and gets one answer
    /// per id, in their order.
    pub fn commit_batch(
        &self,
        ids: &[ResidentId],
        requester: RequesterIndex,
        out: &mut Vec<Result<Committed, UnpinError>>,
    ) {
        out.clear();
        out.reserve(ids.len());
        let mut steps = Steps([0; _]);
        {
            let mut slab = lock(&self.slab);
            out.extend(ids.iter().rev().map(|id| {
                let (committed, step) = slab.commit(*id, requester)?;
                if let Some(step) = step {
                    steps.add(step);
                }
                Ok(committed)
            }));
        }
        out.reverse();
        self.emit_steps(&steps, RankEvent::Served);
    }

    /// A block that was about to be stored is here already: where `cause` says that a replica is
    /// fewer than expected, it is touched and its rank recovers. `None` where it is not here.
    pub fn already_resident(&self, key: &BlockKey, cause: ResidentCause) -> Option<Found> {
        let found = match cause {
            ResidentCause::PeerFetch | ResidentCause::PartialHit => {
                let (found, step) = lock(&self.slab).recover(key)?;
                self.emit_step(Some(step));
                found
            }
            ResidentCause::DuplicateSave => self.lookup(key)?,
        };
        self.sink.emit(Event::AlreadyResident { cause });
        Some(found)
    }

    /// The engine has sent this block on. Counted once per resident: answers whether this was the
    /// first time, `None` where the block is not here.
    pub fn finished_sending(&self, key: &BlockKey) -> Option<bool> {
        let step = lock(&self.slab).finished_sending(key)?;
        self.emit_step(step);
        Some(step.is_some())
    }

    /// The registry says how many live owners a block has, this node among them. Answers whether
    /// the rank moved: a hint does not apply to a fetched resident, nor, except under `aged`, to
    /// one whose rank another event has marked. `None` where the block is not here.
    pub fn owner_hint(&self, key: &BlockKey, owners: u32) -> Option<bool> {
        let step = lock(&self.slab).owner_hint(key, owners)?;
        self.emit_step(step);
        Some(step.is_some_and(|step| step.from != step.to))
    }

    /// Evicts the policy's victim and hands its memory to the caller. `None` where every resident
    /// is pinned or none is here.
    pub fn evict(&self) -> Option<Evicted> {
        let victim = lock(&self.slab).evict()?;
        self.emit_evicted(&victim);
        Some(victim)
    }

    /// Appends up to `max` victims to `out`, in the order of their eviction, and answers how many.
    /// Others get their turn between steps of a few victims.
    pub fn evict_batch(&self, max: usize, out: &mut Vec<Evicted>) -> usize {
        let mut evicted = 0;
        while evicted < max {
            let wanted = VICTIMS_PER_STEP.min(max - evicted);
            let mut victims: ArrayVec<Evicted, VICTIMS_PER_STEP> = ArrayVec::new();
            {
                let mut slab = lock(&self.slab);
                victims.extend(std::iter::from_fn(|| slab.evict()).take(wanted));
            }
            victims.iter().for_each(|victim| self.emit_evicted(victim));
            evicted += victims.len();
            out.extend_from_slice(&victims);
            if victims.len() < wanted {
                break;
            }
        }
        evicted
    }

    /// What is here, in counts.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        lock(&self.slab).stats()
    }

    /// Appends the residents of the next `max` slots (at least one) from `cursor` on to `out`.
    /// Answers the cursor of the next call, `None` at the end; the first one is 0. A resident that
    /// is here during the whole walk is listed exactly once.
    pub fn list(&self, cursor: u32, max: u32, out: &mut Vec<ResidentView>) -> Option<u32> {
        let next = cursor.saturating_add(max.max(1)).min(self.config.capacity);
        out.reserve(next.saturating_sub(cursor) as usize);
        let more = lock(&self.slab).view(cursor, next, |view| out.push(view));
        more.then_some(next)
    }

    fn emit_step(&self, step: Option<Step>) {
        if let Some(Step { from, to }) = step.filter(|step| step.from != step.to) {
            self.sink.emit(Event::RankMoved { from, to });
        }
    }

    fn emit_steps(&self, steps: &Steps, event: RankEvent) {
        for (from, count) in EvictionRank::all().zip(steps.0.iter().skip(1)) {
            let to = self.config.policy.transition(from, event);
            (0..*count).for_each(|_| self.emit_step(Some(Step { from, to })));
        }
    }

    fn emit_evicted(&self, victim: &Evicted) {
        self.sink.emit(Event::Evicted {
            rank: victim.rank,
            bytes: u64::from(victim.payload.extent.len),
        });
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("config", &self.config).finish_non_exhaustive()
    }
}
