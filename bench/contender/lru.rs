//! One least-recently-used list under one mutex: what most projects write first. No ranks.

use std::sync::Arc;

use foldhash::fast::RandomState;
use hashlink::LruCache;
use kvrail::cli::CliError;
use kvrail::cli::bench::store::Contender;
use kvrail::store::Payload;
use kvrail::types::BlockKey;
use parking_lot::Mutex;

pub(crate) struct Lru(Mutex<LruCache<BlockKey, Arc<Payload>, RandomState>>);

impl Contender for Lru {
    type Pin = Arc<Payload>;
    type Hand = ();

    fn new(capacity: u32) -> Result<Self, CliError> {
        let list = LruCache::with_hasher(capacity as usize, RandomState::default());
        Ok(Self(Mutex::new(list)))
    }

    fn read(&self, (): &mut (), key: &BlockKey) -> Option<Arc<Payload>> {
        self.0.lock().get(key).cloned()
    }

    fn insert(&self, (): &mut (), key: &BlockKey, payload: Payload) -> Option<Arc<Payload>> {
        let block = Arc::new(payload);
        self.0.lock().insert(*key, Arc::clone(&block));
        Some(block)
    }

    fn release(&self, pin: Arc<Payload>) {
        drop(pin);
    }

    fn lend(&self, (): &mut (), keys: &[BlockKey], pins: &mut Vec<Arc<Payload>>) {
        let mut list = self.0.lock();
        pins.extend(keys.iter().filter_map(|key| list.get(key).cloned()));
    }

    fn give_back(&self, pins: &mut Vec<Arc<Payload>>) {
        pins.clear();
    }

    fn reclaim(&self, (): &mut (), max: usize) -> Option<usize> {
        let mut list = self.0.lock();
        let (mut gone, mut looked) = (0, list.len());
        while gone < max && looked > 0 {
            let Some((key, block)) = list.remove_lru() else { break };
            if Arc::strong_count(&block) > 1 {
                list.insert(key, block);
            } else {
                gone += 1;
            }
            looked -= 1;
        }
        Some(gone)
    }
}
