//! Who serves what to this node: choices of a reader, sans-IO.
//!
//! - [`Read`] is one read of blocks that are not here: it plans, asks owners, and asks others for what
//!   it did not get.
//! - [`Sources`] remembers what owners said about their load, and who is left alone; of two owners
//!   that hold the same run it takes the one that has less to serve.
//! - [`Flights`] lets concurrent readers of one block share one fetch.
#![forbid(unsafe_code)]

mod flights;
mod lend;
mod read;
mod sources;
#[cfg(test)]
mod tests;

pub use flights::Flights;
pub use lend::{Lend, Lent};
pub use read::{Question, Read, Step};
pub use sources::Sources;
