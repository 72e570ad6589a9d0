//! Memory that two processes of one host share: exported here, imported there.
//!
//! An allocation of `cuMemAlloc` is opened by a handle of 64 bytes, and stays the exporter's: it goes
//! with that process, whatever others have open. What `cuMemCreate` made is passed on as a file
//! descriptor, and lives as long as anyone has it mapped.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::ffi::c_int;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdeviceptr, CUipcMemHandle, CUmemAllocationHandleType, CUmemGenericAllocationHandle,
    CUpointer_attribute,
};

use super::memory::{NO_VIRTUAL_MEMORY, Origin};
use super::{Bound, CudaError, DeviceMemory};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag there is, and required.
const LAZY_PEER_ACCESS: u32 = 1;

/// An allocation's name in other processes of this host, valid as long as the allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IpcMemoryHandle(pub [u8; 64]);

impl fmt::Debug for IpcMemoryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IpcMemoryHandle").finish_non_exhaustive()
    }
}

impl DeviceMemory {
    /// The name under which another process opens the allocation.
    ///
    /// # Errors
    /// [`CudaError::Call`] for memory that `cuMemAlloc` did not make here.
    pub fn ipc_handle(&self, bound: &Bound<'_>) -> Result<IpcMemoryHandle, CudaError> {
        let driver = bound.context().driver();
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: a context is current; writes 64 bytes; the pointer is of live memory.
        let result =
            unsafe { (driver.library().ipc_get_mem_handle)(&raw mut handle, self.address()) };
        driver.check(result, || "cuIpcGetMemHandle".to_owned())?;
        Ok(IpcMemoryHandle(handle.reserved.map(|byte| byte.cast_unsigned())))
    }

    /// Opens another process's allocation, all of it. It must be on the bound context's device.
    ///
    /// # Errors
    /// [`CudaError::Call`], also for a handle of this process or of an allocation that is gone;
    /// [`CudaError::WrongDevice`].
    pub fn open(bound: &Bound<'_>, handle: IpcMemoryHandle) -> Result<Arc<Self>, CudaError> {
        let context = bound.context();
        let driver = context.driver();
        let library = driver.library();
        let handle = CUipcMemHandle { reserved: handle.0.map(|byte| byte.cast_signed()) };
        let mut start: CUdeviceptr = 0;
        // SAFETY: a context is current; writes one pointer; any bytes may be given as a handle.
        let result =
            unsafe { (library.ipc_open_mem_handle)(&raw mut start, handle, LAZY_PEER_ACCESS) };
        driver.check_or(
            result,
            || format!("cuIpcOpenMemHandle on GPU {}", context.device().ordinal()),
            "; the memory must be an engine's on this GPU, on this host and in this PID namespace",
        )?;
        // From here on it is closed, whatever comes.
        let mut memory = Self::opened(context, start, 0);
        let owner = owner(bound, start)?;
        let here = context.device().ordinal();
        if owner != here {
            return Err(CudaError::WrongDevice { owner, here });
        }
        let (base, len) = address_range(bound, start)?;
        // The driver opens whole allocations, and answers their start.
        memory.set_len(len - start.saturating_sub(base).min(len));
        memory.keep_synchronous(bound);
        Ok(Arc::new(memory))
    }

    /// A descriptor of the memory, for [`Self::import`] in another process.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for memory that `cuMemCreate` did not make; [`CudaError::Call`].
    pub fn export(&self, bound: &Bound<'_>) -> Result<OwnedFd, CudaError> {
        let driver = bound.context().driver();
        let (Some(export), Origin::Mapped(handle)) =
            (driver.library().mem_export_to_shareable_handle, self.origin())
        else {
            return Err(NO_VIRTUAL_MEMORY);
        };
        let mut fd: c_int = -1;
        // SAFETY: the handle is live; for this type a descriptor is written; no flags are set.
        let result = unsafe {
            export(
                (&raw mut fd).cast(),
                *handle,
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            )
        };
        driver.check(result, || "cuMemExportToShareableHandle".to_owned())?;
        // SAFETY: the driver has opened the descriptor for the caller, who owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Maps `len` bytes that another process exported on the bound context's device: as many as it
    /// allocated, which the descriptor does not tell.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], [`CudaError::Call`].
    pub fn import(bound: &Bound<'_>, fd: impl AsFd, len: u64) -> Result<Arc<Self>, CudaError> {
        let driver = bound.context().driver();
        let Some(import) = driver.library().mem_import_from_shareable_handle else {
            return Err(NO_VIRTUAL_MEMORY);
        };
        let mut handle: CUmemGenericAllocationHandle = 0;
        let fd = fd.as_fd().as_raw_fd();
        // SAFETY: the driver is started; writes one handle; a descriptor of this type is passed as
        // the pointer's value and not taken over.
        let result = unsafe {
            import(
                &raw mut handle,
                std::ptr::without_provenance_mut(fd.unsigned_abs() as usize),
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            )
        };
        driver.check_or(
            result,
            || "cuMemImportFromShareableHandle".to_owned(),
            "; the descriptor must be one that the driver exported",
        )?;
        let memory = Self::map(bound, handle, len)?;
        memory.keep_synchronous(bound);
        Ok(Arc::new(memory))
    }
}

/// The device that memory is on.
fn owner(bound: &Bound<'_>, pointer: CUdeviceptr) -> Result<u32, CudaError> {
    let driver = bound.context().driver();
    let mut ordinal: c_int = 0;
    // SAFETY: a context is current; writes the integer that this attribute is.
    let result = unsafe {
        (driver.library().pointer_get_attribute)(
            (&raw mut ordinal).cast(),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            pointer,
        )
    };
    driver.check(result, || "cuPointerGetAttribute".to_owned())?;
    Ok(u32::try_from(ordinal).unwrap_or(u32::MAX))
}

/// The allocation that a pointer lies in: its start and its length.
pub(super) fn address_range(
    bound: &Bound<'_>,
    pointer: CUdeviceptr,
) -> Result<(CUdeviceptr, u64), CudaError> {
    let driver = bound.context().driver();
    let (mut start, mut len): (CUdeviceptr, usize) = (0, 0);
    // SAFETY: a context is current; writes a pointer and an integer.
    let result =
        unsafe { (driver.library().mem_get_address_range)(&raw mut start, &raw mut len, pointer) };
    driver.check(result, || "cuMemGetAddressRange".to_owned())?;
    Ok((start, len as u64))
}
