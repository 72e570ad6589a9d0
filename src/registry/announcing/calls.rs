//! The calls that an announcing node makes, and what comes back.

use crate::registry::{
    Announced, Batch, Beat, Heartbeat, Load, NodeIdentity, OwnerRegistry, Partition,
    PartitionDigest, Presence, RegistryError, Stamp, Withdrawn,
};
use crate::types::BlockKey;

/// A call to make.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// See [`OwnerRegistry::heartbeat`].
    Heartbeat {
        /// What it is for.
        presence: Presence,
        /// How busy the node is.
        load: Load,
        /// What it holds.
        digests: Vec<PartitionDigest>,
    },
    /// See [`OwnerRegistry::announce`].
    Announce {
        /// Its place.
        stamp: Stamp,
        /// What the node holds.
        keys: Vec<BlockKey>,
    },
    /// See [`OwnerRegistry::withdraw`].
    Withdraw {
        /// Its place.
        stamp: Stamp,
        /// What the node holds no longer.
        keys: Vec<BlockKey>,
    },
    /// See [`OwnerRegistry::forget`].
    Forget {
        /// Its place.
        stamp: Stamp,
        /// What is void.
        partition: Partition,
    },
}

/// How a [`Call`] ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Of a heartbeat.
    Heartbeat(Result<Beat, RegistryError>),
    /// Of an announce.
    Announce {
        /// Its place.
        stamp: Stamp,
        /// What it was about.
        keys: Vec<BlockKey>,
        /// The owner counts.
        result: Result<Announced, RegistryError>,
    },
    /// Of a withdraw.
    Withdraw {
        /// Its place.
        stamp: Stamp,
        /// What has a sole owner now.
        result: Result<Withdrawn, RegistryError>,
    },
    /// Of a forget.
    Forget {
        /// Its place.
        stamp: Stamp,
        /// Whether it is done.
        result: Result<(), RegistryError>,
    },
}

impl Call {
    /// Makes the call.
    pub async fn make(self, registry: &dyn OwnerRegistry, node: &NodeIdentity) -> Answer {
        match self {
            Self::Heartbeat { presence, load, digests } => {
                let heartbeat = Heartbeat { presence, load, digests: &digests };
                Answer::Heartbeat(registry.heartbeat(node, heartbeat).await)
            }
            Self::Announce { stamp, keys } => {
                let result = registry.announce(Batch { stamp, keys: &keys }).await;
                Answer::Announce { stamp, keys, result }
            }
            Self::Withdraw { stamp, keys } => {
                let result = registry.withdraw(Batch { stamp, keys: &keys }).await;
                Answer::Withdraw { stamp, result }
            }
            Self::Forget { stamp, partition } => {
                Answer::Forget { stamp, result: registry.forget(stamp, partition).await }
            }
        }
    }

    /// How the call ends where no answer comes. It may have taken effect.
    #[must_use]
    pub fn fail(self, error: RegistryError) -> Answer {
        match self {
            Self::Heartbeat { .. } => Answer::Heartbeat(Err(error)),
            Self::Announce { stamp, keys } => Answer::Announce { stamp, keys, result: Err(error) },
            Self::Withdraw { stamp, .. } => Answer::Withdraw { stamp, result: Err(error) },
            Self::Forget { stamp, .. } => Answer::Forget { stamp, result: Err(error) },
        }
    }
}

impl Answer {
    /// What went wrong, if anything did.
    #[must_use]
    pub const fn error(&self) -> Option<&RegistryError> {
        match self {
            Self::Heartbeat(Err(error))
            | Self::Announce { result: Err(error), .. }
            | Self::Withdraw { result: Err(error), .. }
            | Self::Forget { result: Err(error), .. } => Some(error),
            _ => None,
        }
    }
}
