//! Peers: who is connected, what is lent to whom, what is fetched from whom. Sans-IO.
//!
//! [`Peers`] takes the events of a fabric, commands and the time, and answers with [`Output`]s for
//! the fabric to carry out, READs to post and fetches that are over. It is driven by one data thread
//! and answers a lend within the event that brought it: no hop to another thread, no lock of its
//! own, and no allocation once its buffers have grown.
//!
//! - [`handshake`](self::handshake) brings connections up, [`closing`](self::closing) takes them down.
//! - [`holder`](self::holder) lends: leases, their expiry, the rank steps of completions;
//!   [`withdrawing`](self::withdrawing) ends that for residents whose memory is taken back.
//! - [`widening`](self::widening) replaces a connection that lost a NIC by one that has it again.
//! - [`requester`](self::requester) borrows: lend, read, complete, publish.
//!
//! **One connection per node.** A new one replaces the old, which is closed and drained first; of two
//! that are made at once the one that the lower [`NodeId`] opened stays. So "cut a requester's
//! access" (invariant 2) is to close one connection and wait for its end, or to end the keys of its
//! expired leases where leases have keys of their own.
#![forbid(unsafe_code)]

mod asked;
mod care;
mod closing;
mod connection;
mod fetch;
mod handshake;
mod holder;
mod landing;
mod layouts;
mod lending;
mod outbox;
mod pressure;
mod probe;
mod requester;
mod requesters;
mod settle;
mod silence;
mod stall;
mod widening;
mod windows;
mod withdrawing;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub use fetch::{FetchId, FetchOutcome, FetchRequest, Fetched, Wish};
pub use landing::{Landing, LentLayout, Published, Settled};
pub use outbox::Output;
pub use pressure::Pressure;
pub use requester::RequesterConfig;
pub use withdrawing::WithdrawalId;

use crate::event::{Event, EventSink, LendRefusal};
use crate::fabric::{
    Capabilities, CompletionStatus, ConnectionId, FabricEvent, ReadBatch, RemoteSpan,
};
use crate::health::{BreakerConfig, Health};
use crate::lease::{LeaseConfig, LeaseConfigError, Usage};
use crate::limits;
use crate::protocol::{
    DecodeError, GoodbyeReason, Loan, Message, RegionEntry, RejectReason, SecretKey, decode,
    set_loan_keys,
};
use crate::store::Store;
use crate::transfer::Transfers;
use crate::types::{Load, NodeEpoch, NodeId, RequesterId, Scope, Timestamp};
use asked::{handle_asked, load_of};
use connection::{Connection, State};
use fetch::{Granted, Violation};
use holder::Holder;
use outbox::{Context, Outbox};
use requester::Requester;
use requesters::Requesters;
use widening::Widenings;

/// This node, as it introduces itself.
#[derive(Debug, Clone)]
pub struct LocalNode {
    /// Its identity.
    pub node: NodeId,
    /// This start of it.
    pub epoch: NodeEpoch,
    /// The identity under which it reads.
    pub requester: RequesterId,
    /// The cluster's key.
    pub secret: SecretKey,
    /// What it lends from.
    pub regions: Vec<RegionEntry>,
    /// Random, new at each start: the handshakes' nonces derive from it.
    pub nonce_seed: [u8; 32],
}

/// How a node lends and borrows.
#[derive(Debug, Clone, Copy)]
pub struct PeerConfig {
    /// As a holder.
    pub lease: LeaseConfig,
    /// As a requester.
    pub requester: RequesterConfig,
    /// When readers of this node hold back.
    pub pressure: Pressure,
    /// When others are left alone.
    pub breaker: BreakerConfig,
}

/// What one requester holds of this node now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseUsage {
    /// Who.
    pub requester: RequesterId,
    /// What.
    pub usage: Usage,
}

/// All peers of one data thread.
#[derive(Debug)]
pub struct Peers<L: Landing> {
    local: LocalNode,
    nonces: u64,
    sink: Arc<dyn EventSink>,
    connections: BTreeMap<ConnectionId, Connection>,
    /// Nodes that the fabric was asked to connect to and has not answered for.
    dialing: Vec<NodeId>,
    requesters: Requesters,
    holder: Holder,
    requester: Requester<L>,
    outbox: Outbox,
    health: Health,
    widening: Widenings,
    /// The load that [`Landing::note_load`] was last given.
    told: Option<Load>,
    /// When it was last looked who is silent.
    looked: Timestamp,
    draining: bool,
}

impl<L: Landing> Peers<L> {
    /// Peers of a node that lends out of `store`.
    ///
    /// # Errors
    /// [`LeaseConfigError`]; [`LeaseConfigError::Margin`] where no lease would leave time to read.
    pub fn new(
        local: LocalNode,
        config: PeerConfig,
        capabilities: Capabilities,
        store: Arc<Store>,
        sink: Arc<dyn EventSink>,
    ) -> Result<Self, LeaseConfigError> {
        let (ttl, margin) = (config.lease.ttl, config.requester.lease_margin);
        if margin * 2 >= ttl {
            return Err(LeaseConfigError::Margin { ttl, margin });
        }
        let transfers = Transfers::new(capabilities);
        Ok(Self {
            requester: Requester::new(config.requester, local.epoch, transfers),
            holder: Holder::new(
                (config.lease, config.pressure, capabilities.windows),
                store,
                Arc::clone(&sink),
            )?,
            local,
            nonces: 0,
            sink,
            connections: BTreeMap::new(),
            dialing: Vec::new(),
            requesters: Requesters::default(),
            outbox: Outbox::default(),
            health: Health::new(config.breaker),
            widening: Widenings::default(),
            told: None,
            looked: Timestamp::ZERO,
            draining: false,
        })
    }

    /// Takes a fetch. [`Self::poll_fetched`] answers it.
    pub fn fetch(&mut self, request: FetchRequest, now: Timestamp) {
        let node = request.node;
        if let Err(suspended) = self.health.ask(node, now) {
            return self.requester.refuse(request, suspended, now);
        }
        let up = self.lends_on(node);
        let held = self.health.paused(node, now);
        if held.is_some() {
            self.sink.emit(Event::PauseObeyed);
        }
        if !self.requester.is_asking() {
            // What is answered within one look costs none.
            self.looked = now;
        }
        self.requester.fetch(request, (up, held), &mut self.outbox, now);
        if up.is_none() && self.requester.waits_for(node) {
            self.dial(node);
        }
    }

    /// Takes an event of the fabric; `bytes` are those of a message event, else empty.
    pub fn handle_event(
        &mut self,
        event: FabricEvent,
        bytes: &[u8],
        landing: &mut L,
        now: Timestamp,
    ) {
        match event {
            FabricEvent::Accepted { connection } => {
                self.connections.insert(connection, Connection::new(State::Accepted, now));
            }
            FabricEvent::Connected { connection } => self.handle_connected(connection, now),
            FabricEvent::Message { connection, .. } => {
                self.handle_message(connection, bytes, landing, now);
            }
            FabricEvent::Completed(completion) => {
                if let Some(connection) = self.connections.get_mut(&completion.connection) {
                    connection.heard = now;
                }
                match completion.status {
                    CompletionStatus::LocalProtection => {
                        self.health.handle_own_fault(completion.path.local, now);
                    }
                    CompletionStatus::Success => {
                        self.health.handle_own_success(completion.path.local, now);
                    }
                    _ => {}
                }
                self.requester.handle_completion(&completion, &*self.sink, now);
                self.break_and_settle(Scope::Path, landing, now);
            }
            FabricEvent::Revoked { connection, window } => {
                self.holder.handle_revoked(connection, window);
                self.finish_cuts(landing, now);
            }
            FabricEvent::Closed { connection, reason } => {
                self.handle_closed(connection, reason, landing, now);
            }
        }
        self.tend(landing, now);
    }

    fn handle_message(&mut self, on: ConnectionId, bytes: &[u8], landing: &mut L, now: Timestamp) {
        let Some(connection) = self.connections.get_mut(&on) else {
            return;
        };
        connection.heard = now;
        let message = match decode(bytes) {
            Ok(message) => message,
            Err(DecodeError::Version { .. }) if connection.is_shaking_hands() => {
                return self.reject(on, RejectReason::Version);
            }
            Err(_) => return self.handle_violation(on),
        };
        let result = match &mut connection.state {
            State::Up { .. } => self.handle_up_message(on, message, landing, now),
            State::Proven { held, .. } => {
                let waiting: usize = held.iter().map(Vec::len).sum();
                if waiting + bytes.len() > handshake::HELD_BYTES_MAX {
                    return self.close(on, Scope::Local);
                }
                held.push(bytes.to_vec());
                // Whoever says something on it has moved on from the one before it.
                connection.beside.iter_mut().for_each(|beside| beside.is_used = true);
                Ok(())
            }
            State::Closing { .. } => Ok(()),
            _ => self.handle_handshake(on, message, landing, now),
        };
        if result.is_err() {
            self.handle_violation(on);
        }
    }

    fn handle_up_message(
        &mut self,
        on: ConnectionId,
        message: Message<'_>,
        landing: &mut L,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let found = self.connections.get_mut(&on).map(|found| &mut found.state);
        let Some(State::Up { remote }) = found else {
            return Ok(());
        };
        if let Message::Layout { number, blocks, regions, tensors } = message {
            return remote.layouts.hear((number, blocks), regions, tensors);
        }
        let (outbox, sink) = (&mut self.outbox, &*self.sink);
        let cx = &mut Context { landing, outbox, sink, now };
        if let Some(load) = load_of(&message) {
            self.health.handle_load(remote.node, load, now);
        }
        match message {
            Message::Lease { request, lease, ttl_ms, loans, .. } => {
                let ttl = Duration::from_millis(ttl_ms.into());
                let leaves = Loan::Busy(LendRefusal::Draining);
                if loans.iter().any(|entry| entry.loan() == leaves) {
                    self.health.handle_leaving(remote.node, now);
                }
                let (connection, health) = (on, &self.health);
                let (regions, layouts) = (&remote.regions, &remote.layouts);
                let granted =
                    Granted { connection, request, lease, ttl, loans, regions, layouts, health };
                self.requester.handle_lease(&granted, cx)?;
            }
            Message::Renewed { lease, ttl_ms, .. } => {
                self.requester.handle_renewed(on, lease, Duration::from_millis(ttl_ms.into()));
            }
            Message::Ranks { lease, ranks, .. } => {
                self.requester.handle_ranks(on, lease, ranks, cx.landing);
            }
            Message::Pong { token, .. } => {
                self.requester.handle_pong((on, token), &remote.regions, cx);
            }
            Message::Goodbye { reason: GoodbyeReason::Shutdown } => {
                self.health.handle_leaving(remote.node, now);
                self.close(on, Scope::Peer);
            }
            // An acceptor may refuse what follows from our proof when we are up already.
            Message::Goodbye { .. } | Message::Reject { .. } => self.close(on, Scope::Peer),
            Message::Widen => self.widening.ask(remote.node, now),
            Message::Hello(_)
            | Message::Beside(_)
            | Message::Welcome { .. }
            | Message::Confirm { .. }
            | Message::Layout { .. } => return Err(Violation),
            asked => handle_asked(&mut self.holder, remote, asked, cx),
        }
        Ok(())
    }

    /// Deadlines: of fetches, leases, handshakes and silent peers.
    pub fn handle_timeout(&mut self, landing: &mut L, now: Timestamp) {
        self.requester.handle_timeout(&mut self.outbox, &*self.sink, now);
        self.check_answers(now);
        self.resume_held(now);
        self.break_and_settle(Scope::Path, landing, now);
        self.lend_parked(landing, now);
        self.check_silence(now);
        self.check_rest(now);
        self.expire_withdrawn(now);
        self.cut_overdue(now);
        self.cut_expired(now);
        self.finish_cuts(landing, now);
        self.begin_probes(now);
        self.tend(landing, now);
    }

    /// Lends of ours whose blocks have become ready.
    fn lend_parked(&mut self, landing: &mut L, now: Timestamp) {
        let connections = &self.connections;
        let remote = |on| match connections.get(&on).map(|found| &found.state) {
            Some(State::Up { remote }) => Some(remote),
            _ => None,
        };
        let (outbox, sink) = (&mut self.outbox, &*self.sink);
        self.holder.handle_parked(remote, &mut Context { landing, outbox, sink, now });
    }

    /// Lends whose holder's pause is over.
    fn resume_held(&mut self, now: Timestamp) {
        let (connections, widening) = (&self.connections, &self.widening);
        self.requester.resume(|node| widening.lends_on(connections, node), &mut self.outbox, now);
    }

    fn break_and_settle(&mut self, scope: Scope, landing: &mut L, now: Timestamp) {
        while let Some(connection) = self.requester.poll_break() {
            self.close(connection, scope);
        }
        self.settle(landing, now);
    }

    fn settle(&mut self, landing: &mut L, now: Timestamp) {
        let (outbox, sink) = (&mut self.outbox, &*self.sink);
        self.requester.settle(&mut Context { landing, outbox, sink, now });
    }

    /// The next thing for the fabric to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        let output = self.outbox.poll();
        if output.is_none() {
            self.outbox.clear_sent();
        }
        output
    }

    /// Whether [`Self::poll_output`] has something.
    #[must_use]
    pub fn has_output(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Unpins what a fetch made ready and nobody wants.
    pub fn release(&self, fetched: &Fetched) {
        for outcome in &fetched.outcomes {
            if let FetchOutcome::Ready { found, .. } = outcome {
                self.holder.release(found.id);
            }
        }
    }

    /// The bytes of an [`Output::Send`], until [`Self::poll_output`] answers `None`.
    #[must_use]
    pub fn message(&self, start: usize, end: usize) -> &[u8] {
        self.outbox.bytes(start, end)
    }

    /// The key of an [`Output::Grant`].
    pub fn handle_granted(&mut self, span: &RemoteSpan, (start, end): (usize, usize), key: u32) {
        set_loan_keys(self.outbox.bytes_mut(start, end), span, key);
    }

    /// A message could not be sent, or no key given: its peer does not drain what we say, so the connection ends.
    pub fn handle_send_refused(&mut self, connection: ConnectionId, scope: Scope) {
        self.close(connection, scope);
    }

    /// Fills `batch` with READs to post on the connection that is answered.
    pub fn poll_post(&mut self, batch: &mut ReadBatch) -> Option<ConnectionId> {
        self.requester.poll_post(batch)
    }

    /// The fabric posted nothing of this batch.
    pub fn handle_post_refused(
        &mut self,
        connection: ConnectionId,
        batch: &ReadBatch,
        scope: Scope,
    ) {
        self.requester.handle_post_refused(connection, batch, scope);
    }

    /// A fetch that is over.
    pub fn poll_fetched(&mut self) -> Option<Fetched> {
        let mut fetched = self.requester.poll_fetched()?;
        fetched.load = self.health.load(fetched.node);
        fetched.suspended = self.health.suspended(fetched.node);
        Some(fetched)
    }

    /// When [`Self::handle_timeout`] must be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let pings = self.connections.values().filter_map(|connection| match connection.state {
            State::Up { .. } => {
                Some(connection.heard.max(connection.pinged) + limits::PING_INTERVAL)
            }
            // Its end is for the fabric to tell.
            State::Closing { .. } => None,
            _ => Some(connection.opened + limits::HANDSHAKE_TIMEOUT),
        });
        let probes = if self.draining { None } else { self.health.poll_timeout() };
        let requester = self.requester.poll_timeout().into_iter().chain(self.next_look());
        let requester = requester.chain(self.rest_ends());
        pings.chain(requester).chain(self.holder.poll_timeout()).chain(probes).min()
    }

    /// No new leases and connections from now on; those that run go on.
    pub fn drain(&mut self) {
        self.draining = true;
        self.holder.drain();
    }

    /// Fetches that are not over, and transfers whose memory may still be written to.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.requester.unfinished()
    }
}
