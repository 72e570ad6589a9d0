//! The network's state: nodes, the ends of connections, the agenda.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::random::Random;
use super::reads::Read;
use super::windows::Granted;
use super::{SimConfig, SimEndpoint};
use crate::fabric::{
    Access, CloseReason, ConnectionId, EventBatch, FabricError, FabricEvent, Region, RegionId,
    WindowId, check_message,
};
use crate::limits;
use crate::memory::Mapping;
use crate::types::Timestamp;

/// Messages of one end that may be on their way.
const MESSAGES_MAX: usize = 1024;

/// Something that will happen. Numbers are places in [`State::ends`].
#[derive(Debug)]
pub(super) enum Action {
    /// A connection attempt arrives.
    Connect { from: usize, to: SimEndpoint },
    /// The connecting end learns that it is up.
    Connected { end: usize },
    /// A message arrives at this end.
    Message { end: usize, bytes: Vec<u8> },
    /// Half a READ of this end is read at the other one.
    Serve { end: usize, read: u64, half: u8 },
    /// A READ's bytes arrive at this end.
    Land { end: usize, read: u64 },
    /// This end learns that the connection is gone.
    Gone { end: usize, reason: CloseReason },
    /// What this end sent or posted has been stalled for too long, if it is still.
    GiveUp { end: usize },
    /// This end has drained.
    Flush { end: usize },
    /// A key of this end ends.
    Revoke { end: usize, window: WindowId },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Connecting,
    Open,
    /// Broken, and not drained yet.
    Closing(CloseReason),
    Closed,
}

/// One end of a connection.
#[derive(Debug)]
pub(super) struct End {
    pub(super) node: SimEndpoint,
    pub(super) life: u32,
    /// The node at the other end, and that end where it exists.
    pub(super) toward: SimEndpoint,
    pub(super) other: Option<usize>,
    pub(super) phase: Phase,
    pub(super) admitted: bool,
    /// Pairs of NICs that it goes over.
    pub(super) rails: usize,
    /// When the latest message to this end arrives; no later one overtakes it.
    arrives: Timestamp,
    /// Messages of this end that are on their way.
    pub(super) under_way: usize,
    pub(super) reads: Vec<Read>,
    /// Keys that it has given the other end.
    pub(super) windows: BTreeMap<WindowId, Granted>,
    /// Whether one of its READs has told why it broke: the others are flushed.
    pub(super) told: bool,
}

/// What is registered: the region and its memory.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) region: Region,
    pub(super) access: Access,
    pub(super) memory: Arc<Mapping>,
}

/// A node that runs.
#[derive(Debug, Default)]
pub(super) struct Node {
    /// Which start of it.
    pub(super) life: u32,
    pub(super) regions: Vec<Registered>,
    /// Deregistered regions into which READs may still land: served to nobody.
    pub(super) landing: Vec<Registered>,
    registered: u16,
    pub(super) inbox: VecDeque<(FabricEvent, Vec<u8>)>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) config: SimConfig,
    pub(super) now: Timestamp,
    pub(super) random: Random,
    lives: u32,
    pub(super) nodes: BTreeMap<SimEndpoint, Node>,
    pub(super) ends: Vec<End>,
    /// Pairs of NICs that connections go over which are made now.
    pub(super) rails: usize,
    agenda: BTreeMap<(Timestamp, u64), Action>,
    /// Numbers what is put on the agenda, and READs.
    pub(super) counter: u64,
    pub(super) partitions: BTreeSet<(SimEndpoint, SimEndpoint)>,
    /// What arrived at a partition, in order.
    pub(super) stalled: Vec<((SimEndpoint, SimEndpoint), Action)>,
}

pub(super) fn pair(a: SimEndpoint, b: SimEndpoint) -> (SimEndpoint, SimEndpoint) {
    (a.min(b), a.max(b))
}

impl State {
    pub(super) fn new(seed: u64, config: SimConfig) -> Self {
        Self {
            config,
            now: Timestamp::ZERO,
            random: Random::new(seed),
            lives: 0,
            nodes: BTreeMap::new(),
            ends: Vec::new(),
            rails: 1,
            agenda: BTreeMap::new(),
            counter: 0,
            partitions: BTreeSet::new(),
            stalled: Vec::new(),
        }
    }

    // Nodes.

    pub(super) fn start(&mut self, at: SimEndpoint) -> u32 {
        if let Some(node) = self.nodes.get(&at) {
            self.kill(at, node.life);
        }
        self.lives += 1;
        self.nodes.insert(at, Node { life: self.lives, ..Node::default() });
        self.lives
    }

    /// Ends one life of a node. Its peers learn it when they learn it.
    pub(super) fn kill(&mut self, at: SimEndpoint, life: u32) {
        if self.nodes.get(&at).is_none_or(|node| node.life != life) {
            return;
        }
        self.nodes.remove(&at);
        let (mut others, closed) = (Vec::new(), Phase::Closed);
        for end in self.ends.iter_mut().filter(|end| end.node == at && end.phase != closed) {
            end.phase = closed;
            end.reads.clear();
            others.extend(end.other);
        }
        for other in others {
            self.tell_gone(other, CloseReason::Unreachable);
        }
    }

    pub(super) fn node(&mut self, at: SimEndpoint, life: u32) -> Result<&mut Node, FabricError> {
        let node = self.nodes.get_mut(&at).filter(|node| node.life == life);
        node.ok_or(FabricError::Closed)
    }

    pub(super) fn register(
        &mut self,
        (at, life): (SimEndpoint, u32),
        memory: Arc<Mapping>,
        access: Access,
    ) -> Result<Region, FabricError> {
        let rkey = self.new_key();
        let node = self.node(at, life)?;
        if node.regions.len() >= limits::REGIONS_MAX {
            return Err(FabricError::Limit { what: "regions", limit: limits::REGIONS_MAX });
        }
        let address = (u64::from(life) << 48) + (u64::from(node.registered + 1) << 40);
        let id = RegionId(node.registered);
        node.registered += 1;
        let region = Region { id, rkey, address, len: memory.len() };
        node.regions.push(Registered { region, access, memory });
        Ok(region)
    }

    /// A key that no other registration had: an old one reads nothing.
    pub(super) fn new_key(&mut self) -> u32 {
        self.counter += 1;
        u32::try_from(self.random.number() >> 44).unwrap_or(0) << 12
            | u32::try_from(self.counter & 0xfff).unwrap_or(0)
    }

    pub(super) fn deregister(&mut self, (at, life): (SimEndpoint, u32), id: RegionId) {
        let landed_in = self.is_landed_in(at);
        let Ok(node) = self.node(at, life) else {
            return;
        };
        let gone = node.regions.extract_if(.., |registered| registered.region.id == id);
        let kept = gone.filter(|registered| landed_in(registered.region.id));
        node.landing.extend(kept);
    }

    /// Tells which regions of a node the READs that it has outstanding land in.
    fn is_landed_in(&self, at: SimEndpoint) -> impl Fn(RegionId) -> bool + use<> {
        let into: BTreeSet<RegionId> = self.landing(at).iter().map(|span| span.region).collect();
        move |region| into.contains(&region)
    }

    pub(super) fn poll(&mut self, at: SimEndpoint, life: u32, batch: &mut EventBatch) {
        let waits = self.node(at, life).is_ok_and(|node| !node.landing.is_empty());
        let landed_in = waits.then(|| self.is_landed_in(at));
        let Ok(node) = self.node(at, life) else {
            return;
        };
        if let Some(landed_in) = landed_in {
            node.landing.retain(|registered| landed_in(registered.region.id));
        }
        for (mut event, bytes) in node.inbox.drain(..) {
            if let FabricEvent::Message { start, end, .. } = &mut event {
                // A batch of messages is far below 4 GiB: each has an upper bound.
                let at = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
                *start = at(batch.bytes.len());
                batch.bytes.extend_from_slice(&bytes);
                *end = at(batch.bytes.len());
            }
            batch.events.push(event);
        }
    }

    // The agenda.

    pub(super) fn next_event(&self) -> Option<Timestamp> {
        self.agenda.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn step(&mut self) -> Option<Timestamp> {
        let ((at, _), action) = self.agenda.pop_first()?;
        self.now = self.now.max(at);
        self.perform(action);
        Some(self.now)
    }

    pub(super) fn advance_to(&mut self, to: Timestamp) {
        while self.next_event().is_some_and(|at| at <= to) {
            self.step();
        }
        self.now = self.now.max(to);
    }

    pub(super) fn after(&mut self, delay: Duration, action: Action) {
        self.at(self.now + delay, action);
    }

    pub(super) fn at(&mut self, when: Timestamp, action: Action) {
        self.counter += 1;
        self.agenda.insert((when, self.counter), action);
    }

    pub(super) fn delay(&mut self) -> Duration {
        self.random.between(&self.config.delay)
    }

    // Connections.

    pub(super) fn connect(
        &mut self,
        (from, life): (SimEndpoint, u32),
        to: SimEndpoint,
    ) -> Result<ConnectionId, FabricError> {
        self.node(from, life)?;
        let open = self.ends.iter().filter(|end| end.node == from && end.phase != Phase::Closed);
        if open.count() >= limits::CONNECTIONS_MAX {
            let limit = limits::CONNECTIONS_MAX;
            return Err(FabricError::Limit { what: "connections", limit });
        }
        let end = self.add_end((from, life), to, Phase::Connecting);
        let delay = self.delay();
        self.after(delay, Action::Connect { from: end, to });
        Ok(Self::id(end, life))
    }

    pub(super) fn add_end(
        &mut self,
        (node, life): (SimEndpoint, u32),
        toward: SimEndpoint,
        phase: Phase,
    ) -> usize {
        self.ends.push(End {
            node,
            life,
            toward,
            other: None,
            phase,
            admitted: false,
            rails: self.rails,
            arrives: self.now,
            under_way: 0,
            reads: Vec::new(),
            windows: BTreeMap::new(),
            told: false,
        });
        self.ends.len() - 1
    }

    pub(super) fn id(end: usize, life: u32) -> ConnectionId {
        ConnectionId { slot: u32::try_from(end).unwrap_or(u32::MAX), generation: life }
    }

    /// The end that a node calls so, if it is open.
    pub(super) fn open_end(
        &self,
        at: SimEndpoint,
        connection: ConnectionId,
    ) -> Result<usize, FabricError> {
        let index = connection.slot as usize;
        let end = self.ends.get(index).filter(|end| {
            end.node == at && end.life == connection.generation && end.phase == Phase::Open
        });
        end.map(|_| index).ok_or(FabricError::Closed)
    }

    pub(super) fn admit(&mut self, at: SimEndpoint, on: ConnectionId) -> Result<(), FabricError> {
        let end = self.open_end(at, on)?;
        if let Some(end) = self.ends.get_mut(end) {
            end.admitted = true;
        }
        Ok(())
    }

    pub(super) fn send(
        &mut self,
        at: SimEndpoint,
        on: ConnectionId,
        message: &[u8],
    ) -> Result<(), FabricError> {
        let index = self.open_end(at, on)?;
        check_message(message)?;
        let soonest = self.now + self.delay();
        let Some(end) = self.ends.get_mut(index) else {
            return Err(FabricError::Closed);
        };
        if end.under_way >= MESSAGES_MAX {
            return Err(FabricError::Full);
        }
        end.under_way += 1;
        let Some(to) = end.other else {
            return Err(FabricError::Closed);
        };
        let when = self.in_order(to, soonest);
        self.at(when, Action::Message { end: to, bytes: message.to_vec() });
        Ok(())
    }

    /// When something that is sent to an end arrives there: after what was sent before.
    pub(super) fn in_order(&mut self, to: usize, soonest: Timestamp) -> Timestamp {
        let Some(end) = self.ends.get_mut(to) else {
            return soonest;
        };
        end.arrives = end.arrives.max(soonest);
        end.arrives
    }

    pub(super) fn close(&mut self, at: SimEndpoint, on: ConnectionId) {
        let index = on.slot as usize;
        let ours = |end: &&End| end.node == at && end.life == on.generation;
        if self.ends.get(index).filter(ours).is_some() {
            self.break_end(index, CloseReason::Requested);
        }
    }

    /// Ends a connection at one end: from here on the other one can read nothing through it.
    pub(super) fn break_end(&mut self, index: usize, reason: CloseReason) {
        let Some(end) = self.ends.get_mut(index) else {
            return;
        };
        if !matches!(end.phase, Phase::Connecting | Phase::Open) {
            return;
        }
        end.phase = Phase::Closing(reason);
        let other = end.other;
        let drain = self.random.between(&self.config.drain);
        self.after(drain, Action::Flush { end: index });
        if let Some(other) = other {
            let told = match reason {
                CloseReason::Unreachable => CloseReason::Unreachable,
                _ => CloseReason::PeerClosed,
            };
            self.tell_gone(other, told);
        }
    }

    pub(super) fn tell_gone(&mut self, end: usize, reason: CloseReason) {
        let soonest = self.now + self.delay();
        let when = self.in_order(end, soonest);
        self.at(when, Action::Gone { end, reason });
    }

    // Faults.

    pub(super) fn partition(&mut self, a: SimEndpoint, b: SimEndpoint) {
        self.partitions.insert(pair(a, b));
    }

    pub(super) fn heal(&mut self, a: SimEndpoint, b: SimEndpoint) {
        self.partitions.remove(&pair(a, b));
        let held = self.stalled.extract_if(.., |(between, _)| *between == pair(a, b));
        for (_, action) in held.collect::<Vec<_>>() {
            self.perform(action);
        }
    }

    /// Ends every connection between two nodes, at both ends at once and for the same reason.
    pub(super) fn end_between(&mut self, (a, b): (SimEndpoint, SimEndpoint), reason: CloseReason) {
        let between: Vec<usize> = (0..self.ends.len())
            .filter(|end| {
                self.ends.get(*end).is_some_and(|end| pair(end.node, end.toward) == pair(a, b))
            })
            .collect();
        for end in between {
            self.break_end(end, reason);
        }
    }

    pub(super) fn connections(&self, a: SimEndpoint, b: SimEndpoint) -> usize {
        let open = |index: usize| self.ends.get(index).is_some_and(|end| end.phase == Phase::Open);
        let from_a = |end: &&End| end.node == a && end.toward == b && end.phase == Phase::Open;
        self.ends.iter().filter(from_a).filter(|end| end.other.is_some_and(open)).count()
    }
}
