//! Several NICs, and regions of several registrations, on real devices.
//!
//! `KVRAIL_RDMA_NICS` names three devices: the first is on an interface of its own,
//! `KVRAIL_RDMA_NETDEV`, which a test takes down; the other two are on the two ends of one wire, so that
//! each reaches itself and the other. Without it the tests say that they are skipped.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests: they fail by panicking, sizes are small, a wait has a deadline"
)]

mod conformance;
#[cfg(feature = "gpu")]
#[allow(dead_code, reason = "only a part of it is used here")]
mod cuda_standin;
#[allow(dead_code, reason = "its one device is not used here")]
mod rdma;

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use kvrail::fabric::{Access, CloseReason, CompletionStatus, Fabric, Region};
use kvrail::verbs::{NicPair, VerbsConfig, VerbsFabric};

use conformance::{End, Harness, Pair, Random, Read, Seen, pump, span};
use rdma::{Verbs, config, setting};

/// The longest registration in these tests: regions of a few MiB are many of them.
const CHUNK: u64 = 128 << 10;

/// Fabrics over the two devices on one wire, with regions in chunks.
struct Nics;

impl Harness for Nics {
    type Fabric = VerbsFabric;

    fn fabric() -> VerbsFabric {
        VerbsFabric::new(&VerbsConfig { lanes: 3, ..over(&wire()) }).unwrap()
    }

    fn endpoint(fabric: &VerbsFabric) -> SocketAddr {
        Verbs::endpoint(fabric)
    }

    fn nowhere() -> SocketAddr {
        Verbs::nowhere()
    }
}

conformance_tests!(Nics, devices().is_some());

/// The three devices; says once that there are none.
fn devices() -> Option<[&'static str; 3]> {
    static DEVICES: OnceLock<Option<[&str; 3]>> = OnceLock::new();
    *DEVICES.get_or_init(|| {
        let named = setting("KVRAIL_RDMA_NICS").unwrap_or_default().leak();
        let names: Vec<&str> = named.split_whitespace().collect();
        if names.is_empty() {
            let line = b"SKIPPED: KVRAIL_RDMA_NICS names no RDMA devices; nothing was tested\n";
            std::io::stderr().write_all(line).ok();
            return None;
        }
        Some(names.try_into().unwrap())
    })
}

fn wire() -> [&'static str; 2] {
    let [_, first, second] = devices().unwrap();
    [first, second]
}

fn over(names: &[&str]) -> VerbsConfig {
    VerbsConfig {
        devices: names.iter().map(|name| (*name).to_owned()).collect(),
        chunk_bytes: CHUNK,
        ..config("", 2)
    }
}

fn open(config: VerbsConfig) -> VerbsFabric {
    VerbsFabric::new(&config).unwrap()
}

/// Two connected fabrics, admitted at both ends.
fn between(a: VerbsConfig, b: VerbsConfig) -> Pair<Nics> {
    let mut pair: Pair<Nics> = Pair::between(End::of(open(a)), End::of(open(b)));
    pair.a.fabric.admit(pair.at_a).unwrap();
    pair.b.fabric.admit(pair.at_b).unwrap();
    pair
}

/// Tests that count what devices carry, or take one down, run one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn number(path: &str) -> u64 {
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Packets that a device has sent.
fn sent(device: &str) -> u64 {
    let counters = format!("/sys/class/infiniband/{device}/ports/1/hw_counters");
    // Else the kernel answers what it read up to 10 ms before.
    std::fs::write(format!("{counters}/lifespan"), "0").unwrap();
    number(&format!("{counters}/sent_pkts"))
}

/// Packets that crossed the wire, in either direction. What a device sends to itself does not.
fn crossed() -> u64 {
    let devices = setting("KVRAIL_TEST_NETDEVS").unwrap();
    let sent = |name| number(&format!("/sys/class/net/{name}/statistics/tx_packets"));
    devices.split_whitespace().map(sent).sum()
}

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().unwrap();
    assert!(status.success(), "{program} {arguments:?}: {status}");
}

/// READs of all of a region, each of another length, most of them over a border of chunks.
fn whole(remote: &Region, local: &Region) -> Vec<Read> {
    let (mut reads, mut offset, mut random) = (Vec::new(), 0, Random::new(5));
    while offset < remote.len {
        let len = (1 + random.below(3 * CHUNK)).min(remote.len - offset) as u32;
        reads.push(Read::same(reads.len() as u32, remote, local, offset, len));
        offset += u64::from(len);
    }
    reads
}

/// Reads a region whole into another one and compares every byte.
fn reads_whole(pair: &mut Pair<Nics>, len: usize) {
    let source = Random::new(len as u64).bytes(len);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0; len], Access::Local);
    let reads = whole(&remote, &local);
    let before = pair.a.completions(pair.at_a).len();
    pair.post(&reads);
    pair.succeed(before + reads.len());
    assert!(Pair::<Nics>::bytes(&memory, 0, len) == source);
    pair.a.fabric.deregister(local.id);
    pair.b.fabric.deregister(remote.id);
}

const LEN: usize = 24 * CHUNK as usize + 4097;

#[test]
fn ends_with_different_numbers_of_nics_meet_and_use_them_all() {
    if devices().is_none() {
        return;
    }
    let _alone = alone();
    let [first, second] = wire();
    let both = [first, second];
    let ends: [(&[&str], &[&str]); 4] =
        [(&both, &both), (&both, &[second]), (&[first], &both), (&[first], &[second])];
    for (a, b) in ends {
        let mut pair = between(over(a), over(b));
        let before = both.map(sent);
        reads_whole(&mut pair, LEN);
        // A requester's device sends a packet for each READ or part of one; a holder's all the bytes.
        for (device, before) in both.into_iter().zip(before) {
            let packets = sent(device) - before;
            let used = a.contains(&device) || b.contains(&device);
            assert!(!used || packets > 5, "{a:?} to {b:?}: {device} sent {packets} packets");
        }
    }
}

#[test]
fn several_nics_share_the_bytes() {
    if devices().is_none() {
        return;
    }
    let _alone = alone();
    let both = wire();
    let mut pair = between(over(&both), over(&both));
    let before = both.map(sent);
    reads_whole(&mut pair, LEN);
    let packets = [0, 1].map(|at| sent(both[at]) - before[at]);
    let least = LEN as u64 / 4096 / 4;
    assert!(packets.iter().all(|packets| *packets > least), "{packets:?}");
}

#[test]
fn nics_are_paired_by_number_unless_they_are_told_otherwise() {
    if devices().is_none() {
        return;
    }
    let _alone = alone();
    let [first, second] = wire();
    let both = [first, second];
    let mut straight = between(over(&both), over(&both));
    let before = crossed();
    reads_whole(&mut straight, LEN);
    assert!(crossed() - before < 100, "each device talks to itself");
    let pair = |ours: &str, theirs: &str| NicPair { ours: ours.into(), theirs: theirs.into() };
    let told =
        || VerbsConfig { pairs: vec![pair(first, second), pair(second, first)], ..over(&both) };
    for (a, b) in [(told(), over(&both)), (over(&both), told())] {
        let mut across = between(a, b);
        let before = crossed();
        reads_whole(&mut across, LEN);
        let crossed = crossed() - before;
        assert!(crossed as usize > LEN / 4096, "only {crossed} packets crossed the wire");
    }
}

#[test]
fn a_read_may_cut_across_chunks_at_both_ends_and_touches_nothing_else() {
    if devices().is_none() {
        return;
    }
    let both = wire();
    let mut pair = between(over(&both), over(&both));
    let len = 8 * CHUNK;
    let source = Random::new(3).bytes(len as usize);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0xee; len as usize], Access::Local);
    // Sixteen spans around every border of the local region, in no order, from one remote span that
    // crosses borders elsewhere.
    let mut into = Vec::new();
    for (at, border) in [7, 2, 5, 1, 6, 3, 4].into_iter().enumerate() {
        let reach = 1000 * (at as u64 + 1) + 1;
        into.push(span(&local, border * CHUNK - reach, 2 * reach as u32));
    }
    let total: u32 = into.iter().map(|span| span.len).sum();
    let from = CHUNK - 4000;
    let remote = remote.remote(from, total).unwrap();
    pair.post(&[Read { slot: 1, remote, into: into.clone() }]);
    pair.succeed(1);
    let mut expected = vec![0xee; len as usize];
    let mut taken = from as usize;
    for span in into {
        let (at, bytes) = (span.offset as usize, span.len as usize);
        expected[at..at + bytes].copy_from_slice(&source[taken..taken + bytes]);
        taken += bytes;
    }
    assert!(Pair::<Nics>::bytes(&memory, 0, len as usize) == expected);
}

#[test]
fn reads_in_many_parts_fill_the_queues_and_all_arrive() {
    if devices().is_none() {
        return;
    }
    let mut config = over(&wire());
    // The least: a READ of 1 MiB is 17 work requests, and a queue has room for 512.
    config.chunk_bytes = 64 << 10;
    let mut pair = between(config.clone(), config);
    let len = 2 << 20;
    let source = Random::new(9).bytes(len);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0; len], Access::Local);
    let longest = pair.a.fabric.capabilities().read_bytes - 1;
    let reads: Vec<Read> = (0..100)
        .map(|slot| {
            Read::same(slot, &remote, &local, u64::from(slot % 2) * u64::from(longest), longest)
        })
        .collect();
    pair.post(&reads);
    pair.succeed(100);
    let read = 2 * longest as usize;
    assert!(Pair::<Nics>::bytes(&memory, 0, read) == source[..read]);
}

/// A NIC whose link goes down takes the connections over it with it, and no more: each READ ends once,
/// those that are told to have arrived did, nobody blames the peer, and a fresh connection comes up over
/// the NIC that is left. When the link is back, so is the NIC.
#[test]
fn a_lost_nic_takes_its_connections_and_another_one_carries_on() {
    let Some([lone, other, _]) = devices() else { return };
    let _alone = alone();
    let netdev = setting("KVRAIL_RDMA_NETDEV").unwrap();
    let names = [lone, other];
    let mut pair = between(over(&names), over(&names));
    let source = Random::new(7).bytes(LEN);
    let (remote, _) = pair.b.region(&source, Access::RemoteRead);
    let (local, memory) = pair.a.region(&vec![0; LEN], Access::Local);
    let reads = whole(&remote, &local);
    pair.warm_up(&remote, &local);
    pair.post(&reads);
    pair.a.poll();
    run("ip", &["link", "set", &netdev, "down"]);
    let (at_a, at_b) = (pair.at_a, pair.at_b);
    pair.pump(|a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    let reasons = [pair.a.closed(at_a).unwrap(), pair.b.closed(at_b).unwrap()];
    assert!(reasons.contains(&CloseReason::NicLost), "{reasons:?}");
    let mut done = pair.a.completions(at_a);
    done.sort_unstable_by_key(|done| done.0);
    assert_eq!(done.len(), reads.len(), "each READ ends once");
    for (read, (slot, status)) in reads.iter().zip(done) {
        assert_eq!(read.slot, slot);
        assert_ne!(status, CompletionStatus::RemoteAccess);
        let (from, len) = (read.into[0].offset as usize, read.into[0].len as usize);
        let arrived = status == CompletionStatus::Success;
        let there = Pair::<Nics>::bytes(&memory, from as u64, len) == source[from..from + len];
        assert!(there || !arrived, "READ {slot}");
    }
    // A fresh connection, over the NIC that is left.
    (pair.at_a, pair.at_b) = conformance::connect(&mut pair.a, &mut pair.b);
    pair.a.fabric.admit(pair.at_a).unwrap();
    pair.b.fabric.admit(pair.at_b).unwrap();
    let before = sent(lone);
    reads_whole(&mut pair, LEN);
    assert_eq!(sent(lone), before, "its link is down");
    run("ip", &["link", "set", &netdev, "up"]);
    run("ip", &["addr", "replace", "10.77.0.1/24", "dev", &netdev]);
    uses_again(&mut pair, lone);
}

/// Connects anew until a connection uses the device.
fn uses_again(pair: &mut Pair<Nics>, device: &str) {
    let mut tries = 0;
    loop {
        let Pair { a, b, .. } = pair;
        a.seen.clear();
        b.seen.clear();
        let id = a.fabric.connect(&b.fabric.local_addr().unwrap()).unwrap();
        pump(a, b, |a, b| {
            let accepted = b.seen.iter().any(|seen| matches!(seen, Seen::Accepted(_)));
            a.closed(id).is_some() || accepted && a.seen.contains(&Seen::Connected(id))
        });
        let accepted = b.seen.iter().find_map(|seen| match seen {
            Seen::Accepted(id) => Some(*id),
            _ => None,
        });
        if let (None, Some(at_b)) = (a.closed(id), accepted) {
            (pair.at_a, pair.at_b) = (id, at_b);
            pair.a.fabric.admit(pair.at_a).unwrap();
            pair.b.fabric.admit(pair.at_b).unwrap();
            let before = sent(device);
            reads_whole(pair, LEN);
            if sent(device) > before + 20 {
                return;
            }
        }
        tries += 1;
        assert!(tries < 500, "the device is not used again");
        run("sleep", &["0.01"]);
    }
}

/// A pair of NICs whose networks do not meet: the connection goes over its other pair, and says so.
#[test]
fn a_pair_of_nics_that_carries_nothing_is_left_out() {
    let Some([lone, first, second]) = devices() else { return };
    let _alone = alone();
    // Packets for another device of this host leave through the loopback, where no device takes them.
    let pairs = vec![NicPair { ours: lone.into(), theirs: second.into() }];
    let told = VerbsConfig { pairs, ..over(&[first, lone]) };
    let rails = |fabric: &VerbsFabric, id| -> Vec<(String, String)> {
        fabric.rails(id).into_iter().map(|rail| (rail.local, rail.remote)).collect()
    };
    let mut pair = between(told, over(&[second]));
    assert_eq!(rails(&pair.a.fabric, pair.at_a), [(first.to_owned(), second.to_owned())]);
    assert_eq!(rails(&pair.b.fabric, pair.at_b), [(second.to_owned(), first.to_owned())]);
    let before = sent(lone);
    reads_whole(&mut pair, LEN);
    assert_eq!(sent(lone), before, "no READ goes over it");
    // The other way round: the acceptor has the NIC that reaches nobody.
    let mut pair = between(over(&[second]), over(&[first, lone]));
    assert_eq!(rails(&pair.a.fabric, pair.at_a), [(second.to_owned(), first.to_owned())]);
    reads_whole(&mut pair, LEN);
    // Alone it carries no connection.
    let (mut a, mut b) =
        (End::<Nics>::of(open(over(&[lone]))), End::<Nics>::of(open(over(&[second]))));
    let id = a.fabric.connect(&b.fabric.local_addr().unwrap()).unwrap();
    pump(&mut a, &mut b, |a, _| a.closed(id).is_some());
    assert_eq!(a.closed(id), Some(CloseReason::Unreachable));
}

#[test]
fn without_names_the_devices_of_the_highest_speed_are_taken() {
    let Some([lone, first, second]) = devices() else { return };
    let fabric: VerbsFabric = open(VerbsConfig::default());
    let taken = fabric.device_names();
    assert!(taken.contains(&first) && taken.contains(&second), "{taken:?}");
    let rate = |name: &str| {
        std::fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/1/rate")).unwrap()
    };
    assert_eq!(taken.contains(&lone), rate(lone) == rate(first), "{taken:?}");
}

/// Memory of a GPU that the configuration says is near to the second NIC of both ends.
#[cfg(feature = "gpu")]
#[test]
fn reads_of_gpu_memory_take_the_nics_that_are_near_to_it() {
    use std::sync::Arc;

    use kvrail::cuda::{Context, DeviceMemory, Driver};
    use kvrail::memory::{ForeignFabric, ForeignMemory};

    const BYTES: u64 = 2 << 20;
    let (Some(_), Some(standin)) = (devices(), cuda_standin::StandIn::new()) else { return };
    let _alone = alone();
    standin.control("set registrable 1");
    let driver = Driver::open(standin.library()).unwrap();
    let context = Context::primary(&driver.device(0).unwrap()).unwrap();
    let memory = || -> Arc<dyn ForeignMemory> {
        DeviceMemory::allocate(&context.bind().unwrap(), BYTES).unwrap()
    };
    let near = || VerbsConfig { gpu_nics: vec![wire()[1].to_owned()], lanes: 4, ..over(&wire()) };
    let mut pair = between(near(), near());
    let rungs = kvrail::memory::GpuDirect::Peermem.direct();
    let served = pair.b.fabric.register_foreign(&memory(), Access::RemoteRead, rungs).unwrap();
    let into = pair.a.fabric.register_foreign(&memory(), Access::Local, rungs).unwrap();
    let judged: Vec<_> =
        served.1.near.iter().map(|(nic, it)| (nic.as_str(), it.near, it.why.as_str())).collect();
    let [other, named] = wire();
    let want = [(other, false, "--gpu-nics names others"), (named, true, "--gpu-nics")];
    assert_eq!(judged, want);
    let (served, into) = (served.0.unwrap(), into.0.unwrap());
    let (host, _) = pair.a.region(&vec![0; BYTES as usize], Access::Local);
    let (remote, _) = pair.b.region(&vec![0; BYTES as usize], Access::RemoteRead);
    // Packets that each of the two NICs sent meanwhile, for both ends.
    let mut packets = |remote: &Region, local: &Region| {
        let (before, done) = (wire().map(sent), pair.a.completions(pair.at_a).len());
        let reads = whole(remote, local);
        pair.post(&reads);
        pair.succeed(done + reads.len());
        let after = wire().map(sent);
        [after[0] - before[0], after[1] - before[1]]
    };
    // As many packets as bytes take, and on the other NIC none but what connections have to say.
    let few = BYTES / 4096 / 8;
    let gpus = packets(&served, &into);
    assert!(gpus[0] < few && gpus[1] > 8 * few, "from GPU to GPU: {gpus:?}");
    let hosts = packets(&remote, &host);
    assert!(hosts[0] > few && hosts[1] > few, "host memory is near to all: {hosts:?}");
}
