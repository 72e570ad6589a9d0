//! Accepted sockets that have not said yet what they are.
//!
//! Each one has a fixed buffer of one preamble and a deadline, and there is a limit to their number, at
//! which the oldest makes way: a peer says what it is at once, so that one has most likely nothing to say.
//! Silence, garbage and trickle cost this table a slot for a while, and nothing else anything.

use std::os::fd::{AsFd, OwnedFd};

use rustix::net::RecvFlags;

use super::wire::{PREAMBLE_BYTES, Preamble};
use crate::limits::HANDSHAKES_MAX;
use crate::types::Timestamp;

#[derive(Debug)]
struct Arrival {
    number: u32,
    socket: OwnedFd,
    bytes: [u8; PREAMBLE_BYTES],
    have: usize,
    deadline: Timestamp,
}

/// What a read of an arrival's preamble found.
#[derive(Debug)]
pub(super) enum Greeting {
    /// More must arrive.
    Incomplete,
    /// The whole preamble, and the socket, which has left the table.
    Complete(Preamble, OwnedFd),
    /// The end, an error, or not ours; the socket is closed.
    Refused,
}

/// The table.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// The oldest first.
    list: Vec<Arrival>,
    next: u32,
}

impl Arrivals {
    #[cfg(test)]
    pub(super) fn is_full(&self) -> bool {
        self.list.len() >= HANDSHAKES_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Takes a socket in; answers its number. Where there are too many, the oldest one is closed.
    pub(super) fn add(&mut self, socket: OwnedFd, deadline: Timestamp) -> u32 {
        if self.list.len() >= HANDSHAKES_MAX {
            self.list.remove(0);
        }
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.list.push(Arrival { number, socket, bytes: [0; PREAMBLE_BYTES], have: 0, deadline });
        number
    }

    /// The socket of a number, to watch it.
    pub(super) fn socket(&self, number: u32) -> Option<&OwnedFd> {
        let mut list = self.list.iter();
        let arrival = list.find(|arrival| arrival.number == number)?;
        Some(&arrival.socket)
    }

    /// Reads what is missing of a preamble, and not a byte more: the rest belongs to others.
    pub(super) fn receive(&mut self, number: u32) -> Greeting {
        let mut list = self.list.iter();
        let Some(index) = list.position(|arrival| arrival.number == number) else {
            return Greeting::Incomplete;
        };
        let Some(arrival) = self.list.get_mut(index) else {
            return Greeting::Incomplete;
        };
        let missing = arrival.bytes.get_mut(arrival.have..).unwrap_or_default();
        match rustix::net::recv(arrival.socket.as_fd(), missing, RecvFlags::DONTWAIT) {
            Ok((count, _)) if count > 0 => arrival.have += count,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            _ => {
                self.list.remove(index);
                return Greeting::Refused;
            }
        }
        if arrival.have < PREAMBLE_BYTES {
            return Greeting::Incomplete;
        }
        let arrival = self.list.remove(index);
        match Preamble::decode(&arrival.bytes) {
            Some(preamble) => Greeting::Complete(preamble, arrival.socket),
            None => Greeting::Refused,
        }
    }

    /// Closes those whose time is up.
    pub(super) fn sweep(&mut self, now: Timestamp) {
        self.list.retain(|arrival| arrival.deadline > now);
    }
}
