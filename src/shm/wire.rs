//! What travels on the socket: one packet each, little-endian.
//!
//! ```text
//! connector -> acceptor   Hello, with the connector's page
//! acceptor -> connector   Hello, with the acceptor's page
//! both ways               MESSAGE, bytes
//! holder -> reader        Grant, with the region's memory file for reading only
//! holder -> reader        Withdrawal
//! both ways               CANNOT, before the end: the sender has no memory or mappings for this
//! ```

use bytemuck::{Pod, Zeroable};

use crate::limits::MESSAGE_BYTES_MAX;

#[cfg(target_endian = "big")]
compile_error!("the shm fabric sends its packets as they lie in memory: little-endian hosts only");

const MAGIC: [u8; 8] = *b"kvrailSM";

/// Version of everything in this file and of the page's layout. Both ends must have the same one.
pub(super) const VERSION: u32 = 1;

/// First word of a packet: a message follows.
pub(super) const MESSAGE: u32 = 1;
/// First word of a [`Grant`].
pub(super) const GRANT: u32 = 2;
/// First word of a [`Withdrawal`].
pub(super) const WITHDRAWAL: u32 = 3;
/// The whole of a packet: the sender ends the connection for want of something that it needs.
pub(super) const CANNOT: u32 = 4;

/// Length of a packet's first word, bytes.
pub(super) const KIND_BYTES: usize = size_of::<u32>();

/// Longest packet, bytes.
pub(super) const PACKET_BYTES_MAX: usize = KIND_BYTES + MESSAGE_BYTES_MAX;

/// How a connection begins, at either end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Hello {
    magic: [u8; 8],
    version: u32,
    reserved: u32,
}

impl Hello {
    pub(super) const OURS: Self = Self { magic: MAGIC, version: VERSION, reserved: 0 };

    /// Whether these bytes are a hello of this version.
    pub(super) fn is_in(bytes: &[u8]) -> bool {
        bytes == bytemuck::bytes_of(&Self::OURS)
    }
}

/// A region that the receiver may read from now on; its memory file comes along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Grant {
    pub(super) kind: u32,
    /// Its place in the sender's page.
    pub(super) slot: u32,
    pub(super) rkey: u32,
    pub(super) reserved: u32,
    pub(super) address: u64,
    pub(super) len: u64,
}

/// A region that the receiver may read no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Withdrawal {
    pub(super) kind: u32,
    pub(super) slot: u32,
}

const _: () = {
    assert!(size_of::<Hello>() == 16);
    assert!(size_of::<Grant>() == 32);
    assert!(size_of::<Withdrawal>() == 8);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_told_from_everything_else() {
        let good = bytemuck::bytes_of(&Hello::OURS).to_vec();
        assert!(Hello::is_in(&good));
        for at in 0..good.len() {
            let mut other = good.clone();
            other[at] ^= 1;
            assert!(!Hello::is_in(&other), "byte {at}");
        }
        assert!(!Hello::is_in(&good[..15]) && !Hello::is_in(&[]));
    }
}
