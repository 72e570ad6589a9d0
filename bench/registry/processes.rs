//! A registry in a process of its own, and what processes cost.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use kvrail::registryd::{Registryd, RegistrydOptions};
use kvrail::runtime::clock::Clock;

/// The argument with which this program is the server.
pub(crate) const SERVE: &str = "--serve-registry";

/// Serves until killed; says where.
pub(crate) fn serve() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        let server = Registryd::new(Clock::start(), RegistrydOptions::default());
        server.serve(listener, std::future::pending()).await.unwrap();
    });
}

/// This program as a server.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Server {
    pub(crate) fn start() -> Self {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new(program).arg(SERVE).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { address: line.trim().parse().unwrap(), child }
    }

    pub(crate) fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// CPU time that a process has used, seconds.
pub(crate) fn cpu_seconds(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks = |at: usize| fields.get(at).unwrap().parse::<f64>().unwrap();
    // utime and stime, in the kernel's hundredths.
    (ticks(11) + ticks(12)) / 100.0
}

/// Memory that a process has resident, bytes.
pub(crate) fn resident_bytes(process: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0
}
