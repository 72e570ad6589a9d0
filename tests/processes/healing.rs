//! Readers that share a fetch, and a peer that fails, is left alone, and comes back.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;

use kvrail::cli::cluster::{Cluster, Process};
use kvrail::client::Client;
use kvrail::limits::SILENCE_MAX;
use kvrail::protocol::door::{Request, Source};
use rustix::process::Signal;

use crate::support::{
    BINARY, Blocks, Counts, IMPATIENT, assert_at_rest, cluster, metric, namespace, node_id, read,
    save, stop, until,
};

/// A node that reads, and one that it reads from.
struct Scene {
    holder: Process,
    reader: Process,
    at_reader: Client,
    _registry: Process,
    _cluster: Cluster,
}

impl Scene {
    fn new() -> Self {
        let cluster = cluster();
        let registry = cluster.registry("registry", &[]).unwrap();
        let address = registry.addresses().unwrap().listen;
        let holder = cluster.node("holder", address, &[]).unwrap();
        let scraped = ["--metrics-listen", "127.0.0.1:0"];
        let reader = cluster.node("reader", address, &scraped).unwrap();
        let at_reader = reader.client().unwrap();
        Self { holder, reader, at_reader, _registry: registry, _cluster: cluster }
    }

    fn metric(&self, name: &str) -> f64 {
        metric(&self.reader, &format!("kvrail_{name}_blocks_total"))
    }

    /// A client that asks for blocks and does not wait for them.
    fn ask(&self, blocks: &Blocks) -> UnixStream {
        let socket = self.reader.addresses().unwrap().socket.clone().unwrap();
        let mut client = UnixStream::connect(&socket).unwrap();
        let (source, hashes) = (Source::Anywhere, blocks.hashes.clone());
        let acquire = Request::Acquire { namespace: namespace(), source, hashes };
        let mut frames = Vec::new();
        for (request, number) in [Request::Hello, acquire].iter().zip(1..) {
            request.encode(number, &mut frames).unwrap();
        }
        client.write_all(&frames).unwrap();
        client
    }

    /// Four readers of the same blocks, the first of which leaves while the holder stands still; what the
    /// others get.
    fn share(&self, blocks: &Blocks) -> Vec<Counts> {
        let count = blocks.len() as f64;
        let (missed, shared) = (self.metric("local_miss"), self.metric("shared_fetch"));
        stop(&self.holder);
        let first = self.ask(blocks);
        until("the first reader asks", || self.metric("local_miss") >= missed + count);
        thread::scope(|scope| {
            let one = || {
                let client = self.reader.client().unwrap();
                scope.spawn(move || read(&client, blocks, Source::Anywhere))
            };
            let others = [one(), one(), one()];
            until("the others share its fetch, or it is over", || {
                self.metric("shared_fetch") >= shared + 3.0 * count
                    || others.iter().all(ScopedJoinHandle::is_finished)
            });
            drop(first);
            self.holder.signal(Signal::CONT);
            others.into_iter().map(|other| other.join().unwrap()).collect()
        })
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how long the holder stood")]
fn readers_of_one_block_share_its_fetch_and_outlive_the_first_of_them() {
    let scene = Scene::new();
    let at_holder = scene.holder.client().unwrap();
    let mut round = 0;
    until("they share a fetch that ends well", || {
        round += 1;
        let blocks = Blocks::small(&format!("wanted by many, {round}"));
        let all = Counts::all_ready(blocks.len());
        save(&at_holder, &blocks);
        let transferred = scene.metric("transferred");
        let since = Instant::now();
        let counts = scene.share(&blocks);
        let stood = since.elapsed();
        let is_well = counts.iter().all(|counts| *counts == all);
        if is_well {
            let once = blocks.len() as f64;
            assert_eq!(scene.metric("transferred") - transferred, once);
        } else {
            // The holder stood so long that its readers left it alone.
            assert!(stood > SILENCE_MAX / 2, "{counts:?} after {stood:?}: {}", scene.reader.said());
            until("it is used again", || read(&scene.at_reader, &blocks, Source::Anywhere) == all);
        }
        is_well
    });
    assert_at_rest("the reader", &scene.at_reader);
    assert_at_rest("the holder", &at_holder);
}

#[test]
fn a_peer_that_died_is_left_alone_shown_so_and_used_again_when_it_is_back() {
    const NODE: &str = "00112233445566778899aabbccddeeff";
    let cluster = cluster();
    let registry = cluster.registry("registry", &["--node-lease", "60s"]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let settings = [&IMPATIENT[..], &["--node-id", NODE]].concat();
    let mut holder = cluster.node("holder", address, &settings).unwrap();
    let scraped = [&IMPATIENT[..], &["--metrics-listen", "127.0.0.1:0"]].concat();
    let reader = cluster.node("reader", address, &scraped).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("of one that dies");
    save(&at_holder, &blocks);
    let from = Source::From(node_id(&at_holder));
    drop(at_holder);
    holder.kill();
    let states = || {
        let health = at_reader.stat().unwrap().health;
        health.into_iter().map(|one| one.state).collect::<Vec<_>>()
    };
    until("it is left alone", || {
        assert_eq!(read(&at_reader, &blocks, from), Counts::all_failed(blocks.len()));
        states().iter().any(|state| state != "closed")
    });
    assert!(metric(&reader, "kvrail_breakers_opened_total{scope=\"path\"}") >= 1.0);
    let socket = reader.addresses().unwrap().socket.clone().unwrap();
    let stat = |arguments: &[&str]| {
        let output = Command::new(BINARY)
            .args(["stat", "--health", "--socket"])
            .arg(&socket)
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let shown = stat(&[]);
    assert!(shown.contains(NODE) && shown.contains("no connection"), "{shown}");
    let reset = stat(&["--reset", NODE]);
    assert!(reset.contains("closed") && !reset.contains("open"), "{reset}");

    until("it is left alone again", || {
        read(&at_reader, &blocks, from);
        states().iter().any(|state| state != "closed")
    });
    let holder = cluster.node("holder", address, &settings).unwrap();
    let at_holder = holder.client().unwrap();
    let fresh = Blocks::small("saved when it was back");
    save(&at_holder, &fresh);
    until("it is used again", || read(&at_reader, &fresh, from) == Counts::all_ready(fresh.len()));
    assert!(states().iter().all(|state| state == "closed"));
    assert!(metric(&reader, "kvrail_probes_total{outcome=\"good\"}") >= 1.0);
    assert_at_rest("the reader", &at_reader);
    assert_at_rest("the holder", &at_holder);
}
