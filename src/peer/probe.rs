//! A probe of a peer that is left alone: is the way open again, and does it carry bytes?
//!
//! ```text
//! Connecting --up--> Answer --Pong--> Nothing --READ of 0 bytes--> Page --READ of its page--> good
//!                       '------ Pong, and no page, or no memory for it --------------------> good
//! ```
//!
//! The message comes first: its answer says that the peer has let us in, without which it serves no
//! READ. Whatever fails on the way fails the probe. A node serves a page of [`limits::PROBE_BYTES`] bytes for
//! this alone, registered like a pool and last in its list of regions: it is no block, so that a probe
//! takes no lease and counts for nobody.

use std::time::Duration;

use super::landing::Landing;
use super::outbox::Context;
use super::requester::Requester;
use crate::fabric::{ConnectionId, RegisteredSpan, RemoteSpan};
use crate::health::Cause;
use crate::limits;
use crate::protocol::{Message, RegionEntry};
use crate::transfer::{Finished, FinishedBlock, TransferId};
use crate::types::{NodeId, Paths, Scope, Timestamp};

/// How long each step of a probe may take: a connection, beside what its fabric needs to open one, an
/// answer, a READ.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// How far a probe has come.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Connecting,
    Nothing { read: TransferId, on: ConnectionId, page: RemoteSpan },
    Page { read: TransferId, on: ConnectionId },
    Answer { token: u64, on: ConnectionId },
}

/// One probe.
#[derive(Debug)]
pub(super) struct Probe {
    node: NodeId,
    stage: Stage,
    deadline: Timestamp,
}

impl Probe {
    /// Whether it waits for a connection to this node.
    pub(super) fn waits_for(&self, node: NodeId) -> bool {
        self.node == node && matches!(self.stage, Stage::Connecting)
    }

    /// Whether it waits for an answer on this connection. READs end by their own completions.
    pub(super) fn asks_on(&self, connection: ConnectionId) -> bool {
        matches!(self.stage, Stage::Answer { on, .. } if on == connection)
    }

    /// Whether it asks or reads on this connection.
    fn is_on(&self, connection: ConnectionId) -> bool {
        match self.stage {
            Stage::Connecting => false,
            Stage::Nothing { on, .. } | Stage::Page { on, .. } | Stage::Answer { on, .. } => {
                on == connection
            }
        }
    }

    /// Whether its time is up. READs have a deadline of their own.
    pub(super) fn is_late(&self, now: Timestamp) -> bool {
        self.deadline <= now && !self.reads()
    }

    fn reads(&self) -> bool {
        matches!(self.stage, Stage::Nothing { .. } | Stage::Page { .. })
    }
}

/// The probes of one data thread: at most one per peer, as health says when each is due.
#[derive(Debug, Default)]
pub(super) struct Probes {
    running: Vec<Probe>,
    ended: Vec<Ended>,
}

/// A probe that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) node: NodeId,
    /// What its READ went over or failed on; none where it did not get so far.
    pub(super) paths: Paths,
    pub(super) result: Result<(), Cause>,
}

impl Ended {
    fn early(probe: &Probe, result: Result<(), Cause>) -> Self {
        Self { node: probe.node, paths: Paths::default(), result }
    }
}

impl Probes {
    /// Ends those that `which` picks.
    pub(super) fn fail(&mut self, cause: Cause, which: impl Fn(&Probe) -> bool) {
        let failed = self.running.extract_if(.., |probe| which(probe));
        self.ended.extend(failed.map(|probe| Ended::early(&probe, Err(cause))));
    }

    /// Another connection takes the place of this one: what was asked on it is asked again on that
    /// one. Two nodes that probe each other at once must not take that for a failure.
    pub(super) fn move_on(&mut self, connection: ConnectionId) {
        for probe in self.running.iter_mut().filter(|probe| probe.asks_on(connection)) {
            probe.stage = Stage::Connecting;
        }
    }

    /// This node was late by so much: what it waits for is due later.
    pub(super) fn put_off(&mut self, late: Duration) {
        for probe in &mut self.running {
            probe.deadline = probe.deadline + late;
        }
    }

    /// Whether one runs on this connection.
    pub(super) fn any_on(&self, connection: ConnectionId) -> bool {
        self.running.iter().any(|probe| probe.is_on(connection))
    }

    /// A probe that has ended.
    pub(super) fn poll_ended(&mut self) -> Option<Ended> {
        self.ended.pop()
    }

    /// Whether any waits for a connection.
    pub(super) fn are_waiting(&self) -> bool {
        self.running.iter().any(|probe| matches!(probe.stage, Stage::Connecting))
    }

    /// Whether one waits for a connection to this node.
    pub(super) fn wait_for(&self, node: NodeId) -> bool {
        self.running.iter().any(|probe| probe.waits_for(node))
    }

    /// Whether one waits for a connection to this node, or for an answer on this one.
    pub(super) fn want(&self, node: NodeId, connection: ConnectionId) -> bool {
        self.running.iter().any(|probe| probe.waits_for(node) || probe.asks_on(connection))
    }

    pub(super) fn poll_timeout(&self) -> Option<Timestamp> {
        self.running.iter().filter(|probe| !probe.reads()).map(|probe| probe.deadline).min()
    }
}

/// The page that a peer serves to probes, where it has one.
fn probe_page(regions: &[RegionEntry]) -> Option<RemoteSpan> {
    let last = regions.last().filter(|last| last.len() == u64::from(limits::PROBE_BYTES))?;
    Some(RemoteSpan { rkey: last.rkey(), address: last.address(), len: limits::PROBE_BYTES })
}

impl<L: Landing> Requester<L> {
    /// When each stage of a probe is given up.
    fn probe_deadline(&self, now: Timestamp) -> Timestamp {
        now + PROBE_TIMEOUT.min(self.config.answer_timeout)
    }

    /// Begins a probe; [`Self::handle_probe_up`] takes it on when there is a connection.
    pub(super) fn begin_probe(&mut self, node: NodeId, now: Timestamp) {
        let deadline = self.probe_deadline(now) + self.opening();
        self.probes.running.push(Probe { node, stage: Stage::Connecting, deadline });
    }

    /// A connection to a peer is there: its probe goes on, where there is one.
    pub(super) fn handle_probe_up(
        &mut self,
        (node, on): (NodeId, ConnectionId),
        cx: &mut Context<'_, L>,
    ) {
        let deadline = self.probe_deadline(cx.now);
        let mut waiting = self.probes.running.iter_mut();
        let Some(probe) = waiting.find(|probe| probe.waits_for(node)) else { return };
        probe.deadline = deadline;
        let token = cx.now.as_nanos();
        cx.outbox.send(on, &Message::Ping { token });
        probe.stage = Stage::Answer { token, on };
    }

    /// The answer to a ping, perhaps to a probe's.
    pub(super) fn handle_pong(
        &mut self,
        (connection, token): (ConnectionId, u64),
        regions: &[RegionEntry],
        cx: &mut Context<'_, L>,
    ) {
        let is_it = |probe: &Probe| match probe.stage {
            Stage::Answer { token: asked, on } => (on, asked) == (connection, token),
            _ => false,
        };
        let Some(at) = self.probes.running.iter().position(is_it) else { return };
        let (page, deadline) = (probe_page(regions), self.probe_deadline(cx.now));
        let mut memory = Vec::with_capacity(1);
        if page.is_some() {
            cx.landing.reserve(&[limits::PROBE_BYTES], &mut memory);
        }
        match (page, memory.pop()) {
            (Some(page), Some(memory)) => {
                let nothing = RemoteSpan { len: 0, ..page };
                let read = self.read((connection, deadline), nothing, memory, cx.landing);
                if let Some(probe) = self.probes.running.get_mut(at) {
                    probe.deadline = deadline;
                    probe.stage = Stage::Nothing { read, on: connection, page };
                }
            }
            _ => {
                let probe = self.probes.running.swap_remove(at);
                self.probes.ended.push(Ended::early(&probe, Ok(())));
            }
        }
    }

    /// Begins the READ of one span into as much of this memory as it fills.
    fn read(
        &mut self,
        (on, until): (ConnectionId, Timestamp),
        remote: RemoteSpan,
        memory: L::Memory,
        landing: &L,
    ) -> TransferId {
        let mut left = remote.len;
        let local = landing.spans(&memory).map(|span| {
            let len = span.len.min(left);
            left -= len;
            RegisteredSpan { len, ..span }
        });
        let reads = &mut self.scratch.reads;
        reads.clear();
        // Where the memory is too short, the transfer has no block and ends without one.
        reads.push([remote], local).ok();
        self.transfers.begin(on, until, reads, std::iter::once(memory))
    }

    /// A transfer is over that is no fetch's: a probe's, whose memory may go.
    pub(super) fn settle_probe(
        &mut self,
        finished: &Finished,
        blocks: &mut Vec<FinishedBlock<L::Memory>>,
        cx: &mut Context<'_, L>,
    ) {
        let is_it = |probe: &Probe| match probe.stage {
            Stage::Nothing { read, .. } | Stage::Page { read, .. } => read == finished.id,
            Stage::Connecting | Stage::Answer { .. } => false,
        };
        let Some(at) = self.probes.running.iter().position(is_it) else { return };
        let deadline = self.probe_deadline(cx.now);
        let stage = self.probes.running.get(at).map(|probe| probe.stage);
        let ended = match (blocks.pop(), stage) {
            (Some(block), Some(Stage::Nothing { on, page, .. })) if block.outcome.is_ok() => {
                // One READ, however short the fabric makes them: it is to show that bytes come
                // across, not how fast.
                let page = RemoteSpan { len: page.len.min(self.transfers.longest_read()), ..page };
                let read = self.read((on, deadline), page, block.destination, cx.landing);
                if let Some(probe) = self.probes.running.get_mut(at) {
                    probe.deadline = deadline;
                    probe.stage = Stage::Page { read, on };
                }
                return;
            }
            (Some(block), _) => block.outcome,
            _ => Err(Scope::Local),
        };
        let probe = self.probes.running.swap_remove(at);
        let result = ended.map_err(|scope| Cause::of(scope, Cause::Broken));
        let paths = finished.paths.clone();
        self.probes.ended.push(Ended { node: probe.node, paths, result });
    }
}
