//! Sockets beyond what the standard library offers.

pub mod fd_passing;
