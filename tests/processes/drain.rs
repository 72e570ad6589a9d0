//! A node that is told to stop: no new leases, running ones to their end, out of the registry, exit 0.

use std::thread;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::protocol::door::Source;
use rustix::process::Signal;

use crate::support::{
    Blocks, Counts, PATIENCE, assert_at_rest, cluster, is_lending, node_id, read, save, try_read,
    until, until_stopped,
};

/// A holder, and a reader that stands still with a lease in its hand.
struct Scene {
    holder: Process,
    slow: Process,
    registry: Process,
    cluster: Cluster,
}

impl Scene {
    fn start(ttl: &str) -> Self {
        let cluster = cluster();
        let registry = cluster.registry("registry", &[]).unwrap();
        let address = registry.addresses().unwrap().listen;
        let holder = cluster.node("holder", address, &["--lease-ttl", ttl]).unwrap();
        let fault = ["--lease-ttl", ttl, "--fault", "stop:recv-lease"];
        let slow = cluster.node("slow", address, &fault).unwrap();
        Self { holder, slow, registry, cluster }
    }

    /// The holder is told to stop while it lends to a reader that never completes; what comes of it.
    fn leave_while_lending(mut self, then: impl FnOnce(&mut Process, Client)) {
        let (at_holder, at_slow) = (self.holder.client().unwrap(), self.slow.client().unwrap());
        let blocks = Blocks::small("lent for good");
        save(&at_holder, &blocks);
        let from = Source::From(node_id(&at_holder));
        thread::scope(|scope| {
            let reading = scope.spawn(|| try_read(&at_slow, &blocks, from));
            until("the holder lends", || is_lending(&at_holder));
            self.holder.signal(Signal::TERM);
            then(&mut self.holder, at_holder);
            self.slow.kill();
            reading.join().unwrap().ok();
        });
    }
}

#[test]
fn a_node_that_leaves_lets_a_running_lease_end_and_sends_others_elsewhere() {
    let mut scene = Scene::start("60s");
    let address = scene.registry.addresses().unwrap().listen;
    let other = scene.cluster.node("other", address, &[]).unwrap();
    let reader = scene.cluster.node("reader", address, &[]).unwrap();
    let (at_holder, at_slow) = (scene.holder.client().unwrap(), scene.slow.client().unwrap());
    let (at_other, at_reader) = (other.client().unwrap(), reader.client().unwrap());
    let (both, only) = (Blocks::small("of two owners"), Blocks::small("of the one that leaves"));
    save(&at_holder, &both);
    save(&at_holder, &only);
    save(&at_other, &both);
    let from = Source::From(node_id(&at_holder));
    thread::scope(|scope| {
        let reading = scope.spawn(|| read(&at_slow, &both, from));
        until("the holder lends", || is_lending(&at_holder));
        scene.holder.signal(Signal::TERM);
        until("it is leaving", || scene.holder.said().contains("stopping"));
        for _ in 0..8 {
            let counts = read(&at_reader, &both, Source::Anywhere);
            assert_eq!(counts, Counts::all_ready(both.len()), "{}", reader.said());
        }
        assert!(is_lending(&at_holder), "it waits for the lease");
        until_stopped(&scene.slow);
        scene.slow.signal(Signal::CONT);
        assert_eq!(reading.join().unwrap(), Counts::all_ready(both.len()));
    });
    drop(at_holder);
    let status = scene.holder.wait(PATIENCE).expect("the lease has ended, and so does the holder");
    assert_eq!(status.code(), Some(0));
    until("the registry has forgotten it", || {
        let counts = read(&at_reader, &only, Source::Anywhere);
        counts.not_found == only.len()
    });
    assert_at_rest("the reader", &at_reader);
    assert_at_rest("the other owner", &at_other);
}

/// A reader that never completes costs the holder its lease's deadline, and no more.
#[test]
fn a_lease_that_nobody_ends_keeps_a_leaving_node_until_its_deadline() {
    Scene::start("8s").leave_while_lending(|holder, at_holder| {
        drop(at_holder);
        let status = holder.wait(PATIENCE).expect("it ends with the lease");
        assert_eq!(status.code(), Some(0));
    });
}

#[test]
fn a_second_signal_ends_a_leaving_node_at_once() {
    Scene::start("3600s").leave_while_lending(|holder, _at_holder| {
        until("it is leaving", || holder.said().contains("stopping"));
        let socket = holder.addresses().unwrap().socket.clone().unwrap();
        assert!(socket.exists(), "its door is open until its leases have ended");
        let mut status = None;
        until("it ends", || {
            holder.signal(Signal::TERM);
            status = holder.wait(std::time::Duration::from_millis(50));
            status.is_some()
        });
        assert_eq!(status.unwrap().code(), Some(130));
        assert!(!socket.exists(), "nobody else would remove it");
    });
}

/// What a killed node leaves behind keeps nobody from its place.
#[test]
fn a_node_takes_the_socket_of_a_killed_one_over() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let mut killed = cluster.node("node", address, &[]).unwrap();
    let socket = killed.addresses().unwrap().socket.clone().unwrap();
    killed.kill();
    assert!(socket.exists());
    let next = cluster.node("node", address, &[]).unwrap();
    assert_eq!(next.addresses().unwrap().socket.as_ref(), Some(&socket));
    next.client().unwrap().stat().unwrap();
    drop(next);
    assert!(!socket.exists());
}
