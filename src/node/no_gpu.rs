//! In the place of the node's GPU, where the binary is built without the feature `gpu`: there is none, and
//! whoever asks for one is told so.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use super::in_place::Stages;
use super::options::{GpuOptions, NodeError};
use super::transport::{GpuMemory, GpuRegions};
use crate::fabric::{RegisteredSpan, RemoteSpan};
use crate::memory::{HostPool, Pool, Reservation};
use crate::peer::Settled;
use crate::protocol::door::stat::GpuStat;
use crate::protocol::door::{AcquireOutcome, DeviceUuid};
use crate::runtime::door::Imported;
use crate::store::Found;
use crate::types::{Extent, ResidentId};

use super::residency::Residency;

/// No GPU.
#[derive(Debug)]
pub(super) struct Gpu(Infallible);

/// No block arrives on it.
#[derive(Debug)]
pub(super) struct Arriving(Infallible);

/// No tier of blocks.
#[derive(Debug)]
pub(super) struct Tier(Infallible);

/// No copies of its blocks.
#[derive(Debug)]
pub(super) struct Shadows(Infallible);

impl Gpu {
    pub(super) fn open(
        options: &GpuOptions,
        _driver: Option<&Path>,
        _pools: &[Arc<HostPool>],
    ) -> Result<Self, NodeError> {
        let why = "this binary was built without the feature gpu".to_owned();
        Err(NodeError::Gpu { ordinal: options.ordinal, why })
    }

    pub(super) fn memory(&self) -> GpuMemory {
        match self.0 {}
    }

    pub(super) fn pool(&self) -> Arc<dyn Pool + Send + Sync> {
        match self.0 {}
    }

    pub(super) fn shadows(&self) -> Arc<Shadows> {
        match self.0 {}
    }

    pub(super) fn uuid(&self) -> DeviceUuid {
        match self.0 {}
    }

    pub(super) fn stages(&self) -> Stages {
        match self.0 {}
    }

    pub(super) fn stat(&self, _regions: &GpuRegions) -> GpuStat {
        match self.0 {}
    }

    pub(super) fn into_tier(self, _regions: &GpuRegions, _residency: Arc<Residency>) -> Tier {
        match self.0 {}
    }
}

impl Arriving {
    pub(super) fn checksum(&self) -> u64 {
        match self.0 {}
    }

    pub(super) fn into_reservation(self) -> Option<Reservation> {
        match self.0 {}
    }
}

impl Tier {
    pub(super) fn is_lost(&self) -> bool {
        match self.0 {}
    }

    pub(super) fn reserve(&mut self, _len: u32, _victims: &mut usize) -> Option<Arriving> {
        match self.0 {}
    }

    pub(super) fn arrive_in(&mut self, _place: &Extent, _lies: &Arc<Imported>) -> Option<Arriving> {
        match self.0 {}
    }

    pub(super) fn span(&self, _memory: &Arriving) -> RegisteredSpan {
        match self.0 {}
    }

    pub(super) fn settle(&mut self, _memory: &mut Arriving) -> Settled {
        match self.0 {}
    }

    pub(super) fn prepare(&mut self, _found: &Found) -> bool {
        match self.0 {}
    }

    pub(super) fn lets_go(&mut self, _resident: ResidentId) -> bool {
        match self.0 {}
    }

    pub(super) fn look_again(&mut self) {
        match self.0 {}
    }

    pub(super) fn prepare_in_place(&mut self, _found: &Found, _lies: &Imported) -> bool {
        match self.0 {}
    }

    pub(super) fn staged(&self, _extent: &Extent) -> Option<RemoteSpan> {
        match self.0 {}
    }

    pub(super) fn pause_ms(&self) -> u32 {
        match self.0 {}
    }

    pub(super) fn remote(&self, _extent: &Extent) -> Option<RemoteSpan> {
        match self.0 {}
    }
}

impl Shadows {
    pub(super) async fn in_host_memory(
        self: Arc<Self>,
        _residency: &Residency,
        _outcomes: &mut [AcquireOutcome],
    ) {
        match self.0 {}
    }

    pub(super) fn has(&self, _hold: ResidentId) -> bool {
        match self.0 {}
    }

    pub(super) fn release(&self, _holds: &[ResidentId]) {
        match self.0 {}
    }
}
