//! Packets on their way out: to the socket at once, or into a queue while the peer does not drain it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::wire::{KIND_BYTES, PACKET_BYTES_MAX};
use crate::limits::REGIONS_MAX;
use crate::sys::connections::Broken;
use crate::sys::fd_passing;

/// Bytes of messages that wait for a peer which does not drain them: eight of the largest.
const QUEUE_BYTES_MAX: usize = 8 * PACKET_BYTES_MAX;

/// Grants and withdrawals that wait: all regions, gone and granted once more.
const QUEUE_NOTICES_MAX: usize = 2 * REGIONS_MAX;

#[derive(Debug)]
struct Packet {
    bytes: Vec<u8>,
    fd: Option<OwnedFd>,
}

#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: VecDeque<Packet>,
    message_bytes: usize,
    notices: usize,
}

impl Outbox {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether a message of this length can be sent or queued.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.message_bytes + KIND_BYTES + len <= QUEUE_BYTES_MAX
    }

    /// Sends or queues a packet with a message for which there is room.
    pub(super) fn message(&mut self, socket: &OwnedFd, packet: &[u8]) -> Result<(), Broken> {
        if !self.try_send(socket, packet, None)? {
            self.message_bytes += packet.len();
            self.queue.push_back(Packet { bytes: packet.to_vec(), fd: None });
        }
        Ok(())
    }

    /// Sends or queues a packet of the fabric's own, perhaps with a descriptor. They are as many as
    /// the regions; a peer that takes none of more than that has stopped.
    pub(super) fn notice(
        &mut self,
        socket: &OwnedFd,
        packet: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Broken> {
        if self.try_send(socket, packet, fd)? {
            return Ok(());
        }
        if self.notices >= QUEUE_NOTICES_MAX {
            return Err(Broken::UNREACHABLE);
        }
        let fd = fd.map(|fd| fd.try_clone_to_owned()).transpose();
        let fd = fd.map_err(|_no_descriptor| Broken::EXHAUSTED)?;
        self.notices += 1;
        self.queue.push_back(Packet { bytes: packet.to_vec(), fd });
        Ok(())
    }

    /// Sends what waits, as far as the socket takes it.
    pub(super) fn flush(&mut self, socket: &OwnedFd) -> Result<(), Broken> {
        while let Some(packet) = self.queue.front() {
            if !send(socket, &packet.bytes, packet.fd.as_ref().map(AsFd::as_fd))? {
                return Ok(());
            }
            self.queue.pop_front();
        }
        (self.message_bytes, self.notices) = (0, 0);
        Ok(())
    }

    /// Sends a packet unless others wait before it.
    fn try_send(
        &self,
        socket: &OwnedFd,
        packet: &[u8],
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<bool, Broken> {
        if self.is_empty() { send(socket, packet, fd) } else { Ok(false) }
    }
}

/// Sends one packet. `false` where the socket has no room now.
fn send(socket: &OwnedFd, packet: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<bool, Broken> {
    match fd_passing::send(socket, packet, fd.as_slice()) {
        Ok(_whole) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(Broken::from_packet_io(&error)),
    }
}

impl Broken {
    /// What a socket's error means on a connection that was up.
    pub(super) fn from_packet_io(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Self::PEER_CLOSED,
            // More descriptors than a packet of ours has, or than this process may have open.
            io::ErrorKind::InvalidData => Self::VIOLATION,
            _ => Self::UNREACHABLE,
        }
    }
}
