//! Memory per entry, as the kernel counts it, in a process of its own: what an earlier contender
//! freed would be given to the next one uncounted.

use std::path::Path;
use std::process::{Command, Stdio};

use super::contender::Contender;
use super::load::{Load, filled, joined, mix};
use super::zipf::{Zipf, key, shuffled};
use crate::cli::CliError;
use crate::cli::bench::machine::resident_bytes;

/// Threads of the mix and the touches.
const THREADS: usize = 2;

/// What is asked of a contender whose memory is measured.
#[derive(Debug, Clone, Copy)]
pub struct Footprint {
    /// Blocks that it holds.
    pub(super) entries: u32,
    /// Operations of the mix.
    pub(super) operations: usize,
    /// Hits after that.
    pub(super) touches: usize,
}

/// Bytes when it is filled, after the mix, and after the touches.
pub(super) fn measure<C: Contender>(footprint: &Footprint) -> Result<Vec<u64>, CliError> {
    let Footprint { entries, operations, touches } = *footprint;
    let (zipf, each) = (Zipf::new(entries), operations / THREADS);
    let traces = (1..).take(THREADS).map(|seed| zipf.draw(each, seed)).collect();
    let load = Load { entries, order: shuffled(entries), traces };
    // What the threads' stacks and buffers need is there before the first look.
    let none = Load { entries: 3, order: vec![0, 1, 2], traces: vec![vec![0]; THREADS] };
    mix(&filled::<C>(3, &none.order)?, &none);
    let process = std::process::id();
    let before = resident_bytes(process)?;
    let subject = filled::<C>(entries, &load.order)?;
    let mut all = vec![resident_bytes(process)?.saturating_sub(before)];
    mix(&subject, &load);
    all.push(resident_bytes(process)?.saturating_sub(before));
    std::thread::scope(|scope| {
        let (load, subject) = (&load, &subject);
        let hits = move |trace: &Vec<u32>| {
            let mut hand = C::Hand::default();
            for number in trace.iter().cycle().take(touches / THREADS) {
                if let Some(pin) = subject.read(&mut hand, &key(u64::from(*number))) {
                    subject.release(pin);
                }
            }
        };
        let threads: Vec<_> =
            load.traces.iter().map(|trace| scope.spawn(move || hits(trace))).collect();
        threads.into_iter().for_each(joined);
    });
    all.push(resident_bytes(process)?.saturating_sub(before));
    Ok(all)
}

/// Has a child of this very program measure the contender of this name; bytes per entry.
pub(super) fn in_a_child(
    program: (&Path, &[String]),
    name: &str,
    footprint: &Footprint,
) -> Result<Vec<f64>, CliError> {
    let Footprint { entries, operations, touches } = *footprint;
    let output = Command::new(program.0)
        .args(program.1)
        .args(["--resident", name, "--parent-death", &std::process::id().to_string()])
        .args(["--entries", &entries.to_string()])
        .args(["--operations", &operations.to_string(), "--touches", &touches.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| CliError::failed(format!("cannot start {name} by itself: {error}")))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let bytes: Option<Vec<u64>> =
        said.split_whitespace().map(|number| number.parse().ok()).collect();
    match bytes {
        Some(bytes) if output.status.success() && !bytes.is_empty() => {
            Ok(bytes.iter().map(|bytes| *bytes as f64 / f64::from(entries)).collect())
        }
        _ => Err(CliError::failed(format!("the memory of {name} was not measured: {said}"))),
    }
}
