//! How a block lies in an engine's KV cache, so that its number names its bytes.
//!
//! An engine keeps the KV cache of many blocks in a few large tensors. A block's bytes are scattered
//! over them: for each layer a piece with the keys and one with the values, or one with both. Such a
//! piece is a **segment**. A [`Tensor`] says by strides where the segments of all blocks lie:
//!
//! ```text
//! first byte of a segment = offset + layer * layer_stride + kv * kv_stride + block * block_stride
//! ```
//!
//! The order of the dimensions in memory is the strides' affair. A cache that vLLM lays out as
//! `[2, num_blocks, ...]` for each layer is [`KvSplit::Split`] with the larger K/V stride;
//! `[num_blocks, 2, ...]` has the larger block stride; `[num_blocks, num_layers, ...]` is one tensor for
//! all layers.
//!
//! The **logical bytes** of a block are its segments in the order tensor, layer, K before V. That is how
//! it lies in a pool, travels, and is summed up, so that engines with different strides, and even with
//! different segment lengths, read each other's blocks as long as this order has the same bytes.
//!
//! A [`Layout`] exists only if no two segments share a byte and all lie in their allocations
//! ([`LayoutError`] says by which numbers they do not). What is said here is checked once; a block's
//! segments need no further check.

#![forbid(unsafe_code)]

mod overlap;
#[cfg(test)]
mod tests;

use crate::limits;
use crate::types::{Extent, Scope};

/// One allocation of an engine, as its connection numbers it, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AllocationId(pub u16);

/// A block of a layout, as the engine numbers it, from 0: vLLM's block id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The block that an extent of a layout names; one that no layout has where it names none.
    #[must_use]
    pub fn of(extent: &Extent) -> Self {
        Self(u32::try_from(extent.offset).unwrap_or(u32::MAX))
    }
}

/// How keys and values of one layer of one block lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvSplit {
    /// In one segment: interleaved, or one latent vector for both.
    Fused,
    /// In two, the values this many bytes behind the keys.
    Split {
        /// Bytes from the first byte of K to the first byte of V.
        stride: u64,
    },
}

impl KvSplit {
    /// Segments of one layer.
    #[must_use]
    pub const fn segments(self) -> u64 {
        match self {
            Self::Fused => 1,
            Self::Split { .. } => 2,
        }
    }

    const fn stride(self) -> u64 {
        match self {
            Self::Fused => 0,
            Self::Split { stride } => stride,
        }
    }
}

/// The part of a KV cache whose segments have one length and lie at fixed strides. All offsets,
/// strides and lengths are multiples of [`limits::LAYOUT_ALIGN`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// The allocation that it lies in.
    pub allocation: AllocationId,
    /// Bytes from the allocation's start to the first segment of block 0.
    pub offset: u64,
    /// Layers in it, at least 1.
    pub layers: u16,
    /// Bytes from one layer's segment to the next one's; means nothing with one layer.
    pub layer_stride: u64,
    /// Keys and values.
    pub kv: KvSplit,
    /// Bytes from one block's segment to the next one's; means nothing with one block.
    pub block_stride: u64,
    /// Bytes of one segment, 1 to [`limits::BLOCK_BYTES_MAX`].
    pub segment_bytes: u32,
}

impl Tensor {
    /// Segments that one block has in this tensor.
    const fn segments(&self) -> u64 {
        self.layers as u64 * self.kv.segments()
    }

    /// Offsets of block 0's segments in the allocation, in order.
    fn origins(&self) -> impl Iterator<Item = u64> + Clone + use<> {
        let Self { offset, layers, layer_stride, kv, .. } = *self;
        (0..u64::from(layers)).flat_map(move |layer| {
            let first = offset + layer * layer_stride;
            (0..kv.segments()).map(move |half| first + half * kv.stride())
        })
    }

    /// The rows of a block whose part in this tensor begins at this logical byte. One layer is one row
    /// for each half; several layers are rows of their own for the keys and for the values.
    fn rows(&self, block: BlockId, logical: u64) -> impl Iterator<Item = Rows> + use<> {
        let Self { allocation, layers, layer_stride, kv, segment_bytes: width, .. } = *self;
        let offset = self.offset + u64::from(block.0) * self.block_stride;
        let (halves, segment) = (kv.segments(), u64::from(width));
        let (groups, count, pitch) = match layers {
            1 => (1, halves, kv.stride()),
            layers => (halves, layers.into(), layer_stride),
        };
        (0..groups).map(move |half| Rows {
            allocation,
            offset: offset + half * kv.stride(),
            pitch: pitch.max(segment),
            logical: logical + half * segment,
            logical_pitch: groups * segment,
            width,
            count: u32::try_from(count).unwrap_or(u32::MAX),
        })
    }

    /// One past the last byte of the last segment of `blocks` blocks; `None` beyond 64 bits.
    fn end(&self, blocks: u32) -> Option<u64> {
        let reach = |count: u64, stride: u64| count.checked_sub(1)?.checked_mul(stride);
        self.offset
            .checked_add(reach(self.layers.into(), self.layer_stride)?)?
            .checked_add(reach(self.kv.segments(), self.kv.stride())?)?
            .checked_add(reach(blocks.into(), self.block_stride)?)?
            .checked_add(self.segment_bytes.into())
    }
}

/// A piece of a block that lies in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Segment {
    /// The allocation.
    pub allocation: AllocationId,
    /// Bytes from the allocation's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// Segments at equal distances, in the engine's memory and among the block's logical bytes: what one
/// two-dimensional copy moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rows {
    /// The allocation.
    pub allocation: AllocationId,
    /// Bytes from the allocation's start to the first row.
    pub offset: u64,
    /// Bytes from one row to the next in the allocation; not below the width.
    pub pitch: u64,
    /// Bytes from the first logical byte of the block to the first row.
    pub logical: u64,
    /// Bytes from one row to the next among the logical bytes; not below the width.
    pub logical_pitch: u64,
    /// Bytes of one row.
    pub width: u32,
    /// Rows, at least 1.
    pub count: u32,
}

/// Why tensors are no layout. The engine is at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A count is zero or beyond its limit.
    #[error("a layout of {got} {what}: 1 to {limit} are allowed")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many.
        got: u64,
        /// The most.
        limit: u64,
    },
    /// A number that must be a multiple of [`limits::LAYOUT_ALIGN`] is not.
    #[error(
        "tensor {tensor}: its {what} of {got} bytes is no multiple of {align}: pad the tensor",
        align = limits::LAYOUT_ALIGN
    )]
    Misaligned {
        /// Which tensor, from 0.
        tensor: usize,
        /// What is misaligned.
        what: &'static str,
        /// Its value.
        got: u64,
    },
    /// A tensor names an allocation that was not imported.
    #[error("tensor {tensor} lies in allocation {}, which was not imported", allocation.0)]
    NoAllocation {
        /// Which tensor.
        tensor: usize,
        /// The allocation.
        allocation: AllocationId,
    },
    /// The last block's last segment ends behind the allocation.
    #[error(
        "tensor {tensor} ends at byte {end} of allocation {}, which has {bytes}: check strides, layers and blocks",
        allocation.0
    )]
    Outside {
        /// Which tensor.
        tensor: usize,
        /// The allocation.
        allocation: AllocationId,
        /// One past the tensor's last byte; `u64::MAX` for more than 64 bits.
        end: u64,
        /// The allocation's length, bytes.
        bytes: u64,
    },
    /// Two segments share bytes.
    #[error(
        "segments overlap in allocation {}: bytes {first}+{first_bytes} (tensor {first_tensor}) and {second}+{second_bytes} (tensor {second_tensor}): check the strides",
        allocation.0
    )]
    Overlap {
        /// The allocation.
        allocation: AllocationId,
        /// First byte of the one segment.
        first: u64,
        /// Its length.
        first_bytes: u32,
        /// Its tensor.
        first_tensor: usize,
        /// First byte of the other one.
        second: u64,
        /// Its length.
        second_bytes: u32,
        /// Its tensor.
        second_tensor: usize,
    },
    /// Two tensors lie within each other and step from block to block differently.
    #[error(
        "tensors {first} and {second} lie within each other in allocation {} with block strides of {first_stride} and {second_stride} bytes: such tensors must have the same one",
        allocation.0
    )]
    Interleaved {
        /// The allocation.
        allocation: AllocationId,
        /// The one tensor.
        first: usize,
        /// Its block stride.
        first_stride: u64,
        /// The other one.
        second: usize,
        /// Its block stride.
        second_stride: u64,
    },
}

impl LayoutError {
    /// Whose fault it is: the engine's that described its tensors.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        Scope::Request
    }
}

/// A KV cache in which every block's segments are known and no two share a byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    tensors: Vec<Tensor>,
    blocks: u32,
    block_bytes: u32,
    segments: usize,
}

impl Layout {
    /// The layout of `blocks` blocks in these tensors; `bytes_of` says how long an allocation is,
    /// `None` where there is no such one.
    ///
    /// # Errors
    /// [`LayoutError`], with the numbers that do not fit.
    pub fn new(
        tensors: Vec<Tensor>,
        blocks: u32,
        bytes_of: impl Fn(AllocationId) -> Option<u64>,
    ) -> Result<Self, LayoutError> {
        let made = Self::readable(tensors, blocks, bytes_of)?;
        overlap::check(&made.tensors, blocks)?;
        Ok(made)
    }

    /// As [`Self::new`], for who only reads: segments that share bytes harm nobody then, and are not
    /// looked for, which takes time that grows with the square of their number.
    ///
    /// # Errors
    /// [`LayoutError`], but for overlaps.
    pub fn readable(
        tensors: Vec<Tensor>,
        blocks: u32,
        bytes_of: impl Fn(AllocationId) -> Option<u64>,
    ) -> Result<Self, LayoutError> {
        count("blocks", blocks.into(), limits::LAYOUT_BLOCKS_MAX.into())?;
        count("tensors", tensors.len() as u64, limits::LAYOUT_TENSORS_MAX as u64)?;
        for (index, tensor) in tensors.iter().enumerate() {
            check(index, tensor, blocks, &bytes_of)?;
        }
        let segments = tensors.iter().map(Tensor::segments).sum();
        count("segments in a block", segments, limits::LAYOUT_SEGMENTS_MAX as u64)?;
        let bytes = tensors.iter().map(|it| it.segments() * u64::from(it.segment_bytes)).sum();
        count("bytes in a block", bytes, limits::BLOCK_BYTES_MAX.into())?;
        // Both counts were found to be within limits that fit.
        let block_bytes = u32::try_from(bytes).unwrap_or(limits::BLOCK_BYTES_MAX);
        let segments = usize::try_from(segments).unwrap_or(limits::LAYOUT_SEGMENTS_MAX);
        Ok(Self { tensors, blocks, block_bytes, segments })
    }

    /// The tensors, in the order of a block's logical bytes.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Blocks, at least 1; their numbers are below it.
    #[must_use]
    pub const fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Logical bytes of one block, 1 to [`limits::BLOCK_BYTES_MAX`].
    #[must_use]
    pub const fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Segments of one block, 1 to [`limits::LAYOUT_SEGMENTS_MAX`].
    #[must_use]
    pub const fn segments_per_block(&self) -> usize {
        self.segments
    }

    /// The segments of a block, in the order of its logical bytes; none for a block that there is
    /// not.
    pub fn segments(&self, block: BlockId) -> impl Iterator<Item = Segment> + Clone + '_ {
        let tensors = if block.0 < self.blocks { self.tensors.as_slice() } else { &[] };
        tensors.iter().flat_map(move |tensor| {
            let Tensor { allocation, block_stride, segment_bytes: len, .. } = *tensor;
            let step = u64::from(block.0) * block_stride;
            tensor.origins().map(move |origin| Segment { allocation, offset: origin + step, len })
        })
    }

    /// The same bytes as [`Self::segments`], in as few [`Rows`] as the strides allow.
    pub fn rows(&self, block: BlockId) -> impl Iterator<Item = Rows> + '_ {
        let tensors = if block.0 < self.blocks { self.tensors.as_slice() } else { &[] };
        let mut logical = 0;
        tensors.iter().flat_map(move |tensor| {
            let first = logical;
            logical += tensor.segments() * u64::from(tensor.segment_bytes);
            tensor.rows(block, first)
        })
    }

    /// First byte and one past the last byte of what this layout has in an allocation, by tensor.
    pub fn ranges(&self) -> impl Iterator<Item = (AllocationId, std::ops::Range<u64>)> + '_ {
        self.tensors.iter().map(|tensor| {
            (tensor.allocation, tensor.offset..tensor.end(self.blocks).unwrap_or(u64::MAX))
        })
    }
}

fn count(what: &'static str, got: u64, limit: u64) -> Result<(), LayoutError> {
    if (1..=limit).contains(&got) { Ok(()) } else { Err(LayoutError::Count { what, got, limit }) }
}

/// Whether a tensor by itself is sound: counts, alignment, bounds.
fn check(
    index: usize,
    tensor: &Tensor,
    blocks: u32,
    bytes_of: &impl Fn(AllocationId) -> Option<u64>,
) -> Result<(), LayoutError> {
    count("layers in a tensor", tensor.layers.into(), limits::LAYOUT_SEGMENTS_MAX as u64)?;
    let segment = u64::from(tensor.segment_bytes);
    count("bytes in a segment", segment, limits::BLOCK_BYTES_MAX.into())?;
    let aligned = [
        ("offset", tensor.offset),
        ("layer stride", tensor.layer_stride),
        ("K/V stride", tensor.kv.stride()),
        ("block stride", tensor.block_stride),
        ("segment", segment),
    ];
    for (what, got) in aligned {
        if !got.is_multiple_of(limits::LAYOUT_ALIGN) {
            return Err(LayoutError::Misaligned { tensor: index, what, got });
        }
    }
    let allocation = tensor.allocation;
    let bytes =
        bytes_of(allocation).ok_or(LayoutError::NoAllocation { tensor: index, allocation })?;
    count("bytes in an allocation", bytes, limits::ALLOCATION_BYTES_MAX)?;
    match tensor.end(blocks) {
        Some(end) if end <= bytes => Ok(()),
        end => {
            let end = end.unwrap_or(u64::MAX);
            Err(LayoutError::Outside { tensor: index, allocation, end, bytes })
        }
    }
}
