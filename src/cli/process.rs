//! What every long-running command does around its work: logs, the ready file, the parent's death.

use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use super::CliError;
use super::sink::hidden_in;
use crate::config::{Misspelt, ProcessConfig, misspelt};
use crate::runtime::deadline::Deadline;
use crate::sys::process;

/// Exit code of a process that an interrupt ended, as shells count it.
pub(super) const INTERRUPTED: u8 = 130;

/// How long a signal may take from the children's end to our note of it.
const GRACE: Duration = Duration::from_millis(500);

/// How long after a signal another one is the same: timeout(1) sends it to the process and to its group.
const TWICE: Duration = Duration::from_millis(100);

/// How often that note is looked at.
const POLL: Duration = Duration::from_millis(5);

/// Sends logs to standard error, filtered by the configuration. The first ones are about variables that do
/// nothing and are likely meant for something.
///
/// # Errors
/// [`CliError::Failed`] where logs already go somewhere.
pub fn start_logging(process: &ProcessConfig) -> Result<(), CliError> {
    let filter = EnvFilter::try_new(&process.log).map_err(CliError::usage)?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // It would say on standard error that standard error takes nothing, and panic where that fails.
        .log_internal_errors(false)
        .with_ansi(false)
        .try_init()
        .map_err(CliError::failed)?;
    for Misspelt { variable, meant } in misspelt() {
        tracing::warn!(%variable, "no setting has this name: is {meant} meant?");
    }
    Ok(())
}

/// Has this process killed when its parent ends, where the configuration names that one. The kernel
/// goes by the parent's thread that started this process: start children from a thread that lives as
/// long as they may.
///
/// # Errors
/// [`CliError::Failed`] where the kernel refuses, or the parent is gone already.
pub fn end_with_parent(process: &ProcessConfig) -> Result<(), CliError> {
    let Some(parent) = process.parent_death else {
        return Ok(());
    };
    process::end_with_parent(parent).map_err(|error| {
        CliError::failed(format!("the parent process {parent} is not there any more: {error}"))
    })
}

/// Where a process can be reached, as its ready file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ready {
    /// The address that peers, or nodes, connect to.
    pub listen: SocketAddr,
    /// The local door, where there is one.
    pub socket: Option<PathBuf>,
    /// The address of `/metrics` and `/health`, where there is one.
    pub metrics: Option<SocketAddr>,
    /// The process.
    pub pid: u32,
}

/// The ready file of a process that serves. Dropping it removes the file, unless that is another
/// process's by now; only a kill leaves it behind.
#[derive(Debug)]
pub struct ReadyFile {
    path: PathBuf,
    line: String,
}

impl Drop for ReadyFile {
    fn drop(&mut self) {
        if fs::read(&self.path).is_ok_and(|found| found == self.line.as_bytes()) {
            // One that cannot be removed names a process that has ended.
            fs::remove_file(&self.path).ok();
        }
    }
}

/// Writes the ready file that the configuration names, if any. Whoever waits for it sees all of it or no
/// file: it is written beside its place and then moved there.
///
/// # Errors
/// [`CliError::Usage`] where the file cannot be written.
pub fn announce_ready(
    process: &ProcessConfig,
    ready: &Ready,
) -> Result<Option<ReadyFile>, CliError> {
    let Some(path) = &process.ready_file else {
        return Ok(None);
    };
    let refused = |error: &dyn Display| {
        CliError::usage(format!("--ready-file: {} cannot be written: {error}", path.display()))
    };
    let directory = path
        .parent()
        .filter(|directory| !directory.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let mut line = serde_json::to_string(ready).map_err(|error| refused(&error))?;
    line.push('\n');
    let mut file = hidden_in(directory).map_err(|error| refused(&error))?;
    file.write_all(line.as_bytes()).map_err(|error| refused(&error))?;
    file.persist(path).map_err(|error| refused(&error.error))?;
    Ok(Some(ReadyFile { path: path.clone(), line }))
}

/// The name of the threads on which everything runs that waits: the door, the registry's client, metrics.
pub(super) const CONTROL_THREAD: &str = "kvrail-control";

/// The runtime of a process that serves. Two workers: its work is waiting, the data path has threads
/// of its own.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, CliError> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name(CONTROL_THREAD)
        .enable_all()
        .build()
        .map_err(|error| CliError::failed(format!("cannot start the control threads: {error}")))
}

/// Whether a signal ended a command. One that `failed` may have failed because its children got the
/// signal too, and a moment earlier: the note of ours may still be on its way.
pub(super) fn is_interrupted(interrupted: &AtomicBool, failed: bool) -> bool {
    let grace = Deadline::after(if failed { GRACE } else { Duration::ZERO });
    loop {
        if interrupted.load(Ordering::Relaxed) || !grace.pause(POLL) {
            return interrupted.load(Ordering::Relaxed);
        }
    }
}

/// Notes a signal, for a command to see between its steps. The children of a terminal's Ctrl-C get
/// their own, so that a step that waits for one of them ends soon.
pub(super) fn watch_signals(interrupted: Arc<AtomicBool>) -> Result<(), CliError> {
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

/// SIGINT and SIGTERM, caught from the moment that this is made.
pub(super) struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    pub(super) fn listen() -> Result<Self, CliError> {
        let catch = |kind| {
            signal(kind).map_err(|error| {
                CliError::failed(format!("cannot catch the signals that end this process: {error}"))
            })
        };
        let (interrupt, terminate) =
            (catch(SignalKind::interrupt())?, catch(SignalKind::terminate())?);
        Ok(Self { interrupt, terminate })
    }

    /// Waits for a signal: success; or for `failure`, a sentence that says what went wrong.
    pub(super) async fn wait(
        mut self,
        failure: impl Future<Output = String>,
    ) -> Result<ExitCode, CliError> {
        tokio::select! {
            _ = self.interrupt.recv() => Ok(ExitCode::SUCCESS),
            _ = self.terminate.recv() => Ok(ExitCode::SUCCESS),
            sentence = failure => Err(CliError::failed(sentence)),
        }
    }

    /// From soon after now on a signal ends the process at once, after `clean_up`. Memory and all but files
    /// go with it.
    pub(super) fn exit_on_second(clean_up: impl FnOnce() + Send + 'static) {
        tokio::spawn(async move {
            tokio::time::sleep(TWICE).await;
            if let Ok(stop) = Self::listen() {
                stop.wait(std::future::pending()).await.ok();
                clean_up();
                std::process::exit(INTERRUPTED.into());
            }
        });
    }
}
