//! A channel of completion events: what a thread waits on when it does not spin.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::context::{Context, unblock};
use super::error::{REMEDY_OBJECTS, VerbsError};
use crate::sys::ibverbs::ibv_comp_channel;

/// A channel of completion events. Destroyed when its last queue is gone.
#[derive(Debug)]
pub struct CompletionChannel {
    raw: NonNull<ibv_comp_channel>,
    fd: RawFd,
    context: Arc<Context>,
}

// SAFETY: libibverbs may be called from any thread; the pointer is freed only by `drop`.
unsafe impl Send for CompletionChannel {}
// SAFETY: libibverbs locks what its calls share; nothing here is written after construction.
unsafe impl Sync for CompletionChannel {}

impl CompletionChannel {
    /// A channel of a device. Taking events from it never blocks.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library().create_comp_channel)(context.raw().as_ptr()) };
        let failed =
            |source| context.error("ibv_create_comp_channel".to_owned(), source, REMEDY_OBJECTS);
        let raw = NonNull::new(raw).ok_or_else(|| failed(io::Error::last_os_error()))?;
        // SAFETY: the library answered a valid channel; its descriptor never changes.
        let fd = unsafe { (*raw.as_ptr()).fd };
        let channel = Self { raw, fd, context: Arc::clone(context) };
        unblock(channel.fd()).map_err(failed)?;
        Ok(Arc::new(channel))
    }

    /// Readable while there are events.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and stays open while it does.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    pub(super) fn raw(&self) -> NonNull<ibv_comp_channel> {
        self.raw
    }

    /// Takes and acknowledges one event: the token of the queue that it is about. `None` where there
    /// is none. The queue is not armed from then on.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        let (mut cq, mut token) = (ptr::null_mut(), ptr::null_mut());
        let library = self.context.library();
        // SAFETY: the channel is open and does not block; both places are written on success.
        let rc = unsafe { (library.get_cq_event)(self.raw.as_ptr(), &raw mut cq, &raw mut token) };
        if rc != 0 {
            return None;
        }
        // SAFETY: the queue exists until its events are acknowledged, which this call does for the
        // one that was taken.
        unsafe { (library.ack_cq_events)(cq, 1) };
        u64::try_from(token.addr()).ok()
    }
}

impl Drop for CompletionChannel {
    fn drop(&mut self) {
        // SAFETY: the channel exists, and every queue of it holds an `Arc` of this value.
        let rc = unsafe { (self.context.library().destroy_comp_channel)(self.raw.as_ptr()) };
        if rc != 0 {
            tracing::warn!(device = self.context.name(), "a channel could not be destroyed");
        }
    }
}
