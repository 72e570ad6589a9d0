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

    /// How many requesters were served.
    pub(super) fn count(&self) -> u32 {
        let inline = (0..INLINE).filter(|&at| self.answer(RequesterIndex(at)).is_some());
        let overflow = self.overflow.as_ref().map_or(0, |more| more.sorted.len());
        u32::try_from(inline.count() + overflow).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    #[test]
    fn every_requester_keeps_its_first_answer() {
        let mut set = Requesters::default();
        let rank = |at: u16| EvictionRank::clamped(u32::from(at) % 31 + 1);
        let last = u16::try_from(limits::REQUESTERS_MAX - 1).unwrap();
        // Downwards, so that the overflow has to sort.
        for at in (0..=last).rev() {
            let requester = RequesterIndex(at);
            assert_eq!(set.answer(requester), None, "{at}");
            set.record(requester, rank(at));
            set.record(requester, EvictionRank::FIRST);
        }
        for at in 0..=last {
            assert_eq!(set.answer(RequesterIndex(at)), Some(rank(at)), "{at}");
        }
        assert_eq!(set.count(), u32::from(last) + 1);
        assert_eq!(set.answer(RequesterIndex(u16::MAX)), None);
    }

    #[test]
    fn only_a_requester_beyond_the_inline_ones_allocates() {
        let mut set = Requesters::default();
        for at in 0..INLINE {
            set.record(RequesterIndex(at), EvictionRank::LAST);
        }
        assert!(set.overflow.is_none());
        set.record(RequesterIndex(INLINE), EvictionRank::LAST);
        assert!(set.overflow.is_some());
    }
}
