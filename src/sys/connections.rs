//! What fabrics share that keep connections of their own: slots with generations, and how a
//! connection breaks.

use crate::fabric::{CloseReason, CompletionStatus, ConnectionId, FabricError};
use crate::limits::CONNECTIONS_MAX;

/// Why a connection breaks, and how the first READ that this flushes ends; the others are flushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken {
    /// Why.
    pub reason: CloseReason,
    /// How the first READ outstanding on it ends.
    pub first: CompletionStatus,
}

impl Broken {
    /// The peer sent what no fabric sends, or not in time.
    pub const VIOLATION: Self =
        Self { reason: CloseReason::Violation, first: CompletionStatus::Unreachable };
    /// The peer closed the connection in order.
    pub const PEER_CLOSED: Self =
        Self { reason: CloseReason::PeerClosed, first: CompletionStatus::Unreachable };
    /// The way to the peer failed.
    pub const UNREACHABLE: Self =
        Self { reason: CloseReason::Unreachable, first: CompletionStatus::Unreachable };
    /// One of our READs failed and has completed.
    pub const READ_FAILED: Self =
        Self { reason: CloseReason::ReadFailed, first: CompletionStatus::Flushed };
    /// This side broke it.
    pub const REQUESTED: Self =
        Self { reason: CloseReason::Requested, first: CompletionStatus::Flushed };
    /// A NIC of this side cannot carry it any more.
    pub const NIC_LOST: Self =
        Self { reason: CloseReason::NicLost, first: CompletionStatus::Flushed };
    /// Another way to the peer is to be taken.
    pub const MOVED: Self = Self { reason: CloseReason::Moved, first: CompletionStatus::Flushed };
    /// This side has no objects or memory for it.
    pub const EXHAUSTED: Self =
        Self { reason: CloseReason::Exhausted, first: CompletionStatus::Flushed };
}

/// A connection that may be broken and not yet gone.
pub trait Breakable {
    /// Whether it is.
    fn is_broken(&self) -> bool;
}

#[derive(Debug)]
struct Slot<C> {
    generation: u32,
    connection: Option<C>,
}

/// The connections of one fabric, at most [`CONNECTIONS_MAX`].
#[derive(Debug)]
pub struct Connections<C> {
    slots: Vec<Slot<C>>,
    free: Vec<u32>,
}

impl<C> Default for Connections<C> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<C: Breakable> Connections<C> {
    /// An id for one more connection, which [`Self::put`] then stores.
    ///
    /// # Errors
    /// [`FabricError::Limit`].
    pub fn reserve(&mut self) -> Result<ConnectionId, FabricError> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() < CONNECTIONS_MAX => {
                self.slots.push(Slot { generation: 0, connection: None });
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
    pub fn release(&mut self, id: ConnectionId) {
        if let Some(slot) = self.slots.get_mut(id.slot as usize) {
            slot.generation = slot.generation.wrapping_add(1);
            slot.connection = None;
            self.free.push(id.slot);
        }
    }

    /// Stores a connection under the id that was reserved for it.
    pub fn put(&mut self, id: ConnectionId, connection: C) {
        if let Some(slot) = self.slots.get_mut(id.slot as usize) {
            slot.connection = Some(connection);
        }
    }

    /// The connection of this id, broken or not.
    pub fn find(&mut self, id: ConnectionId) -> Option<&mut C> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        slot.connection.as_mut()
    }

    /// The connection of this id, broken or not, to look at.
    #[must_use]
    pub fn peek(&self, id: ConnectionId) -> Option<&C> {
        let slot = self.slots.get(id.slot as usize)?;
        slot.connection.as_ref().filter(|_| slot.generation == id.generation)
    }

    /// The connection of this id, unless it is broken or gone.
    pub fn get(&mut self, id: ConnectionId) -> Option<&mut C> {
        self.find(id).filter(|connection| !connection.is_broken())
    }

    /// Takes a connection out and ends the meaning of its id.
    pub fn take(&mut self, id: ConnectionId) -> Option<C> {
        let slot = self.slots.get_mut(id.slot as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        let connection = slot.connection.take();
        self.release(id);
        connection
    }

    /// Whether no id has a meaning.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// All connections, broken ones too.
    pub fn iter(&self) -> impl Iterator<Item = &C> {
        self.slots.iter().filter_map(|entry| entry.connection.as_ref())
    }

    /// All connections, broken ones too, with their ids.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (ConnectionId, &mut C)> {
        self.slots.iter_mut().enumerate().filter_map(|(slot, entry)| {
            let id = ConnectionId { slot: u32::try_from(slot).ok()?, generation: entry.generation };
            Some((id, entry.connection.as_mut()?))
        })
    }

    /// All connections that are not broken.
    pub fn whole_mut(&mut self) -> impl Iterator<Item = (ConnectionId, &mut C)> {
        self.iter_mut().filter(|(_, connection)| !connection.is_broken())
    }
}
