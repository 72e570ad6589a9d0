//! What is asked for: numbers of a Zipf distribution, and the block that a number stands for.
//!
//! All numbers are drawn before anything is timed; a block's key is made of its number while it is,
//! for every contender alike.

use crate::store::Payload;
use crate::types::{BlockHash, BlockKey, Extent, NamespaceId, PoolId};

/// How unequal the blocks are: the n-th is asked for 1/n^0.99 as often as the first.
const SKEW: f64 = 0.99;

/// A sequence of numbers that look random (xorshift), the same for the same seed.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The sequence of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        // Nothing but 0 leads nowhere.
        Self(mixed(seed).max(1))
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// The next number, below `bound`.
    pub fn below(&mut self, bound: u32) -> u32 {
        let wide = (self.number() >> 32) * u64::from(bound);
        u32::try_from(wide >> 32).unwrap_or(0)
    }
}

/// The distribution over the numbers below `entries`, 0 most often (the generator of Gray et al.,
/// "Quickly generating billion-record synthetic databases").
#[derive(Debug, Clone, Copy)]
pub struct Zipf {
    entries: f64,
    zeta: f64,
    eta: f64,
}

impl Zipf {
    /// The distribution over so many numbers, at least 3.
    #[must_use]
    pub fn new(entries: u32) -> Self {
        let zeta: f64 = (1..=entries).map(|at| f64::from(at).powf(-SKEW)).sum();
        let entries = f64::from(entries);
        let two = 1.0 + 2_f64.powf(-SKEW);
        let eta = (1.0 - (2.0 / entries).powf(1.0 - SKEW)) / (1.0 - two / zeta);
        Self { entries, zeta, eta }
    }

    /// So many numbers; the same ones for the same seed.
    #[must_use]
    pub fn draw(&self, count: usize, seed: u64) -> Vec<u32> {
        let mut random = Random::new(seed);
        (0..count).map(|_| self.one(&mut random)).collect()
    }

    fn one(&self, random: &mut Random) -> u32 {
        let uniform = f64::from(random.below(u32::MAX)) / f64::from(u32::MAX);
        let share = uniform * self.zeta;
        if share < 1.0 {
            return 0;
        }
        if share < 1.0 + 2_f64.powf(-SKEW) {
            return 1;
        }
        let at = self.entries * (self.eta * uniform - self.eta + 1.0).powf(1.0 / (1.0 - SKEW));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at is between 0 and entries"
        )]
        let number = at.min(self.entries - 1.0) as u32;
        number
    }
}

/// The finaliser of SplitMix64: neighbours have nothing in common after it.
const fn mixed(number: u64) -> u64 {
    let mut bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ bits >> 31
}

/// The key of block `number`: a hash of 32 bytes, as engines have them.
#[must_use]
pub fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    for (part, word) in bytes.chunks_exact_mut(8).zip(1_u64..) {
        part.copy_from_slice(&mixed(number.wrapping_mul(word)).to_le_bytes());
    }
    BlockKey { namespace: NamespaceId(1), hash: BlockHash::padded(&bytes, 32) }
}

/// The payload of block `number`.
#[must_use]
pub fn payload(number: u64) -> Payload {
    let extent = Extent { pool: PoolId(0), offset: number.wrapping_mul(64), len: 64 };
    Payload { extent, checksum: number }
}

/// The numbers below `entries`, each once, in no order.
#[must_use]
pub fn shuffled(entries: u32) -> Vec<u32> {
    let mut all: Vec<u32> = (0..entries).collect();
    let mut random = Random::new(7);
    for last in (1..entries).rev() {
        all.swap(last as usize, random.below(last + 1) as usize);
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_draw_is_as_unequal_as_it_says() {
        let (entries, count) = (1000, 200_000);
        let drawn = Zipf::new(entries).draw(count, 1);
        assert_eq!(drawn, Zipf::new(entries).draw(count, 1));
        assert!(drawn.iter().all(|number| *number < entries));
        let zeta: f64 = (1..=entries).map(|at| f64::from(at).powf(-SKEW)).sum();
        for number in [0, 1, 9] {
            let got = drawn.iter().filter(|it| **it == number).count() as f64 / count as f64;
            let want = f64::from(number + 1).powf(-SKEW) / zeta;
            assert!((got / want - 1.0).abs() < 0.15, "{number}: {got} for {want}");
        }
        let late = drawn.iter().filter(|it| **it >= entries / 2).count() as f64 / count as f64;
        assert!((0.05..0.15).contains(&late), "{late}");
    }

    #[test]
    fn each_number_is_another_block() {
        let keys: HashSet<BlockKey> = (0..10_000).map(key).collect();
        assert_eq!(keys.len(), 10_000);
        let all = shuffled(1000);
        assert_ne!(all, (0..1000).collect::<Vec<_>>());
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), 1000);
    }
}
