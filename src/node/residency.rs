//! Memory and residents of one node: reserve, admit, evict. Shared by the data thread, the door and
//! the reclaimer. Eviction takes no lock at all: what it changes is the store, which has none, and what it
//! says goes through mailboxes ([`crate::sync::Mailbox`]) and words that anybody may write.
//!
//! Host memory and the GPU's are kept free each for itself: what goes from one makes no room in the other.
//! Of a GPU that is lost all residents go, as soon as nobody has a pin on them ([`lost`]).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;

use super::evictions::Evictions;
use crate::event::{Event, EventSink};
use crate::limits;
use crate::memory::{ExtentSpace, HostPool, Pool, Reservation, Usage, Watermarks};
use crate::policy::Origin;
use crate::protocol::door::{DeviceUuid, EvictedBlock};
use crate::registry::Partition;
use crate::registry::announcing::Digests;
use crate::runtime::announce::AnnouncerHandle;
use crate::runtime::clock::Clock;
use crate::runtime::reclaim::ReclaimWaker;
use crate::store::{Evicted, Found, InsertError, Payload, Store, StoreStats};
use crate::types::{BlockKey, EvictionRank, Extent, Load, MemoryKind, ResidentCause, Timestamp};

/// Slots of one step of a count: less than a tenth of a millisecond.
const SLOTS_PER_STEP: u32 = 4_096;

/// How long a requester holds back while this node is above its high watermark and finds nothing to evict,
/// and an engine when there was no memory at all, milliseconds.
const PAUSE_UNDER_PRESSURE_MS: u32 = 10;
const PAUSE_WHEN_FULL_MS: u32 = 50;

/// No memory now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoMemory {
    pub(super) pause_ms: u32,
}

/// What became of a block that was about to be stored.
#[derive(Debug)]
pub(super) enum Admitted {
    Stored(Found),
    /// That resident; the new memory went back.
    AlreadyResident(Found),
    /// No slot is free and every resident is pinned; the memory went back.
    Full,
}

/// A reservation, and how many blocks had been stored when it was made.
#[derive(Debug)]
pub struct Reserved {
    pub(super) memory: Reservation,
    pub(super) stored_before: u64,
}

/// A pool of a GPU's memory.
#[derive(Debug)]
pub(super) struct DevicePool {
    pool: Arc<dyn Pool + Send + Sync>,
    gpu: DeviceUuid,
    /// What is in it cannot be had any more.
    lost: AtomicBool,
}

impl DevicePool {
    pub(super) fn new(gpu: DeviceUuid, pool: Arc<dyn Pool + Send + Sync>) -> Self {
        Self { pool, gpu, lost: AtomicBool::new(false) }
    }
}

/// Whether a thread waits for others that reserve memory at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// Like a thread of the door.
    Waits,
    /// Like the data thread, whose peers wait for it.
    Goes,
}

/// Whether there was room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Placed {
    Whole,
    Not,
    /// Others were at it.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Residency {
    pub(super) store: Arc<Store>,
    pub(super) pools: Vec<Arc<HostPool>>,
    /// The GPU's, in which residents may lie too.
    device: Option<DevicePool>,
    /// The GPUs that are lost to this process, those of local engines alone among them.
    lost: watch::Sender<BTreeSet<DeviceUuid>>,
    pub(super) sink: Arc<dyn EventSink>,
    pub(super) clock: Clock,
    watermarks: Watermarks,
    announcer: OnceLock<AnnouncerHandle>,
    reclaimer: OnceLock<ReclaimWaker>,
    evictions: Evictions,
    /// Whether the last one who wanted victims in host memory found none.
    stuck: AtomicBool,
    /// What the data thread last said of its lending.
    lent_bytes: AtomicU64,
    lending_pause_ms: AtomicU32,
    digests: Digests,
    /// Blocks stored so far.
    stored: AtomicU64,
    /// By slot: how many blocks had been stored when its resident was. It tells a save that found
    /// its block here from one that raced another save.
    stored_at: Box<[AtomicU64]>,
}

impl Residency {
    pub(super) fn new(
        store: Arc<Store>,
        (pools, device): (Vec<Arc<HostPool>>, Option<DevicePool>),
        watermarks: Watermarks,
        clock: Clock,
        sink: Arc<dyn EventSink>,
    ) -> Self {
        let slots = store.config().capacity as usize;
        Self {
            store,
            pools,
            device,
            lost: watch::Sender::default(),
            sink,
            clock,
            watermarks,
            announcer: OnceLock::new(),
            reclaimer: OnceLock::new(),
            evictions: Evictions::new(),
            stuck: AtomicBool::new(false),
            lent_bytes: AtomicU64::new(0),
            lending_pause_ms: AtomicU32::new(0),
            digests: Digests::default(),
            stored: AtomicU64::new(0),
            stored_at: std::iter::repeat_with(|| AtomicU64::new(0)).take(slots).collect(),
        }
    }

    /// Says whom to tell of changes, and whom to wake; once, before anything is stored.
    pub(super) fn connect(&self, announcer: AnnouncerHandle, reclaimer: Option<ReclaimWaker>) {
        self.announcer.get_or_init(|| announcer);
        if let Some(reclaimer) = reclaimer {
            self.reclaimer.get_or_init(|| reclaimer);
        }
    }

    /// Reserves memory for all of these blocks. Where the pools are full it takes a bounded number of
    /// victims itself before it gives up.
    pub(super) fn reserve(&self, sizes: &[u32]) -> Result<Vec<Reservation>, NoMemory> {
        let mut out = Vec::with_capacity(sizes.len());
        if self.reserve_some(sizes, &mut out, Patience::Waits) == sizes.len() {
            return Ok(out);
        }
        let bytes = sizes.iter().map(|size| u64::from(*size)).sum();
        self.sink.emit(Event::PoolBusy { bytes });
        Err(NoMemory { pause_ms: PAUSE_WHEN_FULL_MS })
    }

    /// Reserves memory for these blocks, or for the first few of them; how many.
    pub(super) fn reserve_some(
        &self,
        sizes: &[u32],
        out: &mut Vec<Reservation>,
        patience: Patience,
    ) -> usize {
        let before = out.len();
        let mut victims_left = limits::INLINE_VICTIMS_MAX;
        let mut rest = sizes;
        while !rest.is_empty() {
            // All of the rest in one piece of work first: that is what keeps a batch together.
            if self.place(rest, out, patience) != Placed::Not {
                break;
            }
            if victims_left > 0 {
                let batch = victims_left.min(rest.len());
                victims_left -= batch;
                if self.evict(MemoryKind::Host, batch) > 0 {
                    continue;
                }
                victims_left = 0;
            }
            let (Some(first), Some(others)) = (rest.get(..1), rest.get(1..)) else { break };
            if self.place(first, out, patience) != Placed::Whole {
                break;
            }
            rest = others;
        }
        self.wake_reclaimer(MemoryKind::Host);
        out.len() - before
    }

    fn wake_reclaimer(&self, kind: MemoryKind) {
        if self.excess(kind) > 0
            && let Some(reclaimer) = self.reclaimer.get()
        {
            reclaimer.wake();
        }
    }

    /// Reserves memory of the GPU for a block; `None` where it finds none. Each of `victims` may go for
    /// that. The data thread alone does this: it waits for nobody who has the pool's allocator.
    #[cfg_attr(not(feature = "gpu"), expect(dead_code, reason = "there is no such memory then"))]
    pub(super) fn reserve_on_device<P: Pool>(
        &self,
        pool: &Arc<P>,
        len: u32,
        victims: &mut usize,
    ) -> Option<Reservation<P>> {
        // A block that the pool could not hold if it were empty takes no victim.
        let fits = u64::from(len) <= pool.space().bytes();
        let memory = loop {
            let memory = Reservation::reserve_one(pool, len);
            if memory.is_some() || !fits || *victims == 0 {
                break memory;
            }
            *victims -= 1;
            if self.evict(MemoryKind::Device, 1) == 0 {
                break None;
            }
        };
        self.wake_reclaimer(MemoryKind::Device);
        memory
    }

    /// Tries to reserve memory for all of these blocks in one pool.
    fn place(&self, sizes: &[u32], out: &mut Vec<Reservation>, patience: Patience) -> Placed {
        let mut placed = Placed::Not;
        for pool in &self.pools {
            let outcome = match patience {
                Patience::Waits => Some(pool.reserve_into(sizes, out)),
                Patience::Goes => pool.try_reserve_into(sizes, out),
            };
            match outcome {
                Some(Ok(())) => return Placed::Whole,
                Some(Err(_full)) => {}
                None => placed = Placed::Unknown,
            }
        }
        placed
    }

    pub(super) fn reserved(&self, memory: Reservation) -> Reserved {
        // Relaxed: an order among saves is wanted, not among their bytes.
        Reserved { memory, stored_before: self.stored() }
    }

    /// How many blocks have been stored so far.
    pub(super) fn stored(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    /// Whether a resident came after a reservation was made: two saves of one block at once.
    pub(super) fn came_after(&self, found: &Found, stored_before: u64) -> bool {
        let at = self.stored_at.get(found.id.slot as usize);
        at.is_some_and(|at| at.load(Ordering::Relaxed) > stored_before)
    }

    /// Makes a block resident; a fetched one is pinned once.
    pub(super) fn admit<P: Pool>(
        &self,
        key: BlockKey,
        memory: Reservation<P>,
        checksum: u64,
        origin: Origin,
    ) -> Admitted {
        let payload = Payload { extent: memory.extent(), checksum };
        let admitted = self.insert(key, payload, origin);
        if matches!(admitted, Admitted::Stored(_)) {
            // The memory belongs to the resident; its eviction gives it back.
            let _owned_by_the_store = memory.into_extent();
        }
        admitted
    }

    /// Makes a block resident that lies in an engine's memory.
    pub(super) fn admit_in_place(&self, key: BlockKey, extent: Extent, checksum: u64) -> Admitted {
        self.insert(key, Payload { extent, checksum }, Origin::Saved { owners: None })
    }

    fn insert(&self, key: BlockKey, payload: Payload, origin: Origin) -> Admitted {
        // A fetched block arrives for a reader, which waits for it; a saved one waits for nobody.
        let pinned = matches!(origin, Origin::Fetched { .. });
        let mut inserted = self.store.insert(key, payload, origin, pinned);
        // Slots have no kind of memory: where none of its own can go, another one does.
        let kind = payload.extent.pool.kind();
        let own = MemoryKind::EVICTABLE.into_iter().find(|it| *it == kind);
        if inserted == Err(InsertError::Full)
            && own.into_iter().chain(MemoryKind::EVICTABLE).any(|kind| self.evict(kind, 1) > 0)
        {
            inserted = self.store.insert(key, payload, origin, pinned);
        }
        match inserted {
            Ok(found) => {
                let number = self.stored.fetch_add(1, Ordering::Relaxed) + 1;
                if let Some(at) = self.stored_at.get(found.id.slot as usize) {
                    at.store(number, Ordering::Relaxed);
                }
                if pinned && self.evictions.is_refetch(&key, self.clock.now()) {
                    self.sink.emit(Event::RefetchedAfterEviction);
                }
                self.tell(key, true);
                Admitted::Stored(found)
            }
            Err(InsertError::AlreadyResident(found)) => Admitted::AlreadyResident(found),
            Err(InsertError::Full) => Admitted::Full,
        }
    }

    /// Makes a fetched block resident, pinned for the reader that waits. A resident that was here
    /// already is pinned instead, and its rank recovers.
    pub(super) fn admit_fetched<P: Pool>(
        &self,
        key: BlockKey,
        memory: Reservation<P>,
        checksum: u64,
        source: EvictionRank,
    ) -> Admitted {
        let admitted = self.admit(key, memory, checksum, Origin::Fetched { source });
        self.fetched(key, admitted)
    }

    /// The same for one that landed in an engine's memory.
    pub(super) fn admit_fetched_in_place(
        &self,
        key: BlockKey,
        payload: Payload,
        source: EvictionRank,
    ) -> Admitted {
        let admitted = self.insert(key, payload, Origin::Fetched { source });
        self.fetched(key, admitted)
    }

    fn fetched(&self, key: BlockKey, admitted: Admitted) -> Admitted {
        match admitted {
            Admitted::AlreadyResident(_) => {
                self.store.already_resident(&key, ResidentCause::PeerFetch);
                // An eviction in between, or a pin too many, leaves the reader to ask again.
                self.store.pin(&key).map_or(Admitted::Full, Admitted::AlreadyResident)
            }
            other => other,
        }
    }

    /// The digest of the residents of a partition.
    pub(super) fn digest_of(&self, partition: Partition) -> u64 {
        self.digests.of(partition)
    }

    /// Tells the registry what is true of a key now, behind a change of it.
    pub(super) fn tell(&self, key: BlockKey, is_here: bool) {
        let note = |is_here| match self.announcer.get() {
            Some(announcer) if is_here => announcer.resident(key),
            Some(announcer) => announcer.gone(key),
            None => {}
        };
        self.digests.change(&key, is_here, note, || self.store.lookup(&key).is_some());
    }

    /// Evicts up to `max` residents from this memory and gives it back; how many bytes, 0 where none
    /// went.
    pub(super) fn evict(&self, kind: MemoryKind, max: usize) -> u64 {
        let (one, mut several);
        let victims = if max == 1 {
            // The data thread evicts one at a time, for which it asks the heap for nothing.
            one = self.store.evict(kind);
            one.as_slice()
        } else {
            several = Vec::with_capacity(max);
            self.store.evict_batch(kind, max, &mut several);
            several.as_slice()
        };
        if kind == MemoryKind::Host {
            // Relaxed: advice to those who read from here. What finds no room in the GPU's memory
            // lands in the host's, so that nobody has to hold back for its sake.
            self.stuck.store(victims.is_empty(), Ordering::Relaxed);
        }
        let now = self.clock.now();
        victims.iter().for_each(|victim| self.note_gone(victim, now));
        victims.iter().map(|victim| u64::from(victim.payload.extent.len)).sum()
    }

    /// Gives back the memory of what is not resident any more, and says so.
    fn note_gone(&self, victim: &Evicted, now: Timestamp) {
        self.evictions.note(victim, now);
        self.release(victim);
        self.tell(victim.key, false);
    }

    fn release(&self, victim: &Evicted) {
        let Extent { pool, .. } = victim.payload.extent;
        let released = self.spaces().find(|own| own.id() == pool).map(|space| {
            // Nobody has a pin on the victim, and it is in no list any more.
            space.release(victim.payload.extent)
        });
        if !matches!(released, Some(Ok(()))) {
            // The store and the allocator disagree about who owns this memory: it stays out of use.
            tracing::error!(?victim, ?released, "an evicted block's memory was not held");
        }
    }

    pub(super) fn evictions_since(&self, sequence: u64, max: usize) -> Vec<EvictedBlock> {
        self.evictions.since(sequence, max)
    }

    /// What is resident. Lets other tasks run now and then: the count looks at every slot.
    pub(super) async fn count(&self) -> StoreStats {
        let (mut stats, mut cursor) = (StoreStats::default(), Some(0));
        while let Some(at) = cursor {
            cursor = self.store.count(at, SLOTS_PER_STEP, &mut stats);
            tokio::task::yield_now().await;
        }
        stats
    }

    /// How full all memory of this kind is.
    pub(super) fn usage(&self, kind: MemoryKind) -> Usage {
        let spaces = self.spaces().filter(|space| space.id().kind() == kind);
        spaces.map(ExtentSpace::usage).fold(Usage { bytes: 0, used: 0 }, |sum, usage| Usage {
            bytes: sum.bytes + usage.bytes,
            used: sum.used + usage.used,
        })
    }

    /// The spaces of all pools.
    pub(super) fn spaces(&self) -> impl Iterator<Item = &ExtentSpace> {
        let host = self.pools.iter().map(|pool| pool.space());
        host.chain(self.device.iter().map(|device| device.pool.space()))
    }

    /// Bytes of this memory to reclaim now.
    fn excess(&self, kind: MemoryKind) -> u64 {
        let usage = self.usage(kind);
        match kind {
            MemoryKind::Device if self.device_is_lost() => usage.used,
            _ => self.watermarks.excess(usage),
        }
    }

    /// The data thread's load, for the registry and for whoever looks.
    pub(super) fn note_load(&self, load: Load) {
        // Relaxed: two numbers that stand for themselves.
        self.lent_bytes.store(load.outstanding_bytes, Ordering::Relaxed);
        self.lending_pause_ms.store(load.pause_ms, Ordering::Relaxed);
    }

    /// How busy this node is with what it lends.
    pub(super) fn lending_load(&self) -> Load {
        let pause_ms = self.lending_pause_ms.load(Ordering::Relaxed).max(self.pause_ms());
        Load { outstanding_bytes: self.lent_bytes.load(Ordering::Relaxed), pause_ms }
    }

    /// How long others should hold back, milliseconds; 0 without pressure. A pool that is only full is
    /// none: leases need no memory, and what they keep from eviction is not missed as long as something
    /// else can go. So whoever reads does not notice a reclaimer that is late.
    pub(super) fn pause_ms(&self) -> u32 {
        let pressed = self.stuck.load(Ordering::Relaxed) && self.excess(MemoryKind::Host) > 0;
        if pressed { PAUSE_UNDER_PRESSURE_MS } else { 0 }
    }
}

mod lost;
mod reclaim;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
