//! kvrail serves LLM KV-cache blocks between GPU hosts at the speed of the fabric.
//!
//! The modules are declared in the order of their layers. A module uses only modules above it;
//! `tests/tidy.rs` reads the order from this file and fails on an arrow that runs back up.

// words: values without dependencies
pub mod limits;
pub mod types;
mod sync;
pub mod event;

// port: one narrow trait and plain data
pub mod fabric;

// cores: sans-IO; time is an argument

// machines: all IO and all `unsafe`
pub mod memory;

// pace: threads, clocks, polling
pub mod runtime;

// services: assembly

// shell: the outside
pub mod metrics;
pub mod config;
pub mod cli;
