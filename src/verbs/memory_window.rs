//! A memory window of type 2: a key of its own to a part of a region, for the peer of one queue pair,
//! that ends without ending the region or the queue pair.
//!
//! What the InfiniBand specification asks (section 10.6.7 and chapter 11, "bind memory window"), and
//! what devices check:
//!
//! - The region was registered with `IBV_ACCESS_MW_BIND`, in the same protection domain as window and
//!   queue pair. It needs no remote access of its own.
//! - A window is bound by a work request on the queue pair whose peer shall read, in RTS; that queue
//!   pair must allow remote READs. Only its own peer can use the key.
//! - The lowest eight bits of the key are the consumer's and should differ from those of the bind
//!   before; the others are the window's for good.
//! - A window is bound only while it is invalid: fresh, or after an invalidation has been executed.
//!   Binding a bound one fails, unlike with windows of type 1. One queue executes both in order.
//! - A region is not deregistered while a window is bound to it (SoftRoCE refuses with `EINVAL`), and a
//!   bound window keeps its queue pair: windows go first, queue pairs next, regions last.
//!
//! **A second bind that fails**: a bind names the window by the key that it has *now*, which libraries
//! take from `ibv_mw.rkey`. After `ibv_post_send` of a bind that field is the caller's to set to the
//! new key; only the old call `ibv_bind_mw`, for type 1, does it itself. Where it stays the old one,
//! SoftRoCE compares it with the key in the kernel (`rxe_bind_mw`), finds another, and completes the
//! second bind with `IBV_WC_MW_BIND_ERR`, the queue pair in ERR. So [`MemoryWindow::set_key`] follows
//! each bind. The same status comes for a bind before the invalidation (state `VALID`, not `FREE`), and
//! an invalidation by a key other than the current one fails with `IBV_WC_LOC_QP_OP_ERR`.
//!
//! **What SoftRoCE leaves out** (Linux 6.12, `check_rkey` in its responder): a READ by a window's key is
//! compared with the bounds of the region, not with those of the window. Key, queue pair and life of a
//! window are checked. Devices that follow the specification check the bounds too.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::{REMEDY_OBJECTS, VerbsError};
use super::protection_domain::ProtectionDomain;
use crate::sys::ibverbs::constants as c;
use crate::sys::ibverbs::ibv_mw;

/// A window. Freed when dropped, which also ends its key.
#[derive(Debug)]
pub struct MemoryWindow {
    raw: NonNull<ibv_mw>,
    domain: Arc<ProtectionDomain>,
}

// SAFETY: libibverbs may be called from any thread; the pointer is freed only by `drop`. The type is
// not `Sync`: `set_key` writes through it.
unsafe impl Send for MemoryWindow {}

impl MemoryWindow {
    /// A window of type 2 that is not bound.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(domain: &Arc<ProtectionDomain>) -> Result<Self, VerbsError> {
        let context = domain.context();
        let failed = |source| context.error("ibv_alloc_mw".to_owned(), source, REMEDY_OBJECTS);
        let alloc = context.ops().alloc_mw;
        let alloc = alloc.ok_or_else(|| failed(io::ErrorKind::Unsupported.into()))?;
        // SAFETY: the domain is allocated.
        let raw = unsafe { alloc(domain.raw().as_ptr(), c::IBV_MW_TYPE_2) };
        let raw = NonNull::new(raw).ok_or_else(|| failed(io::Error::last_os_error()))?;
        Ok(Self { raw, domain: Arc::clone(domain) })
    }

    /// The key that it has now.
    #[must_use]
    pub fn key(&self) -> u32 {
        // SAFETY: the window exists, and only `set_key` of this thread writes the field.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    /// Takes note that a bind under this key was posted.
    pub(super) fn set_key(&self, key: u32) {
        // SAFETY: the window exists; the library reads the field only in calls of the thread that
        // owns this value, which is not `Sync`.
        unsafe { (*self.raw.as_ptr()).rkey = key }
    }

    pub(super) fn raw(&self) -> NonNull<ibv_mw> {
        self.raw
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        let context = self.domain.context();
        let Some(dealloc) = context.ops().dealloc_mw else { return };
        // SAFETY: the window exists, and this is the only place that frees it.
        let rc = unsafe { dealloc(self.raw.as_ptr()) };
        if rc != 0 {
            let error = io::Error::from_raw_os_error(rc.saturating_abs());
            tracing::warn!(device = context.name(), %error, "a memory window could not be freed");
        }
    }
}
