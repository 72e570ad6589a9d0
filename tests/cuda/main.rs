//! The room `cuda` on the stand-in driver: what it does, and what it says where it cannot. No GPU has
//! part in this.
#![cfg(feature = "gpu")]
#![expect(clippy::unwrap_used, reason = "a test that meets the unexpected fails")]

#[path = "../cuda_standin/mod.rs"]
mod cuda_standin;

mod copies;
mod driver;
mod engine;
mod memory;
mod sharing;

use std::sync::Arc;

use kvrail::cuda::{Context, Driver, HostRegistration};
use kvrail::memory::Mapping;

use cuda_standin::StandIn;

/// A context on GPU 0 of a stand-in.
fn context(standin: &StandIn) -> Arc<Context> {
    let driver = Driver::open(standin.library()).unwrap();
    Context::primary(&driver.device(0).unwrap()).unwrap()
}

/// Registered host memory.
fn host(context: &Arc<Context>, len: u64) -> Arc<HostRegistration> {
    let mapping = Arc::new(Mapping::anonymous("test", len).unwrap());
    HostRegistration::new(&context.bind().unwrap(), &mapping).unwrap()
}

/// Bytes of the device's memory in use.
fn used(context: &Arc<Context>) -> u64 {
    let (free, total) = context.bind().unwrap().memory().unwrap();
    total - free
}
