//! The TCP fabric passes the conformance suite.

#[allow(dead_code, unused_imports, unused_macros, reason = "windows have tests of their own")]
mod conformance;

use std::net::SocketAddr;

use kvrail::tcp::{TcpConfig, TcpFabric};

use conformance::Harness;

/// Three streams: more than one, and not a power of two.
struct Tcp;

#[expect(clippy::unwrap_used, reason = "a harness of tests fails by panicking")]
impl Harness for Tcp {
    type Fabric = TcpFabric;

    fn fabric() -> TcpFabric {
        TcpFabric::new(TcpConfig {
            listen: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            streams: 3,
            ..TcpConfig::default()
        })
        .unwrap()
    }

    fn endpoint(fabric: &TcpFabric) -> SocketAddr {
        fabric.local_addr().unwrap()
    }

    fn nowhere() -> SocketAddr {
        // tcpmux: reserved since 1988, served by nobody, and never given out as a free port.
        SocketAddr::from(([127, 0, 0, 1], 1))
    }
}

conformance_tests!(Tcp);
