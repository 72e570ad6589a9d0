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

/// The numbers below `count` in no order, each once, such that each `batch` of them is made of runs of
/// `run` neighbours. Neighbours were saved together, so a holder has them next to each other. What makes
/// no whole run or batch is left out.
pub(super) fn order(count: u32, run: u32, batch: usize, seed: u64) -> Vec<u32> {
    let run = run.clamp(1, count.max(1));
    let mut starts: Vec<u32> = (0..count / run).map(|at| at * run).collect();
    let mut random = Random::new(seed);
    shuffle(&mut starts, &mut random);
    let mut all: Vec<u32> = starts.into_iter().flat_map(|start| start..start + run).collect();
    if all.len() > batch {
        all.truncate(all.len() - all.len() % batch);
    }
    // Whoever asks knows nothing of neighbours.
    all.chunks_mut(batch).for_each(|asked| shuffle(asked, &mut random));
    all
}

fn shuffle(all: &mut [u32], random: &mut Random) {
    for last in (1..all.len()).rev() {
        let below = u32::try_from(last + 1).unwrap_or(u32::MAX);
        all.swap(last, random.below(below) as usize);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn an_order_has_each_number_once_and_each_batch_has_runs() {
        for (count, run, batch, left) in
            [(64, 1, 8, 64), (64, 8, 16, 64), (10, 4, 100, 8), (3, 8, 2, 2), (100, 4, 16, 96)]
        {
            let all = order(count, run, batch, 1);
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), left);
            assert_eq!(all.len(), left);
        }
        for asked in order(512, 8, 32, 1).chunks(32) {
            let mut sorted = asked.to_vec();
            sorted.sort_unstable();
            assert_ne!(sorted, asked, "nobody sorts what is asked for");
            for run in sorted.chunks(8) {
                assert!(run[0] % 8 == 0 && run[7] == run[0] + 7, "{run:?}");
            }
        }
        assert_ne!(order(64, 1, 8, 1), order(64, 1, 8, 2));
    }

    #[test]
    fn blocks_of_all_sizes_differ() {
        let all: BTreeSet<_> =
            [4096, 8192].into_iter().flat_map(|size| hashes(size, 100)).collect();
        assert_eq!(all.len(), 200);
    }
}
