//! A fabric for far peers and one for near peers, as one.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a harness of tests fails by panicking; a wait has a deadline"
)]

mod foreign;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvrail::fabric::{Access, CloseReason, ConnectionId, EventBatch, Fabric, FabricEvent};
use kvrail::shm::{PeerEndpoint, ShmConfig, ShmFabric, ShmName, WithShm};
use kvrail::tcp::{TcpConfig, TcpFabric};
use kvrail::types::NodeId;

use super::conformance::{DEADLINE, End, Harness, Pair, Read, Seen, connect, pump};

/// A fabric beside TCP, and who it is.
pub(crate) struct Beside;

type Fabrics = WithShm<TcpFabric>;

/// An identity that no other fabric of this host has.
fn node() -> NodeId {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let parts = [u64::from(std::process::id()).to_be_bytes(), number.to_be_bytes()];
    NodeId(parts.concat().try_into().unwrap())
}

fn tcp() -> TcpFabric {
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    TcpFabric::new(TcpConfig { listen, ..TcpConfig::default() }).unwrap()
}

fn shm(node: NodeId) -> ShmFabric {
    let listen = Some(ShmName::of_node(node));
    ShmFabric::new(&ShmConfig { listen, ..ShmConfig::default() }).unwrap()
}

impl Harness for Beside {
    type Fabric = Fabrics;

    fn fabric() -> Fabrics {
        WithShm::new(tcp(), Ok(shm(node())), false).unwrap()
    }

    fn endpoint(fabric: &Fabrics) -> PeerEndpoint<SocketAddr> {
        let name = fabric.near().unwrap().name().unwrap();
        let node = name.as_str().rsplit('/').next().unwrap().parse().unwrap();
        PeerEndpoint { node, address: fabric.far().local_addr().unwrap() }
    }

    fn nowhere() -> PeerEndpoint<SocketAddr> {
        PeerEndpoint { node: node(), address: SocketAddr::from(([127, 0, 0, 1], 1)) }
    }
}

/// The same without shared memory: what a node on another host is.
struct Alone;

impl Harness for Alone {
    type Fabric = Fabrics;

    fn fabric() -> Fabrics {
        WithShm::new(tcp(), Err("this one has none".to_owned()), false).unwrap()
    }

    fn endpoint(fabric: &Fabrics) -> PeerEndpoint<SocketAddr> {
        PeerEndpoint { node: node(), address: fabric.far().local_addr().unwrap() }
    }

    fn nowhere() -> PeerEndpoint<SocketAddr> {
        Beside::nowhere()
    }
}

/// The connections that peers have begun.
fn accepted<H: Harness>(end: &End<H>) -> Vec<ConnectionId> {
    let one = |seen: &Seen| match *seen {
        Seen::Accepted(id) => Some(id),
        _ => None,
    };
    end.seen.iter().filter_map(one).collect()
}

/// Polls `one` and `other`, whose harnesses differ, until `done`.
fn pump_both(
    one: &mut End<Beside>,
    other: &mut End<Alone>,
    mut done: impl FnMut(&mut End<Beside>, &mut End<Alone>) -> bool,
) {
    let deadline = Instant::now() + DEADLINE;
    while !done(one, other) {
        one.poll();
        other.poll();
        assert!(Instant::now() < deadline, "not in time");
    }
}

/// One region, read over either way under what its holder says of it once.
#[test]
fn a_near_and_a_far_peer_are_served_at_once() {
    const LEN: usize = 1 << 20;
    let Pair::<Beside> { a: mut near, b: mut holder, at_a, .. } = Pair::new();
    let (remote, _) = holder.region(&vec![7; LEN], Access::RemoteRead);
    let mut far = End::<Alone>::new();
    let endpoint = Beside::endpoint(&holder.fabric);
    let far_id = far.fabric.connect(&endpoint).unwrap();
    let mut at_holder = None;
    pump_both(&mut holder, &mut far, |holder, far| {
        at_holder = accepted(holder).get(1).copied();
        at_holder.is_some() && far.seen.contains(&Seen::Connected(far_id))
    });
    let at_holder = at_holder.unwrap();
    assert_eq!(near.fabric.transport(at_a), "shm");
    assert_eq!(far.fabric.transport(far_id), "tcp");
    assert_eq!(holder.fabric.transport(at_holder), "tcp");
    assert_eq!(holder.fabric.capabilities().transport, "tcp");
    holder.fabric.admit(at_holder).unwrap();
    far.fabric.admit(far_id).unwrap();

    let (near_lands, near_memory) = near.region(&vec![0; LEN], Access::Local);
    let (far_lands, far_memory) = far.region(&vec![0; LEN], Access::Local);
    let batch = |into| {
        super::conformance::batch(&[Read::same(1, &remote, into, 0, u32::try_from(LEN).unwrap())])
    };
    near.fabric.post(at_a, &batch(&near_lands)).unwrap();
    far.fabric.post(far_id, &batch(&far_lands)).unwrap();
    pump_both(&mut holder, &mut far, |_, far| far.completions(far_id).len() == 1);
    pump(&mut near, &mut holder, |near, _| near.completions(at_a).len() == 1);
    assert!(Pair::<Beside>::bytes(&near_memory, 0, LEN) == vec![7; LEN]);
    assert!(Pair::<Alone>::bytes(&far_memory, 0, LEN) == vec![7; LEN]);

    holder.fabric.deregister(remote.id);
    near.fabric.post(at_a, &batch(&near_lands)).unwrap();
    far.fabric.post(far_id, &batch(&far_lands)).unwrap();
    pump_both(&mut holder, &mut far, |_, far| far.closed(far_id).is_some());
    pump(&mut near, &mut holder, |near, _| near.closed(at_a).is_some());
}

/// The far fabric's wait is the only one: what comes over shared memory ends it.
#[test]
fn a_near_message_ends_a_long_wait() {
    let Pair::<Beside> { mut a, mut b, at_a, .. } = Pair::new();
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            a.fabric.send(at_a, b"wake up").unwrap();
        });
        let mut batch = EventBatch::default();
        while !batch.events.iter().any(|event| matches!(event, FabricEvent::Message { .. })) {
            b.fabric.poll(&mut batch, Duration::from_secs(60)).unwrap();
        }
    });
    assert!(start.elapsed() < Duration::from_secs(30));
}

/// Somebody who listens under a node's name and never answers: the node is reached the other way.
#[test]
fn a_peer_to_which_shared_memory_does_not_work_is_reached_over_tcp() {
    let listen = Some(ShmName::of_node(node()));
    let hasty = ShmConfig { listen, handshake_timeout: Duration::from_millis(300) };
    let near = ShmFabric::new(&hasty).unwrap();
    let mut end = End::<Beside>::of(WithShm::new(tcp(), Ok(near), false).unwrap());
    let mut peer = End::<Alone>::new();
    let silent = shm(node());
    let name = silent.name().unwrap().as_str().rsplit('/').next().unwrap().to_owned();
    let address = peer.fabric.far().local_addr().unwrap();
    let to = PeerEndpoint { node: name.parse().unwrap(), address };
    let first = end.fabric.connect(&to).unwrap();
    assert_eq!(end.fabric.transport(first), "shm");
    pump_both(&mut end, &mut peer, |end, _| end.closed(first).is_some());
    let second = end.fabric.connect(&to).unwrap();
    assert_eq!(end.fabric.transport(second), "tcp");
    pump_both(&mut end, &mut peer, |end, _| end.seen.contains(&Seen::Connected(second)));
    drop(silent);
}

#[test]
fn without_shared_memory_it_is_the_far_fabric() {
    let (mut a, mut b) = (End::<Alone>::new(), End::<Alone>::new());
    let (at_a, _) = connect(&mut a, &mut b);
    assert_eq!(a.fabric.transport(at_a), "tcp");
    // A peer that has it is reached without it.
    let mut holder = End::<Beside>::new();
    let id = a.fabric.connect(&Beside::endpoint(&holder.fabric)).unwrap();
    pump_both(&mut holder, &mut a, |_, a| a.seen.contains(&Seen::Connected(id)));
}

#[test]
fn where_nothing_else_is_wanted_a_far_peer_is_unreachable() {
    let near = shm(node());
    let mut end = WithShm::new(tcp(), Ok(near), true).unwrap();
    assert_eq!(end.capabilities().transport, "shm");
    let peer = End::<Alone>::new();
    let address = peer.fabric.far().local_addr().unwrap();
    let id = end.connect(&PeerEndpoint { node: node(), address }).unwrap();
    let mut batch = EventBatch::default();
    end.poll(&mut batch, Duration::ZERO).unwrap();
    let reason = CloseReason::Unreachable;
    assert_eq!(batch.events, [FabricEvent::Closed { connection: id, reason }]);
}
