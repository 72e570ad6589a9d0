//! The only loops: threads, clocks, polling, and the small HTTP server for metrics and health.

pub mod http;
