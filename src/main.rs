//! The `kvrail` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvrail::cli::run(std::env::args_os())
}
