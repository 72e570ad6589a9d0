//! Host memory that NICs and local engines share: mappings, pools, extents.

mod create;
mod engine;
mod extent;
mod mapping;
mod pool;
mod regions;

pub use create::{HugePageSize, PoolError, PoolOptions};
pub use engine::{
    Claim, Claims, Copier, CopyError, Direction, EngineMemory, Identity, ImportError, SharedMemory,
    StridedCopy,
};
pub use extent::{Exhausted, ExtentAllocator, ReleaseError};
pub use mapping::{Mapping, OutOfBounds, checksum_bytes};
pub use pool::{HostPool, Reservation, Usage, Watermarks};
pub use regions::Regions;
