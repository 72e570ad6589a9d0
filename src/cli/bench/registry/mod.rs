//! `kvrail bench registry`: what the owner registry costs whoever serves it, in its three forms, beside a
//! plain loop over a Redis server on the same batches; what a node's death blocks, and what announcing all
//! residents again does to lends.
//!
//! All forms are asked the same by the same code, in turn within each round. What is measured is the
//! processor time of the one that serves: it does not grow with other work on the machine, as times do.

mod death;
mod rates;
mod redis_server;
mod report;
mod resync;

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::{Bench, count, print};
use crate::cli::CliError;
use crate::cli::cluster::{Cluster, Process};
use crate::limits;
use death::Death;
use rates::Rates;
use redis_server::RedisServer;
use report::Report;

/// Fewest keys: some batches, so that what a pass begins and ends with does not count.
const KEYS_MIN: u32 = 10_000;

/// Most keys: half of what a registry holds by default.
const KEYS_MAX: u32 = 16 << 20;

/// Arguments of `kvrail bench registry`.
#[derive(Debug, Clone, Args)]
pub struct RegistryArgs {
    /// Blocks that are announced, asked for and withdrawn, by batches of 1,024 [default: 1M]
    #[arg(long, value_name = "COUNT", value_parser = keys)]
    pub keys: Option<u32>,
    /// Residents that a node announces again while it lends, 0 to leave that out [default: 5M]
    #[arg(long, value_name = "COUNT", value_parser = residents)]
    pub residents: Option<u32>,
    /// Rounds, of which the median counts [default: 3]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=999))]
    pub rounds: Option<u16>,
    /// Take seconds, to see that it works: small defaults for all of the above
    #[arg(long)]
    pub quick: bool,
    /// Print one JSON object instead of the tables
    #[arg(long)]
    pub json: bool,
    /// Become the Redis server of the bench that is this process, on this port.
    #[arg(long, hide = true, num_args = 2)]
    pub redis_of: Vec<u32>,
}

fn keys(text: &str) -> Result<u32, String> {
    let got = count(text)?;
    let good = u32::try_from(got).ok().filter(|keys| (KEYS_MIN..=KEYS_MAX).contains(keys));
    good.ok_or_else(|| format!("{KEYS_MIN} to {KEYS_MAX} keys, got {got}"))
}

fn residents(text: &str) -> Result<u32, String> {
    let got = count(text)?;
    let is_good = |it: &u32| *it == 0 || (KEYS_MIN..=limits::RESIDENTS_MAX).contains(it);
    u32::try_from(got).ok().filter(is_good).ok_or_else(|| {
        format!("0, or {KEYS_MIN} to {} residents, got {got}", limits::RESIDENTS_MAX)
    })
}

/// The arguments with their defaults filled in.
#[derive(Debug, Clone, Copy, Serialize)]
struct Plan {
    keys: u32,
    residents: u32,
    rounds: u16,
}

impl Plan {
    fn new(args: &RegistryArgs) -> Self {
        let or = |usual: u32, quick: u32| if args.quick { quick } else { usual };
        let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 3 });
        Self {
            keys: args.keys.unwrap_or(or(1_000_000, 20_000)),
            residents: args.residents.unwrap_or(or(5_000_000, 20_000)),
            rounds,
        }
    }
}

/// Who is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Form {
    /// The directory in this process.
    InProcess,
    /// `kvrail registry`, over gRPC.
    Grpc,
    /// A Redis server, as `--registry redis://…` uses it.
    Redis,
    /// A Redis server, as a script of three lines would.
    PlainRedis,
}

impl Form {
    const ALL: [Self; 4] = [Self::InProcess, Self::Grpc, Self::Redis, Self::PlainRedis];

    const fn as_str(self) -> &'static str {
        match self {
            Self::InProcess => "in this process",
            Self::Grpc => "kvrail registry, over gRPC",
            Self::Redis => "on Redis",
            Self::PlainRedis => "plain loop over Redis",
        }
    }

    const fn needs_redis(self) -> bool {
        matches!(self, Self::Redis | Self::PlainRedis)
    }
}

/// Measures and reports.
pub(super) fn run(args: &RegistryArgs) -> Result<ExitCode, CliError> {
    if let [parent, port] = *args.redis_of.as_slice() {
        return Err(redis_server::become_one(parent, port));
    }
    let plan = Plan::new(args);
    let redis = redis_server::version();
    let mut forms = Form::ALL.to_vec();
    forms.retain(|form| redis.is_some() || !form.needs_redis());
    let steps = usize::from(plan.rounds) * (forms.len() + 1) + usize::from(plan.residents > 0);
    let bench = Bench::start(steps as u64)?;
    let mut report = Report::new(plan, redis);
    let outcome = measure(plan, &forms, &bench, &mut report);
    report.interrupted = bench.close(outcome)?;
    print(report.interrupted, |out| report.write(args.json, out))
}

fn measure(plan: Plan, forms: &[Form], bench: &Bench, report: &mut Report) -> Result<(), CliError> {
    let batches = rates::batches(plan.keys);
    for round in 1..=plan.rounds {
        for form in forms {
            bench.say(&format!("{}, round {round}", form.as_str()));
            let Some(rates) = rates_of(*form, &batches, bench)? else { return Ok(()) };
            report.rates.push((*form, rates));
            bench.step();
        }
        bench.say(&format!("a node's death, round {round}"));
        let Some(death) = Death::measure(&batches, bench)? else { return Ok(()) };
        report.deaths.push(death);
        bench.step();
    }
    if plan.residents > 0 {
        bench.say("lends while all residents are announced");
        report.resync = resync::measure(plan.residents, bench)?;
        bench.step();
    }
    Ok(())
}

/// `None` where a signal came first.
fn rates_of(
    form: Form,
    batches: &rates::Batches,
    bench: &Bench,
) -> Result<Option<Rates>, CliError> {
    match form {
        Form::InProcess => rates::in_process(batches, bench),
        Form::Grpc => rates::over_grpc(&Server::start()?, batches, bench),
        Form::Redis => rates::on_redis(&RedisServer::start()?, batches, bench),
        Form::PlainRedis => rates::plain_redis(&RedisServer::start()?, batches, bench),
    }
}

/// `kvrail registry` as a child process.
struct Server {
    process: Process,
    _cluster: Cluster,
}

impl Server {
    fn start() -> Result<Self, CliError> {
        let cluster = Cluster::new(std::env::current_exe().map_err(CliError::failed)?)?;
        let lease = format!("{}s", rates::LEASE.as_secs());
        let arguments = ["--node-lease", &lease, "--log", "warn"];
        let process = cluster.registry("registry", &arguments)?;
        Ok(Self { process, _cluster: cluster })
    }

    fn address(&self) -> Result<String, CliError> {
        Ok(self.process.addresses()?.listen.to_string())
    }
}
