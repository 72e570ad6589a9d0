use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use tokio::io::AsyncWriteExt;

use super::stand_in::{Running, eventually, hash, namespace, remote};
use super::*;
use crate::event::BusyReason;
use crate::protocol::door::{
    HEADER_BYTES, Header, PublishBlock, PublishOutcome, Reply, Request, Source,
};
use crate::sys::fd_passing::{self, PassedFds};
use crate::types::Extent;

pub(super) const POOL: u64 = 1 << 20;

/// A client without any care: raw frames on a socket.
pub(super) struct Raw(pub(super) UnixStream);

impl Raw {
    fn connect(running: &Running) -> Self {
        let stream = UnixStream::connect(running.path()).unwrap();
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).unwrap();
        Self(stream)
    }

    pub(super) fn greeted(running: &Running) -> Self {
        let mut raw = Self::connect(running);
        raw.send(1, &Request::Hello);
        assert!(matches!(raw.receive(), (1, Reply::Welcome { .. })));
        raw
    }

    pub(super) fn send(&mut self, number: u32, request: &Request) {
        let mut frame = Vec::new();
        request.encode(number, &mut frame).unwrap();
        self.0.write_all(&frame).unwrap();
    }

    pub(super) fn receive(&mut self) -> (u32, Reply) {
        let mut head = [0; HEADER_BYTES];
        self.0.read_exact(&mut head).unwrap();
        let header = Header::decode(head).unwrap();
        let mut body = vec![0; header.len as usize];
        self.0.read_exact(&mut body).unwrap();
        (header.request, Reply::decode(header, &body).unwrap())
    }

    pub(super) fn ask(&mut self, request: &Request) -> Reply {
        self.send(7, request);
        let (number, reply) = self.receive();
        assert_eq!(number, 7);
        reply
    }

    fn reserve(&mut self, sizes: &[u32]) -> Vec<Extent> {
        let sizes = sizes.to_vec();
        match self.ask(&Request::Reserve { sizes }) {
            Reply::Reserved { extents } => extents,
            other => panic!("{other:?}"),
        }
    }

    /// The server ends the connection: end of stream, or a reset where it had not read everything.
    pub(super) fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.0.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

fn publish(extents: &[Extent]) -> Request {
    Request::Publish {
        namespace: namespace(),
        pulled: false,
        blocks: extents
            .iter()
            .zip(1..)
            .map(|(extent, byte)| PublishBlock { hash: hash(byte), extent: *extent, checksum: 0 })
            .collect(),
    }
}

#[test]
fn a_client_publishes_only_what_it_reserved_and_only_once() {
    use PublishOutcome::{Refused, Stored};
    let running = Running::start(POOL);
    let (mut one, mut other) = (Raw::greeted(&running), Raw::greeted(&running));
    let own = one.reserve(&[100, 200]);
    let outcomes = |reply| match reply {
        Reply::Published { outcomes } => outcomes,
        other => panic!("{other:?}"),
    };

    let stolen = outcomes(other.ask(&publish(&own)));
    assert_eq!(stolen, [Refused; 2]);
    let longer = Extent { len: 101, ..own[0] };
    let mixed = outcomes(one.ask(&publish(&[longer, own[1], own[1]])));
    assert_eq!(mixed, [Refused, Stored, Refused]);
    assert_eq!(running.service.residents(), 1);
    // The reservation that was named with another length is still the client's.
    assert_eq!(running.service.occupied(), 2);
    let discard = |extents| Request::Discard { extents };
    let none = other.ask(&discard(own.clone()));
    assert_eq!(none, Reply::Done { count: 0 });
    assert_eq!(one.ask(&discard(own)), Reply::Done { count: 1 });
    assert_eq!(running.service.occupied(), 1);
}

#[test]
fn a_client_releases_only_what_it_holds() {
    let running = Running::start(POOL);
    let (mut one, mut other) = (Raw::greeted(&running), Raw::greeted(&running));
    let own = one.reserve(&[100]);
    one.ask(&publish(&own));
    let acquire = Request::Acquire {
        namespace: namespace(),
        source: Source::Here,
        hashes: vec![hash(1), hash(1), hash(2)],
    };
    let Reply::Acquired { outcomes } = one.ask(&acquire) else {
        panic!("not acquired");
    };
    let crate::protocol::door::AcquireOutcome::Ready(held) = outcomes[0] else {
        panic!("not ready");
    };
    assert_eq!(running.service.pins(), 2);
    let release = |count| Request::Release { holds: vec![held.hold; count] };
    assert_eq!(other.ask(&release(1)), Reply::Done { count: 0 });
    assert_eq!(one.ask(&release(1)), Reply::Done { count: 1 });
    assert_eq!(running.service.pins(), 1);
    assert_eq!(one.ask(&release(5)), Reply::Done { count: 1 });
    assert_eq!(running.service.pins(), 0);
}

#[test]
fn what_a_client_owned_goes_back_when_it_goes() {
    let running = Running::start(POOL);
    let mut raw = Raw::greeted(&running);
    let own = raw.reserve(&[100, 100, 100]);
    raw.ask(&publish(&own[..1]));
    let acquire = Request::Acquire {
        namespace: namespace(),
        source: Source::Here,
        hashes: vec![hash(1), hash(1)],
    };
    raw.ask(&acquire);
    let service = &running.service;
    assert_eq!((service.occupied(), service.pins()), (3, 2));
    drop(raw);
    eventually("everything went back", || (service.occupied(), service.pins()) == (1, 0));
}

#[test]
fn an_acquisition_that_outlives_its_client_is_released() {
    let running = Running::start(POOL);
    let service = &running.service;
    remote(service, hash(9), &[9; 500]);
    service.open.send_replace(false);
    let mut raw = Raw::greeted(&running);
    raw.reserve(&[64]);
    raw.send(
        2,
        &Request::Acquire {
            namespace: namespace(),
            source: Source::Anywhere,
            hashes: vec![hash(9)],
        },
    );
    eventually("the acquisition waits", || service.open.receiver_count() == 1);
    drop(raw);
    eventually("the reservation went back at once", || service.occupied() == 0);
    assert_eq!(service.open.receiver_count(), 1, "the acquisition was cut");
    service.open.send_replace(true);
    eventually("the block came and was let go", || service.residents() == 1 && service.pins() == 0);
}

#[test]
fn a_client_can_wait_for_many_things_at_once_but_not_for_too_many() {
    let running = Running::start(POOL);
    let service = &running.service;
    service.open.send_replace(false);
    let mut raw = Raw::greeted(&running);
    let acquire =
        Request::Acquire { namespace: namespace(), source: Source::Here, hashes: vec![hash(1)] };
    let most = u32::try_from(limits::DOOR_WAITS_MAX).unwrap();
    for number in 0..=most {
        raw.send(number, &acquire);
    }
    let (number, reply) = raw.receive();
    assert_eq!(number, most);
    let (pause_ms, reason) = (limits::DOOR_WAITS_PAUSE_MS, BusyReason::Waits);
    assert_eq!(reply, Reply::Busy { pause_ms, reason });
    let look = Request::Evictions { since: 0 };
    assert!(matches!(raw.ask(&look), Reply::Evicted { .. }), "what is answered at once still is");
    service.open.send_replace(true);
    let mut numbers: Vec<u32> = (0..most).map(|_| raw.receive().0).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..most).collect::<Vec<_>>());
}

#[test]
fn bounds_of_one_client_are_refused_with_a_sentence() {
    let running = Running::start(64 << 20);
    let mut raw = Raw::greeted(&running);
    let sizes = vec![1; limits::DOOR_BLOCKS_MAX];
    for _ in 0..limits::DOOR_RESERVATIONS_MAX / limits::DOOR_BLOCKS_MAX {
        assert_eq!(raw.reserve(&sizes).len(), sizes.len());
    }
    let reply = raw.ask(&Request::Reserve { sizes: vec![1] });
    let Reply::Refused { sentence } = reply else {
        panic!("{reply:?}");
    };
    assert!(sentence.contains("publish or discard"), "{sentence}");
    drop(raw);
    eventually("everything went back", || running.service.occupied() == 0);
}

#[test]
fn acquisitions_that_run_count_as_holds() {
    let running = Running::start(POOL);
    let service = &running.service;
    service.open.send_replace(false);
    let mut raw = Raw::greeted(&running);
    let acquire = |blocks| Request::Acquire {
        namespace: namespace(),
        source: Source::Here,
        hashes: vec![hash(1); blocks],
    };
    let full = limits::DOOR_HOLDS_MAX / limits::DOOR_BLOCKS_MAX;
    for _ in 0..full {
        raw.send(1, &acquire(limits::DOOR_BLOCKS_MAX));
    }
    let reply = raw.ask(&acquire(1));
    let Reply::Refused { sentence } = reply else {
        panic!("{reply:?}");
    };
    assert!(sentence.contains("release some"), "{sentence}");
    service.open.send_replace(true);
    for _ in 0..full {
        assert!(matches!(raw.receive(), (1, Reply::Acquired { .. })));
    }
    let reply = raw.ask(&acquire(1));
    assert!(matches!(reply, Reply::Acquired { .. }), "{reply:?}");
}

#[test]
fn hostile_input_closes_its_own_connection_only() {
    let running = Running::start(POOL);
    let mut good = Raw::greeted(&running);
    let frame = |len, kind| Header { len, kind, request: 1 }.encode().to_vec();
    let mut twice = Vec::new();
    Request::Hello.encode(1, &mut twice).unwrap();
    Request::Hello.encode(2, &mut twice).unwrap();
    let mut cut = frame(64, 2);
    cut.extend_from_slice(&[1, 2, 3]);
    let mut count = frame(4, 2);
    count.extend_from_slice(&u32::MAX.to_le_bytes());
    let inputs: [(&str, Vec<u8>); 7] = [
        ("text", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n".to_vec()),
        ("ones", vec![0xff; 4096]),
        ("zeros", vec![0; 4096]),
        ("oversize", frame(u32::MAX, 1)),
        ("no hello", frame(0, 9)),
        ("hello twice", twice),
        ("a count without entries", count),
    ];
    for (what, input) in inputs {
        let mut raw = Raw::connect(&running);
        // The server may close before it has read everything.
        raw.0.write_all(&input).ok();
        assert!(raw.is_closed(), "{what}");
    }
    let mut raw = Raw::greeted(&running);
    raw.0.write_all(&cut).unwrap();
    raw.0.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(raw.is_closed(), "a cut frame");
    assert_eq!(good.reserve(&[1]).len(), 1);
}

#[test]
fn a_trickling_frame_is_cut_off_and_an_idle_client_is_not() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let patience = Duration::from_millis(20);
    runtime.block_on(async {
        let (here, mut there) = tokio::net::UnixStream::pair().unwrap();
        let mut frames = frames::FrameReader::new(patience);
        let idle = tokio::time::timeout(5 * patience, frames.next(&here)).await;
        assert!(idle.is_err(), "{idle:?}");

        let mut frame = Vec::new();
        Request::Stat.encode(1, &mut frame).unwrap();
        there.write_all(&frame).await.unwrap();
        there.write_all(&frame[..5]).await.unwrap();
        let whole = frames.next(&here).await.unwrap().unwrap();
        assert_eq!((whole.number, whole.request), (1, Request::Stat));
        let ended = tokio::time::timeout(Duration::from_secs(60), frames.next(&here)).await;
        assert!(matches!(ended, Ok(Err(session::SessionError::Slow))));
    });
}

#[test]
fn one_client_too_many_is_turned_away() {
    let running = Running::start(POOL);
    let mut all: Vec<Raw> = (0..limits::DOOR_CLIENTS_MAX).map(|_| Raw::greeted(&running)).collect();
    assert!(Raw::connect(&running).is_closed());
    all.pop();
    eventually("a place is free again", || {
        let mut raw = Raw::connect(&running);
        let mut hello = Vec::new();
        Request::Hello.encode(1, &mut hello).unwrap();
        raw.0.write_all(&hello).is_ok() && matches!(raw.0.read(&mut [0]), Ok(1))
    });
}

#[test]
fn the_welcome_carries_the_pools_as_files() {
    let running = Running::start(POOL);
    let mut raw = Raw::connect(&running);
    raw.send(1, &Request::Hello);
    let mut files = PassedFds::new();
    let got = fd_passing::receive(&raw.0, &mut [0; 64], &mut files).unwrap();
    assert_eq!((got, files.len()), (HEADER_BYTES + 4 + 10, 1));
    let file = std::fs::File::from(files.remove(0));
    assert_eq!(file.metadata().unwrap().len(), POOL);
}

#[test]
fn the_socket_has_its_mode_and_is_removed_at_the_end() {
    let mut running = Running::start(POOL);
    let mode = std::fs::metadata(running.path()).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let mut raw = Raw::greeted(&running);
    raw.reserve(&[1]);
    running.stop();
    assert!(!running.path().exists());
    assert!(raw.is_closed());
    assert_eq!(running.service.occupied(), 0);
}

#[test]
fn a_dead_socket_is_replaced_and_nothing_else_is() {
    let running = Running::start(POOL);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _in_runtime = runtime.enter();
    let taken = Door::bind(&running.path(), 0o600).unwrap_err();
    assert!(matches!(taken, BindError::Taken { .. }), "{taken}");

    let file = running.file("file", b"precious");
    let other = Door::bind(&file, 0o600).unwrap_err();
    assert!(matches!(other, BindError::NotASocket { .. }), "{other}");
    assert_eq!(std::fs::read(&file).unwrap(), b"precious");

    let dead = running.directory.path().join("dead");
    drop(UnixListener::bind(&dead).unwrap());
    let door = Door::bind(&dead, 0o666).unwrap();
    let mode = std::fs::metadata(&dead).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o666);

    // A door whose name was taken over by another one leaves that one alone.
    std::fs::remove_file(&dead).unwrap();
    let _successor = UnixListener::bind(&dead).unwrap();
    let file = door.file();
    drop(door);
    assert!(dead.exists());

    // One that was removed is nobody's any more, whatever has its name then.
    std::fs::remove_file(&dead).unwrap();
    let door = Door::bind(&dead, 0o600).unwrap();
    let (first, removed) = (file, door.file());
    first.remove();
    assert!(dead.exists());
    removed.remove();
    assert!(!dead.exists());
    std::fs::write(&dead, "").unwrap();
    removed.remove();
    drop(door);
    assert!(dead.exists());

    let long = running.directory.path().join("x".repeat(120));
    let too_long = Door::bind(&long, 0o600).unwrap_err();
    assert!(matches!(too_long, BindError::PathTooLong { .. }));
}
