//! Garbage, oversize and slow trickle on every listening socket.
//!
//! Whoever sends what no honest peer does loses its connection. The process lives, its memory stays
//! bounded, and honest peers and engines get what they ask for meanwhile.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::protocol::door::{Header, Request, Source};
use kvrail::runtime::deadline::Deadline;

use crate::support::{Blocks, Counts, PATIENCE, assert_at_rest, cluster, http_get, read, save};

/// The pace of a trickle, and how long each look at the other end takes.
const PACE: Duration = Duration::from_millis(200);

/// What attacks at once may cost a process, bytes.
const GROWTH_MAX: u64 = 48 << 20;

/// What begins every stream of the TCP fabric: magic, version 1, PRIMARY, two streams, no token.
fn preamble() -> Vec<u8> {
    let mut bytes = b"kvrail\0\x01".to_vec();
    for word in [1_u32, 1, 2, 0, 0, 0, 0, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A listening socket.
#[derive(Debug, Clone)]
enum Target {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

trait Stream: Read + Write + Send {
    fn look(&self, within: Duration);
}

impl Stream for TcpStream {
    fn look(&self, within: Duration) {
        self.set_read_timeout(Some(within)).unwrap();
        self.set_write_timeout(Some(PATIENCE)).unwrap();
    }
}

impl Stream for UnixStream {
    fn look(&self, within: Duration) {
        self.set_read_timeout(Some(within)).unwrap();
        self.set_write_timeout(Some(PATIENCE)).unwrap();
    }
}

impl Target {
    fn connect(&self) -> Box<dyn Stream> {
        let stream: Box<dyn Stream> = match self {
            Self::Tcp(address) => Box::new(TcpStream::connect(address).unwrap()),
            Self::Unix(path) => Box::new(UnixStream::connect(path).unwrap()),
        };
        stream.look(PACE);
        stream
    }
}

/// Reads what there is; whether the other end has closed.
fn is_closed(stream: &mut dyn Stream) -> bool {
    let mut answer = [0; 4096];
    loop {
        match stream.read(&mut answer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return false;
            }
            Err(_) => return true,
        }
    }
}

fn assert_closed(stream: &mut dyn Stream, what: &str) {
    let deadline = Deadline::after(PATIENCE);
    while !is_closed(stream) {
        assert!(deadline.remaining().is_some(), "{what}: the connection stays");
    }
}

/// Sends all of it, or as much as is taken before the other end closes.
fn blurt(target: &Target, bytes: &[u8], what: &str) {
    let mut stream = target.connect();
    if stream.write_all(bytes).is_ok() {
        assert_closed(&mut *stream, what);
    }
}

/// Sends `head` at once and then a byte now and then, until the other end closes.
fn trickle(target: &Target, head: &[u8], rest: &[u8], what: &str) {
    let mut stream = target.connect();
    stream.write_all(head).unwrap();
    let deadline = Deadline::after(PATIENCE);
    let mut rest = rest.iter().cycle();
    while !is_closed(&mut *stream) && stream.write_all(&[*rest.next().unwrap()]).is_ok() {
        assert!(deadline.remaining().is_some(), "{what}: the connection stays");
    }
}

fn garbage() -> Vec<u8> {
    Blocks::new("garbage", 1, 1 << 20).bytes.remove(0)
}

/// Resident memory of a process, bytes.
fn resident(process: &Process) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

struct Scene {
    registry: Process,
    holder: Process,
    reader: Process,
    _cluster: Cluster,
}

impl Scene {
    fn new() -> Self {
        let cluster = cluster();
        let scraped = ["--metrics-listen", "127.0.0.1:0"];
        let registry = cluster.registry("registry", &scraped).unwrap();
        let address = registry.addresses().unwrap().listen;
        let holder = cluster.node("holder", address, &scraped).unwrap();
        let reader = cluster.node("reader", address, &scraped).unwrap();
        Self { registry, holder, reader, _cluster: cluster }
    }

    /// A honest read of new blocks, over connections old and new.
    fn honest_round(&self, round: u32) {
        let blocks = Blocks::new(&format!("round {round}"), 4, 16 << 10);
        save(&self.holder.client().unwrap(), &blocks);
        let counts = read(&self.reader.client().unwrap(), &blocks, Source::Anywhere);
        assert_eq!(counts, Counts::all_ready(blocks.len()), "{}", self.reader.said());
    }

    /// Runs attacks at once, and honest rounds as long as they last; then the processes must be as
    /// they were.
    fn survive(&self, attacks: Vec<Box<dyn Fn() + Send + '_>>) {
        self.honest_round(0);
        let attacked = [&self.registry, &self.holder];
        let before = attacked.map(resident);
        let over = AtomicBool::new(false);
        let mut most = before;
        thread::scope(|scope| {
            let running: Vec<_> = attacks.into_iter().map(|attack| scope.spawn(attack)).collect();
            let watch = scope.spawn(|| {
                let mut results = Vec::new();
                results.extend(running.into_iter().map(|attack| attack.join()));
                over.store(true, Ordering::Relaxed);
                results
            });
            let mut round = 1;
            while !over.load(Ordering::Relaxed) {
                self.honest_round(round);
                round += 1;
                for (most, now) in most.iter_mut().zip(attacked.map(resident)) {
                    *most = now.max(*most);
                }
            }
            for result in watch.join().unwrap() {
                result.unwrap();
            }
        });
        for ((process, before), most) in attacked.iter().zip(before).zip(most) {
            assert!(most < before + GROWTH_MAX, "{} grew from {before} to {most}", process.name());
            let metrics = process.addresses().unwrap().metrics.unwrap();
            assert_eq!(http_get(metrics, "/health").0, 200);
        }
        self.honest_round(u32::MAX);
        assert_at_rest("the holder", &self.holder.client().unwrap());
    }

    /// Every listening socket, with bytes after which it waits for more.
    fn targets(&self) -> Vec<(&'static str, Target, Vec<u8>)> {
        let (registry, holder) =
            (self.registry.addresses().unwrap(), self.holder.addresses().unwrap());
        let door = Target::Unix(holder.socket.clone().unwrap());
        vec![
            ("peer port", Target::Tcp(holder.listen), preamble()),
            ("door", door, hello()),
            ("node's metrics", Target::Tcp(holder.metrics.unwrap()), b"GET / HTTP".to_vec()),
            ("registry", Target::Tcp(registry.listen), HTTP2.to_vec()),
            ("registry's metrics", Target::Tcp(registry.metrics.unwrap()), b"GET / HTTP".to_vec()),
        ]
    }
}

fn hello() -> Vec<u8> {
    let mut frame = Vec::new();
    Request::Hello.encode(1, &mut frame).unwrap();
    frame
}

#[test]
fn garbage_closes_the_connection_that_it_came_on() {
    let scene = Scene::new();
    let garbage = garbage();
    let mut attacks: Vec<Box<dyn Fn() + Send + '_>> = Vec::new();
    for (name, target, head) in scene.targets() {
        let garbage = &garbage;
        attacks.push(Box::new(move || {
            for _ in 0..8 {
                blurt(&target, garbage, name);
                blurt(&target, &[&head[..], garbage].concat(), name);
            }
        }));
    }
    scene.survive(attacks);
}

/// Lengths beyond every limit, which must not be believed before the bytes are there.
#[test]
fn what_claims_to_be_too_long_is_not_waited_for() {
    let scene = Scene::new();
    let huge = Header { len: 1, kind: 3, request: 2 };
    let mut too_long = huge.encode();
    too_long[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    let frame = |kind: u8, len: u32| {
        let mut frame = len.to_be_bytes()[1..].to_vec();
        frame.extend([kind, 0, 0, 0, 0, 1]);
        frame
    };
    let mut attacks: Vec<Box<dyn Fn() + Send + '_>> = Vec::new();
    for (name, target, head) in scene.targets() {
        let claims = match name {
            "door" => vec![[&head[..], &too_long].concat(), too_long.to_vec()],
            // HEADERS and DATA of 16 MiB less one, behind empty SETTINGS.
            "registry" => vec![
                [&head[..], &frame(4, 0)[..8], &[0], &frame(1, 0x00ff_ffff)].concat(),
                [&head[..], &frame(4, 0)[..8], &[0], &frame(0, 0x00ff_ffff)].concat(),
            ],
            "peer port" => {
                let mut many = preamble();
                many[16..20].copy_from_slice(&u32::MAX.to_le_bytes());
                vec![many]
            }
            _ => vec![[&b"GET /metrics HTTP/1.1\r\nx: "[..], &vec![b'a'; 1 << 20]].concat()],
        };
        attacks.push(Box::new(move || {
            for claim in &claims {
                blurt(&target, claim, name);
            }
        }));
    }
    scene.survive(attacks);
}

#[test]
fn a_trickle_ends_at_a_deadline() {
    let scene = Scene::new();
    let mut attacks: Vec<Box<dyn Fn() + Send + '_>> = Vec::new();
    for (name, target, head) in scene.targets() {
        let whole = target.clone();
        // From the first byte on: a request that is never whole.
        let first = head.clone();
        attacks.push(Box::new(move || trickle(&whole, &[], &first, name)));
        match name {
            // The second request's header, and then its body.
            "door" => {
                let header = Header { len: 4096, kind: 3, request: 2 }.encode();
                attacks.push(Box::new(move || {
                    trickle(&target, &[&hello()[..], &header].concat(), &[0], name);
                }));
            }
            "registry" => {}
            _ => attacks.push(Box::new(move || trickle(&target, &head, b" ", name))),
        }
    }
    scene.survive(attacks);
}

/// Silent connections at each socket, at those that strangers reach more than a process keeps.
#[test]
fn silence_shuts_nobody_out() {
    let scene = Scene::new();
    let at_ports = scene.targets().into_iter().filter(|(name, ..)| *name != "door");
    let silent = at_ports.flat_map(|(_, target, _)| (0..100).map(move |_| target.connect()));
    let silent: Vec<_> = silent.collect();
    // The reader has no connection to the holder yet, and a prober never has one.
    scene.honest_round(0);
    for process in [&scene.registry, &scene.holder] {
        assert_eq!(http_get(process.addresses().unwrap().metrics.unwrap(), "/health").0, 200);
    }
    drop(silent);
    let mut attacks: Vec<Box<dyn Fn() + Send + '_>> = Vec::new();
    for (name, target, _) in scene.targets() {
        attacks.push(Box::new(move || {
            let mut silent: Vec<_> = (0..20).map(|_| target.connect()).collect();
            for stream in &mut silent {
                assert_closed(&mut **stream, name);
            }
        }));
    }
    scene.survive(attacks);
}
