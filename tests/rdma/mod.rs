//! The device that tests run on, and the fabric that they make of it.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use kvrail::fabric::Fabric;
use kvrail::memory::Mapping;
use kvrail::verbs::{VerbsConfig, VerbsFabric};

use crate::conformance::Harness;

/// Three lanes: more than one, and not a power of two. Peers read by windows where `WINDOWS` says so.
pub(crate) struct VerbsOf<const WINDOWS: bool>;

/// As most nodes are.
pub(crate) type Verbs = VerbsOf<false>;

/// The device under test; says once that there is none.
#[expect(clippy::disallowed_methods, reason = "tests take their device from the environment")]
pub(crate) fn device() -> Option<&'static str> {
    static DEVICE: OnceLock<Option<String>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        let named = std::env::var("KVRAIL_RDMA_DEVICE").ok().filter(|name| !name.is_empty());
        if named.is_none() {
            // Not by a macro, whose output the test harness would hide.
            let line = b"SKIPPED: KVRAIL_RDMA_DEVICE names no RDMA device; nothing was tested\n";
            std::io::stderr().write_all(line).ok();
        }
        named
    });
    device.as_deref()
}

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl<const WINDOWS: bool> Harness for VerbsOf<WINDOWS> {
    type Fabric = VerbsFabric;

    fn fabric() -> VerbsFabric {
        VerbsFabric::new(&VerbsConfig {
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            device: device().map(str::to_owned),
            lanes: 3,
            lease_windows: WINDOWS,
            ..VerbsConfig::default()
        })
        .unwrap()
    }

    /// SoftRoCE compares a READ with the bounds of the window's region only (`check_rkey` of its
    /// responder, Linux 6.12).
    fn windows_have_bounds() -> bool {
        device().is_some_and(|name| !name.starts_with("rxe"))
    }

    fn endpoint(fabric: &VerbsFabric) -> SocketAddr {
        fabric.local_addr().unwrap()
    }

    fn nowhere() -> SocketAddr {
        // tcpmux: reserved since 1988, served by nobody, and never given out as a free port.
        SocketAddr::from(([127, 0, 0, 1], 1))
    }

    fn memory(len: u64) -> Arc<<VerbsFabric as Fabric>::Memory> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        Arc::new(Mapping::new(&file, len).unwrap())
    }

    fn write(memory: &Mapping, offset: u64, bytes: &[u8]) {
        memory.write(offset, bytes).unwrap();
    }

    fn read(memory: &Mapping, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        memory.read(offset, &mut bytes).unwrap();
        bytes
    }
}
