//! Who was served one resident, and the rank that each got: the exact memory behind "once per
//! (block, requester, resident)" and behind the same answer to a repeat.
//!
//! The first [`INLINE`] requesters of a node lie in the slot, five bits each: the rank that was
//! given, or 0 for "not served". Later ones go to a sorted overflow of 4 bytes each, which exists
//! only where such a requester read this resident and ends with it. Exactness has no fixed bound
//! below one entry per requester, so this is the one place where the store allocates after its
//! construction; [`crate::limits::REQUESTERS_MAX`] bounds it to 16 KiB per resident.

use crate::types::{EvictionRank, RequesterIndex};

const RANK_BITS: u32 = 5;
const PER_WORD: u16 = 12;
const WORDS: usize = 4;

/// Requesters without overflow.
const INLINE: u16 = 48;

const _: () = {
    assert!(INLINE as usize == PER_WORD as usize * WORDS);
    assert!(PER_WORD as u32 * RANK_BITS <= u64::BITS);
    assert!((crate::limits::RANK_MAX as u32) < 1 << RANK_BITS);
};

#[derive(Debug, Default)]
pub(super) struct Requesters {
    inline: [u64; WORDS],
    overflow: Option<Box<Overflow>>,
}

/// Boxed as a whole, so that a slot without overflow pays one pointer.
#[derive(Debug, Default)]
struct Overflow {
    sorted: Vec<(RequesterIndex, EvictionRank)>,
}

/// Where an inline requester's field is: the word and the bit.
fn place(requester: RequesterIndex) -> Option<(usize, u32)> {
    (requester.0 < INLINE).then(|| {
        let word = usize::from(requester.0 / PER_WORD);
        (word, u32::from(requester.0 % PER_WORD) * RANK_BITS)
    })
}

fn field(word: u64, bit: u32) -> Option<EvictionRank> {
    let value = word >> bit & ((1 << RANK_BITS) - 1);
    let value = u32::try_from(value).ok()?;
    (value > 0).then(|| EvictionRank::clamped(value))
}

impl Requesters {
    /// The rank that `requester` got when it was first served.
    pub(super) fn answer(&self, requester: RequesterIndex) -> Option<EvictionRank> {
        let Some((word, bit)) = place(requester) else {
            let sorted = &self.overflow.as_ref()?.sorted;
            let at = sorted.binary_search_by_key(&requester, |entry| entry.0);
            return Some(sorted.get(at.ok()?)?.1);
        };
        field(*self.inline.get(word)?, bit)
    }

    /// Remembers that `requester` got `rank`, unless it was served before.
    pub(super) fn record(&mut self, requester: RequesterIndex, rank: EvictionRank) {
        if self.answer(requester).is_some() {
            return;
        }
        let Some((word, bit)) = place(requester) else {
            let sorted = &mut self.overflow.get_or_insert_default().sorted;
            let at = sorted.partition_point(|entry| entry.0 < requester);
            sorted.insert(at, (requester, rank));
            return;
        };
        if let Some(word) = self.inline.get_mut(word) {
            *word |= u64::from(rank.get()) << bit;
        }
    }
}
