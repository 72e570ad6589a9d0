//! What the peer core wants done: messages to send, connections to open, admit and close.

use std::collections::VecDeque;

use super::windows::Run;
use crate::event::EventSink;
use crate::fabric::{ConnectionId, RemoteSpan, WindowId};
use crate::protocol::{HashEntry, LoanEntry, Message};
use crate::types::{BlockHash, NamespaceId, NodeId, RequestId, Timestamp};

/// Something for the fabric to do, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Connect to this node, and answer with [`super::Peers::handle_connecting`].
    Connect {
        /// The node.
        node: NodeId,
    },
    /// Say whether a connection goes over more NICs than another one, by
    /// [`super::Peers::handle_compared`].
    Compare {
        /// The new one, which the fabric has connected.
        connection: ConnectionId,
        /// The one whose place it is to take.
        than: ConnectionId,
    },
    /// Let the peer read.
    Admit {
        /// Through which connection.
        connection: ConnectionId,
    },
    /// Give the peer a key to a span that a message lends, and write it into that message by
    /// [`super::Peers::handle_granted`]. The message follows.
    Grant {
        /// On which connection.
        connection: ConnectionId,
        /// By which window.
        window: WindowId,
        /// To what: loans next to each other.
        span: RemoteSpan,
        /// First byte of the message.
        start: usize,
        /// One past its last byte.
        end: usize,
    },
    /// End the key of a window; [`crate::fabric::FabricEvent::Revoked`] answers.
    Revoke {
        /// On which connection.
        connection: ConnectionId,
        /// Which window.
        window: WindowId,
    },
    /// Send a message: the bytes `start..end` of [`super::Peers::message`].
    Send {
        /// On which connection.
        connection: ConnectionId,
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
    },
    /// Break a connection.
    Close {
        /// Which.
        connection: ConnectionId,
    },
}

/// What one round of the peer core works with.
pub(super) struct Context<'a, L> {
    pub(super) landing: &'a mut L,
    pub(super) outbox: &'a mut Outbox,
    pub(super) sink: &'a dyn EventSink,
    pub(super) now: Timestamp,
}

/// Outputs and the bytes of the messages among them. Both keep their memory from one round of the
/// data thread to the next, so that answering a lend allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    outputs: VecDeque<Output>,
    bytes: Vec<u8>,
    hashes: Vec<HashEntry>,
    pub(super) loans: Vec<LoanEntry>,
}

impl Outbox {
    pub(super) fn push(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    pub(super) fn send(&mut self, connection: ConnectionId, message: &Message<'_>) {
        let start = self.bytes.len();
        message.encode(&mut self.bytes);
        self.outputs.push_back(Output::Send { connection, start, end: self.bytes.len() });
    }

    /// Sends a lease whose loans get keys of their own first.
    pub(super) fn send_granted(
        &mut self,
        connection: ConnectionId,
        message: &Message<'_>,
        runs: &[Run],
    ) {
        let start = self.bytes.len();
        message.encode(&mut self.bytes);
        let end = self.bytes.len();
        self.outputs.extend(runs.iter().map(|run| {
            let &Run { window, span } = run;
            Output::Grant { connection, window, span, start, end }
        }));
        self.outputs.push_back(Output::Send { connection, start, end });
    }

    pub(super) fn bytes_mut(&mut self, start: usize, end: usize) -> &mut [u8] {
        self.bytes.get_mut(start..end).unwrap_or_default()
    }

    pub(super) fn lend(
        &mut self,
        connection: ConnectionId,
        request: RequestId,
        namespace: NamespaceId,
        hashes: &[BlockHash],
    ) {
        let mut entries = std::mem::take(&mut self.hashes);
        entries.clear();
        entries.extend(hashes.iter().copied().map(HashEntry::from));
        self.send(connection, &Message::Lend { request, namespace, hashes: &entries });
        self.hashes = entries;
    }

    /// The next output. The bytes that it names stay until the last output was taken.
    pub(super) fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.outputs.is_empty()
    }

    /// All outputs were carried out: their bytes may go.
    pub(super) fn clear_sent(&mut self) {
        if self.outputs.is_empty() {
            self.bytes.clear();
        }
    }

    pub(super) fn bytes(&self, start: usize, end: usize) -> &[u8] {
        self.bytes.get(start..end).unwrap_or_default()
    }
}
