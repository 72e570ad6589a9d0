//! `kvrail demo`: what it shows, and that it leaves nothing behind however it ends.

use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{BINARY, until};

/// A demonstration whose files are in `directory`, in a process group of its own.
fn start(directory: &Path, arguments: &[&str]) -> Child {
    Command::new(BINARY)
        .arg("demo")
        .args(arguments)
        .env_clear()
        .env("TMPDIR", directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap()
}

/// Processes that have something to do with this directory, with their arguments.
fn processes(directory: &Path) -> Vec<(Pid, String)> {
    let name = directory.display().to_string();
    let entries = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    entries
        .filter_map(|entry| {
            let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            Some((pid, String::from_utf8_lossy(&line).replace('\0', " ")))
        })
        .filter(|(_, line)| line.contains(&name))
        .collect()
}

fn assert_none(directory: &Path) {
    let left = processes(directory);
    assert!(left.is_empty(), "{left:?}");
}

fn files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().path().display().to_string()).collect()
}

fn assert_nothing_left(directory: &Path) {
    assert_eq!(files(directory), [""; 0]);
    assert_none(directory);
}

fn finish(demo: Child) -> Output {
    // All of its children have its standard error: the output ends when the last one does.
    demo.wait_with_output().unwrap()
}

#[test]
fn it_shows_ranks_that_move_and_what_is_evicted_first() {
    let directory = TempDir::with_prefix("kvrail-test-").unwrap();
    let output = finish(start(directory.path(), &["--json"]));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(said, "");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["transport"], "tcp");
    assert_eq!(report["verified"], true);
    let steps = report["ranks"].as_array().unwrap().iter();
    let ranks: Vec<Value> = steps.map(|step| json!([step["A"], step["B"], step["C"]])).collect();
    let expected = [
        json!([1, null, null]),
        json!([2, 1, null]),
        json!([2, 2, 1]),
        json!([2, 2, null]),
        json!([2, 2, 1]),
        json!([1, 2, 1]),
        json!([2, 2, 1]),
        json!([1, 2, 1]),
        json!([1, null, 1]),
    ];
    assert_eq!(ranks, expected, "{report}");
    let evicted: Vec<Value> = (0..4)
        .rev()
        .map(|at| json!({ "block": format!("shared block {at}"), "rank": 2 }))
        .collect();
    assert_eq!(report["evicted"], json!(evicted));
    assert_nothing_left(directory.path());
}

#[test]
fn its_story_is_for_people() {
    let directory = TempDir::with_prefix("kvrail-test-").unwrap();
    let output = finish(start(directory.path(), &[]));
    let story = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{story}");
    assert!(story.contains("B reads it from A") && story.contains("those that were saved"));
    assert_nothing_left(directory.path());
}

/// Signals a demonstration as soon as a file of its directory exists whose name ends so; whether it
/// was interrupted before its end.
fn interrupted(signal: Signal, group: bool, at: &str) -> bool {
    let directory = TempDir::with_prefix("kvrail-test-").unwrap();
    let mut demo = start(directory.path(), &["--json"]);
    let is_there = || {
        let inside = files(directory.path()).into_iter().filter_map(|path| fs::read_dir(path).ok());
        let mut names = inside.flatten().filter_map(Result::ok).map(|entry| entry.file_name());
        names.any(|name| name.to_string_lossy().ends_with(at))
    };
    until("the demonstration has begun", || is_there() || demo.try_wait().unwrap().is_some());
    let pid = Pid::from_child(&demo);
    if group {
        kill_process_group(pid, signal).ok();
    } else {
        kill_process(pid, signal).ok();
    }
    let output = finish(demo);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_none(directory.path());
    assert_eq!(files(directory.path()), [""; 0], "{said}");
    match output.status.code() {
        Some(0) => false,
        code => {
            assert_eq!(code, Some(130), "{said}");
            assert_eq!((said.as_ref(), output.stdout.len()), ("", 0));
            true
        }
    }
}

/// Interrupts demonstrations until one was in the middle of its work.
fn leaves_nothing(signal: Signal, group: bool) {
    for at in [".ready", "A.sock", "C.ready"] {
        assert!(
            (0..20).any(|_| interrupted(signal, group, at)),
            "no demonstration was interrupted at {at}"
        );
    }
}

#[test]
fn an_interrupt_from_the_terminal_leaves_nothing() {
    leaves_nothing(Signal::INT, true);
}

#[test]
fn a_termination_leaves_nothing() {
    leaves_nothing(Signal::TERM, false);
}

/// Kills a demonstration in the middle of its work, its registry stopped; whether it was not over by then,
/// or about to be.
/// A stopped process would not end by a signal that it can hear.
fn killed(directory: &Path) -> bool {
    let mut demo = start(directory, &["--json"]);
    until("its nodes run", || processes(directory).len() > 2 || demo.try_wait().unwrap().is_some());
    // That one is known to serve, and has long asked to end with its parent.
    let registry = processes(directory).into_iter().find(|(_, line)| line.contains(" registry "));
    if let Some((registry, _)) = registry {
        kill_process(registry, Signal::STOP).ok();
    }
    demo.kill().unwrap();
    let is_killed = finish(demo).status.signal() == Some(Signal::KILL.as_raw());
    // Its last step is to remove its files.
    is_killed && files(directory).len() == 1
}

#[test]
fn a_kill_leaves_no_process_and_files_only_until_the_next_one_starts() {
    let directory = TempDir::with_prefix("kvrail-test-").unwrap();
    assert!((0..20).any(|_| killed(directory.path())), "each one was over before it was killed");
    until("its processes end", || processes(directory.path()).is_empty());
    let next = finish(start(directory.path(), &["--json"]));
    assert!(next.status.success(), "{}", String::from_utf8_lossy(&next.stderr));
    assert_nothing_left(directory.path());
}
