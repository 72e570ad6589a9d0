//! `kvrail demo`: the main job, with real processes and real bytes, and nothing to set up.

mod report;
mod story;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;

use super::CliError;
use super::process::Stop;
use crate::node::TransportChoice;
use crate::runtime::deadline::Deadline;

/// Arguments of `kvrail demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Print one JSON object instead of the story
    #[arg(long)]
    pub json: bool,
    /// Fabric between the nodes: auto, verbs, tcp or shm; auto takes RDMA where a device works, else TCP
    #[arg(long, value_name = "TRANSPORT", default_value_t = TransportChoice::Auto)]
    pub transport: TransportChoice,
}

/// Exit code of a process that an interrupt ended, as shells count it.
const INTERRUPTED: u8 = 130;

/// How long a signal may take from the children's end to our note of it.
const GRACE: Duration = Duration::from_millis(500);

/// How often that note is looked at.
const POLL: Duration = Duration::from_millis(5);

/// Runs the demonstration. It leaves no process, socket or file behind, also when it is interrupted.
///
/// # Errors
/// [`CliError::Failed`] where a process does not start, or a block's bytes or ranks are not what
/// they must be.
pub fn run(args: &DemoArgs) -> Result<ExitCode, CliError> {
    let interrupted = Arc::new(AtomicBool::new(false));
    watch_signals(Arc::clone(&interrupted))?;
    let binary = std::env::current_exe().map_err(CliError::failed)?;
    let mut report = report::Report::new(args.json);
    // The children are children of this thread: they end with it.
    let outcome = story::tell((&binary, args.transport), &mut report, &interrupted);
    if is_interrupted(&interrupted, outcome.is_err()) {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    outcome?;
    report.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a signal ended the story. One that `failed` may have failed because its children got the
/// signal too, and a moment earlier: the note of ours may still be on its way.
fn is_interrupted(interrupted: &AtomicBool, failed: bool) -> bool {
    let grace = Deadline::after(if failed { GRACE } else { Duration::ZERO });
    loop {
        if interrupted.load(Ordering::Relaxed) || !grace.pause(POLL) {
            return interrupted.load(Ordering::Relaxed);
        }
    }
}

/// Notes a signal for the story to see between its steps. The children of a terminal's Ctrl-C get
/// their own, so that a step that waits for one of them ends soon.
fn watch_signals(interrupted: Arc<AtomicBool>) -> Result<(), CliError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(CliError::failed)?;
    let stop = {
        let _context = runtime.enter();
        Stop::listen()?
    };
    let watch = move || {
        runtime.block_on(async {
            stop.wait(std::future::pending()).await.ok();
            interrupted.store(true, Ordering::Relaxed);
        });
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).map_err(CliError::failed)?;
    Ok(())
}
