//! The words of kvrail: identities, keys, spans, ranks and time, as plain values.
//!
//! Nothing here does IO, allocates after construction, or depends on another module. A type exists
//! for each thing that must not be mistaken for another: an [`EvictionRank`] is no count, a
//! [`crate::fabric::RemoteSpan`] is no local address.

mod block;
mod fault;
mod node;
mod path;
mod rank;
mod time;

pub use block::{
    BlockHash, BlockKey, Extent, Generation, MemoryKind, Namespace, NamespaceId, PoolId,
    ResidentId, WordError,
};
pub use fault::Scope;
pub use node::{LeaseId, Load, NodeEpoch, NodeId, Reach, RequestId, RequesterId, RequesterIndex};
pub use path::{Nic, Path, Paths};
pub use rank::{EvictionRank, PolicyKind, ResidentCause};
pub use time::Timestamp;
