//! Variables that are likely meant as settings and are none.
//!
//! A name that no setting has is nothing to refuse: a cluster's own tools set such names, and other programs
//! may. One that is a slip of the pen away from a setting's name would silently do nothing.

use strsim::osa_distance;

use super::layers::{names, variable};
use super::{RegistrySettings, ServeSettings};

/// How all variables of settings begin.
const PREFIX: &str = "KVRAIL_";

/// A variable that does nothing, and the setting's that it is likely meant for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misspelt {
    /// Its name.
    pub variable: String,
    /// The name that a setting has.
    pub meant: String,
}

/// Those of this process.
#[must_use]
pub fn misspelt() -> Vec<Misspelt> {
    // What is no text is no setting's name either.
    among(std::env::vars_os().filter_map(|(name, _value)| name.into_string().ok()))
}

/// Those among these names.
fn among(found: impl Iterator<Item = String>) -> Vec<Misspelt> {
    let both = [names::<ServeSettings>(), names::<RegistrySettings>()].concat();
    let known: Vec<String> = both.iter().map(|setting| variable(setting)).collect();
    let is_ours =
        |name: &str| name.get(..PREFIX.len()).is_some_and(|it| it.eq_ignore_ascii_case(PREFIX));
    let unknown = found.filter(|name| is_ours(name) && !known.contains(name));
    let mut all: Vec<Misspelt> = unknown
        .filter(|name| !is_of_a_cluster(name))
        .filter_map(|name| Some(Misspelt { meant: nearest(&name, &known)?, variable: name }))
        .collect();
    all.sort_unstable_by(|a, b| a.variable.cmp(&b.variable));
    all
}

/// Whether Kubernetes sets such a name, for a service that is called kvrail, or kvrail and something.
fn is_of_a_cluster(name: &str) -> bool {
    let words: Vec<&str> = name.split('_').collect();
    let is_number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
    let pairs = words.windows(2).any(|pair| matches!(pair, ["SERVICE", "HOST" | "PORT"]));
    let triples = words.windows(3).any(
        |triple| matches!(triple, ["PORT", number, "TCP" | "UDP" | "SCTP"] if is_number(number)),
    );
    pairs || triples || words.last() == Some(&"PORT")
}

/// The nearest known name, where one is near: two slips away, one where there is little to slip on.
fn nearest(name: &str, known: &[String]) -> Option<String> {
    let name = name.to_ascii_uppercase();
    let distances = known.iter().map(|known| (osa_distance(&name, known), known));
    let (slips, known) = distances.min()?;
    let most = if known.len() - PREFIX.len() > 4 { 2 } else { 1 };
    (slips <= most).then(|| known.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meant(name: &str) -> Option<String> {
        among(std::iter::once(name.to_owned())).pop().map(|found| found.meant)
    }

    #[test]
    fn a_slip_of_the_pen_names_its_setting() {
        for (found, setting) in [
            ("KVRAIL_GPU_POOl", "KVRAIL_GPU_POOL"),
            ("kvrail_pool", "KVRAIL_POOL"),
            ("KVRAIL_POOLS", "KVRAIL_POOL"),
            ("KVRAIL_LEASE_TLL", "KVRAIL_LEASE_TTL"),
            ("KVRAIL_LEASETTL", "KVRAIL_LEASE_TTL"),
            ("KVRAIL_REGISTERY", "KVRAIL_REGISTRY"),
            ("KVRAIL_NODE_LAESE", "KVRAIL_NODE_LEASE"),
            ("KVRAIL_METRIC_LISTEN", "KVRAIL_METRICS_LISTEN"),
            ("KVRAIL_RDMA_DEVICES", "KVRAIL_RDMA_DEVICE"),
        ] {
            assert_eq!(meant(found).as_deref(), Some(setting), "{found}");
        }
    }

    #[test]
    fn settings_and_what_a_cluster_sets_are_no_slips() {
        for name in [
            "KVRAIL_POOL",
            "KVRAIL_NODE_LEASE",
            "KVRAIL_PORT",
            "KVRAIL_PORT_9000_TCP",
            "KVRAIL_PORT_9000_TCP_PROTO",
            "KVRAIL_PORT_9000_TCP_ADDR",
            "KVRAIL_SERVICE_HOST",
            "KVRAIL_SERVICE_PORT",
            "KVRAIL_SERVICE_PORT_HTTP",
            "KVRAIL_REGISTRY_PORT",
            "KVRAIL_REGISTRY_PORT_7071_TCP",
            "KVRAIL_REGISTRY_SERVICE_HOST",
            "KVRAIL_LOG_PORT",
            "KVRAIL_IMAGE",
            "KVRAIL_HOST",
            "KVRAIL_HOME",
            "KVRAIL_VERSION",
            "KVRAIL_REPLICAS",
            "KVRAIL_BINARY",
            "KVRAIL_",
            "KVRAIL",
            "POOLS",
            "ÄÖÜKVRAIL_POOLS",
        ] {
            assert_eq!(meant(name), None, "{name}");
        }
    }

    #[test]
    fn all_are_told_in_order() {
        let names = ["KVRAIL_POOLS", "HOME", "KVRAIL_CAPACTY"].map(str::to_owned);
        let found = among(names.into_iter());
        let variables: Vec<&str> = found.iter().map(|it| it.variable.as_str()).collect();
        assert_eq!(variables, ["KVRAIL_CAPACTY", "KVRAIL_POOLS"]);
    }
}
