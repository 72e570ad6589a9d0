//! What one copy moves between an engine's memory and a pool, and when two copies are one.
//!
//! A copy costs a driver's call, whatever its length: one call for each piece of each block would take
//! longer than the bytes. Rows that go on where those before them end, or that lie at equal distances on
//! both sides, are one two-dimensional copy.
#![forbid(unsafe_code)]

/// Rows of equal length at equal distances: what one two-dimensional copy moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StridedCopy {
    /// First byte in the engine's memory.
    pub memory_offset: u64,
    /// Bytes from one row to the next there; not below the width.
    pub memory_pitch: u64,
    /// First byte in the pool.
    pub pool_offset: u64,
    /// Bytes from one row to the next there; not below the width.
    pub pool_pitch: u64,
    /// Bytes of one row.
    pub width: u32,
    /// Rows.
    pub rows: u32,
}

impl StridedCopy {
    /// One row.
    #[must_use]
    pub const fn row(memory_offset: u64, pool_offset: u64, width: u32) -> Self {
        let pitch = width as u64;
        let (memory_pitch, pool_pitch) = (pitch, pitch);
        Self { memory_offset, memory_pitch, pool_offset, pool_pitch, width, rows: 1 }
    }

    /// The same bytes in one row, where the rows lie side by side at both ends.
    fn flat(self) -> Self {
        let width = u64::from(self.width);
        let close = self.memory_pitch == width && self.pool_pitch == width;
        match self.width.checked_mul(self.rows) {
            Some(all) if close || self.rows == 1 => {
                Self::row(self.memory_offset, self.pool_offset, all)
            }
            _ => self,
        }
    }

    /// Both in one copy, where `next` goes on as `self` ends.
    #[must_use]
    pub fn join(self, next: Self) -> Option<Self> {
        let (one, next) = (self.flat(), next.flat());
        let memory_step = next.memory_offset.checked_sub(one.memory_offset)?;
        let pool_step = next.pool_offset.checked_sub(one.pool_offset)?;
        let width = u64::from(one.width);
        if one.rows == 1 && next.rows == 1 && memory_step == width && pool_step == width {
            let both = one.width.checked_add(next.width)?;
            return Some(Self::row(one.memory_offset, one.pool_offset, both));
        }
        let rows = u64::from(one.rows);
        let (memory_pitch, pool_pitch) = match one.rows {
            1 => (memory_step, pool_step),
            _ => (one.memory_pitch, one.pool_pitch),
        };
        let goes_on = next.width == one.width
            && memory_pitch.min(pool_pitch) >= width
            && memory_pitch.checked_mul(rows) == Some(memory_step)
            && pool_pitch.checked_mul(rows) == Some(pool_step)
            && (next.rows == 1
                || (next.memory_pitch, next.pool_pitch) == (memory_pitch, pool_pitch));
        let rows = one.rows.checked_add(next.rows).filter(|_| goes_on)?;
        Some(Self { memory_pitch, pool_pitch, rows, ..one })
    }

    /// Joins neighbours of a list until none can be joined: the same bytes, in no more copies.
    pub fn join_all(copies: &mut Vec<Self>) {
        loop {
            let before = copies.len();
            // The later one of a pair is let go of, so the earlier one takes both.
            copies.dedup_by(|next, one| match one.join(*next) {
                Some(both) => {
                    *one = both;
                    true
                }
                None => false,
            });
            if copies.len() == before {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Where each byte of the pool comes from.
    fn bytes(copies: &[StridedCopy]) -> BTreeMap<u64, u64> {
        let row = |copy: &StridedCopy, row: u64| {
            let memory = copy.memory_offset + row * copy.memory_pitch;
            let pool = copy.pool_offset + row * copy.pool_pitch;
            (0..u64::from(copy.width)).map(move |byte| (pool + byte, memory + byte))
        };
        let rows = |copy: &StridedCopy| {
            let copy = *copy;
            (0..u64::from(copy.rows)).flat_map(move |at| row(&copy, at))
        };
        copies.iter().flat_map(rows).collect()
    }

    fn joined(mut copies: Vec<StridedCopy>) -> Vec<StridedCopy> {
        StridedCopy::join_all(&mut copies);
        copies
    }

    #[test]
    fn neighbours_are_one_row() {
        let rows = (0..64).map(|at| StridedCopy::row(4096 + at * 16, at * 16, 16)).collect();
        assert_eq!(joined(rows), [StridedCopy::row(4096, 0, 1024)]);
    }

    #[test]
    fn rows_at_equal_distances_are_one_copy() {
        // Keys and values side by side, layers far apart: a row of both for each layer.
        let halves = (0..6).map(|at| StridedCopy::row(at / 2 * 1000 + at % 2 * 16, at * 16, 16));
        let layers = StridedCopy {
            memory_pitch: 1000,
            pool_pitch: 32,
            rows: 3,
            ..StridedCopy::row(0, 0, 32)
        };
        assert_eq!(joined(halves.collect()), [layers]);
        // And the next three.
        let next = StridedCopy { memory_offset: 3000, pool_offset: 96, ..layers };
        assert_eq!(joined(vec![layers, next]), [StridedCopy { rows: 6, ..layers }]);
    }

    #[test]
    fn what_does_not_go_on_stays_apart() {
        let row = StridedCopy::row(1000, 1000, 16);
        let rows = StridedCopy { memory_pitch: 100, pool_pitch: 50, rows: 2, ..row };
        let moved = |memory, pool| StridedCopy { memory_offset: memory, pool_offset: pool, ..row };
        for (one, next) in [
            // The same block again, one before it, one that would share bytes of a row.
            (row, row),
            (row, moved(900, 1100)),
            (row, moved(1100, 900)),
            (row, moved(1008, 1100)),
            // Not at the distance of the rows before it, at either end.
            (rows, moved(1201, 1100)),
            (rows, moved(1200, 1101)),
            (rows, StridedCopy { width: 8, ..moved(1200, 1100) }),
            (rows, StridedCopy { memory_pitch: 101, rows: 2, ..moved(1200, 1100) }),
            // Longer than a row can be.
            (
                StridedCopy::row(0, 0, u32::MAX),
                StridedCopy::row(u32::MAX.into(), u32::MAX.into(), 1),
            ),
        ] {
            let (one, next) = match one.rows {
                1 => (one, next),
                _ => (one, StridedCopy { pool_pitch: one.pool_pitch, ..next }),
            };
            assert_eq!(one.join(next), None, "{one:?} {next:?}");
        }
    }

    fn copies() -> impl Strategy<Value = Vec<StridedCopy>> {
        let steps = prop::collection::vec((0..4_u64, 0..3_u64, 1..3_u32), 1..40);
        steps.prop_map(|steps| {
            let (mut memory, mut pool) = (0, 0);
            let one = |(memory_gap, pool_gap, units): (u64, u64, u32)| {
                let width = units * 2;
                let copy = StridedCopy::row(memory, pool, width);
                memory += u64::from(width) + memory_gap * 2;
                pool += u64::from(width) + pool_gap * 2;
                copy
            };
            steps.into_iter().map(one).collect()
        })
    }

    proptest! {
        #[test]
        fn the_same_bytes_come_from_the_same_places(copies in copies()) {
            let (before, count) = (bytes(&copies), copies.len());
            let after = joined(copies);
            prop_assert!(after.len() <= count);
            let sound = |it: &StridedCopy| {
                it.memory_pitch.min(it.pool_pitch) >= it.width.into() && it.rows > 0
            };
            prop_assert!(after.iter().all(sound), "{:?}", after);
            prop_assert_eq!(bytes(&after), before);
        }
    }
}
