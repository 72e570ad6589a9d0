//! The driver: its library, its version, and the process that it was started in.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::sync::Arc;

use super::CudaError;
use super::device::Device;
use super::error::DRIVER_MIN;
use super::library::Library;

/// The name under which the loader finds the driver's library.
pub const LIBRARY_NAME: &str = "libcuda.so.1";

const SUCCESS: u32 = 0;
const NO_DEVICE: u32 = 100;

/// An initialised driver.
#[derive(Debug)]
pub struct Driver {
    library: Library,
    version: (u32, u32),
    process: u32,
}

impl Driver {
    /// Loads [`LIBRARY_NAME`], or a library at a path, and starts the driver in this process.
    ///
    /// # Errors
    /// [`CudaError::Absent`], [`CudaError::Symbol`], [`CudaError::TooOld`], [`CudaError::NoDevice`],
    /// [`CudaError::Call`].
    pub fn open(library: impl AsRef<OsStr>) -> Result<Arc<Self>, CudaError> {
        let library = Library::open(library.as_ref())?;
        let mut driver = Self { library, version: (0, 0), process: std::process::id() };
        let mut version: c_int = 0;
        // SAFETY: writes one integer; may be called before the driver is started.
        let result = unsafe { (driver.library.driver_get_version)(&raw mut version) };
        driver.check(result, || "cuDriverGetVersion".to_owned())?;
        let version = u32::try_from(version).unwrap_or(0);
        driver.version = (version / 1000, version % 1000 / 10);
        if driver.version < DRIVER_MIN {
            return Err(CudaError::TooOld { version: driver.version });
        }
        // SAFETY: no flags are defined; starting twice does nothing.
        let result = unsafe { (driver.library.init)(0) };
        if result == NO_DEVICE {
            return Err(CudaError::NoDevice);
        }
        driver.check(result, || "cuInit".to_owned())?;
        Ok(Arc::new(driver))
    }

    /// The version of CUDA that the driver is for, major and minor.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// How many devices this process sees.
    ///
    /// # Errors
    /// [`CudaError::Call`], [`CudaError::Forked`].
    pub fn device_count(&self) -> Result<u32, CudaError> {
        self.check_process()?;
        let mut count: c_int = 0;
        // SAFETY: the driver is started; writes one integer.
        let result = unsafe { (self.library.device_get_count)(&raw mut count) };
        self.check(result, || "cuDeviceGetCount".to_owned())?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// The device of this number, from 0.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`], [`CudaError::NoSuchDevice`], [`CudaError::Call`],
    /// [`CudaError::Forked`].
    pub fn device(self: &Arc<Self>, ordinal: u32) -> Result<Device, CudaError> {
        let count = self.device_count()?;
        match c_int::try_from(ordinal) {
            _ if count == 0 => Err(CudaError::NoDevice),
            Ok(number) if ordinal < count => Device::new(self, number),
            _ => Err(CudaError::NoSuchDevice { ordinal, count }),
        }
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    /// Refuses to go on in a fork of the process that started the driver.
    pub(super) fn check_process(&self) -> Result<(), CudaError> {
        if std::process::id() == self.process { Ok(()) } else { Err(CudaError::Forked) }
    }

    /// An error unless the call succeeded.
    pub(super) fn check(
        &self,
        result: u32,
        call: impl FnOnce() -> String,
    ) -> Result<(), CudaError> {
        self.check_or(result, call, "")
    }

    /// As [`Self::check`], with what to try.
    pub(super) fn check_or(
        &self,
        result: u32,
        call: impl FnOnce() -> String,
        remedy: &'static str,
    ) -> Result<(), CudaError> {
        if result == SUCCESS {
            return Ok(());
        }
        Err(CudaError::Call { call: call(), result, name: self.name_of(result), remedy })
    }

    fn name_of(&self, result: u32) -> String {
        let unknown = || "an error without a name".to_owned();
        let Some(get_error_name) = self.library.get_error_name else { return unknown() };
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: writes one pointer, to a string of the library or null.
        let known = unsafe { get_error_name(result, &raw mut name) } == SUCCESS;
        if !known || name.is_null() {
            return unknown();
        }
        // SAFETY: a driver's names are strings that end with a zero and live as long as the library.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}
