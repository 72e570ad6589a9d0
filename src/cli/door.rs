//! What the commands of the local door have in common.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{CliError, say};
use crate::client::{Client, ClientError};
use crate::config::{self, Misspelt};
use crate::runtime::deadline::Deadline;
use crate::types::Scope;

/// How often a busy node is asked again, at most, before a command gives up.
const TRIES_MAX: u32 = 10_000;

/// The longest pause between two tries, whatever the node says.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Where the node is.
#[derive(Debug, Clone, Args)]
pub struct DoorArgs {
    /// The node's socket [default: $KVRAIL_SOCKET, $XDG_RUNTIME_DIR/kvrail.sock or /run/kvrail.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// How long to wait for the node without any progress, such as 60s or 1500ms
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = config::duration)]
    pub timeout: Duration,
}

impl DoorArgs {
    pub(super) fn connect(&self) -> Result<Client, CliError> {
        let path = self.socket.clone().unwrap_or_else(|| {
            for Misspelt { variable, .. } in
                config::misspelt().iter().filter(|found| found.meant == config::SOCKET_VARIABLE)
            {
                say(format_args!(
                    "{variable} does nothing: {} is the variable",
                    config::SOCKET_VARIABLE
                ));
            }
            config::default_socket()
        });
        Ok(Client::connect_within(&path, self.timeout)?)
    }
}

impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        match error.scope() {
            Scope::Request => Self::usage(error),
            _ => Self::failed(error),
        }
    }
}

/// Patience with a busy node: a bounded number of tries within a deadline.
pub(super) struct Patience {
    deadline: Deadline,
    tries: u32,
}

impl Patience {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { deadline: Deadline::after(timeout), tries: 0 }
    }

    /// Waits before another try; false where there is to be none.
    pub(super) fn wait(&mut self, pause: Duration) -> bool {
        self.tries += 1;
        let pause = pause.clamp(Duration::from_millis(1), PAUSE_MAX);
        self.tries <= TRIES_MAX && self.deadline.pause(pause)
    }
}

/// A bar of bytes (a count where their sum is not known) on standard error, where that is a terminal.
pub(super) fn progress(bytes: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(bytes, ProgressDrawTarget::stderr());
    let template = match bytes {
        Some(_) => "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec}",
        None => "{spinner} {bytes} {bytes_per_sec}",
    };
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_no_style) => bar,
    }
}

/// Whether somebody still reads the output: a reader that has seen enough and left, as `head` does,
/// is no error.
pub(super) fn written(result: io::Result<()>) -> Result<bool, CliError> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(CliError::failed(format_args!("cannot write the output: {error}"))),
    }
}

/// One JSON value on a line.
pub(super) fn write_json(out: &mut dyn Write, value: &impl serde::Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}
