//! A device that is there and may not be used: memory that cannot be registered. What the node, the
//! demonstration and the doctor say, and what they do.

use std::process::{Command, Output};

use kvrail::protocol::door::Source;
use serde_json::Value;

use crate::support::{
    BINARY, Blocks, Counts, assert_at_rest_over, read, save, transport, write_script,
};

/// The limit that many distributions and container runtimes give by default.
const MEMLOCK: &str = "65536";

/// Runs a program without `CAP_IPC_LOCK` and with a memlock limit of 64 KiB; root, too, is bound by it
/// then.
const CONFINED: [&str; 4] =
    ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit"];

fn confined(arguments: &[&str]) -> Output {
    let [program, rest @ ..] = CONFINED;
    Command::new(program)
        .args(rest)
        .arg(format!("--memlock={MEMLOCK}"))
        .arg(BINARY)
        .args(arguments)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .output()
        .unwrap()
}

/// Whether there is a device; only then is there something to refuse.
fn has_device() -> bool {
    transport() == "verbs"
}

#[test]
fn verbs_that_cannot_register_memory_is_refused_with_the_limit_and_the_remedy() {
    if !has_device() {
        return;
    }
    let directory = tempfile::TempDir::with_prefix("kvrail-test-").unwrap();
    let socket = directory.path().join("node.sock").display().to_string();
    let output = confined(&[
        "serve",
        "--transport",
        "verbs",
        "--pool",
        "16MiB",
        "--listen",
        "127.0.0.1:0",
        "--socket",
        &socket,
        "--log",
        "error",
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let last = said.lines().last().unwrap_or_default();
    for part in ["--transport verbs", "16777216 bytes", "65536 bytes", "ulimit -l", "CAP_IPC_LOCK"]
    {
        assert!(last.contains(part), "{part} is not said: {said}");
    }
    assert!(!directory.path().join("node.sock").exists());
}

#[test]
fn left_to_choose_nodes_fall_back_to_tcp_and_say_why() {
    if !has_device() {
        return;
    }
    let program = confined_program();
    let cluster = kvrail::cli::cluster::Cluster::new(program.path().join("kvrail")).unwrap();
    let registry = cluster.registry("registry", &[]).unwrap();
    let address = registry.addresses().unwrap().listen;
    let holder = cluster.node("holder", address, &[]).unwrap();
    let reader = cluster.node("reader", address, &[]).unwrap();
    let (at_holder, at_reader) = (holder.client().unwrap(), reader.client().unwrap());
    for said in [holder.said(), reader.said()] {
        let line = said.lines().find(|line| line.contains("no RDMA: this node uses TCP"));
        let line = line.unwrap_or_else(|| panic!("nothing about TCP: {said}"));
        for part in ["WARN", "ibv_reg_mr", "memlock limit 65536 bytes", "ulimit -l"] {
            assert!(line.contains(part), "{part} is not said: {line}");
        }
    }
    let blocks = Blocks::small("over TCP in spite of a device");
    save(&at_holder, &blocks);
    let counts = read(&at_reader, &blocks, Source::Anywhere);
    assert_eq!(counts, Counts::all_ready(blocks.len()));
    assert_at_rest_over("tcp", "the holder", &at_holder);
    assert_at_rest_over("tcp", "the reader", &at_reader);
}

/// A directory with a `kvrail` that runs the real one under the limit.
fn confined_program() -> tempfile::TempDir {
    let directory = tempfile::TempDir::with_prefix("kvrail-test-").unwrap();
    let path = directory.path().join("kvrail");
    let command = CONFINED.join(" ");
    let script = format!(
        "#!/bin/sh\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\nexec {command} --memlock={MEMLOCK} {BINARY} \"$@\"\n"
    );
    write_script(&path, &script);
    directory
}

#[test]
fn the_doctor_fails_on_the_limit_and_passes_without_it() {
    if !has_device() {
        return;
    }
    let output = confined(&["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{report}");
    let finding = |check: &str| {
        let mut all = report["findings"].as_array().unwrap().iter();
        all.find(|it| it["check"] == check).unwrap().clone()
    };
    let memlock = finding("memlock");
    assert_eq!(memlock["status"], "fail", "{report}");
    assert!(memlock["what"].as_str().unwrap().contains("64.0 KiB"), "{memlock}");
    assert!(memlock["remedy"].as_str().unwrap().contains("memlock"), "{memlock}");
    assert_eq!(finding("capability")["status"], "fail", "{report}");
    assert!(finding("transport")["what"].as_str().unwrap().contains("TCP"), "{report}");

    let free = Command::new(BINARY).args(["doctor", "--json"]).output().unwrap();
    let report: Value = serde_json::from_slice(&free.stdout).unwrap();
    assert_eq!(free.status.code(), Some(0), "{report}");
}
