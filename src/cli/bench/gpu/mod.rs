//! `kvrail bench gpu`: what a GPU's driver gives kvrail, and how fast blocks go between the GPU and the
//! host, beside the driver's own copy of the same bytes. For a machine with a GPU and nothing else: no
//! network card, no network, no other file than this binary.
//!
//! What is measured is what a node runs: the copies of an engine's memory that another process passed
//! on, whole saves and loads through the door of a `kvrail serve`, staging. Each is in turn with the
//! driver's copy to or from its own pinned memory (`cuMemAllocHost`, `cuMemcpyHtoD`, `cuMemcpyDtoH`), and
//! every byte is compared. What the driver does not have is told with the call and its answer, and is no
//! failure; a wrong byte is, and memory that does not come back.

mod checks;
mod copies;
mod door;
mod exporter;
mod measure;
mod report;
mod staging;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::{Bench, print};
use crate::cli::{CliError, FAILURE};
use crate::config::duration;
use crate::cuda::{Bound, Context, Device, DeviceMemory, Driver, LIBRARY_NAME, PinnedMemory};
use crate::runtime::deadline::Deadline;
use report::Report;

/// The whole run ends within this, whatever the driver does: a loan of a machine is short.
const RUN_MAX: Duration = Duration::from_secs(200);

/// How long the driver may take to have all memory back once the last process has ended.
const RETURN_MAX: Duration = Duration::from_secs(5);

/// Memory of the driver's own that may stay with it: less than the least allocation here.
const KEPT_MAX: u64 = 2 << 20;

/// Arguments of `kvrail bench gpu`.
#[derive(Debug, Clone, Args)]
pub struct GpuArgs {
    /// The GPU, as the driver numbers it
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub gpu: u32,
    /// For how long each figure is measured
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub time: Duration,
    /// Take seconds, to see that it works: few sizes, few bytes
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
    /// Library of the GPU's driver, for tests (default libcuda.so.1).
    #[arg(long, value_name = "PATH", hide = true)]
    pub gpu_driver: Option<PathBuf>,
    /// Be the process that passes so many bytes of GPU memory on, and end with standard input.
    #[arg(long, value_name = "BYTES", hide = true)]
    pub exporter: Option<usize>,
}

/// What is measured, in bytes.
#[derive(Debug, Clone)]
struct Sizes {
    /// Copies; the last one is the longest.
    copies: Vec<usize>,
    /// Blocks that go through a node's door, and slots of staging memory.
    blocks: Vec<u32>,
    /// Blocks of one save or load together, and of one run through staging.
    batch: u32,
}

impl Sizes {
    fn new(quick: bool) -> Self {
        const KIB: usize = 1 << 10;
        if quick {
            return Self {
                copies: vec![64 * KIB, 1024 * KIB],
                blocks: vec![64 << 10, 256 << 10],
                batch: 2 << 20,
            };
        }
        Self {
            copies: [64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10].map(|it| it * KIB).to_vec(),
            blocks: vec![64 << 10, 256 << 10, 1 << 20, 4 << 20],
            batch: 64 << 20,
        }
    }

    fn longest(&self) -> usize {
        self.copies.iter().copied().max().unwrap_or(0).max(self.batch as usize)
    }
}

/// What the parts of a run share.
struct Run<'a> {
    bench: &'a Bench,
    bound: &'a Bound<'a>,
    /// What the processes that this one starts are told of the driver.
    driver: Vec<String>,
    sizes: Sizes,
    time: Duration,
    deadline: Deadline,
    /// The driver's own: pinned host memory, and device memory beside what is measured.
    pinned: PinnedMemory,
    beside: std::sync::Arc<DeviceMemory>,
}

impl Run<'_> {
    /// Whether it is time to end.
    fn is_over(&self) -> bool {
        self.bench.is_interrupted() || self.deadline.remaining().is_none()
    }
}

/// Checks, measures and reports.
pub(super) fn run(args: &GpuArgs) -> Result<ExitCode, CliError> {
    let none = |error| CliError::usage(format!("there is no GPU to check: {error}"));
    let library = args.gpu_driver.as_deref();
    let driver = Driver::open(library.unwrap_or(Path::new(LIBRARY_NAME))).map_err(none)?;
    let device = driver.device(args.gpu).map_err(none)?;
    if let Some(bytes) = args.exporter {
        return exporter::run(&device, bytes);
    }
    let context = Context::primary(&device).map_err(none)?;
    let bound = context.bind().map_err(none)?;
    let mut report = Report::new(&device);
    let sizes = Sizes::new(args.quick);
    let rows = 4 * sizes.copies.len() + 6 * sizes.blocks.len();
    let bench = Bench::start(rows as u64)?;
    let outcome = measure(args, (&bench, &bound), sizes, &mut report);
    report.interrupted = bench.close(outcome)?;
    let code = print(report.interrupted, |out| report.write(args.json, out))?;
    Ok(if report.is_good() { code } else { ExitCode::from(FAILURE) })
}

fn measure(
    args: &GpuArgs,
    (bench, bound): (&Bench, &Bound<'_>),
    sizes: Sizes,
    report: &mut Report,
) -> Result<(), CliError> {
    let longest = sizes.longest();
    let pinned = PinnedMemory::new(bound, longest).map_err(CliError::failed)?;
    warm_up(bound, longest).map_err(CliError::failed)?;
    let (before, _) = bound.memory().map_err(CliError::failed)?;
    let time = if args.quick { args.time.min(Duration::from_millis(20)) } else { args.time };
    let beside = DeviceMemory::allocate_plain(bound, longest as u64).map_err(CliError::failed)?;
    let deadline = Deadline::after(RUN_MAX);
    let library = args.gpu_driver.as_ref().map(|path| path.display().to_string());
    let driver = library.map(|path| ["--gpu-driver".to_owned(), path]);
    let driver = driver.into_iter().flatten().collect();
    let mut run = Run { bench, bound, driver, sizes, time, deadline, pinned, beside };
    bench.say("attributes, exports and imports");
    checks::run(&mut run, report);
    for (what, part) in [
        ("an engine's copies", copies::run as Part),
        ("staging", staging::run),
        ("saves and loads", door::run),
        ("kill -9 of an engine", copies::killed),
    ] {
        bench.say(what);
        if !run.is_over()
            && let Err(error) = part(&mut run, report)
        {
            report.note(what, format!("not measured: {error}"));
        }
    }
    if run.deadline.remaining().is_none() {
        report.note("time", format!("over after {RUN_MAX:?}: what is missing was not measured"));
    }
    drop(run);
    report.returned = Some(returned(bound, before)?);
    Ok(())
}

/// A kind of figures.
type Part = fn(&mut Run<'_>, &mut Report) -> Result<(), CliError>;

/// Lets the driver take for itself what it takes at first use.
fn warm_up(bound: &Bound<'_>, bytes: usize) -> Result<(), crate::cuda::CudaError> {
    let memory = DeviceMemory::allocate_plain(bound, bytes as u64)?;
    let mut pinned = PinnedMemory::new(bound, bytes)?;
    pinned.copy_to(bound, &memory, bytes)?;
    pinned.copy_from(bound, &memory, bytes)
}

/// Bytes of the device that were free before and are not any more, once the driver had its time.
fn returned(bound: &Bound<'_>, before: u64) -> Result<u64, CliError> {
    let deadline = Deadline::after(RETURN_MAX);
    loop {
        let (free, _) = bound.memory().map_err(CliError::failed)?;
        let missing = before.saturating_sub(free);
        if missing < KEPT_MAX || !deadline.pause(Duration::from_millis(20)) {
            return Ok(missing);
        }
    }
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(seed: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(seed.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// The device's number and identity, as doors name it.
fn uuid(device: &Device) -> crate::protocol::door::DeviceUuid {
    crate::protocol::door::DeviceUuid(device.attributes().uuid)
}
