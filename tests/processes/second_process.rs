//! A process that wants what another one has is refused, in one sentence, and the other one goes on.

use std::process::{Command, Output};

use kvrail::cli::cluster::Process;
use kvrail::protocol::door::Source;

use crate::support::{BINARY, Blocks, Counts, cluster, http_get, read, save_unannounced};

fn kvrail(arguments: &[&str]) -> Output {
    Command::new(BINARY).args(arguments).env_clear().output().unwrap()
}

fn refused(arguments: &[&str], part: &str) {
    let output = kvrail(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("kvrail: ") && said.contains(part), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

fn unharmed(node: &Process, blocks: &Blocks) {
    let client = node.client().unwrap();
    assert_eq!(read(&client, blocks, Source::Here), Counts::all_ready(blocks.len()));
}

#[test]
fn the_second_one_is_refused() {
    let cluster = cluster();
    let scraped = ["--metrics-listen", "127.0.0.1:0"];
    let registry = cluster.registry("registry", &scraped).unwrap();
    let (registers, registry_metrics) =
        (registry.addresses().unwrap().listen, registry.addresses().unwrap().metrics.unwrap());
    let node = cluster.node("node", registers, &scraped).unwrap();
    let addresses = node.addresses().unwrap().clone();
    let blocks = Blocks::small("of the first");
    save_unannounced(&node.client().unwrap(), &blocks);

    let own = cluster.path().join("own.sock").display().to_string();
    let tcp = ["--transport", "tcp"];
    let serve = ["serve", "--pool", "1MiB", "--listen", "127.0.0.1:0", "--socket", &own];
    let with = |flag, value: &str, part: &str| {
        let mut arguments: Vec<&str> = Vec::new();
        for pair in serve[1..].chunks(2).filter(|pair| pair[0] != flag) {
            arguments.extend(pair);
        }
        let arguments = [&["serve"][..], &tcp, &arguments, &[flag, value]].concat();
        refused(&arguments, part);
        unharmed(&node, &blocks);
    };
    let socket = addresses.socket.unwrap().display().to_string();
    with("--socket", &socket, "answers at");
    with("--listen", &addresses.listen.to_string(), &addresses.listen.to_string());
    let metrics = addresses.metrics.unwrap();
    with("--metrics-listen", &metrics.to_string(), "--metrics-listen");
    assert!(!std::path::Path::new(&own).exists(), "a refused node leaves its socket");

    refused(&["registry", "--listen", &registers.to_string()], "--listen");
    let taken = ["registry", "--listen", "127.0.0.1:0", "--metrics-listen"];
    refused(&[&taken[..], &[&registry_metrics.to_string()]].concat(), "--metrics-listen");
    assert_eq!(http_get(registry_metrics, "/health").0, 200);
    assert_eq!(http_get(metrics, "/health").0, 200);
}
