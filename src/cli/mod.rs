//! The command line: one subcommand each in its own file, with its arguments beside it.
//!
//! A command that fails says why in one sentence on standard error. Exit code 2 is the caller's to
//! correct (an argument, a file, a setting); 1 is anything else. To add a command, add its variant to
//! `Command` and its arm to `dispatch`.

pub mod bench;
mod chain;
pub mod cluster;
pub mod demo;
pub mod doctor;
pub mod door;
#[cfg(test)]
mod door_tests;
pub mod get;
pub mod ls;
mod process;
pub mod put;
mod registry;
mod scratch;
mod serve;
mod sink;
pub mod stat;
mod table;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

pub use process::{Ready, ReadyFile, announce_ready, end_with_parent, start_logging};

use crate::config::{ConfigError, RegistrySettings, ServeSettings, sentence};

/// Exit code of what the caller can correct.
const USAGE: u8 = 2;
/// Exit code of everything else that fails.
const FAILURE: u8 = 1;

/// Why a command ended without doing what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CliError {
    /// An argument, file or setting that can never work: exit code 2.
    #[error("{0}")]
    Usage(String),
    /// What went wrong at run time: exit code 1.
    #[error("{0}")]
    Failed(String),
}

impl CliError {
    /// The caller's to correct.
    pub fn usage(sentence: impl Display) -> Self {
        Self::Usage(sentence.to_string())
    }

    /// Not the caller's fault.
    pub fn failed(sentence: impl Display) -> Self {
        Self::Failed(sentence.to_string())
    }

    /// The process's exit code.
    #[must_use]
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => USAGE,
            Self::Failed(_) => FAILURE,
        }
    }
}

impl From<ConfigError> for CliError {
    fn from(error: ConfigError) -> Self {
        Self::usage(error)
    }
}

/// Serves LLM KV-cache blocks between GPU hosts at the speed of the fabric.
#[derive(Debug, Parser)]
#[command(name = "kvrail", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const PLACES: &str = "Every setting can also be given as a variable (--lease-ttl as \
    KVRAIL_LEASE_TTL) or as a key of the same name in the --config file. Flags win over variables, \
    variables over the file.";

/// What `kvrail` does.
#[derive(Debug, Subcommand)]
enum Command {
    /// Show the main job on this machine: three nodes that move blocks, and their ranks.
    Demo(demo::DemoArgs),
    /// Run a node: memory pools, peers, local engines, metrics.
    #[command(after_help = PLACES)]
    Serve(Box<ServeSettings>),
    /// Run the owner registry of a cluster.
    #[command(after_help = PLACES)]
    Registry(RegistrySettings),
    /// Save a file as blocks of the local node, and print their hashes.
    Put(put::PutArgs),
    /// Read blocks back into a file, from the local node and its peers.
    Get(get::GetArgs),
    /// Show what the local node holds, and who reads it.
    Stat(stat::StatArgs),
    /// List the blocks of the local node.
    Ls(ls::LsArgs),
    /// Measure what this machine gets out of kvrail.
    Bench(bench::BenchArgs),
    /// Say why RDMA or GPU-direct will not work on this host, line by line, each with its remedy.
    Doctor(doctor::DoctorArgs),
}

fn dispatch(command: Command) -> Result<ExitCode, CliError> {
    match command {
        Command::Serve(settings) => serve::run(*settings),
        Command::Registry(settings) => registry::run(settings),
        Command::Demo(args) => demo::run(&args),
        Command::Put(args) => put::run(&args),
        Command::Get(args) => get::run(&args),
        Command::Stat(args) => stat::run(&args),
        Command::Ls(args) => ls::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    }
}

/// The command line, where a number below zero is a value that is out of range and no unknown flag.
fn command() -> clap::Command {
    fn with_negative(command: clap::Command) -> clap::Command {
        let args = |arg: clap::Arg| {
            if arg.get_action().takes_values() { arg.allow_negative_numbers(true) } else { arg }
        };
        command.mut_args(args).mut_subcommands(with_negative)
    }
    with_negative(Cli::command())
}

fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
    let mut command = command();
    let mut matches = command.try_get_matches_from_mut(arguments)?;
    Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Runs `kvrail` with these arguments, the program's name first.
#[must_use]
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let parsed = match parse(arguments) {
        Ok(parsed) => parsed,
        Err(error) => return refuse(&error),
    };
    dispatch(parsed.command).unwrap_or_else(|error| ended_by(&error))
}

/// Says why a command ended, and gives its exit code.
fn ended_by(error: &CliError) -> ExitCode {
    say(error);
    ExitCode::from(error.exit_code())
}

/// One line on standard error. Where that is a full disk or a pipe that nobody reads, the command goes on:
/// its exit code tells the same.
fn say(line: impl Display) {
    writeln!(io::stderr(), "kvrail: {line}").ok();
}

/// Help and version where they were asked for, else what is wrong with the arguments.
fn refuse(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match door::written(error.print()) {
            Ok(_read_or_not) => ExitCode::SUCCESS,
            Err(error) => ended_by(&error),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            error.print().ok();
            ExitCode::from(USAGE)
        }
        _ => {
            say(sentence(error));
            ExitCode::from(USAGE)
        }
    }
}
