//! One least-recently-used list per rank, linked through the slots: memory is fixed at
//! construction, and every step is a few writes.

use std::fmt;

use crate::policy::ListHead;
use crate::types::EvictionRank;

/// No slot. Beyond every index, so that a look-up by it finds nothing.
pub(super) const NIL: u32 = u32::MAX;

/// One list per rank; index 0 is unused.
const LISTS: usize = crate::limits::RANK_MAX as usize + 1;

#[derive(Debug, Clone, Copy)]
struct Link {
    older: u32,
    newer: u32,
    /// The sequence number of the placement that brought the slot here.
    placed: u64,
}

#[derive(Debug, Clone, Copy)]
struct Ends {
    oldest: u32,
    newest: u32,
}

pub(super) struct Lists {
    links: Box<[Link]>,
    ends: [Ends; LISTS],
    /// Placements so far: the sequence that ages are distances in.
    sequence: u64,
}

impl Lists {
    pub(super) fn new(capacity: u32) -> Self {
        let link = Link { older: NIL, newer: NIL, placed: 0 };
        Self {
            links: vec![link; capacity as usize].into_boxed_slice(),
            ends: [Ends { oldest: NIL, newest: NIL }; LISTS],
            sequence: 0,
        }
    }

    /// Makes `slot`, which is in no list, the newest of `rank`.
    pub(super) fn push_newest(&mut self, rank: EvictionRank, slot: u32) {
        let Some(ends) = self.ends.get_mut(usize::from(rank.get())) else {
            return;
        };
        self.sequence += 1;
        let older = std::mem::replace(&mut ends.newest, slot);
        match self.links.get_mut(older as usize) {
            Some(link) => link.newer = slot,
            None => ends.oldest = slot,
        }
        if let Some(link) = self.links.get_mut(slot as usize) {
            *link = Link { older, newer: NIL, placed: self.sequence };
        }
    }

    /// Takes `slot` out of the list of `rank`, which it is in.
    pub(super) fn remove(&mut self, rank: EvictionRank, slot: u32) {
        let ends = self.ends.get_mut(usize::from(rank.get()));
        let link = self.links.get(slot as usize).copied();
        let (Some(ends), Some(link)) = (ends, link) else {
            return;
        };
        match self.links.get_mut(link.older as usize) {
            Some(older) => older.newer = link.newer,
            None => ends.oldest = link.newer,
        }
        match self.links.get_mut(link.newer as usize) {
            Some(newer) => newer.older = link.older,
            None => ends.newest = link.older,
        }
    }

    /// The least recently used member of `rank`.
    pub(super) fn oldest(&self, rank: EvictionRank) -> Option<u32> {
        let ends = self.ends.get(usize::from(rank.get()))?;
        (ends.oldest != NIL).then_some(ends.oldest)
    }

    /// The heads of the lists that have one, from the highest rank down.
    pub(super) fn heads(&self) -> impl Iterator<Item = ListHead> + '_ {
        EvictionRank::all().rev().filter_map(|rank| {
            let link = self.links.get(self.oldest(rank)? as usize)?;
            let age = self.sequence - link.placed;
            Some(ListHead { rank, age })
        })
    }
}

impl fmt::Debug for Lists {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lists").field("sequence", &self.sequence).finish_non_exhaustive()
    }
}
