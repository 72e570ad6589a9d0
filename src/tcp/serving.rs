//! The responder's half of a data stream: the peer's READs, answered from registered memory.
//!
//! A request names its region by key and address until the very call that sends its bytes: nothing
//! queued holds memory or a pointer to it, so that a deregistration needs to find nothing here.

use std::collections::VecDeque;

use arrayvec::ArrayVec;

use super::flow::BYTES_PER_POLL;
use super::vectored::Gather;
use super::wire::{FRAME_BYTES, Frame, RESPONSE, STATUS_REMOTE_ACCESS, STATUS_SUCCESS};
use crate::memory::{Mapping, Regions};
use crate::sys::connections::Broken;

/// Responses that are sent with one call.
pub(super) const RESPONSES_PER_CALL: usize = 16;

/// A READ of the peer that waits for its turn.
#[derive(Debug, Clone, Copy)]
struct Serve {
    slot: u32,
    generation: u32,
    rkey: u32,
    address: u64,
    len: u32,
    /// It came before the peer was admitted.
    refused: bool,
}

/// One response of a call: its header, and where its payload lies.
pub(super) struct Head<'a> {
    frame: Frame,
    payload: Option<(&'a Mapping, u64)>,
}

/// The peer's READs that wait for their turn, in order. The connection bounds their number.
#[derive(Debug, Default)]
pub(super) struct Serving {
    queue: VecDeque<Serve>,
    /// Bytes sent of the response at the front, header included, and the status it began with.
    begun: Option<(usize, u32)>,
}

impl Serving {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Queues a request. It is refused in its turn where the peer was not admitted when it came.
    pub(super) fn push(&mut self, request: &Frame, admitted: bool) {
        self.queue.push_back(Serve {
            slot: request.slot,
            generation: request.generation,
            rkey: request.word,
            address: request.address,
            len: request.len,
            refused: !admitted,
        });
    }

    /// The next responses, each one checked against the regions as they are now.
    pub(super) fn heads<'a>(
        &self,
        regions: &'a Regions,
    ) -> Result<ArrayVec<Head<'a>, RESPONSES_PER_CALL>, Broken> {
        let mut heads = ArrayVec::new();
        let mut bytes = 0;
        let mut begun = self.begun;
        for serve in self.queue.iter().take(RESPONSES_PER_CALL) {
            let payload = match serve {
                Serve { refused: true, .. } => None,
                Serve { len: 0, .. } => Some(None),
                serve => regions.remote(serve.rkey, serve.address, serve.len).map(Some),
            };
            if let Some((_sent, STATUS_SUCCESS)) = begun.take()
                && payload.is_none()
            {
                // Its region went away with half of it sent: the rest can be neither sent nor taken
                // back, so the connection breaks.
                return Err(Broken::REQUESTED);
            }
            let (word, len) = match payload {
                Some(_) => (STATUS_SUCCESS, serve.len),
                None => (STATUS_REMOTE_ACCESS, 0),
            };
            heads.push(Head {
                frame: Frame {
                    kind: RESPONSE,
                    word,
                    slot: serve.slot,
                    generation: serve.generation,
                    address: 0,
                    len,
                    reserved: 0,
                },
                payload: payload.flatten(),
            });
            bytes += len as usize;
            if bytes >= BYTES_PER_POLL {
                break;
            }
        }
        Ok(heads)
    }

    /// Lists what one call sends: a response that has begun, then `requests`, then other responses.
    pub(super) fn gather<'a>(
        &self,
        heads: &'a [Head<'_>],
        requests: &'a [u8],
    ) -> Result<Gather<'a>, Broken> {
        let mut gather = Gather::new();
        let mut heads = heads.iter();
        if let Some((sent, _status)) = self.begun
            && let Some(head) = heads.next()
            && !head.list(&mut gather, sent)?
        {
            return Ok(gather);
        }
        gather.bytes(requests);
        for head in heads {
            if gather.room() < 2 || !head.list(&mut gather, 0)? {
                break;
            }
        }
        Ok(gather)
    }

    /// Accounts for `count` bytes sent, in the order in which they were listed: behind a response that
    /// had begun came `requests` bytes. Answers how many of these went out, and how many responses
    /// are done.
    pub(super) fn account(
        &mut self,
        count: usize,
        heads: &[Head<'_>],
        requests: usize,
    ) -> (usize, usize) {
        let waiting = self.queue.len();
        let mut left = count;
        let mut heads = heads.iter();
        if self.begun.is_some()
            && let Some(head) = heads.next()
        {
            left = self.account_one(left, &head.frame);
        }
        let requests = left.min(requests);
        left -= requests;
        for head in heads {
            if left == 0 {
                break;
            }
            left = self.account_one(left, &head.frame);
        }
        (requests, waiting - self.queue.len())
    }

    fn account_one(&mut self, count: usize, frame: &Frame) -> usize {
        let (sent, _status) = self.begun.unwrap_or((0, frame.word));
        let missing = FRAME_BYTES + frame.len as usize - sent;
        if count < missing {
            self.begun = Some((sent + count, frame.word));
            return 0;
        }
        self.begun = None;
        self.queue.pop_front();
        count - missing
    }
}

impl Head<'_> {
    /// Lists the header and the payload from byte `sent` of both on. Answers whether all of it fits
    /// into the bounds of one call; where not, nothing may follow it.
    fn list<'a>(&'a self, gather: &mut Gather<'a>, sent: usize) -> Result<bool, Broken> {
        let header = bytemuck::bytes_of(&self.frame);
        gather.bytes(header.get(sent..).unwrap_or_default());
        let Some((memory, offset)) = self.payload else {
            return Ok(true);
        };
        let skip = sent.saturating_sub(FRAME_BYTES);
        let rest = self.frame.len as usize - skip;
        let part = rest.min(BYTES_PER_POLL);
        gather.mapped(memory, offset + skip as u64, part).map_err(|_outside| Broken::REQUESTED)?;
        Ok(part == rest)
    }
}
