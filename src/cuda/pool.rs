//! A pool of a device's memory: allocated once, registered with the cards once, handed out in extents.
//!
//! It is to a GPU what [`crate::memory::HostPool`] is to the host, with the same space and the same
//! reservations; its bytes are reached by copies and by cards alone.

use std::sync::Arc;

use super::{Bound, CudaError, DeviceMemory};
use crate::memory::{ExportRefused, ExportedRange, ExtentSpace, ForeignMemory, Pool};
use crate::types::PoolId;

/// A pool of a device's memory. Its memory ends with it, after everything that was reserved.
#[derive(Debug)]
pub struct GpuPool {
    space: ExtentSpace,
    memory: Arc<DeviceMemory>,
}

impl GpuPool {
    /// Allocates at least `bytes` bytes, as [`DeviceMemory::allocate`] does.
    ///
    /// # Errors
    /// [`CudaError::Call`]; [`CudaError::is_out_of_memory`] where the device has too little.
    pub fn create(bound: &Bound<'_>, id: PoolId, bytes: u64) -> Result<Arc<Self>, CudaError> {
        let memory = DeviceMemory::allocate(bound, bytes)?;
        Ok(Arc::new(Self { space: ExtentSpace::new(id, memory.len()), memory }))
    }

    /// Its memory, to register and to copy. It outlives the pool while anyone holds it.
    #[must_use]
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }
}

impl Pool for GpuPool {
    fn space(&self) -> &ExtentSpace {
        &self.space
    }
}

impl From<CudaError> for ExportRefused {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Call { call, result, name, .. } => {
                Self { call, why: format!("{name} ({result})") }
            }
            CudaError::Unsupported { what, why } => {
                Self { call: what.to_owned(), why: why.to_owned() }
            }
            other => Self { call: "the GPU's driver".to_owned(), why: other.to_string() },
        }
    }
}

impl ForeignMemory for DeviceMemory {
    fn address(&self) -> u64 {
        Self::address(self)
    }

    fn bytes(&self) -> u64 {
        self.len()
    }

    fn pci(&self) -> Option<String> {
        Some(self.context().device().attributes().pci.clone())
    }

    fn writable(&self) -> Result<(), ExportRefused> {
        Ok(self.context().device().check_writes()?)
    }

    fn dma_buf(&self, offset: u64, len: u64) -> Result<ExportedRange, ExportRefused> {
        let bound = self.context().bind()?;
        let exported = Self::dma_buf(self, &bound, offset, len)?;
        Ok(ExportedRange {
            fd: exported.fd,
            offset: exported.offset,
            note: exported.without_pcie.map(ExportRefused::from),
        })
    }
}
