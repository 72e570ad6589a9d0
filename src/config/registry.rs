//! The configuration of `kvrail registry`.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::ConfigError;
use super::layers::{Environment, Settings, gather};
use super::lease::within;
use super::serve::refuse_one_port;
use super::values::{ProcessConfig, duration, log_filter, socket_address};

/// Shortest and longest time that a silent node stays listed. Nodes speak up three times within it.
const NODE_LEASE: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(3600);

/// What `kvrail registry` may be told.
#[derive(Debug, Clone, Default, Args)]
pub struct RegistrySettings {
    /// TOML file with settings under the names of the flags; flags and variables win over it
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// Address that nodes connect to (default 0.0.0.0:7071)
    ///
    /// Whoever reaches it can announce and withdraw blocks: keep it inside the cluster's network.
    #[arg(long, value_name = "IP:PORT", value_parser = socket_address)]
    pub listen: Option<SocketAddr>,

    /// How long a silent node stays listed as an owner (default 10s)
    ///
    /// 100ms to 1h. A dead node's blocks are offered to readers for that long; a shorter time drops
    /// nodes that only stall.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub node_lease: Option<Duration>,

    /// Address of /metrics and /health (default: none)
    ///
    /// Anyone who reaches it can read both.
    #[arg(long, value_name = "IP:PORT", value_parser = socket_address)]
    pub metrics_listen: Option<SocketAddr>,

    /// Log filter, such as warn or kvrail=debug (default info)
    #[arg(long, value_name = "FILTER", value_parser = log_filter)]
    pub log: Option<String>,

    /// File that gets one JSON line with the addresses and the pid once the registry serves (default: none)
    ///
    /// It is whole or not there, and removed when the process is told to stop.
    #[arg(long, value_name = "PATH")]
    pub ready_file: Option<PathBuf>,

    /// End when this process, the parent, ends, for tests and the demo.
    #[arg(long, value_name = "PID", hide = true)]
    pub parent_death: Option<u32>,
}

impl Settings for RegistrySettings {
    fn over(self, lower: Self) -> Self {
        Self {
            config: self.config.or(lower.config),
            listen: self.listen.or(lower.listen),
            node_lease: self.node_lease.or(lower.node_lease),
            metrics_listen: self.metrics_listen.or(lower.metrics_listen),
            log: self.log.or(lower.log),
            ready_file: self.ready_file.or(lower.ready_file),
            parent_death: self.parent_death.or(lower.parent_death),
        }
    }

    fn file(&self) -> Option<&Path> {
        self.config.as_deref()
    }
}

/// A registry's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryConfig {
    /// Where nodes connect; port 0 lets the kernel choose.
    pub listen: SocketAddr,
    /// How long a silent node stays listed.
    pub node_lease: Duration,
    /// Metrics, logs, life.
    pub process: ProcessConfig,
}

impl RegistryConfig {
    /// The configuration that `flags`, this process's variables and the file together make.
    ///
    /// # Errors
    /// [`ConfigError`], where a value is out of range or two settings contradict each other.
    pub fn load(flags: RegistrySettings) -> Result<Self, ConfigError> {
        Self::load_from(flags, Environment::process())
    }

    /// As [`Self::load`], with variables from elsewhere.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_from(flags: RegistrySettings, from: Environment<'_>) -> Result<Self, ConfigError> {
        let settings = gather(flags, from)?;
        let listen =
            settings.listen.unwrap_or_else(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, 7071)));
        refuse_one_port(settings.metrics_listen, listen)?;
        let node_lease = settings.node_lease.unwrap_or(Duration::from_secs(10));
        within("--node-lease", node_lease, &NODE_LEASE)?;
        Ok(Self {
            listen,
            node_lease,
            process: ProcessConfig {
                metrics_listen: settings.metrics_listen,
                log: settings.log.unwrap_or_else(|| "info".to_owned()),
                ready_file: settings.ready_file,
                parent_death: settings.parent_death,
            },
        })
    }
}
