//! Deliberate faults, one per rule that the proofs lean on, to test the tests: each one has to be
//! caught (`fault_tests`). Outside of tests there are none, and nothing is left of the questions.

/// A rule that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A raise is not counted in the guard.
    RaiseUncounted,
    /// A claimed victim goes, whatever was raised meanwhile.
    GuardUnread,
    /// A claim says a new thing under an old ticket.
    TicketRepeated,
    /// An operation returns once its placement is announced, and leaves the rest to others.
    PlacementLeft,
    /// Each helper of a commit decides for itself whether it is the first one.
    CommitUndecided,
    /// The search for a victim passes by what is under way.
    PendingSkipped,
    /// A placement is finished at the entry where it was met.
    PlacedWhereMet,
    /// The end of a log is believed as it was before its entries were looked at.
    EndReadEarly,
    /// An id is not compared with the slot's tenancy.
    GenerationUnchecked,
    /// A slot enters a chain that has changed since it was walked.
    HeadUnchecked,
    /// Anybody takes a slot on that arrives, whether it is in its chain or not.
    ArrivalByAnybody,
    /// An entry that a touch has appended, and may yet name, is taken for garbage.
    TouchForgotten,
    /// A last unpin appends first and announces nothing.
    UnpinUnannounced,
    /// What a search found is believed, though its chunk is the first one no more.
    FoundUnchecked,
    /// A chunk that somebody froze, and did not come to replace, is left as it is.
    FrozenLeft,
    /// The sweep asks whose its hand's chunk is before it reads the link there.
    TagReadEarly,
    /// A chunk has the tag of its new use while it still has the link of the one before.
    TagGivenEarly,
    /// An operation that changes nothing does not look whether its resident is still there.
    UnchangedUnseen,
    /// What was found to be garbage of one chunk is passed by in another.
    SkipForeign,
    /// A removal overwrites the word that it found, whatever that is by now.
    RemovalUnexchanged,
    /// Who made a log longer sweeps within the append alone, while its own slot is undecided.
    PaidEarly,
}

crate::sync::fault_switch!(Fault);
