//! The simulated fabric passes the conformance suite.

mod conformance;

use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;

use kvrail::sim::{SimConfig, SimEndpoint, SimFabric, SimNetwork};

use conformance::Harness;

/// A network per thread, in which one thing happens at each poll of any of its nodes: so a poll of one
/// end moves the data of both, as a device does.
struct SimOf<const WINDOWS: u16>;

type Sim = SimOf<0>;
type Windows = SimOf<40>;

thread_local! {
    static NETWORK: RefCell<Option<(u16, SimNetwork)>> = const { RefCell::new(None) };
    static NODES: Cell<u32> = const { Cell::new(0) };
}

/// A failure shows it by being the same in each run.
const SEED: u64 = 20;

/// What the suite's READs need, at a rate at which the largest ones outlast a few messages.
#[expect(clippy::unwrap_used, reason = "it was made just before")]
fn network(windows: u16) -> SimNetwork {
    let config = SimConfig {
        windows,
        reads_outstanding: 512,
        read_bytes: 4 << 20,
        read_rate: NonZeroU64::new(1 << 30),
        ..SimConfig::default()
    };
    NETWORK.with_borrow_mut(|network| {
        if network.as_ref().is_none_or(|(of, _)| *of != windows) {
            *network = Some((windows, SimNetwork::new(SEED, config)));
        }
        network.as_ref().unwrap().1.clone()
    })
}

impl<const WINDOWS: u16> Harness for SimOf<WINDOWS> {
    type Fabric = SimFabric;

    fn fabric() -> SimFabric {
        let at = SimEndpoint(NODES.replace(NODES.get() + 1));
        network(WINDOWS).fabric(at)
    }

    fn endpoint(fabric: &SimFabric) -> SimEndpoint {
        fabric.endpoint()
    }

    fn pass() {
        network(WINDOWS).step();
    }

    fn nowhere() -> SimEndpoint {
        SimEndpoint(u32::MAX)
    }
}

conformance_tests!(Sim);

/// The same nodes, with windows.
mod windows {
    crate::window_tests!(super::Windows, true, 1_000);
}
