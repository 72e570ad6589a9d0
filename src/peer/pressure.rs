//! When a holder asks its readers to hold back, and when it lends no more.

use super::Peers;
use super::landing::Landing;
use crate::lease::Usage;
use crate::types::{Load, MemoryKind};

/// How long a requester holds back while leases keep more than the low mark, and more than the high
/// one, milliseconds.
const PAUSE_ABOVE_LOW_MS: u32 = 10;
const PAUSE_ABOVE_HIGH_MS: u32 = 50;

/// Marks of what is under leases. A block counts once for each lease that lends it. What lies in the
/// node's own memory has marks of its own, because leases keep it from eviction: however much engines
/// open, the node has the rest of its pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pressure {
    /// Nothing is lent that would bring the bytes under leases above this.
    pub high_bytes: u64,
    /// Above so many bytes under leases, requesters are asked to hold back.
    pub low_bytes: u64,
    /// As `high_bytes`, for bytes in the node's own memory.
    pub high_own_bytes: u64,
    /// As `low_bytes`, for bytes in the node's own memory.
    pub low_own_bytes: u64,
    /// The same for the number of leases; there the lease table's own limit is the high mark.
    pub low_leases: u64,
}

impl Default for Pressure {
    /// No mark.
    fn default() -> Self {
        let none = u64::MAX;
        Self {
            high_bytes: none,
            low_bytes: none,
            high_own_bytes: none,
            low_own_bytes: none,
            low_leases: none,
        }
    }
}

impl Pressure {
    /// Marks at these percentages of a node's memory, its own and what engines have opened, and of its
    /// leases.
    #[must_use]
    pub fn new((own, opened): (u64, u64), leases: u64, (high, low): (u8, u8)) -> Self {
        let share = |of: u64, percent: u8| of / 100 * u64::from(percent);
        let bytes = own.saturating_add(opened);
        Self {
            high_bytes: share(bytes, high),
            low_bytes: share(bytes, low),
            high_own_bytes: share(own, high),
            low_own_bytes: share(own, low),
            low_leases: (leases * u64::from(low)).div_ceil(100),
        }
    }

    /// What is said with each reply; `memory_pause_ms` is what the pools ask for.
    pub(super) fn load(&self, lent: Usage, memory_pause_ms: u32) -> Load {
        let above = |all, own| lent.bytes > all || lent.own_bytes > own;
        let pause_ms = if above(self.high_bytes, self.high_own_bytes) {
            PAUSE_ABOVE_HIGH_MS
        } else if above(self.low_bytes, self.low_own_bytes) || lent.leases > self.low_leases {
            PAUSE_ABOVE_LOW_MS
        } else {
            0
        };
        Load { outstanding_bytes: lent.bytes, pause_ms: pause_ms.max(memory_pause_ms) }
    }

    /// What may be lent beside what is.
    pub(super) fn room(&self, lent: Usage) -> Room {
        Room {
            all: self.high_bytes.saturating_sub(lent.bytes),
            own: self.high_own_bytes.saturating_sub(lent.own_bytes),
        }
    }
}

/// Bytes that may be lent before a mark is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    all: u64,
    /// Of these, in the node's own memory.
    own: u64,
}

impl Room {
    /// For a block that lies in such memory.
    pub(super) fn of(self, kind: MemoryKind) -> u64 {
        match kind {
            MemoryKind::Engine => self.all,
            MemoryKind::Host | MemoryKind::Device => self.all.min(self.own),
        }
    }

    /// A block is lent.
    pub(super) fn take(&mut self, bytes: u64, kind: MemoryKind) {
        self.all = self.all.saturating_sub(bytes);
        if kind != MemoryKind::Engine {
            self.own = self.own.saturating_sub(bytes);
        }
    }
}

impl<L: Landing> Peers<L> {
    /// Moves the marks, for a node whose memory has become more or less, and says how many bytes each
    /// requester may have under leases beside its quota, of blocks in engines' memory.
    pub fn set_memory(&mut self, pressure: Pressure, in_place_quota: u64) {
        self.holder.pressure = pressure;
        self.holder.leases.set_in_place_quota(in_place_quota);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_hold_back_above_the_low_mark_and_get_nothing_above_the_high_one() {
        let pressure = Pressure::new((1000, 0), 20, (90, 75));
        let lent = |bytes, leases| Usage { bytes, leases, own_bytes: bytes, blocks: 0 };
        assert_eq!(pressure.load(lent(750, 15), 0).pause_ms, 0);
        assert_eq!(pressure.load(lent(751, 1), 0).pause_ms, PAUSE_ABOVE_LOW_MS);
        assert_eq!(pressure.load(lent(1, 16), 0).pause_ms, PAUSE_ABOVE_LOW_MS);
        assert_eq!(pressure.load(lent(901, 1), 0).pause_ms, PAUSE_ABOVE_HIGH_MS);
        assert_eq!(pressure.load(lent(901, 1), 70).pause_ms, 70, "the pools ask for more");
        assert_eq!(pressure.load(lent(5, 1), 0).outstanding_bytes, 5);
        let room = |pressure: Pressure, lent| pressure.room(lent).of(MemoryKind::Host);
        assert_eq!(room(pressure, lent(850, 1)), 50);
        assert_eq!(room(pressure, lent(950, 1)), 0);
        assert_eq!(room(Pressure::default(), lent(1 << 50, 1)), u64::MAX - (1 << 50));
    }

    #[test]
    fn what_engines_open_is_lent_and_leaves_the_nodes_own_memory_its_marks() {
        let pressure = Pressure::new((1000, 9000), 20, (90, 75));
        let lent = |bytes, own_bytes| Usage { bytes, own_bytes, leases: 1, blocks: 0 };
        assert_eq!(pressure.load(lent(7500, 750), 0).pause_ms, 0);
        assert_eq!(pressure.load(lent(751, 751), 0).pause_ms, PAUSE_ABOVE_LOW_MS);
        assert_eq!(pressure.load(lent(901, 901), 0).pause_ms, PAUSE_ABOVE_HIGH_MS);
        assert_eq!(pressure.load(lent(9001, 0), 0).pause_ms, PAUSE_ABOVE_HIGH_MS);
        let mut room = pressure.room(lent(8000, 800));
        let of = |room: Room| MemoryKind::ALL.map(|kind| room.of(kind));
        assert_eq!(of(room), [100, 100, 1000]);
        room.take(950, MemoryKind::Engine);
        assert_eq!(of(room), [50, 50, 50]);
        room.take(30, MemoryKind::Device);
        assert_eq!(of(room), [20, 20, 20]);
        let mut room = pressure.room(lent(0, 0));
        room.take(900, MemoryKind::Host);
        assert_eq!(of(room), [0, 0, 8100]);
    }
}
