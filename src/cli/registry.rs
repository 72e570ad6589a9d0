//! `kvrail registry`.

use std::process::ExitCode;

use super::{CliError, end_with_parent, start_logging};
use crate::config::{RegistryConfig, RegistrySettings};

/// Checks the settings and runs a registry until it is told to stop.
pub(super) fn run(settings: RegistrySettings) -> Result<ExitCode, CliError> {
    let config = RegistryConfig::load(settings)?;
    end_with_parent(&config.process)?;
    start_logging(&config.process)?;
    Err(CliError::failed(
        "the settings are good, but this build has no registry to run with them",
    ))
}
