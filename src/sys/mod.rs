//! The operating system in small safe pieces, one file each. Nothing here knows what a block is.

pub mod allocations;
pub mod avoided;
pub mod clock;
pub mod confinement;
pub mod connections;
pub mod epoll;
pub mod eventfd;
pub mod fd_passing;
pub mod gid;
pub mod host;
pub mod ibverbs;
pub mod kernel;
pub mod libraries;
pub mod limits;
pub mod local_socket;
pub mod memfd;
pub mod memory;
pub mod pci;
pub mod process;
pub mod random;
pub mod rdma_sysfs;
pub mod root;
pub mod socket;
pub mod thread_stop;
pub mod watch;
