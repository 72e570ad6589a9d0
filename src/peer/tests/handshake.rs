//! Connections: who gets one, and which one stays.

use std::time::Duration;

use super::cluster::{
    Cluster, Member, Shape, endpoint, is_failed, is_ready, key_of, node_id, requester_id,
};
use super::stranger::Stranger;
use crate::event::Event;
use crate::fabric::{CloseReason, CompletionStatus, ConnectionId, Fabric, FabricEvent, RemoteSpan};
use crate::health::BreakerState;
use crate::limits;
use crate::peer::{FetchOutcome, LocalNode};
use crate::protocol::{
    GoodbyeReason, HashEntry, Message, PROTOCOL_VERSION, RejectReason, Role, SecretKey,
};
use crate::types::{NodeEpoch, NodeId, RequestId, Scope};

const A: usize = 0;
const B: usize = 1;

fn alone() -> Cluster {
    Cluster::new(1, Shape::default())
}

fn with_secret(cluster: &mut Cluster, at: usize, secret: &[u8]) {
    let secret = SecretKey::derive(secret);
    let member = Member::of(&cluster.network, &cluster.shape, endpoint(at), |regions| LocalNode {
        node: node_id(at),
        epoch: NodeEpoch(1),
        requester: requester_id(at),
        secret,
        regions,
        nonce_seed: [99; 32],
    });
    cluster.nodes[at] = Some(member);
}

fn rejected(cluster: &mut Cluster, stranger: &mut Stranger, on: ConnectionId) -> RejectReason {
    let said = stranger.hear(cluster, on);
    let Message::Reject { reason } = said.message() else { panic!("{:?}", said.message()) };
    stranger.closed(cluster, on);
    reason
}

#[test]
fn nodes_with_different_secrets_do_not_connect_whoever_begins() {
    for (reader, owner) in [(A, B), (B, A)] {
        let mut cluster = Cluster::new(2, Shape::default());
        with_secret(&mut cluster, B, b"another");
        cluster.save(owner, &[1]);
        let began = cluster.now();
        let outcomes = cluster.fetch(reader, owner, &[1]);
        assert!(matches!(outcomes[0], FetchOutcome::Failed(_)), "{outcomes:?}");
        assert!(cluster.now().since(began) < Duration::from_secs(1), "the fetch waited in vain");
        assert_eq!(cluster.node(A).peers.connected().count(), 0);
        assert_eq!(cluster.node(B).peers.connected().count(), 0);
    }
}

#[test]
fn an_initiator_without_the_secret_is_rejected_at_its_proof() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    stranger.secret = SecretKey::derive(b"guess");
    let on = stranger.shake_hands(&mut cluster, A);
    assert_eq!(rejected(&mut cluster, &mut stranger, on), RejectReason::Authentication);
    assert_eq!(cluster.node(A).peers.connected().count(), 0);
}

#[test]
fn an_acceptor_without_the_secret_gets_no_proof() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    cluster.begin_fetch(A, B, &[1]);
    let on = stranger.accepted(&mut cluster);
    let said = stranger.hear(&mut cluster, on);
    let Message::Hello(hello) = said.message() else { panic!() };
    let introduction = stranger.introduction();
    let proof = SecretKey::derive(b"guess").proof(Role::Acceptor, &hello, &introduction);
    stranger.say(on, &Message::Welcome { introduction, proof, regions: &[] });
    assert_eq!(rejected(&mut cluster, &mut stranger, on), RejectReason::Authentication);
}

#[test]
fn a_proof_is_of_no_use_in_the_other_role_or_on_another_connection() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    let first = stranger.connect(&mut cluster, A);
    let hello = stranger.introduction();
    stranger.say(first, &Message::Hello(hello));
    let said = stranger.hear(&mut cluster, first);
    let Message::Welcome { introduction: welcome, proof: theirs, .. } = said.message() else {
        panic!()
    };
    let old = stranger.secret.proof(Role::Initiator, &hello, &welcome);
    stranger.say(first, &Message::Confirm { proof: theirs, regions: &[] });
    assert_eq!(rejected(&mut cluster, &mut stranger, first), RejectReason::Authentication);
    let second = stranger.connect(&mut cluster, A);
    stranger.say(second, &Message::Hello(hello));
    stranger.hear(&mut cluster, second);
    stranger.say(second, &Message::Confirm { proof: old, regions: &[] });
    assert_eq!(rejected(&mut cluster, &mut stranger, second), RejectReason::Authentication);
}

#[test]
fn simultaneous_connects_leave_one_connection_and_both_fetches_succeed() {
    for seed in 0..400 {
        let mut cluster = Cluster::new(2, Shape { seed, ..Shape::default() });
        cluster.save(A, &[1]);
        cluster.save(B, &[2]);
        let a = cluster.begin_fetch(A, B, &[2]);
        // The second attempt begins somewhere between the first one's steps.
        cluster.run_for(Duration::from_micros(seed * 7 % 2000));
        let b = cluster.begin_fetch(B, A, &[1]);
        let (a, b) = (cluster.finish(A, a), cluster.finish(B, b));
        assert!(is_ready(&a.outcomes[0]), "seed {seed}: {a:?}");
        assert!(is_ready(&b.outcomes[0]), "seed {seed}: {b:?}");
        cluster.run_for(Duration::from_millis(50));
        assert_eq!(cluster.network.connections(endpoint(A), endpoint(B)), 1, "seed {seed}");
        assert!(
            cluster.node(A).peers.connected().map(|(node, _)| node).eq([node_id(B)]),
            "seed {seed}"
        );
        assert!(
            cluster.node(B).peers.connected().map(|(node, _)| node).eq([node_id(A)]),
            "seed {seed}"
        );
        assert_eq!((cluster.node(A).rank(1), cluster.node(B).rank(2)), (2, 2), "seed {seed}");
    }
}

#[test]
fn simultaneous_connects_are_resolved_whichever_steps_of_them_are_slow() {
    // Delays of one connection that differ by a thousand times let its steps fall anywhere
    // between those of the other one.
    for seed in 0..400 {
        let mut shape = Shape { seed, ..Shape::default() };
        shape.network.delay = Duration::from_micros(1)..=Duration::from_millis(20);
        let mut cluster = Cluster::new(2, shape);
        cluster.save(A, &[1]);
        cluster.save(B, &[2]);
        let first = usize::try_from(seed % 2).unwrap();
        let begin = [cluster.begin_fetch(first, 1 - first, &[2 - u16::try_from(first).unwrap()])];
        cluster.run_for(Duration::from_micros(seed * 613 % 60_000));
        let other = 1 - first;
        let then = cluster.begin_fetch(other, first, &[2 - u16::try_from(other).unwrap()]);
        let one = cluster.finish(first, begin[0]);
        let two = cluster.finish(other, then);
        assert!(is_ready(&one.outcomes[0]), "seed {seed}: {one:?}");
        assert!(is_ready(&two.outcomes[0]), "seed {seed}: {two:?}");
        cluster.run_for(Duration::from_millis(500));
        assert_eq!(cluster.network.connections(endpoint(A), endpoint(B)), 1, "seed {seed}");
        assert!(
            cluster.node(A).peers.connected().map(|(node, _)| node).eq([node_id(B)]),
            "seed {seed}"
        );
    }
}

#[test]
fn a_node_with_our_own_id_is_rejected() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    stranger.node = node_id(A);
    let on = stranger.connect(&mut cluster, A);
    let hello = stranger.introduction();
    stranger.say(on, &Message::Hello(hello));
    assert_eq!(rejected(&mut cluster, &mut stranger, on), RejectReason::SameNode);
}

#[test]
fn a_requester_id_in_use_by_another_live_node_is_rejected_until_that_one_is_gone() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1]);
    cluster.fetch(B, A, &[1]);
    let mut thief = Stranger::new(&cluster, 2);
    thief.requester = requester_id(B);
    let on = thief.shake_hands(&mut cluster, A);
    assert_eq!(rejected(&mut cluster, &mut thief, on), RejectReason::RequesterInUse);
    assert!(cluster.node(A).peers.connected().map(|(node, _)| node).eq([node_id(B)]));
    cluster.crash(B);
    cluster.run_for(Duration::from_millis(50));
    let on = thief.shake_hands(&mut cluster, A);
    let (_, loans) = thief.lend(&mut cluster, on, &[1]);
    assert!(loans[0].loan().is_ready());
}

#[test]
fn of_two_nodes_that_claim_one_requester_id_at_once_only_one_comes_up() {
    let mut shape = Shape::default();
    shape.network.drain = Duration::from_millis(300)..=Duration::from_millis(300);
    let mut cluster = Cluster::new(1, shape);
    let [mut one, mut two, mut three] = [1, 2, 3].map(|at| Stranger::new(&cluster, at));
    for stranger in [&mut one, &mut two, &mut three] {
        stranger.requester = requester_id(B);
    }
    // While the access of the first one ends, the others prove themselves; both wait for it.
    let on = one.shake_hands(&mut cluster, A);
    one.say(on, &Message::Goodbye { reason: GoodbyeReason::Shutdown });
    cluster.run_for(Duration::from_millis(10));
    two.shake_hands(&mut cluster, A);
    three.shake_hands(&mut cluster, A);
    cluster.run_for(Duration::from_millis(10));
    assert_eq!(cluster.node(A).peers.connected().count(), 0);
    cluster.run_for(Duration::from_secs(1));
    assert_eq!(cluster.node(A).peers.connected().count(), 1);
}

#[test]
fn a_requester_that_the_acceptor_rejects_after_its_proof_is_no_violation() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    cluster.begin_fetch(A, B, &[1]);
    let on = stranger.welcome(&mut cluster);
    stranger.say(on, &Message::Reject { reason: RejectReason::RequesterInUse });
    stranger.closed(&mut cluster, on);
    let log = &cluster.node(A).log;
    assert_eq!(log.count(|event| *event == Event::ProtocolViolation), 0);
}

#[test]
fn a_reconnect_replaces_the_old_connection() {
    let mut cluster = alone();
    cluster.save(A, &[1]);
    // Above and below the other node's id.
    for node in [node_id(B), NodeId([0; 16])] {
        let mut stranger = Stranger::new(&cluster, B);
        stranger.node = node;
        let old = stranger.shake_hands(&mut cluster, A);
        stranger.lend(&mut cluster, old, &[1]);
        let new = stranger.shake_hands(&mut cluster, A);
        stranger.closed(&mut cluster, old);
        let (_, loans) = stranger.lend(&mut cluster, new, &[1]);
        assert!(loans[0].loan().is_ready());
        assert_eq!(cluster.node(A).peers.connected().count(), 1);
        drop(stranger);
        cluster.run_for(Duration::from_secs(3));
    }
    assert_eq!(cluster.node(A).pins(1), 0);
}

#[test]
fn a_node_whose_connection_broke_unnoticed_by_the_other_end_connects_again() {
    // The lower and the higher node id, as the one that has to connect again.
    for (back, old) in [(A, B), (B, A)] {
        for opener in [back, old] {
            let mut cluster = Cluster::new(2, Shape::default());
            cluster.save(old, &[1, 3]);
            cluster.save(back, &[2]);
            let answers =
                cluster.fetch(opener, back + old - opener, &[if opener == back { 1 } else { 2 }]);
            assert!(is_ready(&answers[0]));
            // One end gives up in a partition; the news of it is lost.
            cluster.network.partition(endpoint(A), endpoint(B));
            let failed = cluster.fetch(back, old, &[3]);
            assert!(!is_ready(&failed[0]));
            cluster.run_for(cluster.shape.network.give_up);
            cluster.network.heal(endpoint(A), endpoint(B));
            cluster.run_until(Duration::from_secs(30), |cluster| {
                let mut health = cluster.node(back).peers.health(cluster.now());
                health.all(|entry| entry.state == BreakerState::Closed)
            });
            let answers = cluster.fetch(back, old, &[3]);
            assert!(is_ready(&answers[0]), "back {back}, opened by {opener}: {answers:?}");
        }
    }
}

#[test]
fn a_stray_hello_neither_ends_nor_hinders_a_connection() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(B, &[1]);
    // Somebody claims to be B, and proves nothing.
    let mut liar = Stranger::new(&cluster, 2);
    liar.node = node_id(B);
    let on = liar.connect(&mut cluster, A);
    let hello = liar.introduction();
    liar.say(on, &Message::Hello(hello));
    liar.hear(&mut cluster, on);
    let began = cluster.now();
    assert!(is_ready(&cluster.fetch(A, B, &[1])[0]));
    assert!(cluster.now().since(began) < Duration::from_millis(200));
    liar.closed(&mut cluster, on);
    assert!(cluster.node(A).peers.connected().map(|(node, _)| node).eq([node_id(B)]));
}

#[test]
fn garbage_and_messages_out_of_turn_close_only_their_connection() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1]);
    cluster.fetch(B, A, &[1]);
    let ping = |bytes: &mut Vec<u8>| Message::Ping { token: 1 }.encode(bytes);
    let mut early = Vec::new();
    ping(&mut early);
    let mut hello = Vec::new();
    let mut stranger = Stranger::new(&cluster, 2);
    Message::Hello(stranger.introduction()).encode(&mut hello);
    // Before the handshake.
    for bytes in [&b"garbage"[..], &[], &early, &[0xff; 9000]] {
        let on = stranger.connect(&mut cluster, A);
        stranger.fabric.send(on, bytes).unwrap();
        stranger.closed(&mut cluster, on);
    }
    // In the middle of it, and after it.
    let on = stranger.connect(&mut cluster, A);
    stranger.fabric.send(on, &hello).unwrap();
    stranger.hear(&mut cluster, on);
    stranger.fabric.send(on, &hello).unwrap();
    stranger.closed(&mut cluster, on);
    for bytes in [&b"garbage"[..], &hello] {
        let on = stranger.shake_hands(&mut cluster, A);
        stranger.fabric.send(on, bytes).unwrap();
        let goodbye = |message: &Message<'_>| {
            *message == Message::Goodbye { reason: GoodbyeReason::Violation }
        };
        stranger.hear_a(&mut cluster, on, goodbye);
        stranger.closed(&mut cluster, on);
    }
    assert!(cluster.node(A).peers.connected().map(|(node, _)| node).eq([node_id(B)]));
    assert_eq!(cluster.node(A).log.count(|event| *event == Event::ProtocolViolation), 7);
    assert!(is_ready(&cluster.fetch(B, A, &[1])[0]));
}

#[test]
fn another_version_is_told_so() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.connect(&mut cluster, A);
    let mut bytes = Vec::new();
    Message::Hello(stranger.introduction()).encode(&mut bytes);
    assert_eq!(bytes[1], PROTOCOL_VERSION);
    bytes[1] += 1;
    stranger.fabric.send(on, &bytes).unwrap();
    assert_eq!(rejected(&mut cluster, &mut stranger, on), RejectReason::Version);
}

#[test]
fn a_handshake_has_a_deadline_at_either_end() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    let (began, on) = (cluster.now(), stranger.connect(&mut cluster, A));
    stranger.closed(&mut cluster, on);
    assert!(cluster.now().since(began) >= limits::HANDSHAKE_TIMEOUT);
    let (began, id) = (cluster.now(), cluster.begin_fetch(A, B, &[1]));
    let fetched = cluster.finish(A, id);
    assert!(matches!(fetched.outcomes[0], FetchOutcome::Failed(Scope::Path)), "{fetched:?}");
    let on = stranger.accepted(&mut cluster);
    stranger.closed(&mut cluster, on);
    // Sooner where something waits for it.
    let took = cluster.now().since(began);
    assert!(took >= limits::SILENCE_MAX && took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_silent_peer_is_asked_and_then_closed_after_three_intervals() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    let began = cluster.now();
    for _ in 0..2 {
        stranger.hear_a(&mut cluster, on, |message| matches!(message, Message::Ping { .. }));
    }
    let closed = |event: &FabricEvent| {
        *event == FabricEvent::Closed { connection: on, reason: CloseReason::PeerClosed }
    };
    stranger.wait(&mut cluster, closed);
    let quiet = cluster.now().since(began);
    let bound = limits::PING_INTERVAL * 3;
    assert!(quiet >= bound && quiet < bound + Duration::from_millis(100), "{quiet:?}");
}

#[test]
fn a_peer_that_answers_pings_stays() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1]);
    cluster.fetch(B, A, &[1]);
    cluster.run_for(limits::PING_INTERVAL * 20);
    assert_eq!(cluster.network.connections(endpoint(A), endpoint(B)), 1);
    assert_eq!(cluster.node(A).log.count(|e| *e == Event::PeerConnected), 1);
}

#[test]
fn eager_messages_wait_until_the_old_connection_has_drained() {
    let mut shape = Shape::default();
    shape.network.drain = Duration::from_millis(300)..=Duration::from_millis(300);
    let mut cluster = Cluster::new(1, shape);
    cluster.save(A, &[1]);
    let mut stranger = Stranger::new(&cluster, B);
    stranger.shake_hands(&mut cluster, A);
    cluster.run_for(Duration::from_millis(10));
    let began = cluster.now();
    let on = stranger.shake_hands(&mut cluster, A);
    for token in 0..200 {
        stranger.say(on, &Message::Ping { token });
    }
    let (_, loans) = stranger.lend(&mut cluster, on, &[1]);
    assert!(loans[0].loan().is_ready());
    assert!(cluster.now().since(began) >= Duration::from_millis(300));
}

#[test]
fn what_may_wait_for_an_old_connection_to_drain_is_bounded() {
    let mut shape = Shape::default();
    shape.network.drain = Duration::from_secs(2)..=Duration::from_secs(2);
    let mut cluster = Cluster::new(1, shape);
    let mut stranger = Stranger::new(&cluster, B);
    stranger.shake_hands(&mut cluster, A);
    cluster.run_for(Duration::from_millis(10));
    let on = stranger.shake_hands(&mut cluster, A);
    let hashes = vec![HashEntry::from(key_of(1).hash); limits::LEND_BLOCKS_MAX];
    let namespace = key_of(1).namespace;
    for request in 0..100 {
        let request = RequestId(request);
        stranger.say(on, &Message::Lend { request, namespace, hashes: &hashes });
    }
    let began = cluster.now();
    let none = |c: &Cluster| c.network.connections(endpoint(A), endpoint(B)) == 0;
    cluster.run_until(Duration::from_secs(1), none);
    assert!(cluster.now().since(began) < Duration::from_millis(100));
    assert_eq!(cluster.node(A).log.count(|event| *event == Event::ProtocolViolation), 0);
}

#[test]
fn a_draining_node_rejects_new_connections() {
    let mut cluster = alone();
    cluster.node_mut(A).peers.drain();
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.connect(&mut cluster, A);
    let hello = stranger.introduction();
    stranger.say(on, &Message::Hello(hello));
    assert_eq!(rejected(&mut cluster, &mut stranger, on), RejectReason::Draining);
}

#[test]
fn a_peer_that_drains_nothing_loses_its_connection() {
    let mut cluster = Cluster::new(2, Shape::default());
    cluster.save(A, &[1]);
    cluster.fetch(B, A, &[1]);
    cluster.network.partition(endpoint(A), endpoint(B));
    for _ in 0..2000 {
        cluster.begin_fetch(B, A, &[1]);
    }
    cluster.turn();
    assert_eq!(cluster.node(B).peers.connected().count(), 0);
}

#[test]
fn a_goodbye_ends_the_connection_and_what_waits_on_it() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    let id = cluster.begin_fetch(A, B, &[1]);
    let on = stranger.welcome(&mut cluster);
    stranger.say(on, &Message::Goodbye { reason: GoodbyeReason::Shutdown });
    let began = cluster.now();
    let fetched = cluster.finish(A, id);
    assert!(is_failed(&fetched.outcomes[0], Scope::Peer), "{fetched:?}");
    assert!(cluster.now().since(began) < Duration::from_millis(100));
}

#[test]
fn a_node_that_shuts_down_says_goodbye_to_everyone() {
    let mut cluster = alone();
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.shake_hands(&mut cluster, A);
    cluster.run_for(Duration::from_millis(20));
    cluster.node_mut(A).peers.shut_down();
    let goodbye =
        |message: &Message<'_>| *message == Message::Goodbye { reason: GoodbyeReason::Shutdown };
    stranger.hear_a(&mut cluster, on, goodbye);
    stranger.closed(&mut cluster, on);
}

#[test]
fn a_peer_that_has_not_proved_itself_reads_nothing() {
    let mut cluster = alone();
    cluster.save(A, &[1]);
    let mut stranger = Stranger::new(&cluster, B);
    let on = stranger.connect(&mut cluster, A);
    let hello = stranger.introduction();
    stranger.say(on, &Message::Hello(hello));
    let said = stranger.hear(&mut cluster, on);
    let Message::Welcome { regions, .. } = said.message() else { panic!() };
    stranger.fabric.admit(on).unwrap();
    let span = RemoteSpan { rkey: regions[0].rkey(), address: regions[0].address(), len: 64 };
    assert_eq!(stranger.read(&mut cluster, on, span), CompletionStatus::RemoteAccess);
}
