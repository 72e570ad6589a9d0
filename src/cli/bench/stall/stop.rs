//! Stops threads of the holder for a time.

use std::io;
use std::time::Duration;

use crate::cli::CliError;
use crate::cli::bench::pair::Readers;
use crate::runtime::deadline::Deadline;
use crate::sys::thread_stop::{StoppedThread, threads_named};
use crate::types::Timestamp;

/// Makes all threads of this name stand still, and answers from when to when all of them did.
pub(super) fn stall(
    process: u32,
    name: &str,
    time: Duration,
    readers: &Readers,
) -> Result<(Timestamp, Timestamp), CliError> {
    let refused = |error: io::Error| {
        CliError::failed(format!(
            "cannot stop the holder's {name} ({error}): a container's seccomp profile or \
             kernel.yama.ptrace_scope may forbid to trace even one's own children"
        ))
    };
    let mut stopped = Vec::new();
    for thread in threads_named(process, name).map_err(refused)? {
        stopped.push(StoppedThread::stop(thread).map_err(refused)?);
    }
    if stopped.is_empty() {
        return Err(CliError::failed(format!("the holder has no thread named {name}")));
    }
    let from = readers.now();
    // To the end also where a signal comes: a stall that is cut short would be measured as a long one.
    while Deadline::after(time).pause(time) {}
    let to = readers.now();
    drop(stopped);
    Ok((from, to))
}
