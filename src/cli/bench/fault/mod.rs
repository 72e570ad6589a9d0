//! `kvrail bench fault`: how long readers are without a holder that fails: until the first read says so,
//! until the holder is left alone, and, once the fault is over, until it is used again.
//!
//! Three faults, one after the other: the holder is killed and started again, hangs (`SIGSTOP`) and goes
//! on, and the link to it is cut and made whole. The link is a relay within this process where the nodes
//! use TCP; with `--link` a network interface of this host is taken down and up, as on a host with RDMA.

mod relay;
mod report;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Args;
use rustix::process::Signal;
use serde::Serialize;

use super::pair::{HOLDER_ID, Pair, PairArgs, Readers, Sample, Window};
use super::{Bench, print};
use crate::cli::CliError;
use crate::client::Client;
use crate::config::duration;
use crate::runtime::deadline::Deadline;
use crate::types::Timestamp;
use relay::Relay;
use report::{Report, Row};

/// How often it is looked whether a peer is in use.
const LOOK: Duration = Duration::from_millis(2);

/// Arguments of `kvrail bench fault`.
#[derive(Debug, Clone, Args)]
pub struct FaultArgs {
    /// Faults to try [default: all]
    #[arg(long, value_name = "FAULT,…", value_delimiter = ',', value_enum)]
    pub fault: Vec<Fault>,
    /// Network interface to take down for the cut link, with `ip link set`; takes the right to do that
    #[arg(long, value_name = "NAME")]
    pub link: Option<String>,
    /// Longest wait for each of the things that are timed
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub patience: Duration,
    /// Between the two nodes.
    #[command(flatten)]
    pub pair: PairArgs,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// What happens to the holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Fault {
    /// It is killed, and started again with the same blocks
    Killed,
    /// It hangs, and goes on
    Hung,
    /// The link to it is cut, and made whole
    Cut,
}

impl Fault {
    const ALL: [Self; 3] = [Self::Killed, Self::Hung, Self::Cut];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Hung => "hung",
            Self::Cut => "cut",
        }
    }
}

/// The way from reader to holder.
enum Link {
    Relay(Relay),
    Interface(String),
}

impl Link {
    fn new(interface: Option<&str>) -> Result<Self, CliError> {
        let Some(name) = interface else {
            return Relay::start().map(Self::Relay);
        };
        // Now, and not only when its turn comes.
        if Path::new("/sys/class/net").join(name).exists() {
            Ok(Self::Interface(name.to_owned()))
        } else {
            Err(CliError::usage(format!("--link: this host has no network interface {name:?}")))
        }
    }

    fn cut(&self, cut: bool) -> Result<(), CliError> {
        match self {
            Self::Relay(relay) => relay.cut(cut),
            Self::Interface(name) => {
                let state = if cut { "down" } else { "up" };
                let mut command = Command::new("ip");
                command.args(["link", "set", "dev", name, state]).stdin(Stdio::null());
                let output = command.output().map_err(|error| {
                    CliError::failed(format!("--link: cannot run ip, of iproute2: {error}"))
                })?;
                if !output.status.success() {
                    let said = String::from_utf8_lossy(&output.stderr);
                    let said = said.trim();
                    return Err(CliError::usage(format!("--link: ip link set {state}: {said}")));
                }
            }
        }
        Ok(())
    }

    const fn as_str(&self) -> &'static str {
        match self {
            Self::Relay(_) => "a relay in this process, which stands for a pulled cable",
            Self::Interface(_) => "ip link set down and up",
        }
    }
}

/// Measures and reports.
pub(super) fn run(args: &FaultArgs) -> Result<ExitCode, CliError> {
    let faults = if args.fault.is_empty() { Fault::ALL.to_vec() } else { args.fault.clone() };
    let link = Link::new(args.link.as_deref())?;
    let bench = Bench::start(faults.len() as u64)?;
    bench.say("a registry, a holder and a reader start");
    let advertised = match &link {
        Link::Relay(relay) => Some(relay.address()),
        Link::Interface(_) => None,
    };
    let mut pair = Pair::start(&args.pair, advertised)?;
    if let Link::Relay(relay) = &link {
        relay.lead_to(pair.holder.addresses()?.listen);
    }
    let transport = pair.transport()?;
    let past_the_relay = transport == "verbs" && args.link.is_none();
    let mut report = Report::new(&args.pair, transport, link.as_str());
    let outcome = (|| {
        let trial = Trial {
            readers: Readers::start(&pair)?,
            at_reader: pair.reader.client()?,
            patience: args.patience,
            bench: &bench,
        };
        for fault in faults {
            if fault == Fault::Cut && past_the_relay {
                report.skipped = Some("cut: READs over RDMA pass a relay by: name a --link");
                continue;
            }
            bench.say(fault.as_str());
            match trial.run(fault, &mut pair, &link)? {
                Some(row) => report.rows.push(row),
                None => break,
            }
            bench.step();
        }
        trial.readers.end().map(drop)
    })();
    report.head.interrupted = bench.close(outcome)?;
    print(report.head.interrupted, |out| report.write(args.json, out))
}

struct Trial<'a> {
    readers: Readers,
    at_reader: Client,
    patience: Duration,
    bench: &'a Bench,
}

impl Trial<'_> {
    /// Strikes and repairs; `None` where a signal came first.
    fn run(&self, fault: Fault, pair: &mut Pair, link: &Link) -> Result<Option<Row>, CliError> {
        let started = self.readers.now();
        let whole = |it: &Sample| it.outcome.is_good() && it.outcome.fetched > 0;
        if self.first(|it| it.begun > started && whole(it))?.is_none() || !self.is_used()?.1 {
            return self.unless_interrupted("the holder is not read from before the fault");
        }
        let struck = self.readers.now();
        match fault {
            Fault::Killed => pair.holder.kill(),
            Fault::Hung => pair.holder.signal(Signal::STOP),
            Fault::Cut => link.cut(true)?,
        }
        let failed = self.first(|it| it.ended >= struck && !it.outcome.is_good())?;
        let left_alone = self.left_alone(struck)?;
        match fault {
            Fault::Killed => pair.restart_holder()?,
            Fault::Hung => pair.holder.signal(Signal::CONT),
            Fault::Cut => link.cut(false)?,
        }
        let repaired = self.readers.now();
        let back = self.first(|it| it.ended >= repaired && whole(it))?;
        let (used, is_used) = self.is_used()?;
        if self.bench.is_interrupted() {
            return Ok(None);
        }
        let end = back.map_or(used, |it| it.ended);
        Ok(Some(Row {
            fault,
            detected_ms: failed.map(|it| millis(struck, it.ended)),
            left_alone_ms: left_alone.map(|at| millis(struck, at)),
            lasted_ms: millis(struck, repaired),
            back_ms: back.map(|it| millis(repaired, it.ended)),
            used_ms: is_used.then(|| millis(repaired, used)),
            outcome: Window::of(&self.readers.samples(), (struck, end))?.outcome,
        }))
    }

    fn first(&self, is_it: impl Fn(&Sample) -> bool) -> Result<Option<Sample>, CliError> {
        self.readers.first(self.patience, &|| self.bench.is_interrupted(), is_it)
    }

    /// Whether nothing speaks against the holder.
    fn is_trusted(&self) -> Result<bool, CliError> {
        let health = self.at_reader.stat()?.health;
        let mut of_holder = health.iter().filter(|it| it.peer.is_empty() || it.peer == HOLDER_ID);
        Ok(of_holder.all(|it| it.state == "closed"))
    }

    /// Waits until the holder is asked no more: the reader leaves it alone, or the registry names it for
    /// no block of a read.
    fn left_alone(&self, struck: Timestamp) -> Result<Option<Timestamp>, CliError> {
        let deadline = Deadline::after(self.patience);
        let unlisted = |it: &Sample| {
            let of = it.outcome;
            it.begun >= struck && of.not_found > 0 && of.fetched + of.failed + of.busy == 0
        };
        loop {
            if !self.is_trusted()? {
                return Ok(Some(self.readers.now()));
            }
            if let Some(at) = self.readers.latest().filter(unlisted) {
                return Ok(Some(at.ended));
            }
            if self.bench.is_interrupted() || !deadline.pause(LOOK) {
                return Ok(None);
            }
        }
    }

    /// Waits until nothing speaks against the holder; when, and whether that came.
    fn is_used(&self) -> Result<(Timestamp, bool), CliError> {
        let deadline = Deadline::after(self.patience);
        loop {
            if self.is_trusted()? {
                return Ok((self.readers.now(), true));
            }
            if self.bench.is_interrupted() || !deadline.pause(LOOK) {
                return Ok((self.readers.now(), false));
            }
        }
    }

    fn unless_interrupted<T>(&self, sentence: &str) -> Result<Option<T>, CliError> {
        if self.bench.is_interrupted() { Ok(None) } else { Err(CliError::failed(sentence)) }
    }
}

fn millis(from: Timestamp, to: Timestamp) -> f64 {
    to.since(from).as_secs_f64() * 1e3
}
