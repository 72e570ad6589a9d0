//! Connections and their messages.

use std::time::{Duration, Instant};

use kvrail::fabric::{CloseReason, EventBatch, Fabric, FabricError};
use kvrail::limits::MESSAGE_BYTES_MAX;

use super::{End, Harness, Pair, Random, connect, pump};

pub(crate) fn messages_arrive_whole_and_in_order_both_ways<H: Harness>() {
    let mut pair = Pair::<H>::strangers();
    let mut random = Random::new(1);
    let mut sent = vec![vec![], vec![1], random.bytes(MESSAGE_BYTES_MAX)];
    for _message in 0..200 {
        let len = usize::try_from(random.below(3000)).unwrap();
        sent.push(random.bytes(len));
    }
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    for message in &sent {
        pair.pump(|a, _| match a.fabric.send(at_a, message) {
            Ok(()) => true,
            Err(error) => {
                assert!(matches!(error, FabricError::Full), "{error}");
                false
            }
        });
        pair.pump(|_, b| b.fabric.send(at_b, message).is_ok());
    }
    pair.pump(|a, b| a.messages(at_a).len() == sent.len() && b.messages(at_b).len() == sent.len());
    assert_eq!(pair.a.messages(at_a), sent);
    assert_eq!(pair.b.messages(at_b), sent);
}

pub(crate) fn a_peer_that_does_not_drain_messages_fills_a_bounded_queue<H: Harness>() {
    let mut pair = Pair::<H>::strangers();
    let message = vec![3; MESSAGE_BYTES_MAX];
    let mut sent = 0;
    loop {
        match pair.a.fabric.send(pair.at_a, &message) {
            Ok(()) => sent += 1,
            Err(FabricError::Full) => break,
            Err(error) => panic!("{error}"),
        }
        assert!(sent < 20_000, "400 MB were queued for a peer that reads nothing");
    }
    let at_b = pair.at_b;
    pair.pump(|_, b| b.messages(at_b).len() >= sent);
    pair.a.fabric.send(pair.at_a, b"room again").unwrap();
    pair.pump(|_, b| b.messages(at_b).last() == Some(&b"room again".as_slice()));
    assert_eq!(pair.b.messages(at_b).len(), sent + 1);
}

pub(crate) fn a_message_beyond_the_limit_is_refused_and_harms_nothing<H: Harness>() {
    let mut pair = Pair::<H>::strangers();
    let long = vec![0; MESSAGE_BYTES_MAX + 1];
    assert!(pair.a.fabric.send(pair.at_a, &long).is_err());
    pair.a.fabric.send(pair.at_a, b"short").unwrap();
    let at_b = pair.at_b;
    pair.pump(|_, b| b.messages(at_b) == [b"short"]);
}

pub(crate) fn last_words_before_a_close_arrive<H: Harness>() {
    let mut pair = Pair::<H>::new();
    pair.a.fabric.send(pair.at_a, b"goodbye").unwrap();
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.pump(|_, b| !b.messages(at_b).is_empty());
    pair.a.fabric.close(at_a);
    pair.pump(|a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    assert_eq!(pair.b.messages(at_b), [b"goodbye"]);
}

pub(crate) fn a_connect_to_nowhere_ends_as_unreachable<H: Harness>() {
    let (mut a, mut b) = (End::<H>::new(), End::<H>::new());
    let id = a.fabric.connect(&H::nowhere()).unwrap();
    pump(&mut a, &mut b, |a, _| a.closed(id).is_some());
    assert_eq!(a.closed(id), Some(CloseReason::Unreachable));
    assert!(matches!(a.fabric.send(id, b"x"), Err(FabricError::Closed)));
}

pub(crate) fn one_fabric_has_many_peers_at_once<H: Harness>() {
    let mut holder = End::<H>::new();
    let mut others: Vec<End<H>> = (0..8).map(|_| End::new()).collect();
    for (number, other) in others.iter_mut().enumerate() {
        let (at_other, at_holder) = connect(other, &mut holder);
        other.fabric.send(at_other, &[number as u8]).unwrap();
        pump(other, &mut holder, |_, holder| holder.messages(at_holder) == [[number as u8]]);
    }
}

pub(crate) fn a_wake_ends_a_poll<H: Harness>() {
    let mut end = End::<H>::new();
    let waker = end.fabric.waker();
    waker.wake();
    let start = Instant::now();
    let long = Duration::from_secs(60);
    end.fabric.poll(&mut EventBatch::default(), long).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| waker.wake());
        end.fabric.poll(&mut EventBatch::default(), long).unwrap();
    });
    assert!(start.elapsed() < long / 2);
}
