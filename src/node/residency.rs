//! Memory and residents of one node: reserve, admit, evict. Shared by the data thread, the door and
//! the reclaimer; no lock is held from one step to the next.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::evictions::Evictions;
use crate::event::{Event, EventSink};
use crate::limits;
use crate::memory::{ExtentSpace, HostPool, Pool, Reservation, Usage, Watermarks};
use crate::policy::Origin;
use crate::protocol::door::EvictedBlock;
use crate::registry::{Fingerprint, Partition};
use crate::runtime::announce::AnnouncerHandle;
use crate::runtime::clock::Clock;
use crate::runtime::reclaim::{Reclaim, ReclaimWaker, Reclaimed};
use crate::store::{Evicted, Found, InsertError, Payload, Store, StoreStats};
use crate::sync::{Mutex, lock};
use crate::types::{BlockKey, EvictionRank, Extent, Load, ResidentCause};

/// Victims of one step of the reclaimer.
const VICTIMS_PER_STEP: usize = 64;

/// Slots of one step of a count: less than a tenth of a millisecond.
const SLOTS_PER_STEP: u32 = 4_096;

/// How long a requester or an engine holds back while this node is above its high watermark, and
/// when it found no memory at all, milliseconds.
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

#[derive(Debug)]
pub(super) struct Residency {
    pub(super) store: Arc<Store>,
    pub(super) pools: Vec<Arc<HostPool>>,
    /// Pools of other memory than the host's, in which residents may lie too.
    device_pools: Vec<Arc<dyn Pool + Send + Sync>>,
    pub(super) sink: Arc<dyn EventSink>,
    pub(super) clock: Clock,
    watermarks: Watermarks,
    announcer: OnceLock<AnnouncerHandle>,
    reclaimer: OnceLock<ReclaimWaker>,
    evictions: Mutex<Evictions>,
    /// What the data thread last said of its lending.
    lent_bytes: AtomicU64,
    lending_pause_ms: AtomicU32,
    /// By partition: the digest of the residents in it, which the registry compares with its own.
    digests: Box<[AtomicU64]>,
    /// Blocks stored so far.
    stored: AtomicU64,
    /// By slot: how many blocks had been stored when its resident was. It tells a save that found
    /// its block here from one that raced another save.
    stored_at: Box<[AtomicU64]>,
}

impl Residency {
    pub(super) fn new(
        store: Arc<Store>,
        (pools, device_pools): (Vec<Arc<HostPool>>, Vec<Arc<dyn Pool + Send + Sync>>),
        watermarks: Watermarks,
        clock: Clock,
        sink: Arc<dyn EventSink>,
    ) -> Self {
        let slots = store.config().capacity as usize;
        Self {
            store,
            pools,
            device_pools,
            sink,
            clock,
            watermarks,
            announcer: OnceLock::new(),
            reclaimer: OnceLock::new(),
            evictions: Mutex::default(),
            lent_bytes: AtomicU64::new(0),
            lending_pause_ms: AtomicU32::new(0),
            digests: Partition::all().map(|_| AtomicU64::new(0)).collect(),
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
        if self.reserve_some(sizes, &mut out) == sizes.len() {
            return Ok(out);
        }
        let bytes = sizes.iter().map(|size| u64::from(*size)).sum();
        self.sink.emit(Event::PoolBusy { bytes });
        Err(NoMemory { pause_ms: PAUSE_WHEN_FULL_MS })
    }

    /// Reserves memory for these blocks, or for the first few of them; how many.
    pub(super) fn reserve_some(&self, sizes: &[u32], out: &mut Vec<Reservation>) -> usize {
        let before = out.len();
        let mut victims_left = limits::INLINE_VICTIMS_MAX;
        let mut rest = sizes;
        while !rest.is_empty() {
            // All of the rest in one piece of work first: that is what keeps a batch together.
            let batch = self.pools.iter().any(|pool| pool.reserve_into(rest, out).is_ok());
            if batch {
                break;
            }
            if victims_left > 0 {
                let batch = victims_left.min(rest.len());
                victims_left -= batch;
                if self.evict(batch) > 0 {
                    continue;
                }
                victims_left = 0;
            }
            let (Some(first), Some(others)) = (rest.get(..1), rest.get(1..)) else { break };
            if !self.pools.iter().any(|pool| pool.reserve_into(first, out).is_ok()) {
                break;
            }
            rest = others;
        }
        if self.excess() > 0
            && let Some(reclaimer) = self.reclaimer.get()
        {
            reclaimer.wake();
        }
        out.len() - before
    }

    pub(super) fn reserved(&self, memory: Reservation) -> Reserved {
        // Relaxed: an order among saves is wanted, not among their bytes.
        Reserved { memory, stored_before: self.stored.load(Ordering::Relaxed) }
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
        // A fetched block arrives for a reader, which waits for it; a saved one waits for nobody.
        let pinned = matches!(origin, Origin::Fetched { .. });
        let payload = Payload { extent: memory.extent(), checksum };
        let mut inserted = self.store.insert(key, payload, origin, pinned);
        if inserted == Err(InsertError::Full) && self.evict(1) > 0 {
            inserted = self.store.insert(key, payload, origin, pinned);
        }
        match inserted {
            Ok(found) => {
                // From here on the memory belongs to the resident; its eviction gives it back.
                let _owned_by_the_store = memory.into_extent();
                let number = self.stored.fetch_add(1, Ordering::Relaxed) + 1;
                if let Some(at) = self.stored_at.get(found.id.slot as usize) {
                    at.store(number, Ordering::Relaxed);
                }
                if pinned && lock(&self.evictions).is_refetch(&key, self.clock.now()) {
                    self.sink.emit(Event::RefetchedAfterEviction);
                }
                self.announce(key);
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
        match self.admit(key, memory, checksum, Origin::Fetched { source }) {
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
        self.digests.get(partition.index()).map_or(0, |digest| digest.load(Ordering::Acquire))
    }

    /// A resident came or went: exactly once for each, in whatever order, as the sum does not ask.
    fn toggle_digest(&self, key: &BlockKey) {
        let print = Fingerprint::of(key);
        if let Some(digest) = self.digests.get(print.partition().index()) {
            // The note of the change, under a lock, comes behind; who sees that sees this.
            digest.fetch_xor(print.digest(), Ordering::AcqRel);
        }
    }

    /// Tells the registry what is true of a key now. The state is looked up after the change was
    /// queued, so that of an insert and an eviction that race the later one has the last word.
    fn announce(&self, key: BlockKey) {
        self.toggle_digest(&key);
        let Some(announcer) = self.announcer.get() else { return };
        announcer.resident(key);
        if self.store.lookup(&key).is_none() {
            announcer.gone(key);
        }
    }

    fn withdraw(&self, key: BlockKey) {
        self.toggle_digest(&key);
        let Some(announcer) = self.announcer.get() else { return };
        announcer.gone(key);
        if self.store.lookup(&key).is_some() {
            announcer.resident(key);
        }
    }

    /// Evicts up to `max` residents and gives their memory back; how many bytes, 0 where none went.
    pub(super) fn evict(&self, max: usize) -> u64 {
        let mut victims = Vec::with_capacity(max);
        self.store.evict_batch(max, &mut victims);
        let now = self.clock.now();
        for victim in &victims {
            lock(&self.evictions).note(victim, now);
            self.release(victim);
            self.withdraw(victim.key);
        }
        victims.iter().map(|victim| u64::from(victim.payload.extent.len)).sum()
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
        lock(&self.evictions).since(sequence, max)
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

    pub(super) fn usage(&self) -> Usage {
        self.spaces().map(ExtentSpace::usage).fold(
            Usage { bytes: 0, used: 0, largest_free: 0 },
            |sum, usage| Usage {
                bytes: sum.bytes + usage.bytes,
                used: sum.used + usage.used,
                largest_free: sum.largest_free.max(usage.largest_free),
            },
        )
    }

    /// The spaces of all pools.
    pub(super) fn spaces(&self) -> impl Iterator<Item = &ExtentSpace> {
        let host = self.pools.iter().map(|pool| pool.space());
        host.chain(self.device_pools.iter().map(|pool| pool.space()))
    }

    fn excess(&self) -> u64 {
        self.watermarks.excess(self.usage())
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

    /// How long others should hold back, milliseconds; 0 without pressure.
    pub(super) fn pause_ms(&self) -> u32 {
        if self.excess() > 0 { PAUSE_UNDER_PRESSURE_MS } else { 0 }
    }
}

impl Reclaim for Residency {
    fn reclaim(&self) -> Reclaimed {
        // The goal is fixed at the start: from above the high mark down to the low one.
        let excess = self.excess();
        if excess == 0 {
            return Reclaimed::Enough;
        }
        let goal = self.usage().used.saturating_sub(excess);
        // The first victim tells how large they are; the store is not walked to find out.
        let mut typical = excess;
        while let left = self.usage().used.saturating_sub(goal)
            && left > 0
        {
            // As many as are needed if all are as large as the last ones, so that none goes in vain.
            let victims = usize::try_from(left.div_ceil(typical)).unwrap_or(usize::MAX);
            let victims = victims.min(VICTIMS_PER_STEP);
            let freed = self.evict(victims);
            if freed == 0 {
                return Reclaimed::Stuck;
            }
            typical = (freed / victims as u64).max(1);
        }
        Reclaimed::Some
    }
}
