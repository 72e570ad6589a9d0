//! What a connection makes of its completions.

use super::broken::status;
use super::connection::{Connection, Stage, Surroundings};
use super::link::Link;
use super::messages::{ANSWER, Frame};
use super::regions::Regions;
use super::wr_id::Work;
use crate::fabric::{Completion, CompletionStatus, EventBatch, FabricEvent};
use crate::sys::connections::{Breakable, Broken};
use crate::sys::ibverbs::ibv_wc;

/// So many times completions are taken per turn, so that one peer does not keep the others waiting.
const TURNS: usize = 8;

impl Connection {
    /// Takes completions, a bounded number. Answers whether there were any.
    pub(super) fn drain(&mut self, around: &mut Surroundings<'_>, batch: &mut EventBatch) -> bool {
        if matches!(self.stage, Stage::Dialing | Stage::Welcome | Stage::Greeting) {
            return false;
        }
        let mut found = std::mem::take(around.found);
        let queues = self.link.as_ref().map_or(0, |link| link.queues.len());
        let mut any = false;
        for queue in 0..queues {
            any |= self.take_completions(queue, &mut found, around, batch);
        }
        *around.found = found;
        any |= self.unpark(around, batch);
        if any
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
                self.take_probe(slot, status, batch)
            }
            Some(Work::Receive { slot }) if good => {
                self.take_frame((slot, done.byte_len), around, batch)
            }
            Some(Work::Receive { .. }) => Err(Broken::PEER_CLOSED),
            None => {
                *around.stale += 1;
                Ok(())
            }
        }
    }

    /// The path of the messages does not work.
    fn avoid_messages_path(&self, around: &mut Surroundings<'_>) {
        let nic = self.link.as_ref().map_or(0, Link::messages_nic);
        around.avoided.add(nic, self.address, around.now);
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
        {
            around.avoided.add(lane.rail().nic, self.address, around.now);
        }
        let known = lanes.and_then(|lanes| lanes.get_mut(usize::from(lane))).is_some_and(|lane| {
            lane.complete(number, told, |wr_id, status| {
                let done = Completion { connection, wr_id, status };
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
        around: &Surroundings<'_>,
        batch: &mut EventBatch,
    ) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        let start = batch.bytes.len();
        let frame = link.messages.received(slot, bytes, &mut batch.bytes);
        let frame = frame.map_err(|_violation| Broken::VIOLATION)?;
        link.messages.renew(slot).map_err(|_gone| Broken::UNREACHABLE)?;
        if self.is_broken() {
            batch.bytes.truncate(start);
            return Ok(());
        }
        match (frame, self.stage) {
            (Frame::Ready, Stage::Ready) => self.take_ready(batch)?,
            (_, Stage::Open) if frame != Frame::Ready => {}
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
            Frame::Answer(len) => {
                let answer = batch.bytes.get(start..start + len).unwrap_or_default();
                let learned = self.take_answer(answer);
                batch.bytes.truncate(start);
                learned
            }
            Frame::Ready | Frame::Nothing => Ok(()),
        }
    }

    /// The peer asks for the keys of a region. One that may not read yet is told of none.
    fn answer(&mut self, key: u32, around: &Surroundings<'_>) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        if link.messages.is_answering() {
            return Err(Broken::VIOLATION);
        }
        let shown = self.admitted.then_some(around.regions);
        let bytes = Regions::answer(shown, key, around.nics);
        link.messages.control(ANSWER, &bytes).map_err(|error| {
            tracing::warn!(%error, "a connection ends");
            Broken::UNREACHABLE
        })
    }

    fn take_answer(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let asked = self.parked.asked.take().ok_or(Broken::VIOLATION)?;
        self.keys.learn(asked, self.peer_nics, bytes).ok_or(Broken::VIOLATION)
    }
}
