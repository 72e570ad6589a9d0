//! Settings: flags, `KVRAIL_*` variables and one TOML file, in that order of precedence, parsed once
//! into values that can be trusted.
//!
//! Every setting has one name. `--lease-ttl` is `KVRAIL_LEASE_TTL` in the environment and
//! `lease-ttl` in the file, and one parser reads all three, so a value means the same wherever it
//! stands. [`ServeConfig::load`] and [`RegistryConfig::load`] are the only ways to a configuration:
//! what they return holds no contradiction, and what they refuse is refused with one sentence that
//! names the settings. Nothing else in kvrail reads the environment. What stands there under a name that is
//! nearly a setting's does nothing, and [`misspelt`] tells of it.

mod gpu;
mod layers;
mod lease;
mod misspelt;
mod registry;
mod serve;
mod settings;
#[cfg(test)]
mod tests;
mod values;

use std::path::PathBuf;

pub use gpu::GpuConfig;
pub(crate) use layers::sentence;
pub use layers::{Environment, SOCKET_VARIABLE, default_socket};
pub use lease::LeaseConfig;
pub use misspelt::{Misspelt, misspelt};
pub use registry::{RegistryConfig, RegistrySettings};
pub use serve::{DoorConfig, MemoryConfig, PeerConfig, ServeConfig, StoreConfig};
pub use settings::ServeSettings;
pub use values::{
    ClusterSecret, HostPort, HugePages, Percent, PoolSpec, ProcessConfig, RegistryUrl, Size,
    SocketMode, duration, socket_address,
};

/// Why a configuration was refused. Every variant is the caller's to correct.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// One setting has a value that it cannot have.
    #[error("{origin}: {reason}")]
    Value {
        /// Where the value stands: a flag, a variable, or a file with its key.
        origin: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The file has a key that no setting has.
    #[error("{}: no setting is called {key:?}; `--help` lists the settings", path.display())]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
    },
    /// A file that a setting names cannot be read.
    #[error("{setting}: {} cannot be read: {source}", path.display())]
    Unreadable {
        /// The setting that names it.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{}: not a TOML file: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The first thing that is wrong, with its line.
        reason: String,
    },
    /// Two settings cannot both hold.
    #[error("{first} and {second} contradict each other: {reason}")]
    Contradiction {
        /// One of them.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// Why, and what would do.
        reason: String,
    },
    /// A setting without a default is not given.
    #[error("{setting} is missing: {reason}")]
    Missing {
        /// The setting.
        setting: &'static str,
        /// What it is needed for, with an example.
        reason: &'static str,
    },
}
