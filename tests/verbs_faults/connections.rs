//! What connections leave behind, however they end.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use kvrail::fabric::{Access, ConnectionId, Fabric, Region};

use crate::conformance::{End, Harness, batch, connect, pump};
use crate::rdma::{Verbs, device};
use crate::{BYTES, many, say};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// What the kernel counts for the device: queue pairs, completion queues, memory regions, domains.
fn resources() -> String {
    let shown = Command::new("rdma").args(["resource", "show", device().unwrap()]).output();
    shown.map_or_else(|error| error.to_string(), |it| String::from_utf8_lossy(&it.stdout).into())
}

struct Scene {
    a: End<Verbs>,
    b: End<Verbs>,
    remote: Region,
    local: Region,
}

impl Scene {
    fn new() -> Self {
        let (mut a, mut b) = (End::<Verbs>::new(), End::<Verbs>::new());
        let (remote, _) = b.region(&[1; BYTES], Access::RemoteRead);
        let (local, _) = a.region(&[0; BYTES], Access::Local);
        Self { a, b, remote, local }
    }

    fn until_closed(&mut self, at_a: ConnectionId) {
        pump(&mut self.a, &mut self.b, |a, _| a.closed(at_a).is_some());
    }

    fn until_both_closed(&mut self, (at_a, at_b): (ConnectionId, ConnectionId)) {
        pump(&mut self.a, &mut self.b, |a, b| a.closed(at_a).is_some() && b.closed(at_b).is_some());
    }

    /// Both ends admitted.
    fn connected(&mut self) -> (ConnectionId, ConnectionId) {
        let ids = connect(&mut self.a, &mut self.b);
        self.a.fabric.admit(ids.0).unwrap();
        self.b.fabric.admit(ids.1).unwrap();
        ids
    }

    fn closes_with_reads_outstanding(&mut self, by_holder: bool) {
        let ids = self.connected();
        self.a.fabric.post(ids.0, &batch(&many(&self.remote, &self.local))).unwrap();
        if by_holder {
            self.b.fabric.close(ids.1);
        } else {
            self.a.fabric.close(ids.0);
        }
        self.until_both_closed(ids);
    }

    fn is_given_up_before_it_is_up(&mut self) {
        let id = self.a.fabric.connect(&self.b.fabric.local_addr().unwrap()).unwrap();
        self.a.poll();
        self.a.fabric.close(id);
        self.until_closed(id);
    }

    fn meets_nobody(&mut self) {
        let id = self.a.fabric.connect(&Verbs::nowhere()).unwrap();
        self.until_closed(id);
    }

    fn fails_by_a_read(&mut self, local_fault: bool) {
        let ids = self.connected();
        let mut reads = many(&self.remote, &self.local);
        if local_fault {
            reads[9].into[0].offset = BYTES as u64;
        } else {
            reads[9].remote.rkey ^= 1;
        }
        self.a.fabric.post(ids.0, &batch(&reads)).unwrap();
        self.until_both_closed(ids);
    }

    /// What a connector says first, and the connection that said it to a listener of ours.
    fn greeting(&mut self) -> (Vec<u8>, TcpStream, ConnectionId) {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        listener.set_nonblocking(true).unwrap();
        let id = self.a.fabric.connect(&listener.local_addr().unwrap()).unwrap();
        let (mut socket, mut said) = (None, Vec::new());
        pump(&mut self.a, &mut self.b, |_, _| {
            if socket.is_none() {
                socket = listener.accept().ok().map(|(socket, _)| socket);
            }
            let Some(socket) = &mut socket else { return false };
            socket.set_nonblocking(true).unwrap();
            let mut part = [0; 4096];
            if let Ok(count) = socket.read(&mut part) {
                said.extend_from_slice(&part[..count]);
            }
            !said.is_empty()
        });
        (said, socket.unwrap(), id)
    }

    /// A holder that answers with queue pairs that are not its own, and is gone.
    fn is_answered_by_a_liar(&mut self) {
        let (said, mut socket, id) = self.greeting();
        socket.write_all(&said).unwrap();
        for _poll in 0..5 {
            self.a.poll();
        }
        drop(socket);
        self.until_closed(id);
    }

    /// A connector that names queue pairs, and is gone.
    fn accepts_one_that_leaves(&mut self) {
        let (said, socket, id) = self.greeting();
        drop(socket);
        self.until_closed(id);
        let mut stranger = TcpStream::connect(self.b.fabric.local_addr().unwrap()).unwrap();
        stranger.write_all(&said).unwrap();
        stranger.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        pump(&mut self.a, &mut self.b, |_, _| {
            stranger.read(&mut [0; 4096]).is_ok_and(|count| count > 0)
        });
    }

    fn outlives_its_peer(&mut self) {
        let mut other = End::<Verbs>::new();
        let (remote, _) = other.region(&[1; BYTES], Access::RemoteRead);
        let (at_a, at_other) = connect(&mut self.a, &mut other);
        self.a.fabric.admit(at_a).unwrap();
        other.fabric.admit(at_other).unwrap();
        self.a.fabric.post(at_a, &batch(&many(&remote, &self.local))).unwrap();
        drop(other);
        self.until_closed(at_a);
    }
}

#[test]
fn connections_that_end_leave_nothing_behind() {
    if device().is_none() {
        return;
    }
    let mut scene = Scene::new();
    let (fds, kernel) = (descriptors(), resources());
    let ids = scene.connected();
    assert!(descriptors() > fds && resources() != kernel, "a connection is counted");
    scene.a.fabric.close(ids.0);
    scene.until_both_closed(ids);
    let ends: [fn(&mut Scene); 10] = [
        |scene| scene.closes_with_reads_outstanding(false),
        |scene| scene.closes_with_reads_outstanding(true),
        |scene| {
            let ids = scene.connected();
            scene.b.fabric.close(ids.1);
            scene.until_both_closed(ids);
        },
        Scene::is_given_up_before_it_is_up,
        Scene::meets_nobody,
        |scene| scene.fails_by_a_read(true),
        |scene| scene.fails_by_a_read(false),
        Scene::is_answered_by_a_liar,
        Scene::accepts_one_that_leaves,
        Scene::outlives_its_peer,
    ];
    for end in ends.iter().cycle().take(200) {
        end(&mut scene);
        scene.a.seen.clear();
        scene.b.seen.clear();
    }
    pump(&mut scene.a, &mut scene.b, |_, _| descriptors() == fds && resources() == kernel);
    say(&format!("200 connections that ended in 10 ways left {fds} descriptors and {kernel}"));
}

#[test]
fn nonsense_on_the_listening_socket_harms_nobody() {
    if device().is_none() {
        return;
    }
    let (mut a, mut b) = (End::<Verbs>::new(), End::<Verbs>::new());
    let to = b.fabric.local_addr().unwrap();
    let (at_a, at_b) = connect(&mut a, &mut b);
    let mut chatty = b"kvrailRC\x01\0\0\0".to_vec();
    chatty.extend([0xff; 500]);
    let greetings = [vec![0x16; 5000], b"GET / HTTP/1.1\r\n\r\n".repeat(20), vec![0; 192], chatty];
    for (number, greeting) in greetings.iter().enumerate() {
        let mut socket = TcpStream::connect(to).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket.write_all(greeting).unwrap();
        pump(&mut a, &mut b, |_, _| match socket.read(&mut [0; 512]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        });
        a.fabric.send(at_a, &[number as u8]).unwrap();
        pump(&mut a, &mut b, |_, b| b.messages(at_b).len() == number + 1);
    }
    assert!(b.closed(at_b).is_none());
}
