//! `kvrail doctor`: why RDMA or GPU-direct will not work on this host, line by line.
//!
//! Every probe is a function of a [`Host`]: files below a root directory, read by `sys`, and the
//! transport that is wanted. No probe loads a library; one opens each device's file, which is how
//! the kernel is asked for permission. Only a GPU's driver is asked itself ([`driver`]), before the probes. What is wrong with one device is a failure only where no
//! other device works.

mod driver;
mod finding;
mod gpu;
mod memory;
mod process;
mod rdma;
mod report;
mod software;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde::Serialize;

pub use finding::{Finding, Status};

use super::door::written;
use super::{CliError, FAILURE};
use crate::sys::rdma_sysfs::{self, RdmaDevice};
use crate::sys::root::HostRoot;
use driver::GpuSaid;
use report::Report;

/// Arguments of `kvrail doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// The transport that the host is to carry; it decides what is a failure
    #[arg(long, value_enum, default_value_t = Wanted::Auto)]
    pub transport: Wanted,
    /// Print one JSON object instead of the table
    #[arg(long)]
    pub json: bool,
}

/// The transport that the host is to carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// RDMA where the host has a device, else TCP
    Auto,
    /// RDMA and nothing else
    Verbs,
    /// TCP: nothing about RDMA is looked at
    Tcp,
}

/// What the probes look at.
#[derive(Debug)]
pub(super) struct Host {
    root: HostRoot,
    wanted: Wanted,
    devices: Vec<RdmaDevice>,
    /// What the GPU's driver says, where it was asked.
    driver: Option<Result<Vec<GpuSaid>, String>>,
}

impl Host {
    fn new(root: HostRoot, wanted: Wanted) -> Self {
        let devices = rdma_sysfs::devices(&root);
        Self { root, wanted, devices, driver: None }
    }

    /// How bad it is that something keeps RDMA from working. A host without a device never meant to
    /// use it; one with a device would fall back to TCP without its owner's wish.
    fn rdma_problem(&self) -> Status {
        match self.wanted {
            Wanted::Verbs => Status::Fail,
            Wanted::Auto if !self.devices.is_empty() => Status::Fail,
            Wanted::Auto | Wanted::Tcp => Status::Warn,
        }
    }
}

/// Prints what this host has and lacks. Exit code 1 where something fails.
///
/// # Errors
/// [`CliError::Failed`] where the output cannot be written.
pub fn run(args: &DoctorArgs) -> Result<ExitCode, CliError> {
    let mut host = Host::new(HostRoot::host(), args.transport);
    if args.transport != Wanted::Tcp {
        host.driver = Some(driver::ask(!host.devices.is_empty()));
    }
    print(host, args, &mut io::stdout().lock())
}

#[cfg(test)]
fn doctor(root: HostRoot, args: &DoctorArgs, out: &mut dyn Write) -> Result<ExitCode, CliError> {
    print(Host::new(root, args.transport), args, out)
}

fn print(host: Host, args: &DoctorArgs, out: &mut dyn Write) -> Result<ExitCode, CliError> {
    let report = examine(host);
    written(report.write(args.json, out).and_then(|()| out.flush()))?;
    let failed = report.verdict == Status::Fail;
    Ok(if failed { ExitCode::from(FAILURE) } else { ExitCode::SUCCESS })
}

fn examine(host: Host) -> Report {
    let mut findings = Vec::new();
    if host.wanted != Wanted::Tcp {
        findings.extend(rdma::devices(&host));
        findings.extend(software::modules(&host));
        findings.extend(software::libraries(&host));
        findings.extend(process::locked_memory(&host));
    }
    findings.push(verdict(&host, &findings));
    findings.extend(memory::probe(&host));
    findings.extend(process::confinement(&host));
    if host.wanted != Wanted::Tcp {
        findings.extend(gpu::probe(&host));
    }
    Report::new(host.wanted, &host.devices, findings)
}

/// What kvrail would do, as far as the findings about RDMA say.
fn verdict(host: &Host, findings: &[Finding]) -> Finding {
    const CHECK: &str = "transport";
    let works = !findings.iter().any(|finding| finding.status == Status::Fail);
    match host.wanted {
        Wanted::Tcp => Finding::ok(CHECK, "TCP, which needs no RDMA device"),
        Wanted::Auto if host.devices.is_empty() => Finding::bad(
            CHECK,
            Status::Warn,
            "kvrail will use TCP",
            "see above for RDMA; where TCP is meant, say so: --transport tcp",
        ),
        _rdma if works => Finding::ok(CHECK, "RDMA: nothing found that stands in its way"),
        Wanted::Auto => Finding::bad(
            CHECK,
            Status::Fail,
            "kvrail will use TCP, although this host has RDMA",
            "mend what fails above, or say that TCP is meant: --transport tcp",
        ),
        Wanted::Verbs => Finding::bad(
            CHECK,
            Status::Fail,
            "RDMA will not work, and nothing else is wanted",
            "mend what fails above, or allow TCP: --transport auto",
        ),
    }
}
