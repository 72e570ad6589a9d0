use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use super::*;
use crate::store::log::{Chunk, NO_TAG};
use crate::store::word::Word;
use crate::sync::park_at;
use crate::types::{EvictionRank, MemoryKind};

const FIRST: List = List { kind: MemoryKind::Host, rank: EvictionRank::FIRST };

/// A log of slots that are touched, each of which counts at its newest place.
struct Touched {
    logs: Logs,
    places: RefCell<Vec<u64>>,
}

impl Touched {
    fn touch(&self, slot: u32) {
        let worth = |placed: Placed| match self.places.borrow().get(placed.slot as usize) {
            Some(place) if *place == placed.position => Worth::Counts(Word(0)),
            _ => Worth::Garbage,
        };
        let appended = self.logs.append(FIRST, slot, &worth);
        self.places.borrow_mut()[slot as usize] = appended.position;
    }
}

/// Whether a log grows and grows behind a chunk that was frozen and never replaced.
fn grows_behind_a_frozen_chunk() -> bool {
    const SLOTS: u32 = 64;
    let touched =
        Touched { logs: Logs::new(SLOTS, false), places: RefCell::new(vec![0; SLOTS as usize]) };
    (0..SLOTS).for_each(|slot| touched.touch(slot));
    let hot = |round: u32| touched.touch(round * 2 % SLOTS);
    // A chunk that the sweep has just made of what is touched no more. What follows it is still
    // to be swept, so the link to that is not yet the one that the sweep made.
    let logs = &touched.logs;
    let is_such = |link: &u64| {
        let chunk = logs.chunk(*link).unwrap();
        let next = chunk.next.get();
        let number = logs.chunk(next).map(Chunk::number);
        let cold = |entry: &Cell| {
            let slot = Placed::new(FIRST, entry.get()).slot;
            slot < SLOTS && slot % 2 == 1
        };
        let following = logs.chunk(next).into_iter().flat_map(|chunk| chunk.entries);
        number.is_some_and(|number| number != number_of(next))
            && chunk.entries.iter().all(cold)
            && following.into_iter().any(cold)
    };
    let link = (0..10_000).find_map(|round| {
        hot(round);
        let first = logs.head(FIRST);
        std::iter::successors(first, |link| {
            let next = logs.chunk(*link)?.next.get();
            (next & NIL != NIL).then_some(next)
        })
        .find(is_such)
    });
    logs.freeze(link.unwrap(), FIRST).unwrap();
    let settled = logs.used();
    (0..100 * SLOTS).any(|round| {
        hot(round);
        logs.used() > 2 * settled
    })
}

/// Whoever froze a chunk may have lost the race to replace it. The sweep goes on behind it.
#[test]
fn a_frozen_chunk_does_not_end_the_sweep_of_what_is_behind_it() {
    assert!(!grows_behind_a_frozen_chunk());
    fault::set(Some(Fault::FrozenLeft));
    let grows = grows_behind_a_frozen_chunk();
    fault::set(None);
    assert!(grows, "the sweep does not need the repair");
}

/// Slots that are touched in lists, each of which counts at its newest place.
struct Ranked {
    logs: Logs,
    /// Of each slot the list and, below it, the position.
    places: Vec<AtomicU64>,
}

impl Ranked {
    const SLOTS: u32 = 16;
    const LISTS: [List; 2] = [FIRST, List { kind: MemoryKind::Device, rank: EvictionRank::FIRST }];

    fn new() -> Self {
        let places = (0..Self::SLOTS).map(|_| AtomicU64::new(0)).collect();
        let ranked = Self { logs: Logs::new(Self::SLOTS, false), places };
        (0..Self::SLOTS).for_each(|slot| ranked.touch(FIRST, slot));
        ranked
    }

    fn worth(&self, placed: Placed) -> Worth {
        let place = u64::from(placed.list.number()) << u32::BITS | placed.position;
        let newest = self.places.get(placed.slot as usize);
        let counts = newest.is_some_and(|newest| newest.load(Ordering::SeqCst) == place);
        if counts { Worth::Counts(Word(0)) } else { Worth::Garbage }
    }

    fn touch(&self, list: List, slot: u32) {
        let position = self.logs.append(list, slot, &|placed| self.worth(placed)).position;
        assert!(position >> u32::BITS == 0, "a place is a list and a position");
        let place = u64::from(list.number()) << u32::BITS | position;
        self.places[slot as usize].store(place, Ordering::SeqCst);
    }

    /// Touches slots in lists as `random` has it, so that chunks go from one log to the other.
    fn churn(&self, random: &mut u64, touches: u32) {
        for _ in 0..touches {
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            let slot = u32::try_from(*random >> 20 & 0xffff).unwrap() % Self::SLOTS;
            self.touch(Self::LISTS[usize::from(*random >> 40 & 1 == 0)], slot);
        }
    }

    /// Whether the logs are whole and each slot is at its place.
    fn is_whole(&self) -> bool {
        let mut counting = 0;
        for list in Self::LISTS {
            self.logs.entries(list, &mut |slot, position| {
                let placed = Placed { list, slot, position };
                counting += u32::from(self.worth(placed) != Worth::Garbage);
            });
        }
        self.logs.are_whole() && counting == Self::SLOTS
    }

    /// The chunk that was taken last, if it was used before.
    fn taken_last(&self) -> Option<u64> {
        let number = self.logs.numbers.get();
        let is_it = |chunk: Chunk<'_>| match chunk.tag.get() {
            NO_TAG => chunk.next.get() != 0,
            tag => tag >> 8 == number,
        };
        let chunks = (0..).map_while(|at| Some((at, self.logs.chunk(at)?)));
        chunks.into_iter().find_map(|(at, chunk)| is_it(chunk).then_some(at))
    }
}

/// A thread that does something and stands still at its access of this number.
fn spawn_parked<'s>(
    scope: &'s thread::Scope<'s, '_>,
    access: u32,
    fault: Option<Fault>,
    run: impl FnOnce() + Send + 's,
) -> impl FnOnce() + 's {
    const DEADLINE: Duration = Duration::from_secs(60);
    let (parked, is_parked) = channel();
    let (resume, resumed) = channel();
    let thread = scope.spawn(move || {
        fault::set(fault);
        park_at(access, parked, resumed);
        run();
        // Where it had fewer accesses, it says now that it is over.
        park_at(0, channel().0, channel().1);
    });
    let waits = is_parked.recv_timeout(DEADLINE);
    assert_ne!(waits, Err(RecvTimeoutError::Timeout), "access {access} is not reached");
    move || {
        resume.send(()).ok();
        thread.join().unwrap();
    }
}

/// Whether the logs are whole behind a sweep that stood still at its access of this number while chunks
/// went from log to log.
fn is_whole_behind_a_sweep((access, seed): (u32, u32), fault: Option<Fault>) -> bool {
    let mut random = u64::from((access << 8) + seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let ranked = Ranked::new();
    ranked.churn(&mut random, 100);
    thread::scope(|scope| {
        let ranked = &ranked;
        let sweep = spawn_parked(scope, access, fault, || {
            ranked.logs.sweep(&|placed| ranked.worth(placed));
        });
        ranked.churn(&mut random, 20 + 10 * (seed % 16));
        sweep();
    });
    ranked.is_whole()
}

/// A chunk that the hand is at may come into another log while a thread stands still there.
#[test]
fn a_sweep_that_stood_still_takes_no_other_log_for_its_own() {
    let points = || (0..100).flat_map(|access| (0..16).map(move |seed| (access, seed)));
    for point in points() {
        assert!(is_whole_behind_a_sweep(point, None), "access and seed {point:?}");
    }
    let is_whole = |point| is_whole_behind_a_sweep(point, Some(Fault::TagReadEarly));
    assert!(!points().all(is_whole), "the tag might as well be read before the link");
}

/// Whether the logs are whole behind one who froze a chunk that another was about to fill: each stood
/// still at its access of this number, and the one who filled it made it the tail first.
fn is_whole_behind_a_freeze((taken, frozen, seed): (u32, u32, u32), fault: Option<Fault>) -> bool {
    let mut random = u64::from(seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut ranked = Ranked::new();
    ranked.churn(&mut random, 100 + seed);
    // From here on nothing is swept, so that the one who takes a chunk does so at once.
    ranked.logs.enough = u64::MAX;
    thread::scope(|scope| {
        let (ranked, first) = (&ranked, FIRST);
        let take = spawn_parked(scope, taken, fault, move || {
            (0..3).for_each(|slot| ranked.touch(first, slot));
        });
        let freeze = ranked.taken_last().map(|link| {
            spawn_parked(scope, frozen, fault, move || {
                ranked.logs.freeze(link, first);
            })
        });
        take();
        freeze.into_iter().for_each(|freeze| freeze());
    });
    ranked.is_whole()
}

/// A chunk that is taken anew has the link of its last use for a while, and its tag must not say
/// that this is the link of the new one.
#[test]
fn one_who_freezes_a_chunk_that_comes_back_leaves_the_tail_in_its_log() {
    let points = || {
        let at =
            |taken| (0..4).flat_map(move |frozen| (0..8).map(move |seed| (taken, frozen, seed)));
        (0..40).flat_map(at)
    };
    for point in points() {
        assert!(is_whole_behind_a_freeze(point, None), "accesses and seed {point:?}");
    }
    let is_whole = |point| is_whole_behind_a_freeze(point, Some(Fault::TagGivenEarly));
    assert!(!points().all(is_whole), "the tag might as well be there before the link");
}
