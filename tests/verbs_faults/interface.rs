//! The device's network interface goes down, and the device itself away.

use std::io::Write as _;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use kvrail::fabric::{Access, CompletionStatus, EventBatch, Fabric, FabricEvent};

use crate::conformance::{Pair, Seen, batch, pump};
use crate::rdma::{Verbs, device};
use crate::{BLOCKS, BYTES, all_completed, assert_whole, count, many, run, say};

/// The interface of the device, where it may be taken down.
pub(crate) fn netdev() -> Option<String> {
    device()?;
    let named = std::env::var("KVRAIL_RDMA_NETDEV").ok();
    if named.is_none() {
        let line = b"SKIPPED: KVRAIL_RDMA_NETDEV names no interface to take down\n";
        std::io::stderr().write_all(line).ok();
    }
    named
}

#[test]
fn a_link_that_goes_down_and_up_ends_or_spares_each_read() {
    let Some(netdev) = netdev() else { return };
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, memory) = pair.a.region(&[0; BYTES], Access::Local);
    let landed = memory.upgrade().unwrap();
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.post(&many(&remote, &local));
    pair.a.poll();
    run("ip", &["link", "set", &netdev, "down"]);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(4) && pair.a.closed(at_a).is_none() {
        pair.a.poll();
        pair.b.poll();
    }
    run("ip", &["link", "set", &netdev, "up"]);
    // What the caller does at its own deadline; where the link's end broke it, this changes nothing.
    pair.a.fabric.close(at_a);
    pair.pump(|a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    let done = all_completed(&pair.a, at_a);
    let mut bytes = vec![0; BYTES];
    landed.read(0, &mut bytes).unwrap();
    assert_whole(&done, &bytes, 1);
    say(&format!(
        "link down in flight: {} of {BLOCKS} READs succeeded, the connection ended as {:?} after \
         {:.1} s",
        count(&done, CompletionStatus::Success),
        pair.a.closed(at_a),
        start.elapsed().as_secs_f64()
    ));
    // The address is gone with the link: give the device back what other tests need.
    run("ip", &["addr", "replace", "10.77.0.1/24", "dev", &netdev]);
    pump(&mut pair.a, &mut pair.b, |a, b| {
        // Until the device has its GID back, connections cannot be made.
        a.seen.clear();
        b.seen.clear();
        let id = a.fabric.connect(&b.fabric.local_addr().unwrap()).unwrap();
        pump(a, b, |a, _| a.closed(id).is_some() || a.seen.contains(&Seen::Connected(id)));
        a.seen.contains(&Seen::Connected(id))
    });
    let id = pair.b.seen.iter().find_map(|seen| match seen {
        Seen::Accepted(id) => Some(*id),
        _ => None,
    });
    let fresh = pair.a.seen.iter().find_map(|seen| match seen {
        Seen::Connected(id) => Some(*id),
        _ => None,
    });
    let (fresh, id) = fresh.zip(id).unwrap();
    pair.a.fabric.admit(fresh).unwrap();
    pair.b.fabric.admit(id).unwrap();
    pair.a.fabric.post(fresh, &batch(&many(&remote, &local))).unwrap();
    pair.pump(|a, _| a.completions(fresh).len() == BLOCKS as usize);
    landed.read(0, &mut bytes).unwrap();
    assert!(bytes == [1; BYTES]);
}

/// The removal of the device, which SoftRoCE waits with until the last process has let go of it.
pub(crate) struct Removal(Child);

impl Removal {
    /// Begins it with READs of [`many`] under way and waits until each of them has ended, once, and the
    /// connection with them. `check` gets the number of those that have ended before each poll.
    pub(crate) fn begin(pair: &mut Pair<Verbs>, check: impl Fn(u32)) -> Self {
        let name = device().unwrap();
        let removal = Command::new("rdma").args(["link", "delete", name]).spawn().unwrap();
        let (at_a, start) = (pair.at_a, Instant::now());
        let mut events = EventBatch::default();
        let (mut completed, mut closed) = (0, false);
        while !closed {
            assert!(start.elapsed() < Duration::from_secs(60), "{completed} completions");
            check(completed);
            events.clear();
            // A fabric that has lost its device says so by an error, after its last event.
            pair.a.fabric.poll(&mut events, Duration::from_millis(1)).ok();
            for event in &events.events {
                match event {
                    FabricEvent::Completed(_) => completed += 1,
                    FabricEvent::Closed { connection, .. } if *connection == at_a => closed = true,
                    _ => {}
                }
            }
            if completed == BLOCKS || start.elapsed() > Duration::from_secs(5) {
                pair.a.fabric.close(at_a);
            }
        }
        assert_eq!(completed, BLOCKS, "each READ ends once");
        Self(removal)
    }

    /// Waits for the end of it, once the fabrics are gone, and makes a new device of that name.
    pub(crate) fn end(mut self, netdev: &str) {
        let mut waited = 0;
        while self.0.try_wait().unwrap().is_none() {
            assert!(waited < 6000, "the removal waits for somebody");
            waited += 1;
            run("sleep", &["0.01"]);
        }
        run("rdma", &["link", "add", device().unwrap(), "type", "rxe", "netdev", netdev]);
    }
}

/// SoftRoCE waits with the removal until the last process has let go of the device; other drivers
/// take it away and say so by an asynchronous event. Either way every READ ends once, memory is kept
/// until then, the removal ends with the fabric, and a new device works.
#[test]
fn a_device_that_is_removed_lets_every_read_end_and_a_new_one_works() {
    let Some(netdev) = netdev() else { return };
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, memory) = pair.a.region(&[0; BYTES], Access::Local);
    pair.post(&many(&remote, &local));
    pair.a.fabric.deregister(local.id);
    let removal = Removal::begin(&mut pair, |completed| {
        assert!(completed == BLOCKS || memory.upgrade().is_some(), "let go too early");
    });
    assert!(memory.upgrade().is_none(), "memory is let go once its READs have completed");
    drop(pair);
    removal.end(&netdev);
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, memory) = pair.a.region(&[0; BYTES], Access::Local);
    pair.post(&many(&remote, &local));
    pair.succeed(BLOCKS as usize);
    assert!(Pair::<Verbs>::bytes(&memory, 0, BYTES) == [1; BYTES]);
}
