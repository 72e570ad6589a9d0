//! Host memory that NICs and local engines share: mappings, pools, extents.

mod claims;
mod create;
mod engine;
mod extent;
mod foreign;
mod mapping;
mod pool;
mod regions;
mod ring;
mod space;
mod strided;

pub use claims::{Claim, Claims, Identity, Owner};
pub use create::{HugePageSize, PoolError, PoolOptions, check_room};
pub use engine::{Copier, CopyError, Direction, EngineMemory, ImportError, SharedMemory};
pub use extent::{Exhausted, ExtentAllocator, ReleaseError};
pub use foreign::{
    Climb, ExportRefused, ExportedRange, ForeignFabric, ForeignMemory, GpuDirect, Pinner,
    Registrable, Rung, RungRefused,
};
pub use mapping::{Checksum, Mapping, OutOfBounds, checksum_bytes};
pub use pool::{HostPool, Pool, Reservation, Watermarks};
pub use regions::Regions;
pub use ring::{Ring, RingPiece};
pub use space::{ExtentSpace, Usage};
pub use strided::StridedCopy;
