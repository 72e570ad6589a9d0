//! What the GPU's driver says itself, and what RDMA devices say of its memory when they are asked.

use crate::memory::Climb;

/// A GPU as its driver sees it.
#[derive(Debug, Default)]
pub(super) struct GpuSaid {
    /// Its number.
    pub(super) ordinal: u32,
    /// What it is.
    pub(super) line: String,
    /// The way of each RDMA device into its memory; empty where there is no such device.
    pub(super) climb: Climb,
    /// Why no way was tried, where there is an RDMA device.
    pub(super) untried: Option<String>,
}

/// Asks the driver for its GPUs, and where `rdma` devices for their way into the memory of each: some
/// of it is allocated and registered for that, and given back.
///
/// # Errors
/// Why there is no GPU, as a sentence.
#[cfg(feature = "gpu")]
pub(super) fn ask(rdma: bool) -> Result<Vec<GpuSaid>, String> {
    asking::ask(rdma).map_err(|error| error.to_string())
}

/// Why there is no GPU in this binary.
#[cfg(not(feature = "gpu"))]
pub(super) fn ask(_rdma: bool) -> Result<Vec<GpuSaid>, String> {
    Err("this binary was built without the feature gpu".to_owned())
}

#[cfg(feature = "gpu")]
mod asking {
    use std::sync::Arc;

    use super::GpuSaid;
    use crate::cuda::{Context, CudaError, Device, DeviceMemory, Driver, LIBRARY_NAME};
    use crate::fabric::Access;
    use crate::memory::{Climb, ForeignFabric, ForeignMemory, GpuDirect};
    use crate::verbs::{VerbsConfig, VerbsFabric};

    pub(super) fn ask(rdma: bool) -> Result<Vec<GpuSaid>, CudaError> {
        let driver = Driver::open(LIBRARY_NAME)?;
        let (major, minor) = driver.version();
        let one = |ordinal| {
            let device = driver.device(ordinal)?;
            let it = device.attributes();
            let yes = |has: bool| if has { "yes" } else { "no" };
            let line = format!(
                "CUDA {major}.{minor}, GPU {ordinal}: {} at {}, GPU-direct {}, dma-buf {}",
                it.name,
                it.pci,
                yes(it.rdma && device.check_writes().is_ok()),
                yes(it.dma_buf)
            );
            let (climb, untried) = match rdma.then(|| climb(&device)) {
                None => (Climb::default(), None),
                Some(Ok(climb)) => (climb, None),
                Some(Err(why)) => (Climb::default(), Some(why)),
            };
            Ok(GpuSaid { ordinal, line, climb, untried })
        };
        (0..driver.device_count()?).map(one).collect()
    }

    /// Registers the least memory that the device hands out with each RDMA device.
    fn climb(device: &Device) -> Result<Climb, String> {
        let allocate = || DeviceMemory::allocate(&Context::primary(device)?.bind()?, 1);
        let memory = allocate().map_err(|error| error.to_string())?;
        let fabric = VerbsFabric::new(&VerbsConfig::default());
        let mut fabric = fabric.map_err(|error| error.to_string())?;
        let memory = memory as Arc<dyn ForeignMemory>;
        let rungs = GpuDirect::Auto.direct();
        let climbed = fabric.register_foreign(&memory, Access::RemoteRead, rungs);
        climbed.map(|(_region, climb)| climb).map_err(|error| error.to_string())
    }
}
