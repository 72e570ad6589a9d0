//! The announcer against a real registry that is absent, killed, and restarted empty.

use std::sync::atomic::{AtomicU32, Ordering};

use tokio::net::TcpSocket;
use tokio::runtime::Runtime;

use super::*;
use crate::event::Discard;
use crate::runtime::announce::{
    AnnounceOptions, Announcer, AnnouncerHandle, AnnouncerParts, Hints, Residents,
};

#[derive(Debug, Default)]
struct Node {
    residents: std::sync::Mutex<Vec<BlockKey>>,
    counts: AtomicU32,
    most: AtomicU32,
}

impl Residents for Node {
    fn list(&self, cursor: u32, max: usize, out: &mut Vec<BlockKey>) -> Option<u32> {
        let residents = self.residents.lock().unwrap();
        let start = usize::try_from(cursor).unwrap();
        let end = (start + max).min(residents.len());
        out.extend_from_slice(&residents[start..end]);
        (end < residents.len()).then_some(u32::try_from(end).unwrap())
    }
}

impl Hints for Node {
    fn owners(&self, _key: &BlockKey, owners: u32) {
        self.counts.fetch_add(1, Ordering::Relaxed);
        self.most.fetch_max(owners, Ordering::Relaxed);
    }
}

impl Node {
    fn hold(&self, handle: &AnnouncerHandle, keys: &[BlockKey]) {
        self.residents.lock().unwrap().extend_from_slice(keys);
        for key in keys {
            handle.resident(*key);
        }
    }
}

fn announcer(address: SocketAddr, node: u8) -> (Arc<Node>, Announcer) {
    let timeouts = RegistryTimeouts { connect: SOON, call: SOON };
    let state = Arc::new(Node::default());
    let announcer = Announcer::spawn(AnnouncerParts {
        registry: Arc::new(GrpcRegistry::new(&address.to_string(), timeouts).unwrap()),
        identity: identity(node),
        residents: Arc::clone(&state) as Arc<dyn Residents>,
        hints: Arc::clone(&state) as Arc<dyn Hints>,
        events: Arc::new(Discard),
        options: AnnounceOptions {
            heartbeat_interval: Duration::from_millis(50),
            backoff: (Duration::from_millis(20), Duration::from_millis(100)),
            batch: 64,
            ..AnnounceOptions::default()
        },
    });
    (state, announcer.unwrap())
}

/// A registry on a runtime of its own: dropping that ends its connections at once, as a kill does.
struct Process {
    runtime: Option<Runtime>,
    registryd: Registryd,
}

impl Process {
    async fn start(port: &Port) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let mut listener = None;
        // A registry that was killed there may still be about to let go.
        eventually("the port can be had", async || {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_reuseaddr(true).unwrap();
            let listening = socket.bind(port.address).and_then(|()| socket.listen(64));
            listener = listening.ok();
            listener.is_some()
        })
        .await;
        let listener = listener.unwrap().into_std().unwrap();
        let registryd = Registryd::new(Clock::start(), RegistrydOptions::default());
        let served = registryd.clone();
        drop(runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            served.serve(listener, std::future::pending()).await
        }));
        Self { runtime: Some(runtime), registryd }
    }

    fn kill(mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    fn owners(&self) -> u64 {
        self.registryd.stats().directory.owners
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A port that nobody else is given, whether or not somebody listens there now.
struct Port {
    address: SocketAddr,
    _bound: TcpSocket,
}

impl Port {
    fn new() -> Self {
        let bound = TcpSocket::new_v4().unwrap();
        // A listener with the same option may have the port as long as this one does not listen.
        bound.set_reuseaddr(true).unwrap();
        bound.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        Self { address: bound.local_addr().unwrap(), _bound: bound }
    }
}

const SOON: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_registry_that_is_absent_at_first_hears_everything_later() {
    let port = Port::new();
    let (node, announcer) = announcer(port.address, 1);
    let handle = announcer.handle();
    node.hold(&handle, &keys(0..300));
    eventually("it is said why", async || {
        let flushed = handle.flush(Duration::from_millis(50)).await;
        flushed.unwrap_err().to_string().contains("unreachable")
    })
    .await;
    let state = handle.state();
    assert!(!state.connected && state.queued == 300, "{state:?}");
    let process = Process::start(&port).await;
    handle.flush(SOON).await.unwrap();
    assert_eq!(process.owners(), 300);
    assert!(handle.state().connected);
    assert_eq!(node.most.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_registry_that_restarts_empty_hears_everything_again() {
    let port = Port::new();
    let process = Process::start(&port).await;
    let (node, announcer) = announcer(port.address, 1);
    let handle = announcer.handle();
    node.hold(&handle, &keys(0..1000));
    handle.flush(SOON).await.unwrap();
    assert_eq!(process.owners(), 1000);
    let first = handle.state().registration;
    process.kill();
    eventually("the loss is noticed", async || !handle.state().connected).await;
    node.hold(&handle, &keys(1000..1010));
    let process = Process::start(&port).await;
    eventually("all is announced again", async || process.owners() == 1010).await;
    assert_ne!(handle.state().registration, first);
    announcer.shutdown(true, SOON).await;
    assert_eq!(process.registryd.stats().directory.nodes, 0, "it said goodbye");
}

#[tokio::test]
async fn a_node_hears_how_many_hold_its_blocks() {
    let port = Port::new();
    let process = Process::start(&port).await;
    let (one, first) = announcer(port.address, 1);
    let (two, second) = announcer(port.address, 2);
    one.hold(&first.handle(), &keys(0..10));
    first.handle().flush(SOON).await.unwrap();
    two.hold(&second.handle(), &keys(5..15));
    second.handle().flush(SOON).await.unwrap();
    assert_eq!(one.most.load(Ordering::Relaxed), 1);
    assert_eq!(two.most.load(Ordering::Relaxed), 2);
    assert!(two.counts.load(Ordering::Relaxed) >= 10);
    for key in keys(5..15) {
        second.handle().gone(key);
    }
    second.handle().flush(SOON).await.unwrap();
    assert_eq!(process.owners(), 10);
    first.shutdown(false, SOON).await;
    assert_eq!(process.registryd.stats().directory.nodes, 2, "no goodbye");
}

#[tokio::test]
async fn a_registry_that_forgot_the_node_alone_hears_everything_again() {
    let port = Port::new();
    let process = Process::start(&port).await;
    let (node, announcer) = announcer(port.address, 1);
    let handle = announcer.handle();
    node.hold(&handle, &keys(0..500));
    handle.flush(SOON).await.unwrap();
    let leaving = Heartbeat { presence: Presence::Leaving, ..Heartbeat::default() };
    let now = Clock::start().now();
    let directory = process.registryd.directory();
    directory.heartbeat(&identity(1), leaving, now).unwrap();
    // Whichever comes first, a heartbeat or this change, finds out.
    node.hold(&handle, &keys(500..501));
    let announced = keys(0..501);
    let query = PlanQuery::new(NodeId([9; 16]), &announced);
    eventually("all is announced again", async || {
        directory.plan(query, Clock::start().now()).unwrap().missing == 0
    })
    .await;
}
