//! Keys of their own, where a fabric can give them out. These tests want a fabric that does.

use kvrail::fabric::{
    Access, CloseReason, CompletionStatus, Fabric, FabricError, Region, RemoteSpan, WindowId,
};
use kvrail::memory::Mapping;

use super::{End, Harness, Pair, Random, Read, Seen, batch, connect, pump, span};

const LEN: usize = 64 << 10;

/// What `b` holds, and where `a` reads it to.
struct Lent<H: Harness> {
    pair: Pair<H>,
    source: Vec<u8>,
    remote: Region,
    local: Region,
    memory: std::sync::Weak<Mapping>,
    reads: u32,
}

impl<H: Harness> Lent<H> {
    fn new() -> Self {
        let mut pair = Pair::<H>::new();
        let source = Random::new(12).bytes(LEN);
        let (remote, _) = pair.b.region(&source, Access::RemoteRead);
        let (local, memory) = pair.a.region(&[0; LEN], Access::Local);
        Self { pair, source, remote, local, memory, reads: 0 }
    }

    /// `b` gives a key to a span, and the span as `a` must name it.
    fn grant(&mut self, window: u16, offset: u64, len: u32) -> RemoteSpan {
        let own = self.remote.remote(offset, len).unwrap();
        let at_b = self.pair.at_b;
        let rkey = self.pair.b.fabric.grant(at_b, WindowId(window), &own).unwrap();
        RemoteSpan { rkey, ..own }
    }

    /// Ends a key, and waits until it has ended.
    fn revoke(&mut self, window: u16) {
        let revoked = Seen::Revoked(self.pair.at_b, WindowId(window));
        let before = count(&self.pair.b, &revoked);
        self.pair.b.fabric.revoke(self.pair.at_b, WindowId(window)).unwrap();
        self.pair.pump(|_, b| count(b, &revoked) > before);
        assert_eq!(count(&self.pair.b, &revoked), before + 1, "told once");
    }

    fn read(&mut self, remote: RemoteSpan) -> Read {
        self.reads += 1;
        Read { slot: self.reads, remote, into: vec![span(&self.local, 0, remote.len)] }
    }

    /// A READ that must bring what `b` holds there, after a message, which waits for the key to work.
    fn succeeds(&mut self, remote: RemoteSpan) {
        let (at_a, read) = (self.pair.at_a, self.read(remote));
        self.pair.b.fabric.send(self.pair.at_b, b"granted").unwrap();
        self.pair.pump(|a, _| !a.messages(at_a).is_empty());
        let done = (read.slot, CompletionStatus::Success);
        self.pair.post(&[read]);
        self.pair.pump(|a, _| !a.completions(at_a).is_empty());
        assert_eq!(self.pair.a.completions(at_a), [done]);
        self.pair.a.seen.clear();
        let offset = (remote.address - self.remote.address) as usize;
        let len = remote.len as usize;
        let landed = Pair::<H>::bytes(&self.memory, 0, len);
        assert!(landed == self.source[offset..offset + len]);
    }

    /// A READ that must be refused, which ends the connection.
    fn refuses(mut self, remote: RemoteSpan) {
        let (at_a, read) = (self.pair.at_a, self.read(remote));
        let before = Pair::<H>::bytes(&self.memory, 0, LEN);
        let refused = (read.slot, CompletionStatus::RemoteAccess);
        self.pair.post(&[read]);
        self.pair.pump(|a, _| a.closed(at_a).is_some());
        assert_eq!(self.pair.a.completions(at_a), [refused]);
        assert_eq!(self.pair.a.closed(at_a), Some(CloseReason::ReadFailed));
        assert!(Pair::<H>::bytes(&self.memory, 0, LEN) == before);
    }
}

fn count<H: Harness>(end: &End<H>, what: &Seen) -> usize {
    end.seen.iter().filter(|seen| *seen == what).count()
}

pub(crate) fn a_key_reads_its_span_and_no_byte_more<H: Harness>() {
    if !H::windows_have_bounds() {
        return reads_beyond_a_window_stay_in_its_region::<H>();
    }
    for (before, behind) in [(1_u64, 0), (0, 1_u32), (40_000, 0)] {
        let mut lent = Lent::<H>::new();
        let granted = lent.grant(3, 5_000, 3_000);
        lent.succeeds(granted);
        lent.succeeds(RemoteSpan { address: granted.address + 2_999, len: 1, ..granted });
        let address = granted.address - before.min(5_000);
        let outside = RemoteSpan { address, len: granted.len + behind, ..granted };
        lent.refuses(outside);
    }
}

/// What a device does that looks at the bounds of a window's region only: bytes beside the window are
/// read, and none beside the region.
#[expect(clippy::print_stderr, reason = "a run's log tells what the device does")]
fn reads_beyond_a_window_stay_in_its_region<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let granted = lent.grant(3, 5_000, 3_000);
    lent.succeeds(granted);
    lent.succeeds(RemoteSpan { address: granted.address - 1, ..granted });
    lent.succeeds(RemoteSpan { len: granted.len + 1, ..granted });
    eprintln!("observed: READs of one byte before and behind a window's bounds succeed");
    for (offset, before, behind) in [(0, 1, 0), (LEN as u64 - 3_000, 0, 1)] {
        let mut lent = Lent::<H>::new();
        let granted = lent.grant(3, offset, 3_000);
        lent.succeeds(granted);
        let outside =
            RemoteSpan { address: granted.address - before, len: granted.len + behind, ..granted };
        lent.refuses(outside);
    }
}

pub(crate) fn a_regions_own_key_reads_nothing<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let granted = lent.grant(0, 0, 4_096);
    lent.succeeds(granted);
    let own = lent.remote.remote(0, 64).unwrap();
    lent.refuses(own);
}

pub(crate) fn a_key_ends_and_the_others_of_its_peer_go_on<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let (first, second) = (lent.grant(0, 0, 4_096), lent.grant(1, 0, 4_096));
    assert_ne!(first.rkey, second.rkey);
    lent.succeeds(first);
    lent.revoke(0);
    lent.succeeds(second);
    lent.refuses(first);
}

pub(crate) fn a_key_of_another_connection_reads_nothing<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let mut thief = End::<H>::new();
    let (at_thief, at_b) = connect(&mut thief, &mut lent.pair.b);
    thief.fabric.admit(at_thief).unwrap();
    lent.pair.b.fabric.admit(at_b).unwrap();
    let granted = lent.grant(0, 0, 4_096);
    lent.succeeds(granted);
    let (local, _) = thief.region(&[0; LEN], Access::Local);
    let stolen = Read { slot: 1, remote: granted, into: vec![span(&local, 0, granted.len)] };
    thief.fabric.post(at_thief, &batch(&[stolen])).unwrap();
    pump(&mut thief, &mut lent.pair.b, |thief, _| thief.closed(at_thief).is_some());
    assert_eq!(thief.completions(at_thief), [(1, CompletionStatus::RemoteAccess)]);
    lent.succeeds(granted);
}

pub(crate) fn a_window_is_granted_again_and_again<H: Harness>(rounds: u32) {
    let mut lent = Lent::<H>::new();
    let mut random = Random::new(13);
    let mut last = RemoteSpan { rkey: 0, address: 0, len: 0 };
    for round in 0..rounds {
        let (window, len) = (random.below(4) as u16, 1 + random.below(8_000) as u32);
        let granted = lent.grant(window, random.below(LEN as u64 - 8_000), len);
        assert_ne!(granted.rkey, last.rkey, "round {round}");
        if round % 50 == 0 {
            lent.succeeds(granted);
        }
        lent.revoke(window);
        lent.pair.b.seen.clear();
        last = granted;
    }
    lent.refuses(last);
}

pub(crate) fn a_message_after_a_grant_finds_the_key_at_work<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let (at_a, at_b) = (lent.pair.at_a, lent.pair.at_b);
    for round in 0..50_u16 {
        let parts = [(0, 100), (20_000, 4_096), (50_000, 1)];
        let spans = parts.map(|(offset, len)| {
            let window = round % 8 * 4 + (offset / 20_000) as u16;
            (window, lent.grant(window, offset, len))
        });
        lent.pair.b.fabric.send(at_b, &round.to_le_bytes()).unwrap();
        lent.pair.pump(|a, _| a.messages(at_a) == [round.to_le_bytes()]);
        lent.pair.a.seen.clear();
        // At once: what the first message waited for is all that these READs wait for.
        for (_, granted) in &spans {
            let read = lent.read(*granted);
            lent.pair.post(&[read]);
        }
        lent.pair.succeed(spans.len());
        lent.pair.a.seen.clear();
        for (window, _) in spans {
            lent.revoke(window);
        }
        lent.pair.b.seen.clear();
    }
}

pub(crate) fn windows_are_bounded_and_granted_once<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let windows = lent.pair.b.fabric.capabilities().windows;
    let spans: Vec<RemoteSpan> =
        (0..windows).map(|window| lent.grant(window, u64::from(window) * 64, 64)).collect();
    let (at_b, own) = (lent.pair.at_b, lent.remote.remote(0, 64).unwrap());
    let again = lent.pair.b.fabric.grant(at_b, WindowId(windows / 2), &own);
    assert!(matches!(again, Err(FabricError::Full)), "{again:?}");
    let beyond = lent.pair.b.fabric.grant(at_b, WindowId(windows), &own);
    assert!(matches!(beyond, Err(FabricError::Limit { .. })), "{beyond:?}");
    for granted in spans {
        lent.succeeds(granted);
    }
    for window in 0..windows {
        lent.revoke(window);
    }
    let outside = RemoteSpan { address: own.address + LEN as u64 - 1, len: 2, ..own };
    let outside = lent.pair.b.fabric.grant(at_b, WindowId(0), &outside);
    assert!(matches!(outside, Err(FabricError::Limit { .. })), "{outside:?}");
}

pub(crate) fn a_deregistration_ends_the_keys_of_its_region<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let (kept, weak) = lent.pair.b.region(&[7; 4_096], Access::RemoteRead);
    let at_b = lent.pair.at_b;
    let own = kept.remote(0, 4_096).unwrap();
    let rkey = lent.pair.b.fabric.grant(at_b, WindowId(9), &own).unwrap();
    let other = lent.grant(1, 0, 4_096);
    lent.succeeds(other);
    lent.pair.b.fabric.deregister(kept.id);
    assert!(weak.upgrade().is_none());
    lent.succeeds(other);
    lent.revoke(9);
    lent.refuses(RemoteSpan { rkey, ..own });
}

pub(crate) fn a_closed_connection_takes_its_keys_along<H: Harness>() {
    let mut lent = Lent::<H>::new();
    let granted = lent.grant(0, 0, 4_096);
    lent.succeeds(granted);
    let (at_a, at_b) = (lent.pair.at_a, lent.pair.at_b);
    lent.pair.b.fabric.close(at_b);
    let revoked = lent.pair.b.fabric.revoke(at_b, WindowId(0));
    assert!(matches!(revoked, Err(FabricError::Closed)), "{revoked:?}");
    lent.pair.pump(|a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    (lent.pair.at_a, lent.pair.at_b) = connect(&mut lent.pair.a, &mut lent.pair.b);
    lent.pair.a.fabric.admit(lent.pair.at_a).unwrap();
    lent.pair.b.fabric.admit(lent.pair.at_b).unwrap();
    let fresh = lent.grant(0, 0, 4_096);
    lent.pair.a.seen.clear();
    lent.succeeds(fresh);
    lent.refuses(granted);
}
