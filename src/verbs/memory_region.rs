//! Registered memory. A region owns its memory: the device can touch it as long as the registration
//! lasts, whatever work requests name it, so the memory outlives the registration.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::VerbsError;
use super::protection_domain::ProtectionDomain;
use crate::memory::Mapping;
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

/// A registration of a mapping, or of a part of it. Ended when dropped.
#[derive(Debug)]
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    lkey: u32,
    rkey: u32,
    address: u64,
    len: u64,
    domain: Arc<ProtectionDomain>,
    /// `None` only inside `drop`.
    memory: Option<Arc<Mapping>>,
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
        let flags = match served {
            Served::No => c::IBV_ACCESS_LOCAL_WRITE,
            Served::Whole => c::IBV_ACCESS_LOCAL_WRITE | c::IBV_ACCESS_REMOTE_READ,
            Served::ByWindows => c::IBV_ACCESS_LOCAL_WRITE | c::IBV_ACCESS_MW_BIND,
        };
        let library = context.library();
        // SAFETY: the domain is allocated; `pointer` is valid for `bytes` bytes and stays mapped,
        // since the region holds `memory` until the registration has ended. Whoever else touches the
        // mapping does so by copies that tolerate concurrent writers.
        let raw = unsafe {
            (library.reg_mr)(domain.raw().as_ptr(), pointer.as_ptr().cast(), bytes, flags)
        };
        let raw = NonNull::new(raw).ok_or_else(|| refused(io::Error::last_os_error()))?;
        // SAFETY: the library answered a valid region, which nobody else frees or writes.
        let &ibv_mr { lkey, rkey, .. } = unsafe { raw.as_ref() };
        let address = u64::try_from(pointer.as_ptr().addr())
            .map_err(|error| refused(io::Error::other(error)))?;
        let (domain, memory) = (Arc::clone(domain), Some(memory));
        Ok(Self { raw, lkey, rkey, address, len, domain, memory })
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

    /// The mapping, all of it.
    #[must_use]
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        self.memory.as_ref()
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
                let _kept: *const Mapping = Arc::into_raw(memory);
            }
        }
    }
}

fn memlock() -> String {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    limit.current.map_or_else(|| "unlimited".to_owned(), |bytes| format!("{bytes} bytes"))
}
