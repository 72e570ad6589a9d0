//! Memory and residents of one node: reserve, admit, evict. Shared by the data thread, the door and
//! the reclaimer. Eviction takes no lock at all: what it changes is the store, which has none, and what it
//! says goes through mailboxes ([`crate::sync::Mailbox`]) and words that anybody may write.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::evictions::Evictions;
use crate::event::{Event, EventSink};
use crate::limits;
use crate::memory::{HostPool, Reservation, Usage, Watermarks};
use crate::policy::Origin;
use crate::protocol::door::EvictedBlock;
use crate::registry::Partition;
use crate::registry::announcing::Digests;
use crate::runtime::announce::AnnouncerHandle;
use crate::runtime::clock::Clock;
use crate::runtime::reclaim::{Reclaim, ReclaimWaker, Reclaimed};
use crate::store::{Evicted, Found, InsertError, Payload, Store, StoreStats};
use crate::types::{BlockKey, EvictionRank, Extent, Load, ResidentCause};

/// Victims of one step of the reclaimer.
const VICTIMS_PER_STEP: usize = 64;

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
    pub(super) sink: Arc<dyn EventSink>,
    pub(super) clock: Clock,
    watermarks: Watermarks,
    announcer: OnceLock<AnnouncerHandle>,
    reclaimer: OnceLock<ReclaimWaker>,
    evictions: Evictions,
    /// Whether the last one who wanted victims found none.
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
        pools: Vec<Arc<HostPool>>,
        watermarks: Watermarks,
        clock: Clock,
        sink: Arc<dyn EventSink>,
    ) -> Self {
        let slots = store.config().capacity as usize;
        Self {
            store,
            pools,
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
                if self.evict(batch) > 0 {
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
        if self.excess() > 0
            && let Some(reclaimer) = self.reclaimer.get()
        {
            reclaimer.wake();
        }
        out.len() - before
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
        Reserved { memory, stored_before: self.stored.load(Ordering::Relaxed) }
    }

    /// Whether a resident came after a reservation was made: two saves of one block at once.
    pub(super) fn came_after(&self, found: &Found, stored_before: u64) -> bool {
        let at = self.stored_at.get(found.id.slot as usize);
        at.is_some_and(|at| at.load(Ordering::Relaxed) > stored_before)
    }

    /// Makes a block resident; a fetched one is pinned once.
    pub(super) fn admit(
        &self,
        key: BlockKey,
        memory: Reservation,
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
    pub(super) fn admit_fetched(
        &self,
        key: BlockKey,
        memory: Reservation,
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
        self.digests.of(partition)
    }

    /// Tells the registry what is true of a key now, behind a change of it.
    fn tell(&self, key: BlockKey, is_here: bool) {
        let note = |is_here| match self.announcer.get() {
            Some(announcer) if is_here => announcer.resident(key),
            Some(announcer) => announcer.gone(key),
            None => {}
        };
        self.digests.change(&key, is_here, note, || self.store.lookup(&key).is_some());
    }

    /// Evicts up to `max` residents and gives their memory back; how many bytes, 0 where none went.
    pub(super) fn evict(&self, max: usize) -> u64 {
        let mut victims = Vec::with_capacity(max);
        self.store.evict_batch(max, &mut victims);
        // Relaxed: advice to those who read from here.
        self.stuck.store(victims.is_empty(), Ordering::Relaxed);
        let now = self.clock.now();
        for victim in &victims {
            self.evictions.note(victim, now);
            self.release(victim);
            self.tell(victim.key, false);
        }
        victims.iter().map(|victim| u64::from(victim.payload.extent.len)).sum()
    }

    fn release(&self, victim: &Evicted) {
        let Extent { pool, .. } = victim.payload.extent;
        let released = self.pools.iter().find(|own| own.id() == pool).map(|pool| {
            // Nobody has a pin on the victim, and it is in no list any more.
            pool.release(victim.payload.extent)
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

    pub(super) fn usage(&self) -> Usage {
        self.pools.iter().map(|pool| pool.usage()).fold(
            Usage { bytes: 0, used: 0 },
            |sum, usage| Usage { bytes: sum.bytes + usage.bytes, used: sum.used + usage.used },
        )
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

    /// How long others should hold back, milliseconds; 0 without pressure. A pool that is only full is
    /// none: leases need no memory, and what they keep from eviction is not missed as long as something
    /// else can go. So whoever reads does not notice a reclaimer that is late.
    pub(super) fn pause_ms(&self) -> u32 {
        let pressed = self.stuck.load(Ordering::Relaxed) && self.excess() > 0;
        if pressed { PAUSE_UNDER_PRESSURE_MS } else { 0 }
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

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::event::Discard;
    use crate::memory::PoolOptions;
    use crate::policy::Policy;
    use crate::store::StoreConfig;
    use crate::types::{BlockHash, NamespaceId, PoolId};

    #[test]
    fn readers_hold_back_only_where_what_they_keep_is_missed() {
        let (id, bytes) = (PoolId(0), 16 << 10);
        let options = PoolOptions { id, bytes, huge_pages: None, lock: false, numa_node: None };
        let config = StoreConfig { capacity: 100, policy: Policy::default() };
        let (marks, sink) = (Watermarks::new(500, 250).unwrap(), Arc::new(Discard));
        let store = Arc::new(Store::new(config, sink.clone()).unwrap());
        let pools = vec![HostPool::create(&options).unwrap()];
        let residency = Residency::new(store, pools, marks, Clock::start(), sink);
        let key = |name: u8| BlockKey {
            namespace: NamespaceId(1),
            hash: BlockHash::new(&[name]).unwrap(),
        };
        for name in 0..12 {
            let memory = residency.reserve(&[1 << 10]).unwrap().pop().unwrap();
            residency.admit(key(name), memory, 0, Origin::Saved { owners: None });
        }
        assert!(residency.excess() > 0);
        assert_eq!(residency.pause_ms(), 0, "there is much to evict");
        let pins: Vec<_> =
            (0..12).map(|name| residency.store.pin(&key(name)).unwrap().id).collect();
        assert_eq!(residency.reclaim(), Reclaimed::Stuck);
        assert_eq!(residency.pause_ms(), PAUSE_UNDER_PRESSURE_MS);
        assert_eq!(residency.store.unpin_batch(&pins), 0);
        assert_eq!(residency.reclaim(), Reclaimed::Some);
        assert_eq!((residency.reclaim(), residency.pause_ms()), (Reclaimed::Enough, 0));
        assert_eq!(residency.usage().used, 4 << 10);
    }
}
