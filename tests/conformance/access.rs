//! READs that must be refused, and what a refusal does.

use kvrail::fabric::{
    Access, CloseReason, CompletionStatus, Fabric, FabricError, RegionId, RegisteredSpan,
    RemoteSpan,
};

use super::{End, Harness, Pair, Read, batch, connect, pump, span};

const LEN: usize = 4096;

/// Posts a READ of `remote` with good ones behind it; it must be refused, the others flushed, the
/// connection closed, and not a byte may have landed. Another connection stays as it was.
fn refused<H: Harness>(pair: &mut Pair<H>, remote: RemoteSpan, good: RemoteSpan) {
    let (local, memory) = pair.a.region(&[0xaa; LEN], Access::Local);
    let (other_a, other_b) = connect(&mut pair.a, &mut pair.b);
    let into = |len| vec![span(&local, 0, len)];
    let read = |slot, remote: RemoteSpan| Read { slot, remote, into: into(remote.len) };
    pair.post(&[read(1, remote)]);
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.pump(|a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    assert_eq!(pair.a.completions(at_a), [(1, CompletionStatus::RemoteAccess)]);
    assert_eq!(pair.a.closed(at_a), Some(CloseReason::ReadFailed));
    assert_eq!(pair.b.closed(at_b), Some(CloseReason::PeerClosed));
    assert_eq!(Pair::<H>::bytes(&memory, 0, LEN), [0xaa; LEN]);
    let gone = pair.a.fabric.post(at_a, &batch(&[read(2, good)]));
    assert!(matches!(gone, Err(FabricError::Closed)));
    pair.a.fabric.send(other_a, b"unharmed").unwrap();
    pair.pump(|_, b| b.messages(other_b) == [b"unharmed"]);
}

pub(crate) fn a_wrong_key_is_refused<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let (region, _) = pair.b.region(&[1; LEN], Access::RemoteRead);
    let good = region.remote(0, 64).unwrap();
    let mut wrong = good;
    wrong.rkey ^= 0x100;
    refused(&mut pair, wrong, good);
}

pub(crate) fn a_span_that_leaves_its_region_is_refused<H: Harness>() {
    for (address, len) in [(1, LEN as u32), (u64::MAX, 1), (LEN as u64, 1), (1 << 40, 64)] {
        let mut pair = Pair::<H>::new();
        let (region, _) = pair.b.region(&[1; LEN], Access::RemoteRead);
        let good = region.remote(0, 64).unwrap();
        let outside = RemoteSpan { address: region.address.wrapping_add(address), len, ..good };
        refused(&mut pair, outside, good);
    }
}

pub(crate) fn a_local_region_is_refused<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let (region, _) = pair.b.region(&[1; LEN], Access::Local);
    let span = region.remote(0, 64).unwrap();
    refused(&mut pair, span, span);
}

pub(crate) fn a_key_is_stale_after_deregistration<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let (region, memory) = pair.b.region(&[1; LEN], Access::RemoteRead);
    pair.b.fabric.deregister(region.id);
    assert!(memory.upgrade().is_none(), "nothing outstanding touched it");
    let (again, _) = pair.b.region(&[2; LEN], Access::RemoteRead);
    assert_ne!((again.id, again.rkey), (region.id, region.rkey));
    let span = region.remote(0, 64).unwrap();
    refused(&mut pair, span, span);
}

pub(crate) fn nobody_reads_before_being_admitted<H: Harness>() {
    let mut pair = Pair::<H>::strangers();
    let (region, _) = pair.b.region(&[1; LEN], Access::RemoteRead);
    let span = region.remote(0, 64).unwrap();
    pair.a.fabric.admit(pair.at_a).unwrap();
    refused(&mut pair, span, span);
}

pub(crate) fn after_a_refusal_the_rest_is_flushed<H: Harness>() {
    let mut pair = Pair::<H>::new();
    let (remote, _) = pair.b.region(&[1; LEN], Access::RemoteRead);
    let (local, _) = pair.a.region(&[0; LEN], Access::Local);
    let mut reads: Vec<Read> =
        (0..100).map(|slot| Read::same(slot, &remote, &local, 0, 64)).collect();
    reads[40].remote.rkey ^= 1;
    pair.post(&reads);
    let at_a = pair.at_a;
    pair.pump(|a, _| a.closed(at_a).is_some());
    let mut done = pair.a.completions(at_a);
    let refused = (40, CompletionStatus::RemoteAccess);
    assert_eq!(done.iter().filter(|done| **done == refused).count(), 1);
    let first_flush = done.iter().position(|done| done.1 == CompletionStatus::Flushed);
    let refusal = done.iter().position(|done| *done == refused);
    assert!(first_flush > refusal, "{done:?}");
    done.sort_unstable_by_key(|done| done.0);
    let slots: Vec<u32> = done.iter().map(|done| done.0).collect();
    assert_eq!(slots, (0..100).collect::<Vec<_>>(), "one completion each");
    assert_eq!(pair.a.closed(at_a), Some(CloseReason::ReadFailed));
}

pub(crate) fn wrong_local_spans_are_a_local_fault<H: Harness>() {
    let long = |a: &mut End<H>| a.fabric.capabilities().segments as u64 + 1;
    let cases: [fn(&mut Read, RegionId, u64); 4] = [
        |read, unknown, _| read.into[0].region = RegionId(unknown.0 + 100),
        |read, _, _| read.into[0].offset = LEN as u64 - 63,
        |read, _, _| read.into[0].len = 63,
        |read, region, segments| {
            let part = |offset| RegisteredSpan { region, offset, len: 1 };
            read.into = (0..segments).map(part).collect();
            read.remote.len = u32::try_from(segments).unwrap();
        },
    ];
    for spoil in cases {
        let mut pair = Pair::<H>::new();
        let segments = long(&mut pair.a);
        let (remote, _) = pair.b.region(&[1; LEN], Access::RemoteRead);
        let (local, _) = pair.a.region(&[0; LEN], Access::Local);
        let mut reads: Vec<Read> =
            (0..3).map(|slot| Read::same(slot, &remote, &local, 0, 64)).collect();
        spoil(&mut reads[1], local.id, segments);
        pair.post(&reads);
        let at_a = pair.at_a;
        pair.pump(|a, _| a.closed(at_a).is_some());
        let done = pair.a.completions(at_a);
        assert_eq!(done.len(), 3);
        assert!(done.contains(&(1, CompletionStatus::LocalProtection)));
        assert!(done.contains(&(2, CompletionStatus::Flushed)));
        assert_eq!(pair.a.closed(at_a), Some(CloseReason::ReadFailed));
    }
}

pub(crate) fn a_connection_that_we_did_not_admit_takes_no_reads<H: Harness>() {
    let mut pair = Pair::<H>::strangers();
    let (remote, _) = pair.b.region(&[1; LEN], Access::RemoteRead);
    let (local, _) = pair.a.region(&[0; LEN], Access::Local);
    let reads = batch(&[Read::same(0, &remote, &local, 0, 64)]);
    assert!(pair.a.fabric.post(pair.at_a, &reads).is_err());
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.b.fabric.send(at_b, b"still here").unwrap();
    pump(&mut pair.a, &mut pair.b, |a, _| !a.messages(at_a).is_empty());
}
