//! What a connection makes of its completions.

use super::broken::status;
use super::connection::{Connection, Stage, Surroundings};
use super::link::Link;
use super::messages::{ANSWER, Frame, KEYS};
use super::regions::Regions;
use super::wr_id::Work;
use crate::fabric::{Completion, CompletionStatus, EventBatch, FabricEvent, WindowId};
use crate::sys::connections::{Breakable, Broken};
use crate::sys::ibverbs::ibv_wc;

/// So many times completions are taken per turn, so that one peer does not keep the others waiting.
const TURNS: usize = 8;

impl Connection {
    /// Takes completions, a bounded number. Answers whether there were any.
    pub(super) fn drain(&mut self, around: &mut Surroundings<'_>, batch: &mut EventBatch) -> bool {
        if matches!(self.stage, Stage::Dialing | Stage::Welcome | Stage::Greeting | Stage::Raising)
        {
            return false;
        }
        let connection = self.id;
        if let Some(windows) = self.windows_mut() {
            let revoked = |window| FabricEvent::Revoked { connection, window };
            batch.events.extend(windows.take_revoked().map(revoked));
        }
        let renewed = self.link.as_mut().map_or(Ok(false), |link| link.messages.renew());
        let renewed = renewed.unwrap_or_else(|error| {
            tracing::warn!(%error, "a connection ends");
            self.cut(Broken::UNREACHABLE, around.now);
            false
        });
        let mut found = std::mem::take(around.found);
        let queues = self.link.as_ref().map_or(0, |link| link.queues.len());
        let mut any = false;
        for queue in 0..queues {
            any |= self.take_completions(queue, &mut found, around, batch);
        }
        *around.found = found;
        any |= self.unpark(around, batch);
        if (any || renewed)
            && let Some(link) = &mut self.link
            && let Err(error) = link.messages.advance()
        {
            tracing::warn!(%error, "a connection ends");
            self.cut(Broken::UNREACHABLE, around.now);
        }
        any
    }

    fn take_completions(
        &mut self,
        queue: usize,
        found: &mut [ibv_wc],
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> bool {
        let mut any = false;
        for _turn in 0..TURNS {
            let queue = self.link.as_ref().and_then(|link| link.queues.get(queue));
            let Some(queue) = queue else { return any };
            let count = match queue.cq.poll(found) {
                Ok(count) => count,
                Err(error) => {
                    tracing::warn!(%error, "a connection ends");
                    self.cut(Broken::UNREACHABLE, around.now);
                    return any;
                }
            };
            for done in found.iter().take(count) {
                if let Err(broken) = self.complete(done, around, batch) {
                    self.cut(broken, around.now);
                }
            }
            any |= count > 0;
            if count < found.len() {
                break;
            }
        }
        any
    }

    fn complete(
        &mut self,
        done: &ibv_wc,
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let status = status(done.status);
        let good = status == CompletionStatus::Success;
        match Work::decode(done.wr_id) {
            Some(Work::Read { lane, number }) => {
                self.complete_read((lane, number), status, around, batch)
            }
            Some(Work::Marker { lane }) => {
                self.abandon(usize::from(lane), batch);
                Ok(())
            }
            Some(Work::Send { slot }) => {
                let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
                link.messages.sent(slot);
                match status {
                    CompletionStatus::Success => Ok(()),
                    CompletionStatus::Unreachable => {
                        self.avoid_messages_path(around);
                        Err(Broken::UNREACHABLE)
                    }
                    _ => Err(Broken::PEER_CLOSED),
                }
            }
            Some(Work::Probe { slot }) => {
                if status == CompletionStatus::Unreachable {
                    self.avoid_messages_path(around);
                }
                self.take_probe(slot, status, around, batch)
            }
            Some(Work::LaneProbe { lane }) => self.take_trial(lane, good, around, batch),
            // What ends a lane says so by itself.
            Some(Work::LaneReceive { .. }) => Ok(()),
            Some(Work::Receive { slot }) if good => {
                self.take_frame((slot, done.byte_len), around, batch)
            }
            Some(Work::Receive { .. }) => Err(Broken::PEER_CLOSED),
            Some(work) => self.complete_window(work, done.status, batch),
            None => {
                *around.stale += 1;
                Ok(())
            }
        }
    }

    /// A window was bound, or its key has ended.
    fn complete_window(
        &mut self,
        work: Work,
        code: i32,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        match (status(code), work) {
            (CompletionStatus::Success, Work::Invalidate { window }) => {
                let (connection, window) = (self.id, WindowId(window));
                if self.windows_mut().is_some_and(|windows| windows.ended(window)) {
                    batch.events.push(FabricEvent::Revoked { connection, window });
                }
                Ok(())
            }
            (CompletionStatus::Success, _) => {
                let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
                link.messages.release();
                Ok(())
            }
            (status @ CompletionStatus::Flushed, _) => Err(Broken::by_read(status)),
            _ => {
                if !self.is_broken() {
                    tracing::error!(?work, code, "a window cannot be bound or ended");
                }
                Err(Broken::EXHAUSTED)
            }
        }
    }

    /// The path of the messages does not work.
    fn avoid_messages_path(&self, around: &mut Surroundings<'_>) {
        let nic = self.link.as_ref().map_or(0, Link::messages_nic);
        if let Some(path) = self.path(nic) {
            around.avoided.add(path, around.now);
        }
    }

    fn complete_read(
        &mut self,
        (lane, number): (u8, u64),
        status: CompletionStatus,
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let (mut told, mut breaks) = (status, None);
        match status {
            CompletionStatus::Success => {}
            _ if self.broken.is_none() => {
                let broken = Broken::by_read(status);
                if status == CompletionStatus::Flushed {
                    told = broken.first;
                }
                breaks = Some(broken);
            }
            // What fails after that on another lane fails with its connection.
            _ => told = self.first.take().unwrap_or(CompletionStatus::Flushed),
        }
        let connection = self.id;
        let lanes = self.link.as_mut().map(|link| &mut link.lanes);
        if status == CompletionStatus::Unreachable
            && let Some(lane) = lanes.as_ref().and_then(|lanes| lanes.get(usize::from(lane)))
            && let Some(to) = self.address
        {
            around.avoided.add((lane.rail().nic, to), around.now);
        }
        let known = lanes.and_then(|lanes| lanes.get_mut(usize::from(lane))).is_some_and(|lane| {
            let path = lane.rail().path();
            lane.complete(number, told, |wr_id, status| {
                let done = Completion { connection, wr_id, status, path };
                batch.events.push(FabricEvent::Completed(done));
            })
        });
        if !known {
            *around.stale += 1;
        }
        if let Some(broken) = breaks {
            self.cut(broken, around.now);
            // The one that broke it has told already.
            self.first = None;
        }
        Ok(())
    }

    fn take_frame(
        &mut self,
        (slot, bytes): (u8, u32),
        around: &mut Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        let start = batch.bytes.len();
        let frame = link.messages.received(slot, bytes, &mut batch.bytes);
        let frame = frame.map_err(|_violation| Broken::VIOLATION)?;
        if self.is_broken() {
            batch.bytes.truncate(start);
            return Ok(());
        }
        match (frame, self.stage) {
            (Frame::Ready(working), Stage::Ready) => {
                return self.take_ready(working, around, batch);
            }
            (Frame::Ready(_), _) => return Err(Broken::VIOLATION),
            (_, Stage::Open) => {}
            _ => return Err(Broken::VIOLATION),
        }
        match frame {
            Frame::Message(len) => {
                // A caller that never clears its batch reaches 4 GiB; its connections break, the
                // others' bytes stay right.
                let range = u32::try_from(start).ok().zip(u32::try_from(start + len).ok());
                let (start, end) = range.ok_or(Broken::REQUESTED)?;
                batch.events.push(FabricEvent::Message { connection: self.id, start, end });
                Ok(())
            }
            Frame::Ask(key) => self.answer(key, around),
            Frame::Answer(len) | Frame::Keys(len) => {
                let told = batch.bytes.get(start..start + len).unwrap_or_default();
                let key = self.keys.learn(self.peer_nics, told).ok_or(Broken::VIOLATION);
                batch.bytes.truncate(start);
                match (frame, key?) {
                    (Frame::Answer(_), key) if self.parked.asked != Some(key) => {
                        Err(Broken::VIOLATION)
                    }
                    (Frame::Answer(_), _) => {
                        self.parked.asked = None;
                        Ok(())
                    }
                    _ => Ok(()),
                }
            }
            Frame::Ready(_) | Frame::Nothing => Ok(()),
        }
    }

    /// The peer asks for the keys of a region. One that may not read yet is told of none.
    fn answer(&mut self, key: u32, around: &Surroundings<'_>) -> Result<(), Broken> {
        if self.link.as_ref().is_some_and(|link| link.messages.is_answering()) {
            return Err(Broken::VIOLATION);
        }
        let shown = self.admitted.then_some(around.regions);
        self.control(ANSWER, &Regions::answer(shown, key, around.nics))
    }

    /// Tells the peer, which may read it, the keys of a region.
    pub(super) fn tell(&mut self, key: u32, around: &Surroundings<'_>) -> Result<(), Broken> {
        self.control(KEYS, &Regions::answer(Some(around.regions), key, around.nics))
    }

    fn control(&mut self, kind: u16, bytes: &[u8]) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        link.messages.control(kind, bytes).map_err(|error| {
            tracing::warn!(%error, "a connection ends");
            Broken::UNREACHABLE
        })
    }
}
