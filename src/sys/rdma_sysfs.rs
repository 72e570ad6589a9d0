//! The RDMA devices of a host, as sysfs shows them: without a library, without opening one.
//!
//! Software devices have no `device` link and no NUMA node; their name says nothing, but their node
//! description does.

use super::gid::{Gid, GidScore, GidType, score};
use super::root::HostRoot;

/// Where the kernel lists RDMA devices.
const DEVICES: &str = "sys/class/infiniband";

/// What a device speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeType {
    /// InfiniBand or RoCE: queue pairs are connected by whoever holds both ends' numbers.
    ChannelAdapter,
    /// iWARP: connections need the kernel's connection manager.
    Iwarp,
    /// Anything else: a switch, a device that is not for RDMA READ.
    Other,
}

/// An RDMA device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaDevice {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// What it speaks.
    pub node_type: NodeType,
    /// The kernel driver: that of its bus device (`mlx5_core`), or what a software device calls
    /// itself (`rxe`).
    pub driver: Option<String>,
    /// The NUMA node that it is attached to; `None` where the kernel does not know or it has none.
    pub numa_node: Option<u32>,
    /// Its character device below `/dev/infiniband`, such as `uverbs0`.
    pub character_device: Option<String>,
    /// Its ports, in order.
    pub ports: Vec<RdmaPort>,
}

/// What carries a port's packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

/// A port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaPort {
    /// From 1.
    pub number: u32,
    /// The logical state as the kernel names it, such as `ACTIVE`, `DOWN` or `INIT`.
    pub state: String,
    /// The physical state, such as `LinkUp` or `Disabled`.
    pub physical_state: String,
    /// What carries its packets.
    pub link_layer: LinkLayer,
    /// Its speed as the kernel writes it, such as `100 Gb/sec (4X EDR)`.
    pub rate: String,
    /// The network interface beneath a port on Ethernet.
    pub interface: Option<String>,
    /// That interface's MTU, bytes.
    pub interface_mtu: Option<u32>,
    /// Its addresses, in the order of their index.
    pub gids: Vec<GidEntry>,
}

impl RdmaPort {
    /// Whether it can carry packets.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }

    /// The address that connections should use: the best score, then the lowest index.
    #[must_use]
    pub fn best_gid(&self) -> Option<&GidEntry> {
        let usable = self.gids.iter().filter(|entry| entry.score().rank > 0);
        usable.max_by_key(|entry| (entry.score().rank, std::cmp::Reverse(entry.index)))
    }

    /// Bytes of payload in a packet, 256 to 4096: what fits the interface's MTU. `None` where no
    /// interface bounds it.
    #[must_use]
    pub fn path_mtu(&self) -> Option<u32> {
        let room = self.interface_mtu?.saturating_sub(ROCE_HEADERS);
        [4096, 2048, 1024, 512, 256].into_iter().find(|payload| *payload <= room)
    }
}

/// Bytes of an interface's MTU that the kernel keeps for RoCE headers: address 40, UDP 8, base
/// transport 12, XRC 4, atomics 28, checksum 4.
pub const ROCE_HEADERS: u32 = 96;

/// An entry of a port's address table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// Its place in the table.
    pub index: u32,
    /// The address.
    pub gid: Gid,
    /// What it is spoken over.
    pub kind: GidType,
    /// The network interface that it belongs to.
    pub interface: Option<String>,
}

impl GidEntry {
    /// How well it serves.
    #[must_use]
    pub fn score(&self) -> GidScore {
        score(&self.gid, self.kind)
    }
}

/// The host's RDMA devices, in the order of their names.
#[must_use]
pub fn devices(root: &HostRoot) -> Vec<RdmaDevice> {
    root.names(DEVICES).into_iter().map(|name| device(root, name)).collect()
}

fn device(root: &HostRoot, name: String) -> RdmaDevice {
    let base = format!("{DEVICES}/{name}");
    let node_type = match root.text(format!("{base}/node_type")).as_deref().map(label) {
        Some("CA") => NodeType::ChannelAdapter,
        Some("RNIC") => NodeType::Iwarp,
        _other => NodeType::Other,
    };
    let driver = root.link_name(format!("{base}/device/driver"));
    // The description of a hardware device is its owner's to choose.
    let software = || {
        let named = root.text(format!("{base}/node_desc"))?;
        (!root.exists(format!("{base}/device"))).then_some(named)
    };
    let mut numbers: Vec<u32> = numbers(root, &format!("{base}/ports"));
    numbers.sort_unstable();
    RdmaDevice {
        node_type,
        driver: driver.or_else(software),
        numa_node: root.value(format!("{base}/device/numa_node")),
        character_device: character_device(root, &name),
        ports: numbers.into_iter().map(|number| port(root, &base, number)).collect(),
        name,
    }
}

fn character_device(root: &HostRoot, device: &str) -> Option<String> {
    const CLASS: &str = "sys/class/infiniband_verbs";
    root.names(CLASS).into_iter().find(|name| {
        root.text(format!("{CLASS}/{name}/ibdev")).is_some_and(|owner| owner == device)
    })
}

fn port(root: &HostRoot, device: &str, number: u32) -> RdmaPort {
    let base = format!("{device}/ports/{number}");
    let said = |file: &str| root.text(format!("{base}/{file}")).unwrap_or_default();
    let link_layer = match said("link_layer").as_str() {
        "InfiniBand" => LinkLayer::InfiniBand,
        _ethernet => LinkLayer::Ethernet,
    };
    let gids = gids(root, &base, link_layer);
    // A port without an address still has its interface, which is then what needs one.
    let interface = match link_layer {
        LinkLayer::InfiniBand => None,
        LinkLayer::Ethernet => gids
            .iter()
            .find_map(|entry| entry.interface.clone())
            .or_else(|| root.text(format!("{device}/parent")))
            .or_else(|| bus_interface(root, device, number)),
    };
    let mtu = |name: &String| root.value(format!("sys/class/net/{name}/mtu"));
    RdmaPort {
        number,
        state: label(&said("state")).to_owned(),
        physical_state: label(&said("phys_state")).to_owned(),
        link_layer,
        rate: said("rate"),
        interface_mtu: interface.as_ref().and_then(mtu),
        interface,
        gids,
    }
}

/// The network interface of the same bus device that has this port's number, where it is plain.
fn bus_interface(root: &HostRoot, device: &str, number: u32) -> Option<String> {
    let interfaces = root.names(format!("{device}/device/net"));
    if let [only] = interfaces.as_slice() {
        return Some(only.clone());
    }
    interfaces.into_iter().find(|name| {
        let port: Option<u32> = root.value(format!("sys/class/net/{name}/dev_port"));
        port.and_then(|port| port.checked_add(1)) == Some(number)
    })
}

fn gids(root: &HostRoot, port: &str, link_layer: LinkLayer) -> Vec<GidEntry> {
    let mut indices = numbers(root, &format!("{port}/gids"));
    indices.sort_unstable();
    let entry = |index: u32| {
        let gid = Gid::parse(&root.text(format!("{port}/gids/{index}"))?)?;
        if gid.is_zero() {
            return None;
        }
        let kind = match (link_layer, root.text(format!("{port}/gid_attrs/types/{index}"))) {
            (LinkLayer::InfiniBand, _) => GidType::InfiniBand,
            (LinkLayer::Ethernet, Some(kind)) if kind == "RoCE v2" => GidType::RoceV2,
            (LinkLayer::Ethernet, _) => GidType::RoceV1,
        };
        let interface = root.text(format!("{port}/gid_attrs/ndevs/{index}"));
        Some(GidEntry { index, gid, kind, interface })
    };
    indices.into_iter().filter_map(entry).collect()
}

fn numbers(root: &HostRoot, directory: &str) -> Vec<u32> {
    root.names(directory).iter().filter_map(|name| name.parse().ok()).collect()
}

/// The word after the number in `4: ACTIVE`.
fn label(text: &str) -> &str {
    text.split_once(':').map_or(text, |(_number, label)| label.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_devices_has_none() {
        let (_directory, root) = HostRoot::imitation(&[]);
        assert_eq!(devices(&root), []);
    }

    /// As Linux 6.12 shows SoftRoCE on an interface with one IPv4 address.
    #[test]
    fn soft_roce_is_read() {
        let (_directory, root) = HostRoot::imitation(&[
            ("sys/class/infiniband/r/node_type", "1: CA\n"),
            ("sys/class/infiniband/r/node_desc", "rxe\n"),
            ("sys/class/infiniband/r/parent", "d0\n"),
            ("sys/class/infiniband/r/ports/1/state", "4: ACTIVE\n"),
            ("sys/class/infiniband/r/ports/1/phys_state", "5: LinkUp\n"),
            ("sys/class/infiniband/r/ports/1/link_layer", "Ethernet\n"),
            ("sys/class/infiniband/r/ports/1/rate", "2.5 Gb/sec (1X SDR)\n"),
            ("sys/class/infiniband/r/ports/1/gids/0", "fe80:0000:0000:0000:4c3d:57ff:fe99:8cd2"),
            ("sys/class/infiniband/r/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001"),
            ("sys/class/infiniband/r/ports/1/gids/2", "0000:0000:0000:0000:0000:0000:0000:0000"),
            ("sys/class/infiniband/r/ports/1/gid_attrs/types/0", "RoCE v2\n"),
            ("sys/class/infiniband/r/ports/1/gid_attrs/types/1", "RoCE v2\n"),
            ("sys/class/infiniband/r/ports/1/gid_attrs/ndevs/1", "d0\n"),
            ("sys/class/infiniband_verbs/abi_version", "6\n"),
            ("sys/class/infiniband_verbs/uverbs0/ibdev", "r\n"),
            ("sys/class/net/d0/mtu", "9000\n"),
        ]);
        let found = devices(&root);
        let [device] = found.as_slice() else { panic!("{found:?}") };
        assert_eq!((device.name.as_str(), device.driver.as_deref()), ("r", Some("rxe")));
        assert_eq!((device.node_type, device.numa_node), (NodeType::ChannelAdapter, None));
        assert_eq!(device.character_device.as_deref(), Some("uverbs0"));
        let [port] = device.ports.as_slice() else { panic!("{device:?}") };
        assert!(port.is_active());
        assert_eq!((port.interface.as_deref(), port.path_mtu()), (Some("d0"), Some(4096)));
        assert_eq!(port.gids.len(), 2);
        let best = port.best_gid().unwrap();
        assert_eq!((best.index, best.gid.to_string().as_str()), (1, "10.77.0.1"));
    }

    #[test]
    fn a_hardware_device_is_known_by_its_driver_and_not_by_its_description() {
        let (_directory, root) = HostRoot::imitation(&[
            ("sys/class/infiniband/mlx5_0/node_type", "1: CA\n"),
            ("sys/class/infiniband/mlx5_0/node_desc", "rxe\n"),
            ("sys/class/infiniband/mlx5_0/device/numa_node", "1\n"),
            ("sys/class/infiniband/mlx5_0/device/net/eth1", ""),
            ("sys/class/infiniband/mlx5_0/ports/1/link_layer", "Ethernet\n"),
            ("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n"),
            ("sys/class/infiniband/mlx5_1/node_desc", "node7 mlx5_1\n"),
            ("sys/class/infiniband/mlx5_1/device/numa_node", "-1\n"),
        ]);
        root.link(
            "sys/class/infiniband/mlx5_0/device/driver",
            "../../../bus/pci/drivers/mlx5_core",
        );
        let found = devices(&root);
        assert_eq!(found[0].driver.as_deref(), Some("mlx5_core"));
        assert_eq!((found[0].numa_node, found[1].numa_node), (Some(1), None));
        assert_eq!(found[1].driver, None);
        assert_eq!(found[0].ports[0].interface.as_deref(), Some("eth1"));
        assert!(!found[0].ports[0].is_active());
        assert!(found[0].ports[0].best_gid().is_none());
    }

    #[test]
    fn payload_is_what_the_interface_leaves_room_for() {
        let (_directory, root) =
            HostRoot::imitation(&[("sys/class/infiniband/a/ports/1/link_layer", "Ethernet\n")]);
        let mut port = devices(&root).remove(0).ports.remove(0);
        let mut of = |mtu| {
            port.interface_mtu = mtu;
            port.path_mtu()
        };
        assert_eq!(
            (of(Some(1500)), of(Some(9000)), of(Some(4200))),
            (Some(1024), Some(4096), Some(4096))
        );
        assert_eq!((of(Some(4191)), of(Some(300)), of(None)), (Some(2048), None, None));
    }

    #[test]
    fn infiniband_ports_have_infiniband_addresses_and_no_interface() {
        let (_directory, root) = HostRoot::imitation(&[
            ("sys/class/infiniband/ib0/ports/10/link_layer", "InfiniBand\n"),
            ("sys/class/infiniband/ib0/ports/2/link_layer", "InfiniBand\n"),
            ("sys/class/infiniband/ib0/ports/2/gids/0", "fe80:0000:0000:0000:ec0d:9a03:0078:64a2"),
            ("sys/class/infiniband/ib0/ports/2/gid_attrs/types/0", "IB/RoCE v1\n"),
        ]);
        let device = devices(&root).remove(0);
        assert_eq!(device.ports.iter().map(|port| port.number).collect::<Vec<_>>(), [2, 10]);
        assert_eq!(device.ports[0].gids[0].kind, GidType::InfiniBand);
        assert_eq!(
            (device.ports[0].interface.as_deref(), device.ports[0].path_mtu()),
            (None, None)
        );
    }
}
