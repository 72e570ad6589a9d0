//! The end of a fetch: what landed is verified, completed, ranked and published.

use std::collections::VecDeque;

use super::fetch::{Fetch, FetchOutcome, Phase};
use super::landing::{Landing, Settled};
use super::outbox::Context;
use super::requester::Requester;
use crate::event::Event;
use crate::fabric::ConnectionId;
use crate::health::{Cause, Verdict};
use crate::limits;
use crate::protocol::{Message, Outcomes, rank};
use crate::transfer::{Finished, FinishedBlock, TransferId};
use crate::types::{LeaseId, NodeId, Scope, Timestamp};

/// Completions kept for the next connection to their node. One more drops the oldest, whose rank
/// step is then lost: eviction quality, never data.
const REPLAYS_MAX: usize = 64;

/// A completion that its holder may not have heard.
#[derive(Debug)]
pub(super) struct Replay {
    pub(super) node: NodeId,
    pub(super) lease: LeaseId,
    pub(super) count: u16,
    pub(super) bitmap: Vec<u8>,
}

/// A transfer that is over, whose blocks are not all in their places.
#[derive(Debug)]
pub(super) struct Settling<M> {
    finished: Finished,
    blocks: Vec<FinishedBlock<M>>,
    /// When what has not settled is given up. Its memory belongs to the landing as long as it takes.
    until: Timestamp,
}

impl<L: Landing> Requester<L> {
    /// Ends what can end: verifies and completes transfers that are over, and publishes what landed
    /// where the holder can no longer answer.
    pub(super) fn settle(&mut self, cx: &mut Context<'_, L>) {
        if self.look_at <= cx.now {
            self.look_at = cx.now + limits::LOOK_AGAIN;
            cx.landing.look_again();
        }
        let mut at = 0;
        while let Some(settling) = self.settling.get_mut(at) {
            let late = settling.until <= cx.now;
            if settle_all(&mut settling.blocks, cx.landing, late) {
                let Settling { finished, mut blocks, .. } = self.settling.swap_remove(at);
                self.conclude(finished, &mut blocks, cx);
            } else {
                at += 1;
            }
        }
        let mut blocks = std::mem::take(&mut self.finished);
        while let Some(finished) = self.transfers.poll_finished(&mut blocks) {
            // What a probe reads goes nowhere, and the same memory is read into again.
            let probed = !self.fetches.values().any(|fetch| fetch.reads(finished.id));
            if probed || settle_all(&mut blocks, cx.landing, false) {
                self.conclude(finished, &mut blocks, cx);
                blocks.clear();
            } else {
                let (blocks, until) =
                    (std::mem::take(&mut blocks), cx.now + self.config.transfer_timeout);
                self.settling.push(Settling { finished, blocks, until });
            }
        }
        self.finished = blocks;
        let over = self.fetches.extract_if(.., |_, fetch| match &fetch.phase {
            Phase::Completing { landed } => landed.is_empty() || fetch.connection.is_none(),
            _ => false,
        });
        for (_, mut fetch) in over {
            fetch.publish(cx.landing, |_| None);
            self.done.push_back(fetch.finished());
        }
    }

    /// Verifies the blocks of a transfer that are where they belong, and tells the holder.
    fn conclude(
        &mut self,
        finished: Finished,
        blocks: &mut Vec<FinishedBlock<L::Memory>>,
        cx: &mut Context<'_, L>,
    ) {
        let reading = |fetch: &&mut Fetch<_>| fetch.reads(finished.id);
        let Some(fetch) = self.fetches.values_mut().find(reading) else {
            return self.settle_probe(&finished, blocks, cx);
        };
        let verdict = match verify(fetch, blocks, cx) {
            Some(Verdict::Failed { cause: Cause::Refused, .. })
                if self.stale.contains(&finished.connection) =>
            {
                Some(Verdict::StaleKeys)
            }
            verdict => verdict,
        };
        let (node, paths) = (fetch.request.node, finished.paths);
        self.verdicts.extend(verdict.map(|verdict| (node, paths, verdict)));
        fetch.deadline = cx.now + self.config.answer_timeout;
        let count = fetch.pack_outcomes(&mut self.bitmap);
        match (fetch.connection, Outcomes::new(count, &self.bitmap)) {
            (Some(connection), Some(outcomes)) => {
                let (lease, epoch) = (fetch.lease, self.epoch);
                let message = Message::Complete { lease, epoch, outcomes };
                cx.outbox.send(connection, &message);
            }
            _ => owe(&mut self.replays, fetch),
        }
    }

    /// The holder's answer to a completion: the rank that each block starts with here.
    pub(super) fn handle_ranks(
        &mut self,
        on: ConnectionId,
        lease: LeaseId,
        ranks: &[u8],
        landing: &mut L,
    ) {
        let answered = self.fetches.iter_mut().find(|(_, fetch)| {
            fetch.lease == lease
                && fetch.connection == Some(on)
                && matches!(fetch.phase, Phase::Completing { .. })
        });
        if let Some((&id, fetch)) = answered {
            fetch.publish(landing, |at| ranks.get(usize::from(at)).copied().and_then(rank));
            if let Some(fetch) = self.fetches.remove(&id) {
                self.done.push_back(fetch.finished());
            }
        }
    }
}

impl<M> Fetch<M> {
    fn reads(&self, id: TransferId) -> bool {
        matches!(&self.phase, Phase::Reading { transfer, .. } if *transfer == id)
    }
}

/// Brings what landed to its place, or a step nearer; whether all of it is there. What is given up, or
/// cannot get there, has failed.
fn settle_all<L: Landing>(
    blocks: &mut [FinishedBlock<L::Memory>],
    landing: &mut L,
    give_up: bool,
) -> bool {
    let mut all = true;
    for block in blocks.iter_mut().filter(|block| block.outcome.is_ok()) {
        match landing.settle(&mut block.destination) {
            Settled::Now => {}
            Settled::Later if give_up => block.outcome = Err(Scope::Local),
            Settled::Later => all = false,
            Settled::Never(scope) => block.outcome = Err(scope),
        }
    }
    all
}

/// Sorts the blocks of a finished transfer into what landed whole and what failed, and says what that
/// means for the holder's health. A flush and a fault of our own mean nothing.
fn verify<L: Landing>(
    fetch: &mut Fetch<L::Memory>,
    blocks: &mut Vec<FinishedBlock<L::Memory>>,
    cx: &Context<'_, L>,
) -> Option<Verdict> {
    let nothing = Phase::Completing { landed: Vec::with_capacity(blocks.len()) };
    let Phase::Reading { wanted, .. } = std::mem::replace(&mut fetch.phase, nothing) else {
        return None;
    };
    let mut failed = None;
    let (mut landed, mut bytes) = (Vec::with_capacity(blocks.len()), 0);
    for (want, block) in wanted.into_iter().zip(blocks.drain(..)) {
        let outcome = block.outcome.and_then(|()| {
            if cx.landing.checksum(&block.destination) == want.checksum {
                return Ok(());
            }
            cx.sink.emit(Event::ChecksumMismatch);
            failed = Some(Cause::WrongBytes);
            Err(Scope::Peer)
        });
        match outcome {
            Ok(()) => {
                let spans = cx.landing.spans(&block.destination);
                bytes += spans.map(|span| u64::from(span.len)).sum::<u64>();
                landed.push((want, block.destination));
            }
            Err(scope) => {
                cx.sink.emit(Event::TransferFailed { blocks: 1, scope });
                fetch.set(want.position, FetchOutcome::Failed(scope));
                let cause = match scope {
                    Scope::Path if fetch.reads_end <= cx.now => Some(Cause::TooSlow),
                    Scope::Path => Some(Cause::Broken),
                    Scope::Peer => Some(Cause::Refused),
                    Scope::Local | Scope::Request => None,
                };
                failed = failed.or(cause);
            }
        }
    }
    let took = cx.now.since(fetch.lent);
    let verdict = match failed {
        Some(cause) => Some(Verdict::Failed { cause, waited: took }),
        None => (bytes > 0).then_some(Verdict::Sent { bytes, took }),
    };
    if !landed.is_empty() {
        let blocks = landed.len() as u64;
        cx.sink.emit(Event::TransferSucceeded { blocks, bytes, took });
    }
    fetch.phase = Phase::Completing { landed };
    verdict
}

/// Keeps a completion for the next connection to its holder.
pub(super) fn owe<M>(replays: &mut VecDeque<Replay>, fetch: &Fetch<M>) {
    if replays.len() >= REPLAYS_MAX {
        replays.pop_front();
    }
    let mut bitmap = Vec::new();
    let count = fetch.pack_outcomes(&mut bitmap);
    replays.push_back(Replay { node: fetch.request.node, lease: fetch.lease, count, bitmap });
}
