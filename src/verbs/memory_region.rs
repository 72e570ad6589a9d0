//! Registered memory. A region owns its memory: the device can touch it as long as the registration
//! lasts, whatever work requests name it, so the memory outlives the registration.
//!
//! Memory of another driver's device is registered by a dma-buf or by its bare pointer. A dma-buf's
//! descriptor is closed after the registration, which holds the buffer itself.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::VerbsError;
use super::protection_domain::ProtectionDomain;
use crate::memory::{ForeignMemory, Mapping, Rung, RungRefused};
use crate::sys::ibverbs::constants as c;
use crate::sys::ibverbs::ibv_mr;

/// What peers may do with a registration, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Served {
    /// Nothing.
    No,
    /// READ it by the registration's own key.
    Whole,
    /// READ those parts of it that a [`super::MemoryWindow`] is bound to; its own key reads nothing.
    ByWindows,
}

impl Served {
    const fn flags(self) -> i32 {
        match self {
            Self::No => c::IBV_ACCESS_LOCAL_WRITE,
            Self::Whole => c::IBV_ACCESS_LOCAL_WRITE | c::IBV_ACCESS_REMOTE_READ,
            Self::ByWindows => c::IBV_ACCESS_LOCAL_WRITE | c::IBV_ACCESS_MW_BIND,
        }
    }
}

/// What a registration keeps alive.
#[derive(Debug, Clone)]
pub(super) enum Kept {
    /// Host memory.
    Mapping(Arc<Mapping>),
    /// A device's memory.
    Foreign(Arc<dyn ForeignMemory>),
}

/// A registration of memory, or of a part of it. Ended when dropped.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    address: u64,
    len: u64,
    domain: Arc<ProtectionDomain>,
    /// `None` only inside `drop`.
    memory: Option<Kept>,
}

// SAFETY: libibverbs may be called from any thread; the pointer is freed only by `drop`.
unsafe impl Send for MemoryRegion {}
// SAFETY: libibverbs locks what its calls share; nothing here is written after construction.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers a mapping. The device may write to it for local work requests; peers may read it
    /// as `served` says, and may never write.
    ///
    /// # Errors
    /// [`VerbsError::Call`], also for a mapping longer than the device registers at once.
    pub fn new(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<Mapping>,
        served: Served,
    ) -> Result<Self, VerbsError> {
        let len = memory.len();
        Self::part(domain, memory, (0, len), served)
    }

    /// Registers `len` bytes at `offset` of a mapping, as [`Self::new`] registers all of it.
    ///
    /// # Errors
    /// As [`Self::new`], and [`VerbsError::Call`] for bytes outside the mapping.
    pub fn part(
        domain: &Arc<ProtectionDomain>,
        memory: Arc<Mapping>,
        (offset, len): (u64, u64),
        served: Served,
    ) -> Result<Self, VerbsError> {
        let context = domain.context();
        let refused = |source| {
            let call = format!("ibv_reg_mr of {len} bytes (memlock limit {})", memlock());
            context.error(
                call,
                source,
                "raise the memlock limit (ulimit -l unlimited, LimitMEMLOCK=infinity), or grant \
                 CAP_IPC_LOCK",
            )
        };
        let pointer =
            memory.pointer(offset, len).map_err(|error| refused(io::Error::other(error)))?;
        let bytes = usize::try_from(len).map_err(|error| refused(io::Error::other(error)))?;
        let library = context.library();
        // SAFETY: the domain is allocated; `pointer` is valid for `bytes` bytes and stays mapped,
        // since the region holds `memory` until the registration has ended. Whoever else touches the
        // mapping does so by copies that tolerate concurrent writers.
        let raw = unsafe {
            let flags = served.flags();
            (library.reg_mr)(domain.raw().as_ptr(), pointer.as_ptr().cast(), bytes, flags)
        };
        let raw = NonNull::new(raw).ok_or_else(|| refused(io::Error::last_os_error()))?;
        let address = u64::try_from(pointer.as_ptr().addr())
            .map_err(|error| refused(io::Error::other(error)))?;
        Ok(Self::made(raw, (address, len), domain, Kept::Mapping(memory)))
    }

    /// Registers `len` bytes at `offset` of a device's memory, by a rung that is not staging.
    ///
    /// # Errors
    /// The rung as it was refused, for [`Rung::Staging`] too: no card takes part in that.
    pub fn foreign(
        domain: &Arc<ProtectionDomain>,
        memory: &Arc<dyn ForeignMemory>,
        (offset, len): (u64, u64),
        served: Served,
        rung: Rung,
    ) -> Result<Self, RungRefused> {
        let nic = domain.context().name().to_owned();
        let refused =
            |call: String, errno, why| RungRefused { rung, nic: nic.clone(), call, errno, why };
        let of_driver = |error: crate::memory::ExportRefused| refused(error.call, None, error.why);
        let inside = offset.checked_add(len).is_some_and(|end| end <= memory.bytes());
        let Some(address) = memory.address().checked_add(offset).filter(|_| inside) else {
            return Err(refused(
                format!("bytes {offset}+{len}"),
                None,
                "not in the memory".to_owned(),
            ));
        };
        memory.writable().map_err(of_driver)?;
        let (call, raw) = match rung {
            Rung::DmaBuf => {
                let exported = memory.dma_buf(offset, len).map_err(of_driver)?;
                let call = format!("ibv_reg_dmabuf_mr of {len} bytes");
                let Some(reg_dmabuf_mr) = domain.context().library().reg_dmabuf_mr else {
                    let why = "rdma-core 34 and newer have it".to_owned();
                    return Err(refused(call, None, why));
                };
                let bytes = usize::try_from(len).unwrap_or(usize::MAX);
                // SAFETY: the domain is allocated; the descriptor is open; the buffer has the range;
                // as address for work requests the device's own pointer is chosen.
                let raw = unsafe {
                    let (fd, flags) = (exported.fd.as_raw_fd(), served.flags());
                    reg_dmabuf_mr(domain.raw().as_ptr(), exported.offset, bytes, address, fd, flags)
                };
                (call, raw)
            }
            Rung::Peermem => {
                let bytes = usize::try_from(len).unwrap_or(usize::MAX);
                let pointer =
                    std::ptr::without_provenance_mut(usize::try_from(address).unwrap_or(0));
                let reg_mr = domain.context().library().reg_mr;
                // SAFETY: the domain is allocated; the pointer is the device's, which the kernel looks
                // up and refuses where nothing of the kind is behind it; the memory stays, since the
                // region holds it.
                let raw = unsafe { reg_mr(domain.raw().as_ptr(), pointer, bytes, served.flags()) };
                (format!("ibv_reg_mr of {len} bytes"), raw)
            }
            Rung::Staging => {
                return Err(refused("registering".to_owned(), None, "is not asked for".to_owned()));
            }
        };
        let error = io::Error::last_os_error();
        let raw = NonNull::new(raw)
            .ok_or_else(|| refused(call, error.raw_os_error(), error.to_string()))?;
        Ok(Self::made(raw, (address, len), domain, Kept::Foreign(Arc::clone(memory))))
    }

    fn made(
        raw: NonNull<ibv_mr>,
        (address, len): (u64, u64),
        domain: &Arc<ProtectionDomain>,
        memory: Kept,
    ) -> Self {
        // SAFETY: the library answered a valid region, which nobody else frees or writes.
        let &ibv_mr { lkey, rkey, .. } = unsafe { raw.as_ref() };
        let domain = Arc::clone(domain);
        Self { raw, lkey, rkey, address, len, domain, memory: Some(memory) }
    }

    pub(super) fn raw(&self) -> NonNull<ibv_mr> {
        self.raw
    }

    /// The key of local work requests.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key that a peer presents.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// The address of its first byte, for work requests of both ends.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The mapping, all of it; `None` for memory of another driver's device.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        match self.memory.as_ref()? {
            Kept::Mapping(mapping) => Some(mapping),
            Kept::Foreign(_) => None,
        }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let context = self.domain.context();
        // SAFETY: the region is registered, and this is the only place that ends it.
        let rc = unsafe { (context.library().dereg_mr)(self.raw.as_ptr()) };
        if rc != 0 {
            let error = io::Error::from_raw_os_error(rc.abs());
            tracing::error!(
                device = context.name(), %error,
                "a memory region could not be deregistered: its memory is kept for good"
            );
            // The device may still write to it.
            if let Some(memory) = self.memory.take() {
                match memory {
                    Kept::Mapping(memory) => {
                        let _kept: *const Mapping = Arc::into_raw(memory);
                    }
                    Kept::Foreign(memory) => {
                        let _kept: *const dyn ForeignMemory = Arc::into_raw(memory);
                    }
                }
            }
        }
    }
}

fn memlock() -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    limit.current.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
}
