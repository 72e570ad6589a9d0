//! What is not measured by size: exports, imports, the cost of a flush.

use std::sync::Arc;

use super::report::Report;
use super::{Run, pattern};
use crate::cli::CliError;
use crate::cli::bench::median;
use crate::cuda::{CopyQueue, CudaError, DeviceMemory, End, HostRegistration, Piece};
use crate::memory::Mapping;
use crate::runtime::clock::Clock;

const BYTES: usize = 2 << 20;

/// Flushes that the median is of.
const FLUSHES: usize = 1000;

/// Runs them all. One that the driver refuses is told, and the next one is tried.
pub(super) fn run(run: &mut Run<'_>, report: &mut Report) {
    let exported = dma_buf(run).unwrap_or_else(|error| format!("unsupported: {error}"));
    report.note("dma-buf of 2 MiB", exported);
    let passed = match by_descriptor(run) {
        Ok(true) => "imported and read".to_owned(),
        Ok(false) => {
            report.wrong = true;
            "WRONG bytes".to_owned()
        }
        Err(error) => format!("unsupported: {error}"),
    };
    report.note("memory by descriptor", passed);
    let flushed = flush(run).unwrap_or_else(|error| format!("unsupported: {error}"));
    report.note("a flush", flushed);
}

fn dma_buf(run: &Run<'_>) -> Result<String, CudaError> {
    let memory = DeviceMemory::allocate(run.bound, BYTES as u64)?;
    let exported = memory.dma_buf(run.bound, 0, BYTES as u64)?;
    let flag = match exported.without_pcie {
        None => "with the flag of a PCIe mapping".to_owned(),
        Some(refused) => format!("without the flag of a PCIe mapping: {refused}"),
    };
    Ok(format!("a descriptor, offset {}, {flag}", exported.offset))
}

/// Memory that one handle names and another one reads.
fn by_descriptor(run: &mut Run<'_>) -> Result<bool, CudaError> {
    let bound = run.bound;
    let memory = DeviceMemory::allocate(bound, BYTES as u64)?;
    let bytes = pattern("descriptor", BYTES);
    run.pinned.write(&bytes)?;
    run.pinned.copy_to(bound, &memory, BYTES)?;
    let fd = memory.export(bound)?;
    let again = DeviceMemory::import(bound, &fd, memory.len())?;
    let mapping = Mapping::anonymous("kvrail-bench", BYTES as u64)
        .map_err(|source| CudaError::Host { what: "memory to copy to", source })?;
    let host = HostRegistration::new(bound, &Arc::new(mapping))?;
    let mut queue = CopyQueue::new(bound, 1)?;
    let ends = (End::Device(again), End::Host(Arc::clone(&host)));
    queue.begin(bound, (&ends.0, &ends.1), &[Piece::contiguous(0, 0, BYTES as u64)])?;
    queue.drain(bound, &mut Vec::new())?;
    let mut arrived = vec![0; BYTES];
    host.mapping().read(0, &mut arrived)?;
    Ok(arrived == bytes)
}

fn flush(run: &Run<'_>) -> Result<String, CliError> {
    let clock = Clock::start();
    let mut times = Vec::with_capacity(FLUSHES);
    let needed = run.bound.flush_writes().map_err(CliError::failed)?;
    for _ in 0..FLUSHES {
        let begun = clock.now();
        run.bound.flush_unasked().map_err(CliError::failed)?;
        times.push(clock.now().since(begun).as_secs_f64() * 1e6);
    }
    let cost = median(times).unwrap_or_default();
    let when = if needed { "needed after READs" } else { "not needed after READs" };
    Ok(format!("{cost:.2} microseconds, {when}"))
}
