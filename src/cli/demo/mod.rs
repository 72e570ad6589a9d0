//! `kvrail demo`: the main job, with real processes and real bytes, and nothing to set up.

#[cfg(feature = "gpu")]
mod engine;
mod report;
mod story;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;

use super::CliError;
use super::process::{INTERRUPTED, is_interrupted, watch_signals};
use crate::node::TransportChoice;

/// Arguments of `kvrail demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Print one JSON object instead of the story
    #[arg(long)]
    pub json: bool,
    /// Fabric between the nodes: auto, verbs, tcp or shm; auto takes RDMA where a device works, else TCP
    #[arg(long, value_name = "TRANSPORT", default_value_t = TransportChoice::Auto)]
    pub transport: TransportChoice,
    /// Save from GPU memory and read into it, on GPU 0 of this host, without the part about memory
    /// pressure
    #[cfg(feature = "gpu")]
    #[arg(long)]
    pub gpu: bool,
    /// Library of the GPU's driver, for tests.
    #[cfg(feature = "gpu")]
    #[arg(long, value_name = "PATH", hide = true)]
    pub gpu_driver: Option<std::path::PathBuf>,
}

/// Runs the demonstration. It leaves no process, socket or file behind, also when it is interrupted; where it
/// is killed, its files go with the next one.
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
    let outcome = story::tell((&binary, args), &mut report, &interrupted);
    if is_interrupted(&interrupted, outcome.is_err()) {
        return Ok(ExitCode::from(INTERRUPTED));
    }
    outcome?;
    report.finish()?;
    Ok(ExitCode::SUCCESS)
}
