//! A path that does not carry READs is found before a connection is used, by either end.
//!
//! A proxy between both ends changes a field of what they tell each other over TCP, so that one of
//! them has a wrong key for the other one's pattern, or another MTU than the other one sends.

#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests: they fail by panicking"
)]

#[allow(dead_code, unused_imports, unused_macros, reason = "only its helpers are used here")]
mod conformance;
mod rdma;

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;

use kvrail::fabric::{CloseReason, Fabric};
use kvrail::limits::{NICS_MAX, STREAMS_MAX};

use conformance::{End, Seen, pump};
use rdma::{Verbs, device};

/// Length of a hello, and where its fields are.
const HELLO: usize = CARD + NICS_MAX * 184 + (1 + STREAMS_MAX) * 12 + 4;
const CARD: usize = 24;
const MTU: Range<usize> = CARD + 160..CARD + 164;
const PROBE_RKEY: Range<usize> = CARD + 152..CARD + 156;

/// What is changed: by whom it was sent, which field, and to what.
#[derive(Clone)]
struct Lie {
    of_connector: bool,
    field: Range<usize>,
    change: fn(u32) -> u32,
}

/// Passes bytes on until one end closes, with the first hello changed.
fn pass(mut from: &TcpStream, mut to: &TcpStream, lie: Option<Lie>) {
    let mut hello = [0; HELLO];
    if from.read_exact(&mut hello).is_ok() {
        if let Some(Lie { field, change, .. }) = lie {
            let told = u32::from_le_bytes(hello[field.clone()].try_into().unwrap());
            hello[field].copy_from_slice(&change(told).to_le_bytes());
        }
        to.write_all(&hello).ok();
        std::io::copy(&mut from, &mut to).ok();
    }
    to.shutdown(Shutdown::Both).ok();
}

/// Connects two fabrics through the proxy; both ends must find that the path does not work.
fn is_found(lie: Lie) {
    if device().is_none() {
        return;
    }
    let (mut a, mut b) = (End::<Verbs>::new(), End::<Verbs>::new());
    let proxy = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let (at, to) = (proxy.local_addr().unwrap(), b.fabric.local_addr().unwrap());
    let passing = std::thread::spawn(move || {
        let (connector, _) = proxy.accept().unwrap();
        let acceptor = TcpStream::connect(to).unwrap();
        let (of_connector, of_acceptor) =
            if lie.of_connector { (Some(lie), None) } else { (None, Some(lie)) };
        std::thread::scope(|scope| {
            scope.spawn(|| pass(&connector, &acceptor, of_connector));
            pass(&acceptor, &connector, of_acceptor);
        });
    });
    let id = a.fabric.connect(&at).unwrap();
    pump(&mut a, &mut b, |a, _| a.closed(id).is_some());
    assert_eq!(a.closed(id), Some(CloseReason::Unreachable));
    assert_eq!(a.closed(id).map(CloseReason::scope), Some(kvrail::types::Scope::Path));
    pump(&mut a, &mut b, |_, _| passing.is_finished());
    assert!(!a.seen.contains(&Seen::Connected(id)), "{:?}", a.seen);
    assert_eq!(b.seen, [], "it never was a connection there");
    passing.join().unwrap();
}

#[test]
fn a_connector_that_cannot_read_the_acceptor() {
    is_found(Lie { of_connector: false, field: PROBE_RKEY, change: |key| key ^ 0x100 });
}

#[test]
fn an_acceptor_that_cannot_read_the_connector() {
    is_found(Lie { of_connector: true, field: PROBE_RKEY, change: |key| key ^ 0x100 });
}

#[test]
fn an_acceptor_that_sends_shorter_packets_than_the_connector_takes() {
    is_found(Lie { of_connector: true, field: MTU, change: |mtu| mtu - 2 });
}

#[test]
fn a_connector_that_sends_shorter_packets_than_the_acceptor_takes() {
    is_found(Lie { of_connector: false, field: MTU, change: |mtu| mtu - 2 });
}
