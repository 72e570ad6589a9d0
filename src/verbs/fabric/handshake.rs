//! How a connection begins: a socket on which both ends exchange their addresses, then queue pairs.
//!
//! ```text
//! connector                         acceptor
//! connect            -- TCP -->
//! Hello              -- TCP -->     its queue pairs are up
//!                    <-- TCP --     Hello
//! its queue pairs are up
//! reads the pattern  <- READ ->
//! tries its rails    -- SEND -->
//! READY              -- SEND -->
//!                    <- READ ->     reads the pattern
//!                    <-- SEND --    tries its rails
//! Connected          <-- SEND --    READY, Accepted
//! ```
//!
//! Data flows from each end to the other one before either calls the connection open, over each pair of
//! NICs that it uses, so a GID or an MTU that does not work is found here, and is said with both. A pair
//! that fails is left out ([`super::rails`]), unless messages travel over it: then the connection ends,
//! and the next one goes over another NIC where there is one. So is one of the acceptor's NICs that finds no
//! way to where it is paired. How queue pairs come up: [`super::raising`]. The socket stays open: its end is how a peer's death is noticed before any retry counter runs out.

use rustix::net::{RecvFlags, SendFlags};

use super::connection::{Connection, Stage, Surroundings};
use super::hello::{Card, HELLO_BYTES, Hello, Seat};
use super::link::Link;
use super::pairing::pair;
use super::table::Token;
use crate::fabric::{CompletionStatus, EventBatch, FabricEvent, Rail};
use crate::limits::PING_INTERVAL;
use crate::sys::connections::{Breakable, Broken};
use crate::sys::epoll::{Epoll, Interest, Ready};
use crate::sys::socket;
use crate::verbs::VerbsError;

impl Connection {
    /// Handles a ready socket.
    pub(super) fn handle_socket(
        &mut self,
        ready: Ready,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Broken> {
        if self.is_broken() {
            // The peer is gone or says what nobody reads: nothing lingers for it.
            self.socket = None;
            return Ok(());
        }
        if ready.writable && self.stage == Stage::Dialing {
            let socket = self.socket.as_ref().ok_or(Broken::UNREACHABLE)?;
            socket::connected(socket).map_err(|_refused| Broken::UNREACHABLE)?;
            let offer = self.offer(around);
            let link = Link::new(around.nics, offer, self.token().encode());
            let link = link.map_err(|error| self.exhausted(&error))?;
            self.outbox.extend_from_slice(bytemuck::bytes_of(&link.hello(around.nics)));
            self.link = Some(link);
            self.stage = Stage::Welcome;
        }
        if ready.readable && self.stage != Stage::Dialing {
            self.receive(around)?;
        }
        self.flush()?;
        self.arm(around.epoll)
    }

    /// What we offer: lanes spread over the NICs that are up, and messages on the first of them.
    fn offer(&mut self, around: &Surroundings<'_>) -> Vec<Seat> {
        let usable = around.nics.usable();
        let good = usable.iter().copied();
        let good: Vec<u8> = good.filter(|nic| !self.avoids(*nic, around)).collect();
        let from = if good.is_empty() { usable } else { good };
        self.leave_nics_out(around, |nic| !from.contains(&nic));
        let seat = |nic| Seat { nic, peer: 0, reason: None };
        let lanes = from.iter().cycle().take(around.nics.lanes.max(from.len()));
        from.iter().take(1).chain(lanes).copied().map(seat).collect()
    }

    /// What we make of a peer's offer: as many lanes as both ends have in mind, each on a NIC of ours.
    fn seats(&mut self, peer: &Hello, around: &Surroundings<'_>) -> Vec<Seat> {
        let wanted = usize::try_from(peer.lanes).unwrap_or(usize::MAX);
        let count = wanted.min(around.nics.lanes.max(peer.cards().len()));
        let lanes: Vec<u8> = (1..=count).map(|index| peer.seat(index).nic).collect();
        let theirs: Vec<_> = peer.cards().iter().map(Card::candidate).collect();
        let ours = (0..).zip(&around.nics.devices).map(|(nic, device)| {
            let mut candidate = device.candidate();
            candidate.up &= !self.avoids(nic, around);
            candidate
        });
        let ours: Vec<_> = ours.collect();
        let is_down = |nic: u8| ours.get(usize::from(nic)).is_some_and(|nic| !nic.up);
        self.leave_nics_out(around, is_down);
        let ends = pair(&lanes, &theirs, &ours);
        let mut seats: Vec<Seat> = (ends.iter().zip(&lanes))
            .map(|(&(nic, reason), &peer)| Seat { nic, peer, reason: Some(reason) })
            .collect();
        // Messages go where a lane from the same NIC goes, which may be told to only reach that one.
        let talks = peer.seat(0).nic;
        let like = seats.iter().find(|seat| seat.peer == talks).or(seats.first()).copied();
        if let Some(like) = like {
            seats.insert(0, Seat { peer: talks, ..like });
        }
        seats
    }

    fn token(&self) -> Token {
        Token::Connection(self.id)
    }

    pub(super) fn exhausted(&self, error: &VerbsError) -> Broken {
        tracing::warn!(%error, "a connection cannot be made");
        Broken::EXHAUSTED
    }

    fn flush(&mut self) -> Result<(), Broken> {
        let socket = self.socket.as_ref().ok_or(Broken::UNREACHABLE)?;
        while !self.outbox.is_empty() && self.stage != Stage::Dialing {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(socket, &self.outbox, flags) {
                Ok(count) => drop(self.outbox.drain(..count)),
                Err(error) => return tolerate(error),
            }
        }
        Ok(())
    }

    /// Watches for output where there is some.
    fn arm(&self, epoll: &Epoll) -> Result<(), Broken> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let want = Interest::new(true, !self.outbox.is_empty());
        let changed = epoll.modify(socket, self.token().encode(), want);
        changed.map_err(|_refused| Broken::UNREACHABLE)
    }

    /// Reads the peer's hello, then nothing but the end.
    fn receive(&mut self, around: &mut Surroundings<'_>) -> Result<(), Broken> {
        let socket = self.socket.as_ref().ok_or(Broken::UNREACHABLE)?;
        let mut excess = [0];
        let missing = self.inbox.get_mut(self.have..).unwrap_or_default();
        let expected = !missing.is_empty();
        let into = if expected { missing } else { &mut excess };
        match rustix::net::recv(socket, into, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(Broken::PEER_CLOSED),
            Ok(_) if !expected => return Err(Broken::VIOLATION),
            Ok((count, _)) => self.have += count,
            Err(error) => return tolerate(error),
        }
        if !Hello::may_begin(self.inbox.get(..self.have).unwrap_or_default()) {
            return Err(Broken::VIOLATION);
        }
        if self.have < HELLO_BYTES {
            return Ok(());
        }
        let peer = Hello::decode(&self.inbox).ok_or(Broken::VIOLATION)?;
        match self.stage {
            Stage::Welcome => self.take_welcome(&peer, around),
            _ => self.take_greeting(&peer, around),
        }
    }

    fn take_welcome(&mut self, peer: &Hello, around: &mut Surroundings<'_>) -> Result<(), Broken> {
        let mut link = self.link.take().ok_or(Broken::UNREACHABLE)?;
        if !link.settle(peer) {
            return Err(Broken::VIOLATION);
        }
        self.raise(link, peer, around)
    }

    fn take_greeting(&mut self, peer: &Hello, around: &mut Surroundings<'_>) -> Result<(), Broken> {
        let seats = self.seats(peer, around);
        let link = Link::new(around.nics, seats, self.token().encode());
        let link = link.map_err(|error| self.exhausted(&error))?;
        self.raise(link, peer, around)
    }

    fn raise(
        &mut self,
        link: Link,
        peer: &Hello,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Broken> {
        let ways = link.ways(around.nics, peer);
        let started = ways.and_then(|ways| around.raisers.raise(self.id, link, ways));
        started.map_err(|error| self.exhausted(&error))?;
        self.stage = Stage::Raising;
        Ok(())
    }

    /// Our queue pairs are connected to the peer's, or cannot be.
    pub(super) fn take_raised(
        &mut self,
        mut link: Link,
        outcome: Result<(), (u8, VerbsError)>,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Broken> {
        if self.is_broken() {
            return Ok(());
        }
        let peer = Hello::decode(&self.inbox).ok_or(Broken::VIOLATION)?;
        if let Err((nic, error)) = outcome {
            drop(link);
            return self.leave_out(nic, &error, &peer, around);
        }
        if link.queues.iter().any(|queue| around.nics.is_lost(queue.nic)) {
            return Err(Broken::NIC_LOST);
        }
        link.lay_out(around.nics, &peer).map_err(|error| self.exhausted(&error))?;
        if self.announced {
            self.link = Some(link);
            self.start_probes(around).map_err(|error| self.exhausted(&error))?;
        } else {
            self.outbox.extend_from_slice(bytemuck::bytes_of(&link.hello(around.nics)));
            self.link = Some(link);
            self.stage = Stage::Ready;
        }
        self.met(&peer, around);
        self.flush()?;
        self.arm(around.epoll)
    }

    /// A NIC of ours has no way to where it is paired. It is left out, here and for a while, as long as
    /// another one can take its place.
    fn leave_out(
        &mut self,
        nic: u8,
        error: &VerbsError,
        peer: &Hello,
        around: &mut Surroundings<'_>,
    ) -> Result<(), Broken> {
        let path = self.path(nic).filter(|path| !around.avoided.contains(path, around.now));
        // A connector has made its offer: its next attempt goes over another NIC, where there is one.
        let replaced = !self.announced && around.nics.has_other(nic);
        let Some(path) = path.filter(|_| self.announced || replaced) else {
            return Err(self.exhausted(error));
        };
        around.avoided.add(path, around.now);
        if !replaced {
            return Err(self.exhausted(error));
        }
        tracing::warn!(%error, "a NIC is left out of a connection");
        self.take_greeting(peer, around)
    }

    /// Both ends know where their queue pairs are.
    fn met(&mut self, peer: &Hello, around: &Surroundings<'_>) {
        self.peer_nics = peer.cards().len();
        if let Some(link) = &self.link
            && (self.peer_nics > 1 || around.nics.devices.len() > 1)
        {
            let pair = |rail: Rail| format!("{} = {} ({})", rail.local, rail.remote, rail.reason);
            let pairs: Vec<String> = link.told(around.nics).into_iter().map(pair).collect();
            let pairs = pairs.join(", ");
            tracing::info!(peer = ?self.address, lanes = link.lanes.len(), pairs, "NICs paired");
        }
    }

    /// The READ of the peer's pattern has ended.
    pub(super) fn take_probe(
        &mut self,
        slot: u8,
        status: CompletionStatus,
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        let arrived = link.messages.probed(slot) && status == CompletionStatus::Success;
        if self.broken.is_some() || self.stage != Stage::Probe {
            return Ok(());
        }
        if !arrived {
            return Err(Broken::UNREACHABLE);
        }
        link.is_proven = true;
        self.end_probes(around, batch)
    }

    /// The peer has read our pattern, and says which lanes work.
    pub(super) fn take_ready(
        &mut self,
        working: u32,
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        self.keep_lanes(working, around)?;
        if self.announced {
            self.open(batch);
            return Ok(());
        }
        self.start_probes(around).map_err(|error| self.exhausted(&error))
    }

    /// The connection is up.
    pub(super) fn open(&mut self, batch: &mut EventBatch) {
        let connection = self.id;
        batch.events.push(match self.announced {
            false => FabricEvent::Accepted { connection },
            true => FabricEvent::Connected { connection },
        });
        self.announced = true;
        self.stage = Stage::Open;
        if let Some(socket) = &self.socket {
            // Without it an idle peer's death is noticed at the next message.
            socket::keep_alive(socket, PING_INTERVAL).ok();
        }
    }
}

/// What an error of a socket means. A reset is how TCP tells of a close with bytes under way.
fn tolerate(error: rustix::io::Errno) -> Result<(), Broken> {
    use rustix::io::Errno;
    match error {
        Errno::AGAIN | Errno::INTR => Ok(()),
        Errno::CONNRESET | Errno::PIPE => Err(Broken::PEER_CLOSED),
        _ => Err(Broken::UNREACHABLE),
    }
}
