use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Command};

use super::layers::{names, variable};
use super::values::log_filter;
use super::*;
use crate::types::PolicyKind;

/// Flags as a command line has them.
fn flags<S: Args>(arguments: &[&str]) -> S {
    let command = S::augment_args(Command::new("test").no_binary_name(true));
    let matches = command.try_get_matches_from(arguments).unwrap();
    S::from_arg_matches(&matches).unwrap()
}

/// Names and values of variables.
type Variables<'a> = &'a [(&'a str, &'a str)];

/// A configuration from flags and variables alone.
fn serve(arguments: &[&str], variables: Variables<'_>) -> Result<ServeConfig, ConfigError> {
    let table: BTreeMap<&str, &str> = variables.iter().copied().collect();
    let lookup = |name: &str| table.get(name).map(OsString::from);
    ServeConfig::load_from(flags(arguments), Environment::of(&lookup))
}

/// A configuration with a file.
fn serve_with_file(
    text: &str,
    arguments: &[&str],
    variables: Variables<'_>,
) -> Result<ServeConfig, ConfigError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kvrail.toml");
    fs::write(&path, text).unwrap();
    let file = format!("--config={}", path.display());
    serve(&[&[&*file], arguments].concat(), variables)
}

#[test]
fn a_node_needs_no_more_than_a_pool() {
    let config = serve(&["--pool=1GiB"], &[]).unwrap();
    assert_eq!(config.peers.listen.to_string(), "0.0.0.0:7070");
    assert_eq!(config.door.socket, PathBuf::from("/run/kvrail.sock"));
    assert_eq!(config.door.mode, SocketMode(0o600));
    assert_eq!(config.store.capacity, 16_384);
    assert_eq!(config.store.policy, PolicyKind::Rank);
    assert!(config.store.hit_promotion);
    assert_eq!(config.lease.ttl, Duration::from_secs(10));
    assert_eq!(config.lease.margin, Duration::from_secs(1));
    assert_eq!((config.lease.bytes, config.lease.bytes_grow), (512 << 20, true));
    let told = serve(&["--pool=1GiB", "--lease-bytes=512MiB"], &[]).unwrap();
    assert_eq!((told.lease.bytes, told.lease.bytes_grow), (512 << 20, false));
    assert_eq!(config.peers.streams, 2);
    assert_eq!(config.process.log, "info");
    assert_eq!(config.process.metrics_listen, None);
    let bound = "10.0.0.7:7070".parse().unwrap();
    assert_eq!(config.peers.requester(bound).unwrap().as_str(), "10.0.0.7:7070");
}

#[test]
fn flags_win_over_variables_and_variables_over_the_file() {
    let file = "policy = 'aged'\nlease-quota = 3\nlock = true\npool = ['64MiB', '64MiB']\n";
    let table: [(&[&str], Variables<'_>, PolicyKind); 4] = [
        (&[], &[], PolicyKind::Aged),
        (&[], &[("KVRAIL_POLICY", "lru")], PolicyKind::Lru),
        (&["--policy=segmented"], &[("KVRAIL_POLICY", "lru")], PolicyKind::Segmented),
        (&[], &[("KVRAIL_POLICY", "")], PolicyKind::Aged),
    ];
    for (arguments, variables, policy) in table {
        let config = serve_with_file(file, arguments, variables).unwrap();
        assert_eq!(config.store.policy, policy, "{arguments:?} {variables:?}");
        assert_eq!(config.lease.leases, 3);
        assert!(config.memory.lock);
        assert_eq!(config.memory.pools.len(), 2);
    }
    let flag = serve_with_file(file, &["--lock=false", "--pool=1MiB"], &[]).unwrap();
    assert!(!flag.memory.lock);
    assert_eq!(flag.memory.pools.len(), 1);
}

#[test]
fn the_file_may_be_named_by_a_variable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("k.toml");
    fs::write(&path, "pool = '2MiB'").unwrap();
    let config = serve(&[], &[("KVRAIL_CONFIG", path.to_str().unwrap())]).unwrap();
    assert_eq!(config.memory.pools[0].size, Size(2 << 20));
}

#[test]
fn every_setting_can_be_given_in_each_of_the_three_places() {
    for name in names::<ServeSettings>() {
        let any_text = ["socket", "ready-file", "fault", "gpu-driver"].contains(&&*name);
        let origin = variable(&name);
        let refused = serve(&["--pool=1MiB"], &[(&origin, "== ==")]).is_err();
        // The pool on the command line wins, yet a wrong variable is refused.
        assert_eq!(refused, !any_text, "{origin}");
    }
    let config = serve(
        &["--pool=1MiB"],
        &[
            ("KVRAIL_SOCKET", "a"),
            ("KVRAIL_READY_FILE", "b"),
            ("KVRAIL_FAULT", "c"),
            ("KVRAIL_GPU_DRIVER", "d"),
        ],
    )
    .unwrap();
    assert_eq!(config.door.socket, PathBuf::from("a"));
    assert_eq!(config.process.ready_file, Some(PathBuf::from("b")));
    assert_eq!(config.fault.as_deref(), Some("c"));
    assert_eq!(config.gpu_driver, Some(PathBuf::from("d")));
    let error = serve(&[], &[("KVRAIL_LEASE_TTL", "soon")]).unwrap_err().to_string();
    assert!(error.starts_with("KVRAIL_LEASE_TTL: ") && error.contains("10s"), "{error}");
    let error = serve_with_file("lease-ttl = 'soon'", &[], &[]).unwrap_err().to_string();
    assert!(error.contains("key lease-ttl: ") && error.contains("10s"), "{error}");
}

#[test]
fn contradictions_are_refused_with_both_names() {
    let table: [(&[&str], &str, &str); 16] = [
        (
            &["--gpu=0", "--gpu-pool=1MiB", "--gpu-direct=require", "--transport=tcp"],
            "--gpu-direct",
            "--transport",
        ),
        (&["--transport=tcp", "--nic-pairs=a=b"], "--transport", "--nic-pairs"),
        (&["--rdma-device=a", "--nic-pairs=b=c"], "--rdma-device", "--nic-pairs"),
        (
            &["--gpu=0", "--gpu-pool=1MiB", "--rdma-device=a,b", "--gpu-nics=b,c"],
            "--rdma-device",
            "--gpu-nics",
        ),
        (
            &["--gpu=0", "--gpu-pool=1MiB", "--transport=tcp", "--gpu-nics=a"],
            "--transport",
            "--gpu-nics",
        ),
        (&["--transport=tcp", "--gid-index=1"], "--transport", "--gid-index"),
        (&["--transport=tcp", "--rdma-device=rxe0"], "--transport", "--rdma-device"),
        (&["--transport=shm", "--poll=busy"], "--transport", "--poll"),
        (&["--transport=shm", "--no-shm"], "--transport", "--no-shm"),
        (&["--lease-ttl=2s", "--lease-margin=1s"], "--lease-ttl", "--lease-margin"),
        (&["--lease-margin=5s"], "--lease-ttl", "--lease-margin"),
        (&["--watermark-low=95"], "--watermark-low", "--watermark-high"),
        (&["--watermark-high=50"], "--watermark-low", "--watermark-high"),
        (&["--registry=http://head:7071"], "--registry", "--advertise"),
        (&["--huge-pages=1GiB"], "--pool", "--huge-pages"),
        (
            &["--listen=127.0.0.1:7070", "--metrics-listen=127.0.0.1:7070"],
            "--metrics-listen",
            "--listen",
        ),
    ];
    for (arguments, first, second) in table {
        let all = [&["--pool=64MiB"], arguments].concat();
        let error = serve(&all, &[]).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, ConfigError::Contradiction { .. }), "{text}");
        assert!(text.contains(first) && text.contains(second), "{text}");
        assert!(!text.contains('\n'), "{text}");
    }
    let long = format!("--advertise={}:7070", "h".repeat(64));
    let text = serve(&["--pool=1MiB", &long], &[]).unwrap_err().to_string();
    assert!(text.contains("--advertise") && text.contains("--requester-id"), "{text}");
    assert!(serve(&["--pool=1MiB", &long, "--requester-id=r"], &[]).is_ok());
    assert!(serve(&["--pool=1MiB", "--lease-ttl=2001ms", "--lease-margin=1s"], &[]).is_ok());
}

#[test]
fn values_that_can_never_work_are_refused_with_the_setting() {
    let long = format!("--socket=/{}", "s".repeat(107));
    let many = format!("--pool={}", ["1MiB"; 17].join(","));
    let table: [(&[&str], &str); 6] = [
        (&[], "--pool"),
        (&["--pool=1MiB", "--advertise=0.0.0.0:7070"], "--advertise"),
        (&["--pool=1MiB", "--cluster-secret-file=/nonexistent/secret"], "--cluster-secret-file"),
        (&["--pool=1MiB", "--config=/nonexistent/kvrail.toml"], "--config"),
        (&["--pool=1MiB", &long], "--socket"),
        (&[&many], "--pool"),
    ];
    for (arguments, setting) in table {
        let text = serve(arguments, &[]).unwrap_err().to_string();
        assert!(text.contains(setting) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn files_are_refused_with_what_is_wrong_in_them() {
    let table = [
        ("lease-tll = '10s'", "\"lease-tll\""),
        ("config = 'other.toml'", "\"config\""),
        ("[serve]\npool = '1MiB'", "\"serve\""),
        ("pool = 1.5", "key pool"),
        ("pool = [['1MiB']]", "key pool"),
        ("\npool = ", "line 2"),
        ("streams = 17", "key streams"),
        ("capacity = 0", "key capacity"),
        ("log = '=='", "key log"),
    ];
    for (text, part) in table {
        let error = serve_with_file(text, &[], &[]).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{text:?}: {error}");
    }
}

#[test]
fn a_secret_is_read_once_and_never_shown() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("secret");
    let flag = format!("--cluster-secret-file={}", path.display());
    fs::write(&path, "0123456789abcdef\n").unwrap();
    let config = serve(&["--pool=1MiB", &flag], &[]).unwrap();
    assert_eq!(config.peers.secret.as_ref().unwrap().as_bytes(), b"0123456789abcdef");
    assert!(!format!("{config:?}").contains("0123456789"));
    fs::write(&path, "short").unwrap();
    assert!(serve(&["--pool=1MiB", &flag], &[]).is_err());
}

#[test]
fn sizes_are_exact_or_refused() {
    let table = [
        ("0", Some(0)),
        ("4096", Some(4096)),
        ("4096B", Some(4096)),
        ("64KiB", Some(65_536)),
        ("512MiB", Some(512 << 20)),
        ("512 MiB", Some(512 << 20)),
        ("30GiB", Some(30 << 30)),
        ("2TiB", Some(2 << 40)),
        ("1KB", Some(1000)),
        ("1GB", Some(1_000_000_000)),
        ("", None),
        ("MiB", None),
        ("-1MiB", None),
        ("+1MiB", None),
        ("1.5GiB", None),
        ("1e3", None),
        ("12XiB", None),
        ("1mib", None),
        ("99999999999TiB", None),
        ("99999999999999999999", None),
    ];
    for (text, bytes) in table {
        assert_eq!(text.parse::<Size>().ok(), bytes.map(Size), "{text:?}");
    }
    for text in ["512MiB", "30GiB", "65537B", "0B", "1TiB"] {
        assert_eq!(text.parse::<Size>().unwrap().to_string(), text);
    }
}

#[test]
fn other_values_are_taken_or_refused() {
    let pool = "30GiB@numa=1".parse::<PoolSpec>().unwrap();
    assert_eq!((pool.size, pool.numa), (Size(30 << 30), Some(1)));
    for text in ["", "1KiB", "1GiB@", "1GiB@numa", "1GiB@numa=x", "1GiB@node=1"] {
        assert!(text.parse::<PoolSpec>().is_err(), "{text:?}");
    }
    for text in ["h:1", "10.0.0.7:7070", "[fd00::7]:7070"] {
        assert!(text.parse::<HostPort>().is_ok(), "{text:?}");
    }
    for text in ["", "h", ":1", "h:0", "h:65536", "fd00::7:1", "http://h:1", "h h:1", "[x]:1"] {
        assert!(text.parse::<HostPort>().is_err(), "{text:?}");
    }
    assert_eq!("http://h:1/".parse::<RegistryUrl>().unwrap().as_str(), "http://h:1");
    let cluster = "redis://h:1,[fd00::7]:2/".parse::<RegistryUrl>().unwrap();
    assert_eq!(cluster.as_str(), "redis://h:1,[fd00::7]:2");
    assert_eq!(cluster.redis_servers(), ["h:1", "[fd00::7]:2"]);
    for text in ["h:1", "https://h:1", "http://h", "http://h:1/x", "http://h:1,h:2", "redis://h"] {
        assert!(text.parse::<RegistryUrl>().is_err(), "{text:?}");
    }
    assert_eq!("660".parse(), Ok(SocketMode(0o660)));
    for text in ["", "8", "1000", "-1", "+7", "rw"] {
        assert!(text.parse::<SocketMode>().is_err(), "{text:?}");
    }
    for text in ["0", "101", "", "a"] {
        assert!(text.parse::<Percent>().is_err(), "{text:?}");
    }
    for text in ["", "0s", "10", "ten"] {
        assert!(duration(text).is_err(), "{text:?}");
    }
    for text in ["", "7070", ":7070", "localhost:7070", "10.0.0.7", "10.0.0.7:70000"] {
        let sentence = socket_address(text).unwrap_err();
        assert!(sentence.contains("IP:PORT") && sentence.contains("0.0.0.0:7070"), "{sentence}");
    }
    for text in ["info", "WARN", "off", "kvrail=debug", "warn,kvrail::net=trace"] {
        assert_eq!(log_filter(text).as_deref(), Ok(text));
    }
    for text in ["", "inof", "kvrail", "warn,", "info,kvrail", "kvrail=loud"] {
        let sentence = log_filter(text).unwrap_err();
        assert!(sentence.contains("target=level"), "{sentence}");
    }
}

#[test]
fn a_registry_has_defaults_and_refuses_one_port_for_two() {
    let nothing = |_: &str| None;
    let load =
        |arguments: &[&str]| RegistryConfig::load_from(flags(arguments), Environment::of(&nothing));
    let config = load(&[]).unwrap();
    assert_eq!(config.listen.to_string(), "0.0.0.0:7071");
    assert_eq!(config.node_lease, Duration::from_secs(10));
    for (listen, metrics, good) in [
        ("0.0.0.0:7071", "0.0.0.0:7071", false),
        ("0.0.0.0:7071", "127.0.0.1:7071", false),
        ("127.0.0.1:7071", "0.0.0.0:7071", false),
        ("127.0.0.1:7071", "[::]:7071", false),
        ("[::]:7071", "[::1]:7071", false),
        ("127.0.0.1:7071", "127.0.0.2:7071", true),
        ("0.0.0.0:7071", "[::1]:7071", true),
        ("0.0.0.0:7071", "0.0.0.0:7072", true),
        ("0.0.0.0:0", "0.0.0.0:0", true),
    ] {
        let both = [format!("--listen={listen}"), format!("--metrics-listen={metrics}")];
        assert_eq!(load(&both.each_ref().map(String::as_str)).is_ok(), good, "{both:?}");
    }
    for lease in ["1ms", "2h"] {
        let refused = load(&["--node-lease", lease]).unwrap_err().to_string();
        assert!(refused.starts_with("--node-lease: it takes 100ms to 1h"), "{refused}");
    }
}

/// README's table lists every setting with the first sentence of its help: the expected lines are
/// printed where it does not.
fn documented<S: Args>(command: &str) {
    let heading = format!("\n`kvrail {command}`:\n\n");
    let (_, table) = include_str!("../../README.md").split_once(&heading).unwrap();
    let table = table.split("\n\n").next().unwrap();
    let all = S::augment_args(Command::new("settings"));
    let mut missing = Vec::new();
    for argument in all.get_arguments().filter(|argument| !argument.is_hide_set()) {
        let name = argument.get_long().unwrap();
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.len() > 10, "--{name} of {command} has no help");
        assert!(!help.contains('|'), "--{name}: a bar ends a table's cell");
        let line = format!("| `--{name}` | `{}` | {help} |", variable(name));
        if !table.contains(&line) {
            missing.push(line);
        }
    }
    let table = missing.join("\n");
    assert!(missing.is_empty(), "README.md lacks these lines under `{command}`:\n{table}");
}

#[test]
fn every_setting_is_in_the_readme() {
    documented::<ServeSettings>("serve");
    documented::<RegistrySettings>("registry");
}
