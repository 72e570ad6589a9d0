//! One connection: a socket for messages and grants, a page each way, and the READs under way.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::outbox::Outbox;
use super::page::{PeerPage, ServingPage, Standing};
use super::reads::{Ran, Reads, Source};
use super::window::Window;
use super::wire::{CANNOT, GRANT, Grant, Hello, KIND_BYTES, MESSAGE, WITHDRAWAL, Withdrawal};
use crate::fabric::{ConnectionId, EventBatch, FabricEvent, ReadBatch};
use crate::limits::REGIONS_MAX;
use crate::memory::Regions;
use crate::sys::connections::{Breakable, Broken};
use crate::sys::epoll::{Epoll, Interest, Ready};
use crate::sys::fd_passing::{self, PassedFds};
use crate::types::Timestamp;

/// Packets taken from one socket in one poll; the others wait for the next one.
const PACKETS_PER_POLL: usize = 64;

/// What a connection borrows from its fabric for one call.
pub(super) struct Context<'a> {
    pub(super) epoll: &'a Epoll,
    /// Where packets are received, one byte longer than the longest.
    pub(super) scratch: &'a mut [u8],
}

/// A region as its holder grants it.
#[derive(Debug)]
pub(super) struct Export {
    pub(super) grant: Grant,
    /// The memory file, for reading only.
    pub(super) file: OwnedFd,
}

#[derive(Debug)]
pub(super) struct Connection {
    id: ConnectionId,
    /// Whether we began it.
    dialed: bool,
    /// Whether the caller knows of it, so that its end is an event.
    announced: bool,
    deadline: Timestamp,
    socket: Option<OwnedFd>,
    armed: Interest,
    outbox: Outbox,
    /// What we serve to the peer; there once our hello is out.
    page: Option<ServingPage>,
    /// What the peer serves to us; there once it has said hello.
    peer: Option<PeerPage>,
    windows: Vec<Window>,
    reads: Reads,
    admitted: bool,
    /// Whether it is in its fabric's list of those that have READs to carry out.
    pub(super) is_queued: bool,
    broken: Option<Broken>,
}

impl Breakable for Connection {
    fn is_broken(&self) -> bool {
        self.broken.is_some()
    }
}

impl Connection {
    fn new(id: ConnectionId, socket: Option<OwnedFd>, deadline: Timestamp) -> Self {
        Self {
            id,
            dialed: false,
            announced: false,
            deadline,
            socket,
            armed: Interest::Read,
            outbox: Outbox::default(),
            page: None,
            peer: None,
            windows: Vec::new(),
            reads: Reads::default(),
            admitted: false,
            is_queued: false,
            broken: None,
        }
    }

    /// A connection that a peer began; nothing of ours is spent on it before its hello.
    pub(super) fn accepted(id: ConnectionId, socket: OwnedFd, deadline: Timestamp) -> Self {
        Self::new(id, Some(socket), deadline)
    }

    /// A connection that we begin.
    pub(super) fn dialed(id: ConnectionId, socket: OwnedFd, deadline: Timestamp) -> Self {
        Self { dialed: true, announced: true, ..Self::accepted(id, socket, deadline) }
    }

    /// A connection that could not be begun.
    pub(super) fn stillborn(id: ConnectionId, broken: Broken) -> Self {
        let (dialed, announced, broken) = (true, true, Some(broken));
        Self { dialed, announced, broken, ..Self::new(id, None, Timestamp::ZERO) }
    }

    /// Whether messages may be sent.
    pub(super) fn is_open(&self) -> bool {
        self.page.is_some() && self.peer.is_some() && !self.is_broken()
    }

    /// Whether READs may be posted.
    pub(super) fn can_post(&self) -> bool {
        self.is_open() && self.admitted
    }

    pub(super) fn has_credit(&self, reads: usize) -> bool {
        self.reads.has_credit(reads)
    }

    pub(super) fn has_reads(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Whether a message of this length can be sent.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.outbox.has_room(len)
    }

    /// Says hello, with a page of our own.
    pub(super) fn greet(&mut self) -> Result<(), Broken> {
        let made = ServingPage::new().map_err(|_no_descriptor| Broken::EXHAUSTED)?;
        let (page, file) = made;
        let socket = self.socket.as_ref().ok_or(Broken::UNREACHABLE)?;
        let hello = bytemuck::bytes_of(&Hello::OURS);
        self.outbox.notice(socket, hello, Some(file.as_fd()))?;
        self.page = Some(page);
        Ok(())
    }

    /// Lets the peer read all regions, and us post READs.
    pub(super) fn admit<'a>(
        &mut self,
        exports: impl Iterator<Item = &'a Export>,
        cx: &Context<'_>,
    ) -> Result<(), Broken> {
        if self.admitted {
            return Ok(());
        }
        self.admitted = true;
        for export in exports {
            self.grant(export)?;
        }
        if let Some(page) = &self.page {
            page.admit();
        }
        self.arm(cx.epoll)
    }

    /// Lets an admitted peer read one more region.
    pub(super) fn serve(&mut self, export: &Export, cx: &Context<'_>) -> Result<(), Broken> {
        if self.admitted {
            self.grant(export)?;
            self.arm(cx.epoll)?;
        }
        Ok(())
    }

    fn grant(&mut self, export: &Export) -> Result<(), Broken> {
        let slot = usize::try_from(export.grant.slot).unwrap_or(REGIONS_MAX);
        if let Some(page) = &self.page {
            page.serve(slot, export.grant.rkey);
        }
        self.notice(bytemuck::bytes_of(&export.grant), Some(export.file.as_fd()))
    }

    /// Takes a region back from the peer.
    pub(super) fn withdraw(&mut self, slot: u32, cx: &Context<'_>) -> Result<(), Broken> {
        if let Some(page) = self.page.as_ref().filter(|_| self.admitted) {
            page.withdraw(usize::try_from(slot).unwrap_or(REGIONS_MAX));
            let notice = Withdrawal { kind: WITHDRAWAL, slot };
            self.notice(bytemuck::bytes_of(&notice), None)?;
            self.arm(cx.epoll)?;
        }
        Ok(())
    }

    fn notice(&mut self, packet: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), Broken> {
        let socket = self.socket.as_ref().ok_or(Broken::UNREACHABLE)?;
        self.outbox.notice(socket, packet, fd)
    }

    /// Sends a message for which there is room.
    pub(super) fn send(&mut self, message: &[u8], cx: &mut Context<'_>) -> Result<(), Broken> {
        let socket = self.socket.as_ref().ok_or(Broken::UNREACHABLE)?;
        let packet = cx.scratch.get_mut(..KIND_BYTES + message.len()).ok_or(Broken::REQUESTED)?;
        let (kind, rest) = packet.split_at_mut(KIND_BYTES);
        kind.copy_from_slice(&MESSAGE.to_le_bytes());
        rest.copy_from_slice(message);
        self.outbox.message(socket, packet)?;
        self.arm(cx.epoll)
    }

    /// Queues READs for which there is credit.
    pub(super) fn post(&mut self, batch: &ReadBatch, regions: &Regions) {
        self.reads.post(batch, regions);
    }

    /// Handles a ready socket.
    pub(super) fn handle(
        &mut self,
        ready: Ready,
        cx: &mut Context<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        if ready.writable
            && let Some(socket) = &self.socket
        {
            self.outbox.flush(socket)?;
        }
        if ready.readable {
            self.receive(cx.scratch, batch)?;
        }
        self.arm(cx.epoll)
    }

    /// Takes packets. Answers whether there are no more.
    fn receive(&mut self, scratch: &mut [u8], batch: &mut EventBatch) -> Result<bool, Broken> {
        for _packet in 0..PACKETS_PER_POLL {
            let Some(socket) = &self.socket else { return Ok(true) };
            let mut fds = PassedFds::new();
            let len = match fd_passing::receive(socket, scratch, &mut fds) {
                Ok(0) => return Err(Broken::PEER_CLOSED),
                Ok(len) => len,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(true),
                    // Said once where the peer closed without taking all that we sent; what it sent
                    // can still be read.
                    io::ErrorKind::ConnectionReset => continue,
                    _ => return Err(Broken::from_packet_io(&error)),
                },
            };
            let packet = scratch.get(..len).filter(|_| len < scratch.len());
            self.take(packet.ok_or(Broken::VIOLATION)?, fds, batch)?;
        }
        Ok(false)
    }

    /// Takes one packet and the descriptors that came with it.
    fn take(
        &mut self,
        packet: &[u8],
        mut fds: PassedFds,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let fd = fds.pop();
        if !fds.is_empty() {
            return Err(Broken::VIOLATION);
        }
        if self.peer.is_none() {
            return self.take_hello(packet, fd.ok_or(Broken::VIOLATION)?, batch);
        }
        let kind = packet.first_chunk().map(|word| u32::from_le_bytes(*word));
        match (kind, fd) {
            (Some(MESSAGE), None) => {
                deliver(self.id, packet.get(KIND_BYTES..).unwrap_or_default(), batch)
            }
            (Some(GRANT), Some(file)) => self.take_grant(packet, file),
            (Some(WITHDRAWAL), None) => {
                let notice: Withdrawal = decode(packet)?;
                let slot = usize::try_from(notice.slot).map_err(|_wrong| Broken::VIOLATION)?;
                self.windows.retain(|window| window.slot != slot);
                Ok(())
            }
            (Some(CANNOT), None) => Err(Broken::EXHAUSTED),
            _ => Err(Broken::VIOLATION),
        }
    }

    fn take_hello(
        &mut self,
        packet: &[u8],
        page: OwnedFd,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        if !Hello::is_in(packet) {
            return Err(Broken::VIOLATION);
        }
        self.peer = Some(PeerPage::new(page).map_err(|_refused| Broken::VIOLATION)?);
        let connection = self.id;
        if self.dialed {
            batch.events.push(FabricEvent::Connected { connection });
        } else {
            self.greet()?;
            self.announced = true;
            batch.events.push(FabricEvent::Accepted { connection });
        }
        Ok(())
    }

    fn take_grant(&mut self, packet: &[u8], file: OwnedFd) -> Result<(), Broken> {
        let grant: Grant = decode(packet)?;
        let window = Window::new(&grant, file).map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => Broken::VIOLATION,
            // Too many mappings, or no address space.
            _ => Broken::EXHAUSTED,
        })?;
        let known = |other: &Window| other.slot == window.slot || other.rkey == window.rkey;
        if window.slot >= REGIONS_MAX || self.windows.iter().any(known) {
            return Err(Broken::VIOLATION);
        }
        self.windows.push(window);
        Ok(())
    }

    /// Carries out READs, as many bytes as the budget allows.
    pub(super) fn copy(
        &mut self,
        budget: &mut usize,
        cx: &mut Context<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let mut is_up_to_date = false;
        loop {
            let Some(page) = &self.peer else { return Ok(()) };
            let from = Source { page, windows: &self.windows };
            match self.reads.run(self.id, &from, budget, batch)? {
                Ran::Empty | Ran::Paused => return Ok(()),
                Ran::UnknownKey if is_up_to_date => {
                    return Err(self.reads.refuse(self.id, batch));
                }
                // A grant that was sent before the READ was posted is in the socket.
                Ran::UnknownKey => is_up_to_date = self.receive(cx.scratch, batch)?,
            }
            if !is_up_to_date {
                return Ok(());
            }
        }
    }

    /// Takes the messages that the peer sent before it closed, where something else than the socket's
    /// end has told that it did.
    pub(super) fn take_last_messages(&mut self, scratch: &mut [u8], batch: &mut EventBatch) {
        // The end, or an error, is known already.
        self.receive(scratch, batch).ok();
    }

    /// Watches for room in the socket where packets wait. Called after everything that may send.
    pub(super) fn arm(&mut self, epoll: &Epoll) -> Result<(), Broken> {
        let want = Interest::new(true, !self.outbox.is_empty());
        if want != self.armed
            && let Some(socket) = &self.socket
        {
            let id = super::token(self.id);
            epoll.modify(socket, id, want).map_err(|_refused| Broken::UNREACHABLE)?;
            self.armed = want;
        }
        Ok(())
    }

    /// Whether it has a deadline to meet.
    pub(super) fn is_opening(&self) -> bool {
        !self.is_open() && !self.is_broken()
    }

    /// Whether it opened in time.
    pub(super) fn check(&self, now: Timestamp) -> Result<(), Broken> {
        if self.is_opening() && now >= self.deadline {
            return Err(Broken::UNREACHABLE);
        }
        Ok(())
    }

    /// Cuts the peer off: once this returns, nothing that it copies counts, and we copy nothing more.
    pub(super) fn cut(&mut self, broken: Broken) {
        let broken = self.told(broken);
        if let Some(page) = self.page.take() {
            match broken {
                Broken::MOVED => page.move_on(),
                _ => page.cut(),
            }
        }
        if let Some(socket) = self.socket.take()
            && broken == Broken::EXHAUSTED
        {
            // So that the peer goes another way next time. Where this does not arrive it tries again.
            self.outbox.notice(&socket, &CANNOT.to_le_bytes(), None).ok();
        }
        self.broken = Some(broken);
    }

    /// What a break is, given what the peer has left in its page. It stays readable when its socket is
    /// gone, so that no word of the peer's has to arrive in time.
    fn told(&self, broken: Broken) -> Broken {
        let moved = self.peer.as_ref().is_some_and(|page| page.standing() == Standing::Moved);
        if moved && broken == Broken::PEER_CLOSED { Broken::MOVED } else { broken }
    }

    /// Ends a connection that was cut: the completions of what was outstanding, then its end.
    pub(super) fn bury(mut self, batch: &mut EventBatch) {
        let broken = self.broken.unwrap_or(Broken::REQUESTED);
        self.reads.flush(self.id, broken.first, batch);
        if self.announced {
            let (connection, reason) = (self.id, broken.reason);
            batch.events.push(FabricEvent::Closed { connection, reason });
        }
    }
}

fn decode<T: bytemuck::AnyBitPattern>(packet: &[u8]) -> Result<T, Broken> {
    bytemuck::try_pod_read_unaligned(packet).map_err(|_other_length| Broken::VIOLATION)
}

fn deliver(connection: ConnectionId, message: &[u8], batch: &mut EventBatch) -> Result<(), Broken> {
    let start = batch.bytes.len();
    // A caller that never clears its batch reaches 4 GiB; its connections break, the others' bytes
    // stay right.
    let range = u32::try_from(start).ok().zip(u32::try_from(start + message.len()).ok());
    let (start, end) = range.ok_or(Broken::REQUESTED)?;
    batch.bytes.extend_from_slice(message);
    batch.events.push(FabricEvent::Message { connection, start, end });
    Ok(())
}
