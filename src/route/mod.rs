//! Who serves what to this node: choices of a reader, sans-IO.
//!
//! - [`Sources`] remembers what owners said about their load, and who is left alone; of two owners
//!   that hold the same run it takes the one that has less to serve.
//! - [`Flights`] lets concurrent readers of one block share one fetch.
#![forbid(unsafe_code)]

mod flights;
mod sources;

pub use flights::Flights;
pub use sources::Sources;
