//! The commands of the local door and of the services, as a person or a script runs them.
//!
//! What the caller can correct ends with exit code 2 and one sentence on standard error, and leaves
//! nothing half-done.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvrail::cli::cluster::{Cluster, Process};
use serde_json::Value;

use crate::support::{BINARY, assert_at_rest, cluster, node_id};

/// One node, and files beside it.
struct Scene {
    node: Process,
    _registry: Process,
    cluster: Cluster,
}

impl Scene {
    fn new() -> Self {
        let cluster = cluster();
        let registry = cluster.registry("registry", &[]).unwrap();
        let address = registry.addresses().unwrap().listen;
        let node = cluster.node("node", address, &["--pool", "8MiB"]).unwrap();
        Self { node, _registry: registry, cluster }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cluster.path().join(name)
    }

    fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        text(&path)
    }

    /// Runs a command at a node's door.
    fn run_at(&self, node: &Process, arguments: &[&str]) -> Output {
        let socket = text(node.addresses().unwrap().socket.as_deref().unwrap());
        kvrail(&[arguments, &["--socket", &socket]].concat(), b"")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.run_at(&self.node, arguments)
    }

    fn ok(&self, arguments: &[&str]) -> String {
        ok(&self.run(arguments))
    }

    /// Refused in one sentence, with nothing new beside the node.
    fn refused(&self, arguments: &[&str], part: &str) {
        let before = names(self.cluster.path());
        refused(&self.run(arguments), arguments, part);
        assert_eq!(names(self.cluster.path()), before, "{arguments:?}");
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

fn kvrail(arguments: &[&str], input: &[u8]) -> Output {
    use std::io::Write;
    let mut child = Command::new(BINARY)
        .args(arguments)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that does not read its input closes it early.
    child.stdin.take().unwrap().write_all(input).ok();
    child.wait_with_output().unwrap()
}

fn ok(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn refused(output: &Output, arguments: &[&str], part: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    assert!(said.starts_with("kvrail: ") && said.contains(part), "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

fn names(directory: &Path) -> Vec<PathBuf> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    names.sort();
    names
}

fn content(bytes: usize) -> Vec<u8> {
    crate::support::Blocks::new("content", 1, bytes).bytes.remove(0)
}

#[test]
fn a_file_that_cannot_be_saved_is_refused() {
    let scene = Scene::new();
    let put = |file: &str, part: &str| {
        scene.refused(&["put", file, "--namespace", "tests"], part);
    };
    put(&text(&scene.path("absent")), "cannot read");
    put(&scene.file("empty", b""), "is empty");
    put(&text(scene.cluster.path()), "is a directory");
    put("/dev/null", "is not a regular file");
    put(&scene.file("large", &vec![1; (8 << 20) + 1]), "start the node with a larger pool");
    // As many blocks as the pool has bytes for, and more than the node keeps track of.
    let many = scene.file("many", &[1; 2000]);
    scene.refused(&["put", &many, "--namespace", "tests", "--block-size", "1"], "--capacity");
    let unreadable = scene.file("unreadable", b"secret");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o000);
    fs::set_permissions(&unreadable, mode).unwrap();
    // The superuser reads everything.
    if fs::File::open(&unreadable).is_err() {
        put(&unreadable, "cannot read");
    }

    let file = scene.file("file", &content(1000));
    scene.refused(&["put", &file], "--namespace");
    scene.refused(&["put", "--namespace", "tests"], "<FILE>");
    scene.refused(&["put", &file, "--namespace", ""], "--namespace");
    scene.refused(&["put", &file, "--namespace", &"n".repeat(65)], "--namespace");
    for size in ["0", "2GiB", "much"] {
        scene
            .refused(&["put", &file, "--namespace", "tests", "--block-size", size], "--block-size");
    }
    scene.refused(&["put", &file, "--namespace", "tests", "--timeout", "soon"], "--timeout");
    let client = scene.node.client().unwrap();
    assert_at_rest("the node", &client);
    assert_eq!(client.stat().unwrap().residents.blocks, 0);
}

#[test]
fn what_cannot_be_restored_is_refused() {
    let scene = Scene::new();
    let hash = "ab".repeat(32);
    let out = text(&scene.path("out"));
    let get = |arguments: &[&str], part: &str| {
        let all = [&["get", "--namespace", "tests", "-o", &out], arguments].concat();
        scene.refused(&all, part);
    };
    get(&[], "the list of hashes is empty");
    get(&["xyz"], "xyz");
    get(&["--hashes", &text(&scene.path("absent"))], "cannot read");
    get(&["--hashes", &text(scene.cluster.path())], "cannot read");
    get(&["--hashes", &scene.file("nothing", b"\n\n")], "the list of hashes is empty");
    get(&["--hashes", &scene.file("noise", &[0xff; 64])], "cannot read");
    get(&["--hashes", &scene.file("words", b"ab\nno hash\n")], "line 2");
    get(&[&hash, "--local", "--from", &"0".repeat(32)], "--from");
    get(&[&hash, "--from", "somebody"], "--from");
    let into = |output: &str, part: &str| {
        scene.refused(&["get", &hash, "--namespace", "tests", "-o", output], part);
    };
    into(&text(scene.cluster.path()), "is a directory");
    into(&text(&scene.path("absent/out")), "cannot write");
    into("/dev/null", "is not a regular file");
    scene.refused(&["get", &hash, "-o", &out], "--namespace");
    scene.refused(&["get", &hash, "--namespace", "tests"], "--output");

    // A block that nobody has is no mistake of the caller, and leaves no file either.
    let output = scene.run(&["get", &hash, "--namespace", "tests", "-o", &out]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is on no node"));
    let from = ["get", &hash, "--namespace", "tests", "-o", &out, "--from", &"0".repeat(32)];
    let output = scene.run(&from);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("that --from gives"));
    assert!(!scene.path("out").exists());
}

#[test]
fn a_file_goes_round() {
    let scene = Scene::new();
    let registry = scene.node.client().unwrap().stat().unwrap().registry.endpoint;
    let address = registry.strip_prefix("http://").unwrap().parse().unwrap();
    let reader = scene.cluster.node("reader", address, &["--pool", "8MiB"]).unwrap();
    let bytes = content((5 << 20) + 12_345);
    let file = scene.file("file", &bytes);
    let put = ["put", &file, "--namespace", "tests", "--block-size", "256KiB"];
    let hashes = scene.ok(&put);
    assert_eq!(hashes.lines().count(), 21);
    let list = scene.file("hashes", hashes.as_bytes());
    let out = text(&scene.path("out"));
    let get = ["get", "--namespace", "tests", "--hashes", &list, "-o", &out];

    let local = [&get[..], &["--local"]].concat();
    let output = scene.run_at(&reader, &local);
    assert_eq!(output.status.code(), Some(1));
    assert!(!scene.path("out").exists());
    let id = node_id(&scene.node.client().unwrap()).to_string();
    ok(&scene.run_at(&reader, &[&get[..], &["--from", &id]].concat()));
    assert!(fs::read(&out).unwrap() == bytes);
    fs::remove_file(&out).unwrap();
    ok(&scene.run_at(&reader, &local));
    assert!(fs::read(&out).unwrap() == bytes);

    let report = [&get[..], &["--json"]].concat();
    let report: Value = serde_json::from_str(&scene.ok(&report)).unwrap();
    assert_eq!((&report["bytes"], &report["blocks"]), (&bytes.len().into(), &21.into()));
    assert_eq!((&report["verified"], &report["fetched"]), (&true.into(), &0.into()));
    let report: Value = serde_json::from_str(&scene.ok(&[&put[..], &["--json"]].concat())).unwrap();
    assert_eq!((&report["stored"], &report["already_resident"]), (&0.into(), &21.into()));
    assert_eq!(report["announced"], true);
    let listed = report["hashes"].as_array().unwrap().iter().map(|hash| hash.as_str().unwrap());
    assert_eq!(listed.collect::<Vec<_>>(), hashes.lines().collect::<Vec<_>>());

    // As a pipe: put prints what get reads.
    let socket = text(scene.node.addresses().unwrap().socket.as_deref().unwrap());
    let piped = ["get", "--namespace", "tests", "-o", "-", "--socket", &socket];
    assert!(kvrail(&piped, hashes.as_bytes()).stdout == bytes);
    assert_at_rest("the node", &scene.node.client().unwrap());
    assert_at_rest("the reader", &reader.client().unwrap());
}

#[test]
fn stat_and_ls_tell_programs_and_people() {
    let scene = Scene::new();
    let file = scene.file("file", &content(10_000));
    let hashes = scene.ok(&["put", &file, "--namespace", "tests", "--block-size", "4KiB"]);

    let stat: Value = serde_json::from_str(&scene.ok(&["stat", "--json"])).unwrap();
    assert_eq!(stat["node"]["requester"], "node");
    assert_eq!(stat["node"]["transport"], "tcp");
    assert_eq!(
        (&stat["residents"]["blocks"], &stat["residents"]["ranks"][0]),
        (&3.into(), &3.into())
    );
    assert_eq!(stat["pools"][0]["bytes"], 8 << 20);
    assert_eq!(stat["registry"]["state"], "connected");
    assert!(stat["requesters"].is_array() && stat["peers"].is_array());
    let people = scene.ok(&["stat"]);
    assert!(people.contains("residents") && people.contains("connected"), "{people}");

    let listed = scene.ok(&["ls", "--json"]);
    let mut entries: Vec<Value> =
        listed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.len(), 3);
    for entry in &entries {
        assert_eq!(entry["namespace"], "tests");
        assert_eq!((&entry["rank"], &entry["pins"]), (&1.into(), &0.into()));
        assert!(hashes.contains(entry["hash"].as_str().unwrap()));
    }
    entries.retain(|entry| entry["bytes"] == 10_000 - 2 * 4096);
    assert_eq!(entries.len(), 1);
    assert_eq!(scene.ok(&["ls", "--json", "--namespace", "other"]), "");
    assert_eq!(scene.ok(&["ls"]).lines().count(), 4);
    scene.refused(&["ls", "everything"], "everything");
    scene.refused(&["stat", "--yaml"], "--yaml");
    scene.refused(&["ls", "--namespace", ""], "--namespace");

    let nobody = text(&scene.path("nobody.sock"));
    for command in ["stat", "ls"] {
        let output = kvrail(&[command, "--socket", &nobody], b"");
        assert_eq!(output.status.code(), Some(1));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("no kvrail node answers") && said.lines().count() == 1, "{said}");
        let file = scene.file("no socket", b"");
        refused(&kvrail(&[command, "--socket", &file], b""), &[command], "is no socket");
    }
}
