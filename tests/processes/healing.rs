//! Readers that share a fetch, and a peer that fails, is left alone, and comes back.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::thread;

use kvrail::protocol::door::{Request, Source};
use rustix::process::Signal;

use crate::support::{
    BINARY, Blocks, Counts, IMPATIENT, assert_at_rest, cluster, metric, namespace, node_id, read,
    save, until, until_stopped,
};

#[test]
fn readers_of_one_block_share_its_fetch_and_outlive_the_first_of_them() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &["--fault", "stop:recv-lend"]).unwrap();
    let reader = cluster.node("reader", address, &["--metrics-listen", "127.0.0.1:0"]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("wanted by many");
    save(&at_holder, &blocks);

    let socket = reader.addresses().unwrap().socket.clone().unwrap();
    let mut first = UnixStream::connect(&socket).unwrap();
    let (source, hashes) = (Source::Anywhere, blocks.hashes.clone());
    let acquire = Request::Acquire { namespace: namespace(), source, hashes };
    let mut frames = Vec::new();
    for (request, number) in [Request::Hello, acquire].iter().zip(1..) {
        request.encode(number, &mut frames).unwrap();
    }
    first.write_all(&frames).unwrap();
    let count = blocks.len() as f64;
    until("the first reader asks", || metric(&reader, "kvrail_local_miss_blocks_total") == count);
    thread::scope(|scope| {
        let others: Vec<_> = (0..3)
            .map(|_| {
                let client = reader.client().unwrap();
                let blocks = &blocks;
                scope.spawn(move || read(&client, blocks, Source::Anywhere))
            })
            .collect();
        until("the others share its fetch", || {
            metric(&reader, "kvrail_shared_fetch_blocks_total") >= 3.0 * count
        });
        drop(first);
        until_stopped(&holder);
        holder.signal(Signal::CONT);
        for other in others {
            assert_eq!(other.join().unwrap(), Counts::all_ready(blocks.len()), "{}", reader.said());
        }
    });
    assert_eq!(metric(&reader, "kvrail_transferred_blocks_total"), count);
    assert_at_rest("the reader", &at_reader);
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
