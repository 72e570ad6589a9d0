//! Memory of a device behind one range of pointers.
//!
//! Its bytes are never touched by the CPU: a pointer is a number that the driver and network cards are
//! told. Whoever has work in flight that touches it holds the `Arc`; that includes registrations with
//! network cards, so that memory goes last. What an allocation is made of ends in the order that the
//! driver wants: pointers unmapped, handle released, addresses freed.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::sync::Arc;

use bytesize::ByteSize;
use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
    CUpointer_attribute,
};

use super::context::warn;
use super::{Bound, Context, CudaError};
use crate::memory::OutOfBounds;

const OUT_OF_MEMORY_REMEDY: &str =
    "; the GPU has too little free memory: make --gpu-pool smaller, or give the engine less";

/// A call for so many bytes, with what the GPU has of them.
fn allocation(bound: &Bound<'_>, call: &str, bytes: u64) -> String {
    let unit = |bytes: u64| ByteSize(bytes).display().iec();
    let asked = format!("{call} of {} ({bytes} bytes)", unit(bytes));
    match bound.memory() {
        Ok((free, all)) => format!("{asked}, where {} of {} are free", unit(free), unit(all)),
        // A GPU that does not even say that has other troubles, which the call's own answer tells.
        Err(_unknown) => asked,
    }
}

/// Where memory comes from, which says how it ends.
#[derive(Debug)]
pub(super) enum Origin {
    /// `cuMemAlloc`.
    Allocated,
    /// `cuMemCreate` or an imported descriptor, mapped at reserved addresses.
    Mapped(CUmemGenericAllocationHandle),
    /// Another process's allocation, opened by its handle.
    Opened,
}

/// Memory of a device. See the module's documentation.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    start: CUdeviceptr,
    len: u64,
    origin: Origin,
}

impl DeviceMemory {
    /// Allocates at least `bytes` bytes, rounded up as the device wants, in a way that network cards
    /// can reach them where the device has one.
    ///
    /// # Errors
    /// [`CudaError::Call`]; [`CudaError::is_out_of_memory`] where there is too little.
    pub fn allocate(bound: &Bound<'_>, bytes: u64) -> Result<Arc<Self>, CudaError> {
        let attributes = bound.context().device().attributes();
        // Memory apart from its pointers can be passed on and exported; where cards reach plain
        // allocations only, that matters more.
        let memory = if attributes.virtual_memory
            && (attributes.rdma_with_virtual_memory || !attributes.rdma)
        {
            Self::create(bound, bytes)?
        } else {
            Self::plain(bound, bytes)?
        };
        memory.keep_synchronous(bound);
        Ok(Arc::new(memory))
    }

    /// As [`Self::allocate`], by `cuMemAlloc`: what another process opens by [`Self::ipc_handle`].
    ///
    /// # Errors
    /// As [`Self::allocate`].
    pub fn allocate_plain(bound: &Bound<'_>, bytes: u64) -> Result<Arc<Self>, CudaError> {
        let memory = Self::plain(bound, bytes)?;
        memory.keep_synchronous(bound);
        Ok(Arc::new(memory))
    }

    fn plain(bound: &Bound<'_>, bytes: u64) -> Result<Self, CudaError> {
        let context = bound.context();
        let mut start: CUdeviceptr = 0;
        // SAFETY: a context is current; writes one pointer.
        let result =
            unsafe { (context.driver().library().mem_alloc)(&raw mut start, size(bytes)?) };
        let call = || allocation(bound, "cuMemAlloc", bytes);
        context.driver().check_or(result, call, OUT_OF_MEMORY_REMEDY)?;
        Ok(Self { context: Arc::clone(context), start, len: bytes, origin: Origin::Allocated })
    }

    fn create(bound: &Bound<'_>, bytes: u64) -> Result<Self, CudaError> {
        let context = bound.context();
        let driver = context.driver();
        let properties = properties(context);
        let Some((granularity, create)) =
            driver.library().mem_get_allocation_granularity.zip(driver.library().mem_create)
        else {
            return Err(NO_VIRTUAL_MEMORY);
        };
        let mut step: usize = 0;
        let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: the driver is started; reads `properties`, writes one integer.
        let result = unsafe { granularity(&raw mut step, &raw const properties, option) };
        driver.check(result, || "cuMemGetAllocationGranularity".to_owned())?;
        let len = bytes.max(1).checked_next_multiple_of(step.max(1) as u64).ok_or(TOO_LONG)?;
        let mut handle: CUmemGenericAllocationHandle = 0;
        // SAFETY: the driver is started; reads `properties`, writes one handle; no flags.
        let result = unsafe { create(&raw mut handle, size(len)?, &raw const properties, 0) };
        let call = || allocation(bound, "cuMemCreate", len);
        driver.check_or(result, call, OUT_OF_MEMORY_REMEDY)?;
        Self::map(bound, handle, len)
    }

    /// Maps a handle, which this value owns from here on, whatever comes of it.
    pub(super) fn map(
        bound: &Bound<'_>,
        handle: CUmemGenericAllocationHandle,
        len: u64,
    ) -> Result<Self, CudaError> {
        let context = bound.context();
        let mapped = map_range(context, handle, len);
        if mapped.is_err()
            && let Some(release) = context.driver().library().mem_release
        {
            // SAFETY: the handle is live, mapped nowhere, and not used from here on.
            let result = unsafe { release(handle) };
            warn(context.driver().check(result, || "cuMemRelease".to_owned()));
        }
        let start = mapped?;
        Ok(Self { context: Arc::clone(context), start, len, origin: Origin::Mapped(handle) })
    }

    pub(super) fn opened(context: &Arc<Context>, start: CUdeviceptr, len: u64) -> Self {
        Self { context: Arc::clone(context), start, len, origin: Origin::Opened }
    }

    /// Keeps synchronous copies of this memory synchronous, which exported memory needs. kvrail makes
    /// none, and a device may not know it of its kind of memory: a refusal costs nothing.
    pub(super) fn keep_synchronous(&self, bound: &Bound<'_>) {
        let driver = bound.context().driver();
        let yes: u32 = 1;
        // SAFETY: a context is current; reads the integer that this attribute is; the pointer is the
        // start of live memory.
        let result = unsafe {
            (driver.library().pointer_set_attribute)(
                (&raw const yes).cast(),
                CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                self.start,
            )
        };
        if let Err(error) = driver.check(result, || "cuPointerSetAttribute".to_owned()) {
            tracing::debug!(%error, "SYNC_MEMOPS is not set");
        }
    }

    /// The context that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The device pointer of its first byte.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device pointer of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`].
    pub fn pointer(&self, offset: u64, len: u64) -> Result<u64, OutOfBounds> {
        let outside = OutOfBounds { offset, len, size: self.len };
        let end = offset.checked_add(len).ok_or(outside)?;
        if end > self.len {
            return Err(outside);
        }
        self.start.checked_add(offset).ok_or(outside)
    }

    pub(super) fn set_len(&mut self, len: u64) {
        self.len = len;
    }

    pub(super) fn origin(&self) -> &Origin {
        &self.origin
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let Ok(_bound) = self.context.bind() else { return };
        let driver = self.context.driver();
        let library = driver.library();
        match self.origin {
            Origin::Allocated => {
                // SAFETY: allocated by `cuMemAlloc`, freed nowhere else; work that touches it holds
                // an `Arc` of this.
                let result = unsafe { (library.mem_free)(self.start) };
                warn(driver.check(result, || "cuMemFree".to_owned()));
            }
            Origin::Opened => {
                // SAFETY: opened by `cuIpcOpenMemHandle`, closed nowhere else.
                let result = unsafe { (library.ipc_close_mem_handle)(self.start) };
                warn(driver.check(result, || "cuIpcCloseMemHandle".to_owned()));
            }
            Origin::Mapped(handle) => {
                unmap(&self.context, self.start, self.len);
                if let Some(release) = library.mem_release {
                    // SAFETY: the handle is live, mapped nowhere any more, released nowhere else.
                    let result = unsafe { release(handle) };
                    warn(driver.check(result, || "cuMemRelease".to_owned()));
                }
                free_addresses(&self.context, self.start, self.len);
            }
        }
    }
}

pub(super) const NO_VIRTUAL_MEMORY: CudaError = CudaError::Unsupported {
    what: "memory that can be passed on by descriptor",
    why: "the driver is older than CUDA 10.2",
};

const TOO_LONG: CudaError =
    CudaError::Unsupported { what: "so much memory", why: "its length is no number of bytes" };

fn size(bytes: u64) -> Result<usize, CudaError> {
    usize::try_from(bytes).map_err(|_too_long| TOO_LONG)
}

fn location(context: &Context) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: context.device().raw(),
    }
}

fn properties(context: &Context) -> CUmemAllocationProp {
    let attributes = context.device().attributes();
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if attributes.descriptors {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location(context),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: attributes.rdma_with_virtual_memory.into(),
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Addresses of their own for a handle, which the device may read and write.
fn map_range(
    context: &Context,
    handle: CUmemGenericAllocationHandle,
    len: u64,
) -> Result<CUdeviceptr, CudaError> {
    let driver = context.driver();
    let library = driver.library();
    let bytes = size(len)?;
    let (Some(reserve), Some(map), Some(set_access)) =
        (library.mem_address_reserve, library.mem_map, library.mem_set_access)
    else {
        return Err(NO_VIRTUAL_MEMORY);
    };
    let mut start: CUdeviceptr = 0;
    // SAFETY: the driver is started; writes one pointer; no alignment, place or flags are wished.
    let result = unsafe { reserve(&raw mut start, bytes, 0, 0, 0) };
    driver.check(result, || format!("cuMemAddressReserve of {len} bytes"))?;
    // SAFETY: the addresses are reserved and free, the handle is live and that long.
    let result = unsafe { map(start, bytes, 0, handle, 0) };
    let mapped = driver.check(result, || format!("cuMemMap of {len} bytes"));
    if let Err(error) = mapped {
        free_addresses(context, start, len);
        return Err(error);
    }
    let access = CUmemAccessDesc {
        location: location(context),
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the addresses are mapped; reads one descriptor.
    let result = unsafe { set_access(start, bytes, &raw const access, 1) };
    let allowed = driver.check(result, || format!("cuMemSetAccess to {len} bytes"));
    if let Err(error) = allowed {
        unmap(context, start, len);
        free_addresses(context, start, len);
        return Err(error);
    }
    Ok(start)
}

fn unmap(context: &Context, start: CUdeviceptr, len: u64) {
    let driver = context.driver();
    if let (Some(unmap), Ok(bytes)) = (driver.library().mem_unmap, size(len)) {
        // SAFETY: exactly this range is mapped, and nothing touches it any more.
        let result = unsafe { unmap(start, bytes) };
        warn(driver.check(result, || "cuMemUnmap".to_owned()));
    }
}

fn free_addresses(context: &Context, start: CUdeviceptr, len: u64) {
    let driver = context.driver();
    if let (Some(free), Ok(bytes)) = (driver.library().mem_address_free, size(len)) {
        // SAFETY: exactly this range is reserved, and nothing is mapped there any more.
        let result = unsafe { free(start, bytes) };
        warn(driver.check(result, || "cuMemAddressFree".to_owned()));
    }
}
