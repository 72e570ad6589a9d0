//! The processes, and what is done to them.

use std::path::PathBuf;
use std::time::Duration;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::sim::Random;
use rustix::process::Signal;

use crate::support::{IMPATIENT, PATIENCE, Port, cluster};

/// How often what was done.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Struck {
    killed: u32,
    told_to_stop: u32,
    paused: u32,
    registry_killed: u32,
}

#[derive(Debug)]
pub(crate) struct Victims {
    random: Random,
    port: Port,
    registry: Process,
    nodes: Vec<Process>,
    /// Nodes that stand still.
    paused: Vec<usize>,
    struck: Struck,
    cluster: Cluster,
}

/// Nodes that are gone are forgotten soon.
const REGISTRY: [&str; 4] = ["--node-lease", "3s", "--metrics-listen", "127.0.0.1:0"];

fn name(at: usize) -> String {
    format!("node-{at}")
}

impl Victims {
    pub(crate) fn start(nodes: usize, seed: u64) -> Self {
        let cluster = cluster();
        let port = Port::new();
        let registry = port.registry(&cluster, &REGISTRY);
        let mut victims = Self {
            random: Random::new(seed),
            port,
            registry,
            nodes: Vec::new(),
            paused: Vec::new(),
            struck: Struck::default(),
            cluster,
        };
        for at in 0..nodes {
            victims.nodes.push(victims.start_node(at));
        }
        victims
    }

    fn start_node(&self, at: usize) -> Process {
        let arguments = [&IMPATIENT[..], &["--transport", "tcp", "--pool", "8MiB"]].concat();
        self.cluster.node(&name(at), self.port.address, &arguments).unwrap()
    }

    pub(crate) fn socket(&self, at: usize) -> PathBuf {
        self.nodes[at].addresses().unwrap().socket.clone().unwrap()
    }

    pub(crate) fn nodes(&self) -> &[Process] {
        &self.nodes
    }

    pub(crate) const fn registry(&self) -> &Process {
        &self.registry
    }

    pub(crate) const fn struck(&self) -> Struck {
        self.struck
    }

    /// How long until the next one.
    pub(crate) const fn next_pause(&mut self) -> Duration {
        Duration::from_millis(20 + self.random.below(600))
    }

    pub(crate) fn strike(&mut self) {
        let at = usize::try_from(self.random.below(self.nodes.len() as u64)).unwrap();
        match self.random.below(20) {
            0..9 => {
                self.nodes[at].kill();
                self.restart(at);
                self.struck.killed += 1;
            }
            9..12 => {
                self.nodes[at].signal(Signal::CONT);
                self.nodes[at].signal(Signal::TERM);
                // A second one must be as safe as the first.
                if self.random.below(2) == 0 {
                    self.nodes[at].signal(Signal::TERM);
                }
                let ended = self.nodes[at].wait(PATIENCE);
                assert!(ended.is_some(), "{} does not stop: {}", name(at), self.nodes[at].said());
                self.restart(at);
                self.struck.told_to_stop += 1;
            }
            12..19 => {
                // One that stood still goes on, another one stops.
                if let Some(at) = self.paused.pop() {
                    self.nodes[at].signal(Signal::CONT);
                }
                if self.random.below(2) == 0 {
                    self.nodes[at].signal(Signal::STOP);
                    self.paused.push(at);
                    self.struck.paused += 1;
                }
            }
            _ => {
                self.registry.kill();
                self.registry = self.port.registry(&self.cluster, &REGISTRY);
                self.struck.registry_killed += 1;
            }
        }
    }

    fn restart(&mut self, at: usize) {
        self.paused.retain(|paused| *paused != at);
        self.nodes[at] = self.start_node(at);
    }

    pub(crate) fn all_run(&mut self) {
        for at in self.paused.drain(..) {
            self.nodes[at].signal(Signal::CONT);
        }
    }

    /// The last words of each.
    pub(crate) fn said(&self) -> String {
        let last = |process: &Process| {
            let said = process.said();
            let lines: Vec<_> = said.lines().rev().take(5).collect();
            format!("{}:\n{}", process.name(), lines.join("\n"))
        };
        self.nodes.iter().map(last).collect::<Vec<_>>().join("\n")
    }

    /// Every process ends when it is told to, and leaves nothing behind.
    pub(crate) fn stop(mut self) {
        for node in &mut self.nodes {
            node.signal(Signal::TERM);
            let status = node.wait(PATIENCE);
            assert_eq!(status.and_then(|status| status.code()), Some(0), "{}", node.said());
        }
        for at in 0..self.nodes.len() {
            let socket = self.cluster.path().join(format!("{}.sock", name(at)));
            assert!(!socket.exists(), "{} is left behind", socket.display());
        }
    }
}
