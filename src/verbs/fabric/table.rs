//! The connections of one fabric, in slots with generations, and the tokens that name their sockets
//! and queues.

use super::connection::Connection;
use crate::fabric::{ConnectionId, FabricError};
use crate::limits::CONNECTIONS_MAX;

/// What a watched descriptor is. A connection's token names its queues too; an old one finds nothing,
/// since its generation is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Listener,
    Wake,
    Channel,
    Device,
    Connection(ConnectionId),
}

const _: () = assert!(CONNECTIONS_MAX < u32::MAX as usize - 8, "high slots name other things");

impl Token {
    pub(super) fn encode(self) -> u64 {
        let (generation, slot) = match self {
            Self::Listener => (0, u32::MAX),
            Self::Wake => (0, u32::MAX - 1),
            Self::Channel => (0, u32::MAX - 2),
            Self::Device => (0, u32::MAX - 3),
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
            2 => Self::Channel,
            3 => Self::Device,
            _ => Self::Connection(id),
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

    pub(super) fn put(&mut self, id: ConnectionId, connection: Connection) {
        if let Some(slot) = self.slots.get_mut(id.slot as usize) {
            slot.connection = Some(connection);
        }
    }

    /// The connection of this id, broken or not.
    pub(super) fn find(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.connection.as_mut()
    }

    /// The connection of this id, unless it is broken or gone.
    pub(super) fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        self.find(id).filter(|connection| !connection.is_broken())
    }

    /// Takes a connection out and ends the meaning of its id.
    pub(super) fn take(&mut self, id: ConnectionId) -> Option<Connection> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.slot);
        slot.connection.take()
    }

    /// All connections, broken ones too.
    pub(super) fn iter(&mut self) -> impl Iterator<Item = (ConnectionId, &mut Connection)> {
        self.slots.iter_mut().enumerate().filter_map(|(slot, entry)| {
            let id = ConnectionId { slot: u32::try_from(slot).ok()?, generation: entry.generation };
            Some((id, entry.connection.as_mut()?))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        let id = ConnectionId { slot: 1023, generation: u32::MAX };
        let others = [Token::Listener, Token::Wake, Token::Channel, Token::Device];
        for token in others.into_iter().chain([Token::Connection(id)]) {
            assert_eq!(Token::decode(token.encode()), token);
        }
    }
}
