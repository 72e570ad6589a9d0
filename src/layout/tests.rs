use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// A length or offset in units of the alignment.
const UNIT: u64 = limits::LAYOUT_ALIGN;

fn tensor(offset: u64, layers: u16, layer_stride: u64, block_stride: u64) -> Tensor {
    Tensor {
        allocation: AllocationId(0),
        offset: offset * UNIT,
        layers,
        layer_stride: layer_stride * UNIT,
        kv: KvSplit::Fused,
        block_stride: block_stride * UNIT,
        segment_bytes: 16,
    }
}

fn split(stride: u64, of: Tensor) -> Tensor {
    Tensor { kv: KvSplit::Split { stride: stride * UNIT }, ..of }
}

fn layout(tensors: &[Tensor], blocks: u32, units: u64) -> Result<Layout, LayoutError> {
    Layout::new(tensors.to_vec(), blocks, |id| (id.0 < 2).then_some(units * UNIT))
}

fn offsets(layout: &Layout, block: u32) -> Vec<u64> {
    layout.segments(BlockId(block)).map(|segment| segment.offset / UNIT).collect()
}

#[test]
fn a_block_names_its_segments_in_logical_order() {
    // As vLLM has it: one tensor for each layer, [2, blocks, ...].
    let two_layers = [split(5, tensor(0, 1, 0, 1)), split(5, tensor(10, 1, 0, 1))];
    let made = layout(&two_layers, 5, 20).unwrap();
    assert_eq!((made.block_bytes(), made.segments_per_block(), made.blocks()), (64, 4, 5));
    assert_eq!(offsets(&made, 0), [0, 5, 10, 15]);
    assert_eq!(offsets(&made, 4), [4, 9, 14, 19]);
    assert_eq!(offsets(&made, 5), [0; 0], "there is no such block");

    // All layers in one tensor, [blocks, layers, 2, ...].
    let made = layout(&[split(1, tensor(2, 3, 2, 6))], 2, 14).unwrap();
    assert_eq!(offsets(&made, 1), [8, 9, 10, 11, 12, 13]);
    let ranges: Vec<_> = made.ranges().collect();
    assert_eq!(ranges, [(AllocationId(0), 2 * UNIT..14 * UNIT)]);
}

#[test]
fn what_leaves_its_allocation_is_refused_with_the_numbers() {
    let refused = layout(&[split(5, tensor(0, 2, 10, 1))], 5, 19).unwrap_err();
    let outside = LayoutError::Outside {
        tensor: 0,
        allocation: AllocationId(0),
        end: 20 * UNIT,
        bytes: 19 * UNIT,
    };
    assert_eq!(refused, outside);
    assert_eq!(
        refused.to_string(),
        "tensor 0 ends at byte 320 of allocation 0, which has 304: check strides, layers and blocks"
    );
    let far = Tensor { offset: u64::MAX - 15, ..tensor(0, 1, 0, 1) };
    assert!(matches!(layout(&[far], 1, 4), Err(LayoutError::Outside { end: u64::MAX, .. })));
    let steep = Tensor { block_stride: u64::MAX - 15, ..tensor(0, 1, 0, 1) };
    assert!(matches!(layout(&[steep], 3, 4), Err(LayoutError::Outside { end: u64::MAX, .. })));
    assert!(layout(&[steep], 1, 4).is_ok(), "one block takes no step");
    let elsewhere = Tensor { allocation: AllocationId(2), ..tensor(0, 1, 0, 1) };
    assert!(matches!(layout(&[elsewhere], 1, 4), Err(LayoutError::NoAllocation { .. })));
}

#[test]
fn what_overlaps_is_refused_with_the_numbers() {
    let refused = layout(&[split(3, tensor(0, 1, 0, 1))], 5, 20).unwrap_err();
    let overlap = LayoutError::Overlap {
        allocation: AllocationId(0),
        first: 3 * UNIT,
        first_bytes: 16,
        first_tensor: 0,
        second: 3 * UNIT,
        second_bytes: 16,
        second_tensor: 0,
    };
    assert_eq!(refused, overlap);
    let is_overlap = |tensors: &[Tensor], blocks| {
        matches!(layout(tensors, blocks, 40), Err(LayoutError::Overlap { .. }))
    };
    assert!(is_overlap(&[tensor(0, 1, 0, 0)], 2), "no step between blocks");
    assert!(!is_overlap(&[tensor(0, 1, 0, 0)], 1));
    assert!(is_overlap(&[tensor(0, 2, 0, 1)], 1), "no step between layers");
    assert!(is_overlap(&[tensor(0, 1, 0, 2), tensor(4, 1, 0, 2)], 3));
    assert!(!is_overlap(&[tensor(0, 1, 0, 2), tensor(5, 1, 0, 2)], 3), "a comb in a comb");
    let other = Tensor { allocation: AllocationId(1), ..tensor(4, 1, 0, 2) };
    assert!(!is_overlap(&[tensor(0, 1, 0, 2), other], 3), "in another allocation");
    let interleaved = layout(&[tensor(0, 1, 0, 2), tensor(1, 1, 0, 4)], 3, 40);
    assert!(matches!(interleaved, Err(LayoutError::Interleaved { .. })), "{interleaved:?}");
}

#[test]
fn counts_and_alignment_have_bounds() {
    let one = tensor(0, 1, 0, 1);
    let counted = |tensors: &[Tensor], blocks| match layout(tensors, blocks, 1 << 30) {
        Err(LayoutError::Count { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    assert_eq!(counted(&[one], 0), "blocks");
    assert_eq!(counted(&[one], limits::LAYOUT_BLOCKS_MAX + 1), "blocks");
    assert_eq!(counted(&[], 1), "tensors");
    assert_eq!(counted(&vec![one; limits::LAYOUT_TENSORS_MAX + 1], 1), "tensors");
    assert_eq!(counted(&[Tensor { layers: 0, ..one }], 1), "layers in a tensor");
    assert_eq!(counted(&[Tensor { segment_bytes: 0, ..one }], 1), "bytes in a segment");
    let many: Vec<_> = (0..2).map(|it| tensor(it * 600, 600, 1, 1)).collect();
    assert_eq!(counted(&many, 1), "segments in a block");
    let large = Tensor { segment_bytes: 1 << 29, layer_stride: 1 << 29, ..tensor(0, 3, 0, 0) };
    assert_eq!(counted(&[large], 1), "bytes in a block");
    let long = Layout::new(vec![one], 1, |_| Some(limits::ALLOCATION_BYTES_MAX + 1)).unwrap_err();
    assert!(matches!(long, LayoutError::Count { what: "bytes in an allocation", .. }));

    let misaligned = |tensor| match layout(&[tensor], 1, 40) {
        Err(LayoutError::Misaligned { what, got, .. }) => (what, got),
        other => panic!("{other:?}"),
    };
    assert_eq!(misaligned(Tensor { offset: 8, ..one }), ("offset", 8));
    assert_eq!(misaligned(Tensor { layer_stride: 17, ..one }), ("layer stride", 17));
    let kv = KvSplit::Split { stride: 1 };
    assert_eq!(misaligned(Tensor { kv, ..one }), ("K/V stride", 1));
    assert_eq!(misaligned(Tensor { block_stride: 24, ..one }), ("block stride", 24));
    assert_eq!(misaligned(Tensor { segment_bytes: 15, ..one }), ("segment", 15));
}

#[test]
fn a_real_cache_is_checked_at_once() {
    // 80 layers, K and V apart, 40,000 blocks of 16 tokens with one head of 128 halves.
    let (segment, blocks) = (16 * 128 * 2_u64, 40_000_u32);
    let half = segment * u64::from(blocks);
    let tensors: Vec<_> = (0..80)
        .map(|layer| Tensor {
            allocation: AllocationId(0),
            offset: layer * 2 * half,
            layers: 1,
            layer_stride: 0,
            kv: KvSplit::Split { stride: half },
            block_stride: segment,
            segment_bytes: 4096,
        })
        .collect();
    let made = Layout::new(tensors, blocks, |_| Some(160 * half)).unwrap();
    assert_eq!((made.segments_per_block(), made.block_bytes()), (160, 160 * 4096));
    let last = made.segments(BlockId(blocks - 1)).last().unwrap();
    assert_eq!(last.offset + u64::from(last.len), 160 * half);
}

/// Who owns each unit of each allocation; `None` where two segments claim one, or one has no end.
fn byte_map(
    tensors: &[Tensor],
    blocks: u32,
    units: u64,
) -> Option<HashMap<(AllocationId, u64), usize>> {
    let mut map = HashMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let halves = tensor.kv.segments();
        for block in 0..u64::from(blocks) {
            for (layer, half) in
                (0..u64::from(tensor.layers)).flat_map(|it| (0..halves).map(move |half| (it, half)))
            {
                let first = tensor.offset
                    + layer * tensor.layer_stride
                    + half * tensor.kv.stride()
                    + block * tensor.block_stride;
                for unit in first / UNIT..(first + u64::from(tensor.segment_bytes)) / UNIT {
                    let taken = map.insert((tensor.allocation, unit), index);
                    if taken.is_some() || unit >= units {
                        return None;
                    }
                }
            }
        }
    }
    Some(map)
}

fn tensors() -> impl Strategy<Value = Tensor> {
    let small = || 0..14_u64;
    let kv = prop_oneof![
        Just(KvSplit::Fused),
        small().prop_map(|stride| KvSplit::Split { stride: stride * UNIT })
    ];
    (0..2_u16, 0..30_u64, 1..4_u16, kv, (small(), small(), 1..4_u32)).prop_map(
        |(allocation, offset, layers, kv, (layer_stride, block_stride, segment))| Tensor {
            allocation: AllocationId(allocation),
            kv,
            segment_bytes: segment * 16,
            ..tensor(offset, layers, layer_stride, block_stride)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    /// Against a map of all bytes: what is taken has no overlap and stays inside; what is refused for
    /// an overlap or its end has one, or leaves; the numbers of an overlap are two real segments.
    #[test]
    fn a_layout_is_taken_exactly_where_no_byte_has_two_owners(
        tensors in proptest::collection::vec(tensors(), 1..4),
        same_stride in any::<bool>(),
        blocks in 1..5_u32,
        units in 1..90_u64,
    ) {
        let mut tensors = tensors;
        let stride = tensors[0].block_stride;
        if same_stride {
            tensors.iter_mut().for_each(|tensor| tensor.block_stride = stride);
        }
        let map = byte_map(&tensors, blocks, units);
        match layout(&tensors, blocks, units) {
            Ok(made) => {
                let map = map.expect("two owners of a byte, or none");
                let bytes: u64 = (0..blocks)
                    .flat_map(|block| made.segments(BlockId(block)))
                    .map(|segment| u64::from(segment.len))
                    .sum();
                prop_assert_eq!(bytes, map.len() as u64 * UNIT);
                prop_assert_eq!(bytes, u64::from(blocks) * u64::from(made.block_bytes()));
                let places = (0..blocks).flat_map(|block| made.segments(BlockId(block)));
                prop_assert!(places.clone().count() == made.segments_per_block() * blocks as usize);
                for place in places {
                    prop_assert!(map.contains_key(&(place.allocation, place.offset / UNIT)));
                }
            }
            Err(LayoutError::Overlap { first, first_bytes, second, second_bytes, .. }) => {
                prop_assert!(map.is_none());
                prop_assert!(first < second + u64::from(second_bytes));
                prop_assert!(second < first + u64::from(first_bytes));
            }
            Err(LayoutError::Outside { end, bytes, .. }) => {
                prop_assert!(map.is_none());
                prop_assert!(end > bytes);
            }
            Err(LayoutError::Interleaved { first_stride, second_stride, .. }) => {
                prop_assert!(!same_stride && first_stride != second_stride);
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
