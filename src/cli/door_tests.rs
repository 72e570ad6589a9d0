//! The commands of the local door against a node of one pool.

use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};

use super::get::GetArgs;
use super::ls::LsArgs;
use super::put::PutArgs;
use super::stat::StatArgs;
use super::*;
use crate::client::Client;
use crate::runtime::door::stand_in::{Running, eventually, hash, names, namespace, remote};

const POOL: u64 = 1 << 20;

fn parse<A: Args>(words: &[&str]) -> A {
    let command = A::augment_args(Command::new("test").no_binary_name(true));
    A::from_arg_matches(&command.try_get_matches_from(words).unwrap()).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// `kvrail put` of this file with blocks of 4 KiB; `more` may say otherwise.
fn put_args(running: &Running, file: &Path, more: &[&str]) -> PutArgs {
    let socket = running.path();
    let mut words = vec!["--socket", text(&socket), "--namespace", "test/tp1"];
    if !more.contains(&"--block-size") {
        words.extend(["--block-size", "4KiB"]);
    }
    words.extend(more);
    words.push(text(file));
    parse(&words)
}

fn put(running: &Running, file: &Path, more: &[&str]) -> Result<String, CliError> {
    let mut out = Vec::new();
    put::put(&put_args(running, file, more), &mut out)?;
    Ok(String::from_utf8(out).unwrap())
}

fn get(running: &Running, hashes: &str, output: &Path, more: &[&str]) -> Result<Vec<u8>, CliError> {
    let socket = running.path();
    let mut words = vec!["--socket", text(&socket), "--namespace", "test/tp1"];
    // Standard input may be a terminal where tests run, which `-` does not ask.
    words.extend(["--hashes", "-", "-o", text(output)]);
    words.extend(more);
    let mut out = Vec::new();
    get::get(&parse::<GetArgs>(&words), &mut hashes.as_bytes(), &mut out)?;
    Ok(out)
}

/// Bytes that differ from block to block.
fn content(len: usize) -> Vec<u8> {
    (0..len).map(|at| u8::try_from((at + at / 4096) % 251).unwrap()).collect()
}

fn out(running: &Running) -> PathBuf {
    running.directory.path().join("out")
}

fn usage(error: &CliError, what: &str) {
    assert!(matches!(error, CliError::Usage(_)), "{error}");
    assert!(error.to_string().contains(what), "{error}");
    assert!(!error.to_string().contains('\n'), "{error}");
}

fn failed(error: &CliError, what: &str) {
    assert!(matches!(error, CliError::Failed(_)), "{error}");
    assert!(error.to_string().contains(what), "{error}");
}

#[test]
fn a_file_comes_back_whatever_its_length() {
    let running = Running::start(POOL);
    for len in [1, 4095, 4096, 4097, 300_000] {
        let bytes = content(len);
        let file = running.file("file", &bytes);
        let hashes = put(&running, &file, &[]).unwrap();
        assert_eq!(hashes.lines().count(), len.div_ceil(4096));
        let said = get(&running, &hashes, &out(&running), &["--local"]).unwrap();
        assert_eq!(std::fs::read(out(&running)).unwrap(), bytes, "{len}");
        let said = String::from_utf8(said).unwrap();
        assert!(said.contains(&format!("{len} bytes")), "{said}");
        let piped = get(&running, &hashes, Path::new("-"), &[]).unwrap();
        assert_eq!(piped, bytes, "{len}");
    }
    assert_eq!(names(running.directory.path()), ["door", "file", "out"]);
    assert_eq!(running.service.pins(), 0);
}

#[test]
fn a_file_as_large_as_the_pool_fits_and_a_larger_one_is_refused() {
    let running = Running::start(POOL);
    let file = running.file("full", &content(1 << 20));
    let hashes = put(&running, &file, &[]).unwrap();
    get(&running, &hashes, &out(&running), &[]).unwrap();
    let file = running.file("large", &content((1 << 20) + 1));
    running.service.evict();
    usage(&put(&running, &file, &[]).unwrap_err(), "larger pool");
    usage(&put(&running, &file, &["--block-size", "2MiB"]).unwrap_err(), "larger pool");
    assert_eq!(running.service.occupied(), 0);
}

#[test]
fn a_file_that_cannot_be_saved_is_refused_in_a_sentence() {
    let running = Running::start(POOL);
    let directory = running.directory.path();
    let put = |file: &Path, more: &[&str]| put(&running, file, more).unwrap_err();
    usage(&put(&directory.join("absent"), &[]), "No such file");
    usage(&put(directory, &[]), "is a directory");
    usage(&put(Path::new("/dev/null"), &[]), "not a regular file");
    usage(&put(&running.file("empty", b""), &[]), "is empty");
    let file = running.file("file", b"bytes");
    usage(&put(&file, &["--block-size", "0"]), "--block-size");
    usage(&put(&file, &["--block-size", "2GiB"]), "--block-size");
    let socket = directory.join("nobody");
    let args =
        parse::<PutArgs>(&["--socket", text(&socket), "--namespace", "test/tp1", text(&file)]);
    failed(&put::put(&args, &mut Vec::new()).unwrap_err(), "kvrail serve");
    assert_eq!((running.service.occupied(), running.service.residents()), (0, 0));
}

#[test]
fn saving_waits_for_memory_and_gives_up_in_time() {
    let running = Running::start(POOL);
    let client = Client::connect(&running.path()).unwrap();
    let all = client.reserve(&[1 << 20]).unwrap();
    let file = running.file("file", &content(10_000));
    let busy = put(&running, &file, &["--timeout", "30ms"]).unwrap_err();
    failed(&busy, "no memory for 3 blocks");
    failed(&busy, "its pools are full of blocks in use");
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| put(&running, &file, &[]));
        eventually("the command is connected", || client.stat().is_ok());
        drop(all);
        assert_eq!(saving.join().unwrap().unwrap().lines().count(), 3);
    });
}

#[test]
fn blocks_that_were_saved_before_are_not_saved_twice() {
    let running = Running::start(POOL);
    let file = running.file("file", &content(8192));
    put(&running, &file, &[]).unwrap();
    // The same prefix, another end.
    let file = running.file("file", &content(9000));
    let json = put(&running, &file, &["--json"]).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["stored"], 1);
    assert_eq!(json["already_resident"], 2);
    assert_eq!(json["announced"], true);
    assert_eq!(json["hashes"].as_array().unwrap().len(), 3);
    assert_eq!(running.service.occupied(), 3);
}

#[test]
fn saving_waits_for_the_registry_unless_told_otherwise() {
    let running = Running::start(POOL);
    running.service.registry.send_replace(false);
    let file = running.file("file", b"bytes");
    put(&running, &file, &["--no-wait"]).unwrap();
    let args = put_args(&running, &file, &["--timeout", "50ms"]);
    let mut out = Vec::new();
    failed(&put::put(&args, &mut out).unwrap_err(), "registry");
    assert_eq!(out.len(), 65, "the hash is printed all the same");
}

#[test]
fn what_is_not_here_is_fetched_unless_forbidden() {
    let running = Running::start(POOL);
    let mut chain = chain::Chain::default();
    let first = chain.next(b"from a peer").unwrap();
    remote(&running.service, first, b"from a peer");
    let list = format!("\n  {first}  \n");
    let local = get(&running, &list, &out(&running), &["--local"]).unwrap_err();
    failed(&local, "leave out --local");
    let said = get(&running, &list, &out(&running), &["--json"]).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&said).unwrap();
    assert_eq!((&json["fetched"], &json["verified"]), (&1.into(), &true.into()));
    assert_eq!(std::fs::read(out(&running)).unwrap(), b"from a peer");
}

#[test]
fn fetching_through_a_pool_smaller_than_the_file_ends() {
    let running = Running::start(64 << 10);
    let service = &running.service;
    let mut chain = chain::Chain::default();
    let mut list = String::new();
    let bytes = content(256 << 10);
    for block in bytes.chunks(8192) {
        let hash = chain.next(block).unwrap();
        remote(service, hash, block);
        list.push_str(&format!("{hash}\n"));
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            eventually("the file is there", || {
                service.evict();
                done.load(std::sync::atomic::Ordering::Relaxed)
            });
        });
        let piped = get(&running, &list, Path::new("-"), &[]);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(piped.unwrap(), bytes);
    });
}

#[test]
fn nothing_half_done_is_left_where_a_block_is_lacking() {
    let running = Running::start(POOL);
    let file = running.file("file", &content(20_000));
    let hashes = put(&running, &file, &[]).unwrap();
    let path = out(&running);
    std::fs::write(&path, b"precious").unwrap();
    let get = |list: &str, more: &[&str]| get(&running, list, &path, more).unwrap_err();

    let absent = format!("{hashes}{}\n", hash(9));
    failed(&get(&absent, &[]), "block 6 of 6");
    let mut swapped: Vec<&str> = hashes.lines().collect();
    swapped.swap(2, 3);
    failed(&get(&swapped.join("\n"), &[]), "does not continue the chain");
    let third = hashes.lines().nth(2).unwrap();
    running.service.damage(&namespace(), third.parse().unwrap());
    failed(&get(&hashes, &[]), "checksum");
    failed(&get(&hashes, &["--no-verify-chain"]), "checksum");

    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert_eq!(names(running.directory.path()), ["door", "file", "out"]);
    assert_eq!(running.service.pins(), 0);
}

#[test]
fn a_part_of_a_list_is_restored_where_the_chain_is_not_asked_for() {
    let running = Running::start(POOL);
    let bytes = content(12_288);
    let hashes = put(&running, &running.file("file", &bytes), &[]).unwrap();
    let part: Vec<&str> = hashes.lines().skip(1).collect();
    let part = part.join("\n");
    failed(&get(&running, &part, &out(&running), &[]).unwrap_err(), "--no-verify-chain");
    get(&running, &part, &out(&running), &["--no-verify-chain"]).unwrap();
    assert_eq!(std::fs::read(out(&running)).unwrap(), bytes[4096..]);
}

#[test]
fn a_bad_list_of_hashes_is_refused_in_a_sentence() {
    let running = Running::start(POOL);
    let get =
        |list: &str, output: &Path, more: &[&str]| get(&running, list, output, more).unwrap_err();
    let path = out(&running);
    usage(&get("", &path, &[]), "empty");
    usage(&get("00\nxyz\n", &path, &[]), "line 2");
    usage(&get("00\n", Path::new("-"), &["--json"]), "--json");
    usage(&get("00\n", running.directory.path(), &[]), "is a directory");
    usage(&get("00\n", &path.join("below"), &[]), "cannot write into");
    let absent =
        parse::<GetArgs>(&["--namespace", "a", "-o", text(&path), "--hashes", "/absent/list"]);
    let error = get::get(&absent, &mut io::empty(), &mut Vec::new()).unwrap_err();
    usage(&error, "/absent/list");
    assert_eq!(names(running.directory.path()), ["door"]);
}

/// A reader that leaves after so many bytes.
struct Head(usize);

impl io::Write for Head {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let taken = bytes.len().min(self.0);
        self.0 -= taken;
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let running = Running::start(POOL);
    let file = running.file("file", &content(100_000));
    let hashes = put(&running, &file, &[]).unwrap();
    let socket = running.path();
    let words = ["--socket", text(&socket)];
    for taken in [0, 10, 200] {
        put::put(&put_args(&running, &file, &[]), &mut Head(taken)).unwrap();
        ls::ls(&parse::<LsArgs>(&words), &mut Head(taken)).unwrap();
        stat::stat(&parse::<StatArgs>(&words), &mut Head(taken)).unwrap();
        let args: GetArgs =
            parse(&[&words[..], &["--namespace", "test/tp1", "-o", "-", "--hashes", "-"]].concat());
        get::get(&args, &mut hashes.as_bytes(), &mut Head(taken)).unwrap();
    }
}

#[test]
fn ls_prints_every_resident_once() {
    let running = Running::start(POOL);
    // More blocks than a page.
    let file = running.file("file", &content(3000));
    let hashes = put(&running, &file, &["--block-size", "2"]).unwrap();
    assert_eq!(hashes.lines().count(), 1500);
    let socket = running.path();
    let print = |more: &[&str]| {
        let words = [&["--socket", text(&socket)][..], more].concat();
        let mut out = Vec::new();
        ls::ls(&parse::<LsArgs>(&words), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let table = print(&[]);
    assert_eq!(table.lines().count(), 1501);
    assert!(table.lines().nth(1).unwrap().ends_with(" test/tp1"), "{table}");
    let json = print(&["--json", "--namespace", "test/tp1"]);
    let mut listed: Vec<String> = json
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|object| object["hash"].as_str().unwrap().to_owned())
        .collect();
    listed.sort();
    let mut saved: Vec<&str> = hashes.lines().collect();
    saved.sort_unstable();
    assert_eq!(listed, saved);
    assert_eq!(print(&["--json", "--namespace", "other"]), "");
}

#[test]
fn stat_prints_the_state_in_both_forms() {
    let running = Running::start(POOL);
    put(&running, &running.file("file", &content(8192)), &[]).unwrap();
    let socket = running.path();
    let print = |more: &[&str]| {
        let words = [&["--socket", text(&socket)][..], more].concat();
        let mut out = Vec::new();
        stat::stat(&parse::<StatArgs>(&words), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let table = print(&[]);
    let has = |words: &str| {
        let found = table
            .lines()
            .any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") == words);
        assert!(found, "{words:?} is not in\n{table}");
    };
    has("residents 2 blocks");
    has("rank blocks");
    has("1 2");
    has("3 1MiB 1.0 MiB 0 B");
    let json: serde_json::Value = serde_json::from_str(&print(&["--json"])).unwrap();
    assert_eq!(json["residents"]["blocks"], 2);
}
