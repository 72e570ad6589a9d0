//! The connections of one fabric, in slots with generations, and the tokens that name their sockets.

use super::connection::Connection;
use crate::fabric::ConnectionId;
use crate::limits::{CONNECTIONS_MAX, STREAMS_MAX};
use crate::sys::connections::Connections;

/// Lane of a token: a connection's control stream; data streams follow it.
const LANE_CONTROL: u16 = 0;
/// Lane of a token: an accepted socket without a connection.
const LANE_ARRIVAL: u16 = u16::MAX - 1;
/// Lane of a token: the listening socket.
const LANE_LISTENER: u16 = u16::MAX - 2;
/// Lane of a token: a descriptor that is watched for somebody else.
const LANE_WATCHED: u16 = u16::MAX - 3;

const _: () = {
    assert!(CONNECTIONS_MAX <= u16::MAX as usize, "slots travel as u16");
    assert!(STREAMS_MAX < LANE_WATCHED as usize);
};

/// What a watched socket is. An old token finds nothing, since its generation is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Listener,
    Watched,
    Arrival(u32),
    Control(ConnectionId),
    Data(ConnectionId, usize),
}

impl Token {
    pub(super) fn control(id: ConnectionId) -> Self {
        Self::Control(id)
    }

    pub(super) fn data(id: ConnectionId, stream: usize) -> Self {
        Self::Data(id, stream)
    }

    pub(super) fn encode(self) -> u64 {
        let (high, slot, lane) = match self {
            Self::Listener => (0, 0, LANE_LISTENER),
            Self::Watched => (0, 0, LANE_WATCHED),
            Self::Arrival(number) => (number, 0, LANE_ARRIVAL),
            Self::Control(id) => (id.generation, id.slot, LANE_CONTROL),
            Self::Data(id, stream) => {
                let lane = u16::try_from(stream + 1).unwrap_or(LANE_WATCHED - 1);
                (id.generation, id.slot, lane)
            }
        };
        u64::from(high) << 32 | u64::from(slot) << 16 | u64::from(lane)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "each cast takes the bits that `encode` put there"
    )]
    pub(super) fn decode(token: u64) -> Self {
        let (high, slot, lane) = ((token >> 32) as u32, (token >> 16) as u16, token as u16);
        let id = ConnectionId { slot: u32::from(slot), generation: high };
        match lane {
            LANE_LISTENER => Self::Listener,
            LANE_WATCHED => Self::Watched,
            LANE_ARRIVAL => Self::Arrival(high),
            LANE_CONTROL => Self::Control(id),
            lane => Self::Data(id, usize::from(lane) - 1),
        }
    }
}

/// The connections of a TCP fabric.
pub(super) type Table = Connections<Connection>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        let id = ConnectionId { slot: 1023, generation: u32::MAX };
        for token in [
            Token::Listener,
            Token::Watched,
            Token::Arrival(7),
            Token::Control(id),
            Token::Data(id, 0),
            Token::Data(id, STREAMS_MAX - 1),
        ] {
            assert_eq!(Token::decode(token.encode()), token);
            assert_ne!(token.encode(), u64::MAX, "that one is the waker's");
        }
    }
}
