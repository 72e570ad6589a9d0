//! The last evictions, in a ring of lines that threads write and read without a lock.
//!
//! # Why what is read was written
//!
//! Each eviction has a number, from 1, and its number's line. A line's first cell says of which number
//! it is and whether it is being written. A writer exchanges that cell, stores the rest, and stores the
//! cell again; the exchange fails for all but one, so a line has one writer at a time. A reader reads the
//! cell, the rest, and the cell again: where it says both times that this number is written, nothing was
//! stored in between, because a writer's exchange comes before its stores, and whoever reads one of those
//! (they are releases, the reads acquire) sees the exchange, too.
//!
//! # Why nobody waits
//!
//! A writer tries once. It finds its line busy only where another one has stood still in it since the
//! ring came round; then its own eviction is not shown. A reader ends at a number that is not written yet,
//! because its writer may be about to: at the worst until the ring comes round, if that one gave it up.

use crate::limits;
use crate::protocol::door::EvictedBlock;
use crate::sync::{Apart, Cell, Groups, Shared};
use crate::types::{BlockHash, BlockKey, EvictionRank, NamespaceId};

/// Evictions that a client can look at. (Two in tests, so that the ring comes round.)
const LINES: u64 = if cfg!(test) { 2 } else { 4096 };

const HASH_WORDS: usize = limits::HASH_BYTES_MAX / 8;
/// State, namespace, hash, and the hash's length beside the rank.
const CELLS: usize = 3 + HASH_WORDS;

const RANK_AT: u32 = 8;

/// What the first cell of a line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    number: u64,
    writing: bool,
}

impl State {
    fn of(cell: u64) -> Self {
        Self { number: cell >> 1, writing: cell & 1 == 1 }
    }

    fn cell(self) -> u64 {
        self.number << 1 | u64::from(self.writing)
    }
}

/// What became of an eviction.
#[derive(Debug)]
enum Line {
    Whole(EvictedBlock),
    Overwritten,
    BeingWritten,
}

pub(super) struct Recent {
    /// Numbers given so far.
    numbers: Apart<Cell>,
    lines: Groups<CELLS>,
}

impl std::fmt::Debug for Recent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recent").field("numbers", &self.numbers).finish_non_exhaustive()
    }
}

impl Recent {
    pub(super) fn new() -> Self {
        let lines = usize::try_from(LINES).unwrap_or(0);
        Self { numbers: Apart(Cell::new(0)), lines: Groups::zeroed(lines) }
    }

    fn line(&self, number: u64) -> Option<&[Cell; CELLS]> {
        self.lines.get(usize::try_from(number % LINES).ok()?)
    }

    pub(super) fn note(&self, key: &BlockKey, rank: EvictionRank) {
        let number = self.numbers.add(1);
        let Some([state, namespace, packed, hash @ ..]) = self.line(number) else { return };
        let before = state.get();
        let was = State::of(before);
        let mine = State { number, writing: true };
        if was.writing || was.number > number || !state.replace(before, mine.cell()) {
            return;
        }
        namespace.publish(key.namespace.0);
        let len = key.hash.as_bytes().len() as u64;
        packed.publish(u64::from(rank.get()) << RANK_AT | len);
        let (words, _) = key.hash.full_width().as_chunks::<8>();
        for (cell, bytes) in hash.iter().zip(words) {
            cell.publish(u64::from_le_bytes(*bytes));
        }
        state.publish(State { number, writing: false }.cell());
    }

    fn read(&self, number: u64) -> Line {
        let Some([state, namespace, packed, hash @ ..]) = self.line(number) else {
            return Line::Overwritten;
        };
        let whole = State { number, writing: false };
        let was = State::of(state.get());
        if was != whole {
            // One that stands in the line of a later number has cost that number its place.
            let lost = was.number > number || (was.writing && was.number < number);
            return if lost { Line::Overwritten } else { Line::BeingWritten };
        }
        let mut bytes = [0; limits::HASH_BYTES_MAX];
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (to, cell) in words.iter_mut().zip(hash) {
            *to = cell.get().to_le_bytes();
        }
        let (namespace, packed) = (NamespaceId(namespace.get()), packed.get());
        if State::of(state.get()) != whole {
            return Line::Overwritten;
        }
        let [len, rank, ..] = packed.to_le_bytes();
        let hash = BlockHash::padded(&bytes, len);
        let rank = EvictionRank::clamped(rank.into());
        Line::Whole(EvictedBlock { sequence: number, namespace, hash, rank })
    }

    pub(super) fn since(&self, sequence: u64, max: usize) -> Vec<EvictedBlock> {
        let last = self.numbers.get();
        let first = sequence.saturating_add(1).max(last.saturating_sub(LINES - 1)).max(1);
        let mut found = Vec::new();
        for number in first..=last {
            match self.read(number) {
                Line::Whole(block) if found.len() < max => found.push(block),
                Line::Overwritten => {}
                Line::Whole(_) | Line::BeingWritten => break,
            }
        }
        found
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};
    use std::time::Duration;

    use super::*;
    use crate::sync::{park_at, set_interference};

    const DEADLINE: Duration = Duration::from_secs(60);

    /// A key all of whose parts say the same, so that a mixture is noticed.
    fn key(name: u8) -> BlockKey {
        let hash = BlockHash::new(&[name; 32]).unwrap();
        BlockKey { namespace: NamespaceId(name.into()), hash }
    }

    fn rank(name: u8) -> EvictionRank {
        EvictionRank::clamped(u32::from(name % 16) + 1)
    }

    fn note(recent: &Recent, name: u8) {
        recent.note(&key(name), rank(name));
    }

    fn check(block: &EvictedBlock) -> u8 {
        let name = block.hash.as_bytes()[0];
        let BlockKey { namespace, hash } = key(name);
        assert_eq!((block.namespace, block.hash, block.rank), (namespace, hash, rank(name)));
        name
    }

    fn names(recent: &Recent, since: u64) -> Vec<(u64, u8)> {
        recent.since(since, 9).iter().map(|block| (block.sequence, check(block))).collect()
    }

    #[test]
    fn the_last_ones_are_shown_in_their_order() {
        let recent = Recent::new();
        assert_eq!(names(&recent, 0), []);
        note(&recent, 7);
        assert_eq!(names(&recent, 0), [(1, 7)]);
        (8..11).for_each(|name| note(&recent, name));
        assert_eq!(names(&recent, 0), [(3, 9), (4, 10)]);
        assert_eq!((names(&recent, 3), names(&recent, 4)), (vec![(4, 10)], vec![]));
        assert_eq!((recent.since(0, 1).len(), names(&recent, u64::MAX).len()), (1, 0));
        // A hash of any length comes back as it was.
        let short = BlockKey { namespace: NamespaceId(1), hash: BlockHash::new(&[5]).unwrap() };
        recent.note(&short, rank(1));
        assert_eq!(recent.since(4, 1)[0].hash, short.hash);
    }

    #[test]
    fn what_is_read_is_one_eviction_whoever_writes() {
        for seed in 1..100 {
            let recent = Recent::new();
            std::thread::scope(|scope| {
                for thread in 0..3_u8 {
                    let recent = &recent;
                    scope.spawn(move || {
                        set_interference(seed * 3 + u64::from(thread));
                        (0..20).for_each(|step| note(recent, thread * 20 + step));
                    });
                }
                set_interference(seed);
                for _ in 0..60 {
                    let seen = names(&recent, 0);
                    assert!(seen.is_sorted_by(|a, b| a.0 < b.0), "{seen:?}");
                }
                set_interference(0);
            });
            assert_eq!(recent.numbers.get(), 60);
        }
    }

    /// Whether a writer has an access with this number. While it stands there, others write and read.
    fn stop_at(access: u32) -> bool {
        let recent = Recent::new();
        note(&recent, 1);
        let ((parked, is_parked), (resume, resumed)) = (channel(), channel());
        std::thread::scope(|scope| {
            let (stopped, others) = (&recent, &recent);
            scope.spawn(move || {
                park_at(access, parked, resumed);
                note(stopped, 2);
                park_at(u32::MAX, channel().0, channel().1);
            });
            let stands = is_parked.recv_timeout(DEADLINE);
            assert_ne!(stands, Err(RecvTimeoutError::Timeout));
            let (done, is_done) = channel();
            scope.spawn(move || {
                for name in 3..20 {
                    note(others, name);
                    names(others, 0);
                }
                done.send(names(others, 0)).unwrap();
            });
            let seen = is_done.recv_timeout(DEADLINE);
            drop(resume);
            let seen =
                seen.unwrap_or_else(|_| panic!("stopped at access {access}, it stopped all"));
            // Of each two numbers one is of the line that the stopped one may stand in.
            assert!(!seen.is_empty() && seen.len() <= 2, "{seen:?} at access {access}");
            stands.is_ok()
        })
    }

    #[test]
    fn a_writer_that_stops_anywhere_stops_nobody() {
        let accesses = (0..).take_while(|&access| stop_at(access)).count();
        assert!(accesses > 7, "{accesses}");
    }
}
