//! Nodes with two NICs each, in a guest of `tests/rxe`: one of the two ways between them is lost while blocks
//! cross it. The other one carries on, and who is blamed is the way that was lost, if anyone. When it works
//! again the nodes take it back, without a failed read.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::protocol::door::Source;
use kvrail::protocol::door::stat::HealthStat;
use kvrail::runtime::deadline::Deadline;

use crate::support::{
    Blocks, Counts, assert_at_rest, cluster, metric, node_id, read, save_unannounced, until,
};

/// Small enough that a lost packet costs little, many enough that some are under way at any time.
const BLOCK: usize = 64 << 10;
const BLOCKS: u32 = 64;

/// Reads one after the other.
const SETS: usize = 12;

#[expect(clippy::disallowed_methods, reason = "the guest names its devices in the environment")]
pub(crate) fn setting(name: &str) -> Vec<String> {
    let words = std::env::var(name).unwrap_or_default();
    words.split_whitespace().map(str::to_owned).collect()
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

/// Packets that have arrived at an interface.
fn arrived(netdev: &str) -> u64 {
    let path = format!("/sys/class/net/{netdev}/statistics/rx_packets");
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// The way between the nodes' second NICs, which is whole again when this is dropped.
pub(crate) struct Lost<'a> {
    wire: &'a [String],
    by_link: bool,
}

impl<'a> Lost<'a> {
    /// Either an interface goes down, which the devices at both of its ends tell their nodes, or the wire
    /// swallows every packet and nobody says so.
    pub(crate) fn new(wire: &'a [String], by_link: bool) -> Self {
        if by_link {
            run("ip", &["link", "set", &wire[0], "down"]);
        } else {
            for netdev in wire {
                run("tc", &["qdisc", "add", "dev", netdev, "root", "netem", "loss", "100%"]);
            }
        }
        Self { wire, by_link }
    }
}

impl Drop for Lost<'_> {
    fn drop(&mut self) {
        if self.by_link {
            run("ip", &["link", "set", &self.wire[0], "up"]);
            // The device's address went with the link.
            run("ip", &["addr", "replace", "10.78.0.1/24", "dev", &self.wire[0]]);
        } else {
            for netdev in self.wire {
                run("tc", &["qdisc", "del", "dev", netdev, "root"]);
            }
        }
    }
}

/// Two nodes: their first NICs are one device, their second ones the two ends of a wire.
struct Scene {
    _cluster: Cluster,
    _registry: Process,
    holder: Process,
    reader: Process,
    at_reader: Client,
    wire: Vec<String>,
    sets: Vec<Blocks>,
}

/// A node with these devices and room for so many sets.
fn node(
    cluster: &Cluster,
    registry: &Process,
    (name, devices): (&str, &str),
    sets: usize,
) -> Process {
    let pool = (sets * BLOCK * BLOCKS as usize).to_string();
    let arguments = ["--rdma-device", devices, "--pool", &pool, "--metrics-listen", "127.0.0.1:0"];
    cluster.node(name, registry.addresses().unwrap().listen, &arguments).unwrap()
}

impl Scene {
    /// `None` where there is no such guest. The reader has room for so many sets.
    fn new(room: usize) -> Option<Self> {
        let [lone, first, second]: [String; 3] = setting("KVRAIL_RDMA_NICS").try_into().ok()?;
        let cluster = cluster();
        let registry = cluster.registry("registry", &[]).unwrap();
        let sets = (0..SETS).map(|at| Blocks::new(&format!("set {at}"), BLOCKS, BLOCK)).collect();
        let devices = format!("{lone},{second}");
        let holder = node(&cluster, &registry, ("holder", &devices), 2 * SETS);
        let reader = node(&cluster, &registry, ("reader", &format!("{lone},{first}")), room);
        let at_reader = reader.client().unwrap();
        let wire = setting("KVRAIL_TEST_NETDEVS");
        let (_cluster, _registry) = (cluster, registry);
        let scene = Self { _cluster, _registry, holder, reader, at_reader, wire, sets };
        let at_holder = scene.holder.client().unwrap();
        scene.sets.iter().for_each(|set| save_unannounced(&at_holder, set));
        Some(scene)
    }

    fn source(&self) -> Source {
        Source::From(node_id(&self.holder.client().unwrap()))
    }

    /// Reads all sets in turn and loses the way while one of them crosses it; answers what became of
    /// each.
    fn lose_it_in_mid_transfer(&self, by_link: bool) -> (Vec<Counts>, Lost<'_>) {
        let (source, over) = (self.source(), AtomicBool::new(false));
        thread::scope(|scope| {
            let reading = scope.spawn(|| {
                let sets = self.sets.iter();
                let counts = sets.map(|set| read(&self.at_reader, set, source)).collect();
                over.store(true, Ordering::Release);
                counts
            });
            let before = arrived(&self.wire[0]);
            until("blocks cross the wire", || arrived(&self.wire[0]) > before + 100);
            let lost = Lost::new(&self.wire, by_link);
            assert!(!over.load(Ordering::Acquire), "all was read before the way was lost");
            (reading.join().unwrap(), lost)
        })
    }

    /// The pairs of NICs that the reader's connection goes over.
    fn rails(&self) -> usize {
        self.at_reader.stat().unwrap().peers.iter().map(|peer| peer.rails.len()).sum()
    }

    fn health(&self, scope: &str) -> Vec<HealthStat> {
        let health = self.at_reader.stat().unwrap().health;
        health.into_iter().filter(|one| one.scope == scope).collect()
    }
}

/// What is not the way's is nobody's: at most the reads that were under way failed, and nothing speaks
/// against the peer, the other way, or a NIC of the reader's own.
fn assert_nobody_else_is_blamed(scene: &Scene, counts: &[Counts]) {
    let whole = Counts::all_ready(BLOCKS as usize);
    let bad: Vec<&Counts> = counts.iter().filter(|counts| **counts != whole).collect();
    let (reader, holder) = (scene.reader.said(), scene.holder.said());
    assert!(bad.len() <= 1, "{bad:?}\nreader: {reader}\nholder: {holder}");
    assert_eq!(counts.last(), Some(&whole), "it goes on over the other way");
    assert_eq!(scene.rails(), 1);
    for one in scene.health("peer").iter().chain(&scene.health("local")) {
        assert_eq!((one.failures, one.state.as_str()), (0, "closed"), "{one:?}");
    }
    for one in scene.health("path").iter().filter(|one| one.local_nic == 0) {
        assert_eq!((one.failures, one.state.as_str()), (0, "closed"), "{one:?}");
    }
}

/// A wire that swallows everything, beside one that works.
#[test]
fn a_way_that_is_cut_in_mid_transfer_is_blamed_alone_and_another_carries_on() {
    let Some(scene) = Scene::new(2 * SETS) else { return };
    let (counts, lost) = scene.lose_it_in_mid_transfer(false);
    assert_nobody_else_is_blamed(&scene, &counts);
    let blamed = scene.health("path");
    let blamed: Vec<_> = blamed.iter().filter(|one| one.failures > 0).collect();
    assert!(matches!(blamed[..], [one] if (one.local_nic, one.peer_nic) == (1, 1)), "{blamed:?}");
    drop(lost);
    assert_at_rest("the reader", &scene.at_reader);
    assert_at_rest("the holder", &scene.holder.client().unwrap());
}

/// Sets that a reader has room for that shall have to read all the time.
const FEW: usize = 3;

/// Longer than a way is avoided, a fresh connection waits, and a first attempt in vain takes.
const HEALING: Duration = Duration::from_secs(100);

impl Scene {
    /// Reads sets in turn until `done`; none of their blocks may fail.
    fn read_until(&self, done: impl Fn() -> bool) {
        let (source, deadline) = (self.source(), Deadline::after(HEALING));
        let mut sets = self.sets.iter().cycle();
        while !done() {
            let late = deadline.remaining().is_none();
            let said = || format!("reader: {}\nholder: {}", self.reader.said(), self.holder.said());
            assert!(!late, "{:?}\n{}", self.at_reader.stat().unwrap().peers, said());
            let counts = read(&self.at_reader, sets.next().unwrap(), source);
            assert_eq!((counts.failed, counts.not_found), (0, 0), "{counts:?}\n{}", said());
        }
    }

    /// What the reader says that its connection goes without.
    fn lacks(&self) -> usize {
        self.at_reader.stat().unwrap().peers.iter().map(|peer| peer.lacks.len()).sum()
    }
}

/// Packets that the reader's devices have received.
fn received() -> [u64; 2] {
    let devices = setting("KVRAIL_RDMA_NICS");
    [&devices[0], &devices[1]].map(|device| {
        let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_pkts");
        std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
    })
}

/// Two nodes that go on over one way when the other is lost go over both when it is back, while they live
/// and read, and no read fails for it.
fn take_it_back(by_link: bool) {
    let Some(scene) = Scene::new(FEW) else { return };
    let (counts, lost) = scene.lose_it_in_mid_transfer(by_link);
    assert_nobody_else_is_blamed(&scene, &counts);
    assert_eq!(scene.lacks(), 1, "{:?}", scene.at_reader.stat().unwrap().peers);
    // A while without it: whatever is tried meanwhile is in vain, and costs nothing.
    let tried = Deadline::after(Duration::from_secs(8));
    scene.read_until(|| tried.remaining().is_none());
    assert_eq!(scene.rails(), 1);
    drop(lost);
    scene.read_until(|| scene.rails() == 2);
    let before = received();
    scene.read_until(|| received().iter().zip(before).all(|(now, then)| *now > then + 1000));
    assert_eq!(scene.lacks(), 0);
    let wider = "kvrail_peer_connections_widened_total{outcome=\"wider\"}";
    assert!((metric(&scene.reader, wider) - 1.0).abs() < f64::EPSILON);
    assert_at_rest("the reader", &scene.at_reader);
    assert_at_rest("the holder", &scene.holder.client().unwrap());
}

/// A link that goes down takes the connection along, and a fresh one leaves its NIC out, until it is up.
#[test]
fn a_link_that_goes_down_in_mid_transfer_blames_nobody_and_is_taken_back_when_it_is_up() {
    take_it_back(true);
}

/// Nobody says that a wire works again: it is tried.
#[test]
fn a_wire_that_was_cut_is_taken_back_when_it_carries_data_again() {
    take_it_back(false);
}
