//! `kvrail bench store`: the store that `serve` runs beside its alternatives, on the same work in the
//! same run.
//!
//! Contenders take turns within each round, and what is reported is the median of the rounds and the
//! median of each round's ratio to the ranks under a mutex: other work on a machine moves everybody's
//! nanoseconds, and ratios least. Here are the two that need no other crate; `bench/store.rs` brings
//! the others and runs the same code.

mod contender;
mod load;
mod measure;
mod mutexed;
mod own;
mod report;
mod resident;
#[cfg(test)]
mod tests;
mod zipf;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser};

pub use contender::{Contender, Entrant, Ranked};
pub use load::{Load, Numbers};
pub use measure::Measure;
pub use resident::Footprint;
pub use zipf::{Random, Zipf, key, payload, shuffled};

use super::{Bench, count, print};
use crate::cli::door::written;
use crate::cli::{CliError, ended_by, refuse};
use crate::limits;
use crate::store::Store;
use crate::sys::process::end_with_parent;
use measure::Measure as M;
use mutexed::Mutexed;
use report::{Figures, Point, Report};

/// What every run compares with.
pub(super) const BASELINE: &str = "mutexed";

/// The contenders that every build has.
const OWN: [Entrant; 2] =
    [Entrant::ranked::<Store>("kvrail"), Entrant::ranked::<Mutexed>(BASELINE)];

/// The sizes that a reclaim is measured at beside those asked for: its cost must not grow with them.
const RECLAIMED: u32 = 10_000;

/// Fewest entries: what the distribution and the victims need to mean something.
const ENTRIES_MIN: u32 = 1_000;

/// Most threads.
const THREADS_MAX: usize = 256;

/// Arguments of `kvrail bench store`.
#[derive(Debug, Clone, Args)]
pub struct StoreArgs {
    /// Blocks held by each contender [default: 100k,1M]
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', value_parser = entries)]
    pub entries: Vec<u32>,
    /// Threads that work at once [default: 1,2,8]
    #[arg(long, value_name = "COUNT,…", value_delimiter = ',', value_parser = threads)]
    pub threads: Vec<usize>,
    /// Rounds, of which the median counts [default: 7]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=999))]
    pub rounds: Option<u16>,
    /// Contenders [default: all that this program has]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub contenders: Vec<String>,
    /// Operations of each load, all threads together [default: 500k]
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub operations: Option<u64>,
    /// Hits before the memory per entry is measured a last time, 0 to leave memory out [default: 20M]
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub touches: Option<u64>,
    /// Take seconds, to see that it works: small defaults for all of the above
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
    /// Measure the memory of this contender and nothing else: what a child process is for.
    #[arg(long, hide = true)]
    pub resident: Option<String>,
    /// End when this process, the parent, ends.
    #[arg(long, value_name = "PID", hide = true)]
    pub parent_death: Option<u32>,
}

fn entries(text: &str) -> Result<u32, String> {
    let got = count(text)?;
    u32::try_from(got)
        .ok()
        .filter(|number| (ENTRIES_MIN..=limits::RESIDENTS_MAX).contains(number))
        .ok_or_else(|| {
            format!(
                "a store has {ENTRIES_MIN} to {} entries here, got {got}",
                limits::RESIDENTS_MAX
            )
        })
}

fn threads(text: &str) -> Result<usize, String> {
    let got = text.parse().ok().filter(|number| (1..=THREADS_MAX).contains(number));
    got.ok_or_else(|| format!("1 to {THREADS_MAX} threads, got {text:?}"))
}

/// The arguments with their defaults filled in.
#[derive(Debug, Clone)]
struct Plan {
    entries: Vec<u32>,
    threads: Vec<usize>,
    rounds: usize,
    operations: usize,
    touches: usize,
    entrants: Vec<Entrant>,
}

impl Plan {
    fn new(args: &StoreArgs, all: &[Entrant]) -> Result<Self, CliError> {
        let or = |given: Option<u64>, usual: u64, quick: u64| {
            let chosen = given.unwrap_or(if args.quick { quick } else { usual });
            usize::try_from(chosen).map_err(CliError::usage)
        };
        let names = |list: &[Entrant]| list.iter().map(|it| it.name).collect::<Vec<_>>().join(", ");
        let mut entrants = Vec::new();
        for name in &args.contenders {
            let found = all.iter().find(|entrant| entrant.name == name).copied();
            entrants.push(found.ok_or_else(|| {
                CliError::usage(format!(
                    "--contenders: there are {} here, and more in cargo bench --bench store; got \
                     {name:?}",
                    names(all)
                ))
            })?);
        }
        let list = |given: &[u32], usual: &[u32], quick: &[u32]| match given {
            [] => (if args.quick { quick } else { usual }).to_vec(),
            given => given.to_vec(),
        };
        let operations = or(args.operations, 500_000, 20_000)?;
        let threads = match args.threads.as_slice() {
            [] if args.quick => vec![1, 2],
            [] => vec![1, 2, 8],
            given => given.to_vec(),
        };
        let most = threads.iter().max().copied().unwrap_or(1);
        if operations < most * load::BATCH {
            return Err(CliError::usage(format!(
                "--operations: {most} threads need at least {} of them, a batch each",
                most * load::BATCH
            )));
        }
        Ok(Self {
            entries: list(&args.entries, &[100_000, 1_000_000], &[ENTRIES_MIN]),
            threads,
            rounds: or(args.rounds.map(u64::from), 7, 1)?,
            operations,
            touches: or(args.touches, 20_000_000, 20_000)?,
            entrants: if entrants.is_empty() { all.to_vec() } else { entrants },
        })
    }

    /// The sizes that a reclaim is measured at.
    fn reclaimed(&self) -> Vec<u32> {
        let mut all = self.entries.clone();
        all.push(RECLAIMED);
        all.sort_unstable();
        all.dedup();
        all
    }

    fn steps(&self) -> usize {
        let sizes = self.entries.len();
        let memory = if self.touches > 0 { sizes } else { 0 };
        let rounds = self.rounds * (sizes * self.threads.len() + 2 * self.reclaimed().len());
        (memory + rounds) * self.entrants.len()
    }
}

/// `kvrail bench store` of a program, which children are started from with these arguments.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    arguments: Vec<String>,
}

pub(super) fn run(args: &StoreArgs) -> Result<ExitCode, CliError> {
    let path = std::env::current_exe().map_err(CliError::failed)?;
    let arguments = vec!["bench".to_owned(), "store".to_owned()];
    measure_all(args, &OWN, &Program { path, arguments })
}

/// The arguments alone, as a program of its own has them.
#[derive(Debug, Parser)]
#[command(about = "The store beside its alternatives, on the same work in the same run")]
struct Alone {
    #[command(flatten)]
    args: StoreArgs,
    /// What `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// `kvrail bench store` as a program of its own, with more contenders.
#[must_use]
pub fn main_with(arguments: impl IntoIterator<Item = OsString>, others: &[Entrant]) -> ExitCode {
    let parsed = match Alone::try_parse_from(arguments) {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error),
    };
    let all = [&OWN, others].concat();
    let run = || {
        let path = std::env::current_exe().map_err(CliError::failed)?;
        measure_all(&parsed.args, &all, &Program { path, arguments: Vec::new() })
    };
    run().unwrap_or_else(|error| ended_by(&error))
}

fn measure_all(args: &StoreArgs, all: &[Entrant], program: &Program) -> Result<ExitCode, CliError> {
    let plan = Plan::new(args, all)?;
    if let Some(name) = &args.resident {
        args.parent_death.map_or(Ok(()), end_with_parent).map_err(CliError::failed)?;
        return resident_of(name, all, &plan);
    }
    let bench = Bench::start(plan.steps() as u64)?;
    let mut figures = Figures::default();
    for entries in &plan.entries {
        for threads in &plan.threads {
            rounds(&plan, (*entries, *threads), &bench, &mut figures)?;
        }
    }
    reclaims(&plan, &bench, &mut figures)?;
    if plan.touches > 0 {
        memory(&plan, program, &bench, &mut figures)?;
    }
    let interrupted = bench.close(Ok(()))?;
    let names = plan.entrants.iter().map(|entrant| entrant.name).collect();
    let report = Report::new(&plan, names, &figures, interrupted);
    print(interrupted, |out| report.write(args.json, out))
}

/// The entrants as round `round` has them: who goes first changes.
fn turns(plan: &Plan, round: usize) -> impl Iterator<Item = &Entrant> {
    let count = plan.entrants.len();
    plan.entrants.iter().cycle().skip(round % count.max(1)).take(count)
}

fn rounds(
    plan: &Plan,
    (entries, threads): (u32, usize),
    bench: &Bench,
    figures: &mut Figures,
) -> Result<(), CliError> {
    if bench.is_interrupted() {
        return Ok(());
    }
    let (distribution, each) = (Zipf::new(entries), plan.operations / threads);
    let traces = (1..).take(threads).map(|seed| distribution.draw(each, seed)).collect();
    let load = Load { entries, order: shuffled(entries), traces };
    for round in 0..plan.rounds {
        for entrant in turns(plan, round) {
            if bench.is_interrupted() {
                return Ok(());
            }
            let what = format!("{} × {entries}, {threads} threads, round {round}", entrant.name);
            bench.say(&what);
            for (measure, value) in (entrant.round)(&load)? {
                let point = Point { entries, threads, measure };
                figures.add(point, entrant.name, round, value);
            }
            bench.step();
        }
    }
    Ok(())
}

fn reclaims(plan: &Plan, bench: &Bench, figures: &mut Figures) -> Result<(), CliError> {
    for entries in plan.reclaimed() {
        let order = shuffled(entries);
        for (measure, pinned) in [(M::Reclaim, false), (M::ReclaimPinned, true)] {
            for round in 0..plan.rounds {
                for entrant in turns(plan, round) {
                    if bench.is_interrupted() {
                        return Ok(());
                    }
                    bench.say(&format!("{} × {entries}, reclaim, round {round}", entrant.name));
                    if let Some(value) = (entrant.reclaim)(entries, &order, pinned)? {
                        let point = Point { entries, threads: 1, measure };
                        figures.add(point, entrant.name, round, value);
                    }
                    bench.step();
                }
            }
        }
    }
    Ok(())
}

fn memory(
    plan: &Plan,
    program: &Program,
    bench: &Bench,
    figures: &mut Figures,
) -> Result<(), CliError> {
    for &entries in &plan.entries {
        for entrant in &plan.entrants {
            if bench.is_interrupted() {
                return Ok(());
            }
            bench.say(&format!("{} × {entries}, memory", entrant.name));
            let footprint =
                Footprint { entries, operations: plan.operations, touches: plan.touches };
            let child = (program.path.as_path(), program.arguments.as_slice());
            let bytes = match resident::in_a_child(child, entrant.name, &footprint) {
                // The child heard the same signal.
                Err(_) if bench.is_interrupted() => return Ok(()),
                bytes => bytes?,
            };
            for (measure, value) in M::BYTES.into_iter().zip(bytes) {
                let point = Point { entries, threads: 2, measure };
                figures.add(point, entrant.name, 0, value);
            }
            bench.step();
        }
    }
    Ok(())
}

/// What the child does: prints the bytes.
fn resident_of(name: &str, all: &[Entrant], plan: &Plan) -> Result<ExitCode, CliError> {
    let entrant = all.iter().find(|entrant| entrant.name == name);
    let unknown = || CliError::usage(format!("--resident: there is no contender {name:?}"));
    let entrant = entrant.ok_or_else(unknown)?;
    let entries = plan.entries.first().copied().unwrap_or(ENTRIES_MIN);
    let footprint = Footprint { entries, operations: plan.operations, touches: plan.touches };
    let bytes = (entrant.resident)(&footprint)?;
    let line: Vec<String> = bytes.iter().map(u64::to_string).collect();
    written(writeln!(io::stdout().lock(), "{}", line.join(" ")))?;
    Ok(ExitCode::SUCCESS)
}
