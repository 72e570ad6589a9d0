//! Caches that evict when they like, and in an order that is theirs: no exact LRU among them but one
//! shard of foyer's.

use std::sync::Arc;

use foldhash::fast::RandomState;
use foyer_memory::{Cache as FoyerCache, CacheBuilder, CacheEntry, LruConfig};
use kvrail::cli::CliError;
use kvrail::cli::bench::store::Contender;
use kvrail::store::Payload;
use kvrail::types::BlockKey;

/// Implements what is the same for a cache that needs no batches.
macro_rules! cache {
    ($type:ty, $pin:ty, |$capacity:ident| $new:expr, |$own:ident, $key:ident| $get:expr,
     |$to:ident, $new_key:ident, $payload:ident| $insert:expr) => {
        impl Contender for $type {
            type Pin = $pin;
            type Hand = ();

            fn new($capacity: u32) -> Result<Self, CliError> {
                Ok($new)
            }

            fn read(&self, (): &mut (), $key: &BlockKey) -> Option<$pin> {
                let $own = self;
                $get
            }

            fn insert(&self, (): &mut (), $new_key: &BlockKey, $payload: Payload) -> Option<$pin> {
                let $to = self;
                Some($insert)
            }

            fn release(&self, pin: $pin) {
                drop(pin);
            }

            fn lend(&self, (): &mut (), keys: &[BlockKey], pins: &mut Vec<$pin>) {
                pins.extend(keys.iter().filter_map(|key| self.read(&mut (), key)));
            }

            fn give_back(&self, pins: &mut Vec<$pin>) {
                pins.clear();
            }

            fn reclaim(&self, (): &mut (), _max: usize) -> Option<usize> {
                None
            }
        }
    };
}

/// moka as it comes: TinyLFU, whose order is settled some time after the hits.
pub(crate) struct Moka(moka::sync::Cache<BlockKey, Arc<Payload>, RandomState>);

cache!(
    Moka,
    Arc<Payload>,
    |capacity| Self(
        moka::sync::Cache::builder()
            .max_capacity(u64::from(capacity))
            .build_with_hasher(RandomState::default())
    ),
    |cache, key| cache.0.get(key),
    |cache, key, payload| {
        let block = Arc::new(payload);
        cache.0.insert(*key, Arc::clone(&block));
        block
    }
);

/// `quick_cache` as it comes: a clock per shard.
pub(crate) struct Quick(
    quick_cache::sync::Cache<BlockKey, Arc<Payload>, quick_cache::UnitWeighter, RandomState>,
);

cache!(
    Quick,
    Arc<Payload>,
    |capacity| Self(quick_cache::sync::Cache::with(
        capacity as usize,
        u64::from(capacity),
        quick_cache::UnitWeighter,
        RandomState::default(),
        quick_cache::sync::DefaultLifecycle::default(),
    )),
    |cache, key| cache.0.get(key),
    |cache, key, payload| {
        let block = Arc::new(payload);
        cache.0.insert(*key, Arc::clone(&block));
        block
    }
);

/// foyer's cache in memory with its LRU over eight shards; an entry that is held is in no list.
pub(crate) struct Foyer(FoyerCache<BlockKey, Payload, RandomState>);

cache!(
    Foyer,
    CacheEntry<BlockKey, Payload, RandomState>,
    |capacity| Self(
        CacheBuilder::new(capacity as usize)
            .with_shards(8)
            .with_eviction_config(LruConfig::default())
            .with_hash_builder(RandomState::default())
            .build()
    ),
    |cache, key| cache.0.get(key),
    |cache, key, payload| cache.0.insert(*key, payload)
);
