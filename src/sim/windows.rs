//! Keys that one end of a connection gives the other one.

use super::SimEndpoint;
use super::state::{Action, End, State};
use crate::fabric::{ConnectionId, FabricError, FabricEvent, RegionId, RemoteSpan, WindowId};

/// A key, and what it reads.
#[derive(Debug)]
pub(super) struct Granted {
    key: u32,
    region: RegionId,
    address: u64,
    len: u64,
    /// Whether its end was asked for.
    ending: bool,
}

impl End {
    /// The region that a span of the other end lies in, where a key reads all of it.
    pub(super) fn granted(&self, remote: &RemoteSpan) -> Option<RegionId> {
        let mut keys = self.windows.values();
        let granted = keys.find(|granted| granted.key == remote.rkey)?;
        let offset = remote.address.checked_sub(granted.address)?;
        (offset.checked_add(remote.len.into())? <= granted.len).then_some(granted.region)
    }
}

impl State {
    pub(super) fn grant(
        &mut self,
        at: SimEndpoint,
        on: ConnectionId,
        (window, span): (WindowId, &RemoteSpan),
    ) -> Result<u32, FabricError> {
        if self.config.windows == 0 {
            return Ok(span.rkey);
        }
        let index = self.open_end(at, on)?;
        let key = self.new_key();
        let no_such = || FabricError::Limit { what: "windows or regions", limit: 0 };
        let regions = self.nodes.get(&at).map(|node| node.regions.iter());
        let region = regions.ok_or(FabricError::Closed)?.find(|registered| {
            let offset = span.address.checked_sub(registered.region.address);
            offset.is_some_and(|offset| registered.region.remote(offset, span.len).is_some())
        });
        let region = region.ok_or_else(no_such)?.region.id;
        let end = self.ends.get_mut(index).ok_or(FabricError::Closed)?;
        if window.0 >= self.config.windows {
            return Err(no_such());
        }
        if end.windows.contains_key(&window) {
            return Err(FabricError::Full);
        }
        let (address, len) = (span.address, span.len.into());
        end.windows.insert(window, Granted { key, region, address, len, ending: false });
        Ok(key)
    }

    pub(super) fn revoke(
        &mut self,
        at: SimEndpoint,
        on: ConnectionId,
        window: WindowId,
    ) -> Result<(), FabricError> {
        let index = self.open_end(at, on)?;
        let end = self.ends.get_mut(index).ok_or(FabricError::Closed)?;
        if let Some(granted) = end.windows.get_mut(&window)
            && !granted.ending
        {
            granted.ending = true;
            let delay = self.delay();
            self.after(delay, Action::Revoke { end: index, window });
        }
        Ok(())
    }

    pub(super) fn revoked(&mut self, index: usize, window: WindowId) {
        let Some(end) = self.ends.get_mut(index) else { return };
        if end.windows.remove(&window).is_some() && end.phase == super::state::Phase::Open {
            let connection = Self::id(index, end.life);
            self.tell(index, FabricEvent::Revoked { connection, window }, Vec::new());
        }
    }
}
