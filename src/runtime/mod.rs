//! Threads, clocks and pacing: the only loops.

pub mod announce;
pub mod clock;
