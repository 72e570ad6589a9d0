//! What the two ends of a row use beside time.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::{Add, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cli::CliError;
use crate::cli::bench::cpu::CpuTime;
use crate::cli::cluster::Process;
use crate::runtime::data::DATA_THREAD;
use crate::sys::allocations;

/// What counts a node's allocations.
const ALLOCATIONS: &str = "kvrail_heap_allocations_total ";

/// The longest that a node may take to say it.
const PATIENCE: Duration = Duration::from_secs(5);

/// What was used so far, or between two moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Usage {
    /// Processor time of all threads.
    pub(super) cpu: CpuTime,
    /// Processor time of a node's data thread; none where there is no node.
    pub(super) data: CpuTime,
    /// Heap allocations of all threads.
    pub(super) allocations: u64,
}

impl Usage {
    /// Of this process.
    pub(super) fn own() -> Result<Self, CliError> {
        let (cpu, data) = (CpuTime::own()?, CpuTime::default());
        Ok(Self { cpu, data, allocations: allocations::of_process() })
    }

    /// Of a node. To be asked costs it some allocations, too: see [`Self::start_of`].
    pub(super) fn of(node: &Process) -> Result<Self, CliError> {
        let Some(metrics) = node.addresses()?.metrics else {
            return Err(CliError::failed(format!("{} has no metrics", node.name())));
        };
        Ok(Self {
            allocations: scrape(metrics)?,
            cpu: CpuTime::of(node.id())?,
            data: CpuTime::of_threads(node.id(), DATA_THREAD).unwrap_or_default(),
        })
    }

    /// Of a node, so that the difference to a later [`Self::of`] is what the time between took: the
    /// allocations that asking takes are on top of what it says.
    pub(super) fn start_of(node: &Process) -> Result<Self, CliError> {
        let (before, now) = (Self::of(node)?, Self::of(node)?);
        let asking = now.allocations.saturating_sub(before.allocations);
        Ok(Self { allocations: now.allocations + asking, ..now })
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            cpu: self.cpu + other.cpu,
            data: self.data + other.data,
            allocations: self.allocations + other.allocations,
        }
    }
}

impl Sub for Usage {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            cpu: self.cpu - earlier.cpu,
            data: self.data - earlier.data,
            allocations: self.allocations.saturating_sub(earlier.allocations),
        }
    }
}

/// A node's allocations so far, as its metrics say.
fn scrape(metrics: SocketAddr) -> Result<u64, CliError> {
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&metrics, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: {metrics}\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    };
    let failed = |error| CliError::failed(format!("the metrics at {metrics}: {error}"));
    let text = ask().map_err(failed)?;
    let count = text.lines().find_map(|line| line.strip_prefix(ALLOCATIONS)?.trim().parse().ok());
    count.ok_or_else(|| CliError::failed(format!("the metrics at {metrics} count no allocations")))
}
