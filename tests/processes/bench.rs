//! `kvrail bench`: what it refuses, and that a short run of each kind reports what it measured.

use std::fs;
use std::process::{Command, Output, Stdio};

use kvrail::cli::cluster::Cluster;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::redis_server;
use crate::support::{BINARY, cluster, until};

fn temporary() -> TempDir {
    TempDir::with_prefix("kvrail-test-").unwrap()
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.arg("bench").args(arguments).env_clear().stdin(Stdio::null());
    command
}

fn bench(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    report(arguments, &bench(arguments))
}

fn report(arguments: &[&str], output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refused(arguments: &[&str], part: &str) {
    let output = bench(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    assert!(said.starts_with("kvrail: ") && said.contains(part), "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"))
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (arguments, part) in [
        (&["store", "--entries", "many"][..], "--entries"),
        (&["store", "--entries", "10"], "1000 to 16777216"),
        (&["store", "--threads", "0"], "1 to 256 threads"),
        (&["store", "--rounds", "0"], "--rounds"),
        (&["store", "--contenders", "redis"], "kvrail, mutexed"),
        (&["store", "--operations", "8", "--threads", "8"], "--operations"),
        (&["store", "--operations", "1G"], "--operations"),
        (&["read", "--size", "32MiB"], "64B to 16MiB"),
        (&["read", "--size", "1"], "64B to 16MiB"),
        (&["read", "--batch", "0"], "--batch"),
        (&["read", "--batch", "513"], "--batch"),
        (&["read", "--depth", "65"], "--depth"),
        (&["read", "--streams", "17"], "--streams"),
        (&["read", "--transport", "pigeon"], "--transport"),
        (&["read", "--no-merge", "--what", "get"], "bare and leased"),
        (&["read", "--what", "all"], "--what"),
        (&["read", "--transport", "tcp,shm", "--rdma-device", "none0"], "--transport verbs"),
        (&["read", "--time", "0s"], "--time"),
        (&["read", "--pool", "1MiB"], "--pool"),
        (&["read", "--json", "--lines"], "--lines"),
        (&["read", "--loopback", "--peer", "127.0.0.1:1"], "--peer"),
        (&["read", "--peer", "nobody"], "--peer"),
        (&["read", "--transport", "tcp", "--poll", "busy"], "--transport verbs"),
        (&["read", "--plot", "/proc/none/out.svg"], "--plot"),
        (&["read", "--plot", "/dev/null"], "--plot: /dev/null is not a regular file"),
        (&["registry", "--keys", "9999"], "10000 to 16777216"),
        (&["registry", "--residents", "1"], "0, or 10000"),
        (&["registry", "--rounds", "0"], "--rounds"),
        (&["stall", "--stall", "0s"], "--stall"),
        (&["stall", "--transport", "shm"], "--transport"),
        (&["stall", "--batch", "65"], "--batch"),
        (&["stall", "--transport", "tcp", "--gid-index", "1"], "--transport verbs"),
        (&["fault", "--fault", "flood"], "--fault"),
        (&["fault", "--transport", "shm"], "--transport"),
        (&["fault", "--link", "none0"], "no network interface"),
        (&["hold", "--listen", "0.0.0.0:0"], "--listen"),
        (&["hold", "--listen", "203.0.113.1:1"], "--listen"),
    ] {
        refused(arguments, part);
    }
    // A holder that is not there is no mistake in the arguments, and takes no earlier picture along.
    let directory = tempfile::tempdir().unwrap();
    let plot = directory.path().join("earlier.svg");
    fs::write(&plot, "earlier").unwrap();
    let to = plot.display().to_string();
    let output = bench(&["read", "--peer", "127.0.0.1:1", "--transport", "tcp", "--plot", &to]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no kvrail bench hold"));
    assert_eq!(fs::read(&plot).unwrap(), b"earlier");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn a_stall_of_each_kind_is_measured_beside_none() {
    // A machine that stands still itself makes a stall longer than was asked for, and a window empty.
    let is_measured = |row: &Value| {
        let is_there = |what: &str| number(row, what) > 0.0;
        let saves = row["stalled"] != "reclaimer" || is_there("saved");
        number(row, "stood_ms") < 400.0 && is_there("reads") && is_there("fetched") && saves
    };
    let mut runs = (0..10).map(|_| json(&["stall", "--quick", "--transport", "tcp", "--json"]));
    let report = runs.find(|report| report["rows"].as_array().unwrap().iter().all(is_measured));
    let report = report.expect("reads while something stands, and saves in the reclaimer's place");
    assert_eq!((&report["bench"], &report["transport"]), (&"stall".into(), &"tcp".into()));
    let rows = report["rows"].as_array().unwrap();
    let kinds: Vec<_> = rows.iter().map(|row| row["stalled"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["nobody", "reclaimer", "control", "poller"]);
    for row in rows {
        assert!(0.0 < number(row, "p50_us") && number(row, "p50_us") <= number(row, "max_us"));
        for bad in ["failed", "not_found", "wrong"] {
            assert_eq!(number(row, bad), 0.0, "{bad}: {row}");
        }
    }
}

#[test]
fn a_killed_holder_is_noticed_left_alone_and_used_again() {
    let report = json(&["fault", "--fault", "killed,cut", "--transport", "tcp", "--json"]);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for row in rows {
        for time in ["detected_ms", "left_alone_ms", "back_ms", "used_ms"] {
            assert!(number(row, time) >= 0.0, "{row}");
        }
        assert!(number(row, "failed") > 0.0 && number(row, "wrong") == 0.0, "{row}");
    }
}

#[test]
fn the_store_is_measured_beside_the_mutexed_ranks() {
    let report = json(&["store", "--quick", "--json"]);
    assert_eq!((&report["bench"], &report["interrupted"]), (&"store".into(), &false.into()));
    let rows = report["rows"].as_array().unwrap();
    let find = |measure: &str, threads: u64, contender: &str| {
        let mut all = rows.iter().filter(|row| {
            row["measure"] == measure
                && row["threads"] == threads
                && row["entries"] == 1000
                && row["contender"] == contender
        });
        let found = all.next().unwrap_or_else(|| panic!("{measure}, {threads}, {contender}"));
        assert!(all.next().is_none());
        found
    };
    for contender in ["kvrail", "mutexed"] {
        for threads in [1, 2] {
            for measure in ["mix", "touch", "touch_batch", "commit"] {
                let row = find(measure, threads, contender);
                // From the quickest processor to an unoptimised build on a busy machine.
                assert!((1.0..1e7).contains(&number(row, "median")), "{row}");
                assert!(number(row, "ratio") > 0.0);
            }
        }
        for name in ["lend", "pin"] {
            let of = |part: &str| number(find(&format!("{name}_{part}"), 2, contender), "median");
            assert!(0.0 < of("p50") && of("p50") <= of("p99"));
            assert!(of("p99") <= of("p999") && of("p999") <= of("max"));
        }
        for measure in ["reclaim", "reclaim_pinned"] {
            assert!(number(find(measure, 1, contender), "median") > 0.0);
        }
        // A process's pages are coarse for so few entries.
        let bytes = number(find("bytes_touched", 2, contender), "median");
        assert!((0.0..1e5).contains(&bytes), "{bytes}");
    }
    let mut baselines = rows.iter().filter(|row| row["contender"] == "mutexed");
    assert!(baselines.all(|row| row["ratio"] == 1.0 || row["median"] == 0.0));
}

/// Whoever measures memory in a child of its own may be killed before the child has come up.
#[test]
fn a_child_whose_parent_is_gone_measures_nothing() {
    let output = bench(&["store", "--quick", "--resident", "kvrail", "--parent-death", "4194305"]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
}

#[test]
fn the_registry_is_measured_beside_a_plain_loop_over_redis() {
    let scratch = temporary();
    let arguments = ["registry", "--quick", "--json"];
    // A Redis server is found by the path.
    let path = std::env::vars_os().find(|(name, _)| name == "PATH").unwrap().1;
    let mut command = command(&arguments);
    let output = command.env("TMPDIR", scratch.path()).env("PATH", path).output().unwrap();
    let report = report(&arguments, &output);
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0, "something is left behind");
    let rows = report["rows"].as_array().unwrap();
    let forms: Vec<_> = rows.iter().map(|row| row["form"].as_str().unwrap()).collect();
    if redis_server::is_there() {
        assert_eq!(forms, ["in_process", "grpc", "redis", "plain_redis"]);
        assert!(rows.iter().all(|row| number(row, "announce_ratio") > 0.0), "{report}");
    } else {
        assert_eq!(
            (forms.as_slice(), &report["redis"]),
            (&["in_process", "grpc"][..], &Value::Null)
        );
    }
    for row in rows {
        for rate in ["announce", "plan", "withdraw", "bytes_per_entry"] {
            assert!(number(row, rate) > 0.0 && number(row, rate).is_finite(), "{rate}: {row}");
        }
    }
    assert!(number(&report["death"], "sweep_steps") > 0.0, "{report}");
    for when in ["before", "during"] {
        let lends = &report["resync"][when];
        assert!(
            0.0 < number(lends, "p50_us") && number(lends, "p50_us") <= number(lends, "p99_us")
        );
    }
}

/// The rows of these kinds of read by `--quick`, among others.
fn check_rows(report: &Value, transport: &str, whats: &[&str]) {
    let rows = report["rows"].as_array().unwrap();
    for what in whats {
        for size in [4096, 65536] {
            let is_it = |row: &&Value| {
                row["what"] == *what && row["size"] == size && row["transport"] == transport
            };
            let found: Vec<_> = rows.iter().filter(is_it).collect();
            assert_eq!(found.len(), 2, "{what} {size}");
            for row in found {
                assert_eq!(row["streams"], 2);
                let (blocks, seconds) = (number(row, "blocks"), number(row, "seconds"));
                assert!(blocks > 0.0 && seconds > 0.0, "{row}");
                let gb = blocks * number(row, "size") / seconds / 1e9;
                assert!((number(row, "gb_s") / gb - 1.0).abs() < 1e-6, "{row}");
                let times = ["p50_us", "p90_us", "p99_us", "p999_us", "max_us"];
                let times = times.map(|name| number(row, name));
                assert!(times[0] > 0.0 && times.is_sorted(), "{row}");
                assert!(number(row, "window_gb_s") > 0.0 && number(row, "machine_gb_s") > 0.0);
                assert!(number(row, "reader_cpu_us_per_block") > 0.0, "{row}");
                // No more than a few for each batch, nor a sign that nothing is counted.
                let allocations = number(row, "reader_allocations_per_block");
                assert!((0.0..1000.0).contains(&allocations), "{row}");
                assert!(number(row, "holder_allocations_per_block") > 0.0, "{row}");
                // Each block is a READ of its own here; a node of another process does not say.
                let works = row["works_per_block"].as_f64();
                assert!(works.is_none_or(|works| (0.9..=1.0).contains(&works)), "{row}");
                assert_eq!(works.is_none(), *what == "get");
                // What was read had to come from the holder.
                assert_eq!(row["hits"], 0, "{row}");
            }
        }
    }
    assert!(number(&report["round_trips"][0], "micros") > 0.0);
    assert_eq!(report["copies"].as_array().unwrap().len(), 2);
}

/// What a node holds is not moved: there are times and costs, and no bandwidth.
fn check_resident(report: &Value) {
    let rows = report["rows"].as_array().unwrap().iter();
    let rows: Vec<_> = rows.filter(|row| row["what"] == "resident").collect();
    assert!(!rows.is_empty(), "{report}");
    for row in rows {
        assert!(number(row, "blocks") > 0.0 && number(row, "p50_us") > 0.0, "{row}");
        assert!(number(row, "reader_cpu_us_per_block") > 0.0, "{row}");
        assert!(row["gb_s"].is_null() && row["machine_gb_s"].is_null(), "{row}");
    }
}

#[test]
fn reads_are_measured_with_both_ends_here() {
    let (directory, scratch) = (temporary(), temporary());
    let plot = directory.path().join("out.svg");
    let plot_name = plot.display().to_string();
    let arguments = ["read", "--quick", "--json", "--transport", "tcp,shm", "--plot", &plot_name];
    let output = command(&arguments).env("TMPDIR", scratch.path()).output().unwrap();
    let report = report(&arguments, &output);
    // Neither end leaves anything behind.
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    assert_eq!(report["holder"], "loopback");
    for transport in ["tcp", "shm"] {
        check_rows(&report, transport, &["bare", "leased", "get"]);
    }
    assert_eq!(report["rows"].as_array().unwrap().len(), 2 * 4 * 4, "{report}");
    assert_eq!(report["sockets"].as_array().unwrap().len(), 1, "no sockets bound shared memory");
    check_resident(&report);
    let svg = fs::read_to_string(&plot).unwrap();
    for part in ["<svg", "bare (tcp)", "leased (tcp)", "get (shm)", "machine (tcp)"] {
        assert!(svg.contains(part), "{part}");
    }
}

#[test]
fn reads_of_another_host_are_measured_and_neighbours_share_a_read() {
    let cluster: Cluster = cluster();
    let ready = cluster.path().join("ready");
    let mut hold = Command::new(BINARY)
        .args(["bench", "hold", "--listen", "127.0.0.1:0"])
        .args(["--parent-death", &std::process::id().to_string(), "--ready-file"])
        .arg(&ready)
        .env_clear()
        .spawn()
        .unwrap();
    until("the holder is ready", || ready.exists());
    let said: Value = serde_json::from_str(&fs::read_to_string(&ready).unwrap()).unwrap();
    let peer = said["listen"].as_str().unwrap();
    let common = ["read", "--peer", peer, "--transport", "tcp", "--quick"];
    let neighbours = ["--what", "bare,leased", "--batch", "64", "--run", "8", "--size", "4KiB"];
    // One reader after the other.
    for _reader in 0..2 {
        let report = json(&[&common[..], &neighbours, &["--json"]].concat());
        let rows = report["rows"].as_array().unwrap();
        assert_eq!(rows.len(), 2);
        for row in rows {
            let works = number(row, "works_per_block");
            assert!((0.1..0.2).contains(&works), "{row}");
        }
    }
    let report = json(&[&common[..], &neighbours, &["--no-merge", "--json"]].concat());
    for row in report["rows"].as_array().unwrap() {
        assert!((0.9..=1.0).contains(&number(row, "works_per_block")), "{row}");
    }
    let lines = bench(&[&common[..], &["--what", "bare", "--batch", "1", "--lines"]].concat());
    let lines = String::from_utf8(lines.stdout).unwrap();
    let names: Vec<&str> = lines.lines().map(|line| line.rsplit_once(' ').unwrap().0).collect();
    let want = ["bandwidth 4096", "latency 4096", "bandwidth 65536", "latency 65536"];
    assert_eq!(names, want);
    hold.kill().unwrap();
    hold.wait().unwrap();
}

#[test]
fn an_interrupt_ends_a_bench_with_what_was_measured() {
    for arguments in [
        &["store", "--quick", "--rounds", "999"][..],
        &["read", "--quick", "--transport", "tcp", "--time", "10s", "--what", "bare"],
        &["registry", "--quick", "--rounds", "999"],
    ] {
        let child = command(arguments)
            .arg("--json")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        // Once the signal is caught: bit 2 of the mask is SIGINT.
        let status = format!("/proc/{}/status", child.id());
        until("it catches the signal", || {
            let text = fs::read_to_string(&status).unwrap();
            let mask = text.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(mask.trim(), 16).unwrap() & 2 != 0
        });
        kill_process(pid, Signal::INT).unwrap();
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{arguments:?}: {said}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["interrupted"], true);
    }
}
