//! A stranger that speaks the transport, up to messages and READs: nothing is read before a proof,
//! and every message that is none ends the connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use kvrail::fabric::{EventBatch, Fabric, FabricEvent};
use kvrail::protocol::PROTOCOL_VERSION;
use kvrail::protocol::door::Source;
use kvrail::runtime::deadline::Deadline;
use kvrail::tcp::{TcpConfig, TcpFabric};

use crate::support::{
    Blocks, Counts, PATIENCE, assert_at_rest, cluster, metric, read, save, until,
};

/// Connects, says `message` and waits for the end.
fn say(address: SocketAddr, message: &[u8]) {
    let mut fabric = TcpFabric::new(TcpConfig::default()).unwrap();
    let connection = fabric.connect(&address).unwrap();
    let deadline = Deadline::after(PATIENCE);
    let mut events = EventBatch::default();
    loop {
        fabric.poll(&mut events, Duration::from_millis(100)).unwrap();
        for event in &events.events {
            match event {
                FabricEvent::Connected { .. } => fabric.send(connection, message).unwrap(),
                FabricEvent::Closed { .. } => return,
                _ => {}
            }
        }
        events.clear();
        assert!(deadline.remaining().is_some(), "the connection stays");
    }
}

/// Opens a connection of one data stream by hand; its two sockets.
fn open(address: SocketAddr) -> (TcpStream, TcpStream) {
    let preamble = |kind: u32, token: &[u8]| {
        let mut bytes = b"kvrail\0\x01".to_vec();
        for word in [1_u32, kind, 1, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(token);
        bytes
    };
    let mut control = TcpStream::connect(address).unwrap();
    control.set_read_timeout(Some(PATIENCE)).unwrap();
    control.write_all(&preamble(1, &[0; 16])).unwrap();
    let mut welcome = [0; 40];
    control.read_exact(&mut welcome).unwrap();
    let mut data = TcpStream::connect(address).unwrap();
    data.set_read_timeout(Some(PATIENCE)).unwrap();
    data.write_all(&preamble(2, &welcome[24..])).unwrap();
    let mut ready = [0; 8];
    control.read_exact(&mut ready).unwrap();
    (control, data)
}

/// A frame on a data stream: kind, word, slot, generation, address, length, reserved.
fn frame(kind: u32, key: u32, address: u64, len: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [kind, key, 0, 1] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(address.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    bytes.extend([0; 4]);
    bytes
}

fn assert_closes(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    // A reset is an end, too.
    let ended = stream.read_to_end(&mut rest);
    let timed_out = ended.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock);
    assert!(!timed_out, "the connection stays");
}

#[test]
fn a_stranger_gets_no_byte() {
    let cluster = cluster();
    let scraped = ["--metrics-listen", "127.0.0.1:0"];
    let registry = cluster.registry("registry", &scraped).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &scraped).unwrap();
    let reader = cluster.node("reader", address, &[]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    let blocks = Blocks::small("not for strangers");
    save(&at_holder, &blocks);
    let peers = holder.addresses().unwrap().listen;

    let violations = || metric(&holder, "kvrail_protocol_violations_total");
    // No message; a kind without its body; a lend without a handshake; a goodbye.
    let lend = [5, PROTOCOL_VERSION, 0, 0, 0, 0, 0, 0];
    let messages: [&[u8]; 4] = [b"nonsense", &[1], &lend, &[0; 20_000]];
    for message in messages {
        let before = violations();
        say(peers, message);
        until("the violation is counted", || violations() > before);
    }

    // A READ of some key before any proof: refused, whatever the key.
    let (_control, mut data) = open(peers);
    data.write_all(&frame(0x5251, 1, 4096, 4096)).unwrap();
    let mut answer = [0; 32];
    if data.read_exact(&mut answer).is_ok() {
        assert_eq!(answer[4..8], 1_u32.to_le_bytes(), "a READ was answered");
        assert_eq!(answer[24..28], [0; 4], "bytes follow");
    }
    // A READ of more than the limit, an answer that nobody asked for, garbage.
    let unasked = frame(0x5253, 0, 0, 1 << 30);
    for bytes in [frame(0x5251, 1, 0, u32::MAX), unasked, vec![0xff; 4096]] {
        let (_control, mut data) = open(peers);
        data.write_all(&bytes).unwrap();
        assert_closes(&mut data);
    }
    // A message that is longer than any, and one that never comes whole.
    for header in [[2_u32, u32::MAX], [2, 64], [9, 0]] {
        let (mut control, _data) = open(peers);
        control.write_all(&header.map(u32::to_le_bytes).concat()).unwrap();
        assert_closes(&mut control);
    }

    let counts = read(&at_reader, &blocks, Source::Anywhere);
    assert_eq!(counts, Counts::all_ready(blocks.len()), "{}", reader.said());
    assert_at_rest("the holder", &at_holder);
}
