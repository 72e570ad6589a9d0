//! Blocks that lie in pieces at their holder: the layout is told once, then a block is its number.

use std::fmt;

use bytemuck::{Pod, Zeroable};

use super::wire;
use crate::fabric::RemoteSpan;
use crate::layout::{AllocationId, BlockId, KvSplit, Tensor};

/// Where a peer reads a block that is lent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In one piece.
    Span(RemoteSpan),
    /// In the pieces that a layout says, which the holder has told before on the same connection.
    Block {
        /// The layout's number.
        layout: u32,
        /// The block's number in it.
        block: BlockId,
        /// Its logical bytes: those of every block of the layout.
        len: u32,
    },
}

impl Place {
    /// Logical bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "no block is empty")]
    pub const fn len(&self) -> u32 {
        match self {
            Self::Span(span) => span.len,
            Self::Block { len, .. } => *len,
        }
    }
}

/// A tensor of a layout as it travels. Its allocation is the place of a region in the message's list.
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct TensorEntry(wire::Tensor);

impl TensorEntry {
    /// The tensor.
    #[must_use]
    pub const fn tensor(&self) -> Tensor {
        let wire = &self.0;
        Tensor {
            allocation: AllocationId(wire.region.get()),
            offset: wire.offset.get(),
            layers: wire.layers.get(),
            layer_stride: wire.layer_stride.get(),
            // Keys and values in one place would be one segment.
            kv: match wire.kv_stride.get() {
                0 => KvSplit::Fused,
                stride => KvSplit::Split { stride },
            },
            block_stride: wire.block_stride.get(),
            segment_bytes: wire.segment_bytes.get(),
        }
    }
}

impl From<&Tensor> for TensorEntry {
    fn from(tensor: &Tensor) -> Self {
        let kv_stride = match tensor.kv {
            KvSplit::Fused => 0,
            KvSplit::Split { stride } => stride,
        };
        Self(wire::Tensor {
            region: tensor.allocation.0.into(),
            layers: tensor.layers.into(),
            segment_bytes: tensor.segment_bytes.into(),
            offset: tensor.offset.into(),
            layer_stride: tensor.layer_stride.into(),
            kv_stride: kv_stride.into(),
            block_stride: tensor.block_stride.into(),
        })
    }
}

impl fmt::Debug for TensorEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tensor().fmt(f)
    }
}
