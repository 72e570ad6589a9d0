//! The announcer against a registry in this process whose answers are lost and whose calls come late.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::event::Event;
use crate::registry::{
    Announced, Batch, Beat, Directory, DirectoryOptions, Heartbeat, InProcess, Missing, Partition,
    Plan, PlanQuery, Presence, RegistryEpoch, RegistryError, RegistryFuture, Stamp, Withdrawn,
};
use crate::types::{BlockHash, NamespaceId, NodeEpoch, NodeId, Timestamp};

const KEYS: u32 = 64;

fn key(number: u32) -> BlockKey {
    BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&number.to_le_bytes()).unwrap() }
}

/// Loses a third of the answers, of which half take effect at once and half much later.
#[derive(Debug)]
struct Flaky {
    inner: InProcess,
    calls: AtomicU64,
    afresh: AtomicU64,
    /// Calls that come late and have not come yet.
    underway: Arc<AtomicU64>,
    faults: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answered,
    AnswerLost,
    Late,
}

impl Flaky {
    fn new(faults: bool) -> Arc<Self> {
        let directory = Directory::new(RegistryEpoch(1), DirectoryOptions::default());
        Arc::new(Self {
            inner: InProcess::new(Arc::new(directory), || Timestamp::ZERO),
            calls: AtomicU64::new(0),
            afresh: AtomicU64::new(0),
            underway: Arc::default(),
            faults,
        })
    }

    fn fate(&self) -> Fate {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        // Fibonacci hashing: an even, repeatable sequence.
        match (call.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60, self.faults) {
            (0..=2, true) => Fate::AnswerLost,
            (3..=5, true) => Fate::Late,
            _ => Fate::Answered,
        }
    }

    fn missing(&self) -> BTreeSet<u32> {
        let missing = |number: &u32| {
            let keys = [key(*number)];
            let query = PlanQuery::new(NodeId([9; 16]), &keys);
            let plan = self.inner.directory().plan(query, Timestamp::ZERO);
            plan.unwrap().missing == 1
        };
        (0..KEYS).filter(missing).collect()
    }
}

const LOST: RegistryError = RegistryError::TimedOut(Duration::ZERO);

impl Flaky {
    /// Delivers a call whose sender has given up on it.
    fn later(&self, batch: Batch<'_>, announce: bool) {
        let (stamp, keys) = (batch.stamp, batch.keys.to_vec());
        let directory = Arc::clone(self.inner.directory());
        let underway = Arc::clone(&self.underway);
        underway.fetch_add(1, Ordering::AcqRel);
        drop(tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(stamp.sequence % 7)).await;
            let batch = Batch { stamp, keys: &keys };
            // It may be refused as late: that is the point.
            if announce {
                drop(directory.announce(batch, Timestamp::ZERO));
            } else {
                drop(directory.withdraw(batch, Timestamp::ZERO));
            }
            underway.fetch_sub(1, Ordering::AcqRel);
        }));
    }
}

impl OwnerRegistry for Flaky {
    fn heartbeat<'a>(
        &'a self,
        node: &'a NodeIdentity,
        heartbeat: Heartbeat<'a>,
    ) -> RegistryFuture<'a, Beat> {
        let fate = self.fate();
        let afresh = u64::from(heartbeat.presence == Presence::Afresh);
        self.afresh.fetch_add(afresh, Ordering::Relaxed);
        Box::pin(async move {
            let answer = self.inner.heartbeat(node, heartbeat).await;
            if fate == Fate::Answered { answer } else { Err(LOST) }
        })
    }

    fn announce<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Announced> {
        let fate = self.fate();
        Box::pin(async move {
            tokio::task::yield_now().await;
            if fate == Fate::Late {
                self.later(batch, true);
                return Err(LOST);
            }
            let answer = self.inner.announce(batch).await;
            if fate == Fate::Answered { answer } else { Err(LOST) }
        })
    }

    fn withdraw<'a>(&'a self, batch: Batch<'a>) -> RegistryFuture<'a, Withdrawn> {
        let fate = self.fate();
        Box::pin(async move {
            tokio::task::yield_now().await;
            if fate == Fate::Late {
                self.later(batch, false);
                return Err(LOST);
            }
            let answer = self.inner.withdraw(batch).await;
            if fate == Fate::Answered { answer } else { Err(LOST) }
        })
    }

    fn forget<'a>(&'a self, stamp: Stamp, partition: Partition) -> RegistryFuture<'a, ()> {
        self.inner.forget(stamp, partition)
    }

    fn report_missing<'a>(&'a self, missing: Missing<'a>) -> RegistryFuture<'a, u32> {
        self.inner.report_missing(missing)
    }

    fn plan<'a>(&'a self, query: PlanQuery<'a>) -> RegistryFuture<'a, Plan> {
        self.inner.plan(query)
    }
}

/// The truth: each key under a lock of its own, held while the announcer is told.
#[derive(Debug)]
struct Truth {
    keys: Vec<Mutex<bool>>,
    hints: AtomicU64,
    answered: AtomicU64,
    failed: AtomicU64,
    seen: AtomicU64,
}

impl Truth {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            keys: (0..KEYS).map(|_| Mutex::new(false)).collect(),
            hints: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            seen: AtomicU64::new(0),
        })
    }

    fn flip(&self, number: u32, handle: &AnnouncerHandle) {
        let mut resident = self.keys[usize::try_from(number).unwrap()].lock().unwrap();
        *resident = !*resident;
        if *resident {
            handle.resident(key(number));
        } else {
            handle.gone(key(number));
        }
    }

    fn absent(&self) -> BTreeSet<u32> {
        let numbered = (0..).zip(&self.keys);
        let absent = numbered.filter(|(_, resident)| !*resident.lock().unwrap());
        absent.map(|(number, _)| number).collect()
    }
}

impl Residents for Truth {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let end = (cursor + u32::try_from(max).unwrap()).min(KEYS);
        for number in cursor..end {
            if *self.keys[usize::try_from(number).unwrap()].lock().unwrap() {
                out.push(key(number));
            }
        }
        (end < KEYS).then_some(end)
    }
}

impl Hints for Truth {
    fn owners(&self, _key: &BlockKey, owners: u32) {
        assert_eq!(owners, 1);
        self.hints.fetch_add(1, Ordering::Relaxed);
    }
}

impl EventSink for Truth {
    fn emit(&self, event: Event) {
        let count = match event {
            Event::RegistryAnswered { .. } => &self.answered,
            Event::RegistryFailed { .. } => &self.failed,
            Event::OwnersSeen { .. } => &self.seen,
            _ => return,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

fn parts(registry: &Arc<Flaky>, truth: &Arc<Truth>, pending_max: usize) -> AnnouncerParts {
    AnnouncerParts {
        registry: Arc::clone(registry) as Arc<dyn OwnerRegistry>,
        identity: NodeIdentity {
            node: NodeId([1; 16]),
            epoch: NodeEpoch(1),
            address: "a:1".to_owned(),
        },
        residents: Arc::clone(truth) as Arc<dyn Residents>,
        hints: Arc::clone(truth) as Arc<dyn Hints>,
        events: Arc::clone(truth) as Arc<dyn EventSink>,
        options: AnnounceOptions {
            heartbeat_interval: Duration::from_millis(5),
            flush_interval: Duration::from_millis(1),
            batch: 8,
            backoff: (Duration::from_micros(100), Duration::from_millis(2)),
            pending_max,
            ..AnnounceOptions::default()
        },
    }
}

fn spawn(registry: &Arc<Flaky>, truth: &Arc<Truth>, pending_max: usize) -> Announcer {
    Announcer::spawn(parts(registry, truth, pending_max)).unwrap()
}

const SOON: Duration = Duration::from_secs(60);

/// Flips keys from four tasks while calls fail and come late; returns how often the node registered
/// afresh. After each round the registry must know exactly what is true.
async fn converges(pending_max: usize) -> u64 {
    let (registry, truth) = (Flaky::new(true), Truth::new());
    let announcer = spawn(&registry, &truth, pending_max);
    let handle = announcer.handle();
    for round in 0..40_u32 {
        let flips = (0..4_u32).map(|task| {
            let (truth, handle) = (Arc::clone(&truth), handle.clone());
            tokio::spawn(async move {
                let mut number = task + round;
                for step in 0..80_u32 {
                    number = (number * 5 + step * 7 + 1 + task) % KEYS;
                    truth.flip(number, &handle);
                    if step % 20 == 0 {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
            })
        });
        for flip in flips.collect::<Vec<_>>() {
            flip.await.unwrap();
        }
        handle.flush(SOON).await.unwrap();
        while registry.underway.load(Ordering::Acquire) > 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!(registry.missing(), truth.absent(), "{:?}", handle.state());
    }
    assert!(truth.failed.load(Ordering::Relaxed) > 10);
    assert!(truth.answered.load(Ordering::Relaxed) > 10);
    announcer.shutdown(false, SOON).await;
    let hints = truth.hints.load(Ordering::Relaxed);
    assert_eq!(hints, truth.seen.load(Ordering::Relaxed));
    registry.afresh.load(Ordering::Relaxed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn announce_and_withdraw_of_one_key_are_never_reordered() {
    let afresh = converges(1024).await;
    assert!(afresh < 5, "the bound was met, so that nothing was shown: {afresh}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_queue_over_its_bound_repairs_itself_by_a_resync() {
    let afresh = converges(16).await;
    assert!(afresh >= 5, "the bound was hardly met: {afresh}");
}

#[tokio::test]
async fn a_flush_ends_with_the_announcer() {
    let (registry, truth) = (Flaky::new(false), Truth::new());
    let announcer = spawn(&registry, &truth, 1024);
    let handle = announcer.handle();
    truth.flip(3, &handle);
    handle.flush(SOON).await.unwrap();
    assert_eq!(registry.missing().len(), 63);
    announcer.shutdown(true, SOON).await;
    assert_eq!(registry.missing().len(), 64, "the registry forgot it");
    truth.flip(4, &handle);
    assert_eq!(handle.flush(SOON).await, Err(FlushError::Ended));
    assert!(!handle.state().connected);
}

#[tokio::test]
async fn a_resync_keeps_its_pace() {
    let (registry, truth) = (Flaky::new(false), Truth::new());
    for resident in &truth.keys {
        *resident.lock().unwrap() = true;
    }
    let started = tokio::time::Instant::now();
    let mut parts = parts(&registry, &truth, 1024);
    parts.options.resync_rate = 200;
    let announcer = Announcer::spawn(parts).unwrap();
    let handle = announcer.handle();
    while handle.state().resyncs == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // 64 keys at 200 a second, less the first batch and the slack.
    assert!(started.elapsed() > Duration::from_millis(200));
    assert_eq!(registry.missing().len(), 0);
}
