//! The names that `kvrail put` gives to a file's blocks.

use crate::types::BlockHash;

/// A chain of block hashes: each is the BLAKE3-256 of the hash before it (32 zero bytes for the
/// first) and the block's bytes. A hash so names the whole prefix of the file that ends with its
/// block, as the hashes of LLM engines name a prefix of tokens.
#[derive(Debug, Default)]
pub(super) struct Chain {
    previous: [u8; 32],
}

impl Chain {
    /// The hash of the next block.
    pub(super) fn next(&mut self, bytes: &[u8]) -> Option<BlockHash> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.previous);
        hasher.update(bytes);
        self.previous = *hasher.finalize().as_bytes();
        BlockHash::new(&self.previous)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_names_its_block_and_all_before_it() {
        let chain = |blocks: &[&[u8]]| {
            let mut chain = Chain::default();
            let hashes = blocks.iter().map(|block| chain.next(block).unwrap());
            hashes.last().unwrap()
        };
        assert_eq!(chain(&[b"a", b"b"]), chain(&[b"a", b"b"]));
        assert_ne!(chain(&[b"a", b"b"]), chain(&[b"b", b"b"]));
        assert_ne!(chain(&[b"a", b"b"]), chain(&[b"ab"]));
        // A first block that begins with a hash is not taken for a second one.
        let first = chain(&[b"a"]);
        let forged = [first.as_bytes(), b"b"].concat();
        assert_ne!(chain(&[b"a", b"b"]), chain(&[&forged]));
    }
}
