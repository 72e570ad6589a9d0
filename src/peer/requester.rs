//! The requester's side of DESIGN §4: lend, read, complete, publish.
//!
//! A fetch asks one owner for up to [`limits::LEND_BLOCKS_MAX`] blocks and becomes one lease. Its
//! phases follow each other without a way back:
//!
//! ```text
//! Waiting --connection up--> Lending --Lease--> Reading --last completion--> Completing --Ranks--> done
//!    |                          |                  |                             |
//!    '--- no connection --------'-- closed, late --'---- closed, late -----------'-> done, by the loans' ranks
//! ```
//!
//! The deadline of a lease counts from **before** its request (or renewal) was sent, less a margin
//! (invariant 3). A completion whose answer was lost is sent again over the next connection to that
//! node, so that the holder's rank moves once whatever happened to the first one (invariant 7).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::fetch::{
    Fetch, FetchOutcome, FetchRequest, Fetched, Granted, Phase, Scratch, Violation,
};
use super::landing::Landing;
use super::outbox::{Context, Outbox};
use super::probe::Probes;
use super::settle::{Replay, Settling, owe};
use super::silence::Asked;
use crate::event::{BusyReason, Event, EventSink, LendRefusal};
use crate::fabric::{Completion, CompletionStatus, ConnectionId, ReadBatch};
use crate::health::{Cause, Suspended, Verdict};
use crate::limits;
use crate::protocol::{AbortReason, Message, Outcomes};
use crate::transfer::{FinishedBlock, Transfers};
use crate::types::{LeaseId, NodeEpoch, NodeId, Paths, RequestId, Scope, Timestamp};

/// Deadlines of a requester.
#[derive(Debug, Clone, Copy)]
pub struct RequesterConfig {
    /// How long before the holder's deadline a lease is no longer used. Covers the difference in
    /// rate of two clocks over one lease, and the time a posted READ takes to leave the NIC.
    pub lease_margin: Duration,
    /// The longest that READs of one lease may take, as long as nothing is known of the holder's rate.
    /// Once there is a measure, a transfer has a floor of 2 s and ten times what its bytes need at that
    /// rate, and never more than this.
    pub transfer_timeout: Duration,
    /// The longest that a holder may take to answer a lend or a completion.
    pub answer_timeout: Duration,
}

/// Connections with refused keys that are remembered until what ran on them is settled.
const STALE_MAX: usize = 16;

/// Where events go, and the time.
pub(super) type Told<'a> = (&'a dyn EventSink, Timestamp);

/// The fetches of one data thread.
#[derive(Debug)]
pub(super) struct Requester<L: Landing> {
    pub(super) config: RequesterConfig,
    pub(super) epoch: NodeEpoch,
    pub(super) fetches: BTreeMap<RequestId, Fetch<L::Memory>>,
    next_request: u64,
    pub(super) transfers: Transfers<L::Memory>,
    pub(super) replays: VecDeque<Replay>,
    pub(super) done: VecDeque<Fetched>,
    pub(super) finished: Vec<FinishedBlock<L::Memory>>,
    /// Transfers whose blocks have landed and are on their way to their places.
    pub(super) settling: Vec<Settling<L::Memory>>,
    /// When they are looked at again.
    pub(super) look_at: Timestamp,
    pub(super) bitmap: Vec<u8>,
    pub(super) scratch: Scratch<L::Memory>,
    /// Connections on which keys were refused; a few of the latest.
    pub(super) stale: VecDeque<ConnectionId>,
    pub(super) probes: Probes,
    /// How things ended that were asked of peers, and on which paths, for their health.
    pub(super) verdicts: Vec<(NodeId, Paths, Verdict)>,
}

impl<L: Landing> Requester<L> {
    pub(super) fn new(
        config: RequesterConfig,
        epoch: NodeEpoch,
        transfers: Transfers<L::Memory>,
    ) -> Self {
        Self {
            config,
            epoch,
            fetches: BTreeMap::new(),
            next_request: 1,
            transfers,
            replays: VecDeque::new(),
            done: VecDeque::new(),
            finished: Vec::new(),
            settling: Vec::new(),
            look_at: Timestamp::ZERO,
            bitmap: Vec::new(),
            scratch: Scratch::default(),
            stale: VecDeque::new(),
            probes: Probes::default(),
            verdicts: Vec::new(),
        }
    }

    /// Takes a fetch; over `connection` at once, or when one to its node is up, but not before
    /// `held_until`.
    pub(super) fn fetch(
        &mut self,
        request: FetchRequest,
        (connection, held_until): (Option<ConnectionId>, Option<Timestamp>),
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let timeout = self.config.answer_timeout;
        let mut fetch = Fetch::new(request, now, timeout);
        if !(1..=limits::LEND_BLOCKS_MAX).contains(&fetch.outcomes.len()) {
            fetch.outcomes.fill(FetchOutcome::Failed(Scope::Request));
            self.done.push_back(fetch.finished());
            return;
        }
        if let Some(until) = held_until {
            fetch.held_until = held_until;
            fetch.deadline = until + timeout;
        } else if let Some(connection) = connection {
            fetch.lend(id, (connection, timeout), outbox, now);
        }
        self.fetches.insert(id, fetch);
    }

    /// Answers a fetch from a peer that is left alone.
    pub(super) fn refuse(&mut self, request: FetchRequest, suspended: Suspended, now: Timestamp) {
        let mut fetch = Fetch::<L::Memory>::new(request, now, Duration::ZERO);
        fetch.outcomes.fill(match suspended.scope {
            Scope::Request => FetchOutcome::Busy(BusyReason::Owner(LendRefusal::Draining)),
            scope => FetchOutcome::Failed(scope),
        });
        self.done.push_back(fetch.finished());
    }

    /// Lends that were held back and may go now: over the connection that `up_to` knows, or the next
    /// one.
    pub(super) fn resume(
        &mut self,
        up_to: impl Fn(NodeId) -> Option<ConnectionId>,
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        let timeout = self.config.answer_timeout;
        for (id, fetch) in &mut self.fetches {
            if fetch.held_until.take_if(|until| *until <= now).is_some()
                && matches!(fetch.phase, Phase::Waiting)
                && let Some(connection) = up_to(fetch.request.node)
            {
                fetch.lend(*id, (connection, timeout), outbox, now);
            }
        }
    }

    /// Whether a fetch waits for a connection to this node.
    pub(super) fn waits_for(&self, node: NodeId) -> bool {
        let waiting = |fetch: &Fetch<_>| matches!(fetch.phase, Phase::Waiting);
        self.fetches.values().any(|fetch| fetch.request.node == node && waiting(fetch))
    }

    /// A connection to `node` is up: completions that are owed first, then the waiting fetches.
    pub(super) fn handle_up(
        &mut self,
        node: NodeId,
        connection: ConnectionId,
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        let epoch = self.epoch;
        self.replays.retain(|replay| {
            if replay.node == node
                && let Some(outcomes) = Outcomes::new(replay.count, &replay.bitmap)
            {
                let lease = replay.lease;
                outbox.send(connection, &Message::Complete { lease, epoch, outcomes });
            }
            replay.node != node
        });
        // What else was granted over earlier connections is read no more: they are gone, and their
        // flushes were polled before this one came up or will be ignored by the holder's cut.
        let reason = AbortReason::Reconnected;
        outbox.send(connection, &Message::Abort { lease: LeaseId::NONE, reason });
        self.lend_waiting((node, connection), outbox, now);
    }

    /// No connection to `node` can be made: its waiting fetches fail.
    pub(super) fn handle_unreachable(&mut self, node: NodeId, scope: Scope, told: Told<'_>) {
        let cause = Cause::of(scope, Cause::Unreachable);
        self.fail_where((scope, Some(cause)), told, |fetch| {
            fetch.request.node == node && matches!(fetch.phase, Phase::Waiting)
        });
        self.probes.fail(cause, |probe| probe.waits_for(node));
    }

    /// A connection is gone, and its last completion was polled. Where another one to the same node
    /// takes its place, what was asked over the old one is asked again over that one, once.
    pub(super) fn handle_closed(
        &mut self,
        connection: ConnectionId,
        (scope, another): (Scope, bool),
        told: Told<'_>,
    ) {
        self.transfers.handle_closed(connection, scope);
        let cause = Cause::of(scope, Cause::Broken);
        if another {
            self.probes.move_on(connection);
        } else {
            self.probes.fail(cause, |probe| probe.asks_on(connection));
        }
        let lending = self.fetches.values_mut().filter(|fetch| {
            fetch.connection == Some(connection) && matches!(fetch.phase, Phase::Lending)
        });
        for fetch in lending.filter(|fetch| another && !fetch.moved) {
            (fetch.phase, fetch.connection, fetch.moved) = (Phase::Waiting, None, true);
        }
        // We closed it ourselves, for a reason that has its own verdict.
        let blamed = (scope != Scope::Local).then_some(cause);
        self.fail_where((scope, blamed), told, |fetch| {
            fetch.connection == Some(connection) && matches!(fetch.phase, Phase::Lending)
        });
        for fetch in self.fetches.values_mut().filter(|f| f.connection == Some(connection)) {
            fetch.connection = None;
            if let Phase::Completing { .. } = fetch.phase {
                owe(&mut self.replays, fetch);
            }
        }
    }

    fn fail_where(
        &mut self,
        (scope, cause): (Scope, Option<Cause>),
        (sink, now): Told<'_>,
        which: impl Fn(&Fetch<L::Memory>) -> bool,
    ) {
        for (_, mut fetch) in self.fetches.extract_if(.., |_, fetch| which(fetch)) {
            fetch.outcomes.fill(FetchOutcome::Failed(scope));
            let blocks = fetch.outcomes.len() as u64;
            sink.emit(Event::TransferFailed { blocks, scope });
            if let Some(cause) = cause {
                let waited = now.since(fetch.lent);
                let verdict = Verdict::Failed { cause, waited };
                self.verdicts.push((fetch.request.node, Paths::default(), verdict));
            }
            self.done.push_back(fetch.finished());
        }
    }

    /// The holder's answer to a lend.
    pub(super) fn handle_lease(
        &mut self,
        granted: &Granted<'_>,
        cx: &mut Context<'_, L>,
    ) -> Result<(), Violation> {
        // A lease that arrives twice must not be given back while its blocks are being read.
        let in_use = self.fetches.values().any(|fetch| {
            fetch.lease == granted.lease && fetch.connection == Some(granted.connection)
        });
        let abort = |outbox: &mut Outbox, reason| {
            if granted.lease != LeaseId::NONE && !in_use {
                let lease = granted.lease;
                outbox.send(granted.connection, &Message::Abort { lease, reason });
            }
        };
        let Some(fetch) = self.fetches.get_mut(&granted.request).filter(|fetch| {
            fetch.connection == Some(granted.connection) && matches!(fetch.phase, Phase::Lending)
        }) else {
            // The answer to a request that was given up: nothing reads under this lease.
            abort(cx.outbox, AbortReason::Late);
            return Ok(());
        };
        fetch.lease = granted.lease;
        let node = fetch.request.node;
        let scratch = &mut self.scratch;
        let wanted = fetch.accept(granted, cx.landing, scratch)?;
        let bytes = scratch.reads.bytes();
        let allowance = granted.health.allowance(node, bytes, self.config.transfer_timeout);
        fetch.reads_end = cx.now + allowance;
        let until = lease_end(fetch.lent, granted.ttl, self.config.lease_margin);
        let until = until.min(fetch.reads_end);
        let Scratch { reads, memory, .. } = scratch;
        if reads.is_empty() || until <= cx.now {
            let late = !reads.is_empty();
            memory.clear();
            let (cause, waited) = (Cause::NoAnswer, cx.now.since(fetch.lent));
            let verdict = if late { Verdict::Failed { cause, waited } } else { Verdict::Answered };
            self.verdicts.push((node, Paths::default(), verdict));
            abort(cx.outbox, if late { AbortReason::Late } else { AbortReason::NoMemory });
            if let Some(fetch) = self.fetches.remove(&granted.request) {
                self.done.push_back(fetch.finished());
            }
            return Ok(());
        }
        let on = granted.connection;
        let transfer = self.transfers.begin(on, until, reads, memory.drain(..));
        let (ttl, asked) = (granted.ttl, fetch.lent);
        fetch.phase = Phase::Reading { transfer, wanted, ttl, asked };
        Ok(())
    }

    /// The holder's answer to a renewal. A zero `ttl` says that the lease is gone: its reads go on
    /// to the deadline that they have.
    pub(super) fn handle_renewed(&mut self, on: ConnectionId, lease: LeaseId, ttl: Duration) {
        let margin = self.config.lease_margin;
        let on_it = |fetch: &&mut Fetch<_>| fetch.lease == lease && fetch.connection == Some(on);
        if let Some(fetch) = self.fetches.values_mut().find(on_it)
            && let Phase::Reading { transfer, asked, .. } = &fetch.phase
            && !ttl.is_zero()
        {
            let until = lease_end(*asked, ttl, margin).min(fetch.reads_end);
            self.transfers.extend(*transfer, until);
        }
    }

    /// Fills a batch of READs to post on the connection that is answered.
    pub(super) fn poll_post(&mut self, batch: &mut ReadBatch) -> Option<ConnectionId> {
        self.transfers.poll_post(batch)
    }

    pub(super) fn handle_post_refused(
        &mut self,
        connection: ConnectionId,
        batch: &ReadBatch,
        scope: Scope,
    ) {
        self.transfers.handle_post_refused(connection, batch, scope);
    }

    pub(super) fn handle_completion(
        &mut self,
        completion: &Completion,
        sink: &dyn EventSink,
        now: Timestamp,
    ) {
        if completion.status == CompletionStatus::RemoteAccess
            && !self.stale.contains(&completion.connection)
        {
            if self.stale.len() == STALE_MAX {
                self.stale.pop_front();
            }
            self.stale.push_back(completion.connection);
        }
        if !self.transfers.handle_completion(completion, now) {
            sink.emit(Event::StaleCompletion);
        }
    }

    /// A connection whose READs must be flushed.
    pub(super) fn poll_break(&mut self) -> Option<ConnectionId> {
        self.transfers.poll_break()
    }

    /// Renewals, and answers that did not come.
    pub(super) fn handle_timeout(
        &mut self,
        outbox: &mut Outbox,
        sink: &dyn EventSink,
        now: Timestamp,
    ) {
        self.transfers.handle_timeout(Scope::Path, now);
        self.probes.fail(Cause::NoAnswer, |probe| probe.is_late(now));
        self.fail_where((Scope::Path, Some(Cause::NoAnswer)), (sink, now), |fetch| {
            matches!(fetch.phase, Phase::Waiting | Phase::Lending) && fetch.deadline <= now
        });
        for fetch in self.fetches.values_mut() {
            if matches!(fetch.phase, Phase::Completing { .. }) && fetch.deadline <= now {
                // The holder did not answer: it hears it once more at once, before the lease ends,
                // and over its next connection. The blocks do not wait for that.
                let count = fetch.pack_outcomes(&mut self.bitmap);
                if let Some(connection) = fetch.connection.take()
                    && let Some(outcomes) = Outcomes::new(count, &self.bitmap)
                {
                    let (lease, epoch) = (fetch.lease, self.epoch);
                    outbox.send(connection, &Message::Complete { lease, epoch, outcomes });
                }
                owe(&mut self.replays, fetch);
            }
            if let (Some(at), Some(connection)) = (fetch.renewal(), fetch.connection)
                && at <= now
                && let Phase::Reading { asked, .. } = &mut fetch.phase
            {
                outbox.send(connection, &Message::Renew { lease: fetch.lease });
                *asked = now;
            }
        }
    }

    /// Whether anything is asked of anybody.
    pub(super) fn is_asking(&self) -> bool {
        !self.fetches.is_empty()
    }

    /// Of whom something is asked now.
    pub(super) fn asked(&self) -> Asked {
        let mut asked = Asked::default();
        for fetch in self.fetches.values() {
            if let Some(connection) = fetch.connection {
                asked.on.insert(connection);
            } else if fetch.held_until.is_none() {
                asked.of.insert(fetch.request.node);
            }
        }
        asked
    }

    /// How long a connection may take to open beyond what its messages take.
    pub(super) const fn opening(&self) -> Duration {
        self.transfers.opening()
    }

    /// Whether READs of a fetch are under way on a connection.
    pub(super) fn reads_on(&self, connection: ConnectionId) -> bool {
        let reads = |fetch: &Fetch<_>| matches!(fetch.phase, Phase::Reading { .. });
        self.fetches.values().any(|fetch| fetch.connection == Some(connection) && reads(fetch))
    }

    /// A peer was asked and says nothing: what waits for its words ends, blocks that have landed by the
    /// ranks of their loans.
    pub(super) fn handle_silent(
        &mut self,
        (node, connection): (NodeId, ConnectionId),
        waited: Duration,
        told: Told<'_>,
    ) {
        self.fail_where((Scope::Path, None), told, |fetch| match fetch.phase {
            Phase::Waiting => fetch.request.node == node && fetch.held_until.is_none(),
            Phase::Lending => fetch.connection == Some(connection),
            Phase::Reading { .. } | Phase::Completing { .. } => false,
        });
        let completing = self.fetches.values_mut().filter(|fetch| {
            fetch.connection == Some(connection) && matches!(fetch.phase, Phase::Completing { .. })
        });
        for fetch in completing {
            fetch.connection = None;
            owe(&mut self.replays, fetch);
        }
        self.verdicts.push((node, Paths::default(), Verdict::Silent { waited }));
    }

    /// This node was late by so much: what peers owe it is due later. A borrowed lease ends when it
    /// does, and READs that it has ended are not the peer's fault.
    pub(super) fn handle_stall(&mut self, late: Duration, now: Timestamp) {
        let margin = self.config.lease_margin;
        for fetch in self.fetches.values_mut() {
            fetch.deadline = fetch.deadline + late;
            fetch.reads_end = fetch.reads_end + late;
            if let Phase::Reading { transfer, ttl, asked, .. } = &fetch.phase {
                let until = lease_end(*asked, *ttl, margin).min(fetch.reads_end);
                self.transfers.extend(*transfer, until);
            }
        }
        self.probes.put_off(late);
        self.transfers.handle_timeout(Scope::Local, now);
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let own = self
            .fetches
            .values()
            .map(|fetch| fetch.held_until.or(fetch.renewal()).unwrap_or(fetch.deadline));
        // A refused post may have ended a transfer outside of any event.
        let over = self.transfers.has_finished().then_some(Timestamp::ZERO);
        // No event tells that a block has come to its place.
        let settling = (!self.settling.is_empty()).then_some(self.look_at);
        let probes = self.probes.poll_timeout();
        own.chain(self.transfers.poll_timeout()).chain(over).chain(settling).chain(probes).min()
    }

    pub(super) fn unfinished(&self) -> usize {
        self.fetches.len() + self.transfers.running() + self.settling.len()
    }

    pub(super) fn poll_fetched(&mut self) -> Option<Fetched> {
        self.done.pop_front()
    }
}

/// When a requester stops using a lease: counted from before it asked, less the margin.
fn lease_end(asked: Timestamp, ttl: Duration, margin: Duration) -> Timestamp {
    asked + ttl.saturating_sub(margin)
}
