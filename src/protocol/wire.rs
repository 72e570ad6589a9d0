//! The layouts: fixed, little-endian, of alignment 1 and without padding, so that a message is cast
//! from the bytes it arrived in. Nothing here judges values; `decode` does.

use bytemuck::{Pod, Zeroable};

use crate::limits::{HASH_BYTES_MAX, NAME_BYTES_MAX};

macro_rules! little_endian {
    ($name:ident, $int:ty, $bytes:literal) => {
        #[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
        #[repr(transparent)]
        pub(super) struct $name([u8; $bytes]);

        impl $name {
            pub(super) const fn get(self) -> $int {
                <$int>::from_le_bytes(self.0)
            }
        }

        impl From<$int> for $name {
            fn from(value: $int) -> Self {
                Self(value.to_le_bytes())
            }
        }
    };
}

little_endian!(U16, u16, 2);
little_endian!(U32, u32, 4);
little_endian!(U64, u64, 8);

/// What every message begins with.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Header {
    pub(super) kind: u8,
    pub(super) version: u8,
    pub(super) reserved: [u8; 2],
    /// Bytes that follow the header.
    pub(super) body: U32,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Introduction {
    pub(super) node: [u8; 16],
    pub(super) epoch: U64,
    pub(super) nonce: [u8; 16],
    pub(super) requester_len: u8,
    pub(super) reserved: [u8; 7],
    pub(super) requester: [u8; NAME_BYTES_MAX],
}

/// Then `count` regions.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Welcome {
    pub(super) introduction: Introduction,
    pub(super) confirm: Confirm,
}

/// Then `count` regions.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Confirm {
    pub(super) proof: [u8; 32],
    pub(super) count: U16,
    pub(super) reserved: [u8; 6],
}

/// Reject and Goodbye.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Reason {
    pub(super) reason: u8,
    pub(super) reserved: [u8; 7],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Load {
    pub(super) outstanding_bytes: U64,
    pub(super) pause_ms: U32,
}

/// Then `count` hashes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Lend {
    pub(super) request: U64,
    pub(super) namespace: U64,
    pub(super) count: U16,
    pub(super) reserved: [u8; 6],
}

/// Then `count` loans.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Lease {
    pub(super) request: U64,
    pub(super) lease: U64,
    pub(super) ttl_ms: U32,
    pub(super) load: Load,
    pub(super) count: U16,
    pub(super) reserved: [u8; 6],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Renewed {
    pub(super) lease: U64,
    pub(super) ttl_ms: U32,
    pub(super) load: Load,
}

/// Then the bitmap of `count` bits.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Complete {
    pub(super) lease: U64,
    pub(super) epoch: U64,
    pub(super) count: U16,
    pub(super) reserved: [u8; 6],
}

/// Then `count` ranks.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Ranks {
    pub(super) lease: U64,
    pub(super) load: Load,
    pub(super) count: U16,
    pub(super) status: u8,
    pub(super) reserved: [u8; 1],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Abort {
    pub(super) lease: U64,
    pub(super) reason: u8,
    pub(super) reserved: [u8; 7],
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Pong {
    pub(super) token: U64,
    pub(super) load: Load,
}

#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Region {
    pub(super) rkey: U32,
    pub(super) address: U64,
    pub(super) len: U64,
}

/// Then so many regions and so many tensors.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Layout {
    pub(super) number: U32,
    pub(super) blocks: U32,
    pub(super) regions: U16,
    pub(super) tensors: U16,
    pub(super) reserved: [u8; 4],
}

#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Tensor {
    pub(super) region: U16,
    pub(super) layers: U16,
    pub(super) segment_bytes: U32,
    pub(super) offset: U64,
    pub(super) layer_stride: U64,
    pub(super) kv_stride: U64,
    pub(super) block_stride: U64,
}

#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Hash {
    pub(super) len: u8,
    pub(super) bytes: [u8; HASH_BYTES_MAX],
}

#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Loan {
    pub(super) status: u8,
    pub(super) rank: u8,
    pub(super) refusal: u8,
    pub(super) reserved: [u8; 1],
    pub(super) generation: U32,
    pub(super) rkey: U32,
    pub(super) len: U32,
    pub(super) address: U64,
    pub(super) checksum: U64,
}
