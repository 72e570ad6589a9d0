//! Which blocks are here, who keeps them, and which one goes next.
//!
//! The store maps a [`BlockKey`] to a resident: a payload in memory that it never touches, an
//! eviction rank, a count of pins, and the set of requesters that the resident was served to. It
//! keeps the unpinned residents in one least-recently-used list per rank, for each kind of memory by
//! itself: what goes from a GPU's makes no room in the host's. The [`Policy`] moves them between the
//! lists of their memory and says which of those loses its head (DESIGN §5).
//!
//! [`Policy`]: crate::policy::Policy
//!
//! # Semantics
//!
//! Each operation takes effect in one step, as if alone; a batch is a sequence of such steps, one
//! per member, and so are [`Store::evict_batch`], [`Store::stats`] and [`Store::list`].
//!
//! - **A pinned resident is in no list**: never a victim, never in the search's way. Its last unpin
//!   makes it the newest of the rank that it has by then. A pin itself is no touch and moves no
//!   rank; a touch of a pinned resident changes no list; its rank changes in place.
//! - **A rank change makes the resident the newest of its new list.** A hit, and an "already
//!   resident" that recovers, make it the newest also where the rank stays. `finished_sending` and
//!   an owner hint that change nothing leave it where it is.
//! - **[`Store::commit`] is one step**: de-duplication of (resident, requester), rank step, unpin.
//!   A repeat answers the rank that the first one got and moves nothing.
//! - **A victim** is the least recently used resident of the list that the policy names, among the lists
//!   of one kind of memory. Nothing else happens; a search that finds none changes nothing. Where the
//!   policy compares ages, they are exact for one thread; of several threads, each victim is the head of
//!   some list.
//! - **A removal** takes out the one resident that it names, if nobody has a pin on it then. What else is
//!   in a list keeps its place.
//! - **A slot's generation changes when it is used again**, so an id of a tenancy that ended
//!   matches nothing. (After 2^32 - 1 tenancies of one slot its generations come round; an id would
//!   have to be kept for that long to mislead.)
//! - A batch is given root first, as prefixes are, and is processed from its end: leaf first, so
//!   that the root of a prefix is the last to go. A key that occurs twice counts twice.
//! - [`InsertError::Full`] counts slots that others are about to fill or to empty.
//!
//! # No lock
//!
//! No thread waits for another, wherever that one stops: what is announced, anybody finishes. An
//! operation repeats a step only where another one's step came between. (Two bounds: 1,024 threads
//! in the middle of commits, evictions or removals, and 2,048 in the middle of an append.) There is no
//! unsafe code: slots, chunks and links are indices into memory that is never freed, and what a reader
//! found is confirmed by a second look at a word that never has the same value twice.
//!
//! A slot's state is one word (`word`); the lists are logs of placements (`log`), in which an entry
//! counts only while the word of its slot names its position.
//!
//! ```text
//!                                                              ┌─────── removal ───────┐
//!             insert, linked             appended, anybody     │                       v
//!  Free ──> Arriving ──────────> Placing ────────────────> Live, pins = 0 ──> Claimed ──> Evicted
//!   ^           │                   ^ ^                       │ │  ^ │  ^        │          │
//!   │           │ pinned  last unpin│ └───── rank change ─────┘ │  │ │  └────────┘          │
//!   │           v                   │                           │  └─┘   a raise came       │
//!   │       Live, pins > 0 ─────────┘           touch: appended │  flag  between            │
//!   │        ^ │  ^ │   ^                         before, or    │                           │
//!   │        └─┘  │ v   └──────────────────────────── pin ──────┘                           │
//!   │   pin,unpin Serving ──── last pin: appended, anybody ────> Live, pins = 0             │
//!   │   rank,flag (commit, anybody)                                                         │
//!   └───────────────────── unlinked, by the evictor or the remover ─────────────────────────┘
//! ```
//!
//! ## Where operations take effect
//!
//! | operation | takes effect |
//! | --- | --- |
//! | lookup, refusals | at the read of the word that it answers from; "not here": when the chain, or the last of its links, was read |
//! | pin, unpin that is not the last, any change of a pinned resident, flags | at the exchange of the word |
//! | touch that leaves the rank | when it was appended, by the append that the word then names |
//! | rank change, last unpin, insert | when it is appended, by the append that the word then names; a placement above rank 1 no later than the count in the guard (see below) |
//! | commit | at the exchange of its ticket for the next word, or as the last unpin that it is |
//! | evict | when the guard is read after the claim; "nothing": when the lowest list's end is read |
//! | remove | at the exchange of the word for its ticket |
//!
//! Until an announced placement is complete nobody gets past it: who meets the word finishes it
//! first. So nobody can tell when, between announcement and completion, it took effect, and the
//! order of appends is as good as any, but for one thing, which the guard is for.
//!
//! A touch that leaves the resident in its list announces nothing. It appends, and then exchanges the
//! very word that it read; any other change of the resident in between makes it start again. Until then
//! nobody can tell: the place in the middle of a list is not observable, and who sees the resident at
//! the head claims it, by its word. A last unpin cannot do this. Before its exchange the resident is in
//! no list, so a victim may go that comes after it in the order of appends.
//!
//! ## The guard
//!
//! A victim has to be the head of the *highest* list at one moment, and the search looks at one list
//! after the other. The guard, one for each kind of memory, counts raises: placements above rank 1. A
//! raise is appended, then counted, then completed; a victim is found, then claimed, and goes only if
//! the guard is what it was before the search. While a victim is claimed nothing else happens to it. So
//! at the moment when the guard is read the second time, no raise has been completed since the search
//! began, and those under way may be said to come after. (The guard counts to 2^32; a claim would have
//! to stand for so many raises to mislead.) Moves downwards need no count: the search goes down, too,
//! and meets a resident at its old entry, where it helps, or later at its new one. The head of a list
//! remains the head until its word changes, because whatever comes, comes at the tail. Nor does a removal
//! need a count: what a search found empty stays empty, and what it found at a head is still there when
//! it is claimed, by its word, behind garbage alone.
//!
//! ## Why reuse is safe
//!
//! - A word is unique in its slot: its tag is the position of its last placement (2^39 of them), its
//!   generation, or a ticket's number. An exchange that expects an old word fails; what was read of
//!   a slot between two equal words belongs to one tenancy. Words of one tenancy that differ by pins
//!   and ranks alone may recur, and then mean the same; only a commit asks more, so it decides under
//!   its ticket whether it is the first (`claims`). The word of an unpinned resident names its place,
//!   so it never recurs once the resident has left that place, and a touch that failed leaves garbage.
//! - A link of a log has a number that no other link has (`log`). A chunk leaves its log frozen, so
//!   that nothing is exchanged behind it.
//! - A link of a chain contains the generation of its own slot, and chains grow at the head alone
//!   (`index`).
//! - The set of a resident's requesters contains the low 24 bits of the generation (`requesters`), and
//!   is emptied at the end of the tenancy. (A helper of a commit that stands still until the tenancy is
//!   over may leave something there, which could mislead after 2^24 tenancies that nobody was served.)
//!
//! # Memory
//!
//! Reserved at construction, used as it comes, and bounded by the capacity: for each resident 64 bytes
//! that find it, 16 of payload, 8 of index, and 31 for its entries in the logs, garbage included, or 37
//! where a few alone are placed over and over (`log::sweep`): below 126, whatever the load. A resident
//! that was served to a peer has 64 more, for the exact memory of its first 56 requesters; later ones cost
//! 16 bytes each, and those alone are allocated as they come. The sweep is paid for by appends, at most 8
//! looks at 14 entries for each 14th, and twice that for those few.
//!
//! ## Order of memory
//!
//! Every exchange and every read is sequentially consistent (`sync`), so the proofs above speak of
//! one order of all steps. Stores are releases: of a slot's contents before the exchange that links
//! it, of a claim before the exchange that shows its ticket, of a chunk's entries before the exchange
//! that links it, and of a free slot before the exchange that puts it on the stack; the reads that
//! pair with them are those of the exchanged cell. How much of a head chunk is garbage is stored by
//! whoever saw it, and true whenever it is read.
//!
//! ## How this is checked
//!
//! One thread against an oracle, step by step (`model_tests`); recorded histories of real threads
//! that give way within operations, each with a search for a sequential explanation (`history`);
//! each protocol by itself, also under a model checker (`protocol_tests`); an operation that stops at
//! each of its accesses in turn (`parked_tests`); more threads than processors, some of them suspended
//! at any point (`stress_tests`); and deliberate faults that these have to catch (`fault_tests`).
#![forbid(unsafe_code)]

mod census;
mod claims;
mod commits;
mod fault;
mod index;
mod log;
mod placements;
mod requesters;
mod resident;
mod slots;
mod steps;
mod table;
mod victims;
mod word;

#[cfg(test)]
mod history;
#[cfg(test)]
mod oracle;
#[cfg(test)]
mod protocol_tests;
#[cfg(test)]
mod recorder;
#[cfg(test)]
mod subject;

// These need real threads, or none; a model checker's cells work under the checker alone.
#[cfg(not(shuttle))]
#[cfg(test)]
mod fault_tests;
#[cfg(not(shuttle))]
#[cfg(test)]
mod history_tests;
#[cfg(not(shuttle))]
#[cfg(test)]
mod model_tests;
#[cfg(not(shuttle))]
#[cfg(test)]
mod parked_tests;
#[cfg(not(shuttle))]
#[cfg(test)]
mod stress_tests;
#[cfg(not(shuttle))]
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

pub use resident::{
    Committed, Evicted, Found, InsertError, Payload, PinError, RemoveError, ResidentView,
    StoreConfig, StoreConfigError, StoreStats, UnpinError,
};

use crate::event::{Event, EventSink};
use crate::limits;
use crate::policy::{Origin, RankEvent};
use crate::types::{BlockKey, EvictionRank, MemoryKind, RequesterIndex, ResidentCause, ResidentId};
use log::List;
use steps::Steps;
use table::{Step, Table};

/// The resident blocks of one node. All methods take `&self`; any thread may call any of them.
pub struct Store {
    config: StoreConfig,
    sink: Arc<dyn EventSink>,
    table: Table,
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
        Ok(Self { config, sink, table: Table::new(config) })
    }

    /// What it was built with.
    #[must_use]
    pub fn config(&self) -> StoreConfig {
        self.config
    }

    /// Where its large tables lie, which are accessed at random: an owner may have them on huge pages.
    /// They are not present before they are used.
    #[must_use]
    pub fn tables(&self) -> [Range<*const u8>; 3] {
        self.table.addresses()
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
        let found = self.table.insert(&key, payload, origin, pinned)?;
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
        self.table.lookup(&self.table.seek(key))
    }

    /// Pins a block, to lend it: neither a touch nor a rank change.
    ///
    /// # Errors
    ///
    /// [`PinError`]; nothing changed.
    pub fn pin(&self, key: &BlockKey) -> Result<Found, PinError> {
        self.table.pin(&self.table.seek(key))
    }

    /// [`Store::pin`] for each of `keys`. `out` is cleared and gets one answer per key, in their
    /// order.
    pub fn pin_batch(&self, keys: &[BlockKey], out: &mut Vec<Result<Found, PinError>>) {
        out.clear();
        out.reserve(keys.len());
        self.table.each(keys.iter(), |key| out.push(self.table.pin(key)));
    }

    /// A local reader asks for `keys`: each one that is here is touched, moves its rank as the
    /// policy says for a local hit, and gets a pin where `pin`. Leaf (last) first. `out` is cleared
    /// and gets one answer per key, in the order of `keys`.
    pub fn hit_batch(&self, keys: &[BlockKey], pin: bool, out: &mut Vec<Result<Found, PinError>>) {
        out.clear();
        out.reserve(keys.len());
        let mut steps = Steps::new();
        self.table.each(keys.iter().rev(), |key| {
            let hit = self.table.hit(key, pin);
            out.push(hit.map(|(found, step)| {
                steps.add(step);
                found
            }));
        });
        out.reverse();
        self.emit_steps(&steps, RankEvent::LocalHit);
    }

    /// Gives one pin back. The last one makes the resident the newest of its rank.
    ///
    /// # Errors
    ///
    /// [`UnpinError`]; nothing changed.
    pub fn unpin(&self, id: ResidentId) -> Result<(), UnpinError> {
        self.table.unpin(id)
    }

    /// [`Store::unpin`] for each of `ids`, leaf (last) first. Answers how many were refused, which
    /// is 0 unless the caller's accounting of pins is broken.
    pub fn unpin_batch(&self, ids: &[ResidentId]) -> usize {
        let mut refused = 0;
        let warm = |slot| self.table.slots.warm(slot);
        Table::each_id(ids.iter().rev(), warm, |id| {
            refused += usize::from(self.table.unpin(id).is_err());
        });
        refused
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
        let claim = self.table.claims.take();
        let (committed, step) = self.table.commit(&claim, id, requester)?;
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
        let mut steps = Steps::new();
        let claim = self.table.claims.take();
        let warm = |slot| {
            self.table.slots.warm(slot);
            self.table.slots.warm_requesters(slot);
        };
        Table::each_id(ids.iter().rev(), warm, |id| {
            let commit = self.table.commit(&claim, id, requester);
            out.push(commit.map(|(committed, step)| {
                step.into_iter().for_each(|step| steps.add(step));
                committed
            }));
        });
        out.reverse();
        self.emit_steps(&steps, RankEvent::Served);
    }

    /// A block that was about to be stored is here already: where `cause` says that a replica is
    /// fewer than expected, it is touched and its rank recovers. `None` where it is not here.
    pub fn already_resident(&self, key: &BlockKey, cause: ResidentCause) -> Option<Found> {
        let found = match cause {
            ResidentCause::PeerFetch | ResidentCause::PartialHit => {
                let (found, step) = self.table.recover(&self.table.seek(key))?;
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
        let step = self.table.finished_sending(&self.table.seek(key))?;
        self.emit_step(step);
        Some(step.is_some())
    }

    /// The registry says how many live owners a block has, this node among them. Answers whether
    /// the rank moved: a hint does not apply to a fetched resident, nor, except under `aged`, to
    /// one whose rank another event has marked. `None` where the block is not here.
    pub fn owner_hint(&self, key: &BlockKey, owners: u32) -> Option<bool> {
        let step = self.table.owner_hint(&self.table.seek(key), owners)?;
        self.emit_step(step);
        Some(step.is_some_and(|step| step.from != step.to))
    }

    /// Evicts the policy's victim in this kind of memory and hands its memory to the caller. `None`
    /// where every resident there is pinned or none is.
    pub fn evict(&self, kind: MemoryKind) -> Option<Evicted> {
        let victim = self.table.evict(kind, &self.table.claims.take())?;
        self.emit_evicted(&victim);
        Some(victim)
    }

    /// Appends up to `max` victims to `out`, in the order of their eviction, and answers how many.
    pub fn evict_batch(&self, kind: MemoryKind, max: usize, out: &mut Vec<Evicted>) -> usize {
        let before = out.len();
        let claim = self.table.claims.take();
        let mut warmed = 0;
        for left in (0..max).rev() {
            let Some(victim) = self.table.evict(kind, &claim) else {
                break;
            };
            self.emit_evicted(&victim);
            warmed = match warmed {
                0 => self.table.warm_victims(List { kind, rank: victim.rank }, left),
                more => more - 1,
            };
            out.push(victim);
        }
        out.len() - before
    }

    /// Takes this resident out, whatever its place, and hands its memory to the caller.
    ///
    /// # Errors
    ///
    /// [`RemoveError`]; nothing changed.
    pub fn remove(&self, id: ResidentId) -> Result<Evicted, RemoveError> {
        let removed = self.table.remove(id, &self.table.claims.take())?;
        let (rank, bytes) = (removed.rank, u64::from(removed.payload.extent.len));
        self.sink.emit(Event::Removed { rank, bytes });
        Ok(removed)
    }

    /// What is here, in counts. Looks at every slot: 10 to 20 ms for a million. [`Store::count`] does
    /// the same in steps.
    #[must_use]
    pub fn stats(&self) -> StoreStats {
        let mut stats = StoreStats::default();
        self.table.count(0, u32::MAX, &mut stats);
        stats
    }

    /// Adds the residents of the next `max` slots (at least one) from `cursor` on to `stats`, which
    /// is empty at first. Answers the cursor of the next call, `None` at the end; the first one is 0.
    pub fn count(&self, cursor: u32, max: u32, stats: &mut StoreStats) -> Option<u32> {
        let next = cursor.saturating_add(max.max(1));
        self.table.count(cursor, next, stats).then_some(next)
    }

    /// Appends the residents of the next `max` slots (at least one) from `cursor` on to `out`.
    /// Answers the cursor of the next call, `None` at the end; the first one is 0. A resident that
    /// is here during the whole walk is listed exactly once.
    pub fn list(&self, cursor: u32, max: u32, out: &mut Vec<ResidentView>) -> Option<u32> {
        let next = cursor.saturating_add(max.max(1)).min(self.config.capacity);
        out.reserve(next.saturating_sub(cursor) as usize);
        let more = self.table.view(cursor, next, |view| out.push(view));
        more.then_some(next)
    }

    fn emit_step(&self, step: Option<Step>) {
        if let Some(Step { from, to }) = step.filter(|step| step.from != step.to) {
            self.sink.emit(Event::RankMoved { from, to });
        }
    }

    fn emit_steps(&self, steps: &Steps, event: RankEvent) {
        let mut left = steps.left;
        while left != 0 {
            let from = EvictionRank::clamped(left.trailing_zeros());
            left &= left - 1;
            let to = self.config.policy.transition(from, event);
            let count = steps.counts.get(usize::from(from.get())).copied().unwrap_or(0);
            (0..count).for_each(|_| self.sink.emit(Event::RankMoved { from, to }));
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
