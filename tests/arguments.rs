//! Wrong arguments, variables and files end `kvrail` with exit code 2 and one sentence.
#![expect(clippy::expect_used, reason = "a test that cannot start the command fails")]

use std::process::{Command, Output};

/// Runs the command with no variable but these.
fn kvrail(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvrail"))
        .args(arguments)
        .env_clear()
        .envs(variables.iter().copied())
        .output()
        .expect("the command starts")
}

fn refused(arguments: &[&str], variables: &[(&str, &str)], part: &str) {
    let output = kvrail(arguments, variables);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    assert!(said.starts_with("kvrail: ") && said.contains(part), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(output.stdout.is_empty());
}

#[test]
fn wrong_arguments_are_refused_in_one_sentence() {
    refused(&["fly"], &[], "fly");
    refused(&["serve"], &[], "--pool is missing");
    refused(&["serve", "--pool=lots"], &[], "512MiB");
    refused(&["serve", "--pool=1MiB", "--lease-ttl=1s"], &[], "--lease-margin");
    refused(&["serve", "--pool=1MiB", "--config=absent.toml"], &[], "absent.toml");
    refused(&["registry", "--listen=here"], &[], "--listen");
    refused(&["doctor", "--transport=smoke"], &[], "--transport");
}

#[test]
fn variables_are_read_and_named() {
    refused(&["serve"], &[("KVRAIL_POOL", "lots")], "KVRAIL_POOL");
    refused(&["registry"], &[("KVRAIL_NODE_LEASE", "0s")], "KVRAIL_NODE_LEASE");
    let truth = [("KVRAIL_POOL", "1MiB"), ("KVRAIL_LOCK", "yes")];
    refused(&["serve"], &truth, "[possible values: true, false]");
    let contradiction = [("KVRAIL_POOL", "1MiB"), ("KVRAIL_LEASE_MARGIN", "9s")];
    refused(&["serve"], &contradiction, "--lease-ttl and --lease-margin");
}

/// A full disk takes no sentence; the exit code tells all the same.
#[test]
fn an_exit_code_needs_no_standard_error() {
    for (arguments, code) in [
        (&["fly"][..], 2),
        (&["serve"], 2),
        (&["stat", "--socket", "/nowhere/node.sock"], 1),
        (&["bench", "store", "--operations", "1"], 2),
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("it is there");
        let status = Command::new(env!("CARGO_BIN_EXE_kvrail"))
            .args(arguments)
            .env_clear()
            .stderr(full)
            .status()
            .expect("the command starts");
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in
        [&["--help"][..], &["--version"], &["serve", "--help"], &["registry", "--help"]]
    {
        let output = kvrail(arguments, &[]);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(output.stderr.is_empty() && !output.stdout.is_empty());
    }
    let full = std::fs::File::options().write(true).open("/dev/full").expect("it is there");
    let mut untold = Command::new(env!("CARGO_BIN_EXE_kvrail"));
    let untold = untold.arg("--help").stdout(full).output().expect("the command starts");
    assert_eq!(untold.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&untold.stderr).starts_with("kvrail: cannot write the output"));
    let nothing = kvrail(&[], &[]);
    assert_eq!(nothing.status.code(), Some(2));
}
