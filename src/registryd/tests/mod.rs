//! The service over real sockets: what it answers, and what hostile or broken clients can do to it.

mod announcer;

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::Endpoint;

use super::*;
use crate::net::wire::owner_registry_client::OwnerRegistryClient;
use crate::net::wire::{self, HeartbeatRequest, PlanRequest};
use crate::net::{GrpcRegistry, RegistryTimeouts, encode_keys};
use crate::registry::{
    Batch, Heartbeat, Load, Missing, NodeIdentity, OwnerRegistry, PlanQuery, Presence,
    RegistryError, Stamp,
};
use crate::types::{BlockHash, BlockKey, NamespaceId, NodeEpoch, NodeId};

pub(super) fn keys(numbers: std::ops::Range<u32>) -> Vec<BlockKey> {
    let key = |number: u32| BlockKey {
        namespace: NamespaceId(3),
        hash: BlockHash::new(&number.to_le_bytes()).unwrap(),
    };
    numbers.map(key).collect()
}

pub(super) fn identity(node: u8) -> NodeIdentity {
    NodeIdentity {
        node: NodeId([node; 16]),
        epoch: NodeEpoch(1),
        address: format!("10.0.0.{node}:7000"),
    }
}

struct Running {
    registryd: Registryd,
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), RegistrydError>>,
}

async fn start(options: RegistrydOptions) -> Running {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let registryd = Registryd::new(Clock::start(), options);
    let (stop, stopped) = oneshot::channel();
    let served = registryd.clone();
    let task = tokio::spawn(async move {
        let stopped = async move {
            let _stop_or_drop = stopped.await.is_ok();
        };
        served.serve(listener, stopped).await
    });
    Running { registryd, address, stop, task }
}

fn client(address: SocketAddr) -> GrpcRegistry {
    let timeouts = RegistryTimeouts { connect: PATIENCE, call: PATIENCE };
    GrpcRegistry::new(&address.to_string(), timeouts).unwrap()
}

fn batch(node: u8, registration: u64, sequence: u64, keys: &[BlockKey]) -> Batch<'_> {
    let (node, epoch, settled) = (NodeId([node; 16]), NodeEpoch(1), sequence - 1);
    Batch { stamp: Stamp { node, epoch, registration, sequence, settled }, keys }
}

#[tokio::test]
async fn all_calls_work_over_a_socket() {
    let running = start(RegistrydOptions::default()).await;
    let client = client(running.address);
    let load = Load { outstanding_bytes: 7, pause_ms: 0 };
    let heartbeat = Heartbeat { presence: Presence::Here, load, digests: &[] };
    let one = client.heartbeat(&identity(1), heartbeat).await.unwrap().registration;
    let two = client.heartbeat(&identity(2), heartbeat).await.unwrap().registration;
    assert_eq!(one.lease, Duration::from_secs(10));
    assert_eq!(one.registry, running.registryd.directory().epoch());
    let asked = keys(0..10);
    let call = batch(1, one.number, 1, &asked);
    assert_eq!(client.announce(call).await.unwrap().owners, [1; 10]);
    let few = keys(20..22);
    assert_eq!(client.announce(batch(1, one.number, 3, &few)).await.unwrap().owners, [1; 2]);
    assert_eq!(client.announce(call).await, Err(RegistryError::Late));
    client.withdraw(batch(1, one.number, 4, &few)).await.unwrap();
    let few = keys(8..12);
    let answer = client.announce(batch(2, two.number, 1, &few)).await;
    assert_eq!(answer.unwrap().owners, [2, 2, 1, 1]);
    let asked = keys(0..13);
    let query = PlanQuery { choice: 1, ..PlanQuery::new(NodeId([9; 16]), &asked) };
    let plan = client.plan(query).await.unwrap();
    assert_eq!(plan.missing, 1);
    let runs: Vec<_> = plan.runs().map(|(o, s)| (o.clone(), s.first, s.count)).collect();
    assert_eq!(runs, [(identity(1), 0, 10), (identity(2), 10, 2)]);
    let avoid = [NodeId([1; 16])];
    let plan = client.plan(PlanQuery { avoid: &avoid, ..query }).await;
    assert_eq!(plan.unwrap().missing, 9);
    let answer = client.withdraw(batch(2, two.number, 2, &few)).await;
    assert_eq!(answer.unwrap().sole, [0, 1]);
    let owner = NodeId([1; 16]);
    let missing = Missing { owner, epoch: NodeEpoch(1), keys: &keys(9..11) };
    assert_eq!(client.report_missing(missing).await, Ok(1));
    client.announce(batch(1, one.number, 5, &keys(9..10))).await.unwrap();
    let unknown = client.announce(batch(3, 4096, 1, &few)).await;
    assert_eq!(unknown, Err(RegistryError::UnknownNode));
    let stats = running.registryd.stats();
    assert_eq!((stats.answered, stats.refused), ([4, 2, 2, 2, 1], [2, 0, 0, 0, 0]));
    let directory = stats.directory;
    assert_eq!((directory.nodes, directory.keys, directory.owners), (2, 10, 10));
    assert!(stats.bytes_per_owner() > 0);
}

type Wire = OwnerRegistryClient<tonic::transport::Channel>;

async fn wire_client(address: SocketAddr) -> Wire {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    OwnerRegistryClient::new(endpoint.connect().await.unwrap())
}

async fn refused(client: &mut Wire, batch: wire::Batch, sentence: &str) {
    let status = client.announce(batch).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains(sentence), "{status}");
}

#[tokio::test]
async fn bad_arguments_are_refused_with_a_sentence() {
    let running = start(RegistrydOptions::default()).await;
    let mut client = wire_client(running.address).await;
    let good = wire::Batch {
        node: vec![1; 16].into(),
        epoch: 1,
        registration: 1,
        sequence: 1,
        settled: 0,
        keys: encode_keys(&keys(0..2)).into(),
    };
    let mut bad = good.clone();
    bad.node = vec![1; 3].into();
    refused(&mut client, bad, "16 bytes, got 3").await;
    let mut bad = good.clone();
    bad.keys = vec![1; 20].into();
    bad.keys = bad.keys.slice(..17);
    refused(&mut client, bad, "key 1 is cut off").await;
    let mut bad = good.clone();
    bad.keys = encode_keys(&keys(0..16_385)).into();
    refused(&mut client, bad, "at most 16384 keys").await;
    let request = PlanRequest {
        node: vec![1; 16].into(),
        avoid: vec![0; 17].into(),
        ..PlanRequest::default()
    };
    let status = client.plan(request).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    let identity =
        wire::NodeIdentity { node: vec![1; 16].into(), epoch: 1, address: "a:1".to_owned() };
    for (identity, presence) in [(None, 0), (Some(identity), 9)] {
        let request = HeartbeatRequest { identity, presence, ..HeartbeatRequest::default() };
        let status = client.heartbeat(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
    }
    let status = client.announce(good).await.unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition, "well-formed, but unknown");
}

#[tokio::test]
async fn an_oversize_batch_stops_at_the_client_and_an_oversize_message_at_the_server() {
    let running = start(RegistrydOptions::default()).await;
    let many = keys(0..16_385);
    let error = client(running.address).announce(batch(1, 1, 1, &many)).await;
    assert!(matches!(error, Err(RegistryError::Refused { .. })), "{error:?}");
    let mut raw = wire_client(running.address).await;
    let huge = wire::Batch {
        keys: vec![0; limits::REGISTRY_MESSAGE_BYTES_MAX + 1].into(),
        ..wire::Batch::default()
    };
    let status = raw.announce(huge).await.unwrap_err();
    assert_eq!(status.code(), Code::OutOfRange, "{status}");
    let heartbeat = Heartbeat::default();
    let identity = identity(1);
    let alive = client(running.address).heartbeat(&identity, heartbeat).await;
    assert!(alive.is_ok(), "the server goes on");
    let full = keys(0..16_384);
    let number = alive.unwrap().registration.number;
    let answer = client(running.address).announce(batch(1, number, 1, &full)).await;
    assert_eq!(answer.unwrap().owners.len(), 16_384);
}

/// The longest that a condition is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// The bytes until the other end closes.
async fn closed(mut stream: TcpStream) -> usize {
    let mut rest = Vec::new();
    let read = stream.read_to_end(&mut rest);
    let read = tokio::time::timeout(PATIENCE, read).await;
    // A reset is a close, too.
    read.expect("the connection is still open").unwrap_or(0)
}

#[tokio::test]
async fn garbage_silence_and_a_trickle_end_their_own_connection_only() {
    let options = RegistrydOptions {
        handshake_timeout: Duration::from_millis(200),
        ..RegistrydOptions::default()
    };
    let running = start(options).await;
    let client = client(running.address);
    let heartbeat = Heartbeat::default();
    eventually("its own handshake is over", async || {
        client.heartbeat(&identity(1), heartbeat).await.is_ok()
    })
    .await;
    let mut garbage = TcpStream::connect(running.address).await.unwrap();
    garbage.write_all(&[0x16; 4096]).await.ok();
    closed(garbage).await;
    let silent = TcpStream::connect(running.address).await.unwrap();
    closed(silent).await;
    let mut trickle = TcpStream::connect(running.address).await.unwrap();
    trickle.write_all(b"PRI * HT").await.ok();
    closed(trickle).await;
    client.heartbeat(&identity(1), heartbeat).await.unwrap();
}

#[tokio::test]
async fn one_connection_too_many_is_closed_and_its_place_comes_back() {
    let options = RegistrydOptions { connections_max: 1, ..RegistrydOptions::default() };
    let running = start(options).await;
    let first = client(running.address);
    let heartbeat = Heartbeat::default();
    first.heartbeat(&identity(1), heartbeat).await.unwrap();
    let second = TcpStream::connect(running.address).await.unwrap();
    assert_eq!(closed(second).await, 0);
    first.heartbeat(&identity(1), heartbeat).await.unwrap();
    drop(first);
    eventually("the place comes back", async || {
        let next = client(running.address);
        next.heartbeat(&identity(2), heartbeat).await.is_ok()
    })
    .await;
}

/// Polls a condition.
pub(super) async fn eventually(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let poll = async {
        while !is_true().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let polled = tokio::time::timeout(PATIENCE, poll).await;
    assert!(polled.is_ok(), "not in time: {what}");
}

#[tokio::test]
async fn one_call_at_a_time_still_serves_everybody() {
    let directory = DirectoryOptions { lease: PATIENCE, ..DirectoryOptions::default() };
    let options = RegistrydOptions { calls_max: 1, directory, ..RegistrydOptions::default() };
    let running = start(options).await;
    let clients = (1..9).map(|node| {
        let client = client(running.address);
        tokio::spawn(async move {
            let identity = identity(node);
            let heartbeat = Heartbeat::default();
            let asked = keys(0..16_384);
            // The server gives a call up that waits for longer than calls may take.
            let served = async {
                loop {
                    if let Ok(beat) = client.heartbeat(&identity, heartbeat).await {
                        let number = beat.registration.number;
                        if client.announce(batch(node, number, 1, &asked)).await.is_ok() {
                            break;
                        }
                    }
                }
            };
            tokio::time::timeout(PATIENCE, served).await.expect("it is not served");
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    assert_eq!(running.registryd.stats().directory.owners, 8 * 16_384);
}

#[tokio::test]
async fn a_stop_ends_the_server_although_clients_stay_connected() {
    let running = start(RegistrydOptions::default()).await;
    let client = client(running.address);
    let heartbeat = Heartbeat::default();
    client.heartbeat(&identity(1), heartbeat).await.unwrap();
    let silent = TcpStream::connect(running.address).await.unwrap();
    running.stop.send(()).unwrap();
    let ended = tokio::time::timeout(PATIENCE, running.task).await;
    ended.expect("still running").unwrap().unwrap();
    let error = client.heartbeat(&identity(1), heartbeat).await;
    assert!(matches!(error, Err(RegistryError::Unreachable { .. })), "{error:?}");
    drop(silent);
}

#[tokio::test]
async fn what_is_no_address_is_refused_and_what_does_not_answer_is_unreachable() {
    for endpoint in ["", "host", "http://", "a b:1", "host:99999"] {
        let refused = GrpcRegistry::new(endpoint, RegistryTimeouts::default());
        assert!(matches!(refused, Err(RegistryError::Refused { .. })), "{endpoint:?}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let timeouts =
        RegistryTimeouts { call: Duration::from_millis(100), ..RegistryTimeouts::default() };
    let client = GrpcRegistry::new(&address.to_string(), timeouts).unwrap();
    // The kernel accepts, nobody answers.
    let silent = client.heartbeat(&identity(1), Heartbeat::default()).await;
    assert_eq!(silent, Err(RegistryError::TimedOut(timeouts.call)));
    drop(listener);
    let closed = GrpcRegistry::new(&address.to_string(), RegistryTimeouts::default()).unwrap();
    let error = closed.heartbeat(&identity(1), Heartbeat::default()).await;
    assert!(matches!(error, Err(RegistryError::Unreachable { .. })), "{error:?}");
}
