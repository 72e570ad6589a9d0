//! The devices that tests run on, and the fabrics that they make of them.

use std::cell::Cell;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::OnceLock;

use kvrail::verbs::{VerbsConfig, VerbsFabric};

use crate::conformance::Harness;

/// Fabrics with so many lanes. Where the environment names a second device, every other fabric of a
/// test is on that one, so that both ends of a pair are not on the same.
/// Peers read by windows where `WINDOWS` says so.
pub(crate) struct Lanes<const COUNT: usize, const WINDOWS: bool = false>;

/// More than one lane, and not a power of two.
pub(crate) type Verbs = Lanes<3>;

/// A fabric on a device, as the tests have it.
pub(crate) fn config(device: &str, lanes: usize) -> VerbsConfig {
    VerbsConfig {
        listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
        devices: vec![device.to_owned()],
        lanes,
        ..VerbsConfig::default()
    }
}

/// The device under test; says once that there is none.
pub(crate) fn device() -> Option<&'static str> {
    static DEVICE: OnceLock<Option<String>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        let named = setting("KVRAIL_RDMA_DEVICE");
        if named.is_none() {
            // Not by a macro, whose output the test harness would hide.
            let line = b"SKIPPED: KVRAIL_RDMA_DEVICE names no RDMA device; nothing was tested\n";
            std::io::stderr().write_all(line).ok();
        }
        named
    });
    device.as_deref()
}

/// A setting of the test run; an empty one is none.
#[expect(clippy::disallowed_methods, reason = "tests take their devices from the environment")]
pub(crate) fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

thread_local! {
    /// Whether the next fabric of this test is its second, fourth, and so on.
    static SECOND: Cell<bool> = const { Cell::new(false) };
}

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl<const COUNT: usize, const WINDOWS: bool> Harness for Lanes<COUNT, WINDOWS> {
    type Fabric = VerbsFabric;

    fn fabric() -> VerbsFabric {
        let peer = setting("KVRAIL_RDMA_PEER_DEVICE").filter(|_| SECOND.replace(!SECOND.get()));
        let device = peer.as_deref().or(device()).unwrap();
        let config = VerbsConfig { lease_windows: WINDOWS, ..config(device, COUNT) };
        VerbsFabric::new(&config).unwrap()
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
}
