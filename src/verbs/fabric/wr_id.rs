//! The 64 bits by which a completion is matched: what it was, on which lane, and its number there.
//! Completions are matched by this alone, never by the opcode, which is meaningless in errors.

/// Bits of a number: a lane that posts a READ every nanosecond uses them up in three days, and then
/// only distances count.
const NUMBER_BITS: u32 = 48;

/// What a work request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// A READ of a lane, by its number.
    Read { lane: u8, number: u64 },
    /// The end of a lane's queue, posted after it was cut.
    Marker { lane: u8 },
    /// A message from a send slot.
    Send { slot: u8 },
    /// A message into a receive slot.
    Receive { slot: u8 },
    /// The READ of the peer's pattern to a send slot.
    Probe { slot: u8 },
    /// The pattern over a lane.
    LaneProbe { lane: u8 },
    /// The peer's pattern over a lane.
    LaneReceive { lane: u8 },
    /// The bind of a window.
    Bind { window: u16 },
    /// The invalidation of a window's key.
    Invalidate { window: u16 },
}

/// The part of a number that travels.
pub(super) const fn truncate(number: u64) -> u64 {
    number & ((1 << NUMBER_BITS) - 1)
}

impl Work {
    pub(super) fn encode(self) -> u64 {
        let (kind, lane, number) = match self {
            Self::Read { lane, number } => (1_u64, lane, truncate(number)),
            Self::Marker { lane } => (2, lane, 0),
            Self::Send { slot } => (3, slot, 0),
            Self::Receive { slot } => (4, slot, 0),
            Self::Probe { slot } => (5, slot, 0),
            Self::Bind { window } => (6, 0, window.into()),
            Self::Invalidate { window } => (7, 0, window.into()),
            Self::LaneProbe { lane } => (8, lane, 0),
            Self::LaneReceive { lane } => (9, lane, 0),
        };
        kind << 56 | u64::from(lane) << NUMBER_BITS | number
    }

    /// `None` for what no fabric posted.
    #[expect(clippy::cast_possible_truncation, reason = "takes the bits that `encode` put there")]
    pub(super) fn decode(id: u64) -> Option<Self> {
        let lane = (id >> NUMBER_BITS) as u8;
        match id >> 56 {
            1 => Some(Self::Read { lane, number: truncate(id) }),
            2 => Some(Self::Marker { lane }),
            3 => Some(Self::Send { slot: lane }),
            4 => Some(Self::Receive { slot: lane }),
            5 => Some(Self::Probe { slot: lane }),
            6 => Some(Self::Bind { window: id as u16 }),
            7 => Some(Self::Invalidate { window: id as u16 }),
            8 => Some(Self::LaneProbe { lane }),
            9 => Some(Self::LaneReceive { lane }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_survive_the_device() {
        for work in [
            Work::Read { lane: 0, number: 0 },
            Work::Read { lane: 255, number: (1 << 48) - 1 },
            Work::Marker { lane: 3 },
            Work::Send { slot: 7 },
            Work::Receive { slot: 255 },
            Work::Probe { slot: 2 },
            Work::Bind { window: 65_535 },
            Work::Invalidate { window: 300 },
            Work::LaneProbe { lane: 15 },
            Work::LaneReceive { lane: 1 },
        ] {
            assert_eq!(Work::decode(work.encode()), Some(work));
        }
        assert_eq!(Work::decode(0), None);
        assert_eq!(Work::decode(u64::MAX), None);
    }
}
