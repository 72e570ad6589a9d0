//! Peers that do not keep to the rules: each costs its own connection, and nothing else.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;

use super::page::ServingPage;
use super::wire::{CANNOT, GRANT, Grant, Hello, MESSAGE, PACKET_BYTES_MAX, WITHDRAWAL, Withdrawal};
use super::{ShmConfig, ShmFabric, ShmName};
use crate::fabric::{
    Access, CloseReason, CompletionStatus, ConnectionId, EventBatch, Fabric, FabricEvent,
    ReadBatch, ReadWork, RegisteredSpan, RemoteSpan, WrId,
};
use crate::limits::{HANDSHAKES_MAX, REGIONS_MAX};
use crate::memory::Mapping;
use crate::sys::fd_passing::{self, PassedFds};
use crate::sys::{local_socket, memfd};

const LEN: u64 = 8192;

/// The longest that a condition is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// Longer than any test stands still in a handshake.
const PATIENT: Duration = Duration::from_secs(120);

fn fabric() -> ShmFabric {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = ShmName::new(&format!("kvrail-test/{}/unit/{number}", std::process::id()));
    ShmFabric::new(&ShmConfig { listen: Some(name), handshake_timeout: PATIENT }).unwrap()
}

/// Polls until `found` answers something.
#[expect(clippy::disallowed_methods, reason = "the deadline of a test")]
fn until<R>(fabric: &mut ShmFabric, mut found: impl FnMut(&FabricEvent) -> Option<R>) -> R {
    let deadline = Instant::now() + PATIENCE;
    let mut batch = EventBatch::default();
    loop {
        batch.clear();
        fabric.poll(&mut batch, Duration::from_millis(1)).unwrap();
        if let Some(result) = batch.events.iter().find_map(&mut found) {
            return result;
        }
        assert!(Instant::now() < deadline, "not in time");
    }
}

fn closed(fabric: &mut ShmFabric) -> CloseReason {
    until(fabric, |event| match event {
        FabricEvent::Closed { reason, .. } => Some(*reason),
        _ => None,
    })
}

/// Whether the other end of a socket is closed.
fn is_closed(socket: &OwnedFd) -> bool {
    let mut bytes = [0; 64];
    loop {
        match fd_passing::receive(socket, &mut bytes, &mut PassedFds::new()) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
            Err(error) => return error.kind() != std::io::ErrorKind::WouldBlock,
        }
    }
}

fn dial(fabric: &ShmFabric) -> OwnedFd {
    local_socket::dial(fabric.name().unwrap().as_str()).unwrap()
}

fn send(socket: &OwnedFd, packet: &[u8], fds: &[BorrowedFd<'_>]) {
    fd_passing::send(socket, packet, fds).unwrap();
}

/// A peer that is known to the fabric, and speaks by hand.
struct ByHand {
    socket: OwnedFd,
    page: ServingPage,
    connection: ConnectionId,
}

fn by_hand(fabric: &mut ShmFabric) -> ByHand {
    let socket = dial(fabric);
    let (page, file) = ServingPage::new().unwrap();
    send(&socket, bytemuck::bytes_of(&Hello::OURS), &[file.as_fd()]);
    let connection = until(fabric, |event| match event {
        FabricEvent::Accepted { connection } => Some(*connection),
        _ => None,
    });
    fabric.admit(connection).unwrap();
    ByHand { socket, page, connection }
}

fn memory_file(sealed: bool) -> File {
    let file = memfd::create("kvrail-test", MemfdFlags::empty()).unwrap();
    file.set_len(LEN).unwrap();
    if sealed {
        memfd::seal_length(&file).unwrap();
    }
    file
}

fn grant(slot: u32, rkey: u32) -> Grant {
    Grant { kind: GRANT, slot, rkey, reserved: 0, address: 1 << 20, len: LEN }
}

/// Posts a READ of a peer's region; how it ends.
fn read(fabric: &mut ShmFabric, connection: ConnectionId, remote: RemoteSpan) -> CompletionStatus {
    let memory = Arc::new(Mapping::anonymous("kvrail-test", LEN).unwrap());
    let local = fabric.register(memory, Access::Local).unwrap();
    let batch = ReadBatch {
        works: vec![ReadWork { wr_id: WrId { slot: 1, generation: 1 }, remote, segments: 1 }],
        segments: vec![RegisteredSpan { region: local.id, offset: 0, len: remote.len }],
    };
    fabric.post(connection, &batch).unwrap();
    until(fabric, |event| match event {
        FabricEvent::Completed(done) => Some(done.status),
        _ => None,
    })
}

/// A peer that does as it should is served, after whatever came before.
fn is_unharmed(fabric: &mut ShmFabric) {
    let peer = by_hand(fabric);
    peer.page.serve(0, 5);
    peer.page.admit();
    send(&peer.socket, bytemuck::bytes_of(&grant(0, 5)), &[memory_file(true).as_fd()]);
    let remote = RemoteSpan { rkey: 5, address: (1 << 20) + 4096, len: 4096 };
    assert_eq!(read(fabric, peer.connection, remote), CompletionStatus::Success);
}

#[test]
fn what_is_no_hello_never_becomes_a_connection() {
    let mut fabric = fabric();
    let (_page, file) = ServingPage::new().unwrap();
    let (page, hello) = (file.as_fd(), bytemuck::bytes_of(&Hello::OURS));
    let (open, null) = (memory_file(false), File::open("/dev/null").unwrap());
    let long = memory_file(true);
    let attempts: [(&[u8], &[BorrowedFd<'_>]); 8] = [
        (b"GET / HTTP/1.1\r\n", &[]),
        (&[0; PACKET_BYTES_MAX + 1], &[]),
        (b"kvrailSM", &[page]),
        (hello, &[]),
        (hello, &[page, page]),
        (hello, &[open.as_fd()]),
        (hello, &[long.as_fd()]),
        (hello, &[null.as_fd()]),
    ];
    for (case, (packet, fds)) in attempts.into_iter().enumerate() {
        let socket = dial(&fabric);
        send(&socket, packet, fds);
        let mut batch = EventBatch::default();
        for _poll in 0..5 {
            fabric.poll(&mut batch, Duration::from_millis(1)).unwrap();
        }
        assert_eq!(batch.events, [], "case {case}");
        assert!(is_closed(&socket), "case {case}");
    }
    is_unharmed(&mut fabric);
}

#[test]
fn a_connection_that_breaks_the_rules_ends_as_a_violation() {
    let mut fabric = fabric();
    let (good, open) = (memory_file(true), memory_file(false));
    let bytes = |grant: Grant| bytemuck::bytes_of(&grant).to_vec();
    let withdrawal = bytemuck::bytes_of(&Withdrawal { kind: WITHDRAWAL, slot: 0 }).to_vec();
    let with = |change: fn(&mut Grant)| {
        let mut grant = grant(0, 5);
        change(&mut grant);
        bytes(grant)
    };
    let mut long = MESSAGE.to_le_bytes().to_vec();
    long.resize(PACKET_BYTES_MAX + 1, 0);
    let attempts: Vec<(&str, Vec<u8>, Vec<BorrowedFd<'_>>)> = vec![
        ("no kind", vec![1], vec![]),
        ("an unknown kind", vec![9, 0, 0, 0], vec![]),
        ("a second hello", bytemuck::bytes_of(&Hello::OURS).to_vec(), vec![good.as_fd()]),
        ("a message beyond the limit", long, vec![]),
        ("a message with a file", vec![1, 0, 0, 0, 7], vec![good.as_fd()]),
        ("a grant without its file", bytes(grant(0, 5)), vec![]),
        ("a grant with two files", bytes(grant(0, 5)), vec![good.as_fd(), good.as_fd()]),
        ("a grant that is short", bytes(grant(0, 5))[..31].to_vec(), vec![good.as_fd()]),
        ("a file that may shrink", bytes(grant(0, 5)), vec![open.as_fd()]),
        ("more than the file has", with(|grant| grant.len = LEN + 1), vec![good.as_fd()]),
        ("all that there is", with(|grant| grant.len = u64::MAX), vec![good.as_fd()]),
        (
            "a slot out of range",
            with(|grant| grant.slot = u32::try_from(REGIONS_MAX).unwrap()),
            vec![good.as_fd()],
        ),
        ("no key", with(|grant| grant.rkey = 0), vec![good.as_fd()]),
        ("a withdrawal with a file", withdrawal.clone(), vec![good.as_fd()]),
        ("a withdrawal that is long", [withdrawal, vec![0]].concat(), vec![]),
    ];
    for (what, packet, fds) in attempts {
        let peer = by_hand(&mut fabric);
        send(&peer.socket, &packet, &fds);
        assert_eq!(closed(&mut fabric), CloseReason::Violation, "{what}");
        assert!(is_closed(&peer.socket), "{what}");
    }
    let peer = by_hand(&mut fabric);
    send(&peer.socket, &CANNOT.to_le_bytes(), &[]);
    assert_eq!(closed(&mut fabric), CloseReason::Exhausted, "what the peer says of itself");
    for (slot, rkey) in [(0, 6), (1, 5)] {
        let peer = by_hand(&mut fabric);
        send(&peer.socket, bytemuck::bytes_of(&grant(0, 5)), &[good.as_fd()]);
        send(&peer.socket, bytemuck::bytes_of(&grant(slot, rkey)), &[good.as_fd()]);
        assert_eq!(closed(&mut fabric), CloseReason::Violation, "one slot or key twice");
    }
    is_unharmed(&mut fabric);
}

#[test]
fn a_page_that_lies_fails_the_reads_of_its_own_connection() {
    let mut fabric = fabric();
    let remote = RemoteSpan { rkey: 5, address: 1 << 20, len: 4096 };
    // Granted, and not in the page; in the page under another key; cut, and the socket open.
    let lies: [fn(&ServingPage); 3] = [
        |page| page.admit(),
        |page| {
            page.serve(0, 6);
            page.admit();
        },
        |page| {
            page.serve(0, 5);
            page.admit();
            page.cut();
        },
    ];
    let ends = [
        CompletionStatus::RemoteAccess,
        CompletionStatus::RemoteAccess,
        CompletionStatus::Unreachable,
    ];
    for (lie, end) in lies.into_iter().zip(ends) {
        let peer = by_hand(&mut fabric);
        send(&peer.socket, bytemuck::bytes_of(&grant(0, 5)), &[memory_file(true).as_fd()]);
        lie(&peer.page);
        assert_eq!(read(&mut fabric, peer.connection, remote), end);
    }
    is_unharmed(&mut fabric);
}

#[test]
fn a_cut_in_the_middle_of_a_read_fails_it() {
    let mut fabric = fabric();
    let peer = by_hand(&mut fabric);
    let len = 4 << 20;
    let held = Mapping::anonymous("kvrail-test", len).unwrap();
    peer.page.serve(0, 5);
    peer.page.admit();
    let whole = Grant { len, ..grant(0, 5) };
    send(&peer.socket, bytemuck::bytes_of(&whole), &[held.file().unwrap().as_fd()]);
    let memory = Arc::new(Mapping::anonymous("kvrail-test", len).unwrap());
    let local = fabric.register(Arc::clone(&memory), Access::Local).unwrap();
    let len = u32::try_from(len).unwrap();
    let remote = RemoteSpan { rkey: 5, address: 1 << 20, len };
    let wr_id = WrId { slot: 1, generation: 1 };
    let batch = ReadBatch {
        works: vec![ReadWork { wr_id, remote, segments: 1 }],
        segments: vec![RegisteredSpan { region: local.id, offset: 0, len }],
    };
    fabric.post(peer.connection, &batch).unwrap();
    // One poll copies a part.
    let mut events = EventBatch::default();
    fabric.poll(&mut events, Duration::ZERO).unwrap();
    assert_eq!(events.events, []);
    peer.page.cut();
    held.write(0, &vec![9; len as usize]).unwrap();
    let status = until(&mut fabric, |event| match event {
        FabricEvent::Completed(done) => Some(done.status),
        _ => None,
    });
    assert_eq!(status, CompletionStatus::Unreachable);
    let mut landed = vec![0; len as usize];
    memory.read(0, &mut landed).unwrap();
    assert!(!landed.contains(&9), "copied after the cut");
}

/// A holder that cuts a reader off and reuses its memory at once, on its own thread, in the middle of
/// the reader's copies.
#[test]
fn a_read_that_races_a_cut_never_brings_what_was_written_after_it() {
    const BLOCK: u32 = 128 << 10;
    const BLOCKS: u32 = 64;
    let bytes = (BLOCK * BLOCKS) as usize;
    let (mut holder, mut reader) = (fabric(), fabric());
    let held = Arc::new(Mapping::anonymous("kvrail-test", bytes as u64).unwrap());
    let lands = Arc::new(Mapping::anonymous("kvrail-test", bytes as u64).unwrap());
    let remote = holder.register(Arc::clone(&held), Access::RemoteRead).unwrap();
    let local = reader.register(Arc::clone(&lands), Access::Local).unwrap();
    let (old, new) = (vec![1; bytes], vec![2; bytes]);
    let mut raced = 0;
    for round in 0..60 {
        held.write(0, &old).unwrap();
        let at_reader = reader.connect(holder.name().unwrap()).unwrap();
        let at_holder = until(&mut holder, |event| match event {
            FabricEvent::Accepted { connection } => Some(*connection),
            _ => None,
        });
        holder.admit(at_holder).unwrap();
        until(&mut reader, |event| matches!(event, FabricEvent::Connected { .. }).then_some(()));
        reader.admit(at_reader).unwrap();
        let mut batch = ReadBatch::default();
        for slot in 0..BLOCKS {
            let offset = u64::from(slot * BLOCK);
            let remote = remote.remote(offset, BLOCK).unwrap();
            let wr_id = WrId { slot, generation: 1 };
            batch.works.push(ReadWork { wr_id, remote, segments: 1 });
            batch.segments.push(RegisteredSpan { region: local.id, offset, len: BLOCK });
        }
        reader.post(at_reader, &batch).unwrap();
        let (done, is_closing) = (AtomicU32::new(0), AtomicBool::new(false));
        let mut good = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Another number of blocks in every round.
                while done.load(Ordering::Relaxed) < 2 + round % 20 {
                    std::thread::yield_now();
                }
                is_closing.store(true, Ordering::Relaxed);
                holder.close(at_holder);
                held.write(0, &new).unwrap();
            });
            until(&mut reader, |event| match event {
                FabricEvent::Completed(end) => {
                    if end.status == CompletionStatus::Success {
                        good.push(end.wr_id.slot);
                        let count = done.fetch_add(1, Ordering::Relaxed) + 1;
                        // So that both are under way at the same time, on a loaded machine too.
                        while count >= 2 + round % 20 && !is_closing.load(Ordering::Relaxed) {
                            std::thread::yield_now();
                        }
                    }
                    None
                }
                FabricEvent::Closed { .. } => Some(()),
                _ => None,
            });
        });
        until(&mut holder, |event| matches!(event, FabricEvent::Closed { .. }).then_some(()));
        raced += u32::from(good.len() < BLOCKS as usize);
        let mut block = vec![0; BLOCK as usize];
        for slot in good {
            lands.read(u64::from(slot * BLOCK), &mut block).unwrap();
            assert!(!block.contains(&2), "round {round}: block {slot} is not what it was");
        }
    }
    assert!(raced > 0, "each cut came after all of its READs");
}

#[test]
fn more_silence_than_the_limit_is_closed_at_once() {
    let mut fabric = fabric();
    let silent: Vec<OwnedFd> = (0..HANDSHAKES_MAX).map(|_| dial(&fabric)).collect();
    let mut batch = EventBatch::default();
    for _poll in 0..8 {
        fabric.poll(&mut batch, Duration::ZERO).unwrap();
    }
    assert!(silent.iter().all(|socket| !is_closed(socket)), "within their time");
    let more = dial(&fabric);
    fabric.poll(&mut batch, Duration::ZERO).unwrap();
    assert!(is_closed(&more), "beyond the limit");
    assert_eq!(batch.events, []);
}

#[test]
fn silence_is_closed_in_time() {
    let mut fabric = fabric();
    fabric.handshake_timeout = Duration::from_millis(300);
    let silent: Vec<OwnedFd> = (0..HANDSHAKES_MAX).map(|_| dial(&fabric)).collect();
    let mut batch = EventBatch::default();
    #[expect(clippy::disallowed_methods, reason = "the deadline of a test")]
    let deadline = Instant::now() + PATIENCE;
    while !silent.iter().all(is_closed) {
        fabric.poll(&mut batch, Duration::from_millis(10)).unwrap();
        #[expect(clippy::disallowed_methods, reason = "the deadline of a test")]
        let now = Instant::now();
        assert!(now < deadline, "silence is not closed");
    }
    assert_eq!(batch.events, []);
    fabric.handshake_timeout = PATIENT;
    is_unharmed(&mut fabric);
}
