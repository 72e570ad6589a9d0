//! Peers that break the rules, played by plain sockets. What honest fabrics do is in
//! `tests/conformance`.
#![expect(clippy::cast_possible_truncation, reason = "the sizes of tests are small constants")]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};

use super::wire::{
    ControlHeader, FRAME_BYTES, Frame, MESSAGE, PREAMBLE_BYTES, READY, REQUEST, RESPONSE,
    STATUS_REMOTE_ACCESS, STATUS_SUCCESS, WELCOME,
};
use super::*;
use crate::fabric::{CompletionStatus, FabricEvent, ReadWork, RegisteredSpan, RemoteSpan, WrId};

/// Polls in which a condition must come true; each one waits a millisecond where nothing happens.
const POLLS: usize = 20_000;

const TIMEOUT: Duration = Duration::from_millis(300);

fn config() -> TcpConfig {
    TcpConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        streams: 2,
        handshake_timeout: TIMEOUT,
        io_timeout: TIMEOUT,
    }
}

fn mapping(bytes: &[u8]) -> Arc<Mapping> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    let mapping = Mapping::new(&file, bytes.len() as u64).unwrap();
    mapping.write(0, bytes).unwrap();
    Arc::new(mapping)
}

/// A fabric, with everything it has reported.
struct Node {
    fabric: TcpFabric,
    events: Vec<FabricEvent>,
}

impl Node {
    fn new(config: TcpConfig) -> Self {
        Self { fabric: TcpFabric::new(config).unwrap(), events: Vec::new() }
    }

    fn poll(&mut self) {
        let mut batch = EventBatch::default();
        let wait = Duration::from_millis(1);
        self.fabric.poll(&mut batch, wait).unwrap();
        self.events.extend(batch.events);
    }

    fn until<R>(&mut self, mut done: impl FnMut(&mut Self) -> Option<R>) -> R {
        for _poll in 0..POLLS {
            if let Some(result) = done(self) {
                return result;
            }
            self.poll();
        }
        panic!("never came true; events: {:?}", self.events);
    }

    fn connect_raw(&self) -> TcpStream {
        let socket = TcpStream::connect(self.fabric.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    }

    /// Polls until the raw peer has received so many bytes.
    fn read(&mut self, peer: &mut TcpStream, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut have = 0;
        self.until(|_| {
            match peer.read(&mut bytes[have..]) {
                Ok(0) => panic!("closed after {have} bytes"),
                Ok(count) => have += count,
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
            }
            (have == len).then_some(())
        });
        bytes
    }

    /// Polls until the raw peer has been closed.
    fn until_closed(&mut self, peer: &mut TcpStream) {
        let mut bytes = [0; 1024];
        self.until(|_| match peer.read(&mut bytes) {
            Ok(0) => Some(()),
            Ok(_) => None,
            Err(error) => (error.kind() != ErrorKind::WouldBlock).then_some(()),
        });
    }

    fn until_ended(&mut self, connection: ConnectionId) -> CloseReason {
        self.until(|node| {
            node.events.iter().find_map(|event| match *event {
                FabricEvent::Closed { connection: closed, reason } if closed == connection => {
                    Some(reason)
                }
                _ => None,
            })
        })
    }

    fn statuses(&self) -> Vec<CompletionStatus> {
        let one = |event: &FabricEvent| match event {
            FabricEvent::Completed(done) => Some(done.status),
            _ => None,
        };
        self.events.iter().filter_map(one).collect()
    }

    /// Connects a raw peer as a connector with one data stream.
    fn raw_peer(&mut self) -> Raw {
        let mut control = self.connect_raw();
        send(&mut control, &Preamble::new(PRIMARY, 1, [0; 16]));
        let answer = self.read(&mut control, PREAMBLE_BYTES);
        let answer = Preamble::decode(&answer).unwrap();
        assert_eq!((answer.kind, answer.streams), (WELCOME, 1));
        let mut data = self.connect_raw();
        send(&mut data, &Preamble::new(JOIN, 1, answer.token));
        let header = self.read(&mut control, size_of::<ControlHeader>());
        let header: ControlHeader = bytemuck::pod_read_unaligned(&header);
        assert_eq!(header, ControlHeader { kind: READY, len: 0 });
        let Some(FabricEvent::Accepted { connection }) = self.events.last().copied() else {
            panic!("{:?}", self.events);
        };
        self.fabric.admit(connection).unwrap();
        Raw { connection, control, data }
    }
}

/// A peer that sends what it likes.
struct Raw {
    connection: ConnectionId,
    control: TcpStream,
    data: TcpStream,
}

fn send(socket: &mut TcpStream, value: &impl bytemuck::NoUninit) {
    socket.write_all(bytemuck::bytes_of(value)).unwrap();
}

fn frame(kind: u32, word: u32, len: u32) -> Frame {
    Frame { kind, word, slot: 1, generation: 2, address: 0, len, reserved: 0 }
}

/// Two honest fabrics; `b` must go on serving whatever others do to it.
struct Honest {
    a: Node,
    connection: ConnectionId,
    remote: Region,
    local: Region,
    landed: Arc<Mapping>,
}

const BLOCK: usize = 100_000;

impl Honest {
    fn new(b: &mut Node) -> Self {
        let mut a = Node::new(config());
        let remote = b.fabric.register(mapping(&[6; BLOCK]), Access::RemoteRead).unwrap();
        let landed = mapping(&[0; BLOCK]);
        let local = a.fabric.register(landed.clone(), Access::Local).unwrap();
        let to = b.fabric.local_addr().unwrap();
        let connection = a.fabric.connect(&to).unwrap();
        a.until(|a| {
            b.poll();
            (!a.events.is_empty()).then_some(())
        });
        assert_eq!(a.events, [FabricEvent::Connected { connection }]);
        a.fabric.admit(connection).unwrap();
        let Some(FabricEvent::Accepted { connection: at_b }) = b.events.pop() else {
            panic!("not accepted");
        };
        b.fabric.admit(at_b).unwrap();
        Self { a, connection, remote, local, landed }
    }

    /// Reads once more from `b`.
    fn read(&mut self, b: &mut Node) {
        self.landed.write(0, &[0; BLOCK]).unwrap();
        let remote = self.remote.remote(0, BLOCK as u32).unwrap();
        let batch = one_read(&self.local, remote);
        self.a.fabric.post(self.connection, &batch).unwrap();
        self.a.events.clear();
        self.a.until(|a| {
            b.poll();
            (!a.events.is_empty()).then_some(())
        });
        assert_eq!(self.a.statuses(), [CompletionStatus::Success]);
        let mut bytes = vec![0; BLOCK];
        self.landed.read(0, &mut bytes).unwrap();
        assert!(bytes == [6; BLOCK]);
    }
}

fn one_read(local: &Region, remote: RemoteSpan) -> ReadBatch {
    ReadBatch {
        works: vec![ReadWork { wr_id: WrId { slot: 1, generation: 2 }, remote, segments: 1 }],
        segments: vec![RegisteredSpan { region: local.id, offset: 0, len: remote.len }],
    }
}

#[test]
fn nonsense_on_the_listening_socket_harms_nobody() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let mut bad_version = Preamble::new(PRIMARY, 1, [0; 16]);
    bad_version.version = 9;
    let mut chatty = bytemuck::bytes_of(&Preamble::new(PRIMARY, 1, [0; 16])).to_vec();
    chatty.extend([0xff; 8]);
    let preamble =
        |kind, streams| bytemuck::bytes_of(&Preamble::new(kind, streams, [3; 16])).to_vec();
    let greetings = [
        vec![0x16; 5000],
        b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n".to_vec(),
        bytemuck::bytes_of(&bad_version).to_vec(),
        preamble(99, 1),
        preamble(PRIMARY, 0),
        preamble(WELCOME, 1),
        preamble(JOIN, 1),
        chatty,
    ];
    for greeting in greetings {
        let mut socket = b.connect_raw();
        socket.write_all(&greeting).unwrap();
        b.until_closed(&mut socket);
        honest.read(&mut b);
    }
    assert_eq!(b.events, [], "nobody hears of what never was a connection");
}

#[test]
fn those_who_never_finish_their_handshake_are_closed_in_time() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let preamble = Preamble::new(PRIMARY, 1, [0; 16]);
    let mut silent = b.connect_raw();
    let mut partial = b.connect_raw();
    let most = &bytemuck::bytes_of(&preamble)[..PREAMBLE_BYTES - 1];
    partial.write_all(most).unwrap();
    let mut unjoined = b.connect_raw();
    send(&mut unjoined, &preamble);
    b.read(&mut unjoined, PREAMBLE_BYTES);
    b.until_closed(&mut silent);
    b.until_closed(&mut partial);
    b.until_closed(&mut unjoined);
    assert_eq!(b.events, []);
    assert!(b.fabric.arrivals.is_empty());
    honest.read(&mut b);
}

#[test]
fn silent_sockets_beyond_the_limit_are_closed_at_once() {
    let mut b = Node::new(TcpConfig { handshake_timeout: Duration::from_secs(3600), ..config() });
    let silent: Vec<TcpStream> = (0..HANDSHAKES_MAX).map(|_| b.connect_raw()).collect();
    b.until(|b| b.fabric.arrivals.is_full().then_some(()));
    let mut late = b.connect_raw();
    b.until_closed(&mut late);
    drop(silent);
    b.until(|b| b.fabric.arrivals.is_empty().then_some(()));
    Honest::new(&mut b).read(&mut b);
}

#[test]
fn a_violation_on_a_stream_closes_its_connection_only() {
    let message = |len| ControlHeader { kind: MESSAGE, len };
    type Act<'a> = (&'a str, &'a dyn Fn(&mut Raw));
    let acts: [Act<'_>; 8] = [
        ("oversize message", &|raw| {
            send(&mut raw.control, &message(MESSAGE_BYTES_MAX as u32 + 1));
        }),
        ("unknown control frame", &|raw| {
            send(&mut raw.control, &ControlHeader { kind: 77, len: 0 });
        }),
        ("ready from the connector", &|raw| {
            send(&mut raw.control, &ControlHeader { kind: READY, len: 0 });
        }),
        ("trickling message", &|raw| {
            send(&mut raw.control, &message(100));
            raw.control.write_all(&[1; 50]).unwrap();
        }),
        ("trickling frame", &|raw| {
            raw.data.write_all(&[0; FRAME_BYTES - 1]).unwrap();
        }),
        ("unknown frame", &|raw| send(&mut raw.data, &frame(5, 0, 0))),
        ("overlong READ", &|raw| {
            send(&mut raw.data, &frame(REQUEST, 0, READ_BYTES_MAX + 1));
        }),
        ("answer that nobody asked for", &|raw| {
            send(&mut raw.data, &frame(RESPONSE, STATUS_SUCCESS, 8));
        }),
    ];
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    for (name, act) in acts {
        let mut raw = b.raw_peer();
        act(&mut raw);
        let reason = b.until_ended(raw.connection);
        assert_eq!(reason, CloseReason::Violation, "{name}");
        honest.read(&mut b);
    }
}

#[test]
fn more_reads_than_the_limit_are_a_violation() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let mut raw = b.raw_peer();
    let mut request = frame(REQUEST, honest.remote.rkey, BLOCK as u32);
    request.address = honest.remote.address;
    for _request in 0..2 * READS_OUTSTANDING_MAX {
        send(&mut raw.data, &request);
    }
    assert_eq!(b.until_ended(raw.connection), CloseReason::Violation);
    honest.read(&mut b);
}

#[test]
fn a_peer_that_takes_no_data_is_closed_after_the_timeout() {
    let mut b = Node::new(config());
    let mut honest = Honest::new(&mut b);
    let mut raw = b.raw_peer();
    let mut request = frame(REQUEST, honest.remote.rkey, BLOCK as u32);
    request.address = honest.remote.address;
    // More than the sockets of both ends buffer.
    for _request in 0..READS_OUTSTANDING_MAX {
        send(&mut raw.data, &request);
    }
    assert_eq!(b.until_ended(raw.connection), CloseReason::Unreachable);
    honest.read(&mut b);
}

/// A READ by the fabric from a raw peer that answers with `answer`; its own span is bytes 0..64 of
/// 128. Answers how the READ and the connection ended.
fn read_from_liar(answer: &[u8]) -> (CompletionStatus, CloseReason) {
    let mut b = Node::new(config());
    let landed = mapping(&[9; 128]);
    let local = b.fabric.register(landed.clone(), Access::Local).unwrap();
    let mut raw = b.raw_peer();
    let remote = RemoteSpan { rkey: 1, address: 0, len: 64 };
    let batch = one_read(&local, remote);
    b.fabric.post(raw.connection, &batch).unwrap();
    b.read(&mut raw.data, FRAME_BYTES);
    raw.data.write_all(answer).unwrap();
    let reason = b.until_ended(raw.connection);
    let mut rest = [0; 64];
    landed.read(64, &mut rest).unwrap();
    assert_eq!(rest, [9; 64], "bytes outside the posted span were written");
    let statuses = b.statuses();
    assert_eq!(statuses.len(), 1);
    (statuses[0], reason)
}

#[test]
fn an_answer_that_does_not_match_its_read_is_a_violation() {
    let good = frame(RESPONSE, STATUS_SUCCESS, 64);
    let mut stale = good;
    stale.generation = 1;
    let mut unknown = good;
    unknown.slot = 77;
    let longer = Frame { len: 65, ..good };
    let shorter = Frame { len: 63, ..good };
    let status = Frame { word: 9, ..good };
    let refusal = frame(RESPONSE, STATUS_REMOTE_ACCESS, 64);
    for lie in [stale, unknown, longer, shorter, status, refusal] {
        let mut answer = bytemuck::bytes_of(&lie).to_vec();
        answer.extend([1; 200]);
        assert_eq!(
            read_from_liar(&answer),
            (CompletionStatus::Unreachable, CloseReason::Violation),
            "{lie:?}"
        );
    }
    let mut chatty = bytemuck::bytes_of(&good).to_vec();
    chatty.extend([1; 64 + FRAME_BYTES]);
    assert_eq!(read_from_liar(&chatty), (CompletionStatus::Success, CloseReason::Violation));
}

#[test]
fn a_read_whose_answer_stands_still_ends_after_the_timeout() {
    let mut half = bytemuck::bytes_of(&frame(RESPONSE, STATUS_SUCCESS, 64)).to_vec();
    half.extend([1; 32]);
    for answer in [&[][..], &half] {
        assert_eq!(
            read_from_liar(answer),
            (CompletionStatus::Unreachable, CloseReason::Unreachable)
        );
    }
}

#[test]
fn an_acceptor_that_answers_wrongly_or_never_ends_the_connect() {
    let welcome = |streams| Preamble::new(WELCOME, streams, [0; 16]);
    let none = welcome(0);
    let many = welcome(3);
    let wrong = Preamble::new(PRIMARY, 1, [0; 16]);
    let mut early = bytemuck::bytes_of(&welcome(1)).to_vec();
    early.extend(bytemuck::bytes_of(&ControlHeader { kind: READY, len: 0 }));
    let answers: [(&[u8], CloseReason); 6] = [
        (&[], CloseReason::Unreachable),
        (&[1; 64], CloseReason::Violation),
        (bytemuck::bytes_of(&none), CloseReason::Violation),
        (bytemuck::bytes_of(&many), CloseReason::Violation),
        (bytemuck::bytes_of(&wrong), CloseReason::Violation),
        (&early, CloseReason::Violation),
    ];
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    for (answer, reason) in answers {
        let mut a = Node::new(config());
        let connection = a.fabric.connect(&to).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(answer).unwrap();
        assert_eq!(a.until_ended(connection), reason, "{answer:?}");
        assert_eq!(a.events.len(), 1, "{:?}", a.events);
    }
}

#[test]
fn a_number_of_streams_out_of_range_is_refused() {
    for streams in [0, STREAMS_MAX + 1] {
        let refused = TcpFabric::new(TcpConfig { streams, ..config() });
        assert!(matches!(refused, Err(FabricError::Limit { .. })));
    }
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let mut a = Node::new(config());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let first = a.fabric.connect(&to).unwrap();
    // The slots are taken without sockets, of which a test may not have a thousand.
    while a.fabric.table.reserve().is_ok() {}
    assert!(matches!(a.fabric.connect(&to), Err(FabricError::Limit { .. })));
    a.fabric.close(first);
    a.poll();
    a.fabric.connect(&to).unwrap();
}
