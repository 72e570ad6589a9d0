//! One append-only log of placements per list: the least-recently-used lists, without a lock.
//!
//! A log is a chain of small chunks of entries. An entry says "this slot took the newest place
//! here", and it counts only while the slot's word names its position. So a resident leaves a list
//! by a change of its word alone, and what it left behind is garbage that is recognised as such.
//!
//! - **Append**: the first empty entry of the tail chunk is exchanged for the slot. Entries fill in
//!   order, so that there is no hole and nothing to wait for. An empty entry holds its own position;
//!   positions are never used twice, so an exchange that was meant for an earlier use of the chunk
//!   fails. Positions grow along each log.
//! - **The tail** moves to the next chunk when all entries are taken, by whoever finds that; only
//!   then can the next one fill. So it leads to the last chunk or to the one before, and a chunk that
//!   has a next one and is not at the tail is behind it.
//! - **Taking out**: a chunk behind the tail whose entries are all garbage is frozen, by a mark in its
//!   link, and then passed by the one link that leads to it.
//! - **Sweep** (`sweep`): replaces runs of chunks by one with what still counts.
//! - **Garbage stays garbage**, so the part of a head chunk that a search found to be garbage is not
//!   looked at again: each log remembers how far that was (`skips`).
//!
//! A link contains a number that no other link ever has, except that it moves from a chunk that is
//! taken out to the one before. So whoever reads a link, then what it leads to, then the same link,
//! has read one use of one chunk; and an exchange of a link of a chunk that has left its chain fails,
//! because that one is frozen, or of another use.

#[cfg(test)]
mod census;
mod list;
mod sweep;

use std::{fmt, iter};

use super::fault::{self, Fault};
use super::word::{TAG_BITS, Word};
use crate::limits;
use crate::sync::{Apart, Cell, FreeStack, Groups, Shared};
use list::LISTS;
pub(super) use list::List;
use sweep::Bounds;

/// Entries of a chunk: with tag and link, two cache lines. In tests two, so that chunks come and go
/// all the time.
const ENTRIES: usize = if cfg!(any(test, shuttle)) { 2 } else { 14 };
const ENTRY_BITS: u32 = 4;
const ENTRY_MASK: u64 = (1 << ENTRY_BITS) - 1;
const CHUNK_CELLS: usize = ENTRIES + 2;

/// The slot of an entry that is empty.
const SLOT_EMPTY: u64 = (1 << (u64::BITS - TAG_BITS)) - 1;
/// The slot of an entry that never was one of a resident.
const SLOT_VOID: u64 = SLOT_EMPTY - 1;
const POSITION_MASK: u64 = (1 << TAG_BITS) - 1;

const TARGET_BITS: u32 = 28;
const NIL: u64 = (1 << TARGET_BITS) - 1;
const MARK: u64 = 1 << TARGET_BITS;
const NUMBER_AT: u32 = TARGET_BITS + 1;
const NUMBER_MASK: u64 = u64::MAX >> NUMBER_AT;

/// Chunks for the ends of logs and for threads that are stopped while they hold one.
const CHUNKS_SPARE: usize = if cfg!(any(test, shuttle)) { 192 } else { 2_048 };

/// The tag of a chunk that is being filled. Numbers begin at 1.
const NO_TAG: u64 = 0;

const _: () = {
    assert!(NUMBER_AT + TAG_BITS - ENTRY_BITS == u64::BITS);
    assert!(ENTRIES < 1 << ENTRY_BITS, "a count of entries fits beside a number, too");
    assert!((limits::RESIDENTS_MAX as u64) < SLOT_VOID);
    assert!((limits::RESIDENTS_MAX as u64) * 3 + (CHUNKS_SPARE as u64) < NIL);
};

/// What an entry is worth now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Worth {
    /// The slot's word names it.
    Counts(Word),
    /// It counts no more, and never will.
    Garbage,
    /// An operation on the slot may be under way that makes it count.
    Undecided,
}

/// An entry in its log.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub(super) list: List,
    pub(super) slot: u32,
    pub(super) position: u64,
}

impl Placed {
    fn new(list: List, entry: u64) -> Self {
        let slot = u32::try_from(entry >> TAG_BITS).unwrap_or(u32::MAX);
        Self { list, slot, position: entry & POSITION_MASK }
    }
}

/// A place that was given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Appended {
    pub(super) position: u64,
    /// Whether its log is longer by a chunk where sweeps within appends do not free enough, so that whoever
    /// appended owes one more behind the exchange that it was for.
    pub(super) owes: bool,
}

/// Chunks that are read ahead at a time at most, where nearly all in them is garbage.
const UPCOMING: usize = 32;

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
    /// The number of this use and the list whose log it is.
    tag: &'a Cell,
    next: &'a Cell,
    entries: &'a [Cell; ENTRIES],
}

impl Chunk<'_> {
    /// The number of this use.
    fn number(self) -> u64 {
        self.tag.get() >> 8
    }
}

/// The ends of one log.
#[derive(Debug)]
struct Ends {
    /// The link to the first chunk.
    head: Apart<Cell>,
    /// Of the first chunk: its number, and how many of its entries were found to be garbage.
    skip: Cell,
    /// A link to the last chunk, or to the one before.
    tail: Apart<Cell>,
}

pub(super) struct Logs {
    chunks: Groups<CHUNK_CELLS>,
    free: FreeStack,
    /// By the number of their list.
    ends: Box<[Ends]>,
    /// Numbers of links given so far.
    numbers: Apart<Cell>,
    /// Chunks that are not free.
    used: Apart<Cell>,
    /// Where the sweep goes on: a link to a chunk, or NIL with a list's number for the head of its log.
    hand: Apart<Cell>,
    /// So many chunks are used before anything is swept.
    enough: u64,
    /// So many chunks are used before a sweep within an append is not enough.
    plenty: u64,
    /// Logs do not grow while more than so many are used: the sweep needs some to put into what it
    /// keeps, or it could free none.
    room: u64,
    /// Placements so far and the count at each entry's, where ages are asked for; else empty.
    placements: Apart<Cell>,
    counts: Groups<ENTRIES>,
}

fn number_of(link: u64) -> u64 {
    link >> NUMBER_AT
}

/// The tag of the chunk that is linked so, in the log of `list`.
fn tag(link: u64, list: List) -> u64 {
    number_of(link) << 8 | u64::from(list.number())
}

fn link_to(target: u64, number: u64) -> u64 {
    number << NUMBER_AT | target
}

/// The position of an entry of the chunk with this number.
fn position(number: u64, entry: usize) -> u64 {
    number << ENTRY_BITS | entry as u64
}

fn empty(position: u64) -> u64 {
    SLOT_EMPTY << TAG_BITS | position
}

fn void(position: u64) -> u64 {
    SLOT_VOID << TAG_BITS | position
}

fn is_empty(entry: u64) -> bool {
    entry >> TAG_BITS == SLOT_EMPTY
}

impl Logs {
    /// `aged` says that ages will be asked for.
    pub(super) fn new(capacity: u32, aged: bool) -> Self {
        let Bounds { enough, plenty, room, count } = sweep::bounds(capacity as usize);
        let end = |_| Ends {
            head: Apart(Cell::new(NIL)),
            skip: Cell::new(0),
            tail: Apart(Cell::new(NIL)),
        };
        let logs = Self {
            chunks: Groups::zeroed(count),
            free: FreeStack::full(),
            ends: (0..LISTS).map(end).collect(),
            numbers: Apart(Cell::new(0)),
            used: Apart(Cell::new(0)),
            hand: Apart(Cell::new(link_to(NIL, 1))),
            enough,
            plenty,
            room,
            placements: Apart(Cell::new(0)),
            counts: Groups::zeroed(if aged { count } else { 0 }),
        };
        for list in List::all() {
            if let (Some(first), Some(ends)) = (logs.prepare_last(list), logs.ends(list)) {
                ends.head.publish(first);
                ends.tail.publish(first);
            }
        }
        logs
    }

    fn ends(&self, list: List) -> Option<&Ends> {
        self.ends.get(usize::from(list.number()))
    }

    fn chunk(&self, link: u64) -> Option<Chunk<'_>> {
        let [tag, next, entries @ ..] = self.chunks.get(usize::try_from(link & NIL).ok()?)?;
        Some(Chunk { tag, next, entries: entries.first_chunk()? })
    }

    fn count(&self, link: u64, entry: usize) -> Option<&Cell> {
        self.counts.get(usize::try_from(link & NIL).ok()?)?.get(entry)
    }

    /// The cell that links a chunk to others while it is free.
    fn free_link(&self, index: u32) -> Option<&Cell> {
        self.chunk(u64::from(index))?.entries.first()
    }

    fn number(&self) -> u64 {
        self.numbers.add(1) & NUMBER_MASK
    }

    /// A free chunk, which has no tag until [`Logs::enter`], and the link to it.
    fn take(&self, list: List) -> Option<(u64, Chunk<'_>)> {
        let index = self.free.pop(|index| self.free_link(index))?;
        self.used.add(1);
        let link = link_to(u64::from(index), self.number());
        let chunk = self.chunk(link)?;
        let early = fault::is(Fault::TagGivenEarly);
        chunk.tag.publish(if early { tag(link, list) } else { NO_TAG });
        Some((link, chunk))
    }

    /// Gives a chunk that is filled the tag of its use. Until then it has none, so that whoever reads a
    /// tag and then the link, or the link and then the tag, never has the tag of one use and the link
    /// of another: of an old one behind a new tag, or of a new one before an old tag.
    fn enter(chunk: Chunk<'_>, link: u64, list: List) {
        chunk.tag.publish(tag(link, list));
    }

    /// A free chunk, made ready for the end of a log: a link to it.
    fn prepare_last(&self, list: List) -> Option<u64> {
        let (link, chunk) = self.take(list)?;
        let number = number_of(link);
        chunk.next.publish(link_to(NIL, number));
        for (at, entry) in chunk.entries.iter().enumerate() {
            entry.publish(empty(position(number, at)));
        }
        Self::enter(chunk, link, list);
        Some(link)
    }

    fn give_back(&self, link: u64) {
        self.used.add(u64::MAX);
        let index = u32::try_from(link & NIL).ok();
        if let Some((index, below)) = index.and_then(|index| Some((index, self.free_link(index)?)))
        {
            self.free.push(index, below);
        }
    }

    /// Gives `slot` the newest place of `list`. `worth` is what the sweep asks; it must not append.
    pub(super) fn append(
        &self,
        list: List,
        slot: u32,
        worth: &impl Fn(Placed) -> Worth,
    ) -> Appended {
        let mut grew = false;
        loop {
            let owes = grew && self.used.get() > self.plenty;
            let Some(ends) = self.ends(list) else {
                return Appended { position: 0, owes };
            };
            let link = ends.tail.get();
            if let Some(position) = self.append_to(link, slot) {
                return Appended { position, owes };
            }
            grew |= self.grow(&ends.tail, link, list, worth);
        }
    }

    /// `None` where no entry is empty.
    fn append_to(&self, link: u64, slot: u32) -> Option<u64> {
        let (chunk, number) = (self.chunk(link)?, number_of(link));
        let first = chunk.entries.partition_point(|entry| !is_empty(entry.get()));
        for (at, entry) in chunk.entries.iter().enumerate().skip(first) {
            let position = position(number, at);
            if entry.get() != empty(position) {
                continue;
            }
            if let Some(count) = self.count(link, at) {
                count.publish(self.placements.add(1));
            }
            if entry.replace(empty(position), u64::from(slot) << TAG_BITS | position) {
                return Some(position);
            }
        }
        None
    }

    /// Moves the tail on from a full chunk; whether the log is longer by that.
    fn grow(&self, tail: &Cell, link: u64, list: List, worth: &impl Fn(Placed) -> Worth) -> bool {
        let Some(chunk) = self.chunk(link) else {
            return false;
        };
        let next = chunk.next.get();
        if tail.get() != link {
            return false;
        }
        if next & NIL != NIL {
            tail.replace(link, next & !MARK);
            return false;
        }
        self.sweep(worth);
        if self.used.get() >= self.room {
            return false;
        }
        let Some(fresh) = self.prepare_last(list) else {
            return false;
        };
        let longer = chunk.next.replace(next, fresh);
        if longer {
            tail.replace(link, fresh);
        } else {
            self.give_back(fresh);
        }
        longer
    }

    /// The oldest member of `list`. `worth` must decide about what is announced.
    pub(super) fn oldest(&self, list: List, worth: &impl Fn(Placed) -> Worth) -> Option<Oldest> {
        let ends = self.ends(list)?;
        loop {
            let link = ends.head.get();
            let chunk = self.chunk(link)?;
            let next = chunk.next.get();
            let found = self.search(ends, link, list, worth);
            // Only of a chunk that still is the first was all of this read.
            if ends.head.get() != link && !fault::is(Fault::FoundUnchecked) {
                continue;
            }
            match found {
                Search::Found(oldest) => return Some(oldest),
                Search::End => return None,
                Search::Undecided => {}
                Search::AllGarbage => {
                    // Read again: a member may have moved on, into a chunk that is new since. And
                    // the head again: it says that what was read is still of this chunk's use.
                    let now = chunk.next.get();
                    if ends.head.get() != link {
                        continue;
                    }
                    let next = if fault::is(Fault::EndReadEarly) { next } else { now };
                    if next & NIL == NIL {
                        return None;
                    }
                    self.take_out(&ends.head, link, list);
                }
            }
        }
    }

    /// What is in the first chunks of `list`, [`UPCOMING`] at most: each as of now, or of a moment ago,
    /// or, where a chunk moved on meanwhile, what is in another log.
    pub(super) fn upcoming(&self, list: List) -> impl Iterator<Item = [Placed; ENTRIES]> {
        let first = self.head(list).and_then(|link| self.chunk(link));
        let chunks = iter::successors(first, |chunk| self.chunk(chunk.next.get()));
        let placed = move |entry: &Cell| Placed::new(list, entry.get());
        chunks.take(UPCOMING).map(move |chunk| chunk.entries.each_ref().map(placed))
    }

    /// The link to the first chunk of `list`.
    pub(super) fn head(&self, list: List) -> Option<u64> {
        Some(self.ends(list)?.head.get())
    }

    fn search(
        &self,
        ends: &Ends,
        link: u64,
        list: List,
        worth: &impl Fn(Placed) -> Worth,
    ) -> Search {
        let Some(chunk) = self.chunk(link) else {
            return Search::End;
        };
        let (skip, number) = (ends.skip.get(), chunk.number());
        let own = skip >> ENTRY_BITS == number || fault::is(Fault::SkipForeign);
        let skip = if own { usize::try_from(skip & ENTRY_MASK).unwrap_or(0) } else { 0 };
        let mut result = Search::AllGarbage;
        let mut garbage = skip.min(ENTRIES);
        for (at, entry) in chunk.entries.iter().enumerate().skip(skip) {
            let entry = entry.get();
            if is_empty(entry) {
                result = Search::End;
                break;
            }
            let placed = Placed::new(list, entry);
            match worth(placed) {
                Worth::Counts(word) => {
                    let now = self.placements.get();
                    let count = self.count(link, at).map_or(now, Shared::get);
                    let age = now.saturating_sub(count);
                    result = Search::Found(Oldest { slot: placed.slot, word, age });
                    break;
                }
                Worth::Undecided => {
                    result = Search::Undecided;
                    break;
                }
                Worth::Garbage => garbage = at + 1,
            }
        }
        if garbage > skip && ends.head.get() == link {
            ends.skip.publish(position(number, garbage));
        }
        result
    }

    /// Takes out the chunk that `before`, now `link`, leads to, which is behind the end of its log.
    /// All its entries are garbage.
    fn take_out(&self, before: &Cell, link: u64, list: List) {
        if let Some(next) = self.freeze(link, list)
            && before.replace(link, next)
        {
            self.give_back(link);
        }
    }

    /// Makes sure that a chunk which has a next one is behind the tail, and that its link stays as it
    /// is: answers that link. `None` where it changed underfoot.
    ///
    /// The link is of the use that the tag names, or of a later one. Where the tail is at the former, it
    /// is still that one, and the tail moves along its own log.
    fn freeze(&self, link: u64, list: List) -> Option<u64> {
        let (chunk, ends) = (self.chunk(link)?, self.ends(list)?);
        let number = chunk.number();
        let next = chunk.next.get();
        if next & NIL == NIL {
            return None;
        }
        let own = link_to(link & NIL, number);
        if ends.tail.get() == own {
            ends.tail.replace(own, next & !MARK);
        }
        let frozen = next & MARK != 0 || chunk.next.replace(next, next | MARK);
        frozen.then_some(next & !MARK)
    }
}

enum Search {
    Found(Oldest),
    /// An empty entry was reached.
    End,
    AllGarbage,
    /// Something is under way.
    Undecided,
}

impl fmt::Debug for Logs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Logs").field("used", &self.used).finish_non_exhaustive()
    }
}
