//! Why something of a GPU could not be had or done.

use crate::memory::OutOfBounds;
use crate::types::Scope;

/// The oldest driver that is used: CUDA 11.3, the first with `cuFlushGPUDirectRDMAWrites`.
pub(super) const DRIVER_MIN: (u32, u32) = (11, 3);

/// Results that end a context: whatever uses it afterwards fails alike, and only a new process gets a
/// working one. From uncorrectable ECC and NVLink errors to faults of a kernel.
const FATAL: [u32; 14] = [4, 46, 214, 220, 700, 702, 709, 714, 715, 716, 717, 718, 719, 999];

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// An error of the driver or of its use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver library.
    #[error(
        "cannot load {library}: {source}; install the NVIDIA driver, and start a container with \
         --gpus all"
    )]
    Absent {
        /// The name under which it was looked for.
        library: String,
        /// What the loader said.
        source: libloading::Error,
    },
    /// The library lacks a function that every supported driver has.
    #[error(
        "the driver's library has no {symbol}: {source}; install a driver for CUDA {}.{} or newer",
        DRIVER_MIN.0, DRIVER_MIN.1
    )]
    Symbol {
        /// The function.
        symbol: &'static str,
        /// What the loader said.
        source: libloading::Error,
    },
    /// The driver is older than what kvrail uses.
    #[error(
        "the driver is for CUDA {}.{}: install one for CUDA {}.{} or newer",
        version.0, version.1, DRIVER_MIN.0, DRIVER_MIN.1
    )]
    TooOld {
        /// The driver's version of CUDA, major and minor.
        version: (u32, u32),
    },
    /// The driver sees no device.
    #[error(
        "the driver sees no GPU: look at nvidia-smi, at CUDA_VISIBLE_DEVICES, and at the devices \
         that the container was given"
    )]
    NoDevice,
    /// There is no device of this number.
    #[error("there is no GPU {ordinal}: the driver sees {count}, numbered from 0")]
    NoSuchDevice {
        /// The number asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// This process is a fork of the one that started the driver.
    #[error("a GPU driver does not survive fork: open it in the process that uses it")]
    Forked,
    /// The driver is too old for this, or the device is not made for it.
    #[error("{what} cannot be had: {why}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// A range leaves its memory.
    #[error(transparent)]
    Bounds(#[from] OutOfBounds),
    /// Memory of the wrong device or context.
    #[error("the memory belongs to GPU {owner}, not to GPU {here}: use the GPU that it is on")]
    WrongDevice {
        /// The device of the memory.
        owner: u32,
        /// The device that it was to be used with.
        here: u32,
    },
    /// As many copies are queued as the queue takes.
    #[error(
        "all {limit} copies of the queue are in flight: poll for their ends, then submit again"
    )]
    Full {
        /// Copies that the queue takes.
        limit: usize,
    },
    /// A call was refused.
    #[error("{call}: {name} ({result}){remedy}")]
    Call {
        /// The call, with what it was about.
        call: String,
        /// The driver's answer.
        result: u32,
        /// The driver's name for it.
        name: String,
        /// What to try, after a semicolon; empty where there is nothing to say.
        remedy: &'static str,
    },
}

impl CudaError {
    /// Whose fault it is.
    #[must_use]
    pub const fn scope(&self) -> Scope {
        match self {
            Self::Bounds(_) | Self::WrongDevice { .. } => Scope::Request,
            _ => Scope::Local,
        }
    }

    /// Whether the device is lost to this process: nothing on it succeeds any more.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Call { result, .. } if FATAL.contains(result))
    }

    /// Whether the device has no memory left.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Call { result: OUT_OF_MEMORY, .. })
    }

    /// Whether it passes when what is in flight ends.
    #[must_use]
    pub const fn is_backpressure(&self) -> bool {
        matches!(self, Self::Full { .. })
    }
}
