//! The owners of one key: a handful, nearly always, and then without an allocation of their own.

use crate::limits;

/// A node's slot in the table and the generation of its registration, in one word that is never 0.
/// A registration that ended never has its word again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(super) struct OwnerRef(u32);

const SLOT_BITS: u32 = 12;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

impl OwnerRef {
    /// The registration before a slot's first one; it names nobody.
    pub(super) const fn start(slot: u32) -> Self {
        Self(slot & SLOT_MASK)
    }

    /// The next registration in the same slot; `None` once its generations are used up.
    pub(super) fn next(self) -> Option<Self> {
        self.0.checked_add(1 << SLOT_BITS).map(Self)
    }

    /// The slot.
    pub(super) const fn slot(self) -> usize {
        (self.0 & SLOT_MASK) as usize
    }

    /// The word, as the number of the registration.
    pub(super) const fn get(self) -> u32 {
        self.0
    }
}

const INLINE: usize = 4;

/// A set of owners, in no order that means anything.
#[derive(Debug)]
pub(super) enum Owners {
    /// Up to four, in place.
    Few(arrayvec::ArrayVec<OwnerRef, INLINE>),
    /// More: a hot block.
    Many(Box<[OwnerRef]>),
}

impl Default for Owners {
    fn default() -> Self {
        Self::Few(arrayvec::ArrayVec::new())
    }
}

impl Owners {
    pub(super) fn as_slice(&self) -> &[OwnerRef] {
        match self {
            Self::Few(few) => few,
            Self::Many(many) => many,
        }
    }

    /// Adds `owner`, and removes those that `is_live` denies; whether it was not there before.
    pub(super) fn insert(&mut self, owner: OwnerRef, is_live: impl Fn(OwnerRef) -> bool) -> bool {
        let known = self.as_slice();
        let is_new = !known.contains(&owner);
        if !is_new && known.iter().all(|other| is_live(*other)) {
            return false;
        }
        self.retain(|other| other != owner && is_live(other));
        match self {
            Self::Few(few) => {
                if few.try_push(owner).is_err() {
                    let more = few.iter().copied().chain([owner]).collect();
                    *self = Self::Many(more);
                }
            }
            Self::Many(many) => {
                *many = many.iter().copied().chain([owner]).collect();
            }
        }
        is_new
    }

    /// Removes the owners that `keep` denies.
    pub(super) fn retain(&mut self, keep: impl Fn(OwnerRef) -> bool) {
        match self {
            Self::Few(few) => few.retain(|owner| keep(*owner)),
            Self::Many(many) => {
                if many.iter().all(|owner| keep(*owner)) {
                    return;
                }
                let kept: Vec<_> = many.iter().copied().filter(|owner| keep(*owner)).collect();
                let few = arrayvec::ArrayVec::try_from(kept.as_slice()).ok();
                *self = few.map_or_else(|| Self::Many(kept.into_boxed_slice()), Self::Few);
            }
        }
    }

    /// Bytes that it holds outside itself.
    pub(super) fn spilled_bytes(&self) -> usize {
        match self {
            Self::Few(_) => 0,
            Self::Many(many) => size_of_val::<[OwnerRef]>(many),
        }
    }
}

const _: () = {
    assert!(limits::REGISTRY_NODES_MAX <= 1 << SLOT_BITS);
    assert!(size_of::<Owners>() <= 24, "an entry stays within 40 bytes");
};

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(slot: u32) -> OwnerRef {
        OwnerRef::start(slot).next().unwrap()
    }

    #[test]
    fn a_set_spills_and_returns() {
        let mut owners = Owners::default();
        for slot in 0..6 {
            owners.insert(owner(slot), |_| true);
            owners.insert(owner(slot), |_| true);
        }
        assert_eq!(owners.as_slice().len(), 6);
        assert!(owners.spilled_bytes() > 0);
        owners.insert(owner(1), |other| other.slot() % 2 == 0);
        assert_eq!(owners.as_slice().len(), 4);
        assert_eq!(owners.spilled_bytes(), 0);
    }

    #[test]
    fn a_slot_keeps_its_number_and_runs_out_of_generations() {
        let first = owner(4095);
        assert_eq!(first.slot(), 4095);
        assert_eq!(first.next().unwrap().slot(), 4095);
        assert_ne!(first.next(), Some(first));
        assert_eq!(OwnerRef(u32::MAX).next(), None);
    }
}
