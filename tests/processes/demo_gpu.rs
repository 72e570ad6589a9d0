//! `kvrail demo --gpu` on the stand-in driver: from one GPU's memory into another one's, with the ranks of the
//! demonstration in host memory.
#![cfg(feature = "gpu")]

use std::process::Command;

use serde_json::{Value, json};

use crate::cuda_standin::StandIn;
use crate::support::{BINARY, transport};

fn demo(standin: &StandIn) -> Value {
    let output = Command::new(BINARY)
        .args(["demo", "--json", "--gpu", "--gpu-driver"])
        .arg(standin.library())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ranks(report: &Value) -> Vec<Value> {
    let steps = report["ranks"].as_array().unwrap().iter();
    steps.map(|step| json!([step["A"], step["B"], step["C"]])).collect()
}

#[test]
fn blocks_go_from_gpu_memory_to_gpu_memory_with_the_ranks_of_any_block() {
    let Some(standin) = StandIn::new() else { return };
    // Cards reach the memory where there are any; else, and without, it is staged.
    for (control, way) in [("", "staging"), ("set registrable 1", "direct")] {
        standin.control(control);
        let report = demo(&standin);
        assert_eq!(report["transport"], transport());
        let way = if transport() == "verbs" { way } else { "staging" };
        assert_eq!((&report["gpu"], &report["verified"]), (&json!(way), &json!(true)));
        let transfers = [
            json!([1, null, null]),
            json!([2, 1, null]),
            json!([2, 2, 1]),
            json!([2, 2, null]),
            json!([2, 2, 1]),
        ];
        assert_eq!(ranks(&report)[..5], transfers);
    }
}

#[test]
fn without_a_driver_it_says_so() {
    let output = Command::new(BINARY)
        .args(["demo", "--gpu", "--gpu-driver", "/nowhere/libcuda.so.1"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("--gpu cannot be had"), "{said}");
}
