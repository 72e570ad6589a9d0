//! Transfers: what a requester reads for one lease, and when that memory is its own again.
//!
//! A [`Plan`] turns the loans of a lease into READs: spans that lie next to each other on the holder
//! become one READ that scatters over the destinations; a span longer than a READ may be is split. A
//! [`ReadList`] names the spans of both sides, so that blocks in one piece and in many are read alike.
//! [`Transfers`] is the in-flight table. It **owns every destination from before the first READ is
//! posted until the last completion or flush of that block was polled** (DESIGN §6, invariant 1): a
//! deadline makes it ask for the connection to be broken, never hand out memory. Completions are
//! matched by their [`WrId`](crate::fabric::WrId) alone, slot and generation; one that matches
//! nothing is counted and dropped (invariant 4).
#![forbid(unsafe_code)]

mod plan;
mod table;

pub use plan::{Plan, PlannedRead, ReadList, Uneven};
pub use table::{Finished, FinishedBlock, TransferId, Transfers};
