//! The local door's messages: what an engine and the node on its host say to each other over a Unix
//! socket, while the blocks' bytes stay in the pools that both map.
//!
//! A frame is a [`Header`] of 12 bytes and a body of at most [`limits::DOOR_MESSAGE_BYTES_MAX`]
//! bytes. A body is a fixed head and at most one list of fixed-size entries that fills the rest, so
//! decoding checks every length before it allocates, and a hostile count can claim no memory that
//! the sender did not send. The encoding is canonical: unused bytes are zero, flags are 0 or 1, and
//! a decoder refuses everything else, so that what decodes encodes to the same bytes.
//!
//! The client numbers its requests; the reply carries the number. Replies may come in another order
//! than their requests. The first request is [`Request::Hello`], and only the first.

mod engine;
mod reply;
mod request;
#[cfg(test)]
mod samples;
pub mod stat;
#[cfg(test)]
mod tests;
mod wire;

pub use engine::{
    DeviceUuid, EngineEvent, EngineReply, EngineRequest, ImportRefusal, LayoutId, LoadOutcome,
    MemorySource, MovedBlock,
};
pub use reply::{
    AcquireOutcome, BlockOrigin, EvictedBlock, HeldBlock, ListEntry, PoolSize, PublishOutcome,
    Reply,
};
pub use request::{PublishBlock, Request, Source};

use crate::limits;
use wire::{U16, U32};

/// The version of this protocol. A frame of another version is refused.
pub const VERSION: u8 = 5;

/// Length of a frame's header, bytes.
pub const HEADER_BYTES: usize = 12;

/// Longest sentence of a refusal, bytes.
pub const SENTENCE_BYTES_MAX: usize = 1024;

/// What a frame begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Length of the body that follows, bytes; at most [`limits::DOOR_MESSAGE_BYTES_MAX`].
    pub len: u32,
    /// Which message; requests and replies have kinds of their own.
    pub kind: u8,
    /// The number that the client gave the request.
    pub request: u32,
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct HeaderWire {
    len: U32,
    kind: u8,
    version: u8,
    reserved: U16,
    request: U32,
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// [`DecodeError`] for another version, a body beyond the limit, or bytes set that must be zero.
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Result<Self, DecodeError> {
        let wire: HeaderWire = bytemuck::cast(bytes);
        let len = wire.len.get();
        if wire.version != VERSION {
            return Err(DecodeError::Version { got: wire.version });
        }
        if len as usize > limits::DOOR_MESSAGE_BYTES_MAX {
            return Err(DecodeError::TooLong { bytes: len });
        }
        if wire.reserved.get() != 0 {
            return Err(DecodeError::Field { field: "reserved" });
        }
        Ok(Self { len, kind: wire.kind, request: wire.request.get() })
    }

    /// The bytes of this header.
    #[must_use]
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        bytemuck::cast(HeaderWire {
            len: U32::new(self.len),
            kind: self.kind,
            version: VERSION,
            reserved: U16::new(0),
            request: U32::new(self.request),
        })
    }
}

/// Bytes that are no message of this protocol. The sender is at fault and its connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The other end speaks another version.
    #[error(
        "the other end speaks version {got} of the door protocol, this one {VERSION}: use client and node of one release"
    )]
    Version {
        /// Its version.
        got: u8,
    },
    /// The frame is longer than any message.
    #[error("a frame of {bytes} bytes is longer than the limit of {max}", max = limits::DOOR_MESSAGE_BYTES_MAX)]
    TooLong {
        /// Length of its body.
        bytes: u32,
    },
    /// No message has this kind in this direction.
    #[error("no message has kind {kind:#04x}")]
    Kind {
        /// The kind.
        kind: u8,
    },
    /// The body is not as long as its kind and count say.
    #[error("the body's length does not fit its kind and count")]
    Length,
    /// The list has more entries than a request may have.
    #[error("a list of {count} entries is longer than the limit of {limit}")]
    Count {
        /// Its entries.
        count: u32,
        /// The limit.
        limit: usize,
    },
    /// A field holds a value that it cannot have.
    #[error("the field {field} holds a value that it cannot have")]
    Field {
        /// Its name.
        field: &'static str,
    },
}

/// A message that cannot be encoded because a list or text is longer than the protocol allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a request at the local door takes at most {limit} entries, got {count}: split it")]
pub struct TooMany {
    /// What was given.
    pub count: usize,
    /// The limit.
    pub limit: usize,
}
