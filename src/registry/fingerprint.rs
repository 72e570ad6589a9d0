//! What a registry keeps of a key: 128 bits that stand for it, the partition it falls into, and its
//! share of a digest.
//!
//! Two keys with one fingerprint would be listed as one block; a reader would ask an owner for what
//! it does not hold, and hear so. Nodes and registries compute the same fingerprint, so that their
//! digests can be compared: it is part of what they agree on, like a message's layout.

use xxhash_rust::xxh3::xxh3_128;

use crate::limits;
use crate::types::BlockKey;

/// A key in 128 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint {
    high: u64,
    low: u64,
}

/// Bits of a fingerprint that make its partition.
const PARTITION_BITS: u32 = limits::REGISTRY_PARTITIONS.ilog2();

impl Fingerprint {
    /// The fingerprint of a key: XXH3 over the namespace, little-endian, and the hash.
    #[must_use]
    pub fn of(key: &BlockKey) -> Self {
        let mut bytes = [0; 8 + limits::HASH_BYTES_MAX];
        let hash = key.hash.as_bytes();
        let (namespace, rest) = bytes.split_at_mut(8);
        namespace.copy_from_slice(&key.namespace.0.to_le_bytes());
        rest.iter_mut().zip(hash).for_each(|(to, from)| *to = *from);
        let digest = xxh3_128(bytes.get(..8 + hash.len()).unwrap_or(&bytes));
        Self::from_bytes(digest.to_be_bytes())
    }

    /// The fingerprint as bytes, big-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        ((u128::from(self.high) << 64) | u128::from(self.low)).to_be_bytes()
    }

    /// The fingerprint that [`Self::to_bytes`] gave.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let (high, low) = bytes.split_at(8);
        let word = |half: &[u8]| half.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte));
        Self { high: word(high), low: word(low) }
    }

    /// Where it falls.
    #[must_use]
    pub fn partition(self) -> Partition {
        // Ten bits fit.
        Partition(u16::try_from(self.high >> (64 - PARTITION_BITS)).unwrap_or(0))
    }

    /// What it adds to a digest, and, as a digest is a sum by exclusive or, what it takes from it.
    #[must_use]
    pub const fn digest(self) -> u64 {
        self.low
    }
}

/// One of the [`limits::REGISTRY_PARTITIONS`] parts into which keys fall evenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Partition(u16);

impl Partition {
    /// The partition of this number; `None` beyond the last.
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if number < limits::REGISTRY_PARTITIONS { Some(Self(number)) } else { None }
    }

    /// Its number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Its number, as an index.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// All of them, in order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..limits::REGISTRY_PARTITIONS).map(Self)
    }
}

/// What a node holds in a partition: the exclusive or of [`Fingerprint::digest`] over its blocks
/// there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionDigest {
    /// The partition.
    pub partition: Partition,
    /// The digest; 0 where the node holds nothing there.
    pub digest: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{BlockHash, NamespaceId};

    fn key(namespace: u64, hash: &[u8]) -> BlockKey {
        BlockKey { namespace: NamespaceId(namespace), hash: BlockHash::new(hash).unwrap() }
    }

    #[test]
    fn a_fingerprint_is_fixed_for_ever() {
        let bytes = Fingerprint::of(&key(0x0102, &[7, 8])).to_bytes();
        assert_eq!(bytes, xxh3_128(&[2, 1, 0, 0, 0, 0, 0, 0, 7, 8]).to_be_bytes());
        assert_eq!(Fingerprint::from_bytes(bytes), Fingerprint::of(&key(0x0102, &[7, 8])));
    }

    #[test]
    fn namespaces_and_lengths_differ() {
        let all = [key(1, &[7]), key(2, &[7]), key(1, &[7, 0]), key(1, &[8])];
        let mut prints: Vec<_> = all.iter().map(Fingerprint::of).collect();
        prints.sort_unstable();
        prints.dedup();
        assert_eq!(prints.len(), 4);
    }

    #[test]
    fn keys_fall_evenly_into_partitions() {
        let mut counts = vec![0_u32; usize::from(limits::REGISTRY_PARTITIONS)];
        for number in 0..102_400_u32 {
            let print = Fingerprint::of(&key(3, &number.to_le_bytes()));
            counts[print.partition().index()] += 1;
        }
        assert!(counts.iter().all(|count| (50..=160).contains(count)), "100 each, about");
        assert_eq!(Partition::new(limits::REGISTRY_PARTITIONS), None);
        assert_eq!(Partition::all().count(), counts.len());
    }
}
