//! `kvrail bench gpu` on the stand-in driver and without one: what it measures, and that it notices what is
//! wrong.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::cuda_standin::StandIn;
use crate::support::BINARY;

fn run(standin: Option<&StandIn>, arguments: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command.args(["bench", "gpu"]).args(arguments).env_clear().stdin(Stdio::null());
    if let Some(standin) = standin {
        command.env("LD_LIBRARY_PATH", standin.library().parent().unwrap());
    }
    command.output().unwrap()
}

fn report(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// What is told about one thing.
fn note(report: &Value, what: &str) -> String {
    let notes = report["notes"].as_array().unwrap();
    let note = notes.iter().find(|note| note["what"] == what);
    note.unwrap_or_else(|| panic!("{what} in {report}"))["outcome"].as_str().unwrap().to_owned()
}

/// How many rows there are of one kind.
fn rows(report: &Value, what: &str) -> usize {
    report["rows"].as_array().unwrap().iter().filter(|row| row["what"] == what).count()
}

#[test]
fn everything_is_measured_and_every_byte_is_right() {
    let Some(standin) = StandIn::new() else { return };
    // As `kvrail serve` and `kvrail demo` are told, for all processes that take part.
    let library = standin.library().display().to_string();
    let output = run(None, &["--quick", "--json", "--gpu-driver", &library]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(0), "{report}");
    for (what, count) in [
        ("copy out", 4),
        ("copy in", 4),
        ("staging in", 2),
        ("staging out", 2),
        ("save", 4),
        ("load", 4),
    ] {
        assert_eq!(rows(&report, what), count, "{what} in {report}");
    }
    for row in report["rows"].as_array().unwrap() {
        assert!(row["ratio"].as_f64().unwrap() > 0.0 && row["wrong"] == false, "{row}");
    }
    assert_eq!((&report["stand_in"], &report["returned"]), (&true.into(), &0.into()));
    assert_eq!(note(&report, "memory by descriptor"), "imported and read");
    assert_eq!(note(&report, "memory of another process"), "imported by its IPC handle");
    assert_eq!(note(&report, "after kill -9"), "imported memory is whole");
    assert!(note(&report, "a flush").contains("needed after READs"));
}

#[test]
fn what_the_driver_does_not_have_is_told_and_is_no_failure() {
    let Some(standin) = StandIn::new() else { return };
    let refused =
        ["cuMemGetHandleForAddressRange", "cuIpcGetMemHandle", "cuFlushGPUDirectRDMAWrites"];
    standin.control(&refused.map(|call| format!("{call} fail 801")).join("\n"));
    let output = run(Some(&standin), &["--quick"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for call in refused {
        let line = text.lines().find(|line| line.contains(call));
        let line = line.unwrap_or_else(|| panic!("{call} in {text}"));
        assert!(line.contains("CUDA_ERROR_NOT_SUPPORTED (801)"), "{line}");
    }
    assert!(text.starts_with("STAND-IN for a driver"), "{text}");
    assert!(text.contains("copies are of this process's own"), "{text}");
    assert!(text.contains("copy out") && !text.contains("WRONG"), "{text}");
}

#[test]
fn a_wrong_byte_fails_the_run() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("set corrupt 1");
    let output = run(Some(&standin), &["--quick"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    let is_wrong = |line: &str, what| line.starts_with(what) && line.ends_with("WRONG");
    let lines = || text.lines().map(str::trim);
    for (what, count) in [("copy out", 4), ("copy in", 4), ("staging in", 2), ("staging out", 2)] {
        let wrong = lines().filter(|line| is_wrong(line, what));
        assert_eq!(wrong.count(), count, "{what} in {text}");
    }
}

#[test]
fn memory_that_does_not_come_back_fails_the_run() {
    let Some(standin) = StandIn::new() else { return };
    standin.control("cuMemFree_v2 fail 1");
    let output = run(Some(&standin), &["--quick", "--json"]);
    let report = report(&output);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report["returned"].as_u64().unwrap() >= 2 << 20, "{report}");
}

#[test]
fn a_machine_without_a_gpu_is_told_so_in_one_sentence() {
    let none = |output: Output, why: &str| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.starts_with("kvrail: there is no GPU to check: "), "{said}");
        assert!(said.contains(why) && said.lines().count() == 1, "{said}");
        assert!(output.stdout.is_empty());
    };
    let Some(standin) = StandIn::new() else { return };
    standin.control("set devices 0");
    none(run(Some(&standin), &[]), "the driver sees no GPU");
    standin.control("");
    none(run(Some(&standin), &["--gpu", "3"]), "there is no GPU 3");
    let driver = ["/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"];
    if !driver.iter().any(|place| std::path::Path::new(place).join("libcuda.so.1").exists()) {
        none(run(None, &[]), "cannot load libcuda.so.1");
    }
}
