//! What the tests have in common: a cluster, blocks, reads that compare bytes, conditions.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::{Acquired, Client, ClientError};
use kvrail::protocol::door::Source;
use kvrail::protocol::door::stat::StatReport;
use kvrail::runtime::deadline::Deadline;
use kvrail::types::{BlockHash, Namespace, NodeId};
use rustix::net::{AddressFamily, SocketType};
use rustix::process::Signal;

/// The binary under test.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_kvrail");

/// The longest that a condition is waited for. Far more than any takes on an idle machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(5);

/// Leases that end soon, and answers that are not waited for long, so that tests of lost peers are
/// short: for those that wait for such an end. What must succeed has less time, too.
pub(crate) const IMPATIENT: [&str; 6] =
    ["--lease-ttl", "3s", "--lease-margin", "200ms", "--transfer-timeout", "2s"];

/// Nodes that talk over shared memory, and over nothing else.
pub(crate) const OVER_SHM: [&str; 2] = ["--transport", "shm"];

/// Waits until `is_so`, and fails with `what` where that does not come to be.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Deadline::after(PATIENCE);
    while !is_so() {
        assert!(deadline.pause(POLL), "not in time: {what}");
    }
}

/// A registry, a node that holds blocks and one that reads them, both with these arguments.
pub(crate) fn holder_and_reader(
    cluster: &Cluster,
    arguments: &[&str],
) -> (Process, Process, Process) {
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let [holder, reader] =
        ["holder", "reader"].map(|name| cluster.node(name, address, arguments).unwrap());
    (registry, holder, reader)
}

/// Waits until all threads of a process stand. Where it stops itself, a signal to go on that came before
/// would be lost on it.
pub(crate) fn until_stopped(process: &Process) {
    let threads = format!("/proc/{}/task", process.id());
    until("it stands", || {
        std::fs::read_dir(&threads).unwrap().filter_map(Result::ok).all(|thread| {
            // A thread that has ended meanwhile does not go on either.
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            // Behind the name, which is in parentheses and may hold anything.
            stat.rsplit_once(") ").is_none_or(|(_name, rest)| rest.starts_with('T'))
        })
    });
}

/// Stops a process. One of its threads takes the signal, and the others go on for a while.
pub(crate) fn stop(process: &Process) {
    process.signal(Signal::STOP);
    until_stopped(process);
}

/// The variable by which a [`TestProcess`] knows its parent.
const PARENT: &str = "KVRAIL_TEST_PARENT";

/// A child process that runs one test alone. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct TestProcess(Child);

impl TestProcess {
    /// One that runs the test of this name, told by these variables what it is to do.
    pub(crate) fn start(name: &str, variables: &[(&str, &OsStr)]) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .envs(variables.iter().copied())
            .env(PARENT, std::process::id().to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    /// What the child does first: it ends with its parent, however that ends.
    #[expect(clippy::disallowed_methods, reason = "the parent says by a variable who it is")]
    pub(crate) fn begin() {
        let parent = std::env::var(PARENT).unwrap().parse().unwrap();
        kvrail::sys::process::end_with_parent(parent).unwrap();
    }

    /// As `kill -9`, and waits for its end.
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        // Where it was killed already there is nothing to end.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Writes a program for a shell. A process of its own does so: were the file open for writing here, a
/// child that another test starts meanwhile would have it open, too, and nobody could run it yet.
pub(crate) fn write_script(path: &Path, text: &str) {
    let written = Command::new("sh")
        .args(["-c", "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\""])
        .arg(path)
        .arg(text)
        .status()
        .unwrap();
    assert!(written.success(), "{written}");
}

/// An empty cluster of the binary under test.
pub(crate) fn cluster() -> Cluster {
    Cluster::new(BINARY).unwrap()
}

pub(crate) fn namespace() -> Namespace {
    "tests".parse().unwrap()
}

/// Blocks and what is in them.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) bytes: Vec<Vec<u8>>,
}

impl Blocks {
    /// `count` blocks of `size` bytes that no other name gives.
    pub(crate) fn new(name: &str, count: u32, size: usize) -> Self {
        let one = |at: u32| {
            let mut bytes = vec![0; size];
            let mut hasher = blake3::Hasher::new();
            hasher.update(name.as_bytes()).update(&at.to_le_bytes());
            hasher.finalize_xof().fill(&mut bytes);
            (BlockHash::new(hasher.finalize().as_bytes()).unwrap(), bytes)
        };
        let (hashes, bytes) = (0..count).map(one).unzip();
        Self { hashes, bytes }
    }

    /// Those in this range.
    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> Self {
        Self { hashes: self.hashes[range.clone()].to_vec(), bytes: self.bytes[range].to_vec() }
    }

    /// Small ones: enough for several of everything.
    pub(crate) fn small(name: &str) -> Self {
        Self::new(name, 16, 16 << 10)
    }

    pub(crate) fn len(&self) -> usize {
        self.hashes.len()
    }

    /// The same, with a small one behind each. Saved so, no two of them are neighbours, and each one takes
    /// a READ of its own.
    pub(crate) fn apart(&self) -> Self {
        let between = Self::new("between", u32::try_from(self.len()).unwrap(), 4096);
        let hashes = self.hashes.iter().zip(&between.hashes).flat_map(|(own, other)| [own, other]);
        let bytes = self.bytes.iter().zip(&between.bytes).flat_map(|(own, other)| [own, other]);
        Self { hashes: hashes.copied().collect(), bytes: bytes.cloned().collect() }
    }
}

/// What became of the blocks of one read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) ready: usize,
    pub(crate) not_found: usize,
    pub(crate) busy: usize,
    pub(crate) failed: usize,
}

impl Counts {
    pub(crate) fn all_ready(count: usize) -> Self {
        Self { ready: count, ..Self::default() }
    }

    pub(crate) fn all_failed(count: usize) -> Self {
        Self { failed: count, ..Self::default() }
    }
}

/// Saves blocks, waiting where the node says that it is busy, until the registry knows them.
pub(crate) fn save(client: &Client, blocks: &Blocks) {
    save_unannounced(client, blocks);
    assert!(client.flush(PATIENCE).unwrap(), "the registry does not know what was saved");
}

/// As [`save`], whatever the registry says.
pub(crate) fn save_unannounced(client: &Client, blocks: &Blocks) {
    let deadline = Deadline::after(PATIENCE);
    for (hash, bytes) in blocks.hashes.iter().zip(&blocks.bytes) {
        let size = u32::try_from(bytes.len()).unwrap();
        let mut memory = loop {
            match client.reserve(&[size]) {
                Ok(mut memory) => break memory.pop().unwrap(),
                Err(ClientError::Busy { pause, .. }) => {
                    assert!(deadline.pause(pause), "busy for ever")
                }
                Err(error) => panic!("{error}"),
            }
        };
        memory.fill(bytes).unwrap();
        client.publish(&namespace(), vec![(*hash, memory)], false).unwrap();
    }
}

/// Reads blocks, compares the bytes of those that are there, and lets go of them.
pub(crate) fn read(client: &Client, blocks: &Blocks, source: Source) -> Counts {
    try_read(client, blocks, source).unwrap()
}

/// As [`read`], where the node may die meanwhile.
pub(crate) fn try_read(
    client: &Client,
    blocks: &Blocks,
    source: Source,
) -> Result<Counts, ClientError> {
    let mut counts = Counts::default();
    let acquired = client.acquire(&namespace(), &blocks.hashes, source)?;
    for (block, want) in acquired.iter().zip(&blocks.bytes) {
        match block {
            Acquired::Ready(held) => {
                let mut got = vec![0; want.len()];
                held.read_into(&mut got).unwrap();
                assert!(got == *want, "other bytes than were saved");
                counts.ready += 1;
            }
            Acquired::NotFound => counts.not_found += 1,
            Acquired::Busy(_) => counts.busy += 1,
            Acquired::Failed => counts.failed += 1,
        }
    }
    Ok(counts)
}

/// The different ranks that these blocks have on a node, and how many are there.
pub(crate) fn ranks(client: &Client, blocks: &Blocks) -> (usize, Vec<u8>) {
    let page = client.list(Some(&namespace()), None, 4096).unwrap();
    let ours = page.entries.iter().filter(|entry| blocks.hashes.contains(&entry.hash));
    let mut ranks: Vec<u8> = ours.map(|entry| entry.rank.get()).collect();
    let count = ranks.len();
    ranks.sort_unstable();
    ranks.dedup();
    (count, ranks)
}

/// How many of these blocks are on a node with this rank.
pub(crate) fn with_rank(client: &Client, blocks: &Blocks, rank: u8) -> usize {
    let page = client.list(Some(&namespace()), None, 4096).unwrap();
    let ours = page.entries.iter().filter(|entry| blocks.hashes.contains(&entry.hash));
    ours.filter(|entry| entry.rank.get() == rank).count()
}

/// All of these blocks are there, with this rank.
pub(crate) fn assert_rank(client: &Client, blocks: &Blocks, rank: u8) {
    assert_eq!(ranks(client, blocks), (blocks.len(), vec![rank]));
}

pub(crate) fn node_id(client: &Client) -> NodeId {
    client.stat().unwrap().node.id.parse().unwrap()
}

fn leases(report: &StatReport) -> u64 {
    report.requesters.iter().map(|requester| requester.leases).sum()
}

/// Whether a node has lent something just now.
pub(crate) fn is_lending(client: &Client) -> bool {
    leases(&client.stat().unwrap()) > 0
}

/// What nodes of these tests move blocks by: they are left to choose, and a device that is there and
/// works must be chosen.
#[expect(clippy::disallowed_methods, reason = "a test run names its device in the environment")]
pub(crate) fn transport() -> &'static str {
    match std::env::var("KVRAIL_RDMA_DEVICE") {
        Ok(device) if !device.is_empty() => "verbs",
        _ => "tcp",
    }
}

/// Waits until a node has lent nothing, nothing is pinned, and no memory is taken but that of its
/// residents. It must run on the transport that these tests are about.
pub(crate) fn assert_at_rest(name: &str, client: &Client) {
    assert_at_rest_over(transport(), name, client);
}

/// As [`assert_at_rest`], where the transport is another one.
pub(crate) fn assert_at_rest_over(transport: &str, name: &str, client: &Client) {
    let mut report = StatReport::default();
    until(&format!("{name} is at rest"), || {
        report = client.stat().unwrap();
        let used: u64 = report.pools.iter().map(|pool| pool.bytes - pool.free_bytes).sum();
        // A block takes whole cache lines, but for those that lie where an engine has them.
        let bytes = report.residents.bytes - report.in_place.bytes;
        let padding = 63 * report.residents.blocks;
        let is_theirs = (bytes..=bytes + padding).contains(&used);
        leases(&report) == 0 && report.residents.pinned == 0 && is_theirs
    });
    assert_eq!(report.node.transport, transport, "{name}");
}

/// A port that nobody else is given, and on which nobody listens yet.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) address: SocketAddr,
    _bound: OwnedFd,
}

impl Port {
    pub(crate) fn new() -> Self {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        // A listener with the same option may bind the port as long as this one does not listen.
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = rustix::net::getsockname(&socket).unwrap().try_into().unwrap();
        Self { address, _bound: socket }
    }

    /// A registry that listens there.
    pub(crate) fn registry(&self, cluster: &Cluster, arguments: &[&str]) -> Process {
        let listen = self.address.to_string();
        cluster.registry("registry", &[&["--listen", &listen], arguments].concat()).unwrap()
    }
}

/// `GET path` of a metrics port: status and body.
pub(crate) fn http_get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: kvrail\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// A process's metrics: values by series.
pub(crate) fn scrape(process: &Process) -> BTreeMap<String, f64> {
    let (status, text) = http_get(process.addresses().unwrap().metrics.unwrap(), "/metrics");
    assert_eq!(status, 200);
    let samples = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    samples
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap();
            (series.to_owned(), value.parse().unwrap())
        })
        .collect()
}

/// One metric of a process, 0 where it has no such series.
pub(crate) fn metric(process: &Process, series: &str) -> f64 {
    scrape(process).get(series).copied().unwrap_or(0.0)
}
