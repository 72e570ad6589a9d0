//! Queues that are full to the last entry.

use std::time::{Duration, Instant};

use kvrail::fabric::{Access, CompletionStatus, Fabric, FabricError};

use crate::conformance::{End, Harness, Pair, Read, batch, connect, pump};
use crate::rdma::{Lanes, Verbs, device};
use crate::say;

/// Polls one end alone for a while, so that the other one's queues fill up.
fn poll_alone<H: Harness>(end: &mut End<H>) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        end.poll();
    }
}

/// READs one by one, so that each has a completion of its own; messages both ways on top; nobody
/// polls. Then everything is there, and the connection is as good as before.
fn full_to_the_last_entry<H: Harness>() {
    const LEN: u32 = 64;
    let (mut a, mut b) = (End::<H>::new(), End::<H>::new());
    let (at_a, at_b) = connect(&mut a, &mut b);
    a.fabric.admit(at_a).unwrap();
    b.fabric.admit(at_b).unwrap();
    let limit = a.fabric.capabilities().reads_outstanding as u32;
    let (remote, _) = b.region(&vec![5; (limit * LEN) as usize], Access::RemoteRead);
    let (local, memory) = a.region(&vec![0; (limit * LEN) as usize], Access::Local);
    let read = |slot: u32| Read::same(slot, &remote, &local, u64::from(slot % limit * LEN), LEN);
    for round in 0..5 {
        for slot in 0..limit {
            a.fabric.post(at_a, &batch(&[read(slot)])).unwrap();
        }
        let refused = a.fabric.post(at_a, &batch(&[read(limit)]));
        assert!(matches!(refused, Err(FabricError::Full)), "{refused:?}");
        let mut messages = [0_usize; 2];
        while a.fabric.send(at_a, &[1; 32]).is_ok() {
            messages[0] += 1;
        }
        while b.fabric.send(at_b, &[2; 32]).is_ok() {
            messages[1] += 1;
        }
        poll_alone(&mut b);
        pump(&mut a, &mut b, |a, b| {
            a.completions(at_a).len() == limit as usize
                && a.messages(at_a).len() == messages[1]
                && b.messages(at_b).len() == messages[0]
        });
        let good = |done: &(u32, CompletionStatus)| done.1 == CompletionStatus::Success;
        assert!(a.completions(at_a).iter().all(good), "round {round}");
        assert!(Pair::<H>::bytes(&memory, 0, (limit * LEN) as usize).iter().all(|it| *it == 5));
        assert_eq!((a.closed(at_a), b.closed(at_b)), (None, None), "round {round}");
        a.seen.clear();
        b.seen.clear();
    }
    say(&format!("5 times full with {limit} READs, and messages both ways: all arrived"));
    // And all of it flushed at once.
    for slot in 0..limit {
        a.fabric.post(at_a, &batch(&[read(slot)])).unwrap();
    }
    a.fabric.close(at_a);
    let refused = a.fabric.post(at_a, &batch(&[read(limit)]));
    assert!(matches!(refused, Err(FabricError::Closed)), "{refused:?}");
    pump(&mut a, &mut b, |a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    let mut slots: Vec<u32> = a.completions(at_a).iter().map(|done| done.0).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..limit).collect::<Vec<_>>());
}

#[test]
fn one_send_queue_full_to_the_last_entry_loses_nothing() {
    if device().is_some() {
        full_to_the_last_entry::<Lanes<1>>();
    }
}

#[test]
fn a_completion_queue_full_to_the_last_entry_loses_nothing() {
    if device().is_some() {
        full_to_the_last_entry::<Verbs>();
    }
}
