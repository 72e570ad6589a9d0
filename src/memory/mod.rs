//! Host memory that NICs and local engines share: mappings, pools, extents.

mod extent;
mod mapping;

pub use extent::{Exhausted, ExtentAllocator, ReleaseError};
pub use mapping::{Mapping, OutOfBounds};
