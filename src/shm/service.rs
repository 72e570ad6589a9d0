//! What a fabric does inside its polls: sockets, copies, deadlines.

use rustix::io::Errno;

use super::connection::Connection;
use super::{LISTENER, SWEEP, ShmFabric, WAKE, connection_of, token};
use crate::fabric::{ConnectionId, EventBatch};
use crate::limits::HANDSHAKES_MAX;
use crate::sys::epoll::{Interest, Ready};
use crate::sys::local_socket;
use crate::types::Timestamp;

/// Bytes copied in one poll: some 30 µs, which nothing else of the thread notices.
const BYTES_PER_POLL: usize = 256 << 10;

/// Connections accepted in one poll; the others wait in the kernel's queue.
const ACCEPTS_PER_POLL: usize = 16;

impl ShmFabric {
    /// Handles a ready descriptor.
    pub(super) fn handle(&mut self, ready: Ready, now: Timestamp, batch: &mut EventBatch) {
        match ready.token {
            LISTENER => self.accept(now),
            // Nothing to take means that it was taken already.
            WAKE => {
                self.wake.0.drain().ok();
            }
            other => self.with(connection_of(other), Some(batch), |connection, cx, batch| {
                connection.handle(ready, cx, batch)
            }),
        }
    }

    fn accept(&mut self, now: Timestamp) {
        for _accept in 0..ACCEPTS_PER_POLL {
            let Some(listener) = &self.listener else { return };
            let socket = match local_socket::accept(listener) {
                Ok(Some(socket)) => socket,
                Ok(None) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                    self.pause(true);
                    return;
                }
                // The peer of this one has gone already.
                Err(_) => continue,
            };
            let opening = self.table.iter_mut().filter(|(_, peer)| peer.is_opening()).count();
            if opening >= HANDSHAKES_MAX || !local_socket::is_of_this_user(&socket) {
                continue;
            }
            let Ok(id) = self.table.reserve() else { continue };
            if self.epoll.add(&socket, token(id), Interest::Read).is_err() {
                self.table.release(id);
                continue;
            }
            let deadline = now + self.handshake_timeout;
            self.table.put(id, Connection::accepted(id, socket, deadline));
        }
    }

    /// Stops or restarts accepting: without a free descriptor a waiting connection would make every
    /// wait return at once.
    fn pause(&mut self, paused: bool) {
        let Some(listener) = &self.listener else { return };
        let want = Interest::new(!paused, false);
        if self.epoll.modify(listener, LISTENER, want).is_ok() {
            self.paused = paused;
        }
    }

    /// Carries out READs, of one connection after the other.
    pub(super) fn copy(&mut self, batch: &mut EventBatch) {
        let mut budget = BYTES_PER_POLL;
        for _turn in 0..self.queued.len() {
            if budget == 0 {
                return;
            }
            let Some(id) = self.queued.pop_front() else { return };
            self.with(id, Some(batch), |connection, cx, batch| {
                connection.is_queued = false;
                connection.copy(&mut budget, cx, batch)
            });
            self.queue(id);
        }
    }

    /// Notes that a connection has READs to carry out, where it has.
    pub(super) fn queue(&mut self, id: ConnectionId) {
        if let Some(connection) = self.table.get(id)
            && connection.has_reads()
            && !connection.is_queued
        {
            connection.is_queued = true;
            self.queued.push_back(id);
        }
    }

    /// Checks all deadlines.
    pub(super) fn sweep(&mut self, now: Timestamp) {
        self.next_sweep = now + SWEEP;
        if self.paused {
            self.pause(false);
        }
        for (id, connection) in self.table.whole_mut() {
            if let Err(broken) = connection.check(now) {
                connection.cut(broken);
                self.dying.push(id);
            }
        }
    }
}
