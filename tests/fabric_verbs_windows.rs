//! Keys of their own on a real device.

#[allow(dead_code, unused_imports, unused_macros, reason = "the other tests want no windows")]
mod conformance;
#[allow(dead_code, reason = "the other tests want no windows")]
mod rdma;

use rdma::{Lanes, device};

type Windows = Lanes<3, true>;

window_tests!(Windows, device().is_some(), 10_000);
