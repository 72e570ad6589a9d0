//! A device's primary context, and its being current on a thread.
//!
//! Most of the driver works on the context that is current on the calling thread. Every function here
//! that needs one takes a [`Bound`], which exists only on a thread and only while the context is
//! current there.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUcontext, CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget,
};

use super::device::WriteOrdering;
use super::{CudaError, Device, Driver};

/// A device's primary context, which libraries in one process share. Released when dropped.
#[derive(Debug)]
pub struct Context {
    device: Device,
    raw: CUcontext,
}

// SAFETY: a context may be current on any number of threads; the pointer is only handed to the driver,
// which locks what its calls share.
unsafe impl Send for Context {}
// SAFETY: as above; nothing here is written after construction.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device.
    ///
    /// # Errors
    /// [`CudaError::Call`], [`CudaError::Forked`].
    pub fn primary(device: &Device) -> Result<Arc<Self>, CudaError> {
        let driver = device.driver();
        driver.check_process()?;
        let mut raw: CUcontext = std::ptr::null_mut();
        // SAFETY: the device exists; writes one pointer.
        let result =
            unsafe { (driver.library().device_primary_ctx_retain)(&raw mut raw, device.raw()) };
        driver.check_or(
            result,
            || format!("cuDevicePrimaryCtxRetain of GPU {}", device.ordinal()),
            "; the GPU may be in exclusive mode and in use: look at nvidia-smi",
        )?;
        Ok(Arc::new(Self { device: device.clone(), raw }))
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn driver(&self) -> &Driver {
        self.device.driver()
    }

    /// Makes the context current on this thread until the guard is dropped; guards nest.
    ///
    /// # Errors
    /// [`CudaError::Forked`], [`CudaError::Call`].
    pub fn bind(self: &Arc<Self>) -> Result<Bound<'_>, CudaError> {
        let driver = self.driver();
        driver.check_process()?;
        // SAFETY: the context is retained.
        let result = unsafe { (driver.library().ctx_push_current)(self.raw) };
        driver.check(result, || "cuCtxPushCurrent".to_owned())?;
        Ok(Bound { context: self, on_this_thread: PhantomData })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let driver = self.device.driver();
        // In a fork there is nothing to release: the driver is the parent's.
        if driver.check_process().is_err() {
            return;
        }
        // SAFETY: retained once by `primary`; what was made in the context holds an `Arc` of this.
        let result = unsafe { (driver.library().device_primary_ctx_release)(self.device.raw()) };
        warn(driver.check(result, || "cuDevicePrimaryCtxRelease".to_owned()));
    }
}

/// The proof that a context is current on this thread.
#[derive(Debug)]
pub struct Bound<'a> {
    context: &'a Arc<Context>,
    /// It belongs to the thread that made it.
    on_this_thread: PhantomData<*const ()>,
}

impl<'a> Bound<'a> {
    /// The context that is current.
    #[must_use]
    pub fn context(&self) -> &'a Arc<Context> {
        self.context
    }

    /// Bytes of the device's memory that are free, and all of them.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let driver = self.context.driver();
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: a context is current; writes two integers.
        let result = unsafe { (driver.library().mem_get_info)(&raw mut free, &raw mut total) };
        driver.check(result, || "cuMemGetInfo".to_owned())?;
        Ok((free as u64, total as u64))
    }

    /// Makes what network cards have written to this device's memory visible to the device, where
    /// that does not go without saying; see the module `cuda`. Whether a flush was needed.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where the device needs a flush and the host cannot make one: its
    /// memory must not be written by network cards. [`CudaError::Call`].
    pub fn flush_writes(&self) -> Result<bool, CudaError> {
        let device = &self.context.device;
        device.check_writes()?;
        let needed = device.attributes().write_ordering < WriteOrdering::Owner;
        if needed { self.flush_unasked().map(|()| true) } else { Ok(false) }
    }

    /// As [`Self::flush_writes`], whether or not the device needs it: to measure what one costs.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], [`CudaError::Call`].
    pub fn flush_unasked(&self) -> Result<(), CudaError> {
        let driver = self.context.driver();
        let Some(flush) = driver.library().flush_gpu_direct_rdma_writes else {
            return Err(CudaError::Unsupported {
                what: "a flush of network cards' writes",
                why: "CUDA 11.3 has them",
            });
        };
        // SAFETY: a context is current; the arguments are of the enums that the header names.
        let result = unsafe {
            flush(
                CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER,
            )
        };
        driver.check(result, || "cuFlushGPUDirectRDMAWrites".to_owned())
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let driver = self.context.driver();
        let mut popped: CUcontext = std::ptr::null_mut();
        // SAFETY: guards nest and stay on their thread, so the context on top is this one's.
        let result = unsafe { (driver.library().ctx_pop_current)(&raw mut popped) };
        warn(driver.check(result, || "cuCtxPopCurrent".to_owned()));
        debug_assert!(result != 0 || popped == self.context.raw, "guards nest");
    }
}

/// What goes wrong while something ends can be told, and nothing else be done about it.
pub(super) fn warn(outcome: Result<(), CudaError>) {
    if let Err(error) = outcome {
        tracing::warn!(%error, "a GPU object did not end well");
    }
}
