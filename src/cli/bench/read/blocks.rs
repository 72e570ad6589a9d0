//! Which blocks are read, in which order.

use crate::cli::bench::store::Random;
use crate::types::BlockHash;

/// What the namespaces of a bench begin with; their block size follows.
pub(super) const BENCH: &str = "kvrail-bench-";

/// Most blocks of one size that a node holds for this: more than its reader has room for, few enough to
/// be saved quickly.
pub(super) const SET_MAX: u32 = 8192;

/// The hashes of the blocks of one size, in the order in which they are saved.
pub(super) fn hashes(size: u32, count: u32) -> Vec<BlockHash> {
    let mut bytes = [0; 32];
    (0..count)
        .map(|at| {
            let number = u64::from(size) << 32 | u64::from(at);
            bytes.iter_mut().zip(number.to_be_bytes()).for_each(|(to, byte)| *to = byte);
            BlockHash::padded(&bytes, 32)
        })
        .collect()
}

/// The numbers below `count`, in runs of `run` neighbours, the runs in no order; each once. Neighbours
/// were saved together, so a holder has them next to each other.
pub(super) fn order(count: u32, run: u32, seed: u64) -> Vec<u32> {
    let run = run.clamp(1, count.max(1));
    let mut starts: Vec<u32> = (0..count / run).map(|at| at * run).collect();
    let mut random = Random::new(seed);
    for last in (1..starts.len()).rev() {
        let below = u32::try_from(last + 1).unwrap_or(u32::MAX);
        starts.swap(last, random.below(below) as usize);
    }
    starts.into_iter().flat_map(|start| start..start + run).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn an_order_has_each_number_once_in_runs() {
        for (count, run, left) in [(64, 1, 64), (64, 8, 64), (10, 4, 8), (3, 8, 3)] {
            let all = order(count, run, 1);
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), left);
            assert_eq!(all.len(), left);
            for part in all.chunks(run.min(count) as usize) {
                assert!(part.windows(2).all(|two| two[0] + 1 == two[1]), "{part:?}");
            }
        }
        assert_ne!(order(64, 1, 1), (0..64).collect::<Vec<_>>());
        assert_ne!(order(64, 1, 1), order(64, 1, 2));
    }

    #[test]
    fn blocks_of_all_sizes_differ() {
        let all: BTreeSet<_> =
            [4096, 8192].into_iter().flat_map(|size| hashes(size, 100)).collect();
        assert_eq!(all.len(), 200);
    }
}
