//! The operating system in small safe pieces, one file each. Nothing here knows what a block is.

pub mod clock;
pub mod epoll;
pub mod eventfd;
pub mod fd_passing;
pub mod host;
pub mod ibverbs;
pub mod limits;
pub mod memory;
pub mod process;
pub mod socket;
