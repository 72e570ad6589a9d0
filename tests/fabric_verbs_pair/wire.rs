//! A wire that is cut, comes back, or carries shorter packets at one end.

use std::process::Command;
use std::sync::Weak;
use std::time::{Duration, Instant};

use kvrail::fabric::{Access, CloseReason, CompletionStatus, ConnectionId, Fabric, Region};
use kvrail::limits::RETRIES_MAX;
use kvrail::memory::Mapping;
use kvrail::verbs::{VerbsConfig, VerbsFabric};

use crate::conformance::{End, Read, batch, bytes_of, connect, pump};
use crate::rdma::{Verbs, config, device, setting};
use crate::{say, two_devices};

const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 16;
const BYTES: usize = (BLOCK * BLOCKS) as usize;

/// The MTU that the pair's interfaces have: a packet of 4096 bytes fits.
const MTU: &str = "4500";

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

fn netdevs() -> Vec<String> {
    setting("KVRAIL_TEST_NETDEVS").unwrap().split(' ').map(str::to_owned).collect()
}

/// Netem on both interfaces, until it is dropped: then what the run asked for is back.
struct Wire;

impl Wire {
    fn new(words: &str) -> Self {
        netem(words);
        Self
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        netem(&setting("RXE_NETEM").unwrap_or_default());
    }
}

fn netem(words: &str) {
    for netdev in netdevs() {
        // There may be none.
        Command::new("tc").args(["qdisc", "del", "dev", &netdev, "root"]).output().unwrap();
        if !words.is_empty() {
            let add = ["qdisc", "add", "dev", &netdev, "root", "netem"];
            run("tc", &add.into_iter().chain(words.split(' ')).collect::<Vec<_>>());
        }
    }
}

/// A reader on one device and a holder on the other, connected, with READs of the holder's region.
struct Scene {
    a: End<Verbs>,
    b: End<Verbs>,
    ids: (ConnectionId, ConnectionId),
    remote: Region,
    local: Region,
    memory: Weak<Mapping>,
}

impl Scene {
    fn new(retries: u8) -> Self {
        let end = |device: &str| {
            let config = VerbsConfig { retries, ..config(device, 2) };
            End::<Verbs>::of(VerbsFabric::new(&config).unwrap())
        };
        let peer = setting("KVRAIL_RDMA_PEER_DEVICE").unwrap();
        let (mut a, mut b) = (end(device().unwrap()), end(&peer));
        let ids = connect(&mut a, &mut b);
        a.fabric.admit(ids.0).unwrap();
        b.fabric.admit(ids.1).unwrap();
        let (remote, _) = b.region(&[1; BYTES], Access::RemoteRead);
        let (local, memory) = a.region(&[0; BYTES], Access::Local);
        Self { a, b, ids, remote, local, memory }
    }

    /// Posts a READ of each block, and deregisters the memory that they land in.
    fn post(&mut self) {
        let (remote, local) = (self.remote, self.local);
        let read = |slot| Read::same(slot, &remote, &local, u64::from(slot * BLOCK), BLOCK);
        let reads: Vec<Read> = (0..BLOCKS).map(read).collect();
        self.a.fabric.post(self.ids.0, &batch(&reads)).unwrap();
        self.a.fabric.deregister(local.id);
    }

    /// Polls until `done`. Memory must be there until each READ has completed.
    fn until(&mut self, mut done: impl FnMut(&End<Verbs>) -> bool) {
        let (at_a, memory) = (self.ids.0, &self.memory);
        pump(&mut self.a, &mut self.b, |a, _| {
            let outstanding = a.completions(at_a).len() < BLOCKS as usize;
            assert!(!outstanding || memory.upgrade().is_some(), "memory was let go too early");
            done(a)
        });
    }

    /// How the READs ended, each one once.
    fn statuses(&self) -> Vec<CompletionStatus> {
        let mut done = self.a.completions(self.ids.0);
        done.sort_unstable_by_key(|done| done.0);
        let slots: Vec<u32> = done.iter().map(|done| done.0).collect();
        assert_eq!(slots, (0..BLOCKS).collect::<Vec<_>>());
        done.into_iter().map(|done| done.1).collect()
    }

    /// All READs succeed, and what they read is right.
    fn succeed(&mut self) {
        let landed = self.memory.upgrade().unwrap();
        let at_a = self.ids.0;
        self.until(|a| a.completions(at_a).len() == BLOCKS as usize);
        assert_eq!(self.statuses(), [CompletionStatus::Success; BLOCKS as usize]);
        assert!(bytes_of(&landed, 0, BYTES) == [1; BYTES]);
        drop(landed);
        assert!(self.memory.upgrade().is_none(), "memory is let go once its READs have completed");
    }
}

/// The wire swallows everything; TCP, which runs beside it, says nothing of that.
#[test]
fn a_peer_that_is_gone_is_noticed_whatever_the_retry_setting() {
    if !two_devices() {
        return;
    }
    for retries in 0..=RETRIES_MAX {
        let clean = Wire::new("");
        let mut scene = Scene::new(retries);
        let cut = Wire::new("loss 100%");
        scene.post();
        let (posted, at_a) = (Instant::now(), scene.ids.0);
        scene.until(|a| !a.completions(at_a).is_empty());
        let noticed = posted.elapsed();
        scene.until(|a| a.closed(at_a).is_some());
        let statuses = scene.statuses();
        let first = scene.a.completions(at_a)[0].1;
        assert_eq!(first, CompletionStatus::Unreachable, "retries {retries}");
        let count = |status| statuses.iter().filter(|one| **one == status).count();
        assert!(count(CompletionStatus::Success) == 0 && count(first) == 1, "{statuses:?}");
        assert_eq!(scene.a.closed(at_a), Some(CloseReason::Unreachable));
        assert!(scene.memory.upgrade().is_none());
        let each = Duration::from_millis(268);
        assert!(noticed >= each * u32::from(retries), "{noticed:?} with {retries} retries");
        say(&format!("peer gone, {retries} retries: noticed after {:.2} s", noticed.as_secs_f64()));
        drop((cut, clean));
    }
    let forever = VerbsConfig { retries: RETRIES_MAX + 1, ..config(device().unwrap(), 1) };
    assert!(VerbsFabric::new(&forever).is_err(), "7 means for ever on some devices");
}

/// Shorter than the retries last, a gap is no fault.
#[test]
fn reads_survive_a_wire_that_comes_back() {
    if !two_devices() {
        return;
    }
    let _clean = Wire::new("");
    let mut scene = Scene::new(RETRIES_MAX);
    let cut = Wire::new("loss 100%");
    scene.post();
    let posted = Instant::now();
    scene.until(|_| posted.elapsed() > Duration::from_millis(700));
    assert_eq!(scene.a.completions(scene.ids.0), [], "nothing crosses a wire that is cut");
    drop(cut);
    netem("");
    scene.succeed();
    let took = posted.elapsed().as_secs_f64();
    say(&format!("wire cut for 0.7 s: all READs succeeded after {took:.2} s"));
}

#[test]
fn an_interface_that_goes_down_and_up_ends_or_spares_each_read() {
    if !two_devices() {
        return;
    }
    // So slow that the interface is down before the first response arrives.
    let _slow = Wire::new("delay 200ms");
    for (gap, survives) in [(Duration::from_millis(300), true), (Duration::from_secs(8), false)] {
        let mut scene = Scene::new(RETRIES_MAX);
        let at_a = scene.ids.0;
        let netdev = &netdevs()[1];
        scene.post();
        run("ip", &["link", "set", netdev, "down"]);
        let down = Instant::now();
        scene.until(|a| down.elapsed() > gap || a.closed(at_a).is_some());
        run("ip", &["link", "set", netdev, "up"]);
        let deadline = Duration::from_secs(10);
        scene.until(|a| {
            let over = a.completions(at_a).len() == BLOCKS as usize;
            over || a.closed(at_a).is_some() || down.elapsed() > deadline
        });
        scene.a.fabric.close(at_a);
        scene.until(|a| a.closed(at_a).is_some());
        let statuses = scene.statuses();
        let good = statuses.iter().filter(|one| **one == CompletionStatus::Success).count();
        assert!(scene.memory.upgrade().is_none());
        say(&format!(
            "interface down, for {gap:?} at most: {good} of {BLOCKS} READs succeeded, closed as \
             {:?} after {:.2} s",
            scene.a.closed(at_a),
            down.elapsed().as_secs_f64()
        ));
        assert!(survives || good < BLOCKS as usize, "READs crossed an interface that was down");
        drop(scene);
        // A connection can be made again.
        let mut scene = Scene::new(RETRIES_MAX);
        scene.post();
        scene.succeed();
    }
}

/// Long READs on a wire that loses much may fail. Those that succeed are whole.
#[test]
fn long_reads_on_a_lossy_wire_are_whole_or_fail() {
    if !two_devices() {
        return;
    }
    let _lossy = Wire::new("delay 5ms loss 5%");
    let mut succeeded = 0;
    for _round in 0..5 {
        let mut scene = Scene::new(RETRIES_MAX);
        let (landed, at_a) = (scene.memory.upgrade().unwrap(), scene.ids.0);
        scene.post();
        scene.until(|a| a.completions(at_a).len() == BLOCKS as usize || a.closed(at_a).is_some());
        let bytes = bytes_of(&landed, 0, BYTES);
        for (status, block) in scene.statuses().iter().zip(bytes.chunks(BLOCK as usize)) {
            let whole = block.iter().all(|byte| *byte == 1);
            assert!(whole || *status != CompletionStatus::Success, "a block that is not whole");
            succeeded += u32::from(*status == CompletionStatus::Success);
        }
    }
    say(&format!("5 % loss: {succeeded} of {} READs of 16 packets succeeded", 5 * BLOCKS));
}

/// The interface of one end, with an MTU of its own until it is dropped.
struct Narrow(String);

impl Narrow {
    fn new() -> Self {
        let netdev = netdevs()[1].clone();
        run("ip", &["link", "set", &netdev, "mtu", "1500"]);
        Self(netdev)
    }
}

impl Drop for Narrow {
    fn drop(&mut self) {
        run("ip", &["link", "set", &self.0, "mtu", MTU]);
    }
}

/// One end's packets are shorter: of both the smaller holds.
#[test]
fn ends_of_different_mtu_agree_on_the_smaller_one() {
    if !two_devices() {
        return;
    }
    let _clean = Wire::new("");
    let narrow = Narrow::new();
    let mut scene = Scene::new(RETRIES_MAX);
    scene.post();
    scene.succeed();
    drop(narrow);
    let mut scene = Scene::new(RETRIES_MAX);
    scene.post();
    scene.succeed();
}

/// An MTU that shrinks after the fabric was made holds for connections that are made from then on.
/// Those that were there lose the packets that are too long, and say so.
#[test]
fn an_mtu_that_shrinks_ends_old_connections_and_holds_for_new_ones() {
    if !two_devices() {
        return;
    }
    let _clean = Wire::new("");
    let mut scene = Scene::new(1);
    let at_a = scene.ids.0;
    let narrow = Narrow::new();
    scene.post();
    scene.until(|a| a.completions(at_a).len() == BLOCKS as usize);
    let statuses = scene.statuses();
    say(&format!(
        "MTU shrunk under a connection: {:?}, closed as {:?}",
        statuses[0],
        scene.a.closed(at_a)
    ));
    scene.a.fabric.close(at_a);
    scene.until(|a| a.closed(at_a).is_some());
    scene.ids = connect(&mut scene.a, &mut scene.b);
    scene.a.fabric.admit(scene.ids.0).unwrap();
    scene.b.fabric.admit(scene.ids.1).unwrap();
    (scene.local, scene.memory) = scene.a.region(&[0; BYTES], Access::Local);
    scene.post();
    scene.succeed();
    drop(narrow);
}
