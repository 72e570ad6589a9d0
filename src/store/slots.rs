//! What a slot holds besides its word: written by the one thread that owns it while nobody can find
//! it, and read by anybody, who then looks whether the word is still the same.
//!
//! A slot is in three places, so that an operation brings only what it reads into the cache: a line
//! with all that finds it, the rest of its payload, and a line with its requesters, which stays
//! untouched, and costs no memory, until the resident is served to a peer.

use std::ops::Range;

use super::requesters::{self, Requesters};
use super::resident::Payload;
use super::word::Word;
use crate::limits;
use crate::sync::{Cell, Groups, Shared};
use crate::types::{BlockHash, BlockKey, Extent, MemoryKind, NamespaceId, PoolId};

const HASH_WORDS: usize = limits::HASH_BYTES_MAX / 8;

/// Of the packed field: the length in bytes, the pool above it, the hash's length above that.
const POOL_AT: u32 = 32;
const HASH_LEN_AT: u32 = 48;

/// Word, link, namespace, packed and hash: a cache line.
const LINE: usize = 4 + HASH_WORDS;
/// Offset and checksum.
const PAYLOAD: usize = 2;
const _: () = assert!(LINE == 8 && Word::FREE.0 == 0, "a slot of zeros is free");

pub(super) struct Slots {
    lines: Groups<LINE>,
    payloads: Groups<PAYLOAD>,
    requesters: Groups<{ requesters::CELLS }>,
}

/// A key, in the form that slots hold it in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeyWords {
    namespace: u64,
    hash: [u64; HASH_WORDS],
    hash_len: u64,
}

impl KeyWords {
    pub(super) fn of(key: &BlockKey) -> Self {
        let (words, _) = key.hash.full_width().as_chunks::<8>();
        let mut hash = [0; HASH_WORDS];
        for (to, bytes) in hash.iter_mut().zip(words) {
            *to = u64::from_le_bytes(*bytes);
        }
        let hash_len = key.hash.as_bytes().len() as u64;
        Self { namespace: key.namespace.0, hash, hash_len }
    }
}

impl Slots {
    pub(super) fn new(count: u32) -> Self {
        let count = count as usize;
        Self {
            lines: Groups::zeroed(count),
            payloads: Groups::zeroed(count),
            requesters: Groups::zeroed(count),
        }
    }

    /// Where what every operation touches lies: the lines and the payloads. Requesters are left out:
    /// those of residents that nobody fetched cost nothing as long as their pages are untouched.
    pub(super) fn addresses(&self) -> [Range<*const u8>; 2] {
        [self.lines.addresses(), self.payloads.addresses()]
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.lines.count()).unwrap_or(u32::MAX)
    }

    pub(super) fn get(&self, slot: u32) -> Option<Slot<'_>> {
        let [word, _link, namespace, packed, hash @ ..] = self.lines.get(slot as usize)?;
        Some(Slot { word, namespace, packed, hash })
    }

    /// The link of the slot in its chain.
    pub(super) fn link(&self, slot: u32) -> Option<&Cell> {
        self.lines.get(slot as usize).map(|[_, link, ..]| link)
    }

    /// The cell that links a slot to others while it is free: it has no payload then.
    pub(super) fn free_link(&self, slot: u32) -> Option<&Cell> {
        self.payloads.get(slot as usize).map(|[offset, _]| offset)
    }

    pub(super) fn requesters(&self, slot: u32) -> Option<Requesters<'_>> {
        self.requesters.get(slot as usize).map(Requesters::new)
    }

    pub(super) fn payload(&self, slot: u32) -> Option<Payload> {
        let packed = self.get(slot)?.packed.get();
        let [offset, checksum] = self.payloads.get(slot as usize)?;
        let extent = Extent { pool: pool_in(packed), offset: offset.get(), len: len_in(packed) };
        Some(Payload { extent, checksum: checksum.get() })
    }

    /// Fills a slot that the caller owns.
    pub(super) fn fill(&self, slot: u32, key: &KeyWords, payload: Payload) {
        if let (Some(entry), Some([offset, checksum])) =
            (self.get(slot), self.payloads.get(slot as usize))
        {
            let extent = payload.extent;
            for (cell, word) in entry.hash.iter().zip(key.hash) {
                cell.publish(word);
            }
            entry.namespace.publish(key.namespace);
            entry.packed.publish(
                u64::from(extent.len)
                    | u64::from(extent.pool.0) << POOL_AT
                    | key.hash_len << HASH_LEN_AT,
            );
            offset.publish(extent.offset);
            checksum.publish(payload.checksum);
        }
    }

    /// Reads what finds a slot, and no more.
    pub(super) fn warm(&self, slot: u32) {
        if let Some(entry) = self.get(slot) {
            entry.word.get();
        }
    }

    pub(super) fn warm_payload(&self, slot: u32) {
        if let Some(offset) = self.free_link(slot) {
            offset.get();
        }
    }

    pub(super) fn warm_requesters(&self, slot: u32) {
        if let Some(requesters) = self.requesters(slot) {
            requesters.warm();
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Slot<'a> {
    word: &'a Cell,
    namespace: &'a Cell,
    packed: &'a Cell,
    hash: &'a [Cell; HASH_WORDS],
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

    pub(super) fn holds(self, key: &KeyWords) -> bool {
        self.namespace.get() == key.namespace
            && self.packed.get() >> HASH_LEN_AT == key.hash_len
            && self.hash.iter().zip(key.hash).all(|(cell, word)| cell.get() == word)
    }

    /// Which memory the payload is in: it is in the line that the word is in.
    pub(super) fn kind(self) -> MemoryKind {
        pool_in(self.packed.get()).kind()
    }

    /// The length of the payload.
    pub(super) fn bytes(self) -> u32 {
        len_in(self.packed.get())
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

fn pool_in(packed: u64) -> PoolId {
    PoolId(u16::try_from(packed >> POOL_AT & 0xffff).unwrap_or(0))
}

fn len_in(packed: u64) -> u32 {
    u32::try_from(packed & u64::from(u32::MAX)).unwrap_or(0)
}
