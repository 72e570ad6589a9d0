//! RDMA over libibverbs: its objects under the field's own names, and a fabric made of them.
//!
//! Each object keeps its parents alive, so that none can be destroyed under another: a
//! [`QueuePair`] holds its [`CompletionQueue`] and [`ProtectionDomain`], those hold the [`Context`].
//! A [`MemoryRegion`] holds its memory until the device has let go of it. With that, posting a work
//! request needs no promise of the caller: keys that name no registration are refused by the device.

mod async_event;
mod completion_channel;
mod completion_queue;
mod context;
mod error;
mod fabric;
mod gid;
mod memory_region;
mod memory_window;
mod protection_domain;
mod queue_pair;
mod work;

pub use async_event::AsyncEvent;
pub use completion_channel::CompletionChannel;
pub use completion_queue::CompletionQueue;
pub use context::{Context, DeviceLimits, Port};
pub use error::VerbsError;
pub use fabric::{NicPair, PollMode, Posts, VerbsConfig, VerbsFabric};
pub use gid::{Gid, GidChoice, choose, describe};
pub use memory_region::{MemoryRegion, Served};
pub use memory_window::MemoryWindow;
pub use protection_domain::ProtectionDomain;
pub use queue_pair::{PartlyPosted, Path, QueuePair, QueuePairAddress, QueueSizes};
pub use work::{Bind, Segment, SendList};
