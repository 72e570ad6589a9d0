//! The in-flight table: owns destinations until nothing can write to them any more.

use std::collections::VecDeque;
use std::time::Duration;

use super::plan::{Plan, PlannedRead, ReadList};
use crate::fabric::{
    Capabilities, Completion, CompletionStatus, ConnectionId, ReadBatch, ReadWork, WrId,
};
use crate::types::{Path, Paths, Scope, Timestamp};

/// A running transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TransferId {
    slot: u32,
    generation: u32,
}

/// One block of a finished transfer. Nothing can write to its destination any more.
#[derive(Debug)]
pub struct FinishedBlock<D> {
    /// The memory, back in the caller's hands.
    pub destination: D,
    /// Whether all bytes arrived, else whose fault it is that they did not.
    pub outcome: Result<(), Scope>,
}

/// A transfer of which every READ has completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// Which transfer.
    pub id: TransferId,
    /// The connection that it ran on, perhaps closed by now.
    pub connection: ConnectionId,
    /// The paths that it went over, or, where it failed, those that it failed on, as far as its READs
    /// told.
    pub paths: Paths,
}

#[derive(Debug)]
struct Block<D> {
    destination: D,
    failed: bool,
}

#[derive(Debug)]
struct Transfer<D> {
    connection: ConnectionId,
    until: Timestamp,
    blocks: Vec<Block<D>>,
    plan: Plan,
    next_read: usize,
    next_segment: usize,
    outstanding: usize,
    /// The first cause of failure. Flushes that follow from it are not a fault of their own.
    broken: Option<Scope>,
    /// What its READs went over; once it is broken, what they failed on.
    paths: Paths,
    /// Whether its connection was asked to be broken.
    breaking: bool,
}

impl<D> Transfer<D> {
    fn is_done(&self) -> bool {
        self.outstanding == 0 && self.next_read == self.plan.reads.len()
    }

    /// Gives up what was not posted yet.
    fn give_up(&mut self, scope: Scope) {
        if self.broken.is_none() {
            self.broken = Some(scope);
            self.paths.clear();
        }
        for read in self.plan.reads.get(self.next_read..).unwrap_or_default() {
            fail_blocks(&mut self.blocks, &self.plan, read);
        }
        self.plan.reads.truncate(self.next_read);
    }
}

/// Notes that a READ did not bring its part of the blocks that it carries.
fn fail_blocks<D>(blocks: &mut [Block<D>], plan: &Plan, read: &PlannedRead) {
    for block in plan.blocks_of(read) {
        if let Some(block) = blocks.get_mut(block) {
            block.failed = true;
        }
    }
}

#[derive(Debug)]
struct TransferSlot<D> {
    generation: u32,
    running: Option<Transfer<D>>,
}

/// A work request's slot: which READ of which transfer it carries, while one is posted.
#[derive(Debug, Clone, Copy)]
struct WrSlot {
    generation: u32,
    carries: Option<(u32, u32)>,
}

/// The in-flight table of one data thread. `D` is memory that is given back by dropping it.
#[derive(Debug)]
pub struct Transfers<D> {
    capabilities: Capabilities,
    slots: Vec<TransferSlot<D>>,
    free_slots: Vec<u32>,
    wrs: Vec<WrSlot>,
    free_wrs: Vec<u32>,
    /// READs posted and not completed, per connection. A handful of connections are busy at a time,
    /// so a scan beats a hash.
    credits_used: Vec<(ConnectionId, usize)>,
    to_break: VecDeque<ConnectionId>,
    finished: VecDeque<u32>,
    /// Buffers of finished transfers, so that a transfer in steady state allocates nothing.
    spare: Vec<Transfer<D>>,
}

impl<D> Transfers<D> {
    /// A table for a fabric that can do this.
    #[must_use]
    pub fn new(capabilities: Capabilities) -> Self {
        Self {
            capabilities,
            slots: Vec::new(),
            free_slots: Vec::new(),
            wrs: Vec::new(),
            free_wrs: Vec::new(),
            credits_used: Vec::new(),
            to_break: VecDeque::new(),
            finished: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// Longest READ of the fabric, bytes.
    #[must_use]
    pub const fn longest_read(&self) -> u32 {
        self.capabilities.read_bytes
    }

    /// How long the fabric may take to open a connection with nothing wrong.
    #[must_use]
    pub const fn opening(&self) -> Duration {
        self.capabilities.opening
    }

    /// Transfers that have not been handed back.
    #[must_use]
    pub fn running(&self) -> usize {
        self.slots.len() - self.free_slots.len()
    }

    /// Takes ownership of the destinations, one for each block of `list`, and plans their READs.
    /// Nothing may be read from the holder after `until`, the requester's own deadline for the lease
    /// (invariant 3).
    pub fn begin(
        &mut self,
        connection: ConnectionId,
        until: Timestamp,
        list: &ReadList,
        destinations: impl Iterator<Item = D>,
    ) -> TransferId {
        let mut transfer = self.spare.pop().unwrap_or_else(|| Transfer {
            connection,
            until,
            blocks: Vec::new(),
            plan: Plan::default(),
            next_read: 0,
            next_segment: 0,
            outstanding: 0,
            broken: None,
            paths: Paths::default(),
            breaking: false,
        });
        transfer.connection = connection;
        transfer.until = until;
        let block = |destination| Block { destination, failed: false };
        transfer.blocks.extend(destinations.take(list.len()).map(block));
        transfer.plan.make(list, &self.capabilities);
        let done = transfer.is_done();
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            self.slots.push(TransferSlot { generation: 0, running: None });
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let mut generation = 0;
        if let Some(entry) = self.slots.get_mut(slot as usize) {
            generation = entry.generation;
            entry.running = Some(transfer);
        }
        if done {
            self.finished.push_back(slot);
        }
        TransferId { slot, generation }
    }

    /// Moves the deadline of a running transfer: its lease was renewed.
    pub fn extend(&mut self, id: TransferId, until: Timestamp) {
        if let Some(transfer) = self.get_mut(id)
            && transfer.broken.is_none()
        {
            transfer.until = transfer.until.max(until);
        }
    }

    /// Fills `batch` (cleared first) with READs of one connection, as many as its credits allow, and
    /// counts them as outstanding. The caller posts the batch, or says
    /// [`Self::handle_post_refused`]. `None` where nothing can be posted now.
    pub fn poll_post(&mut self, batch: &mut ReadBatch) -> Option<ConnectionId> {
        batch.clear();
        for slot in 0..self.slots.len() {
            let Some(transfer) = self.slots.get(slot).and_then(|slot| slot.running.as_ref()) else {
                continue;
            };
            let connection = transfer.connection;
            let used = self.credits_used(connection);
            let credits = self.capabilities.reads_outstanding.saturating_sub(used);
            let posted = self.fill(slot, credits, batch);
            if posted > 0 {
                self.add_credits_used(connection, posted);
                return Some(connection);
            }
        }
        None
    }

    fn fill(&mut self, slot: usize, credits: usize, batch: &mut ReadBatch) -> usize {
        let Some(transfer) = self.slots.get_mut(slot).and_then(|slot| slot.running.as_mut()) else {
            return 0;
        };
        let mut posted = 0;
        while posted < credits
            && let Some(read) = transfer.plan.reads.get(transfer.next_read)
        {
            let wr = self.free_wrs.pop().unwrap_or_else(|| {
                self.wrs.push(WrSlot { generation: 0, carries: None });
                u32::try_from(self.wrs.len() - 1).unwrap_or(u32::MAX)
            });
            let Some(entry) = self.wrs.get_mut(wr as usize) else {
                break;
            };
            // Both indices are below the number of leases in flight times LEND_BLOCKS_MAX.
            let index = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
            entry.carries = Some((index(slot), index(transfer.next_read)));
            batch.works.push(ReadWork {
                wr_id: WrId { slot: wr, generation: entry.generation },
                remote: read.remote,
                segments: read.segments,
            });
            let end = transfer.next_segment + usize::from(read.segments);
            let spans = transfer.plan.segments.get(transfer.next_segment..end).unwrap_or_default();
            batch.segments.extend_from_slice(spans);
            transfer.next_segment = end;
            transfer.next_read += 1;
            transfer.outstanding += 1;
            posted += 1;
        }
        posted
    }

    /// The fabric posted nothing of this batch. Its READs count as failed by `scope`.
    pub fn handle_post_refused(
        &mut self,
        connection: ConnectionId,
        batch: &ReadBatch,
        scope: Scope,
    ) {
        for work in &batch.works {
            self.settle((connection, None), work.wr_id, |_| Err(scope));
        }
    }

    /// Notes the end of a READ; one that ends after its transfer's deadline has failed, whatever it
    /// says (invariant 3). `false` for a completion that matches nothing in flight: drop it.
    #[must_use]
    pub fn handle_completion(&mut self, completion: &Completion, now: Timestamp) -> bool {
        let result = |until| match completion.status {
            CompletionStatus::Success if now < until => Ok(()),
            CompletionStatus::Success => Err(Scope::Path),
            status => Err(status.scope().unwrap_or(Scope::Local)),
        };
        let on = (completion.connection, Some(completion.path));
        self.settle(on, completion.wr_id, result)
    }

    /// `result` says how the READ ended, given its transfer's deadline.
    fn settle(
        &mut self,
        (on, path): (ConnectionId, Option<Path>),
        wr_id: WrId,
        result: impl Fn(Timestamp) -> Result<(), Scope>,
    ) -> bool {
        let Some(entry) = self.wrs.get_mut(wr_id.slot as usize) else {
            return false;
        };
        let Some((slot, read)) = entry.carries.filter(|_| entry.generation == wr_id.generation)
        else {
            return false;
        };
        entry.carries = None;
        entry.generation = entry.generation.wrapping_add(1);
        self.free_wrs.push(wr_id.slot);
        self.return_credit(on);
        let Some(transfer) =
            self.slots.get_mut(slot as usize).and_then(|entry| entry.running.as_mut())
        else {
            return false;
        };
        transfer.outstanding -= 1;
        let result = result(transfer.until);
        // The first failure says where; what is flushed behind it says nothing, but behind a deadline
        // it says what hung.
        let tells = match result {
            Ok(()) => transfer.broken.is_none(),
            Err(_) => transfer.broken.is_none() || transfer.breaking,
        };
        if let Err(scope) = result {
            if let Some(read) = transfer.plan.reads.get(read as usize) {
                fail_blocks(&mut transfer.blocks, &transfer.plan, read);
            }
            transfer.give_up(scope);
        }
        if let Some(path) = path.filter(|_| tells) {
            transfer.paths.add(path);
        }
        if transfer.is_done() {
            self.finished.push_back(slot);
        }
        true
    }

    /// A connection is gone, and its last completion has been polled. What was not posted fails.
    pub fn handle_closed(&mut self, connection: ConnectionId, scope: Scope) {
        self.credits_used.retain(|(of, _)| *of != connection);
        self.fail(scope, |transfer| transfer.connection == connection);
    }

    /// Gives up the transfers whose deadline has passed. Where READs are outstanding, the connection
    /// must be broken first ([`Self::poll_break`]); the memory comes back with the flushes.
    pub fn handle_timeout(&mut self, scope: Scope, now: Timestamp) {
        self.fail(scope, |transfer| transfer.until <= now);
    }

    fn fail(&mut self, scope: Scope, which: impl Fn(&Transfer<D>) -> bool) {
        for (slot, entry) in self.slots.iter_mut().enumerate() {
            let Some(transfer) = entry.running.as_mut() else {
                continue;
            };
            if transfer.is_done() || transfer.breaking || !which(transfer) {
                continue;
            }
            transfer.give_up(scope);
            if transfer.is_done() {
                self.finished.push_back(u32::try_from(slot).unwrap_or(u32::MAX));
            } else {
                transfer.breaking = true;
                self.to_break.push_back(transfer.connection);
            }
        }
    }

    /// A connection that must be closed, so that its READs are flushed and memory comes back.
    pub fn poll_break(&mut self) -> Option<ConnectionId> {
        self.to_break.pop_front()
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.slots
            .iter()
            .filter_map(|slot| slot.running.as_ref())
            .filter(|transfer| !transfer.breaking && !transfer.is_done())
            .map(|transfer| transfer.until)
            .min()
    }

    /// Whether [`Self::poll_finished`] has something.
    #[must_use]
    pub fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Hands back a transfer of which nothing is in flight: its blocks, in the order given to
    /// [`Self::begin`], appended to `out`.
    pub fn poll_finished(&mut self, out: &mut Vec<FinishedBlock<D>>) -> Option<Finished> {
        let slot = self.finished.pop_front()?;
        let entry = self.slots.get_mut(slot as usize)?;
        let mut transfer = entry.running.take()?;
        let id = TransferId { slot, generation: entry.generation };
        entry.generation = entry.generation.wrapping_add(1);
        self.free_slots.push(slot);
        let scope = transfer.broken.unwrap_or(Scope::Local);
        out.extend(transfer.blocks.drain(..).map(|block| FinishedBlock {
            destination: block.destination,
            outcome: if block.failed { Err(scope) } else { Ok(()) },
        }));
        let connection = transfer.connection;
        transfer.plan.clear();
        (transfer.next_read, transfer.next_segment) = (0, 0);
        (transfer.broken, transfer.breaking) = (None, false);
        let paths = std::mem::take(&mut transfer.paths);
        self.spare.push(transfer);
        Some(Finished { id, connection, paths })
    }

    fn get_mut(&mut self, id: TransferId) -> Option<&mut Transfer<D>> {
        let entry = self.slots.get_mut(id.slot as usize)?;
        entry.running.as_mut().filter(|_| entry.generation == id.generation)
    }

    fn credits_used(&self, connection: ConnectionId) -> usize {
        self.credits_used.iter().find(|(of, _)| *of == connection).map_or(0, |(_, used)| *used)
    }

    fn add_credits_used(&mut self, connection: ConnectionId, count: usize) {
        match self.credits_used.iter_mut().find(|(of, _)| *of == connection) {
            Some((_, used)) => *used += count,
            None => self.credits_used.push((connection, count)),
        }
    }

    fn return_credit(&mut self, connection: ConnectionId) {
        if let Some((_, used)) = self.credits_used.iter_mut().find(|(of, _)| *of == connection) {
            *used = used.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests;
