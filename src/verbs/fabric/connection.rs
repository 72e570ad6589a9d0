//! One connection: a socket, queue pairs, and how they end together. [`super::handshake`] is how they
//! begin.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::hello::HELLO_BYTES;
use super::keys::PeerKeys;
use super::lane::{Lane, Posts};
use super::link::Link;
use super::nics::Nics;
use super::parking::Parked;
use super::raising::Raisers;
use super::regions::Regions;
use super::windows::Windows;
use crate::fabric::{
    CloseReason, Completion, CompletionStatus, ConnectionId, EventBatch, FabricError, FabricEvent,
    RemoteSpan, WindowId, WrId,
};
use crate::sys::avoided::Avoided;
use crate::sys::connections::{Breakable, Broken};
use crate::sys::epoll::Epoll;
use crate::sys::ibverbs::ibv_wc;
use crate::types::{self, Timestamp};
use crate::verbs::VerbsError;

/// Time for what is outstanding to be flushed after a cut; then the queue pairs are destroyed, which
/// ends it as well.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for messages that were sent before a close to arrive.
const LINGER: Duration = Duration::from_millis(500);

/// Time for a peer whose READ broke our queue pair to close the connection itself.
const SUSPICION: Duration = Duration::from_millis(200);

/// Failed paths remembered.
pub(super) const PATHS_MAX: usize = 64;

/// A NIC of ours towards one host.
pub(super) type Path = (u8, IpAddr);

/// What a connection borrows from its fabric for one call.
pub(super) struct Surroundings<'a> {
    pub(super) nics: &'a Nics,
    /// Paths that failed lately although the port is up, as when a cable behind a switch is out.
    pub(super) avoided: &'a mut Avoided<Path>,
    pub(super) regions: &'a Regions,
    pub(super) raisers: &'a mut Raisers,
    pub(super) epoll: &'a Epoll,
    /// Completions that matched nothing, counted.
    pub(super) stale: &'a mut u64,
    /// Where completions are taken to.
    pub(super) found: &'a mut Vec<ibv_wc>,
    pub(super) now: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// We connect: TCP does.
    Dialing,
    /// We connect: the acceptor's hello must come.
    Welcome,
    /// We accept: the connector's hello must come.
    Greeting,
    /// The peer's hello is here: our queue pairs are being connected to its.
    Raising,
    /// The peer's pattern must arrive.
    Probe,
    /// The peer's READY must come.
    Ready,
    /// Messages.
    Open,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) id: ConnectionId,
    pub(super) stage: Stage,
    /// `None` once it is cut, unless last messages are on their way.
    pub(super) socket: Option<OwnedFd>,
    /// The other end's address; `None` where the system does not tell.
    pub(super) address: Option<IpAddr>,
    pub(super) inbox: [u8; HELLO_BYTES],
    pub(super) have: usize,
    pub(super) outbox: Vec<u8>,
    /// When it must be open; after a cut, when it must be drained.
    pub(super) deadline: Timestamp,
    /// Not while it is being connected.
    pub(super) link: Option<Link>,
    pub(super) admitted: bool,
    /// What is known of the peer's regions.
    pub(super) keys: PeerKeys,
    /// NICs of ours that it was made without since they did not work then, as bits.
    pub(super) left_out: u32,
    /// NICs that the peer told of.
    pub(super) peer_nics: usize,
    /// READs that were accepted and wait for a key or for room in the queues.
    pub(super) parked: Parked,
    /// Whether the caller knows of it, so that its end is an event.
    pub(super) announced: bool,
    pub(super) broken: Option<Broken>,
    /// How the next READ that a cut flushes ends.
    pub(super) first: Option<CompletionStatus>,
    pub(super) linger: Timestamp,
    pub(super) suspect: Option<Timestamp>,
    /// When trials of rails that have not ended count as failed.
    pub(super) trials_end: Timestamp,
    /// READs that never reached a queue pair, and how they ended.
    pub(super) stillborn: Vec<(WrId, CompletionStatus)>,
}

impl Breakable for Connection {
    fn is_broken(&self) -> bool {
        self.broken.is_some()
    }
}

impl Connection {
    /// The path over one of our NICs; `None` where the other end's address is not known.
    pub(super) fn path(&self, nic: u8) -> Option<Path> {
        Some((nic, self.address?))
    }

    /// Whether that path failed lately.
    pub(super) fn avoids(&self, nic: u8, around: &Surroundings<'_>) -> bool {
        self.path(nic).is_some_and(|path| around.avoided.contains(&path, around.now))
    }

    /// A connection that this end began on `socket`.
    pub(super) fn dialed(
        id: ConnectionId,
        socket: OwnedFd,
        to: IpAddr,
        deadline: Timestamp,
    ) -> Self {
        let mut connection = Self::accepted(id, socket, deadline);
        connection.address = Some(to);
        connection.stage = Stage::Dialing;
        connection.announced = true;
        connection
    }

    /// A connection that a peer began on `socket`.
    pub(super) fn accepted(id: ConnectionId, socket: OwnedFd, deadline: Timestamp) -> Self {
        let peer = rustix::net::getpeername(&socket).ok().flatten();
        let address = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
        Self {
            id,
            stage: Stage::Greeting,
            socket: Some(socket),
            address: address.map(|address| address.ip()),
            inbox: [0; HELLO_BYTES],
            have: 0,
            outbox: Vec::new(),
            deadline,
            link: None,
            admitted: false,
            keys: PeerKeys::default(),
            left_out: 0,
            peer_nics: 0,
            parked: Parked::default(),
            announced: false,
            broken: None,
            first: None,
            linger: deadline,
            suspect: None,
            trials_end: deadline,
            stillborn: Vec::new(),
        }
    }

    /// Whether messages may be sent.
    pub(super) fn is_open(&self) -> bool {
        self.stage == Stage::Open && !self.is_broken()
    }

    /// Whether a peer began it and has not shown yet that it can talk.
    pub(super) fn is_gathering(&self) -> bool {
        self.stage != Stage::Open && !self.announced && !self.is_broken()
    }

    /// Whether it was accepted, and its peer has not said yet what it is.
    pub(super) fn is_unknown(&self) -> bool {
        self.stage == Stage::Greeting && !self.is_broken()
    }

    /// Whether deadlines are running.
    pub(super) fn is_timed(&self) -> bool {
        self.stage != Stage::Open || self.is_broken() || self.suspect.is_some()
    }

    /// Whether READs may be posted.
    pub(super) fn can_post(&self) -> bool {
        self.is_open() && self.admitted
    }

    pub(super) fn lanes(&self) -> &[Lane] {
        self.link.as_ref().map_or(&[], |link| &link.lanes)
    }

    /// What its lanes have posted so far.
    pub(super) fn posts(&self) -> Posts {
        self.lanes().iter().map(Lane::posts).sum()
    }

    pub(super) fn outstanding(&self) -> usize {
        let posted: usize = self.lanes().iter().map(Lane::reads).sum();
        posted + self.parked.len() + self.stillborn.len()
    }

    pub(super) fn link_mut(&mut self) -> Option<&mut Link> {
        self.link.as_mut()
    }

    pub(super) fn admit(&mut self, nics: &Nics) -> Result<(), VerbsError> {
        if let Some(link) = &mut self.link {
            link.admit(nics)?;
        }
        self.admitted = true;
        Ok(())
    }

    pub(super) fn windows_mut(&mut self) -> Option<&mut Windows> {
        self.link.as_mut()?.windows.as_mut()
    }

    /// Gives the peer a key of its own; messages wait until it works.
    pub(super) fn grant(
        &mut self,
        window: WindowId,
        span: &RemoteSpan,
        regions: &Regions,
    ) -> Result<u32, FabricError> {
        let link = self.link.as_mut().ok_or(FabricError::Closed)?;
        let windows = link.windows.as_mut().ok_or(FabricError::Closed)?;
        let key = windows.grant(window, span, &link.lanes, regions)?;
        link.messages.hold();
        Ok(key)
    }

    pub(super) fn revoke(&mut self, window: WindowId) -> Result<(), FabricError> {
        let link = self.link.as_mut().ok_or(FabricError::Closed)?;
        let windows = link.windows.as_mut().ok_or(FabricError::Closed)?;
        windows.revoke(window, &link.lanes)
    }

    /// Whether a message of this length can be sent or queued.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.link.as_ref().is_some_and(|link| link.messages.has_room(len))
    }

    /// Sends a message for which there is room.
    pub(super) fn send(&mut self, message: &[u8]) -> Result<(), Broken> {
        let link = self.link.as_mut().ok_or(Broken::UNREACHABLE)?;
        link.messages.send(message).map_err(|error| {
            tracing::warn!(%error, "a connection ends");
            Broken::UNREACHABLE
        })
    }

    /// A queue pair went to ERR by itself: where that is the peer's doing, it is about to close. Before
    /// the connection is open it may be a rail's that is tried in vain.
    pub(super) fn suspect(&mut self, now: Timestamp) {
        if self.stage == Stage::Open {
            self.suspect.get_or_insert(now + SUSPICION);
        }
    }

    /// Checks the deadlines of a connection that is not broken.
    pub(super) fn check(&self, now: Timestamp) -> Result<(), Broken> {
        if self.stage != Stage::Open && now >= self.deadline {
            return Err(Broken::UNREACHABLE);
        }
        match self.suspect {
            Some(limit) if now >= limit => Err(Broken::PEER_CLOSED),
            _ => Ok(()),
        }
    }

    /// What breaks a connection while its path is being verified: however the peer's end shows, the
    /// path has failed.
    fn verdict(&self, broken: Broken) -> Broken {
        let what = match self.stage {
            Stage::Probe => "its memory could not be read",
            Stage::Ready => "it did not read ours",
            _ => return broken,
        };
        if !matches!(broken.reason, CloseReason::PeerClosed | CloseReason::Unreachable) {
            return broken;
        }
        if let Some(link) = &self.link {
            link.warn(what);
        }
        Broken::UNREACHABLE
    }

    /// Cuts the peer off from our memory: lanes go to ERR or are destroyed. Only last messages may
    /// still be on their way, where this end closes in order.
    pub(super) fn cut(&mut self, broken: Broken, now: Timestamp) {
        if self.is_broken() {
            return;
        }
        let broken = self.verdict(broken);
        self.broken = Some(broken);
        self.first = Some(broken.first);
        self.deadline = now + DRAIN_TIMEOUT;
        self.linger = now + LINGER;
        let Some(link) = &mut self.link else {
            self.socket = None;
            return;
        };
        // A bound window keeps its queue pair, and freeing it ends its key.
        link.windows = None;
        for lane in &mut link.lanes {
            lane.cut();
        }
        let orderly = broken.reason == CloseReason::Requested && self.stage == Stage::Open;
        if !orderly || !link.messages.has_outgoing() {
            link.messages.cut();
            self.socket = None;
        }
    }

    pub(super) fn abandon(&mut self, lane: usize, batch: &mut EventBatch) {
        let (connection, first) = (self.id, &mut self.first);
        let lanes = self.link.as_mut().map(|link| &mut link.lanes);
        let Some(lane) = lanes.and_then(|lanes| lanes.get_mut(lane)) else { return };
        let path = lane.rail().path();
        lane.abandon(|wr_id| {
            let status = first.take().unwrap_or(CompletionStatus::Flushed);
            let done = Completion { connection, wr_id, status, path };
            batch.events.push(FabricEvent::Completed(done));
        });
    }

    /// Whether a broken connection is over: everything outstanding has completed. What does not
    /// drain in time is given up by destroying its queue pair.
    pub(super) fn is_over(&mut self, now: Timestamp, batch: &mut EventBatch) -> bool {
        if !self.is_broken() {
            return false;
        }
        let late = now >= self.deadline;
        for lane in 0..self.lanes().len() {
            let state = self.lanes().get(lane);
            if state.is_some_and(|lane| !lane.is_drained() && (late || !lane.is_live())) {
                self.abandon(lane, batch);
            }
        }
        let drained = self.lanes().iter().all(Lane::is_drained);
        let outgoing = self.link.as_ref().is_some_and(|link| link.messages.has_outgoing());
        drained && (!outgoing || self.socket.is_none() || now >= self.linger)
    }

    /// Ends a connection that is over.
    pub(super) fn bury(self, batch: &mut EventBatch) {
        let reason = self.broken.unwrap_or(Broken::REQUESTED).reason;
        let connection = self.id;
        // First, so that whoever reads the events finds no queue pair left.
        drop(self.link);
        let (mut first, parked) = (self.first, self.parked.into_reads());
        let cut_short =
            parked.map(|wr_id| (wr_id, first.take().unwrap_or(CompletionStatus::Flushed)));
        for (wr_id, status) in self.stillborn.into_iter().chain(cut_short) {
            let done = Completion { connection, wr_id, status, path: types::Path::default() };
            batch.events.push(FabricEvent::Completed(done));
        }
        if self.announced {
            batch.events.push(FabricEvent::Closed { connection, reason });
        }
    }
}
