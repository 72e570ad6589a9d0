//! Peers that break the rules, played by plain sockets. What honest fabrics do is in
//! `tests/conformance`.
#![expect(clippy::cast_possible_truncation, reason = "the sizes of tests are small constants")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

mod handshake;
mod streams;

use super::wire::{
    ControlHeader, FRAME_BYTES, Frame, MESSAGE, PREAMBLE_BYTES, READY, REQUEST, RESPONSE,
    STATUS_REMOTE_ACCESS, STATUS_SUCCESS, WELCOME,
};
use super::*;
use crate::fabric::{CompletionStatus, FabricEvent, ReadWork, RegisteredSpan, RemoteSpan, WrId};

/// Polls in which a condition must come true; each one waits a millisecond where nothing happens.
const POLLS: usize = 20_000;

/// Timeouts where they are not what is tested: a thread of a test that stands still meets none.
const PATIENT: Duration = Duration::from_secs(120);

/// A timeout that is tested.
const HASTY: Duration = Duration::from_millis(300);

fn config() -> TcpConfig {
    TcpConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        streams: 2,
        handshake_timeout: PATIENT,
        io_timeout: PATIENT,
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

    /// Waits so long from here on, for whatever it waits for.
    fn wait_at_most(&mut self, timeout: Duration) {
        self.fabric.handshake_timeout = timeout;
        self.fabric.io_timeout = timeout;
        self.fabric.sweep_interval = timeout / SWEEPS_PER_TIMEOUT;
        self.fabric.next_sweep = Timestamp::ZERO;
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
        self.try_read(peer, len).expect("it was closed")
    }

    /// As [`Self::read`]; `None` where the raw peer is closed before that.
    fn try_read(&mut self, peer: &mut TcpStream, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut have = 0;
        let whole = self.until(|_| match peer.read(&mut bytes[have..]) {
            Ok(0) => Some(false),
            Ok(count) => {
                have += count;
                (have == len).then_some(true)
            }
            Err(error) => (error.kind() != ErrorKind::WouldBlock).then_some(false),
        });
        whole.then_some(bytes)
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
