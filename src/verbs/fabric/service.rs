//! What a fabric does beside its completions: descriptors, asynchronous events, deadlines.

use std::time::Duration;

use rustix::io::Errno;

use super::connection::Connection;
use super::raising::Raised;
use super::table::Token;
use super::{SWEEP, VerbsFabric};
use crate::fabric::{ConnectionId, EventBatch, FabricError};
use crate::limits::HANDSHAKES_MAX;
use crate::sys::clock::coarse;
use crate::sys::connections::{Breakable, Broken};
use crate::sys::epoll::Interest;
use crate::sys::socket;
use crate::types::Timestamp;
use crate::verbs::AsyncEvent;

/// Sockets accepted at once; the others wait in the kernel's queue.
const ACCEPTS: usize = 16;

/// How often sockets are looked at while completions keep coming.
const SERVICE: Duration = Duration::from_millis(1);

impl VerbsFabric {
    /// Waits for descriptors and handles them. Answers whether the poll is over: another
    /// thread woke it, or a descriptor that is watched for somebody else is ready.
    pub(super) fn service(
        &mut self,
        limit: Duration,
        batch: &mut EventBatch,
    ) -> Result<bool, FabricError> {
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        let waited = self.epoll.wait(&mut ready, Some(limit));
        waited.map_err(|source| FabricError::Os {
            call: "epoll_wait".to_owned(),
            source,
            remedy: "make a new fabric; report this as a defect",
        })?;
        let now = coarse();
        self.next_service = now + SERVICE;
        let mut woken = false;
        for ready in &ready {
            match Token::decode(ready.token) {
                Token::Wake => {
                    woken = true;
                    // Nothing to take means that it was taken already.
                    self.wake.event.drain().ok();
                    self.wake.take();
                }
                Token::Watched => {
                    woken = true;
                    self.watched = true;
                }
                Token::Channel(nic) => self.disarm(nic),
                Token::Device(nic) => self.take_events(nic, now, batch),
                Token::Listener => self.accept(now),
                Token::Connection(id) => {
                    // What the peer sent before it closed comes first.
                    self.with(id, now, |connection, around| {
                        connection.drain(around, batch);
                        connection.handle_socket(*ready, around)
                    });
                }
            }
        }
        self.ready = ready;
        while let Some(Raised { id, link, outcome }) = self.raisers.next() {
            // The queues of a connection that is gone go here.
            self.with(id, now, |connection, around| connection.take_raised(link, outcome, around));
        }
        if now >= self.next_sweep {
            self.sweep(now, batch);
        }
        Ok(woken)
    }

    /// Takes completion events of a NIC: their queues must be armed again before a wait.
    fn disarm(&mut self, nic: u8) {
        let Some(device) = self.nics.get(nic) else { return };
        while let Some(token) = device.channel.next() {
            if let Token::Connection(id) = Token::decode(token)
                && let Some(link) = self.table.find(id).and_then(Connection::link_mut)
                && let Some(queue) = link.queues.iter_mut().find(|queue| queue.nic == nic)
            {
                queue.armed = false;
            }
        }
    }

    /// Makes the next completion of each connection end a wait.
    pub(super) fn arm(&mut self, now: Timestamp) {
        for (_, connection) in self.table.iter_mut() {
            let Some(link) = connection.link_mut() else { continue };
            for queue in link.queues.iter_mut().filter(|queue| !queue.armed) {
                match queue.cq.arm() {
                    Ok(()) => queue.armed = true,
                    Err(error) => {
                        tracing::warn!(%error, "a connection ends");
                        connection.cut(Broken::UNREACHABLE, now);
                        break;
                    }
                }
            }
        }
    }

    fn take_events(&mut self, nic: u8, now: Timestamp, batch: &mut EventBatch) {
        while let Some(event) = self.nics.get(nic).and_then(|device| device.context.next_event()) {
            match event {
                AsyncEvent::QueuePair(token) => {
                    if let Token::Connection(id) = Token::decode(token) {
                        self.with(id, now, |connection, around| {
                            connection.drain(around, batch);
                            connection.suspect(now);
                            Ok(())
                        });
                    }
                }
                AsyncEvent::CompletionQueue(token) => {
                    if let Token::Connection(id) = Token::decode(token) {
                        self.with(id, now, |_, _| Err(Broken::UNREACHABLE));
                    }
                }
                other => self.handle_device_event(nic, &other, now),
            }
        }
    }

    /// Something happened to a NIC as a whole: where it cannot be used any more, its connections end.
    fn handle_device_event(&mut self, nic: u8, event: &AsyncEvent, now: Timestamp) {
        self.take_device_event(nic, event);
        if self.nics.is_lost(nic) {
            self.leave(nic, now);
        }
    }

    /// Notes what happened to a NIC or its port.
    fn take_device_event(&mut self, nic: u8, event: &AsyncEvent) {
        let Some(device) = self.nics.devices.get_mut(usize::from(nic)) else { return };
        let name = device.context.name().to_owned();
        match *event {
            AsyncEvent::DeviceFatal => {
                tracing::error!(device = name, "the RDMA device is gone");
                device.gone = true;
                // What is gone has nothing more to say, and its descriptors may be ready for ever.
                self.epoll.delete(device.context.events_fd()).ok();
                self.epoll.delete(device.channel.fd()).ok();
                self.lost = self.nics.devices.iter().all(|device| device.gone);
            }
            AsyncEvent::PortDown(port) if port == device.port.number => {
                tracing::warn!(device = name, port, "the port went down");
                device.up = false;
            }
            AsyncEvent::PortActive(port) if port == device.port.number => {
                tracing::info!(device = name, port, "the port is up");
                device.refresh();
            }
            AsyncEvent::GidChange(port) if port == device.port.number => device.refresh(),
            ref other => tracing::debug!(device = name, ?other, "device event"),
        }
    }

    /// Ends the connections that use a NIC. Fresh ones go over those that are left.
    fn leave(&mut self, nic: u8, now: Timestamp) {
        for (_, connection) in self.table.iter_mut() {
            if connection.link_mut().is_some_and(|link| link.uses(nic)) {
                connection.cut(Broken::NIC_LOST, now);
            }
        }
    }

    fn accept(&mut self, now: Timestamp) {
        for _accept in 0..ACCEPTS {
            let Some(listener) = &self.listener else { return };
            let socket = match socket::accept(listener) {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    self.pause(true);
                    return;
                }
                // The peer of this one has gone already.
                Err(_) => continue,
            };
            let gathering = self.table.iter_mut().filter(|(_, peer)| peer.is_gathering());
            if gathering.count() >= HANDSHAKES_MAX {
                // A peer says what it is at once: who has not for longest has most likely nothing to say.
                let Some(oldest) = self.oldest_unknown() else { continue };
                self.with(oldest, now, |_, _| Err(Broken::VIOLATION));
            }
            let Ok(id) = self.table.reserve() else { continue };
            // An unwatched connection does nothing, and its deadline closes it.
            self.epoll.add(&socket, Token::Connection(id).encode(), Interest::Read).ok();
            let deadline = now + self.handshake_timeout;
            self.table.put(id, Connection::accepted(id, socket, deadline));
        }
    }

    /// The oldest of the connections whose peers have not said what they are.
    fn oldest_unknown(&mut self) -> Option<ConnectionId> {
        let unknown = self.table.iter_mut().filter(|(_, peer)| peer.is_unknown());
        unknown.min_by_key(|(_, peer)| peer.deadline).map(|(id, _)| id)
    }

    /// Stops or restarts accepting: without a free descriptor a waiting connection would make every
    /// wait return at once.
    fn pause(&mut self, paused: bool) {
        let Some(listener) = &self.listener else { return };
        let want = if paused { Interest::None } else { Interest::Read };
        if self.epoll.modify(listener, Token::Listener.encode(), want).is_ok() {
            self.paused = paused;
        }
    }

    /// Checks all deadlines.
    fn sweep(&mut self, now: Timestamp, batch: &mut EventBatch) {
        self.next_sweep = now + SWEEP;
        if self.paused {
            self.pause(false);
        }
        let mut late = Vec::new();
        for (id, connection) in self.table.iter_mut() {
            if !connection.is_broken()
                && let Err(broken) = connection.check(now)
            {
                connection.cut(broken, now);
            }
            if connection.has_late_trials(now) {
                late.push(id);
            }
        }
        for id in late {
            self.with(id, now, |connection, around| connection.stop_trials(around, batch));
        }
    }
}

#[cfg(test)]
mod tests {
    //! SoftRoCE lets no device go that is in use, and no caller can name a local key that is none, so no test
    //! from outside sees either. These run where `KVRAIL_RDMA_NICS` names devices: in the guest of `tests/rxe`.
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::Arc;

    use super::super::connection::Stage;
    use super::super::hello::{Hello, Seat};
    use super::*;
    use crate::fabric::{
        Access, CloseReason, Completion, CompletionStatus, ConnectionId, Fabric, FabricEvent,
        ReadBatch, ReadWork, Region, RegisteredSpan, WrId,
    };
    use crate::memory::Mapping;
    use crate::verbs::{QueuePairAddress, VerbsConfig};

    const LEN: u32 = 64 << 10;

    /// The first two devices of the guest: one on an interface of its own, one on a wire.
    fn devices() -> Option<[String; 2]> {
        #[expect(clippy::disallowed_methods, reason = "the guest names its devices so")]
        let names = std::env::var("KVRAIL_RDMA_NICS").unwrap_or_default();
        let devices: Vec<String> = names.split_whitespace().take(2).map(str::to_owned).collect();
        devices.try_into().ok()
    }

    /// Two fabrics over both.
    fn two() -> Option<[VerbsFabric; 2]> {
        Some(fabrics(&devices()?))
    }

    fn fabrics(devices: &[String]) -> [VerbsFabric; 2] {
        let (devices, listen) = (devices.to_vec(), Some(SocketAddr::from(([127, 0, 0, 1], 0))));
        let config = VerbsConfig { listen, devices, ..VerbsConfig::default() };
        [0, 1].map(|_| VerbsFabric::new(&config).unwrap())
    }

    /// Polls both in turn until one of the events of the first is what is looked for.
    fn until<T>(
        [a, b]: &mut [VerbsFabric; 2],
        mut found: impl FnMut(&FabricEvent) -> Option<T>,
    ) -> T {
        let end = coarse() + Duration::from_secs(60);
        loop {
            for (fabric, looks) in [(&mut *a, true), (&mut *b, false)] {
                let mut batch = EventBatch::default();
                fabric.poll(&mut batch, Duration::from_millis(1)).unwrap();
                for event in &batch.events {
                    if let FabricEvent::Accepted { connection } = *event {
                        fabric.admit(connection).unwrap();
                        fabric.send(connection, b"read").unwrap();
                    }
                    if let Some(found) = looks.then(|| found(event)).flatten() {
                        return found;
                    }
                }
            }
            assert!(coarse() < end, "it does not happen");
        }
    }

    fn connect(ends: &mut [VerbsFabric; 2]) -> ConnectionId {
        let at = ends[1].local_addr().unwrap();
        let id = ends[0].connect(&at).unwrap();
        until(ends, |event| match *event {
            FabricEvent::Message { connection, .. } => (connection == id).then_some(()),
            FabricEvent::Closed { connection, reason } if connection == id => panic!("{reason:?}"),
            _ => None,
        });
        ends[0].admit(id).unwrap();
        id
    }

    /// What one end serves, and where the other one reads it to.
    struct Scene {
        landed: Arc<Mapping>,
        source: Vec<u8>,
        remote: Region,
        local: Region,
    }

    fn scene(ends: &mut [VerbsFabric; 2]) -> Scene {
        let memory = || Arc::new(Mapping::anonymous("kvrail-test", LEN.into()).unwrap());
        let (landed, held) = (memory(), memory());
        let source: Vec<u8> = (0..251).cycle().take(LEN as usize).collect();
        held.write(0, &source).unwrap();
        let remote = ends[1].register(held, Access::RemoteRead).unwrap();
        let local = ends[0].register(Arc::clone(&landed), Access::Local).unwrap();
        Scene { landed, source, remote, local }
    }

    /// One READ of all of it.
    fn read(remote: &Region, local: &Region) -> ReadBatch {
        let wr_id = WrId { slot: 1, generation: 1 };
        let remote = remote.remote(0, LEN).unwrap();
        ReadBatch {
            works: vec![ReadWork { wr_id, remote, segments: 1 }],
            segments: vec![RegisteredSpan { region: local.id, offset: 0, len: LEN }],
        }
    }

    fn bytes(landed: &Mapping) -> Vec<u8> {
        let mut bytes = vec![0; LEN as usize];
        landed.read(0, &mut bytes).unwrap();
        bytes
    }

    /// A fabric checks local spans before it posts them, so that the device sees a bad key of ours only
    /// where the fabric itself is wrong: then this end is at fault, and the peer goes on as before.
    #[test]
    fn a_bad_local_key_lands_nothing_and_blames_this_end() {
        let Some(mut ends) = two() else { return };
        let Scene { landed, source, remote, local } = scene(&mut ends);
        let good = ends[0].register(Arc::clone(&landed), Access::Local).unwrap();
        ends[0].regions.spoil_keys(local.id);
        let (bad, other) = (connect(&mut ends), connect(&mut ends));
        ends[0].post(bad, &read(&remote, &local)).unwrap();
        let mut told = Vec::new();
        let reason = until(&mut ends, |event| match *event {
            FabricEvent::Completed(done) => {
                told.push((done.connection, done.status));
                None
            }
            FabricEvent::Closed { connection, reason } => {
                assert_eq!(connection, bad);
                Some(reason)
            }
            _ => None,
        });
        assert_eq!(told, [(bad, CompletionStatus::LocalProtection)]);
        assert_eq!(reason, CloseReason::ReadFailed);
        assert!(bytes(&landed).iter().all(|byte| *byte == 0));

        ends[0].post(other, &read(&remote, &good)).unwrap();
        let status = until(&mut ends, |event| match *event {
            FabricEvent::Completed(done) => Some((done.connection, done.status)),
            _ => None,
        });
        assert_eq!(status, (other, CompletionStatus::Success));
        assert!(bytes(&landed) == source);
    }

    /// The kernel takes a second to find that no way leads to an address, in the call that asks it.
    #[test]
    fn a_peer_that_no_way_leads_to_keeps_no_other_one_waiting() {
        let Some([_, on_wire]) = devices() else { return };
        let mut ends = fabrics(&[on_wire]);
        let is_raising = |fabric: &mut VerbsFabric| {
            fabric.table.iter_mut().any(|(_, peer)| peer.stage == Stage::Raising)
        };
        let mut hello = Hello::new(&ends[0].nics.devices);
        // On the wire's network, and nobody's.
        hello.move_to(std::net::Ipv4Addr::new(10, 78, 0, 99).to_ipv6_mapped().octets());
        hello.lanes = 1;
        hello.receives = 8;
        let seat = Seat { nic: 0, peer: 0, reason: None };
        (0..2).for_each(|at| hello.set_pair(at, QueuePairAddress { number: 17, psn: 0 }, seat));
        let mut stranger = TcpStream::connect(ends[1].local_addr().unwrap()).unwrap();
        stranger.write_all(bytemuck::bytes_of(&hello)).unwrap();
        let end = coarse() + Duration::from_secs(20);
        while !is_raising(&mut ends[1]) {
            ends[1].poll(&mut EventBatch::default(), Duration::from_millis(1)).unwrap();
            assert!(coarse() < end, "its queue pairs are connected within a poll");
        }
        connect(&mut ends);
        while is_raising(&mut ends[1]) {
            ends[1].poll(&mut EventBatch::default(), Duration::from_millis(1)).unwrap();
            assert!(coarse() < end, "its queue pairs are connected for ever");
        }
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "it is hung up on");
    }

    #[test]
    fn strangers_that_say_nothing_shut_nobody_out() {
        let Some(mut ends) = two() else { return };
        let at = ends[1].local_addr().unwrap();
        let stranger = |trickle: usize| {
            let mut stranger = TcpStream::connect(at).unwrap();
            stranger.write_all(b"kvrailRC".get(..trickle).unwrap()).unwrap();
            stranger
        };
        let strangers: Vec<_> = (0..2).cycle().take(HANDSHAKES_MAX).map(stranger).collect();
        let end = coarse() + Duration::from_secs(20);
        while ends[1].table.iter().count() < HANDSHAKES_MAX {
            ends[1].poll(&mut EventBatch::default(), Duration::from_millis(1)).unwrap();
            assert!(coarse() < end, "they are not accepted");
        }
        connect(&mut ends);
        drop(strangers);
    }

    #[test]
    fn a_device_that_is_gone_takes_its_connections_and_the_others_carry_on() {
        let Some(mut ends) = two() else { return };
        let Scene { landed, source, remote, local } = scene(&mut ends);
        let id = connect(&mut ends);
        assert_eq!(ends[0].rails(id).len(), 2);

        ends[0].handle_device_event(0, &AsyncEvent::DeviceFatal, coarse());
        let reason = until(&mut ends, |event| match *event {
            FabricEvent::Closed { connection, reason } if connection == id => Some(reason),
            _ => None,
        });
        assert_eq!(reason, CloseReason::NicLost);

        let fresh = connect(&mut ends);
        let left = ends[0].nics.get(1).unwrap().name().to_owned();
        let rails: Vec<String> = ends[0].rails(fresh).into_iter().map(|rail| rail.local).collect();
        assert!(!rails.is_empty() && rails.iter().all(|name| *name == left), "{rails:?}");
        ends[0].post(fresh, &read(&remote, &local)).unwrap();
        let status = until(&mut ends, |event| match *event {
            FabricEvent::Completed(Completion { status, .. }) => Some(status),
            _ => None,
        });
        assert_eq!(status, CompletionStatus::Success);
        assert!(bytes(&landed) == source);

        // With the last one gone the fabric is unusable, and says so after its last event.
        ends[0].handle_device_event(1, &AsyncEvent::DeviceFatal, coarse());
        let [fabric, _] = &mut ends;
        let end = coarse() + Duration::from_secs(60);
        while fabric.poll(&mut EventBatch::default(), Duration::from_millis(1)).is_ok() {
            assert!(coarse() < end, "it goes on without a device");
        }
    }
}
