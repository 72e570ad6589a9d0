//! The node's GPU: a pool of its memory beside the host pools, in which blocks from peers land, and out
//! of which they are served.
//!
//! A block of that pool is a resident like any other; only its bytes are elsewhere. What that changes:
//!
//! - **Landing.** Where every card reaches the pool, READs go straight into it; else they go into a slot
//!   of staging memory, and a copy follows. Either way the bytes are verified in host memory, once: as
//!   they land in the slot, or after a copy out of the pool. Only then, and after the copy in, the block
//!   is told of. That takes as long as a copy; the data thread goes on meanwhile, and looks again each
//!   round ([`Tier::settle`]).
//! - **Serving.** Where cards do not reach the pool a copy of the block in staging memory is lent
//!   ([`Tier::prepare`]). It stays as long as the resident is pinned: by then every lease of it is over.
//!   The same goes for blocks that lie in an engine's memory on this GPU where cards do not reach that
//!   ([`Tier::prepare_in_place`]): they are gathered in the order of their bytes. A block that its engine
//!   has back stays a resident until that copy has ended ([`Tier::lets_go`]).
//! - **Local engines** that have no part in the GPU get a copy in a host pool ([`shadow`]).
//!
//! The pool has victims of its own: a full one evicts its own residents, as the host pools evict theirs.
//! Staging that is exhausted lets arriving blocks land in host pools, and makes lends wait: they are
//! answered as busy after [`crate::limits::PREPARE_TIMEOUT`], with the time to pause.
//!
//! # When the GPU is lost
//!
//! A copy that the driver refuses fails its block and nothing else. An error after which nothing on the
//! GPU succeeds any more ([`CudaError::is_lost`]), or one that hides whether copies have ended, loses the
//! GPU to this process: whoever meets it says so once, be it the data thread or a copy for an engine;
//! blocks under way fail, nothing lands there or is lent from there, and the residents in its memory are
//! evicted, which withdraws them from the registry; what engines have published in place there is taken
//! back ([`super::in_place`]). A local reader that still finds one there takes it out
//! itself, and looks for it elsewhere; copies that engines hold stay good.
//! The node goes on with its host pools until it is started again. Memory that copies in flight may touch
//! stays theirs.

mod block;
mod shadow;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
mod tier;

use std::path::Path;
use std::sync::Arc;

use crate::cuda::{
    Context, CudaError, Driver, EngineDevices, GpuPool, HostRegistration, LIBRARY_NAME, OnLoss,
    Staging,
};
use crate::memory::{ForeignMemory, HostPool, Pool};
use crate::protocol::door::DeviceUuid;
use crate::protocol::door::stat::{GpuStat, GpuWayRefused, GpuWayStat};
use crate::types::PoolId;

pub(super) use shadow::Shadows;
pub(super) use tier::{Arriving, Tier};

use super::in_place::Stages;
use super::options::{GpuOptions, NodeError};
use super::residency::Residency;
use super::transport::{GpuMemory, GpuRegions};
use block::Block;
use tier::{LeavingAt, TierParts};

/// Says, once, that the node's GPU is lost, if that is what an error means.
fn note_loss(residency: &Residency, error: &CudaError) {
    if error.is_lost() {
        lose(residency, error);
    }
}

/// Says, once, that the node's GPU is lost.
fn lose(residency: &Residency, error: &CudaError) {
    if residency.lose_device() {
        say_lost(error);
    }
}

fn say_lost(error: &CudaError) {
    tracing::error!(
        %error,
        "a GPU is lost: the blocks in its memory are gone, host memory serves on; start the node again \
         to have the GPU back"
    );
}

/// Copies for engines may be the first to meet a loss, and are the only ones who can where the GPU is not
/// the node's own.
impl OnLoss for Residency {
    fn lost(&self, gpu: DeviceUuid, error: &CudaError) {
        if self.lose_gpu(gpu) {
            say_lost(error);
        }
    }
}

/// The GPU, its pool and the staging memory, before the data thread has them.
#[derive(Debug)]
pub(super) struct Gpu {
    context: Arc<Context>,
    pool: Arc<GpuPool>,
    arriving: Staging<Block>,
    leaving: Staging<LeavingAt>,
    shadows: Arc<Shadows>,
    options: GpuOptions,
}

impl Gpu {
    /// Opens the driver, takes the memory, and registers the host pools with the driver.
    pub(super) fn open(
        options: &GpuOptions,
        driver: Option<&Path>,
        pools: &[Arc<HostPool>],
    ) -> Result<Self, NodeError> {
        let library = driver.unwrap_or(Path::new(LIBRARY_NAME));
        Self::try_open(options, library, pools)
            .map_err(|error| NodeError::Gpu { ordinal: options.ordinal, why: error.to_string() })
    }

    fn try_open(
        options: &GpuOptions,
        library: &Path,
        pools: &[Arc<HostPool>],
    ) -> Result<Self, CudaError> {
        let driver = Driver::open(library)?;
        let context = Context::primary(&driver.device(options.ordinal)?)?;
        let bound = context.bind()?;
        let pool = GpuPool::create(&bound, PoolId::GPU, options.pool_bytes)?;
        let arriving = Staging::new(&bound, pool.memory(), options.staging_bytes)?;
        let leaving = Staging::new(&bound, pool.memory(), options.staging_bytes)?;
        let register =
            |pool: &Arc<HostPool>| Ok((pool.id(), HostRegistration::new(&bound, pool.mapping())?));
        let hosts = pools.iter().map(register).collect::<Result<_, CudaError>>()?;
        let shadows = Arc::new(Shadows::new(&bound, &pool, hosts)?);
        drop(bound);
        Ok(Self { context, pool, arriving, leaving, shadows, options: *options })
    }

    /// Its memory as fabrics meet it.
    pub(super) fn memory(&self) -> GpuMemory {
        GpuMemory {
            pool: Arc::clone(self.pool.memory()) as Arc<dyn ForeignMemory>,
            direct: self.options.direct,
            arriving: Arc::clone(self.arriving.mapping()),
            leaving: Arc::clone(self.leaving.mapping()),
        }
    }

    /// Its pool.
    pub(super) fn pool(&self) -> Arc<dyn Pool + Send + Sync> {
        Arc::clone(&self.pool) as Arc<dyn Pool + Send + Sync>
    }

    /// Copies of its blocks for local engines.
    pub(super) fn shadows(&self) -> Arc<Shadows> {
        Arc::clone(&self.shadows)
    }

    /// The way to engines' memory, with the pools as they are registered.
    pub(super) fn devices(&self, residency: &Arc<Residency>) -> EngineDevices {
        let on_loss = Arc::clone(residency) as Arc<dyn OnLoss>;
        EngineDevices::sharing(Arc::clone(&self.context), self.shadows.hosts(), Some(on_loss))
    }

    /// Which it is, whoever looks.
    pub(super) fn uuid(&self) -> DeviceUuid {
        DeviceUuid(self.context.device().attributes().uuid)
    }

    /// What copies it can lend of blocks in engines' memory.
    pub(super) fn stages(&self) -> Stages {
        Stages { device: self.uuid(), block_bytes_max: self.leaving.mapping().len() }
    }

    /// What is told of it; said in the log, too.
    pub(super) fn stat(&self, regions: &GpuRegions) -> GpuStat {
        let attributes = self.context.device().attributes();
        for refused in &regions.climb.refused {
            tracing::info!(%refused, "a way into the GPU's memory cannot be had");
        }
        let staged = regions.direct.is_none();
        tracing::info!(gpu = %attributes.name, pci = %attributes.pci, staged, "GPU memory");
        let nics: Vec<_> = regions.climb.ways().collect();
        for GpuWayStat { nic, rung, near, near_why } in &nics {
            tracing::info!(nic, rung, near, why = near_why, "a NIC's way into the GPU's memory");
        }
        GpuStat {
            ordinal: self.options.ordinal,
            name: attributes.name.clone(),
            pci: attributes.pci.clone(),
            pool: PoolId::GPU.0,
            lost: false,
            way: if staged { "staging" } else { "direct" }.to_owned(),
            nics,
            refused: regions.climb.refused.iter().map(GpuWayRefused::from).collect(),
        }
    }

    /// What the data thread needs of it.
    pub(super) fn into_tier(self, regions: &GpuRegions, residency: Arc<Residency>) -> Tier {
        Tier::new(TierParts {
            context: self.context,
            pool: self.pool,
            direct: regions.direct,
            arriving: (self.arriving, regions.arriving),
            leaving: (self.leaving, regions.leaving),
            residency,
        })
    }
}
