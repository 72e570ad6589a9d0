//! One append-only log of placements per rank: the least-recently-used lists, without a lock.
//!
//! A log is a chain of small chunks of entries. An entry says "this slot took the newest place
//! here", and it counts only while the slot's word names its position. So a resident leaves a list
//! by a change of its word alone, and what it left behind is garbage that is recognised as such.
//!
//! - **Append**: the first empty entry of the tail chunk is exchanged for the slot. Entries fill in
//!   order, so that there is no hole and nothing to wait for. An empty entry holds its own position;
//!   positions are never used twice, so an exchange that was meant for an earlier use of the chunk
//!   fails.
//! - **The tail** moves to the next chunk when all entries are taken, by whoever finds that. It
//!   never leaves the chain: a chunk is taken out only after the tail has moved past it, which the
//!   ids tell, because they grow along each log.
//! - **Taking out**: a chunk behind the tail whose entries are all garbage is marked in its link and
//!   then passed by the one link that leads to it. Links name the id of what they lead to (the end
//!   of a chain names the last chunk's own), so a link never has the same value twice, and whoever
//!   reads a link, then what it leads to, then the same link, has read one use of one chunk.
//! - **Sweep**: while more chunks are used than an eighth of the capacity times
//!   [`SLACK_FACTOR`], each new chunk pays for visits to [`VISITS`] others. One hand goes round all
//!   logs.
//!
//! # Bound
//!
//! A chunk that is there after one round of the hand either was new in this round, or held, when the
//! round began, an entry that counts or the end of its log. In a round over `n` chunks and 31 logs
//! there are `(n + 2 * 31) / VISITS` new ones. So with `c` for the capacity and 31, `n` is at most
//! `4 / 3 * c + 21` after a round, and `5 / 3 * c + 42` within one, and one more per thread that is
//! between two steps: [`CHUNKS_PER_RESIDENT`] and [`CHUNKS_SPARE`] are enough.

use std::fmt;

use super::fault::{self, Fault};
use super::free::FreeStack;
use super::word::{TAG_BITS, Word};
use crate::limits;
use crate::sync::{Cell, Shared, zeroed};
use crate::types::EvictionRank;

/// Entries of a chunk: a cache line; in tests two, so that chunks come and go all the time.
const ENTRIES: usize = if cfg!(any(test, shuttle)) { 2 } else { 8 };
const ENTRY_BITS: u32 = 3;

const SLOT_EMPTY: u64 = (1 << (u64::BITS - TAG_BITS)) - 1;
const POSITION_MASK: u64 = (1 << TAG_BITS) - 1;

const TARGET_BITS: u32 = 27;
const NIL: u64 = (1 << TARGET_BITS) - 1;
const MARK: u64 = 1 << TARGET_BITS;
const ID_AT: u32 = TARGET_BITS + 1;

/// Chunks that a resident may cost.
const CHUNKS_PER_RESIDENT: u32 = 2;
/// Chunks for the ends of logs and for threads that are stopped while they hold one.
const CHUNKS_SPARE: u32 = if cfg!(any(test, shuttle)) { 128 } else { 2_048 };
/// Below so many times the chunks that a store without garbage needs, nothing is swept.
const SLACK_FACTOR: u64 = 3;
/// Chunks that the making of one looks at.
const VISITS: usize = 4;

const LOGS: usize = limits::RANK_MAX as usize + 1;

const _: () = {
    assert!(ID_AT + TAG_BITS - ENTRY_BITS == u64::BITS);
    assert!(ENTRIES <= 1 << ENTRY_BITS);
    assert!((limits::RESIDENTS_MAX as u64) < SLOT_EMPTY);
    assert!(
        limits::RESIDENTS_MAX as u64 * CHUNKS_PER_RESIDENT as u64 + (CHUNKS_SPARE as u64) < NIL
    );
};

/// What an entry is worth now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Worth {
    /// The slot's word names it.
    Counts(Word),
    /// It counts no more, and never will.
    Garbage,
    /// An operation on the slot is under way: it may count again.
    Undecided,
}

/// The least recently used member of a log.
#[derive(Debug, Clone, Copy)]
pub(super) struct Oldest {
    pub(super) slot: u32,
    pub(super) word: Word,
    /// Placements since it was placed, where they are counted.
    pub(super) age: u64,
}

#[derive(Clone, Copy)]
struct Chunk<'a> {
    /// The id of this use and the rank whose log it is in.
    tag: &'a Cell,
    next: &'a Cell,
    entries: &'a [Cell; ENTRIES],
}

const CHUNK_CELLS: usize = ENTRIES + 2;

pub(super) struct Logs {
    chunks: Box<[Cell]>,
    free: FreeStack,
    /// By rank: the link to the first chunk.
    heads: [Cell; LOGS],
    /// By rank: a link to the last chunk, or to one that was.
    tails: [Cell; LOGS],
    /// Ids given so far.
    ids: Cell,
    used: Cell,
    enough: u64,
    /// Where the sweep goes on: a link to a chunk, or NIL with a rank for the head of a log.
    hand: Cell,
    /// Placements so far and the number of each entry's, where ages are asked for; else empty.
    placements: Cell,
    numbers: Box<[Cell]>,
}

fn id_of(link: u64) -> u64 {
    link >> ID_AT
}

fn link_to(target: u64, id: u64) -> u64 {
    id << ID_AT | target
}

/// The position of an entry of the chunk that the link leads to.
fn position(link: u64, entry: usize) -> u64 {
    id_of(link) << ENTRY_BITS | entry as u64
}

fn empty(position: u64) -> u64 {
    SLOT_EMPTY << TAG_BITS | position
}

impl Logs {
    /// `aged` says that ages will be asked for.
    pub(super) fn new(capacity: u32, aged: bool) -> Self {
        let count = capacity.saturating_mul(CHUNKS_PER_RESIDENT).saturating_add(CHUNKS_SPARE);
        let numbers = if aged { count as usize * ENTRIES } else { 0 };
        let logs = Self {
            chunks: zeroed(count as usize * CHUNK_CELLS),
            free: FreeStack::full(count),
            heads: std::array::from_fn(|_| Cell::new(NIL)),
            tails: std::array::from_fn(|_| Cell::new(NIL)),
            ids: Cell::new(0),
            used: Cell::new(0),
            enough: if cfg!(any(test, shuttle)) {
                0
            } else {
                u64::from(capacity) / ENTRIES as u64 * SLACK_FACTOR + 64
            },
            hand: Cell::new(link_to(NIL, 1)),
            placements: Cell::new(0),
            numbers: zeroed(numbers),
        };
        for rank in EvictionRank::all() {
            let first = logs.prepare(rank);
            let ends = (logs.heads.get(at(rank)), logs.tails.get(at(rank)));
            if let (Some(first), (Some(head), Some(tail))) = (first, ends) {
                head.publish(first);
                tail.publish(first);
            }
        }
        logs
    }

    fn chunk(&self, link: u64) -> Option<Chunk<'_>> {
        let (chunks, _) = self.chunks.as_chunks::<CHUNK_CELLS>();
        let [tag, next, entries @ ..] = chunks.get(usize::try_from(link & NIL).ok()?)?;
        Some(Chunk { tag, next, entries })
    }

    fn number(&self, link: u64, entry: usize) -> Option<&Cell> {
        self.numbers.get(usize::try_from(link & NIL).ok()? * ENTRIES + entry)
    }

    /// A free chunk, made ready for the end of a log: a link to it.
    fn prepare(&self, rank: EvictionRank) -> Option<u64> {
        let index = self.free.pop()?;
        self.used.add(1);
        let id = self.ids.add(1) & (u64::MAX >> ID_AT);
        let link = link_to(u64::from(index), id);
        let chunk = self.chunk(link)?;
        chunk.tag.publish(id << 8 | u64::from(rank.get()));
        chunk.next.publish(link_to(NIL, id));
        for (at, entry) in chunk.entries.iter().enumerate() {
            entry.publish(empty(position(link, at)));
        }
        Some(link)
    }

    fn give_back(&self, link: u64) {
        self.used.add(u64::MAX);
        if let Ok(index) = u32::try_from(link & NIL) {
            self.free.push(index);
        }
    }

    /// Gives `slot` the newest place of `rank` and answers its position. `worth` is what the sweep
    /// asks; it must not append.
    pub(super) fn append(
        &self,
        rank: EvictionRank,
        slot: u32,
        worth: &impl Fn(u32, u64) -> Worth,
    ) -> u64 {
        loop {
            let Some(tail) = self.tails.get(at(rank)) else {
                return 0;
            };
            let link = tail.get();
            if let Some(position) = self.append_to(link, slot) {
                return position;
            }
            self.grow(tail, link, rank, worth);
        }
    }

    /// `None` where no entry is empty.
    fn append_to(&self, link: u64, slot: u32) -> Option<u64> {
        let chunk = self.chunk(link)?;
        for (at, entry) in chunk.entries.iter().enumerate() {
            let position = position(link, at);
            if entry.get() != empty(position) {
                continue;
            }
            if let Some(number) = self.number(link, at) {
                number.publish(self.placements.add(1));
            }
            if entry.replace(empty(position), u64::from(slot) << TAG_BITS | position) {
                return Some(position);
            }
        }
        None
    }

    /// Moves the tail on from a full chunk.
    fn grow(&self, tail: &Cell, link: u64, rank: EvictionRank, worth: &impl Fn(u32, u64) -> Worth) {
        let Some(chunk) = self.chunk(link) else {
            return;
        };
        let next = chunk.next.get();
        if tail.get() != link {
            return;
        }
        if next & NIL != NIL {
            tail.replace(link, next);
            return;
        }
        if self.used.get() > self.enough {
            (0..VISITS).for_each(|_| self.visit(worth));
        }
        let Some(fresh) = self.prepare(rank) else {
            return;
        };
        if chunk.next.replace(next, fresh) {
            tail.replace(link, fresh);
        } else {
            self.give_back(fresh);
        }
    }

    /// The oldest member of `rank`. `worth` must decide.
    pub(super) fn oldest(
        &self,
        rank: EvictionRank,
        worth: &impl Fn(u32, u64) -> Worth,
    ) -> Option<Oldest> {
        let head = self.heads.get(at(rank))?;
        loop {
            let link = head.get();
            let chunk = self.chunk(link)?;
            let next = chunk.next.get();
            if head.get() != link {
                continue;
            }
            if next & MARK != 0 {
                self.pass(head, link, next);
                continue;
            }
            match self.search(link, chunk, worth) {
                Search::Found(oldest) => return Some(oldest),
                Search::End => return None,
                Search::Changed => {}
                Search::AllGarbage => {
                    // Read again: a member may have moved on, into a chunk that is new since. And
                    // the head again: it says that what was read is still of this chunk's use.
                    let now = chunk.next.get();
                    if head.get() != link {
                        continue;
                    }
                    let next = if fault::is(Fault::EndReadEarly) { next } else { now };
                    if next & NIL == NIL {
                        return None;
                    }
                    if next & MARK == 0 {
                        self.take_out(rank, head, link, next);
                    }
                }
            }
        }
    }

    fn search(&self, link: u64, chunk: Chunk<'_>, worth: &impl Fn(u32, u64) -> Worth) -> Search {
        for (at, entry) in chunk.entries.iter().enumerate() {
            let (entry, position) = (entry.get(), position(link, at));
            if entry & POSITION_MASK != position {
                return Search::Changed;
            }
            if entry == empty(position) {
                return Search::End;
            }
            let slot = u32::try_from(entry >> TAG_BITS).unwrap_or(u32::MAX);
            match worth(slot, position) {
                Worth::Counts(word) => {
                    let now = self.placements.get();
                    let number = self.number(link, at).map_or(now, Shared::get);
                    let age = now.saturating_sub(number);
                    return Search::Found(Oldest { slot, word, age });
                }
                Worth::Garbage => {}
                Worth::Undecided => return Search::Changed,
            }
        }
        Search::AllGarbage
    }

    /// Takes out the chunk that `before`, now `link`, leads to. All its entries are garbage, and its
    /// own link is `next`, not the end.
    fn take_out(&self, rank: EvictionRank, before: &Cell, link: u64, next: u64) {
        let (Some(chunk), Some(tail)) = (self.chunk(link), self.tails.get(at(rank))) else {
            return;
        };
        let last = tail.get();
        if last == link {
            tail.replace(link, next);
        } else if id_of(last) > id_of(link) && chunk.next.replace(next, next | MARK) {
            self.pass(before, link, next | MARK);
        }
    }

    /// Leads `before` past a marked chunk; whoever succeeds sets the chunk free.
    fn pass(&self, before: &Cell, link: u64, next: u64) {
        if before.replace(link, next & !MARK) {
            self.give_back(link);
        }
    }

    /// Looks at one chunk, takes it out if it is garbage, and moves the hand.
    fn visit(&self, worth: &impl Fn(u32, u64) -> Worth) {
        let hand = self.hand.get();
        let Some((before, rank)) = self.under(hand) else {
            return;
        };
        let link = before.get();
        // At the end of a log, or at a chunk that left it or is leaving: on to the next log.
        let in_log =
            hand & NIL == NIL || self.chunk(hand).is_some_and(|c| c.tag.get() >> 8 == id_of(hand));
        if !in_log || link & NIL == NIL || link & MARK != 0 {
            let after = u64::from(rank.get()) % u64::from(limits::RANK_MAX) + 1;
            self.hand.replace(hand, link_to(NIL, after));
            return;
        }
        let Some(chunk) = self.chunk(link) else {
            return;
        };
        let next = chunk.next.get();
        if before.get() != link {
            return;
        }
        if next & MARK != 0 {
            self.pass(before, link, next);
        } else if next & NIL != NIL && self.is_garbage(link, chunk, worth) {
            self.take_out(rank, before, link, next);
        } else {
            self.hand.replace(hand, link);
        }
    }

    /// The link that the hand is at, and the rank of its log.
    fn under(&self, hand: u64) -> Option<(&Cell, EvictionRank)> {
        if hand & NIL == NIL {
            let rank = EvictionRank::clamped(u32::try_from(id_of(hand)).unwrap_or(0));
            return Some((self.heads.get(at(rank))?, rank));
        }
        let chunk = self.chunk(hand)?;
        let rank = u32::try_from(chunk.tag.get() & 0xff).unwrap_or(0);
        Some((chunk.next, EvictionRank::clamped(rank)))
    }

    fn is_garbage(&self, link: u64, chunk: Chunk<'_>, worth: &impl Fn(u32, u64) -> Worth) -> bool {
        chunk.entries.iter().enumerate().all(|(at, entry)| {
            let (entry, position) = (entry.get(), position(link, at));
            let slot = u32::try_from(entry >> TAG_BITS).unwrap_or(u32::MAX);
            entry & POSITION_MASK == position
                && entry != empty(position)
                && worth(slot, position) == Worth::Garbage
        })
    }
}

#[cfg(test)]
impl Logs {
    /// Shows the taken entries of a log, oldest first. Nothing else may be going on.
    pub(super) fn entries(&self, rank: EvictionRank, show: &mut impl FnMut(u32, u64)) {
        let mut link = self.heads[at(rank)].get();
        while let Some(chunk) = self.chunk(link) {
            for (at, entry) in chunk.entries.iter().enumerate() {
                let (entry, position) = (entry.get(), position(link, at));
                assert_eq!(entry & POSITION_MASK, position);
                if entry != empty(position) {
                    show(u32::try_from(entry >> TAG_BITS).unwrap(), position);
                }
            }
            link = chunk.next.get() & !MARK;
        }
    }

    /// Chunks that are not free.
    pub(super) fn used(&self) -> u64 {
        self.used.get()
    }
}

enum Search {
    Found(Oldest),
    /// An empty entry was reached.
    End,
    AllGarbage,
    /// The chunk is another one by now.
    Changed,
}

fn at(rank: EvictionRank) -> usize {
    usize::from(rank.get())
}

impl fmt::Debug for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logs").field("used", &self.used).finish_non_exhaustive()
    }
}
