//! The command line: one subcommand each in its own file, with its arguments beside it.

mod chain;
mod door;
pub mod get;
pub mod ls;
pub mod put;
mod sink;
pub mod stat;
#[cfg(test)]
mod door_tests;

use std::fmt::Display;

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
}
