//! The figures of all rounds, as a table for people and as one object for programs.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde::Serialize;

use super::measure::Measure;
use super::{BASELINE, Plan};
use crate::cli::bench::machine::Machine;
use crate::cli::bench::median;
use crate::cli::door::write_json;
use crate::cli::table::table;

/// Where a figure was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Point {
    pub(super) entries: u32,
    pub(super) threads: usize,
    pub(super) measure: Measure,
}

/// By contender, the rounds' values; by round, so that a round's values can be compared.
type Values = BTreeMap<&'static str, BTreeMap<usize, f64>>;

/// What was measured so far.
#[derive(Debug, Default)]
pub(super) struct Figures(BTreeMap<Point, Values>);

impl Figures {
    pub(super) fn add(&mut self, point: Point, name: &'static str, round: usize, value: f64) {
        self.0.entry(point).or_default().entry(name).or_default().insert(round, value);
    }
}

/// One contender's figure at one point.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    entries: u32,
    threads: usize,
    measure: Measure,
    unit: &'static str,
    contender: &'static str,
    rounds: usize,
    median: f64,
    min: f64,
    max: f64,
    /// The median of its ratios to the mutexed ranks of the same round; below 1 it is the better.
    ratio: Option<f64>,
}

/// The whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    bench: &'static str,
    version: &'static str,
    machine: Machine,
    operations: usize,
    touches: usize,
    interrupted: bool,
    contenders: Vec<&'static str>,
    rows: Vec<Row>,
}

impl Report {
    pub(super) fn new(
        plan: &Plan,
        contenders: Vec<&'static str>,
        figures: &Figures,
        interrupted: bool,
    ) -> Self {
        let mut rows = Vec::new();
        for (point, values) in &figures.0 {
            let baseline = values.get(BASELINE);
            for name in &contenders {
                rows.extend(values.get(name).map(|own| row(*point, name, own, baseline)));
            }
        }
        Self {
            bench: "store",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            operations: plan.operations,
            touches: plan.touches,
            interrupted,
            contenders,
            rows,
        }
    }

    pub(super) fn write(&self, json: bool, out: &mut dyn Write) -> io::Result<()> {
        if json { write_json(out, self) } else { out.write_all(self.text().as_bytes()) }
    }

    fn text(&self) -> String {
        let header = ["entries", "threads", "measure", "unit"];
        let mut table = table(header.into_iter().chain(self.contenders.iter().copied()), 4);
        for point in self.rows.chunk_by(|one, other| one.is_beside(other)) {
            let Some(first) = point.first() else { continue };
            let mut cells = vec![
                first.entries.to_string(),
                first.threads.to_string(),
                first.measure.label().to_owned(),
                first.unit.to_owned(),
            ];
            for name in &self.contenders {
                let own = point.iter().find(|row| row.contender == *name);
                cells.push(own.map_or_else(|| "-".to_owned(), Row::cell));
            }
            table.add_row(cells);
        }
        let partial =
            if self.interrupted { "\nInterrupted: this is what was measured.\n" } else { "" };
        format!(
            "{}\n\n{}\n\nMedians, and in brackets the median of each round's ratio to the mutexed \
             ranks (below 1 is better).\nBeside a reclaimer one of the threads is the reclaimer. {}.\n\
             {partial}",
            self.machine,
            table.trim_fmt(),
            self.others()
        )
    }

    /// What is not here.
    fn others(&self) -> &'static str {
        if self.contenders.len() > super::OWN.len() {
            "Only kvrail and the mutexed ranks have ranks, requesters and commits"
        } else {
            "Other crates' caches: cargo bench --bench store"
        }
    }
}

impl Row {
    fn is_beside(&self, other: &Self) -> bool {
        (self.entries, self.threads, self.measure) == (other.entries, other.threads, other.measure)
    }

    fn cell(&self) -> String {
        match self.ratio {
            Some(ratio) => format!("{:.0} ({ratio:.2})", self.median),
            None => format!("{:.0}", self.median),
        }
    }
}

fn row(
    Point { entries, threads, measure }: Point,
    contender: &'static str,
    own: &BTreeMap<usize, f64>,
    baseline: Option<&BTreeMap<usize, f64>>,
) -> Row {
    let values: Vec<f64> = own.values().copied().collect();
    let ratios: Vec<f64> = baseline
        .into_iter()
        .flatten()
        .filter(|(_, base)| **base > 0.0)
        .filter_map(|(round, base)| Some(own.get(round)? / base))
        .collect();
    Row {
        entries,
        threads,
        measure,
        unit: measure.unit(),
        contender,
        rounds: values.len(),
        min: values.iter().copied().fold(f64::INFINITY, f64::min),
        max: values.iter().copied().fold(0.0, f64::max),
        median: median(values).unwrap_or_default(),
        ratio: median(ratios),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round() {
        let point = Point { entries: 1000, threads: 1, measure: Measure::Mix };
        let mut figures = Figures::default();
        for (round, (own, base)) in [(10.0, 5.0), (30.0, 10.0), (8.0, 8.0)].into_iter().enumerate()
        {
            figures.add(point, "kvrail", round, own);
            figures.add(point, BASELINE, round, base);
        }
        figures.add(point, "kvrail", 3, 1000.0);
        let values = &figures.0[&point];
        let row = row(point, "kvrail", &values["kvrail"], values.get(BASELINE));
        assert_eq!((row.rounds, row.min, row.max), (4, 8.0, 1000.0));
        assert_eq!((row.median, row.ratio), (20.0, Some(2.0)));
    }
}
