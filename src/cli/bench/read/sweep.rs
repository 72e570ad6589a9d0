//! Every combination of what was asked for, one row each.

use std::time::Duration;

use super::control::Holder;
use super::fabric::{self, DeviceArgs, Transport};
use super::report::Report;
use super::running::{ROUND_TRIP_TIME, Run};
use super::{POOL_MIN, ReadArgs, SIZE_MAX, What, limit};
use crate::cli::CliError;
use crate::cli::bench::Bench;
use crate::config::Size;
use crate::node::TransportChoice;

/// The arguments with their defaults filled in.
#[derive(Debug, Clone)]
pub(super) struct Sweep {
    transports: Vec<Transport>,
    pub(super) what: Vec<What>,
    pub(super) sizes: Vec<u32>,
    pub(super) batches: Vec<usize>,
    pub(super) depths: Vec<usize>,
    pub(super) streams: Vec<usize>,
    pub(super) threads: Vec<usize>,
    pub(super) run: u32,
    pub(super) merge: bool,
    pub(super) time: Duration,
    pub(super) pool: u64,
    pub(super) device: DeviceArgs,
}

impl Sweep {
    pub(super) fn new(args: &ReadArgs) -> Result<Self, CliError> {
        let quick = args.quick;
        let or = |given: &[u16], usual: &[u16], small: &[u16]| -> Vec<usize> {
            let chosen = if !given.is_empty() {
                given
            } else if quick {
                small
            } else {
                usual
            };
            chosen.iter().map(|number| usize::from(*number)).collect()
        };
        let sizes = match args.size.as_slice() {
            [] if quick => vec![4 << 10, 64 << 10],
            [] => vec![1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20],
            given => given.to_vec(),
        };
        let pool = args.pool.map_or(POOL_MIN, |Size(bytes)| bytes);
        if pool < POOL_MIN {
            return Err(CliError::usage(format!(
                "--pool: this takes at least {}, 16 of the longest blocks; got {}",
                Size(POOL_MIN),
                Size(pool)
            )));
        }
        let time = if quick { Duration::from_millis(50) } else { Duration::from_millis(500) };
        Ok(Self {
            transports: transports(&args.transport, &args.device)?,
            what: whats(args)?,
            sizes,
            batches: or(&args.batch, &[1, 32], &[1, 8]),
            depths: or(&args.depth, &[1, 4], &[2]),
            streams: or(&args.streams, &[2], &[2]),
            threads: or(&args.threads, &[1], &[1]),
            run: args.run.unwrap_or(1),
            merge: !args.no_merge,
            time: args.time.unwrap_or(time),
            pool,
            device: args.device.clone(),
        })
    }

    pub(super) fn steps(&self) -> u64 {
        let Self { transports, what, sizes, batches, depths, streams, threads, .. } = self;
        let rows = sizes.len() * batches.len() * depths.len() * streams.len() * threads.len();
        (transports.len() * what.len() * rows) as u64
    }

    pub(super) fn measure(
        &self,
        holder: &mut Holder,
        bench: &Bench,
        report: &mut Report,
    ) -> Result<(), CliError> {
        bench.say("memcpy");
        report.copies = limit::copies(&self.sizes, self.time.min(ROUND_TRIP_TIME));
        for transport in &self.transports {
            let run = Run { sweep: self, holder, bench, report };
            match transport {
                Transport::Tcp => {
                    run.over(Transport::Tcp, &|streams| fabric::tcp(None, streams))?;
                }
                Transport::Shm => {
                    run.over(Transport::Shm, &|streams| fabric::shm(None, streams))?;
                }
                Transport::Verbs => run.over(Transport::Verbs, &|streams| {
                    fabric::verbs(&self.device, None, streams)
                })?,
            }
        }
        Ok(())
    }

    /// What fits into `room` bytes of this: fewer batches in flight first, then smaller ones.
    pub(super) fn fit(
        &self,
        size: u32,
        (batch, depth): (usize, usize),
        room: u64,
    ) -> (usize, usize) {
        let blocks = usize::try_from(room / u64::from(size)).unwrap_or(usize::MAX).max(1);
        let batch = batch.min(blocks);
        (batch, depth.min(blocks / batch).max(1))
    }

    /// A reader's own memory.
    pub(super) fn scratch(&self, threads: usize) -> u64 {
        (self.pool / 4 / threads as u64).max(SIZE_MAX)
    }
}

/// What to measure: all that the other arguments allow, unless some is named.
fn whats(args: &ReadArgs) -> Result<Vec<What>, CliError> {
    let can_split = |what: &What| matches!(what, What::Bare | What::Leased);
    match (args.what.as_slice(), args.no_merge) {
        ([], false) => Ok(What::ALL.to_vec()),
        ([], true) => Ok(What::ALL.into_iter().filter(can_split).collect()),
        (given, true) if !given.iter().all(can_split) => Err(CliError::usage(
            "--no-merge is for --what bare and leased: a node merges what it can",
        )),
        (given, _) => Ok(given.to_vec()),
    }
}

/// The fabrics to measure: `auto` is what a node would take to another host. Whoever names a device
/// means to measure it.
fn transports(
    choices: &[TransportChoice],
    device: &DeviceArgs,
) -> Result<Vec<Transport>, CliError> {
    let choices = if choices.is_empty() { &[TransportChoice::Auto] } else { choices };
    let is_named = device.is_named();
    let needed = || fabric::verbs(device, None, 1).map(|_works| Transport::Verbs);
    let mut all = Vec::new();
    for choice in choices {
        all.push(match choice {
            TransportChoice::Tcp => Transport::Tcp,
            TransportChoice::Shm => Transport::Shm,
            TransportChoice::Verbs => needed()?,
            TransportChoice::Auto if is_named => needed()?,
            TransportChoice::Auto if fabric::verbs(device, None, 1).is_ok() => Transport::Verbs,
            TransportChoice::Auto => Transport::Tcp,
        });
    }
    if is_named && !all.contains(&Transport::Verbs) {
        return Err(DeviceArgs::pointless());
    }
    all.dedup();
    Ok(all)
}
