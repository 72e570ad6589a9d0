//! The structure of PegaFlow's read cache: the payloads and two classes of eviction, each a map with a
//! list of its own, all under one mutex; keys are a namespace as `String` and a hash as `Vec<u8>`, made
//! for each look-up. A victim that is in use moves to the newest end of its class.

use std::sync::Arc;

use hashlink::LruCache;
use kvrail::cli::CliError;
use kvrail::cli::bench::store::Contender;
use kvrail::store::Payload;
use kvrail::types::BlockKey;
use parking_lot::Mutex;

#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    namespace: String,
    hash: Vec<u8>,
}

impl Key {
    fn of(key: &BlockKey) -> Self {
        Self { namespace: "model-7b/tp0".to_owned(), hash: key.hash.as_bytes().to_vec() }
    }
}

struct Inner {
    payloads: LruCache<Key, Arc<Payload>>,
    /// What another node has, too.
    reclaimable: LruCache<Key, ()>,
    /// The last copy.
    retained: LruCache<Key, ()>,
}

impl Inner {
    fn get(&mut self, key: &Key) -> Option<Arc<Payload>> {
        let block = self.payloads.get(key).cloned()?;
        if self.reclaimable.get(key).is_none() {
            self.retained.get(key);
        }
        Some(block)
    }

    /// Evicts of one class.
    fn reclaim(&mut self, max: usize, retained: bool) -> usize {
        let Self { payloads, reclaimable, retained: last } = self;
        let class = if retained { last } else { reclaimable };
        let (mut gone, mut looked) = (0, class.len());
        while gone < max && looked > 0 {
            let Some((key, ())) = class.remove_lru() else { break };
            looked -= 1;
            if payloads.peek(&key).is_some_and(|block| Arc::strong_count(block) > 1) {
                class.insert(key, ());
            } else {
                payloads.remove(&key);
                gone += 1;
            }
        }
        gone
    }
}

pub(crate) struct PegaFlow {
    capacity: usize,
    inner: Mutex<Inner>,
}

impl Contender for PegaFlow {
    type Pin = Arc<Payload>;
    type Hand = ();

    fn new(capacity: u32) -> Result<Self, CliError> {
        let inner = Inner {
            payloads: LruCache::new_unbounded(),
            reclaimable: LruCache::new_unbounded(),
            retained: LruCache::new_unbounded(),
        };
        Ok(Self { capacity: capacity as usize, inner: Mutex::new(inner) })
    }

    fn read(&self, (): &mut (), key: &BlockKey) -> Option<Arc<Payload>> {
        let key = Key::of(key);
        self.inner.lock().get(&key)
    }

    fn insert(&self, (): &mut (), key: &BlockKey, payload: Payload) -> Option<Arc<Payload>> {
        // Half of the blocks have a replica elsewhere.
        let replicated = key.hash.as_bytes().first().is_some_and(|byte| byte % 2 == 0);
        let (key, block) = (Key::of(key), Arc::new(payload));
        let mut inner = self.inner.lock();
        let Inner { payloads, reclaimable, retained } = &mut *inner;
        payloads.insert(key.clone(), Arc::clone(&block));
        if replicated { reclaimable } else { retained }.insert(key, ());
        if inner.payloads.len() > self.capacity && inner.reclaim(1, false) == 0 {
            inner.reclaim(1, true);
        }
        Some(block)
    }

    fn release(&self, pin: Arc<Payload>) {
        drop(pin);
    }

    fn lend(&self, (): &mut (), keys: &[BlockKey], pins: &mut Vec<Arc<Payload>>) {
        let keys: Vec<Key> = keys.iter().map(Key::of).collect();
        let mut inner = self.inner.lock();
        pins.extend(keys.iter().filter_map(|key| inner.get(key)));
    }

    fn give_back(&self, pins: &mut Vec<Arc<Payload>>) {
        pins.clear();
    }

    fn reclaim(&self, (): &mut (), max: usize) -> Option<usize> {
        let mut inner = self.inner.lock();
        let gone = inner.reclaim(max, false);
        Some(gone + inner.reclaim(max - gone, true))
    }
}
