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
pub mod layout;
pub mod policy;
pub mod store;
pub mod lease;
pub mod transfer;
pub mod protocol;
pub mod health;
pub mod peer;
pub mod registry;
pub mod route;

// machines: all IO and all `unsafe`
pub mod sys;
pub mod memory;
pub mod verbs;
pub mod sim;
pub mod tcp;
pub mod shm;
pub mod net;

// pace: threads, clocks, polling
pub mod runtime;

// services: assembly
pub mod node;
pub mod registryd;
pub mod client;

// shell: the outside
pub mod metrics;
pub mod config;
pub mod cli;
