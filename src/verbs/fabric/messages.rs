//! Messages of one connection: SENDs on a queue pair of their own, so that they do not queue behind
//! READs.
//!
//! Each end posts [`RECEIVES`] receives and tells how many; a sender has one credit per receive that
//! waits for it, and each frame returns those of the receives that were posted again. So a message
//! always finds a receive, and the device never has to retry. The last credit is kept for a frame
//! that returns credits, or both ends could wait for each other.

use std::collections::VecDeque;
use std::sync::Arc;

use arrayvec::ArrayVec;
use bytemuck::{Pod, Zeroable};

use super::probe::{PROBE_BYTES, is_pattern, own_memory};
use super::wr_id::Work;
use crate::fabric::{FabricError, RemoteSpan};
use crate::limits::MESSAGE_BYTES_MAX;
use crate::verbs::{
    MemoryRegion, ProtectionDomain, QueuePair, Segment, SendList, Served, VerbsError,
};

/// Receives that wait for a peer: a few requests and answers overlap, more would wait in vain.
pub(super) const RECEIVES: u8 = 8;

/// Messages on their way at once; more wait in the queue.
pub(super) const SENDS: u8 = 4;

/// Bytes of a frame that shall travel inside its request: all messages about up to three blocks do. Devices
/// of the last ten years take as much.
pub(super) const INLINE_BYTES: u32 = 256;

/// Credits that are returned by a frame of their own when no message carries them.
const RETURN_AT: u32 = RECEIVES as u32 / 2;

/// Bytes that may wait for credits: eight of the longest messages.
const QUEUE_BYTES_MAX: usize = 8 * MESSAGE_BYTES_MAX;

/// What a waiting message costs beside its bytes, so that empty ones are bounded too.
const WAITING_BYTES: usize = 64;

/// Length of a slot: the longest frame in whole cache lines.
const SLOT_BYTES: usize = (HEADER_BYTES + MESSAGE_BYTES_MAX).next_multiple_of(64);

/// [`Header::kind`]: its sender has read the pattern. Four bytes, the lanes that work, as bits.
pub(super) const READY: u16 = 1;
/// [`Header::kind`]: a message.
pub(super) const MESSAGE: u16 = 2;
/// [`Header::kind`]: credits alone.
const CREDITS: u16 = 3;
/// [`Header::kind`]: which NICs' keys are behind this key of a region? Four bytes, the key.
pub(super) const ASK: u16 = 4;
/// [`Header::kind`]: the answer, [`super::keys::AnswerHeader`] and the keys.
pub(super) const ANSWER: u16 = 5;
/// [`Header::kind`]: as an answer, unasked.
pub(super) const KEYS: u16 = 6;

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Header {
    kind: u16,
    credits: u16,
    len: u32,
}

const HEADER_BYTES: usize = size_of::<Header>();

/// The peer sent what no fabric sends.
#[derive(Debug)]
pub(super) struct Violation;

/// A frame that arrived, without credits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Frame {
    /// [`READY`], with the lanes that work.
    Ready(u32),
    /// A message; its bytes were appended, and so many there are.
    Message(usize),
    /// [`ASK`], with the key.
    Ask(u32),
    /// [`ANSWER`]; its bytes were appended, and so many there are.
    Answer(usize),
    /// [`KEYS`], as an answer.
    Keys(usize),
    /// Credits alone.
    Nothing,
}

/// The message queue pair of one connection.
#[derive(Debug)]
pub(super) struct Messages {
    /// `None` once it is destroyed. Before the ring, so that it goes first.
    pair: Option<QueuePair>,
    ring: MemoryRegion,
    credits: u32,
    /// The peer's receives: more credits than this are a violation.
    receives: u32,
    owed: u32,
    /// Binds that must complete before the next message leaves.
    held: u32,
    free: ArrayVec<u8, { SENDS as usize }>,
    /// Slots whose frames were taken and whose receives are not posted again yet.
    taken: ArrayVec<u8, { RECEIVES as usize }>,
    /// Messages that wait for credits or slots. Allocates only for a peer that is behind.
    waiting: VecDeque<(u16, Vec<u8>)>,
    waiting_bytes: usize,
    list: SendList,
}

impl Messages {
    pub(super) fn new(domain: &Arc<ProtectionDomain>, pair: QueuePair) -> Result<Self, VerbsError> {
        let len = SLOT_BYTES * usize::from(RECEIVES + SENDS);
        let memory = own_memory("kvrail-messages", len)?;
        Ok(Self {
            pair: Some(pair),
            ring: MemoryRegion::new(domain, memory, Served::No)?,
            credits: 0,
            receives: 0,
            owed: 0,
            held: 0,
            free: (0..SENDS).collect(),
            taken: ArrayVec::new(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            list: SendList::default(),
        })
    }

    pub(super) fn pair(&self) -> Option<&QueuePair> {
        self.pair.as_ref()
    }

    /// Posts all receives; the queue pair is in INIT.
    pub(super) fn post_receives(&self) -> Result<(), VerbsError> {
        (0..RECEIVES).try_for_each(|slot| self.post_receive(slot))
    }

    /// The peer has so many receives.
    pub(super) fn grant(&mut self, receives: u32) {
        self.credits = receives;
        self.receives = receives;
    }

    fn segment(&self, place: usize, len: usize) -> Segment {
        Segment {
            addr: self.ring.address() + offset(place),
            length: u32::try_from(len).unwrap_or(0),
            lkey: self.ring.lkey(),
        }
    }

    fn post_receive(&self, slot: u8) -> Result<(), VerbsError> {
        let Some(pair) = &self.pair else { return Ok(()) };
        let id = Work::Receive { slot }.encode();
        pair.post_receive(id, self.segment(usize::from(slot), SLOT_BYTES))
    }

    /// Whether a message of this length can be sent or queued.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.waiting_bytes + len + WAITING_BYTES <= QUEUE_BYTES_MAX
    }

    /// Sends or queues a message for which there is room.
    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), VerbsError> {
        self.control(MESSAGE, message)
    }

    /// Sends or queues a frame. Frames that are no messages are few, so that the room for messages does
    /// not bound them: one question and one answer under way, and the keys of each region.
    pub(super) fn control(&mut self, kind: u16, bytes: &[u8]) -> Result<(), VerbsError> {
        if self.waiting.is_empty() && self.can_send() {
            return self.transmit(kind, bytes);
        }
        self.waiting.push_back((kind, bytes.to_vec()));
        self.waiting_bytes += bytes.len() + WAITING_BYTES;
        Ok(())
    }

    /// Whether an answer waits to be sent: the peer has not taken it, so it cannot ask again.
    pub(super) fn is_answering(&self) -> bool {
        self.waiting.iter().any(|(kind, _)| *kind == ANSWER)
    }

    /// Reads the peer's pattern, to the place of a message that is not sent meanwhile.
    pub(super) fn probe(&mut self, remote: &RemoteSpan) -> Result<(), VerbsError> {
        let (Some(pair), Some(slot)) = (&self.pair, self.free.pop()) else { return Ok(()) };
        let into = self.segment(usize::from(RECEIVES + slot), PROBE_BYTES);
        self.list.clear();
        self.list.read(Work::Probe { slot }.encode(), remote, std::iter::once(into), true);
        post(pair, &mut self.list, "ibv_post_send of a probe")
    }

    /// The READ of the pattern has completed: whether that is what arrived.
    pub(super) fn probed(&mut self, slot: u8) -> bool {
        self.sent(slot);
        let mut bytes = vec![0; PROBE_BYTES];
        let place = offset(usize::from(RECEIVES + slot));
        let found = self.ring.memory().map(|memory| memory.read(place, &mut bytes));
        found.is_some_and(|found| found.is_ok()) && is_pattern(&bytes)
    }

    /// Says that this end can send, and which lanes work.
    pub(super) fn ready(&mut self, working: u32) -> Result<(), VerbsError> {
        self.transmit(READY, &working.to_le_bytes())
    }

    fn can_send(&self) -> bool {
        self.held == 0 && self.credits > 1 && !self.free.is_empty()
    }

    /// Messages from now on wait for one more call of [`Self::release`].
    pub(super) fn hold(&mut self) {
        self.held += 1;
    }

    /// See [`Self::hold`]. What waits leaves at the next [`Self::advance`].
    pub(super) fn release(&mut self) {
        self.held = self.held.saturating_sub(1);
    }

    fn transmit(&mut self, kind: u16, message: &[u8]) -> Result<(), VerbsError> {
        let (Some(pair), Some(memory)) = (&self.pair, self.ring.memory()) else { return Ok(()) };
        let Some(slot) = self.free.pop() else { return Ok(()) };
        let header = Header {
            kind,
            credits: u16::try_from(self.owed).unwrap_or(u16::MAX),
            len: u32::try_from(message.len()).unwrap_or(u32::MAX),
        };
        let place = usize::from(RECEIVES + slot);
        // Messages are no longer than a slot holds: the fabric checks.
        memory
            .write(offset(place), bytemuck::bytes_of(&header))
            .and_then(|()| memory.write(offset(place) + HEADER_BYTES as u64, message))
            .map_err(|error| FabricError::Os {
                call: "writing a message".to_owned(),
                source: std::io::Error::other(error),
                remedy: "report this as a defect",
            })?;
        self.owed -= u32::from(header.credits);
        self.credits -= 1;
        let segment = self.segment(place, HEADER_BYTES + message.len());
        self.list.clear();
        let inline = segment.length <= pair.inline();
        self.list.send(Work::Send { slot }.encode(), std::iter::once(segment), inline);
        post(pair, &mut self.list, "ibv_post_send of a message")
    }

    /// A SEND has completed: its slot is free.
    pub(super) fn sent(&mut self, slot: u8) {
        if slot < SENDS && !self.free.contains(&slot) {
            self.free.push(slot);
        }
    }

    /// A frame arrived in a slot. A message's bytes go to `into`.
    pub(super) fn received(
        &mut self,
        slot: u8,
        bytes: u32,
        into: &mut Vec<u8>,
    ) -> Result<Frame, Violation> {
        let memory = self.ring.memory().ok_or(Violation)?;
        let mut header = Header::zeroed();
        let at = offset(usize::from(slot));
        memory.read(at, bytemuck::bytes_of_mut(&mut header)).map_err(|_outside| Violation)?;
        let len = usize::try_from(header.len).map_err(|_long| Violation)?;
        self.credits += u32::from(header.credits);
        let whole = usize::try_from(bytes).is_ok_and(|bytes| bytes == HEADER_BYTES + len);
        if !whole || len > MESSAGE_BYTES_MAX || self.credits > self.receives {
            return Err(Violation);
        }
        let frame = match header.kind {
            MESSAGE | ANSWER | KEYS => {
                let start = into.len();
                into.resize(start + len, 0);
                let to = into.get_mut(start..).unwrap_or_default();
                memory.read(at + HEADER_BYTES as u64, to).map_err(|_outside| Violation)?;
                match header.kind {
                    ANSWER => Frame::Answer(len),
                    KEYS => Frame::Keys(len),
                    _ => Frame::Message(len),
                }
            }
            kind @ (ASK | READY) if len == 4 => {
                let mut word = [0; 4];
                let from = at + HEADER_BYTES as u64;
                memory.read(from, &mut word).map_err(|_outside| Violation)?;
                let word = u32::from_le_bytes(word);
                if kind == ASK { Frame::Ask(word) } else { Frame::Ready(word) }
            }
            CREDITS if len == 0 => Frame::Nothing,
            _ => return Err(Violation),
        };
        self.taken.try_push(slot).map_err(|_more_than_posted| Violation)?;
        Ok(frame)
    }

    /// Posts the receives again whose frames were taken; answers whether there were any. Called before
    /// completions are taken and not after each: so an answer leaves before its question's receive is
    /// posted again, and the peer gets that credit with the next frame.
    pub(super) fn renew(&mut self) -> Result<bool, VerbsError> {
        let any = !self.taken.is_empty();
        while let Some(slot) = self.taken.pop() {
            self.post_receive(slot)?;
            self.owed += 1;
        }
        Ok(any)
    }

    /// Sends what waits, as far as credits and slots go, and returns credits where many are owed.
    /// Called after completions.
    pub(super) fn advance(&mut self) -> Result<(), VerbsError> {
        while self.can_send()
            && let Some((kind, bytes)) = self.waiting.pop_front()
        {
            self.waiting_bytes -= bytes.len() + WAITING_BYTES;
            self.transmit(kind, &bytes)?;
        }
        if self.owed >= RETURN_AT && self.credits > 0 && !self.free.is_empty() {
            self.transmit(CREDITS, &[])?;
        }
        Ok(())
    }

    /// Whether a message is on its way or waits.
    pub(super) fn has_outgoing(&self) -> bool {
        self.pair.is_some() && (!self.free.is_full() || !self.waiting.is_empty())
    }

    /// Destroys the queue pair.
    pub(super) fn cut(&mut self) {
        self.pair = None;
    }
}

fn post(pair: &QueuePair, list: &mut SendList, call: &str) -> Result<(), VerbsError> {
    pair.post_send(list).map_err(|part| {
        let (call, source) = (call.to_owned(), part.source);
        FabricError::Os { call, source, remedy: "the device may be going away" }.into()
    })
}

fn offset(place: usize) -> u64 {
    (place * SLOT_BYTES) as u64
}
