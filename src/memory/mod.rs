//! Host memory that NICs and local engines share: mappings, pools, extents.

mod mapping;

pub use mapping::{Mapping, OutOfBounds};
