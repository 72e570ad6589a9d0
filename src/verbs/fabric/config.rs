//! How a verbs fabric is set up.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use crate::limits::{HANDSHAKE_TIMEOUT, RETRIES_MAX};
#[cfg(doc)]
use crate::limits::{NICS_MAX, STREAMS_MAX};

/// How a poll waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PollMode {
    /// Never sleeps: the lowest latency, for a core of its own.
    Busy,
    /// Spins for a while after work, then sleeps until an event.
    #[default]
    Adaptive,
    /// Sleeps until an event: the least processor time.
    Event,
}

impl PollMode {
    /// The name that settings use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Adaptive => "adaptive",
            Self::Event => "event",
        }
    }
}

impl fmt::Display for PollMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for PollMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Busy, Self::Adaptive, Self::Event];
        let found = all.into_iter().find(|mode| mode.as_str() == text);
        found.ok_or_else(|| format!("{text} is none of busy, adaptive, event"))
    }
}

/// A device of ours and the device of a peer that it shall talk to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicPair {
    /// Ours.
    pub ours: String,
    /// The peer's. A peer without it is paired as if this had not been said.
    pub theirs: String,
}

/// How a verbs fabric is set up.
#[derive(Debug, Clone)]
pub struct VerbsConfig {
    /// Where peers exchange addresses with it; port 0 takes any free one. `None`: connect only.
    /// Default: none.
    pub listen: Option<SocketAddr>,
    /// The names of the devices to use; those that do not work are left out, aloud. Empty: all that
    /// work and are as fast as the fastest one. At most [`NICS_MAX`]. Default: empty.
    pub devices: Vec<String>,
    /// Which device of a peer ours talk to, by their names; each of ours at most once. Others are
    /// paired by NUMA node. Default: empty.
    pub pairs: Vec<NicPair>,
    /// The names of the devices over which a GPU's memory goes, instead of those nearest to it on the PCI
    /// bus. A connection that has no lane over them takes another. Default: empty.
    pub gpu_nics: Vec<String>,
    /// The GID's index on every device, instead of the one of the highest score. Default: none.
    pub gid_index: Option<u32>,
    /// Data queue pairs per connection, `1..=`[`STREAMS_MAX`], spread over the devices, which get one
    /// each in any case; the smaller number of both ends holds. Default: 2.
    pub lanes: usize,
    /// Longest registration, bytes; a longer region gets several. Rounded down to a power of two, at
    /// least 64 KiB. What the devices take bounds it too. Default: no limit.
    pub chunk_bytes: u64,
    /// Whether peers read by windows alone: see [`crate::fabric::Capabilities::windows`]. Default: no.
    pub lease_windows: bool,
    /// How polls wait. Default: adaptive.
    pub poll: PollMode,
    /// Time for a connection to open. Default: [`HANDSHAKE_TIMEOUT`].
    pub handshake_timeout: Duration,
    /// Retransmissions before a peer counts as gone, `0..=`[`RETRIES_MAX`]; for each one the device
    /// waits 268 ms or, as some do, up to four times that. Default: [`RETRIES_MAX`].
    pub retries: u8,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            listen: None,
            devices: Vec::new(),
            pairs: Vec::new(),
            gpu_nics: Vec::new(),
            gid_index: None,
            lanes: 2,
            lease_windows: false,
            chunk_bytes: u64::MAX,
            poll: PollMode::default(),
            handshake_timeout: HANDSHAKE_TIMEOUT,
            retries: RETRIES_MAX,
        }
    }
}
