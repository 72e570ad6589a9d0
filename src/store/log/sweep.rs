//! Keeps the logs short: replaces runs of chunks by one with what still counts.
//!
//! While more than [`SLACK`] times the chunks are used that a store without garbage needs, each new
//! chunk pays for looks at [`LOOKS`] others. One hand goes round all logs. A run begins behind the
//! hand and is as long as what is to be kept of it fits one chunk. Its chunks are frozen one after the
//! other, by a mark in their links, so that it is one piece; then the link that leads to it is
//! exchanged for one to a new chunk, which holds the entries that are kept, with the positions that
//! they had, and leads on to what followed. So the order stays, and no reader sees half of it: an
//! entry is in the run or in its replacement. Whoever stops within this has taken nothing away:
//! frozen chunks are read and swept like others, only nothing can be exchanged behind one until it is
//! part of a run itself, be it a run of one.
//!
//! What is undecided is kept. An entry that was appended for a touch counts only later, and the hole
//! that a sweep would make of it could never be found again. A sweep is part of an append, during which the
//! appender's own slot is undecided, mostly, with all its earlier places: no matter where many slots are
//! placed. Where one is placed over and over while others are not, nearly all there is are such places. So
//! above a mark between where sweeps begin and where logs grow no more ([`Bounds::plenty`]), who made a log
//! longer sweeps once more, behind the exchange that it was for, and finishes what it meets (`Table::pay`):
//! of a slot nothing is undecided then but the places of touches that others have under way.
//!
//! # Bound
//!
//! Let `c` be the chunks that all residents fill. After a round of the hand, two chunks that follow
//! each other and were looked at hold more than fits one, unless a run was as long as [`RUN`]. So of
//! `n` chunks that a round began with, at most `2 * c + n / RUN` are left, and `n / LOOKS` were made
//! meanwhile. Sweeping begins at `3 * c`, and the fixed point of this is below that; so never more than
//! about `3.4 * c` chunks are used, 31 bytes for each resident, plus the ends of logs, and a round more
//! for a thread that was overtaken within a step and lost the hand its place. Of few slots that are placed
//! over and over there may be places up to the mark, `4 * c`.

use arrayvec::ArrayVec;

use super::{
    CHUNKS_SPARE, ENTRIES, LISTS, List, Logs, MARK, NIL, Placed, Worth, link_to, number_of,
    position, void,
};
use crate::store::fault::{self, Fault};
use crate::sync::{Cell, Shared};

/// Below so many times the chunks that a store without garbage needs, nothing is swept.
const SLACK: usize = 3;
/// The chunks that there are, in the same measure.
const RESERVE: usize = 5;
/// Chunks that the making of one looks at.
const LOOKS: usize = 8;
/// Chunks that one can replace.
const RUN: usize = 8;

/// Chunks that only the sweep takes, one for each thread that is stopped while it holds one.
const SWEEPERS: usize = CHUNKS_SPARE / 2;

/// How many chunks a store of this capacity has.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// So many may be used before anything is swept.
    pub(super) enough: u64,
    /// So many may be used before who sweeps within an append sweeps once more behind it. What other sweeps
    /// are enough for stays below.
    pub(super) plenty: u64,
    /// So many may be used before logs wait for the sweep, which they do themselves.
    pub(super) room: u64,
    /// So many there are.
    pub(super) count: usize,
}

pub(super) fn bounds(capacity: usize) -> Bounds {
    let full = capacity.div_ceil(ENTRIES);
    let enough = if cfg!(any(test, shuttle)) { 0 } else { SLACK * full + LISTS };
    let count = RESERVE * full + CHUNKS_SPARE;
    let room = count - SWEEPERS;
    let plenty = usize::midpoint(enough, room);
    Bounds { enough: enough as u64, plenty: plenty as u64, room: room as u64, count }
}

/// An entry that is kept, and the count of its placement.
#[derive(Debug, Clone, Copy)]
struct Kept {
    entry: u64,
    count: u64,
}

/// Chunks that follow each other, and what is to be kept of them.
#[derive(Debug)]
struct Run {
    list: List,
    /// The links that lead to them, one after the other, and to what follows.
    links: ArrayVec<u64, RUN>,
    next: u64,
    kept: ArrayVec<Kept, ENTRIES>,
}

impl Logs {
    /// Pays for one new chunk.
    pub(in crate::store) fn sweep(&self, worth: &impl Fn(Placed) -> Worth) {
        let (mut looks, mut logs) = (LOOKS, LISTS);
        while looks > 0 && logs > 0 && self.used.get() > self.enough {
            match self.look(worth) {
                0 => logs -= 1,
                chunks => looks = looks.saturating_sub(chunks),
            }
        }
    }

    /// Looks behind the hand and moves it on. Answers how many chunks that took; none where the hand
    /// went to the next log.
    fn look(&self, worth: &impl Fn(Placed) -> Worth) -> usize {
        let hand = self.hand.get();
        let Some((under, list)) = self.under(hand) else {
            return 0;
        };
        let Some((before, link)) = under else {
            return self.next_log(hand, list);
        };
        let number = self.chunk(link).map(super::Chunk::number);
        let Some(number) = number.filter(|_| link & NIL != NIL) else {
            return self.next_log(hand, list);
        };
        let past = link_to(link & NIL, number);
        if link & MARK != 0 {
            // Behind a frozen chunk, what its link leads to may be another one by now.
            if number != number_of(link) {
                return self.next_log(hand, list);
            }
            self.hand.replace(hand, past);
            return 1;
        }
        let run = self.gather(link, list, worth);
        match run.links.len() {
            // The end of the log.
            0 => return self.next_log(hand, list),
            // This one stays, and the next run is behind it. But a frozen one would stay in the hand's
            // way for as long as anything in it counts, so it is replaced by one like it.
            1 if !run.kept.is_empty() && !self.is_frozen(link) => {
                if before.get() == link {
                    self.hand.replace(hand, past);
                }
            }
            _ => {
                if let Some(instead) = self.replace(before, &run) {
                    self.hand.replace(hand, instead.unwrap_or(hand));
                }
            }
        }
        run.links.len()
    }

    /// Whether whoever froze this chunk did not come to replace it.
    fn is_frozen(&self, link: u64) -> bool {
        let frozen = self.chunk(link).is_some_and(|chunk| chunk.next.get() & MARK != 0);
        frozen && !fault::is(Fault::FrozenLeft)
    }

    /// The link that the hand is at and what it is, if its chunk is still of that use, and whose
    /// log it is in.
    fn under(&self, hand: u64) -> Option<(Option<(&Cell, u64)>, List)> {
        if hand & NIL == NIL {
            let list = List::numbered(number_of(hand));
            let head = &self.ends(list)?.head;
            return Some((Some((head, head.get())), list));
        }
        let chunk = self.chunk(hand)?;
        // The tag says whose the link is only if it is read behind it: the chunk may come into another
        // log in between. That one's chunks would be taken for this one's, and freed with its tail on
        // them, which nobody moved on.
        let early = fault::is(Fault::TagReadEarly).then(|| chunk.tag.get());
        let link = chunk.next.get();
        let tag = early.unwrap_or_else(|| chunk.tag.get());
        let own = tag >> 8 == number_of(hand);
        Some((own.then_some((chunk.next, link)), List::numbered(tag & 0xff)))
    }

    fn next_log(&self, hand: u64, list: List) -> usize {
        self.hand.replace(hand, link_to(NIL, list.next().number().into()));
        0
    }

    /// The longest run from `link` on that one chunk can replace.
    fn gather(&self, link: u64, list: List, worth: &impl Fn(Placed) -> Worth) -> Run {
        let (links, kept) = (ArrayVec::new(), ArrayVec::new());
        let mut run = Run { list, links, next: link, kept };
        while !run.links.is_full() {
            let Some(chunk) = self.chunk(run.next) else {
                break;
            };
            let next = chunk.next.get();
            if next & NIL == NIL {
                break;
            }
            let mut kept: ArrayVec<Kept, ENTRIES> = ArrayVec::new();
            for (at, entry) in chunk.entries.iter().enumerate() {
                let entry = entry.get();
                if worth(Placed::new(list, entry)) != Worth::Garbage {
                    let count = self.count(run.next, at).map_or(0, Shared::get);
                    kept.push(Kept { entry, count });
                }
            }
            // A chunk that does not fit begins the next run.
            if run.kept.try_extend_from_slice(&kept).is_err() {
                break;
            }
            run.links.push(run.next);
            run.next = next & !MARK;
        }
        run
    }

    /// Replaces the run that `before` leads to by one chunk, or by none. Answers the hand for what
    /// comes behind the new one; `None` where the log changed underfoot.
    fn replace(&self, before: &Cell, run: &Run) -> Option<Option<u64>> {
        let first = run.links.first().copied()?;
        let follow = run.links.iter().skip(1).chain([&run.next]);
        for (link, next) in run.links.iter().zip(follow) {
            if self.freeze(*link, run.list)? != *next {
                return None;
            }
        }
        let instead = if run.kept.is_empty() { None } else { Some(self.copy(run)?) };
        if !before.replace(first, instead.unwrap_or(run.next)) {
            instead.into_iter().for_each(|link| self.give_back(link));
            return None;
        }
        run.links.iter().for_each(|link| self.give_back(*link));
        Some(instead)
    }

    /// A chunk with what is kept of a run, and a link to it.
    fn copy(&self, run: &Run) -> Option<u64> {
        let (link, chunk) = self.take(run.list)?;
        // A number of its own, or this link could have been there in an earlier use of the chunk.
        chunk.next.publish(link_to(run.next & NIL, self.number()));
        for (at, entry) in chunk.entries.iter().enumerate() {
            let kept = run.kept.get(at);
            entry.publish(kept.map_or(void(position(number_of(link), at)), |kept| kept.entry));
            if let (Some(kept), Some(count)) = (kept, self.count(link, at)) {
                count.publish(kept.count);
            }
        }
        Self::enter(chunk, link, run.list);
        Some(link)
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
