//! `kvrail bench stall`: what a thread of the holder that stands still does to those who read from it.
//!
//! One thread after the other is stopped for a time by the kernel, wherever it is: the reclaimer, the
//! control threads (door, registry client, metrics; all of them), and the poller, which is the data
//! thread. Meanwhile a reader goes on, and an engine goes on saving into the holder's full pool, so that
//! the reclaimer has work and, while it stands, others have to do without it.

mod report;
mod saver;
mod stop;

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::pair::{Pair, PairArgs, Readers, Window, blocks, namespace};
use super::{Bench, print};
use crate::cli::CliError;
use crate::cli::process::CONTROL_THREAD;
use crate::client::{Acquired, Client};
use crate::config::duration;
use crate::protocol::door::Source;
use crate::runtime::data::DATA_THREAD;
use crate::runtime::deadline::Deadline;
use crate::runtime::reclaim::RECLAIM_THREAD;
use report::{Report, Row};
use saver::Saver;

/// How long the reads may take to be as before once a thread goes on.
const RECOVERY: Duration = Duration::from_secs(60);

/// How often it is looked whether a run is to end.
const LOOK: Duration = Duration::from_millis(20);

/// Arguments of `kvrail bench stall`.
#[derive(Debug, Clone, Args)]
pub struct StallArgs {
    /// For how long each thread stands still [default: 1s,5s]
    #[arg(long, value_name = "TIME,…", value_delimiter = ',', value_parser = duration)]
    pub stall: Vec<Duration>,
    /// Between the two nodes.
    #[command(flatten)]
    pub pair: PairArgs,
    /// Take seconds, to see that it works: stalls of 200 ms
    #[arg(long, conflicts_with = "stall")]
    pub quick: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// Who stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Stalled {
    Nobody,
    Reclaimer,
    Control,
    Poller,
}

impl Stalled {
    const ALL: [Self; 4] = [Self::Nobody, Self::Reclaimer, Self::Control, Self::Poller];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Nobody => "nobody",
            Self::Reclaimer => "reclaimer",
            Self::Control => "control",
            Self::Poller => "poller",
        }
    }

    const fn threads(self) -> Option<&'static str> {
        match self {
            Self::Nobody => None,
            Self::Reclaimer => Some(RECLAIM_THREAD),
            Self::Control => Some(CONTROL_THREAD),
            Self::Poller => Some(DATA_THREAD),
        }
    }
}

/// Measures and reports.
pub(super) fn run(args: &StallArgs) -> Result<ExitCode, CliError> {
    let stalls = match args.stall.as_slice() {
        [] if args.quick => vec![Duration::from_millis(200)],
        [] => vec![Duration::from_secs(1), Duration::from_secs(5)],
        given => given.to_vec(),
    };
    let bench = Bench::start((Stalled::ALL.len() * stalls.len()) as u64)?;
    bench.say("a registry, a holder and a reader start");
    let pair = Pair::start(&args.pair, None)?;
    let mut report = Report::new(&args.pair, pair.transport()?);
    let outcome = measure(&pair, &stalls, &bench, &mut report);
    report.head.interrupted = bench.close(outcome)?;
    print(report.head.interrupted, |out| report.write(args.json, out))
}

fn measure(
    pair: &Pair,
    stalls: &[Duration],
    bench: &Bench,
    report: &mut Report,
) -> Result<(), CliError> {
    // What is read stays at the holder, whatever is saved there.
    let client = pair.holder.client()?;
    let kept = keep(&client)?;
    let saver = Saver::start(pair.holder.client()?, pair.holder.client()?)?;
    let readers = Readers::start(pair)?;
    let interrupted = || bench.is_interrupted();
    let mut spans = Vec::new();
    for stalled in Stalled::ALL {
        for time in stalls {
            bench.say(&format!("{} stands still for {time:?}", stalled.as_str()));
            let now = readers.now();
            // Whole again, and with the pool full before the first one.
            let is_good =
                |begun| move |it: &super::pair::Sample| it.begun > begun && it.outcome.is_good();
            let good = readers.first(RECOVERY, &interrupted, is_good(now))?;
            saver.wait_for_pressure(RECOVERY, &interrupted)?;
            if bench.is_interrupted() {
                break;
            }
            if good.is_none() {
                return Err(CliError::failed(format!("no read succeeded within {RECOVERY:?}")));
            }
            let saved = saver.saved();
            let span = match stalled.threads() {
                Some(threads) => stop::stall(pair.holder.id(), threads, *time, &readers)?,
                None => {
                    let (from, deadline) = (readers.now(), Deadline::after(*time));
                    while !bench.is_interrupted() && deadline.pause(LOOK) {}
                    (from, readers.now())
                }
            };
            spans.push((stalled, *time, span, saver.saved() - saved));
            bench.step();
        }
    }
    saver.end()?;
    // Those that were under way at the end of a stall have ended by now, or end here.
    let samples = readers.end()?;
    drop(kept);
    for (stalled, time, span, saved) in spans {
        let (window, stood) = (Window::of(&samples, span)?, span.1.since(span.0));
        report.rows.push(Row::new((stalled, time), stood, &window, saved));
    }
    Ok(())
}

/// Pins the blocks that are read.
fn keep(client: &Client) -> Result<Vec<Acquired<'_>>, CliError> {
    let kept = client.acquire(&namespace()?, &blocks(), Source::Here)?;
    if kept.iter().all(|block| matches!(block, Acquired::Ready(_))) {
        Ok(kept)
    } else {
        Err(CliError::failed("the holder does not hold what was saved there"))
    }
}
