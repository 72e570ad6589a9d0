//! Where a bench ran, and the memory of its processes.

use std::fmt;
use std::fs;

use serde::Serialize;

use crate::cli::CliError;
use crate::sys::kernel;
use crate::sys::memory::page_bytes;
use crate::sys::root::HostRoot;

/// The machine, as far as its figures depend on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Machine {
    /// The processor's name.
    cpu: String,
    /// Processors that this process may use.
    cores: usize,
    /// The kernel's release.
    kernel: String,
    /// Whether this build has optimisations, without which no figure means anything.
    optimised: bool,
}

impl Machine {
    pub(super) fn here() -> Self {
        let root = HostRoot::host();
        let info = root.text("proc/cpuinfo").unwrap_or_default();
        let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            cpu: name.map_or("unknown processor", |(_, name)| name.trim()).to_owned(),
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            kernel: kernel::release(&root).unwrap_or_default(),
            optimised: !cfg!(debug_assertions),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cores, kernel, optimised } = self;
        write!(f, "kvrail {} on {cores} × {cpu}, Linux {kernel}", env!("CARGO_PKG_VERSION"))?;
        if *optimised { Ok(()) } else { f.write_str("; a debug build, whose figures mean nothing") }
    }
}

/// Physical memory that a process has, bytes.
pub(super) fn resident_bytes(process: u32) -> Result<u64, CliError> {
    let path = format!("/proc/{process}/statm");
    let text =
        fs::read_to_string(&path).map_err(|error| CliError::failed(format!("{path}: {error}")))?;
    let pages = text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok());
    let unread = || CliError::failed(format!("{path} does not say how much is resident"));
    Ok(pages.ok_or_else(unread)? * page_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_written_is_resident() {
        const BYTES: usize = 32 << 20;
        let before = resident_bytes(std::process::id()).unwrap();
        let written = std::hint::black_box(vec![1_u8; BYTES]);
        let after = resident_bytes(std::process::id()).unwrap();
        assert_eq!(written.len(), BYTES);
        assert!(after >= before + BYTES as u64 / 2, "{before} {after}");
        assert!(resident_bytes(u32::MAX).is_err());
    }
}
