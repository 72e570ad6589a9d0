//! An open device.
#![expect(unsafe_code, reason = "calls libibverbs through function pointers")]

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::{REMEDY_DEVICE, VerbsError};
use super::gid::Gid;
use crate::sys::gid::GidType;
use crate::sys::ibverbs::constants as c;
use crate::sys::ibverbs::{
    Library, ibv_context, ibv_context_ops, ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_port_attr,
};

/// Entries of a GID table that are looked at; devices seen have at most 1024.
const GIDS_MAX: usize = 1024;

/// The two kinds of type 2 windows: both are bound to a queue pair, and differ in whether the
/// protection domain is checked besides.
const TYPE_2_WINDOWS: u32 = c::IBV_DEVICE_MEM_WINDOW_TYPE_2A | c::IBV_DEVICE_MEM_WINDOW_TYPE_2B;

/// What a device can do, as far as it matters here. Counts that a driver reports as negative are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Longest memory region, bytes.
    pub mr_bytes: u64,
    /// Work requests of one queue.
    pub work_requests: u32,
    /// Segments of one READ.
    pub read_segments: u32,
    /// Entries of one completion queue.
    pub completions: u32,
    /// READs that one queue pair answers at once.
    pub reads_served: u8,
    /// READs that one queue pair has on the wire at once.
    pub reads_issued: u8,
    /// Memory windows of type 2; 0 where it has none.
    pub windows: u32,
    /// Ports.
    pub ports: u8,
}

/// The state of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Port {
    /// Its number, from 1.
    pub number: u8,
    /// Its state, as `IBV_PORT_*`.
    pub state: i32,
    /// The MTU in use, as `IBV_MTU_*`.
    pub active_mtu: i32,
    /// Entries of its GID table.
    pub gids: u32,
    /// Longest message, bytes.
    pub message_bytes: u32,
    /// Its local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Whether it is Ethernet, which needs a GID in every address.
    pub ethernet: bool,
}

impl Port {
    /// Whether it can carry data.
    #[must_use]
    pub const fn is_active(&self) -> bool {
        self.state == c::IBV_PORT_ACTIVE
    }

    /// The state's name.
    #[must_use]
    pub const fn state_name(&self) -> &'static str {
        match self.state {
            c::IBV_PORT_DOWN => "down",
            c::IBV_PORT_INIT => "init",
            c::IBV_PORT_ARMED => "armed",
            c::IBV_PORT_ACTIVE => "active",
            c::IBV_PORT_ACTIVE_DEFER => "active (deferred)",
            _ => "unknown",
        }
    }
}

/// An open device. Closed when its last object is gone.
#[derive(Debug)]
pub struct Context {
    raw: NonNull<ibv_context>,
    events_fd: RawFd,
    name: String,
    library: Arc<Library>,
}

// SAFETY: libibverbs may be called from any thread; the pointer is freed only by `drop`.
unsafe impl Send for Context {}
// SAFETY: libibverbs locks what its calls share; nothing here is written after construction.
unsafe impl Sync for Context {}

impl Context {
    /// The names of the host's devices, in the library's order.
    ///
    /// # Errors
    /// [`VerbsError::Call`] where the system refuses to list them.
    pub fn names(library: &Library) -> Result<Vec<String>, VerbsError> {
        let mut names = Vec::new();
        with_devices(library, |name, _| names.push(name.to_owned()))?;
        Ok(names)
    }

    /// Opens a device by its name.
    ///
    /// # Errors
    /// [`VerbsError::NoDevices`], [`VerbsError::NoSuchDevice`], or [`VerbsError::Call`].
    pub fn open(library: Arc<Library>, name: &str) -> Result<Arc<Self>, VerbsError> {
        let mut names = Vec::new();
        let mut opened = None;
        with_devices(&library, |found, device| {
            names.push(found.to_owned());
            if found == name {
                // SAFETY: the device is of the list that `with_devices` holds.
                opened =
                    Some((unsafe { (library.open_device)(device) }, io::Error::last_os_error()));
            }
        })?;
        match opened {
            None if names.is_empty() => Err(VerbsError::NoDevices),
            None => {
                Err(VerbsError::NoSuchDevice { name: name.to_owned(), present: names.join(", ") })
            }
            Some((raw, source)) => match NonNull::new(raw) {
                Some(raw) => {
                    // SAFETY: the library answered a valid context; its descriptor never changes.
                    let events_fd = unsafe { (*raw.as_ptr()).async_fd };
                    let context = Self { raw, events_fd, name: name.to_owned(), library };
                    context.unblock_events()?;
                    Ok(Arc::new(context))
                }
                None => Err(VerbsError::Call {
                    call: "ibv_open_device".to_owned(),
                    device: name.to_owned(),
                    source,
                    remedy: "check the permissions of /dev/infiniband/uverbs*, and pass the device \
                             into the container",
                }),
            },
        }
    }

    /// The device's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    pub(super) fn raw(&self) -> NonNull<ibv_context> {
        self.raw
    }

    /// The functions that the C header calls inline. A driver sets them before it is opened.
    pub(super) fn ops(&self) -> &ibv_context_ops {
        // SAFETY: the context is open as long as `self`, and the operations are not written meanwhile.
        unsafe { &(*self.raw.as_ptr()).ops }
    }

    /// An error of a call on this device.
    pub(super) fn error(
        &self,
        call: String,
        source: io::Error,
        remedy: &'static str,
    ) -> VerbsError {
        VerbsError::Call { call, device: self.name.clone(), source, remedy }
    }

    /// What the device can do.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn limits(&self) -> Result<DeviceLimits, VerbsError> {
        let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open; `attr` has room for the structure.
        let rc = unsafe { (self.library.query_device)(self.raw.as_ptr(), attr.as_mut_ptr()) };
        self.check("ibv_query_device", rc)?;
        // SAFETY: all its fields are integers, for which zeros and whatever the call wrote are valid.
        let attr = unsafe { attr.assume_init() };
        let count = |value: i32| u32::try_from(value).unwrap_or(0);
        let byte = |value: i32| u8::try_from(value.clamp(0, 255)).unwrap_or(0);
        Ok(DeviceLimits {
            mr_bytes: attr.max_mr_size,
            work_requests: count(attr.max_qp_wr),
            // Some drivers leave the limit for READs at 0.
            read_segments: match count(attr.max_sge_rd) {
                0 => count(attr.max_sge),
                limit => limit.min(count(attr.max_sge)),
            },
            completions: count(attr.max_cqe),
            reads_served: byte(attr.max_qp_rd_atom),
            reads_issued: byte(attr.max_qp_init_rd_atom),
            windows: match attr.device_cap_flags & TYPE_2_WINDOWS {
                0 => 0,
                _ => count(attr.max_mw),
            },
            ports: attr.phys_port_cnt,
        })
    }

    /// The state of a port.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn port(&self, number: u8) -> Result<Port, VerbsError> {
        let mut attr = MaybeUninit::<ibv_port_attr>::zeroed();
        // SAFETY: the context is open; the function writes no more than this structure's fields.
        let rc = unsafe { (self.library.query_port)(self.raw.as_ptr(), number, attr.as_mut_ptr()) };
        self.check("ibv_query_port", rc)?;
        // SAFETY: all its fields are integers, for which zeros and whatever the call wrote are valid.
        let attr = unsafe { attr.assume_init() };
        Ok(Port {
            number,
            state: attr.state,
            active_mtu: attr.active_mtu,
            gids: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            message_bytes: attr.max_msg_sz,
            lid: attr.lid,
            ethernet: attr.link_layer == c::IBV_LINK_LAYER_ETHERNET,
        })
    }

    /// The valid entries of a port's GID table.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn gids(&self, port: &Port) -> Result<Vec<Gid>, VerbsError> {
        let Some(query) = self.library.query_gid_table else {
            return self.gids_one_by_one(port);
        };
        let mut entries = vec![ibv_gid_entry::default(); GIDS_MAX];
        // SAFETY: the context is open; there is room for `entries.len()` entries of the given size.
        let count = unsafe {
            query(
                self.raw.as_ptr(),
                entries.as_mut_ptr(),
                entries.len(),
                0,
                size_of::<ibv_gid_entry>(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            return self.gids_one_by_one(port);
        };
        let of_port = |entry: &&ibv_gid_entry| entry.port_num == u32::from(port.number);
        let table = entries.iter().take(count).filter(of_port).map(|entry| Gid {
            index: entry.gid_index,
            kind: match entry.gid_type {
                c::IBV_GID_TYPE_ROCE_V2 => GidType::RoceV2,
                c::IBV_GID_TYPE_ROCE_V1 => GidType::RoceV1,
                _ => GidType::InfiniBand,
            },
            raw: entry.gid.raw,
        });
        Ok(table.collect())
    }

    /// The table as libraries before rdma-core 32 tell it; the types come from sysfs.
    fn gids_one_by_one(&self, port: &Port) -> Result<Vec<Gid>, VerbsError> {
        let mut table = Vec::new();
        for index in 0..port.gids.min(u32::try_from(GIDS_MAX).unwrap_or(u32::MAX)) {
            let mut gid = ibv_gid::default();
            let at = i32::try_from(index).unwrap_or(i32::MAX);
            // SAFETY: the context is open; `gid` has room for the structure.
            let rc = unsafe {
                (self.library.query_gid)(self.raw.as_ptr(), port.number, at, &raw mut gid)
            };
            if rc != 0 {
                let call = format!("ibv_query_gid at index {index}");
                return Err(self.error(call, io::Error::last_os_error(), REMEDY_DEVICE));
            }
            if gid.raw == [0; 16] {
                continue;
            }
            let path = format!(
                "/sys/class/infiniband/{}/ports/{}/gid_attrs/types/{index}",
                self.name, port.number
            );
            // Without the file the kernel is older than RoCE v2.
            let kind = match std::fs::read_to_string(path).unwrap_or_default().trim() {
                "RoCE v2" => GidType::RoceV2,
                _ if port.ethernet => GidType::RoceV1,
                _ => GidType::InfiniBand,
            };
            table.push(Gid { index, kind, raw: gid.raw });
        }
        Ok(table)
    }

    /// Readable while there are asynchronous events.
    #[must_use]
    pub fn events_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the context's and stays open while it does.
        unsafe { BorrowedFd::borrow_raw(self.events_fd) }
    }

    fn unblock_events(&self) -> Result<(), VerbsError> {
        unblock(self.events_fd()).map_err(|source| {
            self.error("making the event queue non-blocking".to_owned(), source, REMEDY_DEVICE)
        })
    }

    fn check(&self, call: &str, rc: i32) -> Result<(), VerbsError> {
        if rc == 0 {
            return Ok(());
        }
        Err(self.error(call.to_owned(), io::Error::from_raw_os_error(rc.abs()), REMEDY_DEVICE))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is open, and every object of it holds an `Arc` of this value.
        let rc = unsafe { (self.library.close_device)(self.raw.as_ptr()) };
        if rc != 0 {
            tracing::warn!(device = self.name, "the device could not be closed");
        }
    }
}

/// Calls `each` with the name and address of every device.
fn with_devices(
    library: &Library,
    mut each: impl FnMut(&str, *mut crate::sys::ibverbs::ibv_device),
) -> Result<(), VerbsError> {
    let mut count = 0;
    // SAFETY: `count` is an integer to write to.
    let list = unsafe { (library.get_device_list)(&raw mut count) };
    let source = io::Error::last_os_error();
    if list.is_null() {
        // A kernel without InfiniBand support says so by ENOSYS.
        if source.raw_os_error() == Some(libc::ENOSYS) {
            return Ok(());
        }
        return Err(VerbsError::Call {
            call: "ibv_get_device_list".to_owned(),
            device: "this host".to_owned(),
            source,
            remedy: "load the module ib_uverbs, and in a container pass /dev/infiniband through",
        });
    }
    for at in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries, so the pointer stays inside it and is readable.
        let device = unsafe { list.wrapping_add(at).read() };
        // SAFETY: the device is of a list that has not been freed.
        let name = unsafe { (library.get_device_name)(device) };
        if name.is_null() {
            continue;
        }
        // SAFETY: the name is a terminated string inside the device, which the list keeps.
        let name = unsafe { CStr::from_ptr(name) };
        each(&name.to_string_lossy(), device);
    }
    // SAFETY: the list came from `get_device_list` and is freed once; open devices stay open.
    unsafe { (library.free_device_list)(list) };
    Ok(())
}

/// Makes reads from a descriptor return at once.
pub(super) fn unblock(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?;
    Ok(())
}
