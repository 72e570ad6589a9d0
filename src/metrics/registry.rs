//! The metrics of `kvrail registry`: all read at the scrape.

use std::fmt;

use metrics::{Counter, Gauge};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use super::families::{REGISTRY_FAMILIES, counter_of, describe, gauge_of};
use crate::event::RegistryCall;
use crate::limits::OWNERS_SHOWN;

/// A registry's state at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RegistrySnapshot {
    /// Nodes listed.
    pub nodes: u64,
    /// Blocks by the number of their owners: 1 first, the last for 8 and more.
    pub blocks_by_owners: [u64; OWNERS_SHOWN],
    /// Calls answered since the start, in the order of [`RegistryCall::ALL`].
    pub served: [u64; RegistryCall::ALL.len()],
}

/// The metrics of one registry.
pub struct RegistryMetrics {
    nodes: Gauge,
    blocks: Vec<Gauge>,
    served: [Counter; RegistryCall::ALL.len()],
    handle: PrometheusHandle,
}

impl RegistryMetrics {
    /// Registers every metric of [`REGISTRY_FAMILIES`], all at zero.
    #[must_use]
    pub fn new() -> Self {
        let recorder = PrometheusBuilder::new().build_recorder();
        describe(&recorder, &REGISTRY_FAMILIES);
        Self {
            nodes: gauge_of(&recorder, "kvrail_registry_nodes", &[]),
            blocks: (1..=OWNERS_SHOWN)
                .map(|owners| {
                    let owners = owners.to_string();
                    gauge_of(&recorder, "kvrail_registry_blocks", &[("owners", &owners)])
                })
                .collect(),
            served: RegistryCall::ALL.map(|call| {
                let labels = [("call", call.as_str())];
                counter_of(&recorder, "kvrail_registry_served_total", &labels)
            }),
            handle: recorder.handle(),
        }
    }

    /// All metrics in Prometheus' text format, as `now` has them.
    #[must_use]
    pub fn render(&self, now: &RegistrySnapshot) -> String {
        self.nodes.set(now.nodes as f64);
        for (gauge, blocks) in self.blocks.iter().zip(&now.blocks_by_owners) {
            gauge.set(*blocks as f64);
        }
        for (counter, served) in self.served.iter().zip(&now.served) {
            counter.absolute(*served);
        }
        self.handle.render()
    }
}

impl Default for RegistryMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RegistryMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RegistryMetrics(..)")
    }
}
