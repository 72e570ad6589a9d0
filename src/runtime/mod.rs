//! Threads, clocks and pacing: the only loops.

pub mod announce;
pub mod clock;
mod connected;
pub mod data;
pub mod deadline;
pub mod door;
pub mod heartbeat;
pub mod http;
pub mod in_place;
mod mailroom;
pub mod reclaim;
mod rejections;
mod seldom;
