//! What the demonstration shows: a story for people, one JSON object for programs.

use std::io::{self, Write};

use serde::Serialize;

use crate::cli::CliError;
use crate::cli::door::{write_json, written};

/// The ranks after one step; absent where a node does not hold the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Ranks {
    #[serde(rename = "A")]
    pub(super) a: Option<u8>,
    #[serde(rename = "B")]
    pub(super) b: Option<u8>,
    #[serde(rename = "C")]
    pub(super) c: Option<u8>,
}

#[derive(Debug, Serialize)]
struct Step {
    step: String,
    #[serde(flatten)]
    ranks: Ranks,
}

/// One eviction of the last step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Eviction {
    pub(super) block: String,
    pub(super) rank: u8,
}

/// The whole demonstration.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(skip)]
    json: bool,
    pub(super) transport: String,
    /// The way into GPU memory, where blocks lie there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gpu: Option<String>,
    pub(super) verified: bool,
    /// Bytes that were read back and compared.
    pub(super) verified_bytes: u64,
    ranks: Vec<Step>,
    pub(super) evicted: Vec<Eviction>,
}

impl Report {
    pub(super) fn new(json: bool) -> Self {
        Self {
            json,
            transport: String::new(),
            gpu: None,
            verified: false,
            verified_bytes: 0,
            ranks: Vec::new(),
            evicted: Vec::new(),
        }
    }

    /// Says a line, to people only.
    pub(super) fn say(&self, line: &str) -> Result<(), CliError> {
        if !self.json {
            written(writeln!(io::stdout().lock(), "{line}"))?;
        }
        Ok(())
    }

    /// Notes a step and the ranks after it.
    pub(super) fn step(&mut self, step: &str, ranks: Ranks) -> Result<(), CliError> {
        if self.ranks.is_empty() {
            self.say(&format!("{:<58}  A   B   C", ""))?;
        }
        let show = |rank: Option<u8>| rank.map_or_else(|| "-".to_owned(), |rank| rank.to_string());
        let (a, b, c) = (show(ranks.a), show(ranks.b), show(ranks.c));
        self.say(&format!("{step:<58}  {a:<3} {b:<3} {c}"))?;
        self.ranks.push(Step { step: step.to_owned(), ranks });
        Ok(())
    }

    /// Ends it.
    pub(super) fn finish(&self) -> Result<(), CliError> {
        if self.json {
            written(write_json(&mut io::stdout().lock(), self))?;
        }
        Ok(())
    }
}
