//! `kvrail bench`: what this machine gets out of kvrail, next to its own limits and to alternatives,
//! measured in one run.

mod cpu;
pub mod fault;
#[cfg(feature = "gpu")]
pub mod gpu;
mod latency;
mod machine;
mod pair;
pub mod read;
pub mod registry;
pub mod stall;
pub mod store;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::CliError;
use super::door::written;
use super::process::{INTERRUPTED, is_interrupted, watch_signals};

/// Arguments of `kvrail bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

const READ_EXAMPLES: &str = "\
Examples:
  kvrail bench read --quick                          a first look, in seconds
  kvrail bench read --transport tcp,shm --plot out.svg
  kvrail bench read --what bare --size 4KiB --batch 256 --run 8 --no-merge
  kvrail bench hold --listen 10.0.0.1:7400           on one host, and on another
  kvrail bench read --peer 10.0.0.1:7400 --transport verbs --json";

#[derive(Debug, Clone, Subcommand)]
enum What {
    /// Compare the store with the same ranks under a mutex.
    Store(store::StoreArgs),
    /// Measure what it takes to read a peer's blocks.
    #[command(after_help = READ_EXAMPLES)]
    Read(read::ReadArgs),
    /// Measure what the owner registry costs whoever serves it, beside a plain loop over Redis.
    Registry(registry::RegistryArgs),
    /// Stop one thread of a holder after the other, and measure what its readers notice.
    Stall(stall::StallArgs),
    /// Kill a holder, hang it, cut the link to it, and measure how long its readers are without it.
    Fault(fault::FaultArgs),
    /// Check a GPU's driver, and measure how fast blocks go between the GPU and the host.
    #[cfg(feature = "gpu")]
    Gpu(gpu::GpuArgs),
    /// Be the end that bench read reads from, on another host.
    Hold(read::HoldArgs),
}

pub(super) fn run(args: &BenchArgs) -> Result<ExitCode, CliError> {
    match &args.what {
        What::Store(args) => store::run(args),
        What::Read(args) => read::run(args),
        What::Registry(args) => registry::run(args),
        What::Stall(args) => stall::run(args),
        What::Fault(args) => fault::run(args),
        #[cfg(feature = "gpu")]
        What::Gpu(args) => gpu::run(args),
        What::Hold(args) => read::hold(args),
    }
}

/// A run: its progress on standard error, where that is a terminal, and whether it is to end.
#[derive(Debug)]
struct Bench {
    bar: ProgressBar,
    interrupted: Arc<AtomicBool>,
}

impl Bench {
    /// Begins a run of so many steps. From now on a signal ends it with what was measured.
    fn start(steps: u64) -> Result<Self, CliError> {
        let interrupted = Arc::new(AtomicBool::new(false));
        watch_signals(Arc::clone(&interrupted))?;
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let bar = match ProgressStyle::with_template("{wide_bar} {pos}/{len} {msg}, {eta} left") {
            Ok(style) => bar.with_style(style),
            Err(_no_style) => bar,
        };
        Ok(Self { bar, interrupted })
    }

    fn say(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.tick();
    }

    fn step(&self) {
        self.bar.inc(1);
    }

    /// Takes the bar off the screen, and says whether a signal ended the run. Then a failure is none:
    /// children that heard the signal, too, may have brought it about.
    fn close(&self, outcome: Result<(), CliError>) -> Result<bool, CliError> {
        self.bar.finish_and_clear();
        let interrupted = is_interrupted(&self.interrupted, outcome.is_err());
        if interrupted { Ok(true) } else { outcome.map(|()| false) }
    }

    fn is_interrupted(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed)
    }
}

/// Prints a report, and says how a bench ended.
fn print(
    interrupted: bool,
    report: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<ExitCode, CliError> {
    let out = &mut io::stdout().lock();
    written(report(out).and_then(|()| out.flush()))?;
    Ok(if interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// The middle of these values, or the mean of the two in the middle.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = values.get(values.len() / 2)?;
    let lower = values.get((values.len() - 1) / 2)?;
    Some(f64::midpoint(*lower, *upper))
}

/// A number as people write large ones: `100k`, `1M`, `250000`.
fn count(text: &str) -> Result<u64, String> {
    let (digits, unit) = match text.strip_suffix(['k', 'K']) {
        Some(digits) => (digits, 1_000),
        None => text.strip_suffix('M').map_or((text, 1), |digits| (digits, 1_000_000)),
    };
    let whole = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number = whole.then(|| digits.parse::<u64>().ok()?.checked_mul(unit)).flatten();
    number
        .ok_or_else(|| format!("a count is a whole number such as 5000, 100k or 1M; got {text:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_and_others_refused() {
        for (text, want) in [("0", 0), ("5000", 5000), ("100k", 100_000), ("2M", 2_000_000)] {
            assert_eq!(count(text), Ok(want));
        }
        for text in ["", "k", "1.5M", "-1", "1G", "99999999999999999999M"] {
            assert!(count(text).unwrap_err().contains("100k or 1M"), "{text}");
        }
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(Vec::new()), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }
}
