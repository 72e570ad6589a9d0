//! Where a bench ran.

use std::fmt;

use serde::Serialize;

use crate::sys::kernel;
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
