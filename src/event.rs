//! What happened, as the cores say it. Metrics and logs are made from events, never inside logic.

use std::fmt::Debug;
use std::time::Duration;

use crate::types::{EvictionRank, PolicyKind, RequesterIndex, ResidentCause, Scope};

/// How a lease ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LeaseEnd {
    /// The requester completed it.
    Completed,
    /// The requester gave it back unread.
    Aborted,
    /// Its deadline passed; the requester was cut off first.
    Expired,
    /// The requester's next start replaced it.
    Superseded,
}

impl LeaseEnd {
    /// All ends.
    pub const ALL: [Self; 4] = [Self::Completed, Self::Aborted, Self::Expired, Self::Superseded];

    /// The name that metrics use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Aborted => "aborted",
            Self::Expired => "expired",
            Self::Superseded => "superseded",
        }
    }
}

/// Why a lend, or a part of one, was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LendRefusal {
    /// The requester holds as many leases or bytes as its quota allows.
    Quota,
    /// The block's pin count is at its limit.
    Pins,
    /// No window is free to give the lease keys of its own.
    Windows,
    /// The node is shutting down: ask another owner.
    Draining,
    /// Leases keep as much of this node's memory as it lets them.
    Pressure,
    /// The node has as many leases out as it can keep.
    Leases,
    /// Blocks in GPU memory found no staging memory in time.
    Staging,
}

impl LendRefusal {
    /// All refusals.
    pub const ALL: [Self; 7] = [
        Self::Quota,
        Self::Pins,
        Self::Windows,
        Self::Draining,
        Self::Pressure,
        Self::Leases,
        Self::Staging,
    ];

    /// The name that metrics use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Quota => "quota",
            Self::Pins => "pins",
            Self::Windows => "windows",
            Self::Draining => "draining",
            Self::Pressure => "pressure",
            Self::Leases => "leases",
            Self::Staging => "staging",
        }
    }
}

/// What became of an attempt to make a connection that goes over more NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Widening {
    /// It goes over more than the one that it replaced.
    Wider,
    /// It would have gone over no more.
    InVain,
    /// It did not come up, or the requests under way on the old one did not end in time.
    Failed,
}

impl Widening {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Wider, Self::InVain, Self::Failed];

    /// The name that metrics use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Wider => "wider",
            Self::InVain => "in_vain",
            Self::Failed => "failed",
        }
    }
}

/// Why something has to wait: what every `Busy` at the local door says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BusyReason {
    /// This node's pools have no room, and nothing in them can be evicted now.
    Memory,
    /// The block is pinned here as often as it can be.
    Pins,
    /// This client has as many requests waiting as it may have.
    Waits,
    /// Its owner does not lend the block now.
    Owner(LendRefusal),
}

impl BusyReason {
    /// All reasons.
    pub const ALL: [Self; 10] = [
        Self::Memory,
        Self::Pins,
        Self::Waits,
        Self::Owner(LendRefusal::Quota),
        Self::Owner(LendRefusal::Pins),
        Self::Owner(LendRefusal::Windows),
        Self::Owner(LendRefusal::Draining),
        Self::Owner(LendRefusal::Pressure),
        Self::Owner(LendRefusal::Leases),
        Self::Owner(LendRefusal::Staging),
    ];

    /// What is the matter, and what helps, as a part of a sentence.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Memory => {
                "its pools are full of blocks in use: release some, or start it with a larger pool"
            }
            Self::Pins => "the block is in use here as often as it can be: release it",
            Self::Waits => "this client has as many requests waiting as it may have",
            Self::Owner(LendRefusal::Quota) => {
                "the block's owner lends this node no more at once: raise its quota"
            }
            Self::Owner(LendRefusal::Pins) => {
                "the block is in use at its owner as often as it can be"
            }
            Self::Owner(LendRefusal::Windows) => "the block's owner has no key left for a lease",
            Self::Owner(LendRefusal::Draining) => "the block's owner is shutting down",
            Self::Owner(LendRefusal::Pressure) => {
                "the block's owner has lent as much of its memory as it lets go of"
            }
            Self::Owner(LendRefusal::Leases) => {
                "the block's owner has as many leases out as it can keep"
            }
            Self::Owner(LendRefusal::Staging) => {
                "the block's owner has no staging memory left for its GPU's: raise its --gpu-staging"
            }
        }
    }
}

/// A call to the owner registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RegistryCall {
    /// Blocks that this node now holds.
    Announce,
    /// Blocks that it no longer holds.
    Withdraw,
    /// Who holds these blocks.
    Plan,
    /// Still here.
    Heartbeat,
    /// An owner does not hold what it is listed for.
    Report,
}

impl RegistryCall {
    /// All calls.
    pub const ALL: [Self; 5] =
        [Self::Announce, Self::Withdraw, Self::Plan, Self::Heartbeat, Self::Report];

    /// The name that metrics use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Announce => "announce",
            Self::Withdraw => "withdraw",
            Self::Plan => "plan",
            Self::Heartbeat => "heartbeat",
            Self::Report => "report",
        }
    }
}

/// One thing that happened. Counts are of blocks unless a field says bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A resident was inserted with this rank.
    Inserted {
        /// Its first rank.
        rank: EvictionRank,
        /// Its payload.
        bytes: u64,
        /// Whether a peer sent it (else a local engine saved it).
        fetched: bool,
    },
    /// A resident was evicted from this rank.
    Evicted {
        /// The rank it had.
        rank: EvictionRank,
        /// Its payload.
        bytes: u64,
    },
    /// A resident was taken out for another reason than to make room.
    Removed {
        /// The rank it had.
        rank: EvictionRank,
        /// Its payload.
        bytes: u64,
    },
    /// A resident's rank changed.
    RankMoved {
        /// The rank before.
        from: EvictionRank,
        /// The rank now.
        to: EvictionRank,
    },
    /// A block that was about to be stored was here already.
    AlreadyResident {
        /// Why.
        cause: ResidentCause,
    },
    /// Blocks that a local reader asked for and this node held.
    LocalHits {
        /// How many.
        blocks: u64,
    },
    /// Blocks that a local reader asked for and this node did not hold.
    LocalMisses {
        /// How many.
        blocks: u64,
    },
    /// Blocks that a local engine loaded.
    BlocksLoaded {
        /// How many.
        blocks: u64,
        /// Whether peers' bytes landed in the engine's memory (else they were copied there).
        in_place: bool,
    },
    /// A block was fetched again soon after its eviction.
    RefetchedAfterEviction,
    /// A reservation found no memory and was answered `Busy`.
    PoolBusy {
        /// The bytes asked for.
        bytes: u64,
    },
    /// A lease was granted.
    LeaseGranted {
        /// To whom.
        requester: RequesterIndex,
        /// Blocks lent.
        blocks: u64,
        /// Their payload.
        bytes: u64,
    },
    /// A lease ended.
    LeaseEnded {
        /// Whose it was.
        requester: RequesterIndex,
        /// How.
        end: LeaseEnd,
        /// Blocks it had lent.
        blocks: u64,
        /// Their payload.
        bytes: u64,
    },
    /// Blocks were not lent although they are resident.
    LendRefused {
        /// Why.
        reason: LendRefusal,
        /// How many.
        blocks: u64,
    },
    /// A completion arrived again and was answered from memory.
    CompletionReplayed,
    /// A completion named a lease that this holder does not know, or another requester's.
    CompletionRefused,
    /// Blocks arrived from a peer, whole and verified.
    TransferSucceeded {
        /// How many.
        blocks: u64,
        /// Their payload.
        bytes: u64,
        /// From the lend request to the last byte.
        took: Duration,
    },
    /// Blocks did not arrive.
    TransferFailed {
        /// How many.
        blocks: u64,
        /// Whose fault.
        scope: Scope,
    },
    /// A block's bytes did not have the checksum that its holder gave.
    ChecksumMismatch,
    /// A completion of a work request that the in-flight table no longer knows was dropped.
    StaleCompletion,
    /// A breaker opened: what it stands for is left alone until a probe succeeds.
    BreakerOpened {
        /// A path, a peer, or this node's own NIC.
        scope: Scope,
    },
    /// A breaker closed again.
    BreakerClosed {
        /// As above.
        scope: Scope,
    },
    /// A probe of a peer ended.
    Probed {
        /// Whether the peer may be used again.
        good: bool,
    },
    /// A lend waits because its holder asked for a pause.
    PauseObeyed,
    /// Blocks that a reader wanted and another reader's fetch was already after.
    FetchesShared {
        /// How many.
        blocks: u64,
    },
    /// Blocks that an owner was listed for and does not hold.
    OwnerMissed {
        /// How many.
        blocks: u64,
    },
    /// A connection to a peer is up and authenticated.
    PeerConnected,
    /// A connection to a peer ended.
    PeerDisconnected {
        /// Whose fault.
        scope: Scope,
    },
    /// An attempt of this node to make a connection wider, beside the one that there is, ended.
    ConnectionWidened {
        /// What became of it.
        outcome: Widening,
    },
    /// A peer sent what the protocol does not allow; its connection was closed.
    ProtocolViolation,
    /// The data thread was late by more than a scheduler explains; its peers' deadlines have moved.
    DataThreadStalled {
        /// By how much.
        late: Duration,
    },
    /// A registry call was answered.
    RegistryAnswered {
        /// Which.
        call: RegistryCall,
    },
    /// A registry call failed or took too long.
    RegistryFailed {
        /// Which.
        call: RegistryCall,
    },
    /// The registry said how many nodes hold a block that this node announced.
    OwnersSeen {
        /// Live owners, this node among them.
        owners: u32,
    },
    /// The store started.
    StoreStarted {
        /// The policy that it runs.
        policy: PolicyKind,
    },
}

/// Where events go. Called on the data path: an implementation neither blocks nor allocates.
pub trait EventSink: Send + Sync + Debug {
    /// Takes note of `event`.
    fn emit(&self, event: Event);
}

/// A sink that drops everything, for tools and tests that ask for no metrics.
#[derive(Debug, Clone, Copy, Default)]
pub struct Discard;

impl EventSink for Discard {
    fn emit(&self, _event: Event) {}
}
