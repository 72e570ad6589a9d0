//! libcuda, opened at run time and looked up function by function.
//!
//! The argument types are cudarc's, generated from the driver's header. Its functions are not used:
//! they panic without the library and for a symbol that an older driver lacks, and they answer an
//! enum that a newer driver's error codes are not values of. Here results are plain numbers.
#![expect(unsafe_code, reason = "opens a shared library and types the addresses of its functions")]

use std::ffi::{OsStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;

use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUipcEventHandle,
    CUipcMemHandle, CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemRangeHandleType, CUpointer_attribute,
    CUstream, CUuuid,
};
use libloading::os::unix::{Library as Opened, RTLD_LOCAL, RTLD_NOW};

use super::CudaError;

/// Declares the functions of the library, and how they are looked up.
macro_rules! functions {
    (
        required { $($name:ident = $symbol:literal: fn($($arg:ty),*);)+ }
        optional { $($oname:ident = $osymbol:literal: fn($($oarg:ty),*);)+ }
    ) => {
        /// The functions of libcuda that kvrail calls, by the driver's names without their prefix.
        /// Each answers a `CUresult` as a number. Those that an older driver lacks are `None`.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> c_uint,)+
            $(pub(super) $oname: Option<unsafe extern "C" fn($($oarg),*) -> c_uint>,)+
        }

        impl Library {
            /// Loads the library for the rest of the process's life and looks its functions up.
            pub(super) fn open(name: &OsStr) -> Result<Self, CudaError> {
                // A driver has threads and exit handlers of its own, so it is never unloaded: that
                // keeps the addresses below valid, too.
                let flags = RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE;
                // SAFETY: loading runs the initialisers of libcuda, which have no preconditions.
                let library = unsafe { Opened::open(Some(name), flags) }
                    .map_err(|source| CudaError::Absent { library: name.display().to_string(), source })?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function of this name in cuda.h, whose ABI
                        // the versioned name fixes; the library stays loaded.
                        let symbol = unsafe { library.get(concat!($symbol, "\0").as_bytes()) };
                        *symbol.map_err(|source| CudaError::Symbol { symbol: $symbol, source })?
                    },)+
                    $($oname: {
                        // SAFETY: as above.
                        unsafe { library.get(concat!($osymbol, "\0").as_bytes()) }.ok().map(|symbol| *symbol)
                    },)+
                })
            }
        }
    };
}

functions! {
    required {
        init = "cuInit": fn(c_uint);
        driver_get_version = "cuDriverGetVersion": fn(*mut c_int);
        device_get_count = "cuDeviceGetCount": fn(*mut c_int);
        device_get = "cuDeviceGet": fn(*mut CUdevice, c_int);
        device_get_name = "cuDeviceGetName": fn(*mut c_char, c_int, CUdevice);
        device_get_uuid = "cuDeviceGetUuid_v2": fn(*mut CUuuid, CUdevice);
        device_get_pci_bus_id = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, CUdevice);
        device_total_mem = "cuDeviceTotalMem_v2": fn(*mut usize, CUdevice);
        device_get_attribute = "cuDeviceGetAttribute": fn(*mut c_int, CUdevice_attribute, CUdevice);
        device_primary_ctx_retain = "cuDevicePrimaryCtxRetain": fn(*mut CUcontext, CUdevice);
        device_primary_ctx_release = "cuDevicePrimaryCtxRelease_v2": fn(CUdevice);
        ctx_push_current = "cuCtxPushCurrent_v2": fn(CUcontext);
        ctx_pop_current = "cuCtxPopCurrent_v2": fn(*mut CUcontext);
        stream_create = "cuStreamCreate": fn(*mut CUstream, c_uint);
        stream_destroy = "cuStreamDestroy_v2": fn(CUstream);
        stream_synchronize = "cuStreamSynchronize": fn(CUstream);
        stream_wait_event = "cuStreamWaitEvent": fn(CUstream, CUevent, c_uint);
        event_create = "cuEventCreate": fn(*mut CUevent, c_uint);
        event_destroy = "cuEventDestroy_v2": fn(CUevent);
        event_record = "cuEventRecord": fn(CUevent, CUstream);
        event_query = "cuEventQuery": fn(CUevent);
        event_synchronize = "cuEventSynchronize": fn(CUevent);
        mem_get_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
        mem_alloc = "cuMemAlloc_v2": fn(*mut CUdeviceptr, usize);
        mem_free = "cuMemFree_v2": fn(CUdeviceptr);
        mem_get_address_range = "cuMemGetAddressRange_v2": fn(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        pointer_get_attribute = "cuPointerGetAttribute": fn(*mut c_void, CUpointer_attribute, CUdeviceptr);
        pointer_set_attribute = "cuPointerSetAttribute": fn(*const c_void, CUpointer_attribute, CUdeviceptr);
        memcpy_htod_async = "cuMemcpyHtoDAsync_v2": fn(CUdeviceptr, *const c_void, usize, CUstream);
        memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2": fn(*mut c_void, CUdeviceptr, usize, CUstream);
        memcpy_dtod_async = "cuMemcpyDtoDAsync_v2": fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
        memcpy_2d_async = "cuMemcpy2DAsync_v2": fn(*const CUDA_MEMCPY2D, CUstream);
        mem_host_register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
        mem_host_unregister = "cuMemHostUnregister": fn(*mut c_void);
        ipc_get_mem_handle = "cuIpcGetMemHandle": fn(*mut CUipcMemHandle, CUdeviceptr);
        ipc_open_mem_handle = "cuIpcOpenMemHandle_v2": fn(*mut CUdeviceptr, CUipcMemHandle, c_uint);
        ipc_close_mem_handle = "cuIpcCloseMemHandle": fn(CUdeviceptr);
        ipc_get_event_handle = "cuIpcGetEventHandle": fn(*mut CUipcEventHandle, CUevent);
        ipc_open_event_handle = "cuIpcOpenEventHandle": fn(*mut CUevent, CUipcEventHandle);
    }
    optional {
        get_error_name = "cuGetErrorName": fn(c_uint, *mut *const c_char);
        mem_create = "cuMemCreate": fn(*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
        mem_release = "cuMemRelease": fn(CUmemGenericAllocationHandle);
        mem_address_reserve = "cuMemAddressReserve": fn(*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
        mem_address_free = "cuMemAddressFree": fn(CUdeviceptr, usize);
        mem_map = "cuMemMap": fn(CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
        mem_unmap = "cuMemUnmap": fn(CUdeviceptr, usize);
        mem_set_access = "cuMemSetAccess": fn(CUdeviceptr, usize, *const CUmemAccessDesc, usize);
        mem_get_allocation_granularity = "cuMemGetAllocationGranularity": fn(*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
        mem_export_to_shareable_handle = "cuMemExportToShareableHandle": fn(*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
        mem_import_from_shareable_handle = "cuMemImportFromShareableHandle": fn(*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
        mem_get_handle_for_address_range = "cuMemGetHandleForAddressRange": fn(*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong);
        mem_alloc_host = "cuMemAllocHost_v2": fn(*mut *mut c_void, usize);
        mem_free_host = "cuMemFreeHost": fn(*mut c_void);
        memcpy_htod = "cuMemcpyHtoD_v2": fn(CUdeviceptr, *const c_void, usize);
        memcpy_dtoh = "cuMemcpyDtoH_v2": fn(*mut c_void, CUdeviceptr, usize);
        flush_gpu_direct_rdma_writes = "cuFlushGPUDirectRDMAWrites": fn(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope);
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("mem_create", &self.mem_create.is_some())
            .field("dma_buf", &self.mem_get_handle_for_address_range.is_some())
            .field("flush", &self.flush_gpu_direct_rdma_writes.is_some())
            .finish_non_exhaustive()
    }
}
