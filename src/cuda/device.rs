//! A device and what it can do.
#![expect(unsafe_code, reason = "calls libcuda through function pointers")]

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::sys::{CUdevice, CUuuid};

use super::{CudaError, Driver};

/// Bytes of a device's name and of its place on the bus, as they are asked for.
const TEXT_BYTES: usize = 128;

/// For whom a network card's writes into the device's memory are ordered, once its completion is seen
/// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WriteOrdering {
    /// For nobody: a flush makes them visible.
    None,
    /// For the device that owns the memory.
    Owner,
    /// For all devices.
    AllDevices,
}

/// What a device is and can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttributes {
    /// The product's name.
    pub name: String,
    /// Its identity in every process, whatever number it has there.
    pub uuid: [u8; 16],
    /// Its place on the PCI bus, as sysfs names it: `0000:3b:00.0`.
    pub pci: String,
    /// Its memory, bytes.
    pub memory_bytes: u64,
    /// Whether memory can be created apart from its pointers (`cuMemCreate`).
    pub virtual_memory: bool,
    /// Whether such memory can be passed on as a file descriptor.
    pub descriptors: bool,
    /// Whether network cards can reach its memory.
    pub rdma: bool,
    /// Whether they can reach memory of `cuMemCreate`, too.
    pub rdma_with_virtual_memory: bool,
    /// Whether its memory can be exported as a dma-buf.
    pub dma_buf: bool,
    /// Whether the host can flush network cards' writes (`cuFlushGPUDirectRDMAWrites`).
    pub host_flush: bool,
    /// For whom those writes need no flush.
    pub write_ordering: WriteOrdering,
}

/// A device, by the number that it has in this process.
#[derive(Clone)]
pub struct Device {
    driver: Arc<Driver>,
    raw: CUdevice,
    ordinal: u32,
    attributes: Arc<DeviceAttributes>,
}

impl Device {
    pub(super) fn new(driver: &Arc<Driver>, number: c_int) -> Result<Self, CudaError> {
        let library = driver.library();
        let mut raw: CUdevice = 0;
        // SAFETY: the driver is started; writes one integer.
        let result = unsafe { (library.device_get)(&raw mut raw, number) };
        driver.check(result, || format!("cuDeviceGet of GPU {number}"))?;
        let attributes = Arc::new(attributes(driver, raw)?);
        let ordinal = u32::try_from(number).unwrap_or(0);
        Ok(Self { driver: Arc::clone(driver), raw, ordinal, attributes })
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Its number in this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What it is and can do.
    #[must_use]
    pub fn attributes(&self) -> &DeviceAttributes {
        &self.attributes
    }

    pub(super) fn raw(&self) -> CUdevice {
        self.raw
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.ordinal)
            .field("attributes", &self.attributes)
            .finish_non_exhaustive()
    }
}

fn attributes(driver: &Driver, device: CUdevice) -> Result<DeviceAttributes, CudaError> {
    let library = driver.library();
    // An attribute that this driver does not know is one that the device does not have.
    let attribute = |which: Attribute| {
        let mut value: c_int = 0;
        // SAFETY: the device exists; writes one integer.
        let result = unsafe { (library.device_get_attribute)(&raw mut value, which, device) };
        if result == 0 { value } else { 0 }
    };
    let has = |which| attribute(which) != 0;
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: the device exists; writes 16 bytes.
    let result = unsafe { (library.device_get_uuid)(&raw mut uuid, device) };
    driver.check(result, || "cuDeviceGetUuid".to_owned())?;
    let mut memory_bytes: usize = 0;
    // SAFETY: the device exists; writes one integer.
    let result = unsafe { (library.device_total_mem)(&raw mut memory_bytes, device) };
    driver.check(result, || "cuDeviceTotalMem".to_owned())?;
    let flush = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
    Ok(DeviceAttributes {
        name: text(driver, "cuDeviceGetName", device, library.device_get_name)?,
        uuid: uuid.bytes.map(|byte| byte.cast_unsigned()),
        pci: text(driver, "cuDeviceGetPCIBusId", device, library.device_get_pci_bus_id)?
            .to_lowercase(),
        memory_bytes: memory_bytes as u64,
        virtual_memory: has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
            && library.mem_create.is_some(),
        descriptors: has(
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ),
        rdma: has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        rdma_with_virtual_memory: has(
            Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        ),
        dma_buf: has(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)
            && library.mem_get_handle_for_address_range.is_some(),
        host_flush: flush & 1 != 0 && library.flush_gpu_direct_rdma_writes.is_some(),
        write_ordering: match attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
        ) {
            ..100 => WriteOrdering::None,
            100..200 => WriteOrdering::Owner,
            200.. => WriteOrdering::AllDevices,
        },
    })
}

fn text(
    driver: &Driver,
    call: &'static str,
    device: CUdevice,
    get: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> u32,
) -> Result<String, CudaError> {
    let mut bytes: [c_char; TEXT_BYTES] = [0; TEXT_BYTES];
    let len = c_int::try_from(TEXT_BYTES - 1).unwrap_or(0);
    // SAFETY: the device exists; writes at most `len` bytes to an array of one more.
    let result = unsafe { get(bytes.as_mut_ptr(), len, device) };
    driver.check(result, || call.to_owned())?;
    let bytes = bytes.map(|byte| byte.cast_unsigned());
    // The last byte is still zero.
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
