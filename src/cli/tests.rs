use std::fs;

use super::*;
use crate::config::ProcessConfig;

fn message(arguments: &[&str]) -> String {
    sentence(&parse(arguments.iter().map(OsString::from)).unwrap_err())
}

#[test]
fn the_command_line_is_well_formed() {
    command().debug_assert();
}

#[test]
fn wrong_arguments_make_one_line() {
    for arguments in [
        &["kvrail", "fly"][..],
        &["kvrail", "serve", "--nonsense"],
        &["kvrail", "serve", "--pool=x"],
        &["kvrail", "serve", "extra"],
    ] {
        let text = message(arguments);
        assert!(!text.is_empty() && !text.contains('\n'), "{text}");
        assert!(!text.starts_with("error"), "{text}");
    }
    assert!(message(&["kvrail", "serve", "--pool=x"]).contains("512MiB"));
}

#[test]
fn who_mistypes_is_told_what_there_is() {
    for (arguments, part) in [
        (&["kvrail", "srve"][..], "'serve'"),
        (&["kvrail", "serve", "--capacty=5"], "'--capacity'"),
        (&["kvrail", "serve", "--nonsense"], "--help"),
        (&["kvrail", "ls", "everything"], "--help"),
        (&["kvrail", "serve", "--capacity", "-5"], "-5 is not in 1..="),
        (&["kvrail", "bench", "store", "--touches", "-1"], "100k"),
    ] {
        let text = message(arguments);
        assert!(text.contains(part) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn faults_of_the_caller_exit_with_2_and_others_with_1() {
    assert_eq!(CliError::usage("x").exit_code(), 2);
    assert_eq!(CliError::failed("x").exit_code(), 1);
    assert_eq!(
        CliError::from(ConfigError::Missing { setting: "--pool", reason: "x" }).exit_code(),
        2
    );
}

fn process(ready_file: Option<std::path::PathBuf>) -> ProcessConfig {
    ProcessConfig { metrics_listen: None, log: "info".to_owned(), ready_file, parent_death: None }
}

#[test]
fn the_ready_file_is_one_line_of_json_and_nothing_stays_beside_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ready");
    let ready = Ready {
        listen: "127.0.0.1:7".parse().unwrap(),
        socket: Some("/run/k.sock".into()),
        metrics: None,
        pid: 9,
    };
    let file = announce_ready(&process(Some(path.clone())), &ready).unwrap();
    assert_eq!(
        fs::read_to_string(&path).unwrap(),
        "{\"listen\":\"127.0.0.1:7\",\"socket\":\"/run/k.sock\",\"metrics\":null,\"pid\":9}\n"
    );
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    // One that was started later under that name has its own.
    let later = announce_ready(&process(Some(path.clone())), &Ready { pid: 10, ..ready.clone() });
    drop(file);
    assert!(path.exists());
    drop(later);
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    let nowhere = directory.path().join("absent/ready");
    let error = announce_ready(&process(Some(nowhere)), &ready).unwrap_err();
    assert!(error.to_string().contains("--ready-file"), "{error}");
}
