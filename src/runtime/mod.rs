//! Threads, clocks and pacing: the only loops.

pub mod announce;
pub mod clock;
pub mod data;
pub mod deadline;
pub mod door;
pub mod heartbeat;
pub mod http;
mod mailroom;
pub mod reclaim;
mod rejections;
mod seldom;
