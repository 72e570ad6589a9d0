//! One node's handle on the network.

use std::sync::Arc;
use std::time::Duration;

use super::{SimEndpoint, SimNetwork};
use crate::fabric::{
    Access, Capabilities, ConnectionId, EventBatch, Fabric, FabricError, Lack, LackReason, Rail,
    ReadBatch, Region, RegionId, RemoteSpan, Wake, WindowId,
};
use crate::memory::Mapping;

/// A node's fabric. Dropping it is the node's death.
#[derive(Debug)]
pub struct SimFabric {
    network: SimNetwork,
    at: SimEndpoint,
    life: u32,
}

impl SimFabric {
    pub(super) fn new(network: SimNetwork, at: SimEndpoint, life: u32) -> Self {
        Self { network, at, life }
    }

    /// Where this node is.
    #[must_use]
    pub fn endpoint(&self) -> SimEndpoint {
        self.at
    }
}

impl Drop for SimFabric {
    fn drop(&mut self) {
        self.network.0.borrow_mut().kill(self.at, self.life);
    }
}

/// A poll never waits here, so there is nothing to end.
#[derive(Debug)]
struct NeverWaits;

impl Wake for NeverWaits {
    fn wake(&self) {}
}

/// Calls on a node that another start of it has replaced answer [`FabricError::Closed`].
impl Fabric for SimFabric {
    type Endpoint = SimEndpoint;
    type Memory = Mapping;

    fn capabilities(&self) -> Capabilities {
        let state = self.network.0.borrow();
        Capabilities {
            transport: "sim",
            reads_outstanding: state.config.reads_outstanding,
            segments: state.config.read_segments,
            windows: state.config.windows,
            read_bytes: state.config.read_bytes,
            opening: Duration::ZERO,
        }
    }

    fn rails(&self, connection: ConnectionId) -> Vec<Rail> {
        let state = self.network.0.borrow();
        let rails = state.open_end(self.at, connection).ok().and_then(|end| state.ends.get(end));
        let rail = |nic| Rail {
            local: format!("sim{nic}"),
            remote: format!("sim{nic}"),
            queue_pairs: 1,
            reason: "simulated".to_owned(),
        };
        (0..rails.map_or(0, |end| end.rails)).map(rail).collect()
    }

    fn lacks(&self, connection: ConnectionId) -> Vec<Lack> {
        let has = self.rails(connection).len();
        let lack = |nic| Lack { local: format!("sim{nic}"), reason: LackReason::None };
        (has..self.network.0.borrow().rails).map(lack).collect()
    }

    fn register(&mut self, memory: Arc<Mapping>, access: Access) -> Result<Region, FabricError> {
        self.network.0.borrow_mut().register((self.at, self.life), memory, access)
    }

    /// Bytes of a READ that is on its way into the region still land there, until its completion is
    /// polled.
    fn deregister(&mut self, region: RegionId) {
        self.network.0.borrow_mut().deregister((self.at, self.life), region);
    }

    fn connect(&mut self, to: &SimEndpoint) -> Result<ConnectionId, FabricError> {
        self.network.0.borrow_mut().connect((self.at, self.life), *to)
    }

    fn admit(&mut self, connection: ConnectionId) -> Result<(), FabricError> {
        self.network.0.borrow_mut().admit(self.at, connection)
    }

    fn grant(
        &mut self,
        connection: ConnectionId,
        window: WindowId,
        span: &RemoteSpan,
    ) -> Result<u32, FabricError> {
        self.network.0.borrow_mut().grant(self.at, connection, (window, span))
    }

    fn revoke(&mut self, connection: ConnectionId, window: WindowId) -> Result<(), FabricError> {
        self.network.0.borrow_mut().revoke(self.at, connection, window)
    }

    fn send(&mut self, connection: ConnectionId, message: &[u8]) -> Result<(), FabricError> {
        self.network.0.borrow_mut().send(self.at, connection, message)
    }

    fn post(&mut self, connection: ConnectionId, batch: &ReadBatch) -> Result<(), FabricError> {
        self.network.0.borrow_mut().post(self.at, connection, batch)
    }

    fn close(&mut self, connection: ConnectionId) {
        self.network.0.borrow_mut().close(self.at, connection);
    }

    /// Never waits: time passes in the network alone.
    fn poll(&mut self, batch: &mut EventBatch, _timeout: Duration) -> Result<(), FabricError> {
        self.network.0.borrow_mut().poll(self.at, self.life, batch);
        Ok(())
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::new(NeverWaits)
    }
}
