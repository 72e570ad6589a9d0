//! The driver's own pinned memory and its synchronous copies: what the copies of this room are measured
//! by, and what writes and reads a device's memory in a check of them. No node uses it.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use super::context::warn;
use super::{Bound, Context, CudaError, DeviceMemory};
use crate::memory::OutOfBounds;

/// Host memory that the driver allocated and pinned. The CPU touches it by copies within bounds.
#[derive(Debug)]
pub struct PinnedMemory {
    start: NonNull<u8>,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: the memory is this value's own; all copies from and to it have ended when their call returns.
unsafe impl Send for PinnedMemory {}

const TOO_OLD: CudaError =
    CudaError::Unsupported { what: "the driver's pinned memory", why: "it lacks the functions" };

impl PinnedMemory {
    /// Allocates so many bytes, at least 1.
    ///
    /// # Errors
    /// [`CudaError::Call`]; [`CudaError::Unsupported`].
    pub fn new(bound: &Bound<'_>, len: usize) -> Result<Self, CudaError> {
        let context = bound.context();
        let allocate = context.driver().library().mem_alloc_host.ok_or(TOO_OLD)?;
        let mut start: *mut c_void = std::ptr::null_mut();
        // SAFETY: a context is current; writes one pointer.
        let result = unsafe { allocate(&raw mut start, len) };
        context.driver().check(result, || format!("cuMemAllocHost of {len} bytes"))?;
        let start = NonNull::new(start.cast()).ok_or(TOO_OLD)?;
        Ok(Self { start, len, context: Arc::clone(context) })
    }

    /// Copies bytes to its start.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was written then.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.check(bytes.len())?;
        // SAFETY: so many bytes are this value's, which is borrowed for itself alone; nobody lends
        // slices of them.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes from its start.
    ///
    /// # Errors
    /// [`OutOfBounds`]; nothing was copied then.
    pub fn read(&self, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check(bytes.len())?;
        // SAFETY: as in `write`, with the directions exchanged.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start.as_ptr(), bytes.as_mut_ptr(), bytes.len());
        };
        Ok(())
    }

    /// Copies its first `len` bytes to the start of a device's memory, and waits for the end.
    ///
    /// # Errors
    /// [`CudaError::Bounds`], [`CudaError::Call`], [`CudaError::Unsupported`].
    pub fn copy_to(
        &self,
        bound: &Bound<'_>,
        memory: &DeviceMemory,
        len: usize,
    ) -> Result<(), CudaError> {
        let copy = bound.context().driver().library().memcpy_htod.ok_or(TOO_OLD)?;
        self.check(len)?;
        let to = memory.pointer(0, len as u64)?;
        // SAFETY: a context is current; both ranges are inside live memories, and the copy has ended
        // when this returns.
        let result = unsafe { copy(to, self.start.as_ptr().cast_const().cast(), len) };
        bound.context().driver().check(result, || format!("cuMemcpyHtoD of {len} bytes"))
    }

    /// Copies the first `len` bytes of a device's memory to its start, and waits for the end.
    ///
    /// # Errors
    /// As [`Self::copy_to`].
    pub fn copy_from(
        &mut self,
        bound: &Bound<'_>,
        memory: &DeviceMemory,
        len: usize,
    ) -> Result<(), CudaError> {
        let copy = bound.context().driver().library().memcpy_dtoh.ok_or(TOO_OLD)?;
        self.check(len)?;
        let from = memory.pointer(0, len as u64)?;
        // SAFETY: as in `copy_to`; the memory is borrowed for this alone.
        let result = unsafe { copy(self.start.as_ptr().cast(), from, len) };
        bound.context().driver().check(result, || format!("cuMemcpyDtoH of {len} bytes"))
    }

    fn check(&self, len: usize) -> Result<(), OutOfBounds> {
        if len <= self.len {
            return Ok(());
        }
        Err(OutOfBounds { offset: 0, len: len as u64, size: self.len as u64 })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let driver = self.context.driver();
        if let (Some(free), Ok(_bound)) = (driver.library().mem_free_host, self.context.bind()) {
            // SAFETY: a context is current; allocated by `cuMemAllocHost`, freed nowhere else.
            let result = unsafe { free(self.start.as_ptr().cast()) };
            warn(driver.check(result, || "cuMemFreeHost".to_owned()));
        }
    }
}
