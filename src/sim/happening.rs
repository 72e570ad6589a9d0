//! What happens when the agenda says so.

use super::SimEndpoint;
use super::reads::Read;
use super::state::{Action, Phase, State, pair};
use crate::fabric::{CloseReason, Completion, CompletionStatus, FabricEvent};
use crate::types::Path;

impl State {
    pub(super) fn perform(&mut self, action: Action) {
        let Some(action) = self.stall(action) else {
            return;
        };
        match action {
            Action::Connect { from, to } => self.accept(from, to),
            Action::Connected { end } => self.connected(end),
            Action::Message { end, bytes } => self.arrive(end, bytes),
            Action::Serve { end, read, half } => self.serve(end, read, half),
            Action::Land { end, read } => self.land(end, read),
            Action::Gone { end, reason } => self.break_end(end, reason),
            Action::GiveUp { end } => self.give_up(end),
            Action::Flush { end } => self.flush(end),
            Action::Revoke { end, window } => self.revoked(end, window),
        }
    }

    /// Holds an action back where a partition lies in its way.
    fn stall(&mut self, action: Action) -> Option<Action> {
        let (through, sender) = match &action {
            Action::Connect { from, .. } => (*from, Some(*from)),
            Action::Message { end, .. } => (*end, self.ends.get(*end).and_then(|end| end.other)),
            Action::Serve { end, .. } | Action::Land { end, .. } => (*end, Some(*end)),
            Action::Connected { end } | Action::Gone { end, .. } => (*end, None),
            Action::GiveUp { .. } | Action::Flush { .. } | Action::Revoke { .. } => {
                return Some(action);
            }
        };
        let Some(end) = self.ends.get(through) else {
            return Some(action);
        };
        let between = pair(end.node, end.toward);
        if !self.partitions.contains(&between) {
            return Some(action);
        }
        // News of a closed connection is sent once and lost.
        if !matches!(action, Action::Gone { .. }) {
            self.stalled.push((between, action));
        }
        if let Some(sender) = sender {
            self.after(self.config.give_up, Action::GiveUp { end: sender });
        }
        None
    }

    fn give_up(&mut self, index: usize) {
        let Some(end) = self.ends.get(index) else {
            return;
        };
        if self.partitions.contains(&pair(end.node, end.toward)) {
            self.break_end(index, CloseReason::Unreachable);
        }
    }

    fn accept(&mut self, from: usize, to: SimEndpoint) {
        let Some(caller) = self.ends.get(from).filter(|end| end.phase == Phase::Connecting) else {
            return;
        };
        let caller_at = caller.node;
        let Some(life) = self.nodes.get(&to).map(|node| node.life) else {
            self.break_end(from, CloseReason::Unreachable);
            return;
        };
        let accepted = self.add_end((to, life), caller_at, Phase::Open);
        if let Some(end) = self.ends.get_mut(accepted) {
            end.other = Some(from);
        }
        if let Some(caller) = self.ends.get_mut(from) {
            caller.other = Some(accepted);
        }
        let connection = Self::id(accepted, life);
        self.tell(accepted, FabricEvent::Accepted { connection }, Vec::new());
        let soonest = self.now + self.delay();
        let when = self.in_order(from, soonest);
        self.at(when, Action::Connected { end: from });
    }

    fn connected(&mut self, index: usize) {
        if let Some(end) = self.ends.get_mut(index).filter(|end| end.phase == Phase::Connecting) {
            end.phase = Phase::Open;
            let connection = Self::id(index, end.life);
            self.tell(index, FabricEvent::Connected { connection }, Vec::new());
        }
    }

    fn arrive(&mut self, index: usize, bytes: Vec<u8>) {
        let Some(end) = self.ends.get(index) else {
            return;
        };
        let (other, open, life) = (end.other, end.phase == Phase::Open, end.life);
        if let Some(sender) = other.and_then(|other| self.ends.get_mut(other)) {
            sender.under_way = sender.under_way.saturating_sub(1);
        }
        if open {
            let connection = Self::id(index, life);
            let event = FabricEvent::Message { connection, start: 0, end: 0 };
            self.tell(index, event, bytes);
        } else if let Some(other) = other {
            // The answer to a message on a connection that is no more.
            self.tell_gone(other, CloseReason::Unreachable);
        }
    }

    fn flush(&mut self, index: usize) {
        let Some(end) = self.ends.get_mut(index) else {
            return;
        };
        let Phase::Closing(reason) = end.phase else {
            return;
        };
        end.phase = Phase::Closed;
        let connection = Self::id(index, end.life);
        // Where the peer or the way to it is gone, the first READ says so.
        let mut first = match reason {
            CloseReason::PeerClosed | CloseReason::Unreachable if !end.told => {
                Some(CompletionStatus::Unreachable)
            }
            _ => None,
        };
        for read in std::mem::take(&mut end.reads) {
            let status = first.take().unwrap_or(CompletionStatus::Flushed);
            let wr_id = read.wr_id;
            let flushed = FabricEvent::Completed(Completion {
                connection,
                wr_id,
                status,
                path: Path::default(),
            });
            self.tell(index, flushed, Vec::new());
        }
        self.tell(index, FabricEvent::Closed { connection, reason }, Vec::new());
    }

    pub(super) fn complete(&mut self, index: usize, read: &Read, status: CompletionStatus) {
        let Some(end) = self.ends.get(index) else {
            return;
        };
        let (connection, wr_id) = (Self::id(index, end.life), read.wr_id);
        let event =
            FabricEvent::Completed(Completion { connection, wr_id, status, path: Path::default() });
        self.tell(index, event, Vec::new());
    }

    /// Puts an event where its node's next poll finds it.
    pub(super) fn tell(&mut self, index: usize, event: FabricEvent, bytes: Vec<u8>) {
        let Some(end) = self.ends.get(index) else {
            return;
        };
        let life = end.life;
        if let Some(node) = self.nodes.get_mut(&end.node).filter(|node| node.life == life) {
            node.inbox.push_back((event, bytes));
        }
    }
}
