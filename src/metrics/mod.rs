//! Prometheus metrics, made from [`Event`]s and, at each scrape, from a snapshot of the gauges.
//!
//! Every handle is registered when the sink is made, so that [`MetricsSink::emit`], which runs on the
//! data path, is one match and a few atomic additions: no lock, no allocation, no look-up by name.
//! [`FAMILIES`] is the one list of names, with type and meaning; the tests hold it against what is
//! rendered, against every event, and against README.

mod counters;
mod families;
mod gauges;
mod histogram;
mod registry;
#[cfg(test)]
mod tests;

use std::fmt;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

pub use families::{FAMILIES, Family, Kind, REGISTRY_FAMILIES};
pub use gauges::{GaugeSnapshot, PoolGauge, RequesterGauge, SuspendedGauge};
pub use registry::{RegistryMetrics, RegistrySnapshot};

use counters::Counters;
use gauges::Gauges;

use crate::event::{Event, EventSink};

/// The metrics of one node.
pub struct MetricsSink {
    counters: Counters,
    gauges: Gauges,
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
}

impl MetricsSink {
    /// Registers every metric of [`FAMILIES`], all at zero.
    #[must_use]
    pub fn new() -> Self {
        let recorder = PrometheusBuilder::new().build_recorder();
        families::describe(&recorder, &FAMILIES);
        Self {
            counters: Counters::register(&recorder),
            gauges: Gauges::register(&recorder),
            handle: recorder.handle(),
            recorder,
        }
    }

    /// All metrics in Prometheus' text format, with the gauges as `now` has them.
    #[must_use]
    pub fn render(&self, now: &GaugeSnapshot) -> String {
        self.gauges.set(&self.recorder, now);
        let mut text = self.handle.render();
        self.counters.render_histograms(&mut text);
        text
    }
}

impl Default for MetricsSink {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MetricsSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MetricsSink(..)")
    }
}

impl EventSink for MetricsSink {
    fn emit(&self, event: Event) {
        self.counters.count(event);
    }
}
