//! What announcing all residents again does to lends: a lend pins its blocks in the store and lets go of
//! them, as a holder's data thread does, while an announcer tells a registry of the whole store.

use std::sync::Arc;
use std::time::Duration;

use super::Server;
use super::rates::{TIMEOUTS, identity, runtime};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::cli::bench::latency::Latency;
use crate::cli::bench::store::{key, payload};
use crate::event::Discard;
use crate::net::GrpcRegistry;
use crate::policy::{Origin, Policy};
use crate::registry::OwnerRegistry;
use crate::runtime::announce::{AnnounceOptions, Announcer, AnnouncerParts, Hints, Residents};
use crate::runtime::clock::Clock;
use crate::store::{Store, StoreConfig};
use crate::types::BlockKey;

/// Blocks of one lend.
pub(super) const LEND: usize = 64;

/// Lends that are timed before the residents are announced, after as many to warm up.
const LENDS: u32 = 20_000;

/// Lends between two looks at whether it is over.
const LOOK: u32 = 256;

/// How far the next lend is from the last, in lends: a prime, so that all residents have their turn.
const STRIDE: usize = 7_919;

/// Lends before and meanwhile, and how long it took.
#[derive(Debug)]
pub(super) struct Resync {
    pub(super) before: Latency,
    pub(super) during: Latency,
    pub(super) took: Duration,
}

#[derive(Debug)]
struct Held(Arc<Store>);

impl Residents for Held {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let mut views = Vec::with_capacity(max);
        let next = self.0.list(cursor, u32::try_from(max).unwrap_or(u32::MAX), &mut views);
        out.extend(views.iter().map(|view| view.key));
        next
    }
}

impl Hints for Held {
    fn owners(&self, key: &BlockKey, owners: u32) {
        self.0.owner_hint(key, owners);
    }
}

/// A store full of residents.
fn filled(residents: u32) -> Result<(Arc<Store>, Vec<BlockKey>), CliError> {
    let config = StoreConfig { capacity: residents, policy: Policy::default() };
    let store = Arc::new(Store::new(config, Arc::new(Discard)).map_err(CliError::failed)?);
    let keys: Vec<BlockKey> = (0..u64::from(residents)).map(key).collect();
    for (key, number) in keys.iter().zip(0..) {
        let saved = Origin::Saved { owners: None };
        store.insert(*key, payload(number), saved, false).map_err(CliError::failed)?;
    }
    Ok((store, keys))
}

/// What lends.
struct Lender<'a> {
    store: &'a Store,
    keys: &'a [BlockKey],
    clock: Clock,
    at: usize,
}

impl Lender<'_> {
    /// Lends runs of blocks until that is `enough`, by the number of lends so far.
    fn lend(&mut self, mut enough: impl FnMut(u32) -> bool) -> Result<Latency, CliError> {
        let (mut times, mut count) = (Latency::new()?, 0);
        let (mut found, mut held) = (Vec::new(), Vec::with_capacity(LEND));
        while !enough(count) {
            self.at = (self.at + STRIDE * LEND) % (self.keys.len() - LEND);
            let asked = self.keys.get(self.at..self.at + LEND).unwrap_or_default();
            let start = self.clock.now();
            self.store.pin_batch(asked, &mut found);
            held.clear();
            held.extend(found.iter().flatten().map(|found| found.id));
            let unknown = self.store.unpin_batch(&held);
            times.record(self.clock.now().since(start));
            if held.len() != LEND || unknown != 0 {
                return Err(CliError::failed("a resident is gone that nobody evicts"));
            }
            count += 1;
        }
        Ok(times)
    }
}

/// `None` where a signal came first.
pub(super) fn measure(residents: u32, bench: &Bench) -> Result<Option<Resync>, CliError> {
    let (store, keys) = filled(residents)?;
    let clock = Clock::start();
    let mut lender = Lender { store: &store, keys: &keys, clock, at: 0 };
    let enough = |lends| lends == LENDS || bench.is_interrupted();
    drop(lender.lend(enough)?);
    let before = lender.lend(enough)?;
    let server = Server::start()?;
    let runtime = runtime()?;
    let held = Arc::new(Held(Arc::clone(&store)));
    let start = clock.now();
    let announcer = {
        let _entered = runtime.enter();
        let registry = GrpcRegistry::new(&server.address()?, TIMEOUTS).map_err(CliError::failed)?;
        Announcer::spawn(AnnouncerParts {
            registry: Arc::new(registry) as Arc<dyn OwnerRegistry>,
            identity: identity(),
            residents: Arc::clone(&held) as Arc<dyn Residents>,
            hints: held as Arc<dyn Hints>,
            events: Arc::new(Discard),
            options: AnnounceOptions::default(),
        })
        .map_err(CliError::failed)?
    };
    let handle = announcer.handle();
    let during = lender.lend(|lends| {
        lends % LOOK == LOOK - 1 && (handle.state().resyncs > 0 || bench.is_interrupted())
    })?;
    let took = clock.now().since(start);
    Ok((!bench.is_interrupted()).then_some(Resync { before, during, took }))
}
