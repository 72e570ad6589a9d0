//! `kvrail bench read`: what reading a peer's blocks costs, from the bare READ to the whole get, by block
//! size, batch, depth, streams and threads, beside what this machine could do at best.
//!
//! Both ends run what `serve` runs. The holder is a process of its own: a child, or `kvrail bench hold`
//! on another host.

mod bare;
mod blocks;
mod control;
mod fabric;
mod get;
mod hold;
mod leased;
mod limit;
mod plot;
mod report;
mod resident;
mod row;
mod running;
mod sweep;
mod usage;

use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;

pub use fabric::DeviceArgs;
pub use hold::HoldArgs;

use super::{Bench, print};
use crate::cli::CliError;
use crate::cli::cluster::{Cluster, Process};
use crate::cli::sink::Target;
use crate::config::{Size, duration, socket_address};
use crate::limits::{READ_BYTES_MAX, STREAMS_MAX};
use crate::node::TransportChoice;
use control::Holder;
use report::{Form, Report};
use sweep::Sweep;

pub(super) use hold::run as hold;

/// Smallest block.
const SIZE_MIN: u64 = 64;

/// Longest block: two of the longest READs.
const SIZE_MAX: u64 = 2 * READ_BYTES_MAX as u64;

/// Smallest pool: some of the longest blocks.
const POOL_MIN: u64 = 16 * SIZE_MAX;

/// Arguments of `kvrail bench read`.
#[derive(Debug, Clone, Args)]
pub struct ReadArgs {
    /// Read from a child process on this host, which is the default
    #[arg(long, conflicts_with = "peer")]
    pub loopback: bool,
    /// Read from the kvrail bench hold at this address
    #[arg(long, value_name = "IP:PORT", value_parser = socket_address)]
    pub peer: Option<SocketAddr>,
    /// Fabrics: auto, verbs, tcp or shm; auto is verbs where a device works, else tcp [default: auto]
    #[arg(long, value_name = "FABRIC,…", value_delimiter = ',')]
    pub transport: Vec<TransportChoice>,
    /// What a read is: a bare READ, one under a lease, a get through the store, or a get of blocks that
    /// are here already [default: all]
    #[arg(long, value_name = "WHAT,…", value_delimiter = ',', value_enum)]
    pub what: Vec<What>,
    /// Bytes of a block [default: from 1KiB to 16MiB, each four times the one before, and 16MiB]
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = size)]
    pub size: Vec<u32>,
    /// Blocks asked for at once [default: 1,32]
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=512))]
    pub batch: Vec<u16>,
    /// Batches in flight [default: 1,4]
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=64))]
    pub depth: Vec<u16>,
    /// Sockets or queue pairs of a connection [default: 2]
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=STREAMS_MAX as i64))]
    pub streams: Vec<u16>,
    /// Threads that read, each over a connection of its own [default: 1]
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: Vec<u16>,
    /// Blocks that are neighbours on the holder and asked for in one batch, in no order [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub run: Option<u32>,
    /// Read each block by a READ of its own, even where neighbours could share one
    #[arg(long)]
    pub no_merge: bool,
    /// Time for each row [default: 500ms]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub time: Option<Duration>,
    /// Memory of the holder, and a quarter of it for the reader [default: 256MiB]
    #[arg(long, value_name = "BYTES")]
    pub pool: Option<Size>,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Take seconds, to see that it works: small defaults for all of the above
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of the table
    #[arg(long, conflicts_with = "lines")]
    pub json: bool,
    /// Print lines of MEASURE SIZE VALUE instead of the table
    #[arg(long)]
    pub lines: bool,
    /// Draw bandwidth and latency by block size into this SVG file
    #[arg(long, value_name = "PATH")]
    pub plot: Option<PathBuf>,
}

/// What a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// READs and nothing else
    Bare,
    /// Lend, READ, checksum, completion, rank
    Leased,
    /// What an engine asks its node for, through the local door and the store
    Get,
    /// The same where the node has it: in place, no byte moves
    Resident,
}

impl What {
    const ALL: [Self; 4] = [Self::Bare, Self::Leased, Self::Get, Self::Resident];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Leased => "leased",
            Self::Get => "get",
            Self::Resident => "resident",
        }
    }
}

fn size(text: &str) -> Result<u32, String> {
    let Size(bytes) = text.parse()?;
    let good = u32::try_from(bytes).ok().filter(|_| (SIZE_MIN..=SIZE_MAX).contains(&bytes));
    good.ok_or_else(|| format!("a block has {SIZE_MIN}B to {}; got {text:?}", Size(SIZE_MAX)))
}

/// Measures and reports.
pub(super) fn run(args: &ReadArgs) -> Result<ExitCode, CliError> {
    let sweep = Sweep::new(args)?;
    // Before anything is measured, so that a run does not end without its picture.
    let plot = args.plot.as_ref().map(|path| Target::new(path, "--plot")).transpose()?;
    let bench = Bench::start(sweep.steps())?;
    let child = match args.peer {
        None => Some(Child::start(&args.device)?),
        Some(_) => None,
    };
    let peer = child.as_ref().map(Child::address).transpose()?.or(args.peer);
    let peer = peer.ok_or_else(|| CliError::usage("--peer: name the holder"))?;
    let mut holder = Holder::connect(peer)?;
    let holder_name = args.peer.map_or("loopback".to_owned(), |peer| format!("holder {peer}"));
    let mut report = Report::new(holder_name);
    let outcome = sweep.measure(&mut holder, &bench, &mut report);
    report.interrupted = bench.close(outcome)?;
    let form = match (args.json, args.lines) {
        (true, _) => Form::Json,
        (_, true) => Form::Lines,
        _ => Form::Table,
    };
    let ended = print(report.interrupted, |out| report.write(form, out))?;
    // What was measured is told by now, whatever becomes of its picture.
    if let Some(mut plot) = plot {
        let svg = plot::draw(&report).map_err(CliError::failed)?;
        plot.write_all(svg.as_bytes()).map_err(|error| plot.unwritten(&error))?;
        plot.keep()?;
    }
    Ok(ended)
}

/// A holder on this host.
struct Child {
    process: Process,
    _cluster: Cluster,
}

impl Child {
    fn start(device: &DeviceArgs) -> Result<Self, CliError> {
        let cluster = Cluster::new(std::env::current_exe().map_err(CliError::failed)?)?;
        let process = cluster.bench_holder(&device.arguments())?;
        Ok(Self { process, _cluster: cluster })
    }

    fn address(&self) -> Result<SocketAddr, CliError> {
        Ok(self.process.addresses()?.listen)
    }
}
