//! What announcing all residents again does to lends: a lend pins its blocks in the store and lets go of
//! them, as a holder's data thread does, while an announcer tells a registry of the whole store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::event::Discard;
use kvrail::net::{GrpcRegistry, RegistryTimeouts};
use kvrail::policy::{Origin, Policy};
use kvrail::registry::OwnerRegistry;
use kvrail::runtime::announce::{AnnounceOptions, Announcer, AnnouncerParts, Hints, Residents};
use kvrail::store::{Payload, Store, StoreConfig};
use kvrail::types::{BlockKey, Extent, PoolId};

use crate::measure::{identity, key};
use crate::processes::Server;

/// Blocks of one lend.
pub(crate) const LEND: usize = 64;

/// Lends that are timed before the residents are announced, after as many to warm up.
const LENDS: usize = 20_000;

/// Microseconds, p50 and p99.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lends {
    pub(crate) before: (f64, f64),
    pub(crate) during: (f64, f64),
    pub(crate) took: Duration,
}

#[derive(Debug)]
struct Held(Arc<Store>);

impl Residents for Held {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let mut views = Vec::with_capacity(max);
        let next = self.0.list(cursor, u32::try_from(max).unwrap(), &mut views);
        out.extend(views.iter().map(|view| view.key));
        next
    }
}

impl Hints for Held {
    fn owners(&self, key: &BlockKey, owners: u32) {
        self.0.owner_hint(key, owners);
    }
}

fn store(residents: u32) -> (Arc<Store>, Vec<BlockKey>) {
    let config = StoreConfig { capacity: residents, policy: Policy::default() };
    let store = Arc::new(Store::new(config, Arc::new(Discard)).unwrap());
    let keys: Vec<BlockKey> = (0..residents).map(key).collect();
    for (key, at) in keys.iter().zip(0..) {
        let extent = Extent { pool: PoolId(0), offset: at * 64, len: 64 };
        let payload = Payload { extent, checksum: 0 };
        store.insert(*key, payload, Origin::Saved { owners: None }, false).unwrap();
    }
    (store, keys)
}

/// Lends runs of blocks until `enough`; the time of each, in microseconds.
fn lend(store: &Store, keys: &[BlockKey], mut enough: impl FnMut(usize) -> bool) -> Vec<f64> {
    let (mut times, mut at) = (Vec::new(), 0);
    let mut found = Vec::new();
    while !enough(times.len()) {
        at = (at + 7_919 * LEND) % (keys.len() - LEND);
        let start = Instant::now();
        store.pin_batch(&keys[at..at + LEND], &mut found);
        let held: Vec<_> = found.iter().map(|found| found.unwrap().id).collect();
        assert_eq!(store.unpin_batch(&held), 0);
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    times
}

fn percentiles(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

pub(crate) fn lends(residents: u32) -> Lends {
    let (store, keys) = store(residents);
    let server = Server::start();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let entered = runtime.enter();
    let timeouts =
        RegistryTimeouts { call: Duration::from_secs(60), ..RegistryTimeouts::default() };
    let registry = GrpcRegistry::new(&server.address.to_string(), timeouts).unwrap();
    drop(lend(&store, &keys, |times| times == LENDS));
    let before = percentiles(lend(&store, &keys, |times| times == LENDS));
    let held = Arc::new(Held(Arc::clone(&store)));
    let start = Instant::now();
    let announcer = Announcer::spawn(AnnouncerParts {
        registry: Arc::new(registry) as Arc<dyn OwnerRegistry>,
        identity: identity(),
        residents: Arc::clone(&held) as Arc<dyn Residents>,
        hints: held as Arc<dyn Hints>,
        events: Arc::new(Discard),
        options: AnnounceOptions::default(),
    })
    .unwrap();
    drop(entered);
    let handle = announcer.handle();
    let during = lend(&store, &keys, |times| times % 256 == 255 && handle.state().resyncs > 0);
    let took = start.elapsed();
    Lends { before, during: percentiles(during), took }
}
