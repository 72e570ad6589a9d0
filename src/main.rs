//! The `kvrail` command.

use std::process::ExitCode;

use kvrail::sys::allocations::Counting;

/// For the metrics of a node and the figures of a bench.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    kvrail::cli::run(std::env::args_os())
}
