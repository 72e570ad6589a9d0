//! All findings, as a table for people and as one object for programs.

use std::io::{self, Write};

use serde::Serialize;

use super::{Finding, Status, Wanted};
use crate::cli::door::write_json;
use crate::cli::table::table;
use crate::sys::rdma_sysfs::RdmaDevice;

/// One address of one port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Gid {
    pub(super) device: String,
    pub(super) port: u32,
    pub(super) index: u32,
    pub(super) gid: String,
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    pub(super) interface: Option<String>,
    /// More is better; 0 cannot be used.
    pub(super) rank: u8,
    pub(super) reason: &'static str,
    /// Whether a connection of this port would use it.
    pub(super) chosen: bool,
}

/// What the doctor says.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    transport: Wanted,
    /// The worst of the findings.
    pub(super) verdict: Status,
    pub(super) findings: Vec<Finding>,
    pub(super) gids: Vec<Gid>,
}

impl Report {
    pub(super) fn new(wanted: Wanted, devices: &[RdmaDevice], findings: Vec<Finding>) -> Self {
        let verdict = findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Ok);
        let shown = if wanted == Wanted::Tcp { &[] } else { devices };
        Self { transport: wanted, verdict, findings, gids: gids(shown) }
    }

    pub(super) fn write(&self, json: bool, out: &mut dyn Write) -> io::Result<()> {
        if json { write_json(out, self) } else { out.write_all(self.text().as_bytes()) }
    }

    fn text(&self) -> String {
        let mut lines = table(["", "check", "finding"], 3);
        for finding in &self.findings {
            let mut what = finding.what.clone();
            if let Some(remedy) = &finding.remedy {
                what.push_str("\n  -> ");
                what.push_str(remedy);
            }
            lines.add_row([finding.status.word(), finding.check, &what]);
        }
        let mut text = format!("{}\n", lines.trim_fmt());
        if !self.gids.is_empty() {
            let mut lines =
                table(["", "device", "port", "gid", "address", "type", "rank", "reason"], 8);
            for gid in &self.gids {
                lines.add_row([
                    if gid.chosen { "*" } else { "" }.to_owned(),
                    gid.device.clone(),
                    gid.port.to_string(),
                    gid.index.to_string(),
                    gid.gid.clone(),
                    gid.kind.to_owned(),
                    gid.rank.to_string(),
                    gid.reason.to_owned(),
                ]);
            }
            text.push_str(&format!("\n{}\n", lines.trim_fmt()));
        }
        let count = |status| self.findings.iter().filter(|it| it.status == status).count();
        let (ok, warn, fail) = (count(Status::Ok), count(Status::Warn), count(Status::Fail));
        text.push_str(&format!("\n{ok} ok, {warn} warn, {fail} fail\n"));
        text
    }
}

fn gids(devices: &[RdmaDevice]) -> Vec<Gid> {
    let mut all = Vec::new();
    for device in devices {
        for port in &device.ports {
            let chosen = port.best_gid().map(|entry| entry.index);
            all.extend(port.gids.iter().map(|entry| Gid {
                device: device.name.clone(),
                port: port.number,
                index: entry.index,
                gid: entry.gid.to_string(),
                kind: entry.kind.name(),
                interface: entry.interface.clone(),
                rank: entry.score().rank,
                reason: entry.score().reason,
                chosen: Some(entry.index) == chosen,
            }));
        }
    }
    all
}
