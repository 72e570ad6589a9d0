//! A ring: pieces of one stretch of memory, taken at its head, given back in any order.
//!
//! Room comes back at the tail: a piece that is given back before an older one waits for that one. So
//! taking and giving are a few additions, whatever the sizes, and after the first round nothing is
//! allocated. It knows numbers and touches no byte.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::limits;

/// A piece that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPiece {
    /// Its number; each is used once.
    pub number: u64,
    /// Bytes from the start of the memory.
    pub offset: u64,
    /// Its length in bytes, as asked.
    pub len: u64,
}

#[derive(Debug, Clone, Copy)]
struct Taken {
    offset: u64,
    /// Bytes that it takes at most, with what was skipped before it at the ring's end.
    footprint: u64,
    given_back: bool,
}

/// The ring. See the module's documentation.
#[derive(Debug)]
pub struct Ring {
    bytes: u64,
    /// Where the next piece begins.
    head: u64,
    used: u64,
    /// Pieces whose room has not come back, oldest first.
    taken: VecDeque<Taken>,
    /// The number of the first of them.
    first: u64,
    pieces: usize,
}

impl Ring {
    /// A ring over `bytes` bytes with at most `pieces` pieces at once.
    #[must_use]
    pub fn new(bytes: u64, pieces: usize) -> Self {
        let bytes = bytes - bytes % limits::EXTENT_ALIGN;
        let taken = VecDeque::with_capacity(pieces);
        Self { bytes, head: 0, used: 0, taken, first: 0, pieces }
    }

    /// Takes a piece; `None` while there is no room.
    pub fn take(&mut self, len: u64) -> Option<RingPiece> {
        let size = len.max(1).checked_next_multiple_of(limits::EXTENT_ALIGN)?;
        if self.taken.len() >= self.pieces {
            return None;
        }
        // A piece is in one piece: what is left before the end is skipped where it does not fit.
        let skipped = if size > self.bytes - self.head { self.bytes - self.head } else { 0 };
        let footprint = size.checked_add(skipped)?;
        if footprint > self.bytes - self.used {
            return None;
        }
        let offset = if skipped > 0 { 0 } else { self.head };
        self.head = (offset + size) % self.bytes;
        self.used += footprint;
        let number = self.first + self.taken.len() as u64;
        self.taken.push_back(Taken { offset, footprint, given_back: false });
        Some(RingPiece { number, offset, len })
    }

    /// Gives a piece back. One that was given back before changes nothing.
    pub fn give(&mut self, piece: RingPiece) {
        let at = piece.number.checked_sub(self.first).and_then(|at| usize::try_from(at).ok());
        if let Some(taken) = at.and_then(|at| self.taken.get_mut(at)) {
            debug_assert_eq!(taken.offset, piece.offset);
            taken.given_back = true;
        }
        while self.taken.front().is_some_and(|oldest| oldest.given_back) {
            self.used -= self.taken.pop_front().map_or(0, |oldest| oldest.footprint);
            self.first += 1;
        }
        if self.taken.is_empty() {
            // The next piece need not skip anything.
            self.head = 0;
        }
    }

    /// Whether a piece of this length can ever be taken.
    #[must_use]
    pub fn fits(&self, len: u64) -> bool {
        len.max(1).checked_next_multiple_of(limits::EXTENT_ALIGN).is_some_and(|it| it <= self.bytes)
    }

    /// Bytes whose room has not come back.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNIT: u64 = limits::EXTENT_ALIGN;

    #[test]
    fn room_comes_back_in_the_order_taken() {
        let mut ring = Ring::new(4 * UNIT, 8);
        let [a, b, c] = [UNIT, 2 * UNIT, UNIT].map(|len| ring.take(len).unwrap());
        assert_eq!([a.offset, b.offset, c.offset], [0, UNIT, 3 * UNIT]);
        assert_eq!(ring.take(1), None, "full");
        ring.give(b);
        assert_eq!(ring.take(1), None, "an older piece is out");
        ring.give(a);
        ring.give(a);
        assert_eq!(ring.used(), UNIT);
        let d = ring.take(2 * UNIT).unwrap();
        assert_eq!(d.offset, 0, "round the end");
        assert!(!ring.fits(5 * UNIT) && ring.fits(4 * UNIT));
        ring.give(c);
        ring.give(d);
        assert_eq!((ring.used(), ring.take(4 * UNIT).unwrap().offset), (0, 0));
    }

    #[test]
    fn pieces_are_bounded_too() {
        let mut ring = Ring::new(100 * UNIT, 2);
        let first = ring.take(1).unwrap();
        assert!(ring.take(1).is_some() && ring.take(1).is_none());
        ring.give(first);
        assert!(ring.take(1).is_some());
    }

    proptest! {
        #[test]
        fn no_two_pieces_ever_share_a_byte(
            steps in prop::collection::vec((1_u64..5 * UNIT, 0_usize..6, any::<bool>()), 1..200),
        ) {
            let mut ring = Ring::new(9 * UNIT, 6);
            let mut out: Vec<RingPiece> = Vec::new();
            for (len, which, give) in steps {
                if give && !out.is_empty() {
                    ring.give(out.swap_remove(which % out.len()));
                } else if let Some(piece) = ring.take(len) {
                    prop_assert!(piece.offset + piece.len <= 9 * UNIT);
                    let apart = |other: &RingPiece| {
                        piece.offset + piece.len <= other.offset
                            || other.offset + other.len <= piece.offset
                    };
                    prop_assert!(out.iter().all(apart));
                    out.push(piece);
                }
            }
            out.drain(..).for_each(|piece| ring.give(piece));
            prop_assert_eq!(ring.used(), 0);
            prop_assert!(ring.take(9 * UNIT).is_some());
        }
    }
}
