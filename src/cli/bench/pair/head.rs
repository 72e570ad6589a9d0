//! What the report of a bench on a pair begins with.

use serde::Serialize;

use super::{BLOCK_BYTES, PairArgs};
use crate::cli::bench::machine::Machine;
use crate::config::Size;

/// Which bench it was, where, and what it read.
#[derive(Debug, Serialize)]
pub(in crate::cli::bench) struct Head {
    bench: &'static str,
    version: &'static str,
    machine: Machine,
    transport: String,
    batch: u16,
    depth: u16,
    pub(in crate::cli::bench) interrupted: bool,
}

impl Head {
    pub(in crate::cli::bench) fn new(
        bench: &'static str,
        args: &PairArgs,
        transport: String,
    ) -> Self {
        Self {
            bench,
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            transport,
            batch: args.batch,
            depth: args.depth,
            interrupted: false,
        }
    }

    /// The same for people.
    pub(in crate::cli::bench) fn text(&self) -> String {
        let Self { machine, transport, batch, depth, .. } = self;
        let size = Size(u64::from(BLOCK_BYTES));
        format!("{machine}\n{transport}, {depth} clients, {batch} blocks of {size} a read")
    }

    /// What a report ends with.
    pub(in crate::cli::bench) const fn ending(&self) -> &'static str {
        if self.interrupted { "\nInterrupted: this is what was measured.\n" } else { "" }
    }
}
