//! The health of peers, as the peer core tends to it: verdicts in, probes and events out.

use super::connection::State;
use super::landing::Landing;
use super::outbox::Context;
use super::probe::Ended;
use super::{LeaseUsage, Peers};
use crate::health::{Cause, Entry};
use crate::types::{NodeId, Timestamp};

impl<L: Landing> Peers<L> {
    /// Tells health what ended, takes probes on, and says how busy this node is.
    pub(super) fn tend(&mut self, landing: &mut L, now: Timestamp) {
        self.judge(now);
        self.take_places();
        self.look_for_withdrawn(landing, now);
        if self.requester.probes.are_waiting() {
            self.take_probes_on(landing, now);
        }
        let load = self.holder.load(landing);
        if self.told != Some(load) {
            self.told = Some(load);
            landing.note_load(load);
        }
    }

    /// Begins the probes that are due.
    pub(super) fn begin_probes(&mut self, now: Timestamp) {
        while !self.draining
            && let Some(node) = self.health.poll_probe(now)
        {
            self.requester.begin_probe(node, now);
            if self.up_to(node).is_none() {
                self.dial(node);
            }
        }
    }

    /// Takes note of what ended since the last time.
    pub(super) fn judge(&mut self, now: Timestamp) {
        for (node, paths, verdict) in self.requester.verdicts.drain(..) {
            self.health.handle_verdict((node, &paths), verdict, now);
        }
        while let Some(Ended { node, paths, result }) = self.requester.probes.poll_ended() {
            if result == Err(Cause::NoAnswer) {
                self.give_up_ways(node);
            }
            self.health.handle_probe((node, &paths), result, now);
        }
        while let Some(event) = self.health.poll_event() {
            self.sink.emit(event);
        }
    }

    /// Probes that wait for a connection that is there.
    fn take_probes_on(&mut self, landing: &mut L, now: Timestamp) {
        for (id, connection) in &self.connections {
            let State::Up { remote } = &connection.state else { continue };
            if self.requester.probes.wait_for(remote.node) {
                let (outbox, sink) = (&mut self.outbox, &*self.sink);
                let cx = &mut Context { landing: &mut *landing, outbox, sink, now };
                self.requester.handle_probe_up((remote.node, *id), cx);
            }
        }
    }

    /// What is known of the health of peers and of this node's NICs.
    pub fn health(&self, now: Timestamp) -> impl Iterator<Item = Entry> + '_ {
        self.health.report(now)
    }

    /// Forgets what speaks against one peer, or against all; how many breakers were open.
    pub fn reset_health(&mut self, node: Option<NodeId>, now: Timestamp) -> u32 {
        self.health.reset(node, now)
    }

    /// Leases that requesters hold of this node: what a node that leaves waits for.
    #[must_use]
    pub fn leases_out(&self) -> u64 {
        self.holder.lent().leases
    }

    /// What each requester holds of this node now.
    pub fn lease_usage(&self) -> impl Iterator<Item = LeaseUsage> + '_ {
        self.holder.usages().filter_map(|(index, usage)| {
            Some(LeaseUsage { requester: self.requesters.name(index)?, usage })
        })
    }
}
