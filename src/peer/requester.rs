//! The requester's side of DESIGN §4: lend, read, complete, publish.
//!
//! A fetch asks one owner for up to [`limits::LEND_BLOCKS_MAX`] blocks and becomes one lease. Its
//! phases follow each other without a way back:
//!
//! ```text
//! Waiting --connection up--> Lending --Lease--> Reading --last completion--> Completing --Ranks--> done
//!    |                          |                  |                             |
//!    '--- no connection --------'--- closed, late -'---- closed, late -----------'--> done, by the loans' ranks
//! ```
//!
//! The deadline of a lease counts from **before** its request (or renewal) was sent, less a margin
//! (invariant 3). A completion whose answer was lost is sent again over the next connection to that
//! node, so that the holder's rank moves once whatever happened to the first one (invariant 7).

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::landing::{Landing, Published};
use super::outbox::Outbox;
use crate::event::{Event, EventSink};
use crate::fabric::{ConnectionId, RemoteSpan};
use crate::limits;
use crate::protocol::{Loan, LoanStatus};
use crate::store::Found;
use crate::transfer::{BlockRead, Finished, FinishedBlock, TransferId, Transfers};
use crate::types::{
    BlockHash, BlockKey, EvictionRank, LeaseId, NamespaceId, NodeId, RequestId, Scope, Timestamp,
};

/// Deadlines of a requester.
#[derive(Debug, Clone, Copy)]
pub struct RequesterConfig {
    /// How long before the holder's deadline a lease is no longer used. Covers the difference in
    /// rate of two clocks over one lease, and the time a posted READ takes to leave the NIC.
    pub lease_margin: Duration,
    /// The longest that READs of one lease may take, beside what their bytes need.
    pub transfer_timeout: Duration,
    /// The longest that a holder may take to answer a lend or a completion.
    pub answer_timeout: Duration,
}

/// The slowest rate that is not yet a failure: a transfer's deadline grows by its bytes over this.
const SLOWEST_BYTES_PER_SECOND: u64 = 16 << 20;

/// Completions kept per node for its next connection. One more drops the oldest, whose rank step is
/// then lost: eviction quality, never data.
const REPLAYS_MAX: usize = 64;

/// A fetch, as its asker numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(pub u64);

/// A wish for blocks of one owner.
#[derive(Debug, Clone)]
pub struct FetchRequest {
    /// Its number, unique while it runs.
    pub id: FetchId,
    /// The owner.
    pub node: NodeId,
    /// The blocks' namespace.
    pub namespace: NamespaceId,
    /// The blocks, prefix order, at most [`limits::LEND_BLOCKS_MAX`].
    pub hashes: Vec<BlockHash>,
}

/// What became of one block of a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchOutcome {
    /// Resident here now and pinned once for the asker. `fetched` is `false` where it turned out to
    /// be resident already.
    Ready {
        /// The resident.
        found: Found,
        /// Whether this fetch brought it.
        fetched: bool,
    },
    /// The owner does not have it.
    NotFound,
    /// The owner, or this node, has no room for it now.
    Busy,
    /// It did not arrive.
    Failed(Scope),
}

/// A fetch that is over.
#[derive(Debug)]
pub struct Fetched {
    /// Which.
    pub id: FetchId,
    /// The owner that was asked.
    pub node: NodeId,
    /// One outcome per hash, in the order asked.
    pub outcomes: Vec<FetchOutcome>,
    /// How long to leave that owner alone, milliseconds.
    pub pause_ms: u32,
}

#[derive(Debug, Clone, Copy)]
struct Wanted {
    position: u16,
    rank: u8,
    checksum: u64,
}

#[derive(Debug)]
enum Phase<M> {
    Waiting,
    Lending,
    Reading { transfer: TransferId, wanted: Vec<Wanted>, ttl: Duration, renewed: Timestamp },
    Completing { landed: Vec<(Wanted, M)> },
}

#[derive(Debug)]
struct Fetch<M> {
    request: FetchRequest,
    connection: Option<ConnectionId>,
    outcomes: Vec<FetchOutcome>,
    phase: Phase<M>,
    lease: LeaseId,
    /// When the first message of the current phase left: what deadlines count from.
    since: Timestamp,
    deadline: Timestamp,
    /// No renewal moves the reads beyond this.
    reads_end: Timestamp,
    pause_ms: u32,
}

#[derive(Debug)]
struct Replay {
    node: NodeId,
    lease: LeaseId,
    blocks: u16,
    bitmap: Vec<u8>,
}

/// The fetches of one data thread.
#[derive(Debug)]
pub(super) struct Requester<L: Landing> {
    config: RequesterConfig,
    fetches: BTreeMap<RequestId, Fetch<L::Memory>>,
    next_request: u64,
    pub(super) transfers: Transfers<L::Memory>,
    replays: VecDeque<Replay>,
    done: VecDeque<Fetched>,
    scratch: Vec<FinishedBlock<L::Memory>>,
}

/// The peer did what no honest peer does; its connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Violation;

/// A lease as it arrived.
#[derive(Debug)]
pub(super) struct Granted<'a, I> {
    pub(super) connection: ConnectionId,
    pub(super) request: RequestId,
    pub(super) lease: LeaseId,
    pub(super) ttl: Duration,
    pub(super) pause_ms: u32,
    pub(super) loans: I,
    /// What the peer said it lends from.
    pub(super) regions: &'a [(u32, u64, u64)],
}

impl<L: Landing> Requester<L> {
    pub(super) fn new(config: RequesterConfig, transfers: Transfers<L::Memory>) -> Self {
        Self {
            config,
            fetches: BTreeMap::new(),
            next_request: 1,
            transfers,
            replays: VecDeque::new(),
            done: VecDeque::new(),
            scratch: Vec::new(),
        }
    }

    pub(super) fn running(&self) -> usize {
        self.fetches.len()
    }

    /// Takes a fetch; over `connection` at once, or when one to its node is up.
    pub(super) fn fetch(
        &mut self,
        request: FetchRequest,
        connection: Option<ConnectionId>,
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        let blocks = request.hashes.len();
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let mut fetch = Fetch {
            request,
            connection: None,
            outcomes: vec![FetchOutcome::Failed(Scope::Local); blocks],
            phase: Phase::Waiting,
            lease: LeaseId::NONE,
            since: now,
            deadline: now + self.config.answer_timeout,
            reads_end: now,
            pause_ms: 0,
        };
        if blocks == 0 || blocks > limits::LEND_BLOCKS_MAX {
            fetch.outcomes.fill(FetchOutcome::Failed(Scope::Request));
            self.done.push_back(fetch.finished());
            return;
        }
        if let Some(connection) = connection {
            fetch.lend(id, connection, outbox, now, self.config.answer_timeout);
        }
        self.fetches.insert(id, fetch);
    }

    /// A connection to `node` is up: completions that are owed first, then the waiting fetches.
    pub(super) fn handle_up(
        &mut self,
        node: NodeId,
        connection: ConnectionId,
        outbox: &mut Outbox,
        now: Timestamp,
    ) {
        self.replays.retain(|replay| {
            if replay.node == node {
                outbox.complete(connection, replay.lease, replay.blocks, &replay.bitmap);
            }
            replay.node != node
        });
        // Whatever else an earlier connection was granted is not used any more: its reads are over.
        outbox.abort(connection, LeaseId::NONE);
        let timeout = self.config.answer_timeout;
        for (id, fetch) in &mut self.fetches {
            if fetch.request.node == node && matches!(fetch.phase, Phase::Waiting) {
                fetch.lend(*id, connection, outbox, now, timeout);
            }
        }
    }

    /// No connection to `node` can be made: its waiting fetches fail.
    pub(super) fn handle_unreachable(&mut self, node: NodeId, scope: Scope, sink: &dyn EventSink) {
        self.fail_where(scope, sink, |fetch| {
            fetch.request.node == node && matches!(fetch.phase, Phase::Waiting)
        });
    }

    /// A connection is gone, and its last completion was polled.
    pub(super) fn handle_closed(
        &mut self,
        connection: ConnectionId,
        scope: Scope,
        landing: &mut L,
        sink: &dyn EventSink,
    ) {
        self.transfers.handle_closed(connection, scope);
        self.fail_where(scope, sink, |fetch| {
            fetch.connection == Some(connection) && matches!(fetch.phase, Phase::Lending)
        });
        for fetch in self.fetches.values_mut().filter(|f| f.connection == Some(connection)) {
            fetch.connection = None;
        }
        self.publish_unanswered(landing, |fetch| fetch.connection.is_none());
    }

    fn fail_where(
        &mut self,
        scope: Scope,
        sink: &dyn EventSink,
        which: impl Fn(&Fetch<L::Memory>) -> bool,
    ) {
        for (_, mut fetch) in self.fetches.extract_if(.., |_, fetch| which(fetch)) {
            fetch.outcomes.fill(FetchOutcome::Failed(scope));
            let blocks = fetch.outcomes.len() as u64;
            sink.emit(Event::TransferFailed { blocks, scope });
            self.done.push_back(fetch.finished());
        }
    }

    /// The holder's answer to a lend.
    pub(super) fn handle_lease(
        &mut self,
        granted: Granted<'_, impl ExactSizeIterator<Item = Loan>>,
        landing: &mut L,
        outbox: &mut Outbox,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let Some(fetch) = self.fetches.get_mut(&granted.request).filter(|fetch| {
            fetch.connection == Some(granted.connection) && matches!(fetch.phase, Phase::Lending)
        }) else {
            // The answer to a request that was given up: nothing reads under this lease.
            outbox.abort(granted.connection, granted.lease);
            return Ok(());
        };
        if granted.loans.len() != fetch.outcomes.len() {
            return Err(Violation);
        }
        fetch.lease = granted.lease;
        fetch.pause_ms = granted.pause_ms;
        let until = lease_end(fetch.since, granted.ttl, self.config.lease_margin);
        let connection = granted.connection;
        let (reads, wanted) = fetch.accept(granted, landing)?;
        if reads.is_empty() || until <= now {
            fetch.outcomes.iter_mut().for_each(FetchOutcome::time_out);
            if fetch.lease != LeaseId::NONE {
                outbox.abort(connection, fetch.lease);
            }
            fetch.phase = Phase::Completing { landed: Vec::new() };
        } else {
            let bytes: u64 = reads.iter().map(|(read, _)| u64::from(read.remote.len)).sum();
            fetch.reads_end = now
                + self.config.transfer_timeout
                + Duration::from_secs(bytes / SLOWEST_BYTES_PER_SECOND);
            fetch.deadline = fetch.reads_end;
            let until = until.min(fetch.reads_end);
            let transfer = self.transfers.begin(connection, until, reads.into_iter());
            let (ttl, renewed) = (until.since(fetch.since), fetch.since);
            fetch.phase = Phase::Reading { transfer, wanted, ttl, renewed };
        }
        self.finish_empty();
        Ok(())
    }

    /// The holder's answer to a renewal. A zero `ttl` says that the lease is gone: its reads go on
    /// to the deadline that they have.
    pub(super) fn handle_renewed(&mut self, on: ConnectionId, lease: LeaseId, ttl: Duration) {
        let margin = self.config.lease_margin;
        let Some(fetch) = self
            .fetches
            .values_mut()
            .find(|fetch| fetch.lease == lease && fetch.connection == Some(on))
        else {
            return;
        };
        if let Phase::Reading { transfer, renewed, .. } = &fetch.phase
            && !ttl.is_zero()
        {
            let until = lease_end(*renewed, ttl, margin).min(fetch.reads_end);
            self.transfers.extend(*transfer, until);
        }
    }

    /// Transfers that ended: verify, complete, and publish where the holder can not be told.
    pub(super) fn handle_finished(
        &mut self,
        landing: &mut L,
        outbox: &mut Outbox,
        sink: &dyn EventSink,
        now: Timestamp,
    ) {
        let mut blocks = std::mem::take(&mut self.scratch);
        while let Some(finished) = self.transfers.poll_finished(&mut blocks) {
            self.finish_reads(&finished, &mut blocks, (landing, outbox, sink), now);
            blocks.clear();
        }
        self.scratch = blocks;
        self.finish_empty();
        self.publish_unanswered(landing, |fetch| fetch.connection.is_none());
    }

    fn finish_reads(
        &mut self,
        finished: &Finished,
        blocks: &mut Vec<FinishedBlock<L::Memory>>,
        (landing, outbox, sink): (&mut L, &mut Outbox, &dyn EventSink),
        now: Timestamp,
    ) {
        let Some(fetch) = self.fetches.values_mut().find(
            |fetch| matches!(&fetch.phase, Phase::Reading { transfer, .. } if *transfer == finished.id),
        ) else {
            return;
        };
        let wanted = match std::mem::replace(&mut fetch.phase, Phase::Waiting) {
            Phase::Reading { wanted, .. } => wanted,
            _ => return,
        };
        let mut landed = Vec::with_capacity(blocks.len());
        let mut bytes = 0;
        for (want, block) in wanted.into_iter().zip(blocks.drain(..)) {
            let failure = match block.outcome {
                Ok(()) if landing.checksum(&block.destination) == want.checksum => None,
                Ok(()) => {
                    sink.emit(Event::ChecksumMismatch);
                    Some(Scope::Peer)
                }
                Err(scope) => Some(scope),
            };
            match failure {
                None => {
                    bytes += u64::from(landing.span(&block.destination).len);
                    landed.push((want, block.destination));
                }
                Some(scope) => {
                    sink.emit(Event::TransferFailed { blocks: 1, scope });
                    fetch.set(want.position, FetchOutcome::Failed(scope));
                }
            }
        }
        if !landed.is_empty() {
            let blocks = landed.len() as u64;
            let took = now.since(fetch.since);
            sink.emit(Event::TransferSucceeded { blocks, bytes, took });
        }
        let bitmap = bitmap(fetch.outcomes.len(), landed.iter().map(|(want, _)| want.position));
        match fetch.connection {
            Some(connection) => {
                outbox.complete(connection, fetch.lease, fetch.blocks(), &bitmap);
            }
            None => owe(&mut self.replays, fetch, bitmap),
        }
        fetch.since = now;
        fetch.deadline = now + self.config.answer_timeout;
        fetch.phase = Phase::Completing { landed };
    }

    /// The holder's answer to a completion: the rank that each block starts with here.
    pub(super) fn handle_ranks(
        &mut self,
        on: ConnectionId,
        lease: LeaseId,
        ranks: &[u8],
        landing: &mut L,
    ) {
        let done = self.fetches.iter_mut().find(|(_, fetch)| {
            fetch.lease == lease
                && fetch.connection == Some(on)
                && matches!(fetch.phase, Phase::Completing { .. })
        });
        if let Some((&id, fetch)) = done {
            fetch.publish(landing, |position| ranks.get(usize::from(position)).copied());
            if let Some(fetch) = self.fetches.remove(&id) {
                self.done.push_back(fetch.finished());
            }
        }
    }

    /// Renewals, and answers that did not come.
    pub(super) fn handle_timeout(
        &mut self,
        landing: &mut L,
        outbox: &mut Outbox,
        sink: &dyn EventSink,
        now: Timestamp,
    ) {
        self.transfers.handle_timeout(now);
        self.fail_where(Scope::Path, sink, |fetch| {
            matches!(fetch.phase, Phase::Waiting | Phase::Lending) && fetch.deadline <= now
        });
        for fetch in self.fetches.values_mut() {
            if let Phase::Completing { landed } = &fetch.phase
                && fetch.deadline <= now
                && fetch.connection.is_some()
            {
                let landed = landed.iter().map(|(want, _)| want.position);
                let bitmap = bitmap(fetch.outcomes.len(), landed);
                owe(&mut self.replays, fetch, bitmap);
                fetch.connection = None;
            }
            if let (Some(at), Some(connection)) = (fetch.renewal(), fetch.connection)
                && at <= now
                && let Phase::Reading { renewed, .. } = &mut fetch.phase
            {
                outbox.renew(connection, fetch.lease);
                *renewed = now;
            }
        }
        self.publish_unanswered(landing, |fetch| fetch.connection.is_none());
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        let own = self.fetches.values().map(|fetch| match fetch.renewal() {
            Some(renewal) => renewal.min(fetch.deadline),
            None => fetch.deadline,
        });
        own.chain(self.transfers.poll_timeout()).min()
    }

    pub(super) fn poll_fetched(&mut self) -> Option<Fetched> {
        self.done.pop_front()
    }

    /// Fetches that wait for ranks which will not come: publish by the ranks in the loans.
    fn publish_unanswered(&mut self, landing: &mut L, which: impl Fn(&Fetch<L::Memory>) -> bool) {
        let over = self.fetches.extract_if(.., |_, fetch| {
            matches!(fetch.phase, Phase::Completing { .. }) && which(fetch)
        });
        for (_, mut fetch) in over {
            fetch.publish(landing, |_| None);
            self.done.push_back(fetch.finished());
        }
    }

    /// Fetches of which no block landed have nothing to wait for.
    fn finish_empty(&mut self) {
        let over = self.fetches.extract_if(.., |_, fetch| {
            matches!(&fetch.phase, Phase::Completing { landed } if landed.is_empty())
        });
        self.done.extend(over.map(|(_, fetch)| fetch.finished()));
    }
}

/// When a requester stops using a lease: counted from before it asked, less the margin.
fn lease_end(asked: Timestamp, ttl: Duration, margin: Duration) -> Timestamp {
    asked + ttl.saturating_sub(margin)
}

fn owe<M>(replays: &mut VecDeque<Replay>, fetch: &Fetch<M>, bitmap: Vec<u8>) {
    if replays.len() >= REPLAYS_MAX {
        replays.pop_front();
    }
    let (node, lease, blocks) = (fetch.request.node, fetch.lease, fetch.blocks());
    replays.push_back(Replay { node, lease, blocks, bitmap });
}

fn bitmap(blocks: usize, set: impl Iterator<Item = u16>) -> Vec<u8> {
    let mut bits = vec![0; blocks.div_ceil(8)];
    for position in set {
        if let Some(byte) = bits.get_mut(usize::from(position / 8)) {
            *byte |= 1 << (position % 8);
        }
    }
    bits
}

impl FetchOutcome {
    fn time_out(&mut self) {
        if *self == Self::Failed(Scope::Local) {
            *self = Self::Failed(Scope::Path);
        }
    }
}

/// A block of a new transfer: its READ, and the memory that it lands in.
type Reads<M> = Vec<(BlockRead, M)>;

impl<M: std::fmt::Debug> Fetch<M> {
    fn lend(
        &mut self,
        id: RequestId,
        connection: ConnectionId,
        outbox: &mut Outbox,
        now: Timestamp,
        timeout: Duration,
    ) {
        outbox.lend(connection, id, self.request.namespace, &self.request.hashes);
        self.connection = Some(connection);
        (self.since, self.deadline) = (now, now + timeout);
        self.phase = Phase::Lending;
    }

    /// At most LEND_BLOCKS_MAX, checked at the start.
    fn blocks(&self) -> u16 {
        u16::try_from(self.outcomes.len()).unwrap_or(u16::MAX)
    }

    fn set(&mut self, position: u16, outcome: FetchOutcome) {
        if let Some(slot) = self.outcomes.get_mut(usize::from(position)) {
            *slot = outcome;
        }
    }

    /// When to ask for more time: halfway through the lease.
    fn renewal(&self) -> Option<Timestamp> {
        match &self.phase {
            Phase::Reading { ttl, renewed, .. } => Some(*renewed + *ttl / 2),
            _ => None,
        }
    }

    /// Sorts the loans into outcomes and reads, and reserves memory for the latter.
    fn accept<L: Landing<Memory = M>>(
        &mut self,
        granted: Granted<'_, impl ExactSizeIterator<Item = Loan>>,
        landing: &mut L,
    ) -> Result<(Reads<M>, Vec<Wanted>), Violation> {
        let mut wanted = Vec::with_capacity(self.outcomes.len());
        let mut spans = Vec::with_capacity(self.outcomes.len());
        for (position, (loan, outcome)) in granted.loans.zip(&mut self.outcomes).enumerate() {
            *outcome = match loan.status {
                LoanStatus::Ready if is_lent_from(&loan.span, granted.regions) => {
                    let position = u16::try_from(position).unwrap_or(u16::MAX);
                    wanted.push(Wanted { position, rank: loan.rank, checksum: loan.checksum });
                    spans.push(loan.span);
                    FetchOutcome::Failed(Scope::Local)
                }
                LoanStatus::Ready => return Err(Violation),
                LoanStatus::NotFound => FetchOutcome::NotFound,
                LoanStatus::Busy => FetchOutcome::Busy,
                LoanStatus::Failed => FetchOutcome::Failed(Scope::Peer),
            };
        }
        let sizes: Vec<u32> = spans.iter().map(|span| span.len).collect();
        let mut memory = Vec::with_capacity(sizes.len());
        landing.reserve(&sizes, &mut memory);
        for want in wanted.drain(memory.len().min(wanted.len())..) {
            if let Some(outcome) = self.outcomes.get_mut(usize::from(want.position)) {
                *outcome = FetchOutcome::Busy;
            }
        }
        let reads = spans
            .into_iter()
            .zip(memory)
            .map(|(remote, memory)| (BlockRead { remote, local: landing.span(&memory) }, memory))
            .collect();
        Ok((reads, wanted))
    }

    /// Makes what landed resident; ranks are the holder's answer, or else those of the loans.
    fn publish<L: Landing<Memory = M>>(
        &mut self,
        landing: &mut L,
        answered: impl Fn(u16) -> Option<u8>,
    ) {
        let Phase::Completing { landed } = std::mem::replace(&mut self.phase, Phase::Waiting)
        else {
            return;
        };
        for (want, memory) in landed {
            let rank = answered(want.position).filter(|rank| *rank > 0).unwrap_or(want.rank);
            let Some(&hash) = self.request.hashes.get(usize::from(want.position)) else { continue };
            let key = BlockKey { namespace: self.request.namespace, hash };
            let rank = EvictionRank::clamped(u32::from(rank));
            let outcome = match landing.publish(key, memory, want.checksum, rank) {
                Published::Stored(found) => FetchOutcome::Ready { found, fetched: true },
                Published::AlreadyResident(found) => FetchOutcome::Ready { found, fetched: false },
                Published::Full => FetchOutcome::Busy,
            };
            self.set(want.position, outcome);
        }
    }

    fn finished(self) -> Fetched {
        Fetched {
            id: self.request.id,
            node: self.request.node,
            outcomes: self.outcomes,
            pause_ms: self.pause_ms,
        }
    }
}

/// Whether a loan lies within one of the regions that its holder declared at the handshake.
fn is_lent_from(span: &RemoteSpan, regions: &[(u32, u64, u64)]) -> bool {
    (limits::BLOCK_BYTES_MIN..=limits::BLOCK_BYTES_MAX).contains(&span.len)
        && regions.iter().any(|&(rkey, address, len)| {
            rkey == span.rkey
                && span
                    .address
                    .checked_sub(address)
                    .and_then(|offset| offset.checked_add(u64::from(span.len)))
                    .is_some_and(|end| end <= len)
        })
}
