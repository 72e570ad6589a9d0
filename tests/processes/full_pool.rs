//! A pool in which everything is in use: `Busy` with a pause, at once, for whoever wants memory, and
//! nothing else stands still.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;

use kvrail::cli::cluster::Process;
use kvrail::client::{Acquired, Client, ClientError, Held};
use kvrail::event::BusyReason;
use kvrail::protocol::door::{Request, Source};
use kvrail::runtime::deadline::Deadline;

use crate::support::{
    Blocks, Counts, PATIENCE, assert_at_rest, cluster, namespace, read, save, until,
};

/// Saves blocks and holds each one, until there is no memory for another.
fn fill_and_hold<'a>(client: &'a Client, size: usize) -> (Vec<Held<'a>>, Blocks) {
    let blocks = Blocks::new("held", 4096, size);
    let mut held = Vec::new();
    for (at, (hash, bytes)) in blocks.hashes.iter().zip(&blocks.bytes).enumerate() {
        let mut memory = match client.reserve(&[u32::try_from(size).unwrap()]) {
            Ok(memory) => memory,
            Err(ClientError::Busy { reason, .. }) => {
                assert_eq!(reason, BusyReason::Memory);
                let Blocks { mut hashes, mut bytes } = blocks;
                hashes.truncate(at);
                bytes.truncate(at);
                return (held, Blocks { hashes, bytes });
            }
            Err(error) => panic!("{error}"),
        };
        let mut memory = memory.pop().unwrap();
        memory.fill(bytes).unwrap();
        client.publish(&namespace(), vec![(*hash, memory)], false).unwrap();
        let acquired = client.acquire(&namespace(), &[*hash], Source::Here).unwrap();
        held.extend(acquired.into_iter().filter_map(|block| match block {
            Acquired::Ready(block) => Some(block),
            _ => None,
        }));
    }
    panic!("the pool is never full");
}

/// Processor time that a process has used, in clock ticks of 10 ms.
fn ticks(process: &Process) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let fields: Vec<_> = fields.split_whitespace().collect();
    // utime and stime are fields 14 and 15 of the line, whose third one is the first here.
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn whoever_wants_memory_is_told_to_wait_and_gets_it_when_there_is_some() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let full = cluster.node("full", address, &["--pool", "4MiB", "--lease-bytes", "4MiB"]).unwrap();
    let other = cluster.node("other", address, &[]).unwrap();
    let (holds, wants, at_other) =
        (full.client().unwrap(), full.client().unwrap(), other.client().unwrap());
    let elsewhere = Blocks::small("on the other node");
    save(&at_other, &elsewhere);
    let (held, ours) = fill_and_hold(&holds, 64 << 10);
    assert!(held.len() > 32, "only {} blocks are held", held.len());
    assert!(holds.flush(PATIENCE).unwrap());

    // A second of asking as often as the node allows costs the node next to nothing. A busy loop
    // would cost most of it.
    let (asking, before) = (Deadline::after(std::time::Duration::from_secs(1)), ticks(&full));
    let mut refused = 0;
    while asking.remaining().is_some() {
        match wants.reserve(&[64 << 10]) {
            Err(ClientError::Busy { pause, .. }) => {
                assert!(!pause.is_zero());
                refused += 1;
                let _left = asking.pause(pause);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(refused > 0);
    let spent = ticks(&full) - before;
    assert!(spent <= 40, "{spent} ticks of 10 ms for {refused} refusals");

    // What needs no memory goes on: it lends what it holds, and answers.
    assert_eq!(read(&at_other, &ours, Source::Anywhere).ready, held.len());
    let busy = Counts { busy: elsewhere.len(), ..Counts::default() };
    assert_eq!(read(&wants, &elsewhere, Source::Anywhere), busy);
    assert_eq!(wants.stat().unwrap().residents.blocks, held.len() as u64);
    assert_at_rest("the other node", &at_other);

    drop(held);
    until("the reader gets its blocks", || {
        read(&wants, &elsewhere, Source::Anywhere) == Counts::all_ready(elsewhere.len())
    });
    let deadline = Deadline::after(PATIENCE);
    while let Err(error) = wants.reserve(&[64 << 10]) {
        let pause = error.backpressure().unwrap();
        assert!(deadline.pause(pause), "{error}");
    }
    assert_at_rest("the full node", &wants);
}

/// A client that dies says nothing: its connection ends, and what it had reserved, held and asked
/// for goes back.
#[test]
fn what_a_client_had_is_free_when_it_is_gone() {
    let cluster = cluster();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let node = cluster.node("node", address, &["--pool", "4MiB"]).unwrap();
    let client = node.client().unwrap();
    let blocks = Blocks::small("held by one that dies");
    save(&client, &blocks);

    let mut dying =
        UnixStream::connect(node.addresses().unwrap().socket.as_deref().unwrap()).unwrap();
    let (namespace, hashes) = (namespace(), blocks.hashes.clone());
    let requests = [
        Request::Hello,
        Request::Reserve { sizes: vec![1 << 20] },
        Request::Acquire { namespace, source: Source::Here, hashes },
    ];
    let mut frames = Vec::new();
    for (request, number) in requests.iter().zip(1..) {
        request.encode(number, &mut frames).unwrap();
    }
    dying.write_all(&frames).unwrap();
    until("it holds all blocks", || {
        let now = client.stat().unwrap();
        now.residents.pinned == 16 && now.pools[0].free_bytes == (3 << 20) - now.residents.bytes
    });
    drop(dying);
    assert_at_rest("the node", &client);
}
