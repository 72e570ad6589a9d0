//! A protection domain: what a queue pair may touch is registered in the queue pair's own domain.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::context::Context;
use super::error::{REMEDY_OBJECTS, VerbsError};
use crate::sys::ibverbs::ibv_pd;

/// A protection domain. Freed when its last object is gone.
#[derive(Debug)]
pub struct ProtectionDomain {
    raw: NonNull<ibv_pd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs may be called from any thread; the pointer is freed only by `drop`.
unsafe impl Send for ProtectionDomain {}
// SAFETY: libibverbs locks what its calls share; nothing here is written after construction.
unsafe impl Sync for ProtectionDomain {}

impl ProtectionDomain {
    /// A domain of a device.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library().alloc_pd)(context.raw().as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| {
            context.error("ibv_alloc_pd".to_owned(), io::Error::last_os_error(), REMEDY_OBJECTS)
        })?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    /// Its device.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> NonNull<ibv_pd> {
        self.raw
    }
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        // SAFETY: the domain is allocated, and every object of it holds an `Arc` of this value.
        let rc = unsafe { (self.context.library().dealloc_pd)(self.raw.as_ptr()) };
        if rc != 0 {
            tracing::warn!(device = self.context.name(), "a protection domain could not be freed");
        }
    }
}
