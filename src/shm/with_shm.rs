//! A fabric for peers anywhere, and shared memory for those on this host, as one fabric.
//!
//! A connection belongs to one of the two from its start to its end, which its number tells. Memory is
//! registered with the far fabric, and with the near one under the same keys and addresses: what a
//! peer is told of a region holds on either way. The thread waits in one place, the far fabric's poll,
//! which the near fabric's descriptors end too.
//!
//! **Memory of another driver's device** has one way: the far fabric's. Peers cannot map it, and a READ
//! over shared memory, which is the CPU's copy, cannot land in it. So while the far fabric has such a
//! region, the near one is out of use: before the region is anybody's, all near connections end, at
//! either end as [`CloseReason::Moved`], and none is begun or accepted. A fresh connection to the same
//! peer is then a far one at once, since nobody listens under the name that it would be dialled by. With
//! the last such region this is over: connections that are made from then on are near ones.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::{ShmFabric, ShmName};
use crate::fabric::{
    Access, Capabilities, CloseReason, Completion, ConnectionId, EventBatch, Fabric, FabricError,
    FabricEvent, Lack, Rail, ReadBatch, Region, RegionId, RemoteSpan, Wake, WindowId,
};
use crate::limits::CONNECTIONS_MAX;
use crate::memory::{Climb, ForeignFabric, Mapping, Pinner, Registrable, Rung, RungRefused};
use crate::sys::avoided::Avoided;
use crate::sys::clock::coarse;
use crate::sys::watch::Watch;
use crate::types::{NodeId, Reach};

/// Set in the slots of near connections; no fabric has so many.
const NEAR: u32 = 1 << 31;

/// Where a peer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerEndpoint<E> {
    /// Who it is: by this it is found on this host.
    pub node: NodeId,
    /// Where the far fabric finds it.
    pub address: E,
}

/// A near connection that we began.
#[derive(Debug)]
struct Dialed {
    connection: ConnectionId,
    node: NodeId,
    is_up: bool,
}

/// Why the near fabric is out of use while cards reach memory of another driver's device.
const CANNOT_BE_MAPPED: &str =
    "RDMA devices reach GPU memory of this node where it lies, and peers cannot map that";

/// The near fabric, and what is known of the peers on it.
#[derive(Debug)]
struct Near {
    fabric: ShmFabric,
    /// Whether connections are begun over shared memory alone.
    only: bool,
    dialed: Vec<Dialed>,
    /// Peers to which shared memory did not work: they are reached the other way for a while.
    avoided: Avoided<NodeId>,
    /// Regions of the far fabric that peers cannot map.
    foreign: Vec<RegionId>,
    /// Why it is out of use; `None` while it is in use.
    out_of_use: Option<String>,
}

/// A fabric with shared memory beside it; without, it is that fabric.
pub struct WithShm<F: Fabric> {
    far: F,
    /// The near one, or why there is none.
    near: Result<Near, String>,
}

impl<F: Fabric> fmt::Debug for WithShm<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let far = self.far.capabilities().transport;
        f.debug_struct("WithShm").field("far", &far).field("near", &self.near).finish()
    }
}

impl<F: Fabric<Memory = Mapping> + Watch> WithShm<F> {
    /// Puts a shm fabric beside another one, or says why there is none. Neither has connections yet, and
    /// the near one has adopted all regions that the far one has, but for those that
    /// [`Self::note_foreign`] is told of next.
    /// `near_only`: peers that are not on this host are not connected to.
    ///
    /// # Errors
    /// [`FabricError::Os`] where the one cannot wait for the other.
    pub fn new(
        mut far: F,
        near: Result<ShmFabric, String>,
        near_only: bool,
    ) -> Result<Self, FabricError> {
        if let Ok(near) = &near {
            far.watch(near.as_fd())?;
        }
        let near = near.map(|fabric| Near {
            fabric,
            only: near_only,
            dialed: Vec::new(),
            avoided: Avoided::new(CONNECTIONS_MAX),
            foreign: Vec::new(),
            out_of_use: None,
        });
        Ok(Self { far, near })
    }

    /// The far fabric has a region of another driver's memory: until it is deregistered, shared memory
    /// is out of use.
    pub fn note_foreign(&mut self, region: RegionId) {
        if let Ok(near) = &mut self.near {
            near.note_foreign(region);
        }
    }

    /// The far fabric.
    pub fn far(&self) -> &F {
        &self.far
    }

    /// The near fabric.
    pub fn near(&self) -> Option<&ShmFabric> {
        self.near.as_ref().ok().map(|near| &near.fabric)
    }

    /// The near fabric and its own number of a connection; `None` for one of the far fabric.
    fn of_near(&mut self, id: ConnectionId) -> Option<(&mut Near, ConnectionId)> {
        let near = self.near.as_mut().ok().filter(|_| id.slot & NEAR != 0)?;
        Some((near, ConnectionId { slot: id.slot & !NEAR, ..id }))
    }
}

/// The number by which the caller knows a near connection.
fn outer(id: ConnectionId) -> ConnectionId {
    ConnectionId { slot: id.slot | NEAR, ..id }
}

impl Near {
    /// A connection to a node, where it can be had over shared memory.
    fn connect(&mut self, node: NodeId) -> Option<ConnectionId> {
        if self.out_of_use.is_some() || self.avoided.contains(&node, coarse()) {
            return None;
        }
        let connection = self.fabric.connect_here(&ShmName::of_node(node))?;
        self.dialed.push(Dialed { connection, node, is_up: false });
        Some(connection)
    }

    fn note_connected(&mut self, connection: ConnectionId) {
        let mut dialed = self.dialed.iter_mut();
        if let Some(dialed) = dialed.find(|dialed| dialed.connection == connection) {
            dialed.is_up = true;
        }
    }

    /// A region that peers cannot map: the first one puts shared memory out of use.
    fn note_foreign(&mut self, region: RegionId) {
        if self.foreign.is_empty() {
            tracing::info!(why = CANNOT_BE_MAPPED, "no shared memory with peers on this host now");
            self.out_of_use = Some(CANNOT_BE_MAPPED.to_owned());
            self.fabric.stop();
        }
        self.foreign.push(region);
    }

    /// A region is gone: the last one that peers could not map brings shared memory back.
    fn deregister(&mut self, region: RegionId) {
        self.fabric.deregister(region);
        let foreign = self.foreign.len();
        self.foreign.retain(|other| *other != region);
        if foreign == 0 || !self.foreign.is_empty() {
            return;
        }
        self.out_of_use = match self.fabric.listen() {
            Ok(()) => {
                tracing::info!("shared memory with peers on this host again");
                None
            }
            Err(error) => {
                tracing::warn!(%error, "no shared memory with peers on this host");
                Some(error.to_string())
            }
        };
    }

    /// Notes the end of a connection, and answers why it ended, given that there is another way to a peer
    /// to which this one did not work: that one is avoided for a while.
    fn note_closed(&mut self, connection: ConnectionId, reason: CloseReason) -> CloseReason {
        let Some(at) = self.dialed.iter().position(|dialed| dialed.connection == connection) else {
            return reason;
        };
        let dialed = self.dialed.swap_remove(at);
        let failed = match reason {
            CloseReason::Requested | CloseReason::Moved => false,
            CloseReason::Violation | CloseReason::Exhausted => true,
            _ => !dialed.is_up,
        };
        if !failed {
            return reason;
        }
        tracing::debug!(node = %dialed.node, ?reason, "no shared memory with this peer");
        self.avoided.add(dialed.node, coarse());
        if self.only || dialed.is_up { reason } else { CloseReason::Moved }
    }

    /// Polls without waiting, and gives the events the numbers by which the caller knows them.
    fn poll(&mut self, batch: &mut EventBatch) -> Result<(), FabricError> {
        let before = batch.events.len();
        self.fabric.poll(batch, Duration::ZERO)?;
        for event in batch.events.iter_mut().skip(before) {
            match event {
                FabricEvent::Connected { connection } => {
                    self.note_connected(*connection);
                    *connection = outer(*connection);
                }
                FabricEvent::Accepted { connection }
                | FabricEvent::Message { connection, .. }
                | FabricEvent::Completed(Completion { connection, .. }) => {
                    *connection = outer(*connection);
                }
                // A near fabric has no windows.
                FabricEvent::Revoked { .. } => {}
                FabricEvent::Closed { connection, reason } => {
                    *reason = self.note_closed(*connection, *reason);
                    *connection = outer(*connection);
                }
            }
        }
        Ok(())
    }
}

/// Peers cannot map another driver's memory: where nothing but that is wanted there is no way into it.
fn not_mapped(rungs: &[Rung]) -> Climb {
    let refused = |rung: &Rung| RungRefused {
        rung: *rung,
        nic: "shared memory".to_owned(),
        call: "mapping it for peers on this host".to_owned(),
        errno: None,
        why: "it is a device's, and this node reaches its peers over shared memory alone"
            .to_owned(),
    };
    Climb { refused: rungs.iter().map(refused).collect(), ..Climb::default() }
}

impl<F: ForeignFabric + Watch> ForeignFabric for WithShm<F> {
    /// What the far fabric has pinned, and the mapping and access for the near one; none for another
    /// driver's memory.
    type Pinned = (F::Pinned, Option<(Arc<Mapping>, Access)>);

    fn pinner(&self, access: Access) -> Pinner<Self::Pinned> {
        let only = self.near.as_ref().is_ok_and(|near| near.only);
        let pin = self.far.pinner(access);
        Box::new(move |memory, rungs| {
            let mapping = match memory {
                Registrable::Host(mapping) => Some((Arc::clone(mapping), access)),
                Registrable::Foreign(_) if only => return Ok((None, not_mapped(rungs))),
                Registrable::Foreign(_) => None,
            };
            let (pinned, climb) = pin(memory, rungs)?;
            Ok((pinned.map(|pinned| (pinned, mapping)), climb))
        })
    }

    fn adopt(&mut self, (pinned, mapping): Self::Pinned) -> Result<Region, FabricError> {
        let region = self.far.adopt(pinned)?;
        let Ok(near) = &mut self.near else { return Ok(region) };
        let Some((memory, access)) = mapping else {
            near.note_foreign(region.id);
            return Ok(region);
        };
        if let Err(error) = near.fabric.adopt(&region, memory, access) {
            self.far.deregister(region.id);
            return Err(error);
        }
        Ok(region)
    }

    fn disown(&mut self, region: RegionId) -> Option<Self::Pinned> {
        let left = self.far.disown(region);
        if let Ok(near) = &mut self.near {
            near.deregister(region);
        }
        Some((left?, None))
    }
}

impl<F: Fabric<Memory = Mapping> + Watch> Fabric for WithShm<F> {
    type Endpoint = PeerEndpoint<F::Endpoint>;
    type Memory = Mapping;

    /// What holds on both.
    fn capabilities(&self) -> Capabilities {
        let far = self.far.capabilities();
        let Ok(Near { fabric, only, .. }) = &self.near else { return far };
        let near = fabric.capabilities();
        Capabilities {
            transport: if *only { near.transport } else { far.transport },
            reads_outstanding: far.reads_outstanding.min(near.reads_outstanding),
            segments: far.segments.min(near.segments),
            read_bytes: far.read_bytes.min(near.read_bytes),
            // Keys end on the far fabric alone; who wants them has no near one.
            windows: far.windows.min(near.windows),
            opening: far.opening.max(near.opening),
        }
    }

    fn transport(&self, connection: ConnectionId) -> &'static str {
        match &self.near {
            Ok(near) if connection.slot & NEAR != 0 => near.fabric.capabilities().transport,
            _ => self.far.transport(connection),
        }
    }

    fn rails(&self, connection: ConnectionId) -> Vec<Rail> {
        match &self.near {
            Ok(_) if connection.slot & NEAR != 0 => Vec::new(),
            _ => self.far.rails(connection),
        }
    }

    fn lacks(&self, connection: ConnectionId) -> Vec<Lack> {
        match &self.near {
            Ok(_) if connection.slot & NEAR != 0 => Vec::new(),
            _ => self.far.lacks(connection),
        }
    }

    fn shared_memory(&self) -> Result<(), &str> {
        match &self.near {
            Ok(Near { out_of_use: None, .. }) => Ok(()),
            Ok(Near { out_of_use: Some(why), .. }) | Err(why) => Err(why),
        }
    }

    fn reach(&self, connection: ConnectionId) -> Reach {
        match &self.near {
            Ok(near) if connection.slot & NEAR != 0 => near.fabric.reach(connection),
            _ => self.far.reach(connection),
        }
    }

    fn register(&mut self, memory: Arc<Mapping>, access: Access) -> Result<Region, FabricError> {
        let region = self.far.register(Arc::clone(&memory), access)?;
        let Ok(near) = &mut self.near else { return Ok(region) };
        if let Err(error) = near.fabric.adopt(&region, memory, access) {
            self.far.deregister(region.id);
            return Err(error);
        }
        Ok(region)
    }

    fn deregister(&mut self, region: RegionId) {
        self.far.deregister(region);
        if let Ok(near) = &mut self.near {
            near.deregister(region);
        }
    }

    fn connect(&mut self, to: &Self::Endpoint) -> Result<ConnectionId, FabricError> {
        let Ok(near) = &mut self.near else { return self.far.connect(&to.address) };
        match near.connect(to.node) {
            Some(id) => Ok(outer(id)),
            // It ends at once, as one to a peer that cannot be reached.
            None if near.only => near.fabric.connect(&ShmName::of_node(to.node)).map(outer),
            None => self.far.connect(&to.address),
        }
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        match self.of_near(connection) {
            Some((near, id)) => near.fabric.admit(id),
            None => self.far.admit(connection),
        }
    }

    fn grant(
        &mut self,
        connection: ConnectionId,
        window: WindowId,
        span: &RemoteSpan,
    ) -> Result<u32, FabricError> {
        match self.of_near(connection) {
            Some((near, id)) => near.fabric.grant(id, window, span),
            None => self.far.grant(connection, window, span),
        }
    }

    fn revoke(&mut self, connection: ConnectionId, window: WindowId) -> Result<(), FabricError> {
        match self.of_near(connection) {
            Some((near, id)) => near.fabric.revoke(id, window),
            None => self.far.revoke(connection, window),
        }
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        match self.of_near(connection) {
            Some((near, id)) => near.fabric.send(id, message),
            None => self.far.send(connection, message),
        }
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        match self.of_near(connection) {
            Some((near, id)) => near.fabric.post(id, batch),
            None => self.far.post(connection, batch),
        }
    }

    fn close(&mut self, connection: ConnectionId) {
        match self.of_near(connection) {
            Some((near, id)) => near.fabric.close(id),
            None => self.far.close(connection),
        }
    }

    fn poll(&mut self, batch: &mut EventBatch, timeout: Duration) -> Result<(), FabricError> {
        let Ok(near) = &mut self.near else { return self.far.poll(batch, timeout) };
        let limit = near.fabric.wait_limit();
        self.far.poll(batch, timeout.min(limit))?;
        // Without a deadline, a READ or a ready descriptor the near fabric costs the far one nothing.
        if self.far.take_watched() || limit < Duration::MAX {
            near.poll(batch)?;
        }
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        self.far.waker()
    }
}
