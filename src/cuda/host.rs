//! Host memory that the driver knows, which asynchronous copies need.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::context::warn;
use super::{Bound, Context, CudaError};
use crate::memory::{Mapping, OutOfBounds};

/// `CU_MEMHOSTREGISTER_PORTABLE`: for all contexts of the process. Registered memory is ordinary
/// cached memory; it is never write-combined.
const PORTABLE: u32 = 1;

/// A mapping that is registered with the driver, all of it. It keeps the mapping, which goes last.
#[derive(Debug)]
pub struct HostRegistration {
    mapping: Arc<Mapping>,
    start: NonNull<u8>,
    context: Arc<Context>,
}

// SAFETY: the pointer is the mapping's, which is `Sync`; it is only handed to the driver.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// Registers a mapping. A mapping is registered once in a process.
    ///
    /// # Errors
    /// [`CudaError::Call`], for memory that is registered already, too; [`CudaError::Bounds`] for an
    /// empty mapping.
    pub fn new(bound: &Bound<'_>, mapping: &Arc<Mapping>) -> Result<Arc<Self>, CudaError> {
        let context = bound.context();
        let driver = context.driver();
        let len = mapping.len();
        let start = mapping.pointer(0, len)?;
        let bytes = usize::try_from(len).map_err(|_too_long| OutOfBounds {
            offset: 0,
            len,
            size: u64::MAX,
        })?;
        // SAFETY: a context is current; the range is mapped, and stays so until it is unregistered.
        let result =
            unsafe { (driver.library().mem_host_register)(start.as_ptr().cast(), bytes, PORTABLE) };
        driver.check_or(
            result,
            || format!("cuMemHostRegister of {len} bytes"),
            "; raise the limit on locked memory (ulimit -l unlimited), or make --pool smaller",
        )?;
        let (mapping, context) = (Arc::clone(mapping), Arc::clone(context));
        Ok(Arc::new(Self { mapping, start, context }))
    }

    /// The mapping.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    pub(super) fn pointer(&self, offset: u64, len: u64) -> Result<NonNull<c_void>, CudaError> {
        Ok(self.mapping.pointer(offset, len)?.cast())
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        let driver = self.context.driver();
        // SAFETY: a context is current; registered from this pointer on, and copies that touch it
        // hold an `Arc` of this.
        let result = unsafe { (driver.library().mem_host_unregister)(self.start.as_ptr().cast()) };
        warn(driver.check(result, || "cuMemHostUnregister".to_owned()));
    }
}
