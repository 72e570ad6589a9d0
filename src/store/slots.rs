//! What a slot holds besides its word: written by the one thread that owns it while nobody can find
//! it, and read by anybody, who then looks whether the word is still the same.

use super::requesters::{self, Requesters};
use super::resident::Payload;
use super::word::Word;
use crate::limits;
use crate::sync::{Cell, Shared, zeroed};
use crate::types::{BlockHash, BlockKey, Extent, NamespaceId, PoolId};

const HASH_WORDS: usize = limits::HASH_BYTES_MAX / 8;

/// Of the packed field: the length in bytes, the pool above it, the hash's length above that.
const POOL_AT: u32 = 32;
const HASH_LEN_AT: u32 = 48;

/// Two cache lines.
const CELLS: usize = 5 + HASH_WORDS + requesters::CELLS;
const _: () = assert!(CELLS == 16 && Word::FREE.0 == 0, "a slot of zeros is free");

pub(super) struct Slots(Box<[Cell]>);

impl Slots {
    pub(super) fn new(count: u32) -> Self {
        Self(zeroed(count as usize * CELLS))
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.0.len() / CELLS).unwrap_or(u32::MAX)
    }

    pub(super) fn get(&self, slot: u32) -> Option<Slot<'_>> {
        let (slots, _) = self.0.as_chunks::<CELLS>();
        let [word, namespace, offset, packed, checksum, rest @ ..] = slots.get(slot as usize)?;
        let (hash, set) = rest.split_first_chunk::<HASH_WORDS>()?;
        let requesters = Requesters::new(set.first_chunk()?);
        Some(Slot { word, namespace, hash, offset, packed, checksum, requesters })
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Slot<'a> {
    word: &'a Cell,
    namespace: &'a Cell,
    hash: &'a [Cell; HASH_WORDS],
    offset: &'a Cell,
    packed: &'a Cell,
    checksum: &'a Cell,
    pub(super) requesters: Requesters<'a>,
}

impl Slot<'_> {
    pub(super) fn word(self) -> Word {
        Word(self.word.get())
    }

    pub(super) fn replace(self, expected: Word, next: Word) -> bool {
        self.word.replace(expected.0, next.0)
    }

    /// Sets the word of a slot that the caller owns.
    pub(super) fn set(self, word: Word) {
        self.word.publish(word.0);
    }

    /// Fills a slot that the caller owns.
    pub(super) fn fill(self, key: &BlockKey, payload: Payload) {
        let bytes = key.hash.as_bytes();
        for (cell, chunk) in self.hash.iter().zip(words(bytes)) {
            cell.publish(chunk);
        }
        self.namespace.publish(key.namespace.0);
        self.offset.publish(payload.extent.offset);
        self.packed.publish(
            u64::from(payload.extent.len)
                | u64::from(payload.extent.pool.0) << POOL_AT
                | (bytes.len() as u64) << HASH_LEN_AT,
        );
        self.checksum.publish(payload.checksum);
    }

    pub(super) fn holds(self, key: &BlockKey) -> bool {
        let bytes = key.hash.as_bytes();
        self.namespace.get() == key.namespace.0
            && self.packed.get() >> HASH_LEN_AT == bytes.len() as u64
            && self.hash.iter().zip(words(bytes)).all(|(cell, word)| cell.get() == word)
    }

    /// The length of the payload.
    pub(super) fn bytes(self) -> u32 {
        u32::try_from(self.packed.get() & u64::from(u32::MAX)).unwrap_or(0)
    }

    pub(super) fn payload(self) -> Payload {
        let packed = self.packed.get();
        let pool = PoolId(u16::try_from(packed >> POOL_AT & 0xffff).unwrap_or(0));
        let extent = Extent { pool, offset: self.offset.get(), len: self.bytes() };
        Payload { extent, checksum: self.checksum.get() }
    }

    pub(super) fn key(self) -> BlockKey {
        let mut bytes = [0; limits::HASH_BYTES_MAX];
        for (chunk, cell) in bytes.chunks_exact_mut(8).zip(self.hash) {
            chunk.copy_from_slice(&cell.get().to_le_bytes());
        }
        let len = u8::try_from(self.packed.get() >> HASH_LEN_AT & 0xff).unwrap_or(0);
        BlockKey {
            namespace: NamespaceId(self.namespace.get()),
            hash: BlockHash::padded(&bytes, len),
        }
    }
}

/// The bytes of a hash as words, filled up with zeros.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    (0..HASH_WORDS).map(move |at| {
        let part = bytes.get(at * 8..bytes.len().min(at * 8 + 8)).unwrap_or_default();
        part.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
    })
}
