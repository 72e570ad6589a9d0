//! Which lanes a READ takes where its memory is nearer to some NICs than to others.
//!
//! Memory of a GPU is nearest to the NICs that share a PCIe switch with it; over another one its bytes
//! cross the processor, which may carry a fraction of them. Host memory is as near to all. The memories at
//! both ends have their say, ours first, and only as far as a connection has a lane that does as they say:
//! nearness never keeps a READ from being posted.

use crate::limits::NICS_MAX;

/// Some of an end's NICs, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NicSet(u8);

const _: () = assert!(NICS_MAX <= u8::BITS as usize, "each NIC has its bit");

impl NicSet {
    /// All of them.
    pub(super) const ALL: Self = Self(u8::MAX);

    /// Those for which this holds, in the order of their numbers.
    pub(super) fn of(near: impl IntoIterator<Item = bool>) -> Self {
        let bits = (0..u8::BITS).zip(near).filter(|(_, near)| *near);
        Self(bits.fold(0, |set, (nic, _)| set | 1 << nic))
    }

    /// Those that bits name, or all where they name none.
    pub(super) const fn from_far(far: u16) -> Self {
        // The bits of NICs that an end does not have say nothing.
        Self(!(far.to_le_bytes()[0]))
    }

    /// The bits of the others.
    pub(super) fn far(self) -> u16 {
        u16::from(!self.0)
    }

    /// Those that are in both; all of `self` where none is.
    pub(super) const fn and(self, other: Self) -> Self {
        let both = self.0 & other.0;
        if both == 0 { self } else { Self(both) }
    }

    const fn has(self, nic: u8) -> bool {
        nic < 8 && self.0 >> nic & 1 == 1
    }
}

/// The NICs at both ends that a READ is to take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wish {
    pub(super) ours: NicSet,
    pub(super) theirs: NicSet,
}

impl Wish {
    const NONE: Self = Self { ours: NicSet::ALL, theirs: NicSet::ALL };

    /// Whether a lane between these NICs, ours and theirs, is wished for.
    pub(super) const fn fits(self, (ours, theirs): (u8, u8)) -> bool {
        self.ours.has(ours) && self.theirs.has(theirs)
    }

    /// As much of the wish as one of these lanes fulfils.
    pub(super) fn within(self, lanes: impl Iterator<Item = (u8, u8)> + Clone) -> Self {
        if self == Self::NONE {
            return self;
        }
        let less = [self, Self { theirs: NicSet::ALL, ..self }, Self { ours: NicSet::ALL, ..self }];
        let possible = |wish: &Self| lanes.clone().any(|lane| wish.fits(lane));
        less.into_iter().find(possible).unwrap_or(Self::NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(nics: &[u8]) -> NicSet {
        NicSet::of((0..8).map(|nic| nics.contains(&nic)))
    }

    #[test]
    fn sets_travel_as_the_bits_of_those_that_are_far() {
        for nics in [&[0][..], &[1, 3], &[0, 1, 2, 3, 4, 5, 6, 7]] {
            assert_eq!(NicSet::from_far(set(nics).far()), set(nics), "{nics:?}");
        }
        assert_eq!(NicSet::from_far(0), NicSet::ALL);
        assert!(set(&[1]).has(1) && !set(&[1]).has(0) && !NicSet::ALL.has(8));
        assert_eq!(set(&[1, 2]).and(set(&[2, 3])), set(&[2]));
        assert_eq!(set(&[1]).and(set(&[2])), set(&[1]), "two memories that have no NIC in common");
    }

    #[test]
    fn a_wish_gives_way_to_the_lanes_that_there_are() {
        let lanes = [(0, 0), (1, 1), (2, 1)];
        let wish = |ours: &[u8], theirs: &[u8]| {
            Wish { ours: set(ours), theirs: set(theirs) }.within(lanes.into_iter())
        };
        let fit =
            |wish: Wish| lanes.into_iter().filter(|lane| wish.fits(*lane)).collect::<Vec<_>>();
        assert_eq!(fit(wish(&[1], &[1])), [(1, 1)]);
        assert_eq!(fit(wish(&[1, 2], &[1])), [(1, 1), (2, 1)]);
        assert_eq!(fit(wish(&[0], &[1])), [(0, 0)], "ours comes first");
        assert_eq!(fit(wish(&[5], &[1])), [(1, 1), (2, 1)]);
        assert_eq!(fit(wish(&[5], &[5])), lanes, "nothing that was wished for can be had");
        assert_eq!(Wish::NONE.within(lanes.into_iter()), Wish::NONE);
    }
}
