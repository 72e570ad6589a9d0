//! `kvrail serve`.

use std::process::ExitCode;

use super::{CliError, end_with_parent, start_logging};
use crate::config::{ServeConfig, ServeSettings};

/// Checks the settings and runs a node until it is told to stop.
pub(super) fn run(settings: ServeSettings) -> Result<ExitCode, CliError> {
    let config = ServeConfig::load(settings)?;
    end_with_parent(&config.process)?;
    start_logging(&config.process)?;
    Err(CliError::failed(
        "the settings are good, but this build has no node to run with them",
    ))
}
