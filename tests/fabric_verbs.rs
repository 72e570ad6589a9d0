//! The verbs fabric passes the conformance suite on a real device.
//!
//! `KVRAIL_RDMA_DEVICE` names the device. Without it the tests say on standard error that they are
//! skipped, and why.

#[allow(dead_code, unused_imports, unused_macros, reason = "windows have tests of their own")]
mod conformance;
mod rdma;

use rdma::{Verbs, device};

conformance_tests!(Verbs, device().is_some());
