//! A completion queue. It never overflows: whoever makes one gives it room for every work request
//! that can be outstanding on it, because a device that overflows one loses completions silently.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::ffi::c_int;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::completion_channel::CompletionChannel;
use super::context::Context;
use super::error::{REMEDY_DEVICE, REMEDY_OBJECTS, VerbsError};
use crate::sys::ibverbs::{ibv_cq, ibv_wc};

type PollFn = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
type NotifyFn = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;

/// A completion queue. Destroyed when its last queue pair is gone.
#[derive(Debug)]
pub struct CompletionQueue {
    raw: NonNull<ibv_cq>,
    poll: PollFn,
    notify: NotifyFn,
    context: Arc<Context>,
    _channel: Arc<CompletionChannel>,
}

// SAFETY: libibverbs may be called from any thread; the pointer is freed only by `drop`.
unsafe impl Send for CompletionQueue {}
// SAFETY: libibverbs locks what its calls share; nothing here is written after construction.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    /// A queue with room for `depth` completions, whose events on `channel` carry `token`.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(
        context: &Arc<Context>,
        channel: &Arc<CompletionChannel>,
        depth: u32,
        token: u64,
    ) -> Result<Arc<Self>, VerbsError> {
        let failed = |source| {
            context.error(format!("ibv_create_cq of {depth} entries"), source, REMEDY_OBJECTS)
        };
        let too_large = |_error| failed(io::ErrorKind::InvalidInput.into());
        let entries = i32::try_from(depth).map_err(too_large)?;
        let token = usize::try_from(token).map_err(too_large)?;
        let absent = || {
            context.error(
                "looking up ibv_poll_cq and ibv_req_notify_cq".to_owned(),
                io::ErrorKind::Unsupported.into(),
                REMEDY_DEVICE,
            )
        };
        let ops = context.ops();
        let (poll, notify) = ops.poll_cq.zip(ops.req_notify_cq).ok_or_else(absent)?;
        // SAFETY: context and channel are open; the library hands the token back and never follows it.
        let raw = unsafe {
            (context.library().create_cq)(
                context.raw().as_ptr(),
                entries,
                ptr::without_provenance_mut(token),
                channel.raw().as_ptr(),
                0,
            )
        };
        let raw = NonNull::new(raw).ok_or_else(|| failed(io::Error::last_os_error()))?;
        let (context, channel) = (Arc::clone(context), Arc::clone(channel));
        Ok(Arc::new(Self { raw, poll, notify, context, _channel: channel }))
    }

    pub(super) fn raw(&self) -> NonNull<ibv_cq> {
        self.raw
    }

    /// Takes completions; answers how many.
    ///
    /// # Errors
    /// [`VerbsError::Call`] where the device is gone.
    pub fn poll(&self, into: &mut [ibv_wc]) -> Result<usize, VerbsError> {
        let room = i32::try_from(into.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue exists; `into` has room for `room` completions.
        let count = unsafe { (self.poll)(self.raw.as_ptr(), room, into.as_mut_ptr()) };
        usize::try_from(count).map_err(|_negative| {
            let source = io::Error::from_raw_os_error(count.saturating_abs());
            self.context.error("ibv_poll_cq".to_owned(), source, REMEDY_DEVICE)
        })
    }

    /// Asks for one event at the next completion. Completions that came before it make none: poll
    /// once more after arming.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue exists.
        let rc = unsafe { (self.notify)(self.raw.as_ptr(), 0) };
        if rc == 0 {
            return Ok(());
        }
        let source = io::Error::from_raw_os_error(rc.saturating_abs());
        Err(self.context.error("ibv_req_notify_cq".to_owned(), source, REMEDY_DEVICE))
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: the queue exists, every queue pair on it holds an `Arc` of this value, and events
        // are acknowledged as they are taken.
        let rc = unsafe { (self.context.library().destroy_cq)(self.raw.as_ptr()) };
        if rc != 0 {
            tracing::warn!(
                device = self.context.name(),
                "a completion queue could not be destroyed"
            );
        }
    }
}
