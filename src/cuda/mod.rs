//! A GPU's memory, by way of the driver that is opened at run time.
//!
//! One binary serves hosts with and without a GPU: without the driver's library, with one that lacks a
//! function, with an old one, without a device, or in a fork, [`Driver::open`] and what follows answer
//! a [`CudaError`] that says what to do.
//!
//! # Order and visibility
//!
//! Three parties touch a GPU's memory: the GPU's own engines (kernels and copies, in the order of their
//! streams), network cards (one-sided READs in both directions), and the CPU only by way of either.
//! These rules hold, in the words of the driver's documentation:
//!
//! 1. *A READ into GPU memory, then the GPU.* That a card's completion is seen does not by itself mean
//!    that the GPU sees the bytes. `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` says for whom
//!    it does: `OWNER` or `ALL_DEVICES` need nothing, `NONE` needs a
//!    `cuFlushGPUDirectRDMAWrites(CURRENT_CTX, TO_OWNER)` between the completion and the moment at which
//!    anyone is told of the block ([`Bound::flush_writes`]). A device that does not order writes and
//!    lets nobody flush them is never written by a card: its memory takes the staging rung.
//! 2. *The GPU, then a READ out of its memory.* A card reads what is in memory; work in a stream may
//!    not have run. A block is served only after an event that was recorded behind the work that wrote
//!    it has completed: the engine's event, or the one behind our own copy ([`CopyQueue`]).
//! 3. *Copies and copies.* Copies of one queue run in the order submitted. Between queues, and between a
//!    queue and an engine's streams, `cuStreamWaitEvent` makes the order ([`CopyQueue::wait_for`]).
//!    The driver's promise that synchronous operations are synchronous does not hold for memory that
//!    others reach, unless `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` is set: it is, on all memory here.
//! 4. *The CPU, then a copy out of host memory.* What the CPU or a card wrote before
//!    `cuMemcpyHtoDAsync` is called is what it copies; the bytes stay put until the copy's event.
//!
//! Invariant 1 of the design holds for copies as for cards: a timer frees nothing. A [`CopyQueue`] holds
//! both ends of a copy until its event has completed, and dropping the queue waits.
//!
//! # Contexts
//!
//! The primary context of each device is used, which an embedding process shares with its libraries.
//! What needs it current takes a [`Bound`]. Objects keep their context and bind it to end themselves.

mod context;
mod copies;
mod device;
mod dma_buf;
mod driver;
mod engine;
mod error;
mod event;
mod host;
mod ipc;
mod library;
mod memory;
mod pinned;
mod pool;
mod staging;
mod stream;

pub use context::{Bound, Context};
pub use copies::{CopyQueue, End, Piece};
pub use device::{Device, DeviceAttributes, WriteOrdering};
pub use dma_buf::DmaBuf;
pub use driver::{Driver, LIBRARY_NAME};
pub use engine::{EngineDevices, OnLoss, rows};
pub use error::CudaError;
pub use event::{Event, IpcEventHandle};
pub use host::HostRegistration;
pub use ipc::IpcMemoryHandle;
pub use memory::DeviceMemory;
pub use pinned::PinnedMemory;
pub use pool::GpuPool;
pub use staging::{Staging, StagingCopy, StagingSlot};
pub use stream::Stream;
