//! Whole hosts, imitated: what the doctor says about each.

use std::process::ExitCode;

use super::*;
use crate::memory::{Climb, Rung, RungRefused};
use crate::sys::confinement::Container;

/// A host that could carry RDMA if it had a device: libraries, modules, memory, no limit in the way.
const SOUND: [(&str, &str); 16] = [
    ("proc/sys/kernel/osrelease", "6.12.9-amd64\n"),
    ("proc/modules", "ib_uverbs 1 0 - Live 0x0\nmlx5_ib 1 0 - Live 0x0\nrdma_rxe 1 0 - Live 0x0\n"),
    (
        "proc/self/limits",
        "Max open files 1024 1048576 files\nMax locked memory unlimited unlimited bytes\n",
    ),
    ("proc/self/status", "CapEff:\t00000000a80425fb\nSeccomp:\t0\n"),
    ("proc/self/uid_map", "0 0 4294967295\n"),
    ("proc/self/cgroup", "0::/\n"),
    ("proc/sys/vm/max_map_count", "65530\n"),
    ("proc/meminfo", "MemAvailable: 16777216 kB\n"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "512\n"),
    ("sys/devices/system/node/online", "0\n"),
    ("usr/lib64/libibverbs.so.1", ""),
    ("usr/lib64/libibverbs/libmlx5-rdmav34.so", ""),
    ("usr/lib64/libibverbs/librxe-rdmav34.so", ""),
    ("etc/libibverbs.d/mlx5.driver", "driver mlx5\n"),
    ("etc/libibverbs.d/rxe.driver", "driver rxe\n"),
    ("sys/class/net/eth7/operstate", "up\n"),
];

type Tree = (tempfile::TempDir, HostRoot);

fn sound() -> Tree {
    HostRoot::imitation(&SOUND)
}

/// Adds a RoCE port that is up, with an IPv4 address and room for whole packets.
fn add_port(root: &HostRoot, device: &str, number: u32, interface: &str) {
    let port = format!("sys/class/infiniband/{device}/ports/{number}");
    for (file, text) in [
        ("state", "4: ACTIVE\n"),
        ("phys_state", "5: LinkUp\n"),
        ("link_layer", "Ethernet\n"),
        ("rate", "100 Gb/sec (4X EDR)\n"),
        ("gids/0", "fe80:0000:0000:0000:4c3d:57ff:fe99:8cd2\n"),
        ("gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n"),
        ("gids/2", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n"),
        ("gids/3", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
        ("gid_attrs/types/0", "RoCE v2\n"),
        ("gid_attrs/types/1", "IB/RoCE v1\n"),
        ("gid_attrs/types/2", "RoCE v2\n"),
        ("gid_attrs/ndevs/0", interface),
    ] {
        root.write(&format!("{port}/{file}"), text);
    }
    root.write(&format!("sys/class/net/{interface}/mtu"), "9000\n");
}

fn add_device(root: &HostRoot, name: &str, uverbs: &str) {
    root.write(&format!("sys/class/infiniband/{name}/node_type"), "1: CA\n");
    root.write(&format!("sys/class/infiniband_verbs/{uverbs}/ibdev"), name);
    root.write(&format!("dev/infiniband/{uverbs}"), "");
}

fn mlx5() -> Tree {
    let (directory, root) = sound();
    add_device(&root, "mlx5_0", "uverbs0");
    root.link("sys/class/infiniband/mlx5_0/device/driver", "../../bus/pci/drivers/mlx5_core");
    root.write("sys/class/infiniband/mlx5_0/device/numa_node", "1\n");
    root.write("sys/devices/system/node/online", "0-1\n");
    add_port(&root, "mlx5_0", 1, "eth0");
    add_port(&root, "mlx5_0", 2, "eth1");
    (directory, root)
}

fn rxe() -> Tree {
    let (directory, root) = sound();
    add_device(&root, "rxe0", "uverbs0");
    root.write("sys/class/infiniband/rxe0/node_desc", "rxe\n");
    add_port(&root, "rxe0", 1, "d0");
    (directory, root)
}

fn of(root: &HostRoot, wanted: Wanted) -> Report {
    examine(Host::new(root.clone(), wanted))
}

fn all<'a>(report: &'a Report, check: &str) -> Vec<&'a Finding> {
    report.findings.iter().filter(|finding| finding.check == check).collect()
}

fn only<'a>(report: &'a Report, check: &str) -> &'a Finding {
    let found = all(report, check);
    assert_eq!(found.len(), 1, "{check}: {found:?}");
    found[0]
}

fn not_ok(report: &Report) -> Vec<(&'static str, Status)> {
    let bad = report.findings.iter().filter(|finding| finding.status != Status::Ok);
    bad.map(|finding| (finding.check, finding.status)).collect()
}

/// Every line that is not ok has a remedy, and no other has one.
fn remedied(report: &Report) {
    for finding in &report.findings {
        assert_eq!(finding.remedy.is_some(), finding.status != Status::Ok, "{finding:?}");
    }
}

#[test]
fn a_sound_host_with_two_ports_is_ok_line_by_line() {
    let (_directory, root) = mlx5();
    for wanted in [Wanted::Auto, Wanted::Verbs, Wanted::Tcp] {
        let report = of(&root, wanted);
        assert_eq!((not_ok(&report), report.verdict), (vec![], Status::Ok));
        remedied(&report);
    }
    let report = of(&root, Wanted::Auto);
    assert_eq!(all(&report, "port").len(), 2);
    assert!(all(&report, "gid")[1].what.starts_with("mlx5_0 port 2: GID 2 of 3, 10.77.0.1"));
    assert!(only(&report, "numa").what.contains("@numa=1"));
    assert!(only(&report, "provider").what.ends_with("/usr/lib64/libibverbs/libmlx5-rdmav34.so"));
}

#[test]
fn a_host_without_devices_is_warned_unless_rdma_was_asked_for() {
    let (_directory, root) = sound();
    let report = of(&root, Wanted::Auto);
    assert_eq!(not_ok(&report), [("device", Status::Warn), ("transport", Status::Warn)]);
    assert!(only(&report, "transport").what.contains("kvrail will use TCP"));
    let remedy = only(&report, "device").remedy.as_deref().unwrap();
    assert!(remedy.ends_with("rdma link add rxe0 type rxe netdev eth7"), "{remedy}");
    remedied(&report);
    let report = of(&root, Wanted::Verbs);
    assert_eq!(not_ok(&report), [("device", Status::Fail), ("transport", Status::Fail)]);
    assert_eq!(of(&root, Wanted::Tcp).verdict, Status::Ok);
}

#[test]
fn a_bare_host_fails_only_where_rdma_was_asked_for() {
    let (_directory, root) = HostRoot::imitation(&[]);
    let checks = |wanted| {
        let report = of(&root, wanted);
        remedied(&report);
        (report.verdict, report.findings.len())
    };
    assert_eq!(checks(Wanted::Verbs).0, Status::Fail);
    assert_eq!(checks(Wanted::Auto).0, Status::Warn);
    assert!(checks(Wanted::Tcp).1 < checks(Wanted::Auto).1);
}

#[test]
fn soft_roce_works_and_knows_that_it_is_software() {
    let (_directory, root) = rxe();
    root.write("sys/devices/system/node/online", "0-1\n");
    let report = of(&root, Wanted::Verbs);
    assert_eq!(not_ok(&report), []);
    assert!(only(&report, "device").what.contains("rxe0, by rxe"));
    assert!(only(&report, "numa").what.contains("software"));
    assert!(only(&report, "provider").what.ends_with("librxe-rdmav34.so"));
}

#[test]
fn one_port_that_is_down_is_a_warning_and_both_are_a_failure() {
    let (_directory, root) = mlx5();
    root.write("sys/class/infiniband/mlx5_0/ports/2/state", "1: DOWN\n");
    root.write("sys/class/infiniband/mlx5_0/ports/2/phys_state", "3: Disabled\n");
    let report = of(&root, Wanted::Verbs);
    assert_eq!(not_ok(&report), [("port", Status::Warn)]);
    let down = all(&report, "port")[1];
    assert_eq!(down.what, "mlx5_0 port 2 is DOWN, Disabled, Ethernet");
    assert!(down.remedy.as_deref().unwrap().starts_with("ip link set dev eth1 up"));
    root.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n");
    for wanted in [Wanted::Auto, Wanted::Verbs] {
        assert_eq!(of(&root, wanted).verdict, Status::Fail, "a device is there to be used");
    }
    assert_eq!(of(&root, Wanted::Tcp).verdict, Status::Ok);
}

#[test]
fn a_second_device_makes_up_for_the_first() {
    let (_directory, root) = mlx5();
    add_device(&root, "mlx5_1", "uverbs1");
    root.write("sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN\n");
    let report = of(&root, Wanted::Verbs);
    assert_eq!(report.verdict, Status::Warn);
    assert_eq!(only(&report, "transport").status, Status::Ok);
    std::fs::remove_file(root.path("dev/infiniband/uverbs0")).unwrap();
    let report = of(&root, Wanted::Verbs);
    assert_eq!(only(&report, "transport").status, Status::Fail);
    assert!(all(&report, "permission")[0].remedy.is_some());
}

#[test]
fn addresses_are_scored_in_the_table_and_poor_ones_warned_of() {
    let (_directory, root) = rxe();
    let report = of(&root, Wanted::Auto);
    let chosen: Vec<u32> =
        report.gids.iter().filter(|gid| gid.chosen).map(|gid| gid.index).collect();
    assert_eq!((report.gids.len(), chosen), (3, vec![2]));
    let v1 = report.gids.iter().find(|gid| gid.index == 1).unwrap();
    assert_eq!((v1.kind, v1.rank), ("RoCE v1", 1));
    std::fs::remove_file(root.path("sys/class/infiniband/rxe0/ports/1/gids/2")).unwrap();
    let report = of(&root, Wanted::Verbs);
    assert_eq!(not_ok(&report), [("gid", Status::Warn)]);
    assert!(only(&report, "gid").remedy.as_deref().unwrap().contains("dev d0"));
    std::fs::remove_dir_all(root.path("sys/class/infiniband/rxe0/ports/1/gids")).unwrap();
    assert_eq!(only(&of(&root, Wanted::Verbs), "gid").status, Status::Fail);
}

#[test]
fn small_packets_are_a_warning_and_none_a_failure() {
    let (_directory, root) = rxe();
    for (mtu, status) in [("4192", Status::Ok), ("1500", Status::Warn), ("300", Status::Fail)] {
        root.write("sys/class/net/d0/mtu", mtu);
        assert_eq!(only(&of(&root, Wanted::Auto), "mtu").status, status, "{mtu}");
    }
}

fn memlock(root: &HostRoot, soft: &str) {
    root.write(
        "proc/self/limits",
        &format!("Max open files 1024 1048576 files\nMax locked memory {soft} {soft} bytes\n"),
    );
}

#[test]
fn memory_that_may_not_be_registered_fails_before_a_node_does() {
    let (_directory, root) = mlx5();
    let at = |soft, wanted| {
        memlock(&root, soft);
        let report = of(&root, wanted);
        (only(&report, "memlock").clone(), only(&report, "capability").status)
    };
    let (found, capability) = at("65536", Wanted::Auto);
    assert_eq!((found.status, capability), (Status::Fail, Status::Fail));
    assert!(found.what.contains("64.0 KiB") && found.remedy.unwrap().contains("LimitMEMLOCK"));
    assert_eq!(at("1073741824", Wanted::Verbs).0.status, Status::Warn, "less than is available");
    assert_eq!(at("34359738368", Wanted::Verbs).0.status, Status::Ok, "more than is available");
    // With the capability the limit is not asked.
    root.write("proc/self/status", "CapEff:\t00000000a80465fb\nSeccomp:\t0\n");
    assert_eq!(
        at("65536", Wanted::Verbs),
        (Finding::ok("memlock", "64.0 KiB, which CAP_IPC_LOCK lifts"), Status::Ok)
    );
    root.write("proc/self/uid_map", "0 100000 65536\n");
    assert_eq!(at("65536", Wanted::Verbs).0.status, Status::Fail, "a user namespace of its own");
    let (_directory, root) = sound();
    memlock(&root, "65536");
    assert_eq!(only(&of(&root, Wanted::Auto), "memlock").status, Status::Warn, "no device");
}

#[test]
fn a_container_is_told_what_to_be_started_with() {
    let (_directory, root) = mlx5();
    memlock(&root, "65536");
    root.write(".dockerenv", "");
    root.write("proc/self/status", "CapEff:\t00000000a80425fb\nSeccomp:\t2\n");
    std::fs::remove_dir_all(root.path("dev/infiniband")).unwrap();
    let report = of(&root, Wanted::Auto);
    let remedy = |check| only(&report, check).remedy.as_deref().unwrap();
    assert!(remedy("memlock").contains("--ulimit memlock=-1"));
    assert!(remedy("capability").contains("--cap-add=IPC_LOCK"));
    assert!(remedy("permission").contains("--device=/dev/infiniband"));
    assert!(remedy("seccomp").contains("--cap-add=SYS_NICE"));
    root.write("var/run/secrets/kubernetes.io/x", "");
    let report = of(&root, Wanted::Auto);
    assert!(only(&report, "capability").remedy.as_deref().unwrap().contains("securityContext"));
}

#[test]
fn refusals_of_a_device_differ_by_cause() {
    let of = |errno, container| {
        rdma::refusal(&io::Error::from_raw_os_error(errno), "/dev/infiniband/uverbs0", container)
    };
    assert!(of(libc::EACCES, None).starts_with("chmod"));
    assert!(of(libc::EACCES, Some(Container::Other)).starts_with("chmod"), "it is there");
    assert!(of(libc::ENOENT, None).starts_with("udevadm"));
    assert!(of(libc::EPERM, Some(Container::Other)).contains("--device"));
    assert!(of(libc::EPERM, Some(Container::Kubernetes)).contains("plugin"));
}

#[test]
fn libraries_and_providers_that_are_missing_fail() {
    let (_directory, root) = mlx5();
    std::fs::remove_file(root.path("usr/lib64/libibverbs/libmlx5-rdmav34.so")).unwrap();
    assert_eq!(only(&of(&root, Wanted::Auto), "provider").status, Status::Fail);
    std::fs::remove_file(root.path("usr/lib64/libibverbs.so.1")).unwrap();
    assert_eq!(only(&of(&root, Wanted::Auto), "libibverbs").status, Status::Fail);
    let (_directory, root) = sound();
    std::fs::remove_file(root.path("usr/lib64/libibverbs.so.1")).unwrap();
    assert_eq!(only(&of(&root, Wanted::Auto), "libibverbs").status, Status::Warn);
}

#[test]
fn a_card_without_its_module_is_seen() {
    let (_directory, root) = sound();
    root.write("proc/modules", "ib_uverbs 1 0 - Live 0x0\nmlx5_core 1 0 - Live 0x0\n");
    root.write("sys/bus/pci/devices/0000:3b:00.0/vendor", "0x15b3\n");
    root.write("sys/bus/pci/devices/0000:3b:00.0/class", "0x020000\n");
    root.write("lib/modules/6.12.9-amd64/modules.dep", "kernel/x/mlx5_ib.ko.xz:\n");
    let report = of(&root, Wanted::Verbs);
    let module = all(&report, "module").into_iter().find(|it| it.what.contains("mlx5_ib")).unwrap();
    assert_eq!((module.status, module.remedy.as_deref()), (Status::Fail, Some("modprobe mlx5_ib")));
    assert!(only(&report, "device").what.contains("network card is there"));
}

#[test]
fn devices_that_cannot_read_remotely_are_refused() {
    let (_directory, root) = rxe();
    root.write("sys/class/infiniband/rxe0/node_type", "4: RNIC\n");
    assert!(only(&of(&root, Wanted::Auto), "device").what.contains("iWARP"));
    root.write("sys/class/infiniband/rxe0/node_type", "8: unspecified\n");
    assert_eq!(only(&of(&root, Wanted::Auto), "device").status, Status::Fail);
}

#[test]
fn memory_is_bounded_by_the_container() {
    let (_directory, root) = sound();
    root.write("sys/fs/cgroup/memory.max", "104857600\n");
    root.write("sys/fs/cgroup/memory.current", "1048576\n");
    let report = of(&root, Wanted::Tcp);
    assert_eq!((only(&report, "memory").status, report.verdict), (Status::Fail, Status::Fail));
    assert!(only(&report, "memory").remedy.as_deref().unwrap().contains("MemoryMax="));
    root.write("proc/meminfo", "MemAvailable: 1048576 kB\n");
    root.write("sys/fs/cgroup/memory.max", "max\n");
    assert_eq!(only(&of(&root, Wanted::Tcp), "memory").status, Status::Warn);
}

#[test]
fn limits_of_the_process_and_huge_pages_are_warned_of() {
    let (_directory, root) = mlx5();
    root.write(
        "proc/self/limits",
        "Max open files 256 1024 files\nMax locked memory unlimited unlimited bytes\n",
    );
    root.write("proc/sys/vm/max_map_count", "1000\n");
    root.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0\n");
    let warned = [
        ("huge-pages", Status::Warn),
        ("open-files", Status::Warn),
        ("max_map_count", Status::Warn),
    ];
    assert_eq!(not_ok(&of(&root, Wanted::Auto)), warned);
    assert_eq!(not_ok(&of(&root, Wanted::Tcp)), warned[1..]);
}

fn add_gpu(root: &HostRoot) {
    root.write("sys/bus/pci/devices/0000:17:00.0/vendor", "0x10de\n");
    root.write("sys/bus/pci/devices/0000:17:00.0/class", "0x030200\n");
}

#[test]
fn what_the_gpus_driver_says_is_told_as_it_is() {
    let (_directory, root) = mlx5();
    let asked = |root: &HostRoot, driver: Result<Vec<GpuSaid>, String>| {
        let host = Host { driver: Some(driver), ..Host::new(root.clone(), Wanted::Auto) };
        examine(host)
    };
    let absent = asked(&root, Err("cannot load libcuda.so.1".to_owned()));
    assert_eq!(not_ok(&absent), [], "a host without a GPU needs none");
    assert!(only(&absent, "cuda").what.contains("cannot load libcuda.so.1"));
    let refused = RungRefused {
        rung: Rung::DmaBuf,
        nic: "mlx5_0".to_owned(),
        call: "ibv_reg_dmabuf_mr of 4096 bytes".to_owned(),
        errno: Some(95),
        why: "Operation not supported".to_owned(),
    };
    let gpu = |ordinal, rung| GpuSaid {
        ordinal,
        line: format!("GPU {ordinal}"),
        climb: Climb {
            rungs: vec![("mlx5_0".to_owned(), rung)],
            refused: vec![refused.clone()],
            ..Climb::default()
        },
        untried: None,
    };
    let there = asked(&root, Ok(vec![gpu(0, Rung::Peermem), gpu(1, Rung::Staging)]));
    assert_eq!(all(&there, "cuda").len(), 2);
    let ways = all(&there, "gpu-direct");
    assert!(ways[0].what.starts_with("mlx5_0 reaches GPU 0 by peermem; no dma-buf on mlx5_0"));
    assert!(
        ways.iter().all(|way| way.what.contains("ibv_reg_dmabuf_mr") && way.what.contains("95"))
    );
    assert_eq!(not_ok(&there), [("gpu-direct", Status::Warn)], "the second one is staged");
    let untried = GpuSaid { untried: Some("no memory".to_owned()), ..GpuSaid::default() };
    assert!(only(&asked(&root, Ok(vec![untried])), "gpu-direct").what.contains("no memory"));
    add_gpu(&root);
    let broken = asked(&root, Err("cuInit: CUDA_ERROR_UNKNOWN".to_owned()));
    assert!(not_ok(&broken).contains(&("cuda", Status::Warn)));
    remedied(&broken);
}

#[test]
fn gpu_direct_needs_a_driver_and_a_way_in_and_never_fails() {
    let (_directory, root) = mlx5();
    add_gpu(&root);
    let report = of(&root, Wanted::Verbs);
    let warned = ["gpu", "dma-buf", "peermem"].map(|check| (check, Status::Warn));
    assert_eq!(not_ok(&report), warned);
    remedied(&report);
    root.write("usr/lib64/libcuda.so.1", "");
    root.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module 550.1\n",
    );
    let modules = "ib_uverbs 1 0\nmlx5_ib 1 0\n";
    assert_eq!(not_ok(&of(&root, Wanted::Verbs)), warned[1..]);
    root.write("proc/modules", &format!("{modules}nvidia_peermem 1 0\n"));
    assert_eq!(not_ok(&of(&root, Wanted::Verbs)), warned[1..2]);
    root.write("proc/modules", modules);
    root.write("proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64 550.1\n");
    assert_eq!(not_ok(&of(&root, Wanted::Verbs)), []);
    root.write("proc/sys/kernel/osrelease", "5.4.0-1\n");
    assert_eq!(only(&of(&root, Wanted::Verbs), "dma-buf").status, Status::Warn);
}

#[test]
fn soft_devices_take_no_gpu_memory() {
    let (_directory, root) = rxe();
    add_gpu(&root);
    root.write("proc/driver/nvidia/version", "NVIDIA UNIX Open Kernel Module for x86_64 550.1\n");
    assert!(only(&of(&root, Wanted::Verbs), "dma-buf").what.contains("software"));
}

fn printed(root: &HostRoot, transport: Wanted, json: bool) -> (ExitCode, String) {
    let mut out = Vec::new();
    let code = doctor(root.clone(), &DoctorArgs { transport, json }, &mut out).unwrap();
    (code, String::from_utf8(out).unwrap())
}

#[test]
fn the_exit_code_is_1_where_something_fails() {
    let (_directory, root) = sound();
    let code = |wanted| format!("{:?}", printed(&root, wanted, false).0);
    assert_eq!(code(Wanted::Auto), format!("{:?}", ExitCode::SUCCESS));
    assert_eq!(code(Wanted::Verbs), format!("{:?}", ExitCode::from(1)));
}

#[test]
fn people_get_lines_with_remedies_below_them() {
    let (_directory, root) = rxe();
    root.write("sys/class/net/d0/mtu", "1500");
    let (_code, text) = printed(&root, Wanted::Auto, false);
    let lines: Vec<&str> = text.lines().collect();
    let at = lines.iter().position(|line| line.contains("1024 bytes only")).unwrap();
    assert!(lines[at].trim_start().starts_with("warn"));
    assert!(lines[at + 1].trim_start().starts_with("-> ip link set dev d0 mtu 9000"));
    assert!(
        lines.iter().any(|line| line.trim_start().starts_with("* ") && line.contains("10.77.0.1"))
    );
    assert!(text.ends_with(" 1 warn, 0 fail\n"), "{text}");
}

#[test]
fn programs_get_one_object() {
    let (_directory, root) = rxe();
    let (_code, text) = printed(&root, Wanted::Verbs, true);
    assert_eq!(text.lines().count(), 1);
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&json["transport"], &json["verdict"]), (&"verbs".into(), &"ok".into()));
    let first = &json["findings"][0];
    assert_eq!((&first["check"], &first["status"]), (&"device".into(), &"ok".into()));
    assert!(first["remedy"].is_null() && first["what"].is_string());
    assert_eq!(json["gids"][2]["type"], "RoCE v2");
    assert_eq!(json["gids"][2]["chosen"], true);
}
