//! The connections of one fabric, in slots with generations, and the tokens that name their sockets
//! and queues.

use super::connection::Connection;
use crate::fabric::ConnectionId;
use crate::limits::CONNECTIONS_MAX;
use crate::sys::connections::Connections;

/// What a watched descriptor is. A connection's token names its queues too; an old one finds nothing,
/// since its generation is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Listener,
    Wake,
    Watched,
    /// The completion channel of a NIC.
    Channel(u8),
    /// The asynchronous events of a NIC.
    Device(u8),
    Connection(ConnectionId),
}

const _: () = assert!(CONNECTIONS_MAX < u32::MAX as usize - 8, "high slots name other things");

impl Token {
    pub(super) fn encode(self) -> u64 {
        let (generation, slot) = match self {
            Self::Listener => (0, u32::MAX),
            Self::Wake => (0, u32::MAX - 1),
            Self::Channel(nic) => (nic.into(), u32::MAX - 2),
            Self::Device(nic) => (nic.into(), u32::MAX - 3),
            Self::Watched => (0, u32::MAX - 4),
            Self::Connection(id) => (id.generation, id.slot),
        };
        u64::from(generation) << 32 | u64::from(slot)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "each cast takes the bits that `encode` put there"
    )]
    pub(super) fn decode(token: u64) -> Self {
        let id = ConnectionId { slot: token as u32, generation: (token >> 32) as u32 };
        match u32::MAX - id.slot {
            0 => Self::Listener,
            1 => Self::Wake,
            2 => Self::Channel(id.generation as u8),
            3 => Self::Device(id.generation as u8),
            4 => Self::Watched,
            _ => Self::Connection(id),
        }
    }
}

/// The connections of a verbs fabric.
pub(super) type Table = Connections<Connection>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        let id = ConnectionId { slot: 1023, generation: u32::MAX };
        let others =
            [Token::Listener, Token::Wake, Token::Channel(7), Token::Device(7), Token::Watched];
        for token in others.into_iter().chain([Token::Connection(id)]) {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
