//! The connections of one fabric, in slots with generations, and the tokens that name their sockets.

use super::connection::Connection;
use crate::fabric::{ConnectionId, FabricError};
use crate::limits::{CONNECTIONS_MAX, STREAMS_MAX};

/// Lane of a token: a connection's control stream; data streams follow it.
const LANE_CONTROL: u16 = 0;
/// Lane of a token: an accepted socket without a connection.
const LANE_ARRIVAL: u16 = u16::MAX - 1;
/// Lane of a token: the listening socket.
const LANE_LISTENER: u16 = u16::MAX - 2;

const _: () = {
    assert!(CONNECTIONS_MAX <= u16::MAX as usize, "slots travel as u16");
    assert!(STREAMS_MAX < LANE_LISTENER as usize);
};

/// What a watched socket is. An old token finds nothing, since its generation is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Listener,
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
            Self::Arrival(number) => (number, 0, LANE_ARRIVAL),
            Self::Control(id) => (id.generation, id.slot, LANE_CONTROL),
            Self::Data(id, stream) => {
                let lane = u16::try_from(stream + 1).unwrap_or(LANE_LISTENER - 1);
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
            LANE_ARRIVAL => Self::Arrival(high),
            LANE_CONTROL => Self::Control(id),
            lane => Self::Data(id, usize::from(lane) - 1),
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

/// The table, of at most [`CONNECTIONS_MAX`] slots.
#[derive(Debug, Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

impl Table {
    /// An id for one more connection, which [`Table::put`] then stores.
    pub(super) fn reserve(&mut self) -> Result<ConnectionId, FabricError> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < CONNECTIONS_MAX => {
                self.slots.push(Slot::default());
                u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
            }
            None => {
                return Err(FabricError::Limit { what: "connections", limit: CONNECTIONS_MAX });
            }
        };
        let generation = self.slots.get(slot as usize).map_or(0, |slot| slot.generation);
        Ok(ConnectionId { slot, generation })
    }

    /// Gives back an id that no connection got.
    pub(super) fn release(&mut self, id: ConnectionId) {
        if let Some(slot) = self.slots.get_mut(id.slot as usize) {
            slot.generation = slot.generation.wrapping_add(1);
            slot.connection = None;
            self.free.push(id.slot);
        }
    }

    pub(super) fn put(&mut self, id: ConnectionId, connection: Connection) {
        if let Some(slot) = self.slots.get_mut(id.slot as usize) {
            slot.connection = Some(connection);
        }
    }

    /// The connection of this id, unless it is broken or gone.
    pub(super) fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        let connection = slot.connection.as_mut()?;
        (slot.generation == id.generation && !connection.is_broken()).then_some(connection)
    }

    /// Takes a connection out and ends the meaning of its id.
    pub(super) fn take(&mut self, id: ConnectionId) -> Option<Connection> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        let connection = slot.connection.take();
        self.release(id);
        connection
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// All connections that are not broken.
    pub(super) fn iter(&mut self) -> impl Iterator<Item = (ConnectionId, &mut Connection)> {
        self.slots.iter_mut().enumerate().filter_map(|(slot, entry)| {
            let id = ConnectionId { slot: u32::try_from(slot).ok()?, generation: entry.generation };
            let connection = entry.connection.as_mut()?;
            (!connection.is_broken()).then_some((id, connection))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        let id = ConnectionId { slot: 1023, generation: u32::MAX };
        for token in [
            Token::Listener,
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
