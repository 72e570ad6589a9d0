//! libibverbs, opened at run time: the same binary runs where it is and where it is not.
#![expect(unsafe_code, reason = "opens a shared library and types the addresses of its functions")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;

use super::types::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid,
    ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

/// The name under which the loader finds it: the version that every rdma-core so far has had.
pub const LIBRARY_NAME: &str = "libibverbs.so.1";

/// Why there is no libibverbs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibraryError {
    /// It is not installed, or not to be loaded.
    #[error(
        "cannot load {LIBRARY_NAME}: {source}; install rdma-core (Debian: libibverbs1 and \
         ibverbs-providers) to use RDMA"
    )]
    Absent {
        /// What the loader said.
        source: libloading::Error,
    },
    /// A function that every version has is missing: this is another library of that name.
    #[error("{LIBRARY_NAME} has no {symbol}: {source}; install rdma-core 28 or newer")]
    Symbol {
        /// The function.
        symbol: &'static str,
        /// What the loader said.
        source: libloading::Error,
    },
}

/// Declares the functions of the library, and how they are looked up.
macro_rules! functions {
    (
        required { $($(#[$doc:meta])* $name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)+ }
        optional { $($(#[$odoc:meta])* $oname:ident = $symbol:literal: fn($($oarg:ty),*) $(-> $oret:ty)?;)+ }
    ) => {
        /// The functions of libibverbs. Those that an older version lacks are `None`, and only what
        /// needs them degrades. The data path is not here: the header calls it through
        /// [`ibv_context::ops`].
        pub struct Library {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)+
            $($(#[$odoc])* pub $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)+
            /// Keeps the addresses above valid; last, so that it is dropped last.
            _library: libloading::Library,
        }

        impl Library {
            /// Loads the library and looks its functions up.
            ///
            /// # Errors
            /// [`LibraryError`].
            pub fn open() -> Result<Self, LibraryError> {
                // SAFETY: loading runs the initialisers of libibverbs, which have no preconditions:
                // they register providers and read the environment.
                let library = unsafe { libloading::Library::new(LIBRARY_NAME) }
                    .map_err(|source| LibraryError::Absent { source })?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function of this name in infiniband/verbs.h,
                        // whose ABI is fixed by the library's version; the address is used only
                        // while `_library` lives.
                        let symbol = unsafe { library.get(concat!("ibv_", stringify!($name), "\0").as_bytes()) };
                        *symbol.map_err(|source| LibraryError::Symbol {
                            symbol: concat!("ibv_", stringify!($name)),
                            source,
                        })?
                    },)+
                    $($oname: {
                        // SAFETY: as above.
                        unsafe { library.get(concat!($symbol, "\0").as_bytes()) }.ok().map(|symbol| *symbol)
                    },)+
                    _library: library,
                })
            }
        }
    };
}

functions! {
    required {
        /// All devices, ended by a null pointer, and their number.
        get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
        /// Ends the use of a device list; open devices stay open.
        free_device_list: fn(*mut *mut ibv_device);
        /// The kernel's name of a device.
        get_device_name: fn(*mut ibv_device) -> *const c_char;
        /// Opens a device; null and `errno` where that fails.
        open_device: fn(*mut ibv_device) -> *mut ibv_context;
        /// Closes a device; all its objects must be gone.
        close_device: fn(*mut ibv_context) -> c_int;
        /// What a device can do.
        query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        /// The state of a port, as far as `link_layer` and `flags`.
        query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        /// One entry of a port's GID table; -1 and `errno` on failure.
        query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        /// A protection domain; null and `errno` on failure.
        alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        /// Frees a protection domain without objects.
        dealloc_pd: fn(*mut ibv_pd) -> c_int;
        /// Registers memory; null and `errno` on failure.
        reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        /// Ends a registration: once it returns 0 the device touches the memory no more.
        dereg_mr: fn(*mut ibv_mr) -> c_int;
        /// A channel of completion events; null and `errno` on failure.
        create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
        /// Destroys a channel without queues.
        destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
        /// A completion queue of at least so many entries; null and `errno` on failure.
        create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        /// Destroys a queue without queue pairs, after all its events were acknowledged.
        destroy_cq: fn(*mut ibv_cq) -> c_int;
        /// Takes an event off a channel; -1 and `errno` on failure.
        get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        /// Acknowledges so many events of a queue.
        ack_cq_events: fn(*mut ibv_cq, c_uint);
        /// A queue pair in RESET; null and `errno` on failure.
        create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        /// Changes the attributes that the mask names.
        modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        /// Destroys a queue pair, after all its events were acknowledged.
        destroy_qp: fn(*mut ibv_qp) -> c_int;
        /// Takes an asynchronous event of a device; -1 and `errno` on failure.
        get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        /// Acknowledges an asynchronous event.
        ack_async_event: fn(*mut ibv_async_event);
        /// Makes the library safe for processes that fork.
        fork_init: fn() -> c_int;
    }
    optional {
        /// All valid GIDs with their types (rdma-core 32 and newer). The last argument is the size
        /// of an entry. Answers their number, or a negative error number.
        query_gid_table = "_ibv_query_gid_table": fn(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
        /// Registers memory of another driver (rdma-core 34 and newer).
        reg_dmabuf_mr = "ibv_reg_dmabuf_mr": fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("query_gid_table", &self.query_gid_table.is_some())
            .field("reg_dmabuf_mr", &self.reg_dmabuf_mr.is_some())
            .finish_non_exhaustive()
    }
}
