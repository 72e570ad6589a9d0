//! Ends of connections: flushes, cuts, death, and coming back.

use kvrail::fabric::{Access, CloseReason, CompletionStatus, ConnectionId, Fabric, FabricError};

use super::{End, Harness, Pair, Random, Read, Seen, batch, connect, memory_of};

const BLOCK: u32 = 1 << 20;
const BLOCKS: u32 = 32;

/// READs of the same block, more than any socket buffer or queue holds.
fn many(remote: &kvrail::fabric::Region, local: &kvrail::fabric::Region) -> Vec<Read> {
    (0..BLOCKS)
        .map(|slot| Read::same(slot, remote, local, u64::from(slot * BLOCK), BLOCK))
        .collect()
}

/// Asserts one completion per READ, none after the close.
fn all_completed_then_closed<H: Harness>(end: &End<H>, id: ConnectionId) {
    let mut slots: Vec<u32> = end.completions(id).iter().map(|done| done.0).collect();
    slots.sort_unstable();
    assert_eq!(slots, (0..BLOCKS).collect::<Vec<_>>());
    let of_it = |seen: &&Seen| match seen {
        Seen::Completed(of, ..) | Seen::Closed(of, _) => *of == id,
        _ => false,
    };
    let last = end.seen.iter().rfind(of_it);
    assert!(matches!(last, Some(Seen::Closed(..))), "{last:?}");
    let closes = |seen: &&Seen| matches!(seen, Seen::Closed(of, _) if *of == id);
    assert_eq!(end.seen.iter().filter(closes).count(), 1);
}

pub(crate) fn a_close_flushes_and_holds_memory_until_the_flush_is_polled<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let bytes = vec![1; (BLOCK * BLOCKS) as usize];
    let (remote, _) = pair.b.region(&bytes, Access::RemoteRead);
    let (local, memory) = pair.a.region(&bytes, Access::Local);
    pair.warm_up(&remote, &local);
    pair.post(&many(&remote, &local));
    pair.b.poll();
    pair.a.fabric.deregister(local.id);
    assert!(memory.upgrade().is_some(), "READs may still land in it");
    pair.a.fabric.close(pair.at_a);
    assert!(memory.upgrade().is_some(), "the flush was not polled yet");
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    assert!(matches!(pair.a.fabric.send(at_a, b"x"), Err(FabricError::Closed)));
    pair.a.fabric.close(at_a);
    pair.pump(|a, _| a.closed(at_a).is_some());
    assert!(memory.upgrade().is_none());
    all_completed_then_closed(&pair.a, at_a);
    let flushed = |done: &(u32, CompletionStatus)| done.1 == CompletionStatus::Flushed;
    assert!(pair.a.completions(at_a).iter().any(flushed));
    assert_eq!(pair.a.closed(at_a), Some(CloseReason::Requested));
    pair.pump(|_, b| b.closed(at_b).is_some());
    assert_eq!(pair.b.closed(at_b), Some(CloseReason::PeerClosed));
}

pub(crate) fn after_the_holder_closes_nothing_new_can_be_read<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let len = (BLOCK * BLOCKS) as usize;
    let held = memory_of(&vec![1; len]);
    let remote = pair.b.fabric.register(held.clone(), Access::RemoteRead).unwrap();
    let (local, memory) = pair.a.region(&vec![0; len], Access::Local);
    pair.warm_up(&remote, &local);
    pair.post(&many(&remote, &local));
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.b.get_stuck();
    pair.b.fabric.close(at_b);
    held.write(0, &vec![2; len]).unwrap();
    pair.pump(|a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    all_completed_then_closed(&pair.a, at_a);
    let done = pair.a.completions(at_a);
    let unreachable = |done: &&(u32, CompletionStatus)| done.1 == CompletionStatus::Unreachable;
    // A device may have read everything before the close: its READs do not wait for the holder.
    let failed = done.iter().any(|done| done.1 != CompletionStatus::Success);
    assert_eq!(done.iter().filter(unreachable).count(), usize::from(failed), "{done:?}");
    assert!(!Pair::<H>::bytes(&memory, 0, len).contains(&2));
    assert_eq!(pair.a.closed(at_a), Some(CloseReason::PeerClosed));
    assert_eq!(pair.b.closed(at_b), Some(CloseReason::Requested));
}

pub(crate) fn a_deregistration_in_mid_read_ends_it<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let len = (BLOCK * BLOCKS) as usize;
    let held = memory_of(&vec![1; len]);
    let remote = pair.b.fabric.register(held.clone(), Access::RemoteRead).unwrap();
    let (local, memory) = pair.a.region(&vec![0; len], Access::Local);
    pair.warm_up(&remote, &local);
    // So long that the holder stops in the middle of one, not between two.
    let long = pair.a.fabric.capabilities().read_bytes;
    let count = len as u32 / long;
    let reads: Vec<Read> = (0..count)
        .map(|slot| Read::same(slot, &remote, &local, u64::from(slot * long), long))
        .collect();
    pair.post(&reads);
    let at_a = pair.at_a;
    pair.b.get_stuck();
    pair.b.fabric.deregister(remote.id);
    held.write(0, &vec![2; len]).unwrap();
    // A device may have read everything before that: its READs do not wait for the holder.
    pair.pump(|a, _| a.closed(at_a).is_some() || a.completions(at_a).len() == count as usize);
    pair.pump(|a, _| a.completions(at_a).len() == count as usize);
    let all = pair.a.completions(at_a);
    let read = all.iter().all(|done| done.1 == CompletionStatus::Success);
    assert!(read || pair.a.closed(at_a).is_some());
    assert!(!Pair::<H>::bytes(&memory, 0, len).contains(&2));
}

pub(crate) fn a_dead_peer_ends_what_is_outstanding<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let bytes = vec![1; (BLOCK * BLOCKS) as usize];
    let (remote, _) = pair.b.region(&bytes, Access::RemoteRead);
    let (local, _) = pair.a.region(&bytes, Access::Local);
    pair.warm_up(&remote, &local);
    let Pair { mut a, mut b, at_a, .. } = pair;
    let reads = batch(&many(&remote, &local));
    a.fabric.post(at_a, &reads).unwrap();
    b.poll();
    drop(b);
    let mut other = End::<H>::new();
    super::pump(&mut a, &mut other, |a, _| a.closed(at_a).is_some());
    all_completed_then_closed(&a, at_a);
    let done = a.completions(at_a);
    let unreachable = |done: &&(u32, CompletionStatus)| done.1 == CompletionStatus::Unreachable;
    assert_eq!(done.iter().filter(unreachable).count(), 1, "{done:?}");
}

pub(crate) fn a_fresh_connection_works_and_an_old_id_stays_dead<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let source = Random::new(8).bytes(BLOCK as usize);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0; BLOCK as usize], Access::Local);
    let (old_a, old_b) = (pair.at_a, pair.at_b);
    pair.a.fabric.close(old_a);
    pair.pump(|a, b| a.closed(old_a).is_some() && b.closed(old_b).is_some());
    (pair.at_a, pair.at_b) = connect(&mut pair.a, &mut pair.b);
    assert!(pair.at_a != old_a && pair.at_b != old_b);
    pair.a.fabric.close(old_a);
    assert!(pair.a.fabric.admit(old_a).is_err());
    pair.a.fabric.admit(pair.at_a).unwrap();
    pair.b.fabric.admit(pair.at_b).unwrap();
    pair.post(&[Read::same(3, &remote, &local, 0, BLOCK)]);
    pair.succeed(1);
    assert!(Pair::<H>::bytes(&memory, 0, BLOCK as usize) == source);
}

pub(crate) fn a_close_of_an_unfinished_connect_is_reported_once<H: Harness>() {
    let (mut a, mut b) = (End::<H>::new(), End::<H>::new());
    let id = a.fabric.connect(&H::endpoint(&b.fabric)).unwrap();
    a.fabric.close(id);
    super::pump(&mut a, &mut b, |a, _| a.closed(id).is_some());
    for _poll in 0..20 {
        a.poll();
        b.poll();
    }
    assert_eq!(a.seen, [Seen::Closed(id, CloseReason::Requested)]);
    assert_eq!(b.seen, [], "it never was a connection there");
}

pub(crate) fn connections_come_and_go<H: Harness>() {
    let (mut a, mut b) = (End::<H>::new(), End::<H>::new());
    let mut ids = Vec::new();
    for round in 0..100 {
        let (at_a, at_b) = connect(&mut a, &mut b);
        if round % 2 == 0 {
            a.fabric.close(at_a);
        } else {
            b.fabric.close(at_b);
        }
        super::pump(&mut a, &mut b, |a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
        ids.push(at_a);
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 100, "an id was used twice");
}
