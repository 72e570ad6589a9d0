//! Whether segments of a layout share bytes, without a look at every block.
//!
//! All tensors that lie within each other step from block to block by the same stride, so two
//! segments of block 0, with first bytes `p` and `q`, meet in some blocks exactly where a multiple of
//! that stride, by fewer steps than there are blocks, lies strictly between `q - p - len(p)` and
//! `q - p + len(q)`. That takes one division per pair of segments of **one** block, however many blocks there
//! are.

use super::{LayoutError, Tensor};

/// A segment of block 0.
#[derive(Debug, Clone, Copy)]
struct Origin {
    tensor: usize,
    first: i64,
    len: i64,
}

/// Refuses segments that share a byte. Every tensor ends within [`crate::limits::ALLOCATION_BYTES_MAX`],
/// so that sums and differences of offsets fit 64 bits with their sign.
pub(super) fn check(tensors: &[Tensor], blocks: u32) -> Result<(), LayoutError> {
    let mut origins: Vec<Origin> = Vec::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let before = origins.len();
        origins.extend(tensor.origins().map(|first| Origin {
            tensor: index,
            first: signed(first),
            len: tensor.segment_bytes.into(),
        }));
        let near = near(tensors, index, blocks)?;
        let (earlier, own) = origins.split_at(before);
        let others = earlier.iter().filter(|it| near.get(it.tensor) == Some(&true));
        for (at, one) in own.iter().enumerate() {
            let fellows = own.get(at..).unwrap_or_default().iter();
            for other in others.clone().chain(fellows) {
                let same = std::ptr::eq(one, other);
                if let Some(step) = meet((one, other), signed(tensor.block_stride), blocks, same) {
                    return Err(error(tensor, (one, other), step));
                }
            }
        }
    }
    Ok(())
}

/// Of the tensors before this one: whether each one's range in the same allocation touches its own.
fn near(tensors: &[Tensor], index: usize, blocks: u32) -> Result<Vec<bool>, LayoutError> {
    let (earlier, rest) = tensors.split_at(index);
    let Some(own) = rest.first() else { return Ok(Vec::new()) };
    let range = |tensor: &Tensor| (tensor.offset, tensor.end(blocks).unwrap_or(u64::MAX));
    let (start, end) = range(own);
    let is_near = |(other, tensor): (usize, &Tensor)| {
        let (first, last) = range(tensor);
        let touches = tensor.allocation == own.allocation && first < end && start < last;
        if touches && blocks > 1 && tensor.block_stride != own.block_stride {
            return Err(LayoutError::Interleaved {
                allocation: own.allocation,
                first: other,
                first_stride: tensor.block_stride,
                second: index,
                second_stride: own.block_stride,
            });
        }
        Ok(touches)
    };
    earlier.iter().enumerate().map(is_near).collect()
}

/// By how many blocks two segments must be apart to share a byte; `None` where they never do. A segment
/// is compared with itself in other blocks only (`same`).
fn meet((p, q): (&Origin, &Origin), stride: i64, blocks: u32, same: bool) -> Option<i64> {
    let apart = q.first - p.first;
    let (low, high) = (apart - p.len, apart + q.len);
    let most = i64::from(blocks) - 1;
    if same {
        return (most > 0 && stride < p.len).then_some(1);
    }
    if stride == 0 {
        return (low < 0 && high > 0).then_some(0);
    }
    // The first multiple above `low`, within the blocks that there are.
    let step = (low.div_euclid(stride) + 1).max(-most);
    (step <= most && step * stride > low && step * stride < high).then_some(step)
}

/// Names the two segments: the one with the later block is moved by `step` blocks.
fn error(tensor: &Tensor, (p, q): (&Origin, &Origin), step: i64) -> LayoutError {
    let moved = |origin: &Origin, blocks: i64| {
        let at = origin.first + blocks.max(0) * signed(tensor.block_stride);
        (u64::try_from(at).unwrap_or_default(), u32::try_from(origin.len).unwrap_or_default())
    };
    let ((first, first_bytes), (second, second_bytes)) = (moved(p, step), moved(q, -step));
    LayoutError::Overlap {
        allocation: tensor.allocation,
        first,
        first_bytes,
        first_tensor: p.tensor,
        second,
        second_bytes,
        second_tensor: q.tensor,
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
