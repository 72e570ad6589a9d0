//! The devices: ports, addresses, packet sizes, NUMA nodes, permission.

use std::fs::OpenOptions;
use std::io;

use super::finding::one_is_enough;
use super::{Finding, Host, Status, software};
use crate::sys::confinement::{self, Container};
use crate::sys::host;
use crate::sys::kernel::{self, ModuleState};
use crate::sys::rdma_sysfs::{LinkLayer, NodeType, ROCE_HEADERS, RdmaDevice, RdmaPort};

/// Bytes of payload in the largest packet that RDMA has.
const PATH_MTU_MAX: u32 = 4096;

/// The interface that no packet leaves by.
const LOOPBACK: &str = "lo";

/// Each device with its ports; one that works is enough.
pub(super) fn devices(host: &Host) -> Vec<Finding> {
    if host.devices.is_empty() {
        return vec![none(host)];
    }
    one_is_enough(host.devices.iter().map(|device| one(host, device)).collect())
}

fn none(host: &Host) -> Finding {
    let has_mellanox = software::has_mellanox_nic(host);
    let what = if has_mellanox {
        "no RDMA device, though an NVIDIA network card is there"
    } else {
        "no RDMA device"
    };
    let remedy = if has_mellanox {
        "modprobe mlx5_ib, on the host itself".to_owned()
    } else {
        soft_device(host)
    };
    Finding::bad("device", host.rdma_problem(), what, remedy)
}

/// How to get a software device here.
fn soft_device(host: &Host) -> String {
    const CARD: &str = "an RDMA network card with its driver";
    let interfaces = host.root.names("sys/class/net");
    let up = |name: &&String| {
        let state = host.root.text(format!("sys/class/net/{name}/operstate"));
        *name != LOOPBACK && matches!(state.as_deref(), Some("up" | "unknown"))
    };
    let interface = interfaces.iter().find(up).map_or("eth0", String::as_str);
    match kernel::module(&host.root, "rdma_rxe") {
        ModuleState::Present => {
            format!("{CARD}; to try without: rdma link add rxe0 type rxe netdev {interface}")
        }
        ModuleState::Loadable | ModuleState::Unknown => format!(
            "{CARD}; to try without, on a kernel that has SoftRoCE: modprobe rdma_rxe && rdma link \
             add rxe0 type rxe netdev {interface}"
        ),
        ModuleState::Absent => format!("{CARD}; this kernel has no SoftRoCE to try without"),
    }
}

fn one(host: &Host, device: &RdmaDevice) -> Vec<Finding> {
    let mut findings = vec![kind(device)];
    if device.node_type != NodeType::ChannelAdapter {
        return findings;
    }
    findings.push(permission(host, device));
    findings.extend(software::provider(host, device));
    if device.ports.is_empty() {
        findings.push(Finding::bad(
            "port",
            Status::Fail,
            format!("{} has no port", device.name),
            "see what its driver says: dmesg",
        ));
    }
    findings.extend(one_is_enough(device.ports.iter().map(|port| ports(device, port)).collect()));
    findings.push(numa(host, device));
    findings
}

fn kind(device: &RdmaDevice) -> Finding {
    const CHECK: &str = "device";
    let name = &device.name;
    let driver = device.driver.as_deref().unwrap_or("an unknown driver");
    match (device.node_type, driver) {
        (NodeType::ChannelAdapter, _) => Finding::ok(CHECK, format!("{name}, by {driver}")),
        (NodeType::Iwarp, _) => Finding::bad(
            CHECK,
            Status::Fail,
            format!("{name}, by {driver}, is an iWARP device, which needs a connection manager"),
            "use a RoCE or InfiniBand device; some cards can be switched to RoCE",
        ),
        (NodeType::Other, "efa") => Finding::bad(
            CHECK,
            Status::Fail,
            format!("{name} is an EFA device, which has no reliable connected queue pairs"),
            "use a RoCE or InfiniBand device, or TCP",
        ),
        (NodeType::Other, _) => Finding::bad(
            CHECK,
            Status::Fail,
            format!("{name}, by {driver}, is no InfiniBand or RoCE device"),
            "use a RoCE or InfiniBand device, or TCP",
        ),
    }
}

fn permission(host: &Host, device: &RdmaDevice) -> Finding {
    const CHECK: &str = "permission";
    let Some(file) = &device.character_device else {
        return Finding::bad(
            CHECK,
            Status::Fail,
            format!("{} has no character device", device.name),
            "modprobe ib_uverbs, on the host itself",
        );
    };
    let path = format!("/dev/infiniband/{file}");
    // Mode bits say nothing about a container's device filter; the kernel does when it is asked.
    match OpenOptions::new().read(true).write(true).open(host.root.path(&path)) {
        Ok(_closed_again) => {
            Finding::ok(CHECK, format!("{} may be opened, as {path}", device.name))
        }
        Err(error) => {
            let remedy = refusal(&error, &path, confinement::container(&host.root));
            let what = format!("{} cannot be opened, as {path}: {error}", device.name);
            Finding::bad(CHECK, Status::Fail, what, remedy)
        }
    }
}

/// What to do where opening a device's file fails.
pub(super) fn refusal(error: &io::Error, path: &str, container: Option<Container>) -> String {
    match (error.raw_os_error(), container) {
        (Some(libc::EACCES), _) => {
            format!("chmod a+rw {path} or a udev rule that does, or run as a user whom it lets")
        }
        (_, Some(Container::Kubernetes)) => {
            "request the device from the cluster's RDMA device plugin, in resources.limits".into()
        }
        (_, Some(Container::Other)) => {
            "start the container with --device=/dev/infiniband".to_owned()
        }
        (Some(libc::ENOENT), None) => "udevadm trigger --subsystem-match=infiniband_verbs".into(),
        (_, None) => "see what the driver says: dmesg".to_owned(),
    }
}

fn ports(device: &RdmaDevice, port: &RdmaPort) -> Vec<Finding> {
    let name = format!("{} port {}", device.name, port.number);
    let mut findings = vec![link(&name, port)];
    findings.push(address(&name, port));
    findings.extend(packet(&name, port));
    findings
}

fn link(name: &str, port: &RdmaPort) -> Finding {
    const CHECK: &str = "port";
    let layer = match port.link_layer {
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::InfiniBand => "InfiniBand",
    };
    if port.is_active() {
        return Finding::ok(CHECK, format!("{name} is up, {layer}, {}", port.rate));
    }
    let remedy = match (&port.interface, port.link_layer) {
        (_, LinkLayer::InfiniBand) if port.state == "INIT" || port.state == "ARMED" => {
            "start a subnet manager in this network: systemctl start opensm".to_owned()
        }
        (_, LinkLayer::InfiniBand) => "check the cable and the switch's port".to_owned(),
        (Some(interface), LinkLayer::Ethernet) => {
            format!("ip link set dev {interface} up; then the cable and the switch's port")
        }
        (None, LinkLayer::Ethernet) => "bring its network interface up".to_owned(),
    };
    let what = format!("{name} is {}, {}, {layer}", port.state, port.physical_state);
    Finding::bad(CHECK, Status::Fail, what, remedy)
}

fn address(name: &str, port: &RdmaPort) -> Finding {
    const CHECK: &str = "gid";
    let interface = port.interface.as_deref().unwrap_or("its interface");
    let assign = || format!("ip addr add ADDRESS/PREFIX dev {interface}");
    let Some(best) = port.best_gid() else {
        let remedy = match port.link_layer {
            LinkLayer::Ethernet => assign(),
            LinkLayer::InfiniBand => "see what the driver says: dmesg".to_owned(),
        };
        return Finding::bad(CHECK, Status::Fail, format!("{name} has no usable GID"), remedy);
    };
    let score = best.score();
    let of = port.gids.len();
    let what = format!("{name}: GID {} of {of}, {}: {}", best.index, best.gid, score.reason);
    // Below RoCE v2 with an address that somebody gave.
    if port.link_layer == LinkLayer::Ethernet && score.rank < 3 {
        return Finding::bad(CHECK, Status::Warn, what, assign());
    }
    Finding::ok(CHECK, what)
}

fn packet(name: &str, port: &RdmaPort) -> Option<Finding> {
    const CHECK: &str = "mtu";
    let interface = port.interface.as_deref()?;
    let mtu = port.interface_mtu?;
    let least = PATH_MTU_MAX + ROCE_HEADERS;
    let raise = format!(
        "ip link set dev {interface} mtu 9000 (at least {least}), on every host and switch of that \
         network"
    );
    Some(match port.path_mtu() {
        Some(PATH_MTU_MAX) => Finding::ok(
            CHECK,
            format!("{name}: packets of {PATH_MTU_MAX} bytes, {interface} has MTU {mtu}"),
        ),
        Some(payload) => Finding::bad(
            CHECK,
            Status::Warn,
            format!("{name}: packets of {payload} bytes only, {interface} has MTU {mtu}"),
            raise,
        ),
        None => Finding::bad(
            CHECK,
            Status::Fail,
            format!("{name}: no packet fits, {interface} has MTU {mtu}"),
            raise,
        ),
    })
}

fn numa(host: &Host, device: &RdmaDevice) -> Finding {
    const CHECK: &str = "numa";
    let name = &device.name;
    let online = host::numa_nodes_of(&host.root);
    let several = online.as_deref().filter(|nodes| nodes.contains([',', '-']));
    match (device.numa_node, several) {
        (Some(node), Some(_several)) => Finding::ok(
            CHECK,
            format!(
                "{name} is on NUMA node {node}: its pools belong there, --pool SIZE@numa={node}"
            ),
        ),
        (_, None) => Finding::ok(CHECK, format!("{name}: this host has one NUMA node")),
        (None, Some(_several)) if software::is_soft(device) => {
            Finding::ok(CHECK, format!("{name} is software and on no NUMA node"))
        }
        (None, Some(nodes)) => Finding::bad(
            CHECK,
            Status::Warn,
            format!("{name}: the firmware does not say on which of the NUMA nodes {nodes} it is"),
            "find its node in the board's manual, and give its pools that one",
        ),
    }
}
