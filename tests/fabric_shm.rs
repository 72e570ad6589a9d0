//! The shm fabric passes the conformance suite, alone and beside the TCP fabric.

mod conformance;

use std::sync::atomic::{AtomicU32, Ordering};

use kvrail::shm::{ShmConfig, ShmFabric, ShmName};

use conformance::Harness;

struct Shm;

/// Names are of the whole host: each fabric of this process gets one of its own.
fn name() -> ShmName {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    ShmName::new(&format!("kvrail-test/{}/{number}", std::process::id()))
}

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl Harness for Shm {
    type Fabric = ShmFabric;

    fn fabric() -> ShmFabric {
        ShmFabric::new(&ShmConfig { listen: Some(name()), ..ShmConfig::default() }).unwrap()
    }

    fn endpoint(fabric: &ShmFabric) -> ShmName {
        fabric.name().unwrap().clone()
    }

    fn nowhere() -> ShmName {
        name()
    }
}

conformance_tests!(Shm);

/// Shared memory beside TCP, as nodes have it: all peers are on this host.
mod beside_tcp {
    crate::conformance_tests!(super::with_shm::Beside);
}

mod with_shm;
