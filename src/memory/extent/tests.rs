//! Scenarios, and random operations against the obvious model: one flag per alignment unit.

use proptest::prelude::*;

use super::*;

const UNIT: u32 = 64;

fn offsets(allocator: &mut ExtentAllocator, lens: &[u32]) -> Result<Vec<u64>, Exhausted> {
    let mut offsets = Vec::new();
    allocator.allocate_batch(lens, &mut offsets)?;
    Ok(offsets)
}

#[test]
fn a_batch_lies_in_one_run_where_one_is_free() {
    let mut allocator = ExtentAllocator::new(1024);
    assert_eq!(offsets(&mut allocator, &[64; 4]), Ok(vec![0, 64, 128, 192]));
    // A hole of two blocks at the front: the pair goes there, the triple does not.
    allocator.free(0, 64).unwrap();
    allocator.free(64, 64).unwrap();
    assert_eq!(offsets(&mut allocator, &[64; 3]), Ok(vec![256, 320, 384]));
    assert_eq!(offsets(&mut allocator, &[64; 2]), Ok(vec![0, 64]));
}

#[test]
fn a_batch_that_fits_no_run_lies_in_the_fewest() {
    let mut allocator = ExtentAllocator::new(64 * 10);
    offsets(&mut allocator, &[64; 10]).unwrap();
    // Holes of 1, 3 and 2 blocks.
    for block in [0, 2, 3, 4, 6, 7] {
        allocator.free(block * 64, 64).unwrap();
    }
    // Four blocks: the hole of three, then the smallest that takes the last one.
    assert_eq!(offsets(&mut allocator, &[64; 4]), Ok(vec![128, 192, 256, 0]));
}

#[test]
fn lengths_are_rounded_up_to_the_alignment() {
    let mut allocator = ExtentAllocator::new(64 * 3 + 63);
    assert_eq!(allocator.capacity(), 192);
    assert_eq!(offsets(&mut allocator, &[1, 0, 64]), Ok(vec![0, 64, 128]));
    assert_eq!(allocator.used_bytes(), 192);
}

#[test]
fn a_refused_batch_takes_nothing() {
    let mut allocator = ExtentAllocator::new(64 * 4);
    offsets(&mut allocator, &[64; 4]).unwrap();
    allocator.free(0, 64).unwrap();
    allocator.free(128, 64).unwrap();
    // More bytes than are free.
    let before = format!("{allocator:?}");
    let mut out = vec![7];
    let refusal = allocator.allocate_batch(&[64, 65], &mut out).unwrap_err();
    assert_eq!(refusal, Exhausted { asked: 192, free: 128, largest: 64 });
    assert_eq!((out, format!("{allocator:?}")), (vec![7], before));
}

#[test]
fn a_batch_refused_half_way_is_undone() {
    let mut allocator = ExtentAllocator::new(64 * 5);
    offsets(&mut allocator, &[64; 5]).unwrap();
    for block in [0, 2, 4] {
        allocator.free(block * 64, 64).unwrap();
    }
    let before = format!("{allocator:?}");
    let mut out = vec![7];
    // 192 bytes are free, and asked: the first block is placed before the second fits nowhere.
    let refusal = allocator.allocate_batch(&[64, 128], &mut out).unwrap_err();
    assert_eq!((refusal.asked, refusal.free, refusal.largest), (192, 192, 64));
    assert_eq!((out, format!("{allocator:?}")), (vec![7], before));
}

#[test]
fn wrong_frees_are_refused_and_change_nothing() {
    let mut allocator = ExtentAllocator::new(1024);
    offsets(&mut allocator, &[128, 128]).unwrap();
    allocator.free(0, 128).unwrap();
    let before = format!("{allocator:?}");
    assert_eq!(allocator.free(0, 128), Err(ReleaseError::NotHeld { offset: 0 }), "a second time");
    assert_eq!(
        allocator.free(192, 64),
        Err(ReleaseError::NotHeld { offset: 192 }),
        "the second half"
    );
    assert_eq!(
        allocator.free(128, 64),
        Err(ReleaseError::WrongLength { offset: 128, len: 64, held: 128 }),
        "the first half"
    );
    assert_eq!(allocator.free(4096, 64), Err(ReleaseError::NotHeld { offset: 4096 }), "outside");
    assert_eq!(format!("{allocator:?}"), before);
}

/// One flag per unit, and the blocks handed out.
struct Model {
    taken: Vec<bool>,
    blocks: Vec<(u64, u32)>,
}

impl Model {
    fn units(offset: u64, len: u32) -> std::ops::Range<usize> {
        let start = usize::try_from(offset / 64).unwrap();
        start..start + (len.max(1).div_ceil(UNIT) as usize)
    }

    fn take(&mut self, offset: u64, len: u32) {
        assert_eq!(offset % 64, 0);
        for unit in &mut self.taken[Self::units(offset, len)] {
            assert!(!*unit, "a byte was handed out twice");
            *unit = true;
        }
        self.blocks.push((offset, len));
    }

    fn give_back(&mut self, index: usize) -> (u64, u32) {
        let (offset, len) = self.blocks.swap_remove(index);
        self.taken[Self::units(offset, len)].fill(false);
        (offset, len)
    }

    fn free(&self) -> u64 {
        self.taken.iter().filter(|taken| !**taken).count() as u64 * 64
    }

    fn largest(&self) -> u64 {
        let runs = self.taken.split(|taken| *taken).map(<[bool]>::len);
        runs.max().unwrap_or(0) as u64 * 64
    }

    /// Compares everything that the allocator says with what the flags say.
    fn check(&self, allocator: &ExtentAllocator) {
        assert_eq!(allocator.free_bytes(), self.free());
        assert_eq!(allocator.largest_free(), self.largest());
        assert_eq!(allocator.held_blocks(), self.blocks.len());
        assert_eq!(allocator.by_offset.len(), allocator.by_len.len());
        let runs = self.taken.split(|taken| *taken).filter(|run| !run.is_empty());
        assert_eq!(allocator.by_offset.len(), runs.count(), "not coalesced");
    }
}

#[derive(Debug, Clone)]
enum Operation {
    Allocate(Vec<u32>),
    Free(prop::sample::Index),
    WrongFree(u64, u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        prop::collection::vec(0_u32..400, 0..6).prop_map(Operation::Allocate),
        any::<prop::sample::Index>().prop_map(Operation::Free),
        (0_u64..5000, 0_u32..400).prop_map(|(offset, len)| Operation::WrongFree(offset, len)),
    ]
}

/// How many free ranges a batch of equal blocks needs: the roomiest first cannot be beaten.
fn fewest_runs(allocator: &ExtentAllocator, block: u64, batch: usize) -> usize {
    let mut room: Vec<u64> = allocator.by_offset.values().map(|len| len / block).collect();
    room.sort_unstable_by(|a, b| b.cmp(a));
    let mut left = batch as u64;
    room.iter()
        .take_while(|room| {
            let needed = left > 0;
            left = left.saturating_sub(**room);
            needed
        })
        .count()
}

proptest! {
    #[test]
    fn random_operations_agree_with_flags(
        units in 0_usize..64,
        operations in prop::collection::vec(operation(), 0..80),
    ) {
        let mut allocator = ExtentAllocator::new(units as u64 * 64);
        let mut model = Model { taken: vec![false; units], blocks: Vec::new() };
        for operation in operations {
            match operation {
                Operation::Allocate(lens) => match offsets(&mut allocator, &lens) {
                    Ok(offsets) => {
                        prop_assert_eq!(offsets.len(), lens.len());
                        for (offset, len) in offsets.iter().zip(&lens) {
                            model.take(*offset, *len);
                        }
                    }
                    Err(refusal) => {
                        let asked: u64 = lens.iter().map(|len| footprint(*len)).sum();
                        prop_assert_eq!(refusal.asked, asked);
                        prop_assert_eq!(refusal.free, model.free());
                        prop_assert_eq!(refusal.largest, model.largest());
                        // Never refused where one run would do.
                        prop_assert!(asked > model.largest());
                    }
                },
                Operation::Free(index) if model.blocks.is_empty() => {
                    prop_assert!(allocator.free(index.index(9) as u64, 64).is_err());
                }
                Operation::Free(index) => {
                    let (offset, len) = model.give_back(index.index(model.blocks.len()));
                    prop_assert_eq!(allocator.free(offset, len), Ok(()));
                    prop_assert!(allocator.free(offset, len).is_err());
                }
                Operation::WrongFree(offset, len) if !model.blocks.contains(&(offset, len)) => {
                    prop_assert!(allocator.free(offset, len).is_err());
                }
                Operation::WrongFree(..) => {}
            }
            model.check(&allocator);
        }
    }

    /// Equal-sized blocks: whatever was taken and given back, all of the rest can be taken.
    #[test]
    fn equal_sized_blocks_never_fragment_the_pool(
        len in 1_u32..300,
        blocks in 1_usize..40,
        slack in 0_u64..64,
        steps in prop::collection::vec((1_usize..5, prop::collection::vec(any::<prop::sample::Index>(), 0..6)), 0..40),
    ) {
        let mut allocator = ExtentAllocator::new(footprint(len) * blocks as u64 + slack);
        let mut held = Vec::new();
        for (batch, frees) in steps {
            let fits = held.len() + batch <= blocks;
            let fewest = fewest_runs(&allocator, footprint(len), batch);
            let placed = offsets(&mut allocator, &vec![len; batch]);
            prop_assert_eq!(placed.is_ok(), fits);
            if let Ok(offsets) = &placed {
                let apart = |pair: &&[u64]| pair[1] != pair[0] + footprint(len);
                let runs = 1 + offsets.windows(2).filter(apart).count();
                prop_assert_eq!(runs, fewest);
            }
            held.extend(placed.unwrap_or_default());
            for index in frees {
                if !held.is_empty() {
                    let offset = held.swap_remove(index.index(held.len()));
                    prop_assert_eq!(allocator.free(offset, len), Ok(()));
                }
            }
        }
        let rest = vec![len; blocks - held.len()];
        prop_assert!(offsets(&mut allocator, &rest).is_ok());
        prop_assert!(offsets(&mut allocator, &[len]).is_err());
    }
}
