//! Who is who: nodes, their starts, readers, and the numbers that requests and leases go by.

use std::fmt;
use std::str::FromStr;

use arrayvec::ArrayString;

use super::block::{WordError, checked_name, excerpt, hex_bytes, name};
use crate::limits;

/// One `kvrail serve`, for as long as its operator keeps its identity: 16 random bytes unless set.
/// Where two nodes connect to each other at once, the lower one's connection stays.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub [u8; 16]);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({self})")
    }
}

impl FromStr for NodeId {
    type Err = WordError;

    fn from_str(text: &str) -> Result<Self, WordError> {
        hex_bytes(text)
            .and_then(|bytes| <[u8; 16]>::try_from(bytes).ok())
            .map(Self)
            .ok_or_else(|| WordError::Node { got: excerpt(text) })
    }
}

/// One start of a node: microseconds of wall-clock time when it began, so that a later start of the
/// same node is the greater one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct NodeEpoch(pub u64);

/// The stable identity of a reading node, 1 to 64 bytes: what accounting, quotas and the
/// de-duplication of rank steps go by. Its default is the node's advertised address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequesterId(ArrayString<{ limits::NAME_BYTES_MAX }>);

impl RequesterId {
    /// The identity that a message names; `None` where it breaks the rule for names.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        checked_name(text).map(Self)
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl FromStr for RequesterId {
    type Err = WordError;

    fn from_str(text: &str) -> Result<Self, WordError> {
        name(text).map(Self)
    }
}

impl fmt::Display for RequesterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A [`RequesterId`] as one holder numbers it, from 0, in the order of first contact. A number is
/// never given to another requester while the holder runs, so it may stand for the identity in the
/// residents' requester sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequesterIndex(pub u16);

/// How busy a holder is. It says so in each reply to a peer and to the registry, so that readers choose
/// the least busy owner and hold back where they must.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Load {
    /// Bytes that it has lent and not got back.
    pub outstanding_bytes: u64,
    /// How long askers should spare it, milliseconds; 0 where it is not under pressure.
    pub pause_ms: u32,
}

/// What lies between two nodes; the order is that of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Reach {
    /// Memory: both are on one host and read each other's pools in place.
    SameHost,
    /// A network on which NICs that belong together talk to each other.
    SameRail,
    /// A network, or nothing is known.
    #[default]
    Far,
}

/// A lend request, numbered by its requester; unique within one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A lease, numbered by its holder; never reused within the holder's epoch. 0 is no lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

impl LeaseId {
    /// The answer to a request of which no block was ready.
    pub const NONE: Self = Self(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_id_survives_its_text_form() {
        let id = NodeId(*b"0123456789abcdef");
        assert_eq!(id.to_string().parse::<NodeId>().unwrap(), id);
        assert!("12".parse::<NodeId>().is_err());
    }
}
