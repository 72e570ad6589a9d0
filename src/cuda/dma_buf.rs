//! Memory of a device as a dma-buf, which a network card's driver takes over.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};

use cudarc::driver::sys::{CUmemRangeFlags_enum, CUmemRangeHandleType};

use super::ipc::address_range;
use super::{Bound, CudaError, DeviceMemory};

/// Export is asked for in steps of the host's pages; 64 KiB are a multiple of all that there are.
const ALIGN: u64 = 64 << 10;

/// An exported range.
#[derive(Debug)]
pub struct DmaBuf {
    /// The buffer. A registration holds what it needs: the descriptor is closed after it.
    pub fd: OwnedFd,
    /// Where the range begins in it, bytes.
    pub offset: u64,
    /// Why the flag of a mapping over PCIe, which some platforms need, was not taken; `None` where it
    /// was.
    pub without_pcie: Option<CudaError>,
}

impl DeviceMemory {
    /// Exports `len` bytes at `offset`, which must lie in one allocation.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] where the driver or the device cannot; [`CudaError::Call`];
    /// [`CudaError::Bounds`].
    pub fn dma_buf(&self, bound: &Bound<'_>, offset: u64, len: u64) -> Result<DmaBuf, CudaError> {
        let device = bound.context().device();
        if !device.attributes().dma_buf {
            return Err(CudaError::Unsupported {
                what: "a dma-buf",
                why: "the driver or the GPU does not export memory so: it takes CUDA 11.7, the open \
                      kernel modules and Linux 5.12",
            });
        }
        let pointer = self.pointer(offset, len)?;
        // A buffer is made of whole pages of one allocation, around what is asked for.
        let (base, size) = address_range(bound, pointer)?;
        let start = (pointer - pointer % ALIGN).max(base);
        let end = pointer.saturating_add(len).next_multiple_of(ALIGN);
        let end = end.min(base.saturating_add(size));
        let pcie = CUmemRangeFlags_enum::CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE as u64;
        let (fd, without_pcie) = match export(bound, (start, end - start), pcie) {
            Ok(fd) => (fd, None),
            // Drivers before CUDA 12.8 know no flag, and most platforms need none.
            Err(error) => (export(bound, (start, end - start), 0)?, Some(error)),
        };
        Ok(DmaBuf { fd, offset: pointer - start, without_pcie })
    }
}

fn export(bound: &Bound<'_>, range: (u64, u64), flags: u64) -> Result<OwnedFd, CudaError> {
    let driver = bound.context().driver();
    let (start, len) = range;
    let Some(get) = driver.library().mem_get_handle_for_address_range else {
        return Err(CudaError::Unsupported { what: "a dma-buf", why: "CUDA 11.7 has them" });
    };
    let mut fd: c_int = -1;
    let bytes = usize::try_from(len).unwrap_or(usize::MAX);
    // SAFETY: a context is current; the range is of live memory; for this type a descriptor is
    // written.
    let result = unsafe {
        get(
            (&raw mut fd).cast(),
            start,
            bytes,
            CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
            flags,
        )
    };
    let call = || format!("cuMemGetHandleForAddressRange of {len} bytes, flags {flags}");
    driver.check(result, call)?;
    // SAFETY: the driver has opened the descriptor for the caller, who owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
