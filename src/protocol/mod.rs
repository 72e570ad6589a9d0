//! What travels between processes: fixed-layout little-endian messages, bounded and versioned.
#![forbid(unsafe_code)]

pub mod door;
