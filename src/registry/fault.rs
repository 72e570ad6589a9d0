//! Deliberate faults, one per rule that keeps owners true, to test the tests: each one has to be caught
//! (`tests::faults`). Outside of tests there are none, and nothing is left of the questions.

/// A rule that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A change of a key does not wait for the batch that carries the one before it.
    KeyInTwoBatches,
    /// A listing overrules changes that wait or are under way.
    ListingKnowsBetter,
    /// What was not answered is taken for told.
    UnansweredTold,
    /// A full set forgets its changes and says nothing of it.
    OverflowUnmarked,
    /// Nothing is announced again under a new registration.
    NotAnnouncedAgain,
    /// Digests are compared while batches are under way.
    DigestsAmidBatches,
    /// What the digests found is not mended.
    DriftLeft,
    /// A message of an earlier start of its node is taken.
    EpochUnchecked,
    /// A message of an earlier registration of one start is taken.
    RegistrationUnchecked,
    /// A message that its sender has given up is taken.
    LateTaken,
    /// A new registration does not void what the one before it announced.
    GenerationKept,
    /// A node's lease is renewed by the blocks that it announces, not by its heartbeats.
    LeaseByBlock,
    /// Forgetting a partition leaves its keys.
    ForgetNothing,
    /// Removing an owner removes the others of the key, too.
    RemovesOthers,
}

#[cfg(test)]
impl Fault {
    /// All of them.
    pub(super) const ALL: [Self; 14] = [
        Self::KeyInTwoBatches,
        Self::ListingKnowsBetter,
        Self::UnansweredTold,
        Self::OverflowUnmarked,
        Self::NotAnnouncedAgain,
        Self::DigestsAmidBatches,
        Self::DriftLeft,
        Self::EpochUnchecked,
        Self::RegistrationUnchecked,
        Self::LateTaken,
        Self::GenerationKept,
        Self::LeaseByBlock,
        Self::ForgetNothing,
        Self::RemovesOthers,
    ];
}

crate::sync::fault_switch!(Fault);
