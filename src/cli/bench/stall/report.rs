//! The rows, as a table for people and as one object for programs.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use super::Stalled;
use crate::cli::bench::pair::{Head, Outcome, PairArgs, Window};
use crate::cli::door::write_json;
use crate::cli::table::table;

/// The reads that were under way while something stood still.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) stalled: Stalled,
    pub(super) stall_ms: u64,
    /// For how long it stood, which is longer where the bench itself had to wait.
    pub(super) stood_ms: u64,
    /// Reads of a batch.
    pub(super) reads: u64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) max_us: f64,
    /// Blocks.
    #[serde(flatten)]
    pub(super) outcome: Outcome,
    /// Blocks that the engine saved meanwhile.
    pub(super) saved: u64,
}

impl Row {
    pub(super) fn new(
        (stalled, time): (Stalled, Duration),
        stood: Duration,
        window: &Window,
        saved: u64,
    ) -> Self {
        let [p50, p99, _, max] = window.latency.percentiles();
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            stalled,
            stall_ms: millis(time),
            stood_ms: millis(stood),
            reads: window.reads,
            p50_us: p50 / 1e3,
            p99_us: p99 / 1e3,
            max_us: max / 1e3,
            outcome: window.outcome,
            saved,
        }
    }
}

/// The whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) head: Head,
    pub(super) rows: Vec<Row>,
}

const HEADER: [&str; 13] = [
    "stalled",
    "ms",
    "reads",
    "p50 us",
    "× base",
    "p99 us",
    "× base",
    "max us",
    "failed",
    "not found",
    "busy",
    "wrong",
    "saved",
];

impl Report {
    pub(super) fn new(args: &PairArgs, transport: String) -> Self {
        Self { head: Head::new("stall", args, transport), rows: Vec::new() }
    }

    pub(super) fn write(&self, json: bool, out: &mut dyn Write) -> io::Result<()> {
        if json { write_json(out, self) } else { out.write_all(self.text().as_bytes()) }
    }

    /// The row without a stall that was measured for as long.
    fn base(&self, row: &Row) -> Option<&Row> {
        let is_base = |it: &&Row| it.stalled == Stalled::Nobody && it.stall_ms == row.stall_ms;
        self.rows.iter().find(is_base)
    }

    fn text(&self) -> String {
        let mut table = table(HEADER, 1);
        for row in &self.rows {
            let base = self.base(row);
            let ratio = |own: f64, of: fn(&Row) -> f64| {
                base.map_or("-".to_owned(), |base| format!("{:.2}", own / of(base)))
            };
            let Outcome { busy, not_found, failed, wrong, .. } = row.outcome;
            table.add_row([
                row.stalled.as_str().to_owned(),
                row.stall_ms.to_string(),
                row.reads.to_string(),
                format!("{:.0}", row.p50_us),
                ratio(row.p50_us, |row| row.p50_us),
                format!("{:.0}", row.p99_us),
                ratio(row.p99_us, |row| row.p99_us),
                format!("{:.0}", row.max_us),
                failed.to_string(),
                not_found.to_string(),
                busy.to_string(),
                wrong.to_string(),
                row.saved.to_string(),
            ]);
        }
        format!(
            "{}\n\n{}\n\nThe reads \
             that were under way while the thread stood still; failed (timeouts among them), not found, busy\nand \
             wrong are blocks, saved are those that an engine saved at the holder meanwhile. A registry lists a \
             node\nthat is silent for 10 s no more: while its control threads stand for longer, its blocks are \
             not found.\n{}",
            self.head.text(),
            table.trim_fmt(),
            self.head.ending()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(stalled: Stalled, p99_us: f64) -> Row {
        let outcome = Outcome { fetched: 8, failed: 1, not_found: 2, ..Outcome::default() };
        Row {
            stalled,
            stall_ms: 1000,
            stood_ms: 1000,
            reads: 1,
            p50_us: 10.0,
            p99_us,
            max_us: 9.0,
            outcome,
            saved: 5,
        }
    }

    #[test]
    fn each_stall_stands_beside_its_baseline() {
        let args = PairArgs {
            transport: Default::default(),
            device: Default::default(),
            batch: 8,
            depth: 2,
        };
        let mut report = Report::new(&args, "tcp".to_owned());
        report.rows.push(row(Stalled::Nobody, 100.0));
        report.rows.push(row(Stalled::Poller, 250.0));
        let mut table = Vec::new();
        report.write(false, &mut table).unwrap();
        let table = String::from_utf8(table).unwrap();
        let line = table.lines().find(|line| line.trim_start().starts_with("poller")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells[6..9], ["2.50", "9", "1"], "{table}");
        let mut json = Vec::new();
        report.write(true, &mut json).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(json["rows"][1]["stalled"], "poller");
        assert_eq!(json["rows"][1]["not_found"], 2);
    }
}
