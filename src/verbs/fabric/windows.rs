//! The windows of one connection: keys of their own for leases, each bound to one lane.
//!
//! A peer must read by the lane that a key is bound to. The lowest bits of a key are ours to choose,
//! so they name the lane, and the rest of the lowest byte counts the window's binds: with two lanes a
//! key comes back after 128 binds of its window, and then for other memory. The hello says whether a
//! node's keys are made so.
//!
//! A bind is executed on its lane, the message that carries the key leaves on another queue pair; so
//! messages are held until the binds before them have completed. Windows are made when a peer is
//! admitted, and freed before the queue pairs that they are bound to.

use std::sync::Arc;

use super::lane::Lane;
use super::nics::Nics;
use super::regions::Regions;
use super::wr_id::Work;
use crate::fabric::{FabricError, RegionId, RemoteSpan, WindowId};
use crate::verbs::{Bind, MemoryWindow, ProtectionDomain, QueuePair, VerbsError};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not bound: it may be granted.
    Free,
    /// Granted; its bind may not have completed.
    Bound,
    /// Its invalidation has not completed.
    Ending,
}

#[derive(Debug)]
struct Window {
    /// That of its lane's NIC.
    domain: Arc<ProtectionDomain>,
    /// `None` once its region is deregistered.
    device: Option<MemoryWindow>,
    state: State,
    region: RegionId,
    binds: u32,
}

/// The windows.
#[derive(Debug)]
pub(super) struct Windows {
    all: Vec<Window>,
    /// Revoked without the device's help.
    revoked: Vec<WindowId>,
}

/// The bits of a key that name one of so many lanes.
pub(super) const fn lane_bits(lanes: usize) -> u32 {
    usize::BITS - lanes.saturating_sub(1).leading_zeros()
}

/// The lane that a window's key is bound to.
pub(super) const fn lane_of(key: u32, lanes: usize) -> usize {
    (key & ((1 << lane_bits(lanes)) - 1)) as usize
}

/// The key of a window's next bind to a lane.
const fn next_key(key: u32, binds: u32, lane: u32, lanes: usize) -> u32 {
    key & !0xff | (binds << lane_bits(lanes) | lane) & 0xff
}

fn no_such() -> FabricError {
    FabricError::Limit { what: "windows, or outside of every served region", limit: 0 }
}

impl Windows {
    pub(super) fn new(nics: &Nics, lanes: &[Lane]) -> Result<Self, VerbsError> {
        let domains = lanes.iter().cycle().map(|lane| nics.get(lane.rail().nic));
        let all = domains
            .take(usize::from(nics.windows))
            .flatten()
            .map(|nic| {
                let (device, region) = (Some(MemoryWindow::new(&nic.domain)?), RegionId(0));
                let domain = Arc::clone(&nic.domain);
                Ok(Window { domain, device, state: State::Free, region, binds: 0 })
            })
            .collect::<Result<_, VerbsError>>()?;
        Ok(Self { all, revoked: Vec::new() })
    }

    fn find(&mut self, id: WindowId) -> Option<&mut Window> {
        self.all.get_mut(usize::from(id.0))
    }

    /// Posts a window's bind; answers its key.
    pub(super) fn grant(
        &mut self,
        id: WindowId,
        span: &RemoteSpan,
        lanes: &[Lane],
        regions: &Regions,
    ) -> Result<u32, FabricError> {
        let (index, lane, pair) = lane_for(id, lanes)?;
        let (region, memory) = regions.windowed(span, lane.rail().nic).ok_or_else(no_such)?;
        let window = self.find(id).ok_or_else(no_such)?;
        if window.state != State::Free {
            return Err(FabricError::Full);
        }
        let device = match window.device.take() {
            Some(device) => device,
            None => MemoryWindow::new(&window.domain)?,
        };
        let device = window.device.insert(device);
        let old = device.key();
        let mut key = old;
        while key == old {
            window.binds = window.binds.wrapping_add(1);
            key = next_key(old, window.binds, index, lanes.len());
        }
        pair.post_bind(&Bind {
            wr_id: Work::Bind { window: id.0 }.encode(),
            window: device,
            region: memory,
            key,
            address: span.address,
            len: span.len.into(),
        })?;
        (window.state, window.region) = (State::Bound, region);
        Ok(key)
    }

    /// Posts the invalidation of a window's key.
    pub(super) fn revoke(&mut self, id: WindowId, lanes: &[Lane]) -> Result<(), FabricError> {
        let window = self.all.get_mut(usize::from(id.0)).ok_or_else(no_such)?;
        if window.state != State::Bound {
            return Ok(());
        }
        let Some(device) = &window.device else {
            window.state = State::Free;
            self.revoked.push(id);
            return Ok(());
        };
        let (_, _, pair) = lane_for(id, lanes)?;
        pair.post_invalidate(Work::Invalidate { window: id.0 }.encode(), device.key())?;
        window.state = State::Ending;
        Ok(())
    }

    /// An invalidation has completed: whether it is news.
    pub(super) fn ended(&mut self, id: WindowId) -> bool {
        let ending = self.find(id).filter(|window| window.state == State::Ending);
        ending.map(|window| window.state = State::Free).is_some()
    }

    /// A region is deregistered: keys to it end here and now.
    pub(super) fn forget(&mut self, region: RegionId) {
        for (id, window) in (0..).map(WindowId).zip(&mut self.all) {
            if window.state != State::Free && window.region == region {
                window.device = None;
                if window.state == State::Ending {
                    window.state = State::Free;
                    self.revoked.push(id);
                }
            }
        }
    }

    /// What was revoked without a completion.
    pub(super) fn take_revoked(&mut self) -> impl Iterator<Item = WindowId> {
        self.revoked.drain(..)
    }
}

/// The lane of a window, and its queue pair: windows go over the lanes in turn.
fn lane_for(id: WindowId, lanes: &[Lane]) -> Result<(u32, &Lane, &QueuePair), FabricError> {
    let index = usize::from(id.0).checked_rem(lanes.len()).ok_or(FabricError::Closed)?;
    let lane = lanes.get(index).ok_or(FabricError::Closed)?;
    let pair = lane.pair().ok_or(FabricError::Closed)?;
    Ok((u32::try_from(index).map_err(|_beyond| FabricError::Closed)?, lane, pair))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_its_window_and_lane_and_comes_back_late() {
        for lanes in 1..=16_usize {
            for lane in 0..u32::try_from(lanes).unwrap() {
                let mut key = 0x1234_5600;
                let mut seen = Vec::new();
                for binds in 1.. {
                    key = next_key(key, binds, lane, lanes);
                    if seen.contains(&key) {
                        break;
                    }
                    assert_eq!((key >> 8, lane_of(key, lanes)), (0x12_3456, lane as usize));
                    seen.push(key);
                }
                assert_eq!(seen.len(), 256 / lanes.next_power_of_two());
            }
        }
    }
}
