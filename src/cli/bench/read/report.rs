//! The rows of a sweep, as a table for people, as one object for programs, and as lines for scripts.

use std::io::{self, Write};

use serde::Serialize;

use super::What;
use super::fabric::Transport;
use super::limit::{Copies, Sockets};
use crate::cli::bench::machine::Machine;
use crate::cli::door::write_json;
use crate::cli::table::table;
use crate::config::Size;

/// One point of the sweep.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) what: What,
    pub(super) transport: Transport,
    /// Bytes of a block.
    pub(super) size: u32,
    /// Blocks of a batch, and batches in flight; what fits, where more was asked for.
    pub(super) batch: usize,
    pub(super) depth: usize,
    /// Sockets, or queue pairs, of each connection.
    pub(super) streams: usize,
    pub(super) threads: usize,
    /// Blocks next to each other on the holder.
    pub(super) run: u32,
    /// Whether they may share a READ.
    pub(super) merge: bool,
    pub(super) blocks: u64,
    /// Blocks that came from the reader's own pool, which no transfer brought.
    pub(super) hits: u64,
    /// Blocks that were asked for again, because there was no room.
    pub(super) busy: u64,
    pub(super) seconds: f64,
    /// None where nothing moves.
    pub(super) gb_s: Option<f64>,
    pub(super) blocks_s: f64,
    /// Of a batch.
    pub(super) p50_us: f64,
    pub(super) p90_us: f64,
    pub(super) p99_us: f64,
    pub(super) p999_us: f64,
    pub(super) max_us: f64,
    /// Processor time of each end, of all threads.
    pub(super) reader_cpu_s_per_gib: Option<f64>,
    pub(super) holder_cpu_s_per_gib: Option<f64>,
    /// Processor time of the threads that read, or of the clients that ask, alone.
    pub(super) reader_cpu_us_per_block: f64,
    /// Processor time of the data thread of the node that lends, alone.
    pub(super) holder_cpu_us_per_block: Option<f64>,
    /// Heap allocations: of the threads that read, or of the clients and all of their node; of all of
    /// the holder's process.
    pub(super) reader_allocations_per_block: f64,
    pub(super) holder_allocations_per_block: Option<f64>,
    /// READs of a block; less than 1 where neighbours share one. Not known of another process.
    pub(super) works_per_block: Option<f64>,
    /// Calls that gave READs to a device, of a block.
    pub(super) doorbells_per_block: Option<f64>,
    /// What is in flight over a round trip: no more can come through.
    pub(super) window_gb_s: Option<f64>,
    /// What the machine gives at best: plain sockets for tcp, copies in memory else.
    pub(super) machine_gb_s: Option<f64>,
}

/// The shortest round trip of a fabric: the median READ of a few bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct RoundTrip {
    pub(super) transport: Transport,
    pub(super) micros: f64,
    /// READs on the wire at once per stream, where the fabric has such a limit.
    pub(super) reads_at_once: Option<usize>,
}

/// The whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    bench: &'static str,
    version: &'static str,
    machine: Machine,
    /// The holder: `loopback`, or its address.
    pub(super) holder: String,
    pub(super) interrupted: bool,
    pub(super) round_trips: Vec<RoundTrip>,
    pub(super) copies: Vec<Copies>,
    pub(super) sockets: Vec<Sockets>,
    pub(super) rows: Vec<Row>,
}

/// How a report is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Table,
    Json,
    Lines,
}

/// What names a row in both tables.
const NAMES: [&str; 7] = ["what", "fabric", "block", "batch", "depth", "streams", "threads"];

const RATES: [&str; 9] = [
    "GB/s",
    "blocks/s",
    "p50 us",
    "p90 us",
    "p99 us",
    "p99.9 us",
    "max us",
    "window GB/s",
    "machine GB/s",
];

const COSTS: [&str; 8] = [
    "CPU s/GiB: reader",
    "holder",
    "CPU us/block: reading",
    "lending",
    "allocs/block: reader",
    "holder",
    "READs/block",
    "doorbells/block",
];

/// Columns of text before those of numbers.
const TEXTS: usize = 2;

impl Report {
    pub(super) fn new(holder: String) -> Self {
        Self {
            bench: "read",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            holder,
            interrupted: false,
            round_trips: Vec::new(),
            copies: Vec::new(),
            sockets: Vec::new(),
            rows: Vec::new(),
        }
    }

    /// Where it ran, in a line.
    pub(super) fn title(&self) -> String {
        format!("{}, {}", self.machine, self.holder)
    }

    pub(super) fn write(&self, form: Form, out: &mut dyn Write) -> io::Result<()> {
        match form {
            Form::Json => write_json(out, self),
            Form::Table => out.write_all(self.text().as_bytes()),
            Form::Lines => self.rows.iter().try_for_each(|row| row.write_lines(out)),
        }
    }

    fn text(&self) -> String {
        let mut text = format!("{}\n", self.title());
        for trip in &self.round_trips {
            let at_once = trip.reads_at_once.map_or_else(String::new, |reads| {
                format!(", {reads} READs at once per queue pair")
            });
            let name = trip.transport.as_str();
            text.push_str(&format!("{name}: round trip {:.1} us{at_once}\n", trip.micros));
        }
        for sockets in &self.sockets {
            let Sockets { streams, gb_s } = sockets;
            text.push_str(&format!("plain sockets, {streams} streams: {gb_s:.2} GB/s\n"));
        }
        for Copies { size, gb_s } in &self.copies {
            text.push_str(&format!("memcpy by {}: {gb_s:.2} GB/s\n", Size(u64::from(*size))));
        }
        let partial =
            if self.interrupted { "\nInterrupted: this is what was measured.\n" } else { "" };
        let rates = self.table(&RATES, Row::rates);
        let costs = self.table(&COSTS, Row::costs);
        format!(
            "{text}\n{rates}\n\n{costs}\n\nLatencies are of a batch. No more than what is in flight \
             (batch × depth, for verbs at most the READs\nthat are on the wire at once) can come through \
             in a round trip: that is the window.\nReading: the threads that read, or the clients that \
             ask. Lending: the data thread of the holder's node. Allocations\nare of the threads that \
             read, or of the clients and the node that they ask, and of all of the holder's process.\n\
             {partial}"
        )
    }

    fn table(&self, columns: &[&str], cells: fn(&Row) -> Vec<String>) -> String {
        let mut table = table(NAMES.iter().chain(columns).copied(), TEXTS);
        for row in &self.rows {
            table.add_row(row.names().into_iter().chain(cells(row)));
        }
        table.trim_fmt()
    }
}

impl Row {
    fn names(&self) -> Vec<String> {
        vec![
            self.what.as_str().to_owned(),
            self.transport.as_str().to_owned(),
            Size(u64::from(self.size)).to_string(),
            self.batch.to_string(),
            self.depth.to_string(),
            self.streams.to_string(),
            self.threads.to_string(),
        ]
    }

    fn rates(&self) -> Vec<String> {
        let micros = [self.p50_us, self.p90_us, self.p99_us, self.p999_us, self.max_us];
        let mut cells = vec![or_dash(self.gb_s, 3), format!("{:.0}", self.blocks_s)];
        cells.extend(micros.map(|micros| format!("{micros:.1}")));
        cells.extend([self.window_gb_s, self.machine_gb_s].map(|bound| or_dash(bound, 2)));
        cells
    }

    fn costs(&self) -> Vec<String> {
        vec![
            or_dash(self.reader_cpu_s_per_gib, 3),
            or_dash(self.holder_cpu_s_per_gib, 3),
            format!("{:.2}", self.reader_cpu_us_per_block),
            or_dash(self.holder_cpu_us_per_block, 2),
            format!("{:.2}", self.reader_allocations_per_block),
            or_dash(self.holder_allocations_per_block, 2),
            or_dash(self.works_per_block, 2),
            or_dash(self.doorbells_per_block, 3),
        ]
    }

    /// `MEASURE SIZE VALUE`: `bandwidth` (MiB/s) and `latency` (microseconds of a batch) of bare
    /// READs, `leased_bandwidth` and `leased`, `get_bandwidth` and `get`; `resident` alone, of which
    /// nothing moves.
    fn write_lines(&self, out: &mut dyn Write) -> io::Result<()> {
        let (bandwidth, latency) = match self.what {
            What::Bare => ("bandwidth", "latency"),
            What::Leased => ("leased_bandwidth", "leased"),
            What::Get => ("get_bandwidth", "get"),
            What::Resident => ("", "resident"),
        };
        if let Some(gb_s) = self.gb_s {
            writeln!(out, "{bandwidth} {} {:.3}", self.size, gb_s * 1e9 / f64::from(1 << 20))?;
        }
        writeln!(out, "{latency} {} {:.3}", self.size, self.p50_us)
    }
}

/// A number with so many digits behind the point, where it is known.
fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn row(what: What, size: u32, gb_s: f64) -> Row {
        Row {
            what,
            transport: Transport::Tcp,
            size,
            batch: 1,
            depth: 1,
            streams: 2,
            threads: 1,
            run: 1,
            merge: true,
            blocks: 10,
            hits: 0,
            busy: 0,
            seconds: 1.0,
            gb_s: (what != What::Resident).then_some(gb_s),
            blocks_s: 10.0,
            p50_us: 12.5,
            p90_us: 13.0,
            p99_us: 14.0,
            p999_us: 15.0,
            max_us: 16.0,
            reader_cpu_s_per_gib: Some(0.5),
            holder_cpu_s_per_gib: Some(0.25),
            reader_cpu_us_per_block: 1.5,
            holder_cpu_us_per_block: None,
            reader_allocations_per_block: 0.0,
            holder_allocations_per_block: Some(2.0),
            works_per_block: Some(1.0),
            doorbells_per_block: None,
            window_gb_s: Some(3.0),
            machine_gb_s: Some(2.0),
        }
    }

    fn written(report: &Report, form: Form) -> String {
        let mut out = Vec::new();
        report.write(form, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn each_form_has_each_row() {
        let mut report = Report::new("loopback".to_owned());
        report.rows.push(row(What::Bare, 4096, 1.048_576));
        report.rows.push(row(What::Leased, 65536, 2.0));
        report.interrupted = true;
        let lines = written(&report, Form::Lines);
        assert!(lines.starts_with("bandwidth 4096 1000.000\nlatency 4096 12.500\n"), "{lines}");
        assert!(lines.contains("leased 65536 12.500"), "{lines}");
        let json: serde_json::Value = serde_json::from_str(&written(&report, Form::Json)).unwrap();
        assert_eq!((&json["bench"], &json["rows"][1]["what"]), (&"read".into(), &"leased".into()));
        let table = written(&report, Form::Table);
        assert!(table.contains("64KiB") && table.contains("Interrupted"), "{table}");
        let get = row(What::Get, 1, 1.0);
        assert_eq!(get.names().len(), NAMES.len());
        assert_eq!((get.rates().len(), get.costs().len()), (RATES.len(), COSTS.len()));
        report.rows = vec![row(What::Resident, 4096, 1.0)];
        assert_eq!(written(&report, Form::Lines), "resident 4096 12.500\n");
    }
}
