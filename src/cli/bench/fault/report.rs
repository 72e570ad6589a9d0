//! The rows, as a table for people and as one object for programs.

use std::io::{self, Write};

use serde::Serialize;

use super::Fault;
use crate::cli::bench::pair::{Head, Outcome, PairArgs};
use crate::cli::door::write_json;
use crate::cli::table::table;

/// One fault, from its strike on. Times are absent where that did not come while it was waited for.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) fault: Fault,
    /// From the strike until a read ended without all of its blocks.
    pub(super) detected_ms: Option<f64>,
    /// From the strike until the holder was asked no more: the reader left it, or the way to it, alone,
    /// or the registry listed it no more.
    pub(super) left_alone_ms: Option<f64>,
    /// From the strike until the fault was over: a killed holder had its blocks again then.
    pub(super) lasted_ms: f64,
    /// From then until a read brought all of its blocks.
    pub(super) back_ms: Option<f64>,
    /// From then until nothing spoke against the holder any more.
    pub(super) used_ms: Option<f64>,
    /// Blocks of the reads that were under way from the strike until it was back.
    #[serde(flatten)]
    pub(super) outcome: Outcome,
}

/// The whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub(super) head: Head,
    /// How the link is cut.
    link: &'static str,
    /// What was not tried, and why.
    pub(super) skipped: Option<&'static str>,
    pub(super) rows: Vec<Row>,
}

const HEADER: [&str; 10] = [
    "fault",
    "detected ms",
    "left alone ms",
    "over after ms",
    "back ms",
    "in use ms",
    "failed",
    "not found",
    "busy",
    "wrong",
];

impl Report {
    pub(super) fn new(args: &PairArgs, transport: String, link: &'static str) -> Self {
        Self { head: Head::new("fault", args, transport), link, skipped: None, rows: Vec::new() }
    }

    pub(super) fn write(&self, json: bool, out: &mut dyn Write) -> io::Result<()> {
        if json { write_json(out, self) } else { out.write_all(self.text().as_bytes()) }
    }

    fn text(&self) -> String {
        let mut table = table(HEADER, 1);
        let millis = |it: Option<f64>| it.map_or("-".to_owned(), |it| format!("{it:.0}"));
        for row in &self.rows {
            let Outcome { busy, not_found, failed, wrong, .. } = row.outcome;
            let mut cells = vec![row.fault.as_str().to_owned()];
            let lasted = Some(row.lasted_ms);
            cells.extend([row.detected_ms, row.left_alone_ms, lasted].map(millis));
            cells.extend([row.back_ms, row.used_ms].map(millis));
            cells.extend([failed, not_found, busy, wrong].map(|blocks| blocks.to_string()));
            table.add_row(cells);
        }
        let mut text = format!(
            "{}; the link is cut by {}\n\n{}\n\nThe first three times count from the fault, the next two from its end: \
             until a read brought all\nof its blocks, and until no breaker was open any more. The last \
             four are blocks.\n",
            self.head.text(),
            self.link,
            table.trim_fmt()
        );
        if let Some(skipped) = self.skipped {
            text.push_str(&format!("\nNot tried: {skipped}.\n"));
        }
        text.push_str(self.head.ending());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_come_is_left_out() {
        let args = PairArgs {
            transport: Default::default(),
            device: Default::default(),
            batch: 8,
            depth: 2,
        };
        let mut report = Report::new(&args, "tcp".to_owned(), "a relay");
        report.skipped = Some("cut: for a reason");
        report.rows.push(Row {
            fault: Fault::Hung,
            detected_ms: Some(12.4),
            left_alone_ms: None,
            lasted_ms: 100.0,
            back_ms: Some(3.0),
            used_ms: None,
            outcome: Outcome { failed: 8, wrong: 1, ..Outcome::default() },
        });
        let mut table = Vec::new();
        report.write(false, &mut table).unwrap();
        let table = String::from_utf8(table).unwrap();
        let line = table.lines().find(|line| line.trim_start().starts_with("hung")).unwrap();
        let cells: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(cells[1..], ["12", "-", "100", "3", "-", "8", "0", "0", "1"], "{table}");
        assert!(table.contains("for a reason"));
        let mut json = Vec::new();
        report.write(true, &mut json).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(
            (&json["rows"][0]["fault"], &json["rows"][0]["failed"]),
            (&"hung".into(), &8.into())
        );
        assert!(json["rows"][0]["left_alone_ms"].is_null());
    }
}
