//! This node's own stalls (DESIGN §7): a data thread that was stopped or starved heard nobody, and
//! that is no fault of its peers.
//!
//! Every deadline that measures a peer moves by the length of the stall: answers, silence, handshakes,
//! and leases that this node has granted, whose completions and renewals may be waiting to be read.
//! The one deadline that stays is that of a borrowed lease, because its holder's clock did not stall
//! (invariant 3): READs that it has ended fail as a fault of this node.

use std::time::Duration;

use super::Peers;
use super::connection::Connection;
use super::landing::Landing;
use crate::event::Event;
use crate::types::{Scope, Timestamp};

impl<L: Landing> Peers<L> {
    /// The caller was late by so much, for a reason of its own. To be said before
    /// [`Self::handle_timeout`] of the same round.
    pub fn handle_stall(&mut self, late: Duration, landing: &mut L, now: Timestamp) {
        self.sink.emit(Event::DataThreadStalled { late });
        for connection in self.connections.values_mut() {
            let Connection { opened, heard, pinged, asked, .. } = connection;
            for moment in [opened, heard, pinged].into_iter().chain(asked) {
                *moment = now.min(*moment + late);
            }
        }
        self.holder.handle_stall(late);
        self.requester.handle_stall(late, now);
        self.break_and_settle(Scope::Local, landing, now);
    }
}
