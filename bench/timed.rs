//! A fabric whose calls are timed from outside, on the data thread that owns it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use kvrail::fabric::{
    Access, Capabilities, ConnectionId, EventBatch, Fabric, FabricError, FabricEvent, ReadBatch,
    Region, RegionId, RemoteSpan, Wake, WindowId,
};
use kvrail::memory::{ForeignFabric, Mapping, Pinner};
use kvrail::verbs::VerbsFabric;

/// Nanoseconds since a moment that all threads of this process share.
pub(crate) fn nanos() -> u64 {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    u64::try_from(ORIGIN.get_or_init(Instant::now).elapsed().as_nanos()).unwrap()
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// The data thread asks for the next thing.
    Asked,
    /// A poll returned, and what it brought.
    Polled { message: bool, completed: bool },
    /// A message is about to be sent.
    Sending,
    /// It was posted.
    Sent,
    /// READs are about to be posted.
    Posting,
    /// They were.
    Posted,
}

/// Marks with their moments, in order.
pub(crate) type Marks = Arc<Mutex<Vec<(u64, Mark)>>>;

/// How much is marked. Each mark costs, under emulation more than a microsecond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detail {
    /// Nothing.
    None,
    /// What polls bring, and that something is asked for or about to be sent.
    Ends,
    /// All.
    All,
}

/// Something that a data thread asks for itself.
pub(crate) type Ask = Box<dyn FnOnce() + Send>;

/// What a data thread asks for by itself, one after the other: as `ib_read_lat` posts from the thread that
/// polls, with no other thread of its process at work. On a machine with no more processors than data
/// threads, a caller that is on its way to sleep stands in the way of one of them; and where a thread
/// has waited for milliseconds, the caches of its processor have forgotten what comes next.
#[derive(Default)]
pub(crate) struct Asks {
    left: Mutex<VecDeque<Ask>>,
    /// Whether the one before it is over.
    due: AtomicBool,
}

impl Asks {
    pub(crate) fn add(&self, ask: Ask) {
        self.left.lock().unwrap().push_back(ask);
    }

    /// Lets the next one go, from the data thread's next poll on.
    pub(crate) fn let_go(&self) {
        self.due.store(true, Ordering::Release);
    }

    pub(crate) fn are_over(&self) -> bool {
        self.left.lock().unwrap().is_empty()
    }
}

/// Between two reads: what the kernel still does for the one before it is over then.
const PAUSE: Duration = Duration::from_micros(50);

/// A fabric that marks its calls.
pub(crate) struct Timed {
    fabric: VerbsFabric,
    detail: Detail,
    marks: Marks,
    asks: Arc<Asks>,
}

impl Timed {
    pub(crate) fn new(fabric: VerbsFabric, detail: Detail, asks: Arc<Asks>) -> (Self, Marks) {
        // No mark waits for memory.
        let marks = Arc::new(Mutex::new(Vec::with_capacity(1 << 18)));
        (Self { fabric, detail, marks: Arc::clone(&marks), asks }, marks)
    }

    /// Asks for the next thing, where it is due. The poll that follows finds it.
    fn ask(&self) {
        if !self.asks.due.swap(false, Ordering::Acquire) {
            return;
        }
        let end = nanos() + u64::try_from(PAUSE.as_nanos()).unwrap();
        while nanos() < end {
            std::thread::yield_now();
        }
        let next = self.asks.left.lock().unwrap().pop_front();
        if let Some(ask) = next {
            self.mark(Mark::Asked);
            ask();
        }
    }

    fn mark(&self, mark: Mark) {
        let ends = matches!(mark, Mark::Asked | Mark::Polled { .. } | Mark::Sending);
        if self.detail == Detail::None || self.detail == Detail::Ends && !ends {
            return;
        }
        let mut marks = self.marks.lock().unwrap();
        if marks.len() < marks.capacity() {
            marks.push((nanos(), mark));
        }
    }
}

impl ForeignFabric for Timed {
    type Pinned = <VerbsFabric as ForeignFabric>::Pinned;

    fn pinner(&self, access: Access) -> Pinner<Self::Pinned> {
        self.fabric.pinner(access)
    }

    fn adopt(&mut self, pinned: Self::Pinned) -> Result<Region, FabricError> {
        self.fabric.adopt(pinned)
    }

    fn disown(&mut self, region: RegionId) -> Option<Self::Pinned> {
        self.fabric.disown(region)
    }
}

impl Fabric for Timed {
    type Endpoint = SocketAddr;
    type Memory = Mapping;

    fn capabilities(&self) -> Capabilities {
        self.fabric.capabilities()
    }

    fn register(&mut self, memory: Arc<Mapping>, access: Access) -> Result<Region, FabricError> {
        self.fabric.register(memory, access)
    }

    fn deregister(&mut self, region: RegionId) {
        self.fabric.deregister(region);
    }

    fn connect(&mut self, to: &SocketAddr) -> Result<ConnectionId, FabricError> {
        self.fabric.connect(to)
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        self.fabric.admit(connection)
    }

    fn grant(
        &mut self,
        connection: ConnectionId,
        window: WindowId,
        span: &RemoteSpan,
    ) -> Result<u32, FabricError> {
        self.fabric.grant(connection, window, span)
    }

    fn revoke(&mut self, connection: ConnectionId, window: WindowId) -> Result<(), FabricError> {
        self.fabric.revoke(connection, window)
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        self.mark(Mark::Sending);
        let sent = self.fabric.send(connection, message);
        self.mark(Mark::Sent);
        sent
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        self.mark(Mark::Posting);
        let posted = self.fabric.post(connection, batch);
        self.mark(Mark::Posted);
        posted
    }

    fn close(&mut self, connection: ConnectionId) {
        self.fabric.close(connection);
    }

    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError> {
        self.ask();
        let polled = self.fabric.poll(batch, timeout);
        let any = |what: fn(&FabricEvent) -> bool| batch.events.iter().any(what);
        self.mark(Mark::Polled {
            message: any(|event| matches!(event, FabricEvent::Message { .. })),
            completed: any(|event| matches!(event, FabricEvent::Completed(_))),
        });
        polled
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.fabric.waker()
    }
}
