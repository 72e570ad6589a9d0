//! A stream: work on a device that runs in order, after the call that asks for it has returned.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::sync::Arc;

use cudarc::driver::sys::CUstream;

use super::context::warn;
use super::{Bound, Context, CudaError, Event};

/// `CU_STREAM_NON_BLOCKING`: the stream does not wait for the legacy default stream, nor it for this.
const NON_BLOCKING: u32 = 1;

/// A stream. Dropping one waits for its work.
#[derive(Debug)]
pub struct Stream {
    raw: CUstream,
    context: Arc<Context>,
}

// SAFETY: streams may be used from any thread; the pointer is freed only by `drop`.
unsafe impl Send for Stream {}
// SAFETY: the driver locks what its calls share; nothing here is written after construction.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream of its own order.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(bound: &Bound<'_>) -> Result<Self, CudaError> {
        let context = bound.context();
        let mut raw: CUstream = std::ptr::null_mut();
        // SAFETY: a context is current; writes one pointer.
        let result =
            unsafe { (context.driver().library().stream_create)(&raw mut raw, NON_BLOCKING) };
        context.driver().check(result, || "cuStreamCreate".to_owned())?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Its context.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Work asked for from here on begins when what was recorded in the event by now has run. The
    /// caller does not wait.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn wait_for(&self, bound: &Bound<'_>, event: &Event) -> Result<(), CudaError> {
        let driver = bound.context().driver();
        // SAFETY: a context is current; both handles are live; no flags are set.
        let result = unsafe { (driver.library().stream_wait_event)(self.raw, event.raw(), 0) };
        driver.check(result, || "cuStreamWaitEvent".to_owned())
    }

    /// Waits until all work has run. Never on the data thread.
    ///
    /// # Errors
    /// [`CudaError::Call`], also with what the work itself failed with.
    pub fn synchronize(&self, bound: &Bound<'_>) -> Result<(), CudaError> {
        let driver = bound.context().driver();
        // SAFETY: a context is current; the handle is live.
        let result = unsafe { (driver.library().stream_synchronize)(self.raw) };
        driver.check(result, || "cuStreamSynchronize".to_owned())
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(bound) = self.context.bind() else { return };
        let driver = self.context.driver();
        warn(self.synchronize(&bound));
        // SAFETY: a context is current; the handle is live, and this is the only place that ends it.
        let result = unsafe { (driver.library().stream_destroy)(self.raw) };
        warn(driver.check(result, || "cuStreamDestroy".to_owned()));
    }
}
