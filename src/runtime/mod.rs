//! Threads, clocks and polling: the only loops.

pub mod deadline;
pub mod door;
