//! What was found, as a short table for people and as one object for programs.

use std::fmt::Write as _;
use std::io::{self, Write};

use serde::Serialize;

use super::KEPT_MAX;
use super::measure::Medians;
use crate::cli::bench::machine::Machine;
use crate::cli::door::write_json;
use crate::cli::table::table;
use crate::cuda::{Device, WriteOrdering};

/// How a stand-in for the driver names its devices.
const STAND_IN: &str = "kvrail stand-in";

/// Something about the GPU or its driver, in words.
#[derive(Debug, Clone, Serialize)]
struct Note {
    what: &'static str,
    outcome: String,
}

/// One kind of copy at one size.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) what: &'static str,
    /// How the bytes lie on the GPU.
    pub(super) shape: &'static str,
    /// Bytes of one piece: of a copy, a block, a slot.
    pub(super) bytes: u64,
    /// Bytes that were moved at a time.
    pub(super) batch_bytes: u64,
    pub(super) driver_gb_s: f64,
    pub(super) kvrail_gb_s: f64,
    /// The one by the other.
    pub(super) ratio: f64,
    pub(super) rounds: usize,
    /// Whether a byte was not what it had to be.
    pub(super) wrong: bool,
}

impl Row {
    pub(super) fn new(
        (what, shape): (&'static str, &'static str),
        (bytes, batch_bytes): (u64, u64),
        medians: Medians,
        wrong: bool,
    ) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a figure of three digits")]
        let gigabytes = batch_bytes as f64 / 1e9;
        let Medians { driver, kvrail, rounds } = medians;
        Self {
            what,
            shape,
            bytes,
            batch_bytes,
            driver_gb_s: gigabytes / driver,
            kvrail_gb_s: gigabytes / kvrail,
            ratio: driver / kvrail,
            rounds,
            wrong,
        }
    }
}

/// The whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    bench: &'static str,
    version: &'static str,
    machine: Machine,
    gpu: String,
    pci: String,
    memory_bytes: u64,
    cuda: String,
    /// Whether a stand-in took the driver's place: no figure says anything about a GPU then.
    stand_in: bool,
    notes: Vec<Note>,
    pub(super) rows: Vec<Row>,
    /// Bytes of the GPU that did not come back.
    pub(super) returned: Option<u64>,
    /// Whether bytes were wrong where nothing is timed.
    pub(super) wrong: bool,
    pub(super) interrupted: bool,
}

impl Report {
    pub(super) fn new(device: &Device) -> Self {
        let attributes = device.attributes();
        let (major, minor) = device.driver().version();
        let mut report = Self {
            bench: "gpu",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::here(),
            gpu: attributes.name.clone(),
            pci: attributes.pci.clone(),
            memory_bytes: attributes.memory_bytes,
            cuda: format!("{major}.{minor}"),
            stand_in: attributes.name.starts_with(STAND_IN),
            notes: Vec::new(),
            rows: Vec::new(),
            returned: None,
            wrong: false,
            interrupted: false,
        };
        let yes = |has: bool| if has { "yes" } else { "no" }.to_owned();
        let ordering = match attributes.write_ordering {
            WriteOrdering::None => "for nobody: a flush is needed",
            WriteOrdering::Owner => "for the owner",
            WriteOrdering::AllDevices => "for all devices",
        };
        for (what, outcome) in [
            ("dma-buf", yes(attributes.dma_buf)),
            ("GPU-direct", yes(attributes.rdma)),
            ("GPU-direct of cuMemCreate", yes(attributes.rdma_with_virtual_memory)),
            ("cuMemCreate", yes(attributes.virtual_memory)),
            ("descriptors of memory", yes(attributes.descriptors)),
            ("flush by the host", yes(attributes.host_flush)),
            ("cards' writes are ordered", ordering.to_owned()),
        ] {
            report.note(what, outcome);
        }
        report
    }

    pub(super) fn note(&mut self, what: &'static str, outcome: String) {
        self.notes.push(Note { what, outcome });
    }

    /// Whether every byte was right and all memory came back.
    pub(super) fn is_good(&self) -> bool {
        !self.wrong
            && !self.rows.iter().any(|row| row.wrong)
            && self.returned.is_none_or(|missing| missing < KEPT_MAX)
    }

    pub(super) fn write(&self, json: bool, out: &mut dyn Write) -> io::Result<()> {
        if json { write_json(out, self) } else { out.write_all(self.text().as_bytes()) }
    }

    fn text(&self) -> String {
        let Self { machine, gpu, pci, cuda, .. } = self;
        let mut text = String::new();
        if self.stand_in {
            text.push_str("STAND-IN for a driver, over host memory: no GPU has part in this. ");
        }
        let gib = self.memory_bytes >> 30;
        // Writing into a string does not fail.
        let _ok = writeln!(text, "{machine}; {gpu}, {pci}, {gib} GiB, driver for CUDA {cuda}\n");
        let mut notes = table([], 0);
        for note in &self.notes {
            notes.add_row([note.what, &note.outcome]);
        }
        let returned = match self.returned {
            None => "not measured".to_owned(),
            Some(missing) if missing < KEPT_MAX => "yes".to_owned(),
            Some(missing) => format!("{missing} bytes are missing"),
        };
        notes.add_row(["memory came back", &returned]);
        let mut rows = table(
            [
                "",
                "on the GPU",
                "bytes",
                "at a time",
                "driver GB/s",
                "kvrail GB/s",
                "ratio",
                "bytes are",
            ],
            2,
        );
        for row in &self.rows {
            rows.add_row([
                row.what.to_owned(),
                row.shape.to_owned(),
                row.bytes.to_string(),
                row.batch_bytes.to_string(),
                format!("{:.2}", row.driver_gb_s),
                format!("{:.2}", row.kvrail_gb_s),
                format!("{:.2}", row.ratio),
                if row.wrong { "WRONG" } else { "right" }.to_owned(),
            ]);
        }
        let _ok = writeln!(text, "{notes}\n\n{rows}");
        if self.wrong {
            text.push_str("\nWRONG bytes came out of memory that was passed on\n");
        }
        if self.interrupted {
            text.push_str("\ninterrupted\n");
        }
        text
    }
}
