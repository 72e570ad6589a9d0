//! An event: a mark in a stream's work, which tells whether everything before it has run.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent, CUipcEventHandle};

use super::context::warn;
use super::{Bound, Context, CudaError, Stream};

/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`.
const WITHOUT_TIME: u32 = 2;
const FOR_OTHERS: u32 = 4;

const NOT_READY: u32 = 600;

/// An event, without times. Destroyed when dropped; what waits for it already is not disturbed.
#[derive(Debug)]
pub struct Event {
    raw: CUevent,
    context: Arc<Context>,
}

/// An event's name in other processes of this host, valid as long as the event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IpcEventHandle(pub [u8; 64]);

impl fmt::Debug for IpcEventHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IpcEventHandle").finish_non_exhaustive()
    }
}

// SAFETY: events may be used from any thread; the pointer is freed only by `drop`.
unsafe impl Send for Event {}
// SAFETY: the driver locks what its calls share; nothing here is written after construction.
unsafe impl Sync for Event {}

impl Event {
    /// An event of this process. Until it is recorded it counts as complete.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn new(bound: &Bound<'_>) -> Result<Self, CudaError> {
        Self::create(bound, WITHOUT_TIME)
    }

    /// An event that other processes can open by [`Self::ipc_handle`].
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn for_other_processes(bound: &Bound<'_>) -> Result<Self, CudaError> {
        Self::create(bound, WITHOUT_TIME | FOR_OTHERS)
    }

    fn create(bound: &Bound<'_>, flags: u32) -> Result<Self, CudaError> {
        let context = bound.context();
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: a context is current; writes one pointer.
        let result = unsafe { (context.driver().library().event_create)(&raw mut raw, flags) };
        context.driver().check(result, || "cuEventCreate".to_owned())?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// Opens another process's event.
    ///
    /// # Errors
    /// [`CudaError::Call`], also for a handle of this process or of an event that is gone.
    pub fn open(bound: &Bound<'_>, handle: IpcEventHandle) -> Result<Self, CudaError> {
        let context = bound.context();
        let mut raw: CUevent = std::ptr::null_mut();
        let handle = CUipcEventHandle { reserved: handle.0.map(|byte| byte.cast_signed()) };
        // SAFETY: a context is current; writes one pointer; any bytes may be given as a handle.
        let result =
            unsafe { (context.driver().library().ipc_open_event_handle)(&raw mut raw, handle) };
        context.driver().check_or(
            result,
            || "cuIpcOpenEventHandle".to_owned(),
            "; the engine must keep its event, and be on this host and in this PID namespace",
        )?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// The event's name for [`Self::open`].
    ///
    /// # Errors
    /// [`CudaError::Call`] unless made by [`Self::for_other_processes`].
    pub fn ipc_handle(&self, bound: &Bound<'_>) -> Result<IpcEventHandle, CudaError> {
        let driver = bound.context().driver();
        let mut handle = CUipcEventHandle { reserved: [0; 64] };
        // SAFETY: a context is current; the event is live; writes 64 bytes.
        let result = unsafe { (driver.library().ipc_get_event_handle)(&raw mut handle, self.raw) };
        driver.check(result, || "cuIpcGetEventHandle".to_owned())?;
        Ok(IpcEventHandle(handle.reserved.map(|byte| byte.cast_unsigned())))
    }

    /// Marks the work that the stream has been asked for so far. An earlier mark is forgotten.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn record(&self, bound: &Bound<'_>, stream: &Stream) -> Result<(), CudaError> {
        let driver = bound.context().driver();
        // SAFETY: a context is current; both handles are live.
        let result = unsafe { (driver.library().event_record)(self.raw, stream.raw()) };
        driver.check(result, || "cuEventRecord".to_owned())
    }

    /// Whether the work before the mark has run. Does not wait.
    ///
    /// # Errors
    /// [`CudaError::Call`], with what the work failed with.
    pub fn is_complete(&self, bound: &Bound<'_>) -> Result<bool, CudaError> {
        let driver = bound.context().driver();
        // SAFETY: the event is live.
        match unsafe { (driver.library().event_query)(self.raw) } {
            NOT_READY => Ok(false),
            result => driver.check(result, || "cuEventQuery".to_owned()).map(|()| true),
        }
    }

    /// Waits until the work before the mark has run. Never on the data thread.
    ///
    /// # Errors
    /// As [`Self::is_complete`].
    pub fn synchronize(&self, bound: &Bound<'_>) -> Result<(), CudaError> {
        let driver = bound.context().driver();
        // SAFETY: the event is live.
        let result = unsafe { (driver.library().event_synchronize)(self.raw) };
        driver.check(result, || "cuEventSynchronize".to_owned())
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        let driver = self.context.driver();
        // SAFETY: a context is current; the handle is live, and this is the only place that ends it.
        let result = unsafe { (driver.library().event_destroy)(self.raw) };
        warn(driver.check(result, || "cuEventDestroy".to_owned()));
    }
}
