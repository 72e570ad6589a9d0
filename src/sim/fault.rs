//! Faults on purpose: a fabric around a fabric that dies, or loses a message, at a chosen step.
//!
//! Tests of real processes give `kvrail serve --fault` a specification, so that the fault enters
//! through the trait that production uses and the code under test is the one that ships.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;

use crate::fabric::{
    Access, Capabilities, ConnectionId, EventBatch, Fabric, FabricError, FabricEvent, Lack, Rail,
    ReadBatch, Region, RegionId, RemoteSpan, Wake, WindowId,
};
use crate::memory::{ForeignFabric, Pinner};
use crate::protocol::{Kind, kind_of};
use crate::sys::process;
use crate::types::Reach;

/// Where a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Point {
    /// Before a message of this kind is sent.
    Send(Kind),
    /// After one was sent.
    Sent(Kind),
    /// Before one that arrived is handed on.
    Receive(Kind),
    /// Before a batch of READs is posted.
    Post,
    /// After one was posted.
    Posted,
    /// When a READ has completed, before that is handed on.
    Completion,
}

/// What happens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    /// The process is killed, as by `kill -9`.
    Kill,
    /// The process stops, as by `kill -STOP`: connected and silent until somebody continues it.
    Stop,
    /// The message is lost; for READs, nothing.
    Lose,
    /// The message is sent twice.
    Repeat,
}

/// A fault: `ACTION:POINT[:NTH]`, where ACTION is `kill`, `stop`, `lose` or `repeat`, POINT is `send-KIND`,
/// `sent-KIND`, `recv-KIND` (KIND as in [`Kind::name`]), `post`, `posted` or `completion`, and NTH
/// counts from 1, the default. It strikes once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultSpec {
    action: Action,
    point: Point,
    nth: u64,
}

/// A fault specification that means nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a fault is ACTION:POINT[:NTH] with ACTION kill, stop, lose or repeat and POINT send-KIND, \
     sent-KIND, recv-KIND, post, posted or completion; got {0:?}"
)]
pub struct FaultSpecError(String);

impl FromStr for FaultSpec {
    type Err = FaultSpecError;

    fn from_str(text: &str) -> Result<Self, FaultSpecError> {
        let bad = || FaultSpecError(text.to_owned());
        let mut parts = text.split(':');
        let action = match parts.next() {
            Some("kill") => Action::Kill,
            Some("stop") => Action::Stop,
            Some("lose") => Action::Lose,
            Some("repeat") => Action::Repeat,
            _ => return Err(bad()),
        };
        let kind = |name: &str| Kind::ALL.iter().copied().find(|kind| kind.name() == name);
        let point = match parts.next().ok_or_else(bad)? {
            "post" => Point::Post,
            "posted" => Point::Posted,
            "completion" => Point::Completion,
            other => {
                let (side, name) = other.split_once('-').ok_or_else(bad)?;
                let kind = kind(name).ok_or_else(bad)?;
                match side {
                    "send" => Point::Send(kind),
                    "sent" => Point::Sent(kind),
                    "recv" => Point::Receive(kind),
                    _ => return Err(bad()),
                }
            }
        };
        let nth = match parts.next() {
            Some(nth) => nth.parse().ok().filter(|nth| *nth > 0).ok_or_else(bad)?,
            None => 1,
        };
        if parts.next().is_some() {
            return Err(bad());
        }
        Ok(Self { action, point, nth })
    }
}

/// A fabric with at most one fault.
#[derive(Debug)]
pub struct Faulty<F> {
    inner: F,
    fault: Option<FaultSpec>,
    seen: u64,
}

impl<F> Faulty<F> {
    /// Wraps a fabric; without a fault it changes nothing.
    pub fn new(inner: F, fault: Option<FaultSpec>) -> Self {
        Self { inner, fault, seen: 0 }
    }

    /// The fabric inside.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    /// What to do at this point: nothing, mostly.
    fn strike(&mut self, point: Point) -> Option<Action> {
        let fault = self.fault.filter(|fault| fault.point == point)?;
        self.seen += 1;
        if self.seen < fault.nth {
            return None;
        }
        self.fault = None;
        if fault.action == Action::Kill {
            tracing::warn!(?fault, "dying of an injected fault");
            // A kill of oneself cannot fail; were it to, aborting is as sudden.
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).ok();
            std::process::abort();
        }
        if fault.action == Action::Stop {
            tracing::warn!(?fault, "stopped by an injected fault");
            process::stop_here();
            return None;
        }
        Some(fault.action)
    }
}

impl<F: ForeignFabric> ForeignFabric for Faulty<F> {
    type Pinned = F::Pinned;

    fn pinner(&self, access: Access) -> Pinner<Self::Pinned> {
        self.inner.pinner(access)
    }

    fn adopt(&mut self, pinned: Self::Pinned) -> Result<Region, FabricError> {
        self.inner.adopt(pinned)
    }

    fn disown(&mut self, region: RegionId) -> Option<Self::Pinned> {
        self.inner.disown(region)
    }
}

impl<F: Fabric> Fabric for Faulty<F> {
    type Endpoint = F::Endpoint;
    type Memory = F::Memory;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn transport(&self, connection: ConnectionId) -> &'static str {
        self.inner.transport(connection)
    }

    fn rails(&self, connection: ConnectionId) -> Vec<Rail> {
        self.inner.rails(connection)
    }

    fn lacks(&self, connection: ConnectionId) -> Vec<Lack> {
        self.inner.lacks(connection)
    }

    fn shared_memory(&self) -> Result<(), &str> {
        self.inner.shared_memory()
    }

    fn reach(&self, connection: ConnectionId) -> Reach {
        self.inner.reach(connection)
    }

    fn register(
        &mut self,
        memory: Arc<Self::Memory>,
        access: Access,
    ) -> Result<Region, FabricError> {
        self.inner.register(memory, access)
    }

    fn deregister(&mut self, region: RegionId) {
        self.inner.deregister(region);
    }

    fn connect(&mut self, to: &Self::Endpoint) -> Result<ConnectionId, FabricError> {
        self.inner.connect(to)
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        self.inner.admit(connection)
    }

    fn grant(
        &mut self,
        connection: ConnectionId,
        window: WindowId,
        span: &RemoteSpan,
    ) -> Result<u32, FabricError> {
        self.inner.grant(connection, window, span)
    }

    fn revoke(&mut self, connection: ConnectionId, window: WindowId) -> Result<(), FabricError> {
        self.inner.revoke(connection, window)
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        let Some(kind) = kind_of(message) else { return self.inner.send(connection, message) };
        match self.strike(Point::Send(kind)) {
            Some(Action::Lose) => return Ok(()),
            Some(Action::Repeat) => self.inner.send(connection, message)?,
            Some(Action::Kill | Action::Stop) | None => {}
        }
        self.inner.send(connection, message)?;
        self.strike(Point::Sent(kind));
        Ok(())
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        self.strike(Point::Post);
        self.inner.post(connection, batch)?;
        self.strike(Point::Posted);
        Ok(())
    }

    fn close(&mut self, connection: ConnectionId) {
        self.inner.close(connection);
    }

    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError> {
        let before = batch.events.len();
        self.inner.poll(batch, timeout)?;
        if self.fault.is_none() {
            return Ok(());
        }
        let mut at = before;
        while let Some(event) = batch.events.get(at).copied() {
            let struck = match event {
                FabricEvent::Message { start, end, .. } => kind_of(batch.message(start, end))
                    .and_then(|kind| self.strike(Point::Receive(kind))),
                FabricEvent::Completed(_) => self.strike(Point::Completion),
                _ => None,
            };
            match (struck, event) {
                (Some(Action::Lose), FabricEvent::Message { .. }) => {
                    batch.events.remove(at);
                }
                (Some(Action::Repeat), FabricEvent::Message { .. }) => {
                    batch.events.insert(at, event);
                    at += 2;
                }
                _ => at += 1,
            }
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.inner.waker()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_is_read_or_refused() {
        let spec: FaultSpec = "kill:send-lease:2".parse().unwrap();
        assert_eq!(
            spec,
            FaultSpec { action: Action::Kill, point: Point::Send(Kind::Lease), nth: 2 }
        );
        assert_eq!("lose:completion".parse::<FaultSpec>().unwrap().nth, 1);
        for text in ["", "kill", "kill:", "die:post", "kill:send-x", "kill:post:0", "kill:post:1:2"]
        {
            assert!(text.parse::<FaultSpec>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_fault_strikes_at_its_turn_and_once() {
        let mut faulty = Faulty::new((), Some("lose:send-complete:2".parse().unwrap()));
        let point = Point::Send(Kind::Complete);
        assert_eq!(faulty.strike(Point::Send(Kind::Lend)), None);
        assert_eq!(faulty.strike(point), None);
        assert_eq!(faulty.strike(point), Some(Action::Lose));
        assert_eq!(faulty.strike(point), None);
    }
}
