//! Settings that cannot work: `serve` and `registry` say so in one sentence, exit with code 2, and
//! leave neither a socket nor a file.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::support::BINARY;

struct Scene(TempDir);

impl Scene {
    fn new() -> Self {
        Self(TempDir::with_prefix("kvrail-test-").unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn file(&self, name: &str, text: &str) -> String {
        fs::write(self.0.path().join(name), text).unwrap();
        self.path(name)
    }

    fn names(&self) -> Vec<std::ffi::OsString> {
        let entries = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    fn refused(&self, arguments: &[&str], part: &str) {
        let before = self.names();
        let output = Command::new(BINARY).args(arguments).env_clear().output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(last.starts_with("kvrail: ") && last.contains(part), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        assert!(output.stdout.is_empty());
        assert_eq!(self.names(), before, "{arguments:?}");
    }

    /// `serve` with what it needs, and one setting that is wrong.
    fn serve(&self, wrong: &[&str], part: &str) {
        let socket = self.path("node.sock");
        let mut arguments = vec!["serve", "--transport", "tcp"];
        for (flag, value) in
            [("--socket", socket.as_str()), ("--pool", "1MiB"), ("--listen", "127.0.0.1:0")]
        {
            if !wrong.contains(&flag) {
                arguments.extend([flag, value]);
            }
        }
        arguments.extend(wrong);
        self.refused(&arguments, part);
    }
}

#[test]
fn a_node_that_cannot_be_is_refused() {
    let scene = Scene::new();
    let absent = scene.path("absent");
    let file = scene.file("file", "no settings\n");
    let empty = scene.file("empty", "");
    let foreign = scene.path("foreign.toml");
    fs::write(&foreign, b"log = 'warn'\npolicy = '\xff'\n").unwrap();
    let directory = scene.0.path().display().to_string();

    scene.serve(&["--pool", "1024TiB"], "make the pool smaller");
    scene.serve(&["--pool", "0"], "--pool");
    scene.serve(&["--pool", "1MiB@numa=999"], "999");
    scene.serve(&["--huge-pages", "2MiB"], "--huge-pages");
    scene.serve(&["--socket", &format!("{absent}/node.sock")], "absent");
    scene.serve(&["--socket", &file], "is not a socket");
    scene.serve(&["--socket", &format!("{directory}/{}", "s".repeat(120))], "107");
    scene.serve(&["--cluster-secret-file", &absent], "absent");
    scene.serve(&["--cluster-secret-file", &empty], "empty");
    scene.serve(&["--cluster-secret-file", &directory], "--cluster-secret-file");
    // Files without an end.
    scene.serve(&["--cluster-secret-file", "/dev/zero"], "--cluster-secret-file: /dev/zero");
    scene.serve(&["--config", "/dev/zero"], "--config: /dev/zero");
    for config in [&absent, &file, &directory] {
        scene.serve(&["--config", config], config);
    }
    scene.serve(&["--config", &foreign], "line 2: it is not UTF-8");
    scene.serve(&["--ready-file", &format!("{absent}/ready")], "--ready-file");
    scene.serve(&["--listen", "192.0.2.1:0"], "192.0.2.1");
    scene.serve(&["--metrics-listen", "192.0.2.1:0"], "--metrics-listen");
    scene.serve(&["--registry", "nowhere"], "--registry");
    scene.serve(&["--registry", "http://127.0.0.1:1", "--listen", "0.0.0.0:0"], "--advertise");
    scene.serve(&["--node-id", "me"], "--node-id");
    scene.serve(&["--streams", "0"], "--streams");
    scene.serve(&["--watermark-low", "99"], "--watermark-low");
    for margin in [&["--lease-ttl", "50ms", "--lease-margin", "1ms"][..], &["--lease-ttl", "2h"]] {
        scene.serve(margin, "--lease-ttl: it takes 100ms to 1h");
    }
    scene.serve(&["--lease-bytes", "0"], "--lease-bytes");
    scene.serve(&["--transfer-timeout", "1us"], "--transfer-timeout: it takes 10ms to 1h");
    scene.serve(
        &["--listen", "0.0.0.0:7", "--metrics-listen", "[::]:7"],
        "--metrics-listen and --listen",
    );
    scene.serve(&["--listen", "here:7070"], "IP:PORT");
    scene.serve(&["--log", "loud=very"], "--log");
    scene.serve(&["--log", "inof"], "--log");
    scene.serve(&["--log", "info", "--gid-index", "-1"], "-1 is not in 0..=255");
    scene.serve(&["--fault", "die"], "ACTION:POINT");
    assert!(Path::new(&file).exists() && Path::new(&empty).exists());
}

#[test]
fn a_registry_that_cannot_be_is_refused() {
    let scene = Scene::new();
    let absent = scene.path("absent");
    let file = scene.file("file", "listen = 7\n");
    let registry = |wrong: &[&str], part: &str| {
        let listen = ["registry", "--listen", "127.0.0.1:0"];
        let skip = if wrong.contains(&"--listen") { &listen[..1] } else { &listen[..] };
        scene.refused(&[skip, wrong].concat(), part);
    };
    registry(&["--listen", "192.0.2.1:0"], "--listen");
    registry(&["--listen", "here"], "--listen");
    registry(&["--metrics-listen", "192.0.2.1:0"], "--metrics-listen");
    registry(&["--config", &absent], &absent);
    registry(&["--config", &file], "listen");
    registry(&["--node-lease", "0s"], "--node-lease");
    registry(&["--ready-file", &format!("{absent}/ready")], "--ready-file");
    registry(&["now"], "now");
}

/// A slip of the pen in a variable's name would silently do nothing.
#[test]
fn a_variable_that_is_nearly_a_settings_is_told_of_once() {
    let scene = Scene::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let of_a_cluster = [
        ("KVRAIL_SERVICE_HOST", "10.0.0.1"),
        ("KVRAIL_PORT", "tcp://10.0.0.1:9000"),
        ("KVRAIL_PORT_9000_TCP", "tcp://10.0.0.1:9000"),
        ("KVRAIL_REGISTRY_PORT", "tcp://10.0.0.2:7071"),
    ];
    let said = |arguments: &[&str], slips: &[(&str, &str)]| {
        let output = Command::new(BINARY)
            .args(arguments)
            .env_clear()
            .envs(of_a_cluster.iter().chain(slips).copied())
            .output()
            .unwrap();
        String::from_utf8(output.stderr).unwrap()
    };
    let slips = [("KVRAIL_NODE_LEESE", "1s"), ("KVRAIL_GPU_POOl", "1GiB")];
    let told = said(&["registry", "--listen", &address], &slips);
    let lines: Vec<&str> = told.lines().collect();
    let [pool, lease, refusal] = lines[..] else { panic!("{told}") };
    assert!(pool.contains("KVRAIL_GPU_POOL") && pool.contains("KVRAIL_GPU_POOl"), "{told}");
    assert!(lease.contains("KVRAIL_NODE_LEASE") && lease.contains("KVRAIL_NODE_LEESE"), "{told}");
    assert!(refusal.starts_with("kvrail: --listen: "), "{told}");

    // A client reads one variable, and tells of no other.
    let nowhere = scene.path("nowhere");
    let variables = [slips[0], ("KVRAIL_SOKET", "/a"), ("XDG_RUNTIME_DIR", nowhere.as_str())];
    let told = said(&["stat"], &variables);
    let [slip, refusal] = told.lines().collect::<Vec<_>>()[..] else { panic!("{told}") };
    assert!(slip.contains("KVRAIL_SOKET") && slip.contains("KVRAIL_SOCKET"), "{told}");
    assert!(refusal.contains("nowhere/kvrail.sock"), "{told}");
    let told = said(&["stat", "--socket", &nowhere], &variables);
    assert_eq!(told.lines().count(), 1, "{told}");
}
