//! `kvrail demo`.

use std::process::ExitCode;

use clap::Args;

use super::CliError;

/// Arguments of `kvrail demo`.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Runs the demonstration.
///
/// # Errors
/// [`CliError`].
pub fn run(args: &DemoArgs) -> Result<ExitCode, CliError> {
    Err(CliError::failed(args.json))
}
