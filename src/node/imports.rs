//! Memory of local engines: host memory always, GPU memory where this host has a driver for it.
//!
//! The driver is opened when the first engine asks for it, and the pools are registered with it then,
//! once. A host without a GPU never pays for either.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::gpu::Gpu;
use super::residency::Residency;
use crate::memory::{Claim, Claims, EngineMemory, Identity, ImportError, Owner, SharedMemory};
use crate::protocol::door::MemorySource;

/// What engines have imported, and what they import GPU memory with.
#[derive(Debug)]
pub(super) struct Imports {
    claims: Claims,
    /// The pools are nobody's to import.
    _pools: Vec<Claim>,
    /// Whose pools engines' copies go to, and who hears of GPUs that these find lost.
    residency: Arc<Residency>,
    /// The library of the driver, where it is not the one that the loader finds.
    driver: Option<PathBuf>,
    #[cfg(feature = "gpu")]
    devices: std::sync::OnceLock<Result<crate::cuda::EngineDevices, String>>,
}

impl Imports {
    /// Where the node has a GPU of its own, the pools are registered with its driver already.
    pub(super) fn new(
        residency: &Arc<Residency>,
        driver: Option<PathBuf>,
        gpu: Option<&Gpu>,
    ) -> Self {
        #[cfg(feature = "gpu")]
        let devices = gpu.map(|gpu| Ok(gpu.devices(residency))).map(std::sync::OnceLock::from);
        #[cfg(not(feature = "gpu"))]
        let _without: Option<&Gpu> = gpu;
        let (claims, pools) = (Claims::default(), &residency.pools);
        let node = Arc::new(Owner::default());
        let identities = pools.iter().filter_map(|pool| Identity::of_file(pool.memfd()).ok());
        let claimed =
            identities.filter_map(|identity| claims.claim(identity, &node).ok()).collect();
        Self {
            claims,
            _pools: claimed,
            residency: Arc::clone(residency),
            driver,
            #[cfg(feature = "gpu")]
            devices: devices.unwrap_or_default(),
        }
    }

    pub(super) fn import(
        &self,
        owner: &Arc<Owner>,
        (source, bytes): (&MemorySource, u64),
        file: Option<OwnedFd>,
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        match (source, file) {
            (MemorySource::Memfd, Some(file)) => {
                Ok(Arc::new(SharedMemory::import(file, bytes, (&self.claims, owner))?))
            }
            (MemorySource::Memfd, None) => Err(ImportError::NotMemory),
            (source, file) => self.import_from_gpu(owner, (source, bytes), file),
        }
    }

    #[cfg(feature = "gpu")]
    fn import_from_gpu(
        &self,
        owner: &Arc<Owner>,
        (source, bytes): (&MemorySource, u64),
        file: Option<OwnedFd>,
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        use crate::cuda::{Driver, EngineDevices, LIBRARY_NAME, OnLoss};

        let devices = self.devices.get_or_init(|| {
            let library = self.driver.as_deref().unwrap_or(std::path::Path::new(LIBRARY_NAME));
            let driver = Driver::open(library).map_err(|error| error.to_string())?;
            let pools = self.residency.pools.iter().map(|pool| Arc::clone(pool.mapping()));
            let on_loss = Arc::clone(&self.residency) as Arc<dyn OnLoss>;
            EngineDevices::new(driver, &pools.collect::<Vec<_>>(), Some(on_loss))
                .map_err(|error| error.to_string())
        });
        let devices = devices.as_ref().map_err(|why| ImportError::NoGpu(why.clone()))?;
        devices.import((source, bytes), file, (&self.claims, owner))
    }

    #[cfg(not(feature = "gpu"))]
    fn import_from_gpu(
        &self,
        _owner: &Arc<Owner>,
        (_source, _bytes): (&MemorySource, u64),
        _file: Option<OwnedFd>,
    ) -> Result<Arc<dyn EngineMemory>, ImportError> {
        let _unused = (&self.residency, &self.driver);
        Err(ImportError::NoGpu("this binary was built without the feature gpu".to_owned()))
    }
}
