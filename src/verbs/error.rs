//! Why a verbs object could not be made or used.

use std::io;

use crate::fabric::FabricError;
use crate::sys::ibverbs::LibraryError;
use crate::types::Scope;

/// An error of libibverbs or of a device, with what to try.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// There is no libibverbs.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The host has no RDMA device at all.
    #[error(
        "this host has no RDMA device: load its driver (rdma_rxe gives one on any Ethernet \
         interface: rdma link add rxe0 type rxe netdev eth0), and in a container pass \
         /dev/infiniband through"
    )]
    NoDevices,
    /// The named device does not exist.
    #[error("there is no RDMA device {name}; this host has {present}")]
    NoSuchDevice {
        /// The name asked for.
        name: String,
        /// The names of those that exist.
        present: String,
    },
    /// No port of the device can carry data.
    #[error(
        "no port of {device} is active ({states}): bring its network interface up, or check the \
         cable and the subnet manager"
    )]
    NoActivePort {
        /// The device.
        device: String,
        /// Each port with its state.
        states: String,
    },
    /// The port has no usable GID.
    #[error(
        "port {port} of {device} has no usable GID ({table}): give its network interface an IP \
         address"
    )]
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The table as it is.
        table: String,
    },
    /// The GID index that was asked for has no GID.
    #[error("port {port} of {device} has no GID at index {index}; it has {table}")]
    NoSuchGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// The index asked for.
        index: u32,
        /// The table as it is.
        table: String,
    },
    /// The device cannot do what the fabric needs.
    #[error("{device} {lack}")]
    Incapable {
        /// The device.
        device: String,
        /// What it lacks, and what to do.
        lack: String,
    },
    /// A call failed.
    #[error("{call} on {device}: {source}; {remedy}")]
    Call {
        /// The call, with what it was about.
        call: String,
        /// The device.
        device: String,
        /// The system's answer.
        source: io::Error,
        /// What to try.
        remedy: &'static str,
    },
    /// A part of the fabric that is not of the device: sockets, descriptors, random bytes.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

impl VerbsError {
    /// Whose fault it is: these are all of this host.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Fabric(error) => error.scope(),
            _ => Scope::Local,
        }
    }
}

impl From<VerbsError> for FabricError {
    fn from(error: VerbsError) -> Self {
        match error {
            VerbsError::Fabric(error) => error,
            VerbsError::Call { call, device, source, remedy } => {
                Self::Os { call: format!("{call} on {device}"), source, remedy }
            }
            other => Self::Os {
                call: "RDMA".to_owned(),
                source: io::Error::other(other),
                remedy: "use another device, or --transport tcp",
            },
        }
    }
}

/// What to try when a device object cannot be made.
pub(super) const REMEDY_OBJECTS: &str = "the device is out of such objects or of memory: use fewer \
                                         connections or --streams, and raise the memlock limit";

/// What to try when a call fails that always works on a working device.
pub(super) const REMEDY_DEVICE: &str =
    "the device may be going away: look at the kernel's log and at rdma link";
