//! Memory: who may read it, and when it is nobody's but its owner's again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvrail::fabric::{Access, CloseReason, CompletionStatus, Fabric, ReadBatch, RemoteSpan};
use kvrail::memory::Mapping;

use crate::conformance::{End, Pair, Random, Read, batch, connect, memory_of, pump, span};
use crate::rdma::{Lanes, Verbs, device, setting};
use crate::{BLOCK, BLOCKS, BYTES, all_completed, assert_kept, assert_whole, count, many, say};

/// A reader with memory of its own, and READs of a holder's that fill all of it.
struct Reader {
    a: End<Lanes<1>>,
    b: End<Lanes<1>>,
    memory: Arc<Mapping>,
    reads: ReadBatch,
}

impl Reader {
    /// Each READ has several packets, so that it can be cut in its middle.
    const PART: u32 = 8 << 10;
    const PARTS: u32 = 32;
    const LEN: usize = (Self::PART * Self::PARTS) as usize;

    /// Most of a round goes into queue pairs: one lane makes twice the rounds of three.
    fn new() -> Self {
        let (mut a, mut b) = (End::<Lanes<1>>::new(), End::<Lanes<1>>::new());
        let (remote, _) = b.region(&[1; Self::LEN], Access::RemoteRead);
        let memory = memory_of(&[0; Self::LEN]);
        let local = a.fabric.register(memory.clone(), Access::Local).unwrap();
        let (at, len) = (|slot| u64::from(slot * Self::PART), Self::PART);
        let part = |slot| Read::same(slot, &remote, &local, at(slot), len);
        let reads = batch(&(0..Self::PARTS).map(part).collect::<Vec<_>>());
        Self { a, b, memory, reads }
    }

    /// Connects, reads until `timeout`, and gives up; answers how long it read, and how many READs
    /// succeeded. From then on no DMA may touch the memory.
    fn give_up_after(&mut self, timeout: Duration, by_reader: bool) -> (Duration, usize) {
        let (a, b) = (&mut self.a, &mut self.b);
        let (at_a, at_b) = connect(a, b);
        a.fabric.admit(at_a).unwrap();
        b.fabric.admit(at_b).unwrap();
        a.fabric.post(at_a, &self.reads).unwrap();
        let (posted, parts) = (Instant::now(), Self::PARTS as usize);
        while posted.elapsed() < timeout && a.completions(at_a).len() < parts {
            a.poll_for(Duration::ZERO);
        }
        let took = posted.elapsed();
        if by_reader {
            a.fabric.close(at_a);
        } else {
            b.fabric.close(at_b);
        }
        pump(a, b, |a, _| a.closed(at_a).is_some());
        let canary = vec![0xc5; Self::LEN];
        self.memory.write(0, &canary).unwrap();
        let mut done = a.completions(at_a);
        done.sort_unstable_by_key(|done| done.0);
        assert!(done.iter().map(|done| done.0).eq(0..Self::PARTS), "one completion each: {done:?}");
        // What is late comes while the holder ends its side.
        pump(a, b, |_, b| b.closed(at_b).is_some());
        let mut found = vec![0; Self::LEN];
        self.memory.read(0, &mut found).unwrap();
        assert!(found == canary, "a READ landed after its connection had closed");
        a.seen.clear();
        b.seen.clear();
        (took, done.iter().filter(|done| done.1 == CompletionStatus::Success).count())
    }
}

/// A reader that gives up at random moments: what it does with its memory then is its own business.
#[test]
fn memory_is_touched_no_more_once_its_connection_has_closed() {
    if device().is_none() {
        return;
    }
    let rounds = setting("KVRAIL_TEST_ROUNDS").map_or(200, |rounds| rounds.parse().unwrap());
    let start = Instant::now();
    let mut random = Random::new(11);
    let mut reader = Reader::new();
    // The shortest of a few: on a machine with other work, most of them take longer.
    let whole = |_| reader.give_up_after(Duration::from_secs(10), true).0;
    let longest = (0..10).map(whole).min().unwrap();
    let longest = u64::try_from(longest.as_micros()).unwrap();
    let (mut cut_short, mut succeeded) = (0, 0);
    for _round in 0..rounds {
        let timeout = Duration::from_micros(random.below(longest));
        let (_, good) = reader.give_up_after(timeout, random.below(4) > 0);
        succeeded += good;
        cut_short += u32::from(good < Reader::PARTS as usize);
    }
    assert!(cut_short > 0 && succeeded > 0, "{cut_short} cut short, {succeeded} READs succeeded");
    assert_eq!(reader.a.fabric.stale_completions(), 0);
    say(&format!(
        "{rounds} rounds of random timeouts in {:.0} s: {cut_short} cut READs short, {succeeded} of \
         {} READs succeeded, none landed late",
        start.elapsed().as_secs_f64(),
        rounds * Reader::PARTS
    ));
}

#[test]
fn a_local_fault_leaves_the_peer_and_other_connections_alone() {
    if device().is_none() {
        return;
    }
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, _) = pair.a.region(&[0; BYTES], Access::Local);
    let (other_a, other_b) = connect(&mut pair.a, &mut pair.b);
    let mut reads = many(&remote, &local);
    reads[7].into[0].offset = BYTES as u64;
    pair.post(&reads);
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.pump(|a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    assert_eq!(pair.a.closed(at_a), Some(CloseReason::ReadFailed));
    assert_eq!(pair.b.closed(at_b), Some(CloseReason::PeerClosed));
    pair.a.fabric.send(other_a, b"unharmed").unwrap();
    pair.pump(|_, b| b.messages(other_b) == [b"unharmed"]);
}

/// What one peer was told is no use to another: a holder serves those whom it admitted, and what it
/// served through one connection ends with that one.
#[test]
fn a_key_is_worth_nothing_without_the_holders_admission() {
    if device().is_none() {
        return;
    }
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, _) = pair.a.region(&[0; BYTES], Access::Local);
    pair.post(&many(&remote, &local));
    pair.succeed(BLOCKS as usize);

    let mut thief = End::<Verbs>::new();
    let (loot, memory) = thief.region(&[0xaa; BYTES], Access::Local);
    let (at_thief, at_b) = connect(&mut thief, &mut pair.b);
    thief.fabric.admit(at_thief).unwrap();
    thief.fabric.post(at_thief, &batch(&many(&remote, &loot))).unwrap();
    pump(&mut thief, &mut pair.b, |thief, b| {
        thief.closed(at_thief).is_some() && b.closed(at_b).is_some()
    });
    let done = all_completed(&thief, at_thief);
    assert_eq!(count(&done, CompletionStatus::RemoteAccess), 1, "{done:?}");
    assert_eq!(count(&done, CompletionStatus::Success), 0);
    assert!(Pair::<Verbs>::bytes(&memory, 0, BYTES) == [0xaa; BYTES]);

    // The holder ends its connection with the one that it had admitted.
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.b.fabric.close(at_b);
    pair.a.seen.clear();
    pair.a.fabric.post(at_a, &batch(&many(&remote, &local))).ok();
    pair.pump(|a, _| a.closed(at_a).is_some());
    assert!(pair.a.completions(at_a).iter().all(|done| done.1 != CompletionStatus::Success));
}

/// Keys of the holder's other regions, and of another domain on the same device.
#[test]
fn a_key_serves_its_own_region_only() {
    if device().is_none() {
        return;
    }
    let mut stranger = End::<Verbs>::new();
    let (elsewhere, _) = stranger.region(&[3; BYTES], Access::RemoteRead);
    for case in 0..3 {
        let mut pair = Pair::<Verbs>::new();
        let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
        let (other, _) = pair.b.region(&[2; BYTES], Access::RemoteRead);
        let (local, memory) = pair.a.region(&[0xaa; BYTES], Access::Local);
        let good = remote.remote(0, BLOCK).unwrap();
        let wrong = match case {
            0 => RemoteSpan { rkey: other.rkey, ..good },
            1 => RemoteSpan { rkey: elsewhere.rkey, ..good },
            _ => elsewhere.remote(0, BLOCK).unwrap(),
        };
        pair.post(&[Read { slot: 0, remote: wrong, into: vec![span(&local, 0, BLOCK)] }]);
        let at_a = pair.at_a;
        pair.pump(|a, _| a.closed(at_a).is_some());
        let done = pair.a.completions(at_a);
        assert_eq!(done, [(0, CompletionStatus::RemoteAccess)], "case {case}");
        assert!(Pair::<Verbs>::bytes(&memory, 0, BYTES) == [0xaa; BYTES], "case {case}");
    }
}

/// The holder takes a region away with READs of it under way, and uses its memory for other bytes.
#[test]
fn a_region_that_goes_in_mid_transfer_ends_its_reads_and_serves_nothing_new() {
    if device().is_none() {
        return;
    }
    let mut random = Random::new(23);
    let (mut succeeded, mut refused, mut rounds) = (0, 0, 0);
    while refused == 0 || succeeded == 0 || rounds < 20 {
        rounds += 1;
        assert!(rounds < 500, "{succeeded} READs succeeded, {refused} were refused");
        let mut pair = Pair::<Verbs>::new();
        let held = memory_of(&[1; BYTES]);
        let remote = pair.b.fabric.register(held.clone(), Access::RemoteRead).unwrap();
        let (local, memory) = pair.a.region(&[0; BYTES], Access::Local);
        let landed = memory.upgrade().unwrap();
        let at_a = pair.at_a;
        pair.post(&many(&remote, &local));
        let (posted, delay) = (Instant::now(), Duration::from_micros(random.below(20_000)));
        while posted.elapsed() < delay {
            pair.a.poll_for(Duration::ZERO);
        }
        pair.b.fabric.deregister(remote.id);
        held.write(0, &[2; BYTES]).unwrap();
        pair.pump(|a, _| a.completions(at_a).len() == BLOCKS as usize);
        if pair.a.completions(at_a).iter().any(|done| done.1 != CompletionStatus::Success) {
            pair.pump(|a, _| a.closed(at_a).is_some());
        } else {
            pair.a.fabric.close(at_a);
            pair.pump(|a, _| a.closed(at_a).is_some());
        }
        let done = all_completed(&pair.a, at_a);
        let mut bytes = vec![0; BYTES];
        landed.read(0, &mut bytes).unwrap();
        assert!(!bytes.contains(&2), "a READ saw what came after the region had gone");
        assert_whole(&done, &bytes, 1);
        let bad = count(&done, CompletionStatus::RemoteAccess);
        assert!(bad <= 1, "one READ is refused, the others are flushed: {done:?}");
        refused += bad;
        succeeded += count(&done, CompletionStatus::Success);
    }
    say(&format!("{rounds} deregistrations: {succeeded} READs succeeded, {refused} were refused"));
}

/// The reader lets go of the region that READs land in, while they do.
#[test]
fn a_region_that_reads_land_in_is_kept_until_they_have() {
    if device().is_none() {
        return;
    }
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, memory) = pair.a.region(&[0; BYTES], Access::Local);
    let at_a = pair.at_a;
    pair.post(&many(&remote, &local));
    pair.a.fabric.deregister(local.id);
    pair.pump(|a, _| {
        assert_kept(a, at_a, &memory);
        a.completions(at_a).len() == BLOCKS as usize
    });
    pair.succeed(BLOCKS as usize);
    assert!(memory.upgrade().is_none());
    assert_eq!(pair.a.closed(at_a), None);
}
