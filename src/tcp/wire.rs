//! What travels on the sockets: fixed little-endian headers, and payload bytes after some of them.
//!
//! ```text
//! control   connector -> acceptor   Preamble{PRIMARY, streams wanted}
//! control   acceptor -> connector   Preamble{WELCOME, streams granted, token}
//! data      connector -> acceptor   Preamble{JOIN, token}              one per granted stream
//! control   acceptor -> connector   ControlHeader{READY}
//! control   both ways               ControlHeader{MESSAGE, len} bytes
//! data      both ways               Frame{REQUEST}, or Frame{RESPONSE, len} bytes
//! ```
//!
//! Nobody sends a byte after its preamble before the other end has answered, so that a preamble can
//! be read alone and its socket handed on. The token is 16 random bytes: it ties data streams to the
//! control stream that was granted them.

use bytemuck::{Pod, Zeroable};

#[cfg(target_endian = "big")]
compile_error!("the TCP fabric sends its headers as they lie in memory: little-endian hosts only");

/// First bytes of every stream.
pub(super) const MAGIC: [u8; 8] = *b"kvrail\0\x01";

/// Version of everything in this file. Both ends must have the same one.
pub(super) const VERSION: u32 = 1;

/// [`Preamble::kind`]: the connector opens a connection.
pub(super) const PRIMARY: u32 = 1;
/// [`Preamble::kind`]: the connector adds a data stream to the connection of the token.
pub(super) const JOIN: u32 = 2;
/// [`Preamble::kind`]: the acceptor's answer to [`PRIMARY`].
pub(super) const WELCOME: u32 = 3;

/// [`ControlHeader::kind`]: all data streams have joined.
pub(super) const READY: u32 = 1;
/// [`ControlHeader::kind`]: a message of `len` bytes follows.
pub(super) const MESSAGE: u32 = 2;

/// [`Frame::kind`]: read `len` bytes at `address` under the key `word`.
pub(super) const REQUEST: u32 = 0x5251;
/// [`Frame::kind`]: the answer to a request, with the status `word`; `len` bytes follow.
pub(super) const RESPONSE: u32 = 0x5253;

/// [`Frame::word`] of a response: the bytes follow.
pub(super) const STATUS_SUCCESS: u32 = 0;
/// [`Frame::word`] of a response: key, bounds or access refused; no byte follows.
pub(super) const STATUS_REMOTE_ACCESS: u32 = 1;

/// How a stream begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Preamble {
    pub(super) magic: [u8; 8],
    pub(super) version: u32,
    pub(super) kind: u32,
    pub(super) streams: u32,
    pub(super) reserved: u32,
    pub(super) token: [u8; 16],
}

/// Length of a [`Preamble`], bytes.
pub(super) const PREAMBLE_BYTES: usize = size_of::<Preamble>();

impl Preamble {
    pub(super) const fn new(kind: u32, streams: u32, token: [u8; 16]) -> Self {
        Self { magic: MAGIC, version: VERSION, kind, streams, reserved: 0, token }
    }

    /// Decodes and checks magic and version.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let preamble: Self = bytemuck::try_pod_read_unaligned(bytes).ok()?;
        (preamble.magic == MAGIC && preamble.version == VERSION).then_some(preamble)
    }
}

/// What precedes each message on the control stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ControlHeader {
    pub(super) kind: u32,
    pub(super) len: u32,
}

/// Length of a [`ControlHeader`], bytes.
pub(super) const CONTROL_HEADER_BYTES: usize = size_of::<ControlHeader>();

/// A READ's request, or the head of its response. Both are as long, so that a receiver knows how
/// much to read before it knows which one comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Frame {
    pub(super) kind: u32,
    /// The key in a request, the status in a response.
    pub(super) word: u32,
    /// The requester's work request; a response echoes it.
    pub(super) slot: u32,
    pub(super) generation: u32,
    /// The remote address in a request, zero in a response.
    pub(super) address: u64,
    /// Bytes to read, or bytes that follow.
    pub(super) len: u32,
    pub(super) reserved: u32,
}

/// Length of a [`Frame`], bytes.
pub(super) const FRAME_BYTES: usize = size_of::<Frame>();

const _: () = {
    assert!(PREAMBLE_BYTES == 40);
    assert!(CONTROL_HEADER_BYTES == 8);
    assert!(FRAME_BYTES == 32);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_lie_on_the_wire_as_written_down() {
        let preamble = Preamble::new(JOIN, 3, [7; 16]);
        let mut expected = b"kvrail\0\x01".to_vec();
        expected.extend([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([7; 16]);
        assert_eq!(bytemuck::bytes_of(&preamble), expected);
        let frame = Frame {
            kind: REQUEST,
            word: 0x0403_0201,
            slot: 5,
            generation: 6,
            address: 0x0807_0605_0403_0201,
            len: 9,
            reserved: 0,
        };
        assert_eq!(
            bytemuck::bytes_of(&frame),
            [
                0x51, 0x52, 0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 6, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0,
                0, 0, 0, 0, 0, 0
            ]
        );
    }

    #[test]
    fn other_magic_version_or_length_is_no_preamble() {
        let good = Preamble::new(PRIMARY, 2, [0; 16]);
        assert_eq!(Preamble::decode(bytemuck::bytes_of(&good)), Some(good));
        let mut other = good;
        other.version += 1;
        assert_eq!(Preamble::decode(bytemuck::bytes_of(&other)), None);
        other = good;
        other.magic[0] = b'G';
        assert_eq!(Preamble::decode(bytemuck::bytes_of(&other)), None);
        assert_eq!(Preamble::decode(&bytemuck::bytes_of(&good)[1..]), None);
    }
}
