//! Redis servers that a test starts itself, on ports that the kernel chooses, in directories of their
//! own. They are killed with the value that stands for them.

use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use kvrail::runtime::deadline::Deadline;
use rustix::net::{AddressFamily, SocketType};
use tempfile::TempDir;

/// The longest that a server may take to serve, and a cluster to agree.
const PATIENCE: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(10);

/// A port that the kernel gives nobody else, on which a server with `SO_REUSEADDR` may listen.
struct Port {
    number: u16,
    _bound: OwnedFd,
}

impl Port {
    fn new() -> Self {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address: SocketAddr = rustix::net::getsockname(&socket).unwrap().try_into().unwrap();
        Self { number: address.port(), _bound: socket }
    }
}

/// Whether there is a `redis-server` to start. Without one a test says so and ends; where `CI` is set it
/// fails.
#[expect(clippy::disallowed_methods, reason = "whether a skip is a failure, CI decides")]
pub(crate) fn is_there() -> bool {
    let found = Command::new("redis-server").arg("--version").output().is_ok();
    if !found {
        assert!(std::env::var_os("CI").is_none(), "no redis-server: apt-get install redis-server");
        // Not by a macro, whose output the test harness would hide.
        let line = b"SKIPPED: no redis-server (apt-get install redis-server); nothing was tested\n";
        std::io::stderr().write_all(line).ok();
    }
    found
}

/// One server, empty at first and after each start.
pub(crate) struct RedisServer {
    port: Port,
    bus: Option<Port>,
    directory: TempDir,
    child: Option<Child>,
}

impl RedisServer {
    /// A server of its own.
    pub(crate) fn start() -> Self {
        let mut server = Self { port: Port::new(), bus: None, directory: directory(), child: None };
        server.restart();
        server
    }

    fn member() -> Self {
        let bus = Some(Port::new());
        let mut server = Self { port: Port::new(), bus, directory: directory(), child: None };
        server.restart();
        server
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port.number)
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// As `kill -9`.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().ok();
            child.wait().ok();
        }
    }

    /// Starts it, empty, where it was before, and waits until it answers.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let log = File::create(self.directory.path().join("log")).unwrap();
        // It ends with the thread of the test, however that ends.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "redis-server"]);
        command.args(["--port", &self.port.number.to_string(), "--bind", "127.0.0.1"]);
        command.args(["--save", "", "--appendonly", "no"]);
        if let Some(bus) = &self.bus {
            command.args(["--cluster-enabled", "yes", "--cluster-port", &bus.number.to_string()]);
            command.args(["--cluster-node-timeout", "5000"]);
        }
        command.current_dir(self.directory.path()).stdin(Stdio::null());
        self.child = Some(command.stdout(log).stderr(Stdio::null()).spawn().unwrap());
        let deadline = Deadline::after(PATIENCE);
        while !self.say(&["PING"]).contains("PONG") {
            let log = std::fs::read_to_string(self.directory.path().join("log"));
            assert!(deadline.pause(POLL), "redis-server does not answer: {log:?}");
        }
    }

    /// What it answers to a command.
    pub(crate) fn say(&self, words: &[&str]) -> String {
        let port = self.port.number.to_string();
        let Output { stdout, .. } =
            Command::new("redis-cli").args(["-p", &port]).args(words).output().unwrap();
        String::from_utf8_lossy(&stdout).into_owned()
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn directory() -> TempDir {
    TempDir::with_prefix("kvrail-redis-").unwrap()
}

/// Three masters that share the slots.
pub(crate) fn cluster() -> [RedisServer; 3] {
    let servers = [(); 3].map(|()| RedisServer::member());
    for (server, range) in servers.iter().zip([(0, 5460), (5461, 10922), (10923, 16383)]) {
        let (first, last) = (range.0.to_string(), range.1.to_string());
        assert!(server.say(&["CLUSTER", "ADDSLOTSRANGE", &first, &last]).contains("OK"));
    }
    for (epoch, server) in (1..).zip(&servers) {
        server.say(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch.to_string()]);
    }
    let [first, others @ ..] = &servers;
    for other in others {
        let (port, bus) = (other.port.number, other.bus.as_ref().unwrap().number);
        first.say(&["CLUSTER", "MEET", "127.0.0.1", &port.to_string(), &bus.to_string()]);
    }
    let deadline = Deadline::after(PATIENCE);
    let agree = |server: &RedisServer| {
        let info = server.say(&["CLUSTER", "INFO"]);
        let known = server.say(&["CLUSTER", "SLOTS"]).matches("127.0.0.1").count();
        info.contains("cluster_state:ok") && info.contains("cluster_slots_ok:16384") && known == 3
    };
    while !servers.iter().all(agree) {
        assert!(deadline.pause(POLL), "the cluster does not form");
    }
    servers
}
