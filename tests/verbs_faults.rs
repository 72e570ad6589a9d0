//! Faults of a real device, and of peers on it.
//!
//! `KVRAIL_RDMA_DEVICE` names the device. `KVRAIL_RDMA_NETDEV` names its network interface, for the
//! tests that take it down; they want to be root and alone, so they are skipped without it.
//! `KVRAIL_ROUNDS` is the number of rounds of random cuts.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests: they fail by panicking, sizes are small, a wait has a deadline"
)]

#[allow(dead_code, unused_imports, unused_macros, reason = "only its helpers are used here")]
mod conformance;
mod rdma;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use kvrail::fabric::{Access, CloseReason, CompletionStatus, Fabric, FabricEvent};

use conformance::{End, Pair, Random, Read, Seen, batch, connect, pump};
use rdma::{Verbs, device};

const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 64;
const BYTES: usize = (BLOCK * BLOCKS) as usize;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// What the kernel counts for the device: queue pairs, completion queues, memory regions, domains.
fn resources() -> String {
    let shown = Command::new("rdma").args(["resource", "show", device().unwrap()]).output();
    shown.map_or_else(|error| error.to_string(), |it| String::from_utf8_lossy(&it.stdout).into())
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

fn many(remote: &kvrail::fabric::Region, local: &kvrail::fabric::Region) -> Vec<Read> {
    (0..BLOCKS)
        .map(|slot| Read::same(slot, remote, local, u64::from(slot * BLOCK), BLOCK))
        .collect()
}

/// One completion per READ of [`many`], none after the close.
fn all_completed(end: &End<Verbs>, id: kvrail::fabric::ConnectionId) -> Vec<CompletionStatus> {
    let mut done = end.completions(id);
    done.sort_unstable_by_key(|done| done.0);
    let slots: Vec<u32> = done.iter().map(|done| done.0).collect();
    assert_eq!(slots, (0..BLOCKS).collect::<Vec<_>>());
    let last = end.seen.iter().rfind(|seen| match seen {
        Seen::Completed(of, ..) | Seen::Closed(of, _) => *of == id,
        _ => false,
    });
    assert!(matches!(last, Some(Seen::Closed(..))), "{last:?}");
    done.into_iter().map(|done| done.1).collect()
}

#[test]
fn connections_that_end_leave_nothing_behind() {
    if device().is_none() {
        return;
    }
    let (mut a, mut b) = (End::<Verbs>::new(), End::<Verbs>::new());
    let (fds, kernel) = (descriptors(), resources());
    for round in 0..200 {
        if round % 4 == 3 {
            // One that ends before it is up.
            let id = a.fabric.connect(&b.fabric.local_addr().unwrap()).unwrap();
            a.poll();
            a.fabric.close(id);
            pump(&mut a, &mut b, |a, _| a.closed(id).is_some());
            continue;
        }
        let (at_a, at_b) = connect(&mut a, &mut b);
        assert!(descriptors() > fds);
        if round % 2 == 0 {
            a.fabric.close(at_a)
        } else {
            b.fabric.close(at_b)
        }
        pump(&mut a, &mut b, |a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
        a.seen.clear();
        b.seen.clear();
    }
    pump(&mut a, &mut b, |_, _| descriptors() == fds && resources() == kernel);
}

#[test]
fn nonsense_on_the_listening_socket_harms_nobody() {
    if device().is_none() {
        return;
    }
    let (mut a, mut b) = (End::<Verbs>::new(), End::<Verbs>::new());
    let to = b.fabric.local_addr().unwrap();
    let (at_a, at_b) = connect(&mut a, &mut b);
    let mut chatty = b"kvrailRC\x01\0\0\0".to_vec();
    chatty.extend([0xff; 500]);
    let greetings = [vec![0x16; 5000], b"GET / HTTP/1.1\r\n\r\n".repeat(20), vec![0; 192], chatty];
    for (number, greeting) in greetings.iter().enumerate() {
        let mut socket = TcpStream::connect(to).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.write_all(greeting).unwrap();
        pump(&mut a, &mut b, |_, _| match socket.read(&mut [0; 512]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        });
        a.fabric.send(at_a, &[number as u8]).unwrap();
        pump(&mut a, &mut b, |_, b| b.messages(at_b).len() == number + 1);
    }
    assert!(b.closed(at_b).is_none());
}

#[test]
fn memory_is_touched_no_more_once_its_connection_has_closed() {
    if device().is_none() {
        return;
    }
    let rounds = std::env::var("KVRAIL_ROUNDS").ok().and_then(|it| it.parse().ok()).unwrap_or(60);
    let (mut a, mut b) = (End::<Verbs>::new(), End::<Verbs>::new());
    let mut random = Random::new(11);
    let (remote, _) = b.region(&[1; BYTES], Access::RemoteRead);
    let memory = <Verbs as conformance::Harness>::memory(BYTES as u64);
    let local = a.fabric.register(memory.clone(), Access::Local).unwrap();
    let reads = batch(&many(&remote, &local));
    let (canary, mut found) = (vec![0xc5; BYTES], vec![0; BYTES]);
    let mut cut_short = 0;
    for round in 0..rounds {
        let (at_a, at_b) = connect(&mut a, &mut b);
        a.fabric.admit(at_a).unwrap();
        b.fabric.admit(at_b).unwrap();
        a.fabric.post(at_a, &reads).unwrap();
        for _poll in 0..random.below(6) {
            a.poll();
        }
        if random.below(2) == 0 {
            a.fabric.close(at_a)
        } else {
            b.fabric.close(at_b)
        }
        pump(&mut a, &mut b, |a, _| a.closed(at_a).is_some());
        memory.write(0, &canary).unwrap();
        let success = |status: &CompletionStatus| *status == CompletionStatus::Success;
        cut_short += u32::from(!all_completed(&a, at_a).iter().all(success));
        pump(&mut a, &mut b, |_, b| b.closed(at_b).is_some());
        memory.read(0, &mut found).unwrap();
        assert!(found == canary, "a READ landed after its connection had closed, round {round}");
        a.seen.clear();
        b.seen.clear();
    }
    assert!(cut_short > 0, "no round cut a READ short");
    assert_eq!(a.fabric.stale_completions(), 0);
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

/// The interface of the device, where it may be taken down.
fn netdev() -> Option<String> {
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
    all_completed(&pair.a, at_a);
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
    assert!(Pair::<Verbs>::bytes(&memory, 0, BYTES) == [1; BYTES]);
}

/// SoftRoCE waits with the removal until the last process has let go of the device; other drivers
/// take it away and say so by an asynchronous event. Either way every READ ends once, the removal
/// ends with the fabric, and a new device works.
#[test]
fn a_device_that_is_removed_lets_every_read_end_and_a_new_one_works() {
    let Some(netdev) = netdev() else { return };
    let name = device().unwrap();
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, _) = pair.a.region(&[0; BYTES], Access::Local);
    let at_a = pair.at_a;
    pair.post(&many(&remote, &local));
    let mut removal = Command::new("rdma").args(["link", "delete", name]).spawn().unwrap();
    let start = Instant::now();
    let mut events = kvrail::fabric::EventBatch::default();
    let (mut completed, mut closed) = (0, false);
    while !closed {
        assert!(start.elapsed() < Duration::from_secs(20), "{completed} completions");
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
    drop(pair);
    let mut waited = 0;
    while removal.try_wait().unwrap().is_none() {
        assert!(waited < 1000, "the removal waits for somebody");
        waited += 1;
        run("sleep", &["0.01"]);
    }
    run("rdma", &["link", "add", name, "type", "rxe", "netdev", &netdev]);
    let mut pair = Pair::<Verbs>::new();
    let (remote, _) = pair.b.region(&[1; BYTES], Access::RemoteRead);
    let (local, _) = pair.a.region(&[0; BYTES], Access::Local);
    pair.post(&many(&remote, &local));
    pair.succeed(BLOCKS as usize);
}
