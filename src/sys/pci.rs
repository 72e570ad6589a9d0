//! How near devices are on the PCI bus, as sysfs shows it.
//!
//! sysfs lays devices out as the bus does: a device's directory lies in that of the bridge or switch above
//! it, up to the root complex. What two devices' paths have in common is what their bytes need not leave;
//! the more of it, the nearer they are. Two on one switch do not load the processor at all.

use std::fs;
use std::path::{Component, PathBuf};

use super::root::HostRoot;

/// A device's place on the bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PciPlace {
    /// From the root complex down to the device itself.
    path: Vec<String>,
    /// The NUMA node of its root complex, where the kernel knows it.
    numa_node: Option<u32>,
}

impl PciPlace {
    /// The place of the device at an address such as `0000:3b:00.0`; `None` where there is none.
    #[must_use]
    pub fn of_address(root: &HostRoot, address: &str) -> Option<Self> {
        Self::of(root, &format!("sys/bus/pci/devices/{address}"))
    }

    /// The place of an RDMA device such as `mlx5_0`; `None` for software.
    #[must_use]
    pub fn of_rdma_device(root: &HostRoot, name: &str) -> Option<Self> {
        Self::of(root, &format!("sys/class/infiniband/{name}/device"))
    }

    fn of(root: &HostRoot, link: &str) -> Option<Self> {
        let devices: PathBuf = fs::canonicalize(root.path("sys/devices")).ok()?;
        let place = fs::canonicalize(root.path(link)).ok()?;
        let inside = place.strip_prefix(devices).ok()?;
        let name = |part: Component<'_>| part.as_os_str().to_str().map(ToOwned::to_owned);
        let path = inside.components().map(name).collect::<Option<Vec<_>>>()?;
        Some(Self { path, numa_node: root.value(format!("{link}/numa_node")) })
    }

    /// How many steps from the root complex down they have in common; 0 under different ones.
    #[must_use]
    pub fn shared(&self, other: &Self) -> usize {
        self.path.iter().zip(&other.path).take_while(|(one, other)| one == other).count()
    }
}

/// Whether a device is among those nearest to another one, and what that was judged by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nearness {
    /// Whether none is nearer.
    pub near: bool,
    /// How near it is, in words.
    pub why: String,
}

/// Which of these RDMA devices are nearest to the PCI device at an address: those with the longest common
/// path; among equally near ones those on its NUMA node, where any is. All of them where nothing is known,
/// as for software.
#[must_use]
pub fn nearest(root: &HostRoot, address: &str, devices: &[&str]) -> Vec<Nearness> {
    let Some(center) = PciPlace::of_address(root, address) else {
        let why = format!("sysfs has no {address}: all NICs count as near");
        return vec![Nearness { near: true, why }; devices.len()];
    };
    let rank = |name: &&str| match PciPlace::of_rdma_device(root, name) {
        None => ((0, false), "not on the PCI bus".to_owned()),
        Some(place) => {
            let same = place.numa_node.is_some() && place.numa_node == center.numa_node;
            let shared = place.shared(&center);
            ((shared, same), words(shared, (place.numa_node, center.numa_node)))
        }
    };
    let ranks: Vec<_> = devices.iter().map(rank).collect();
    let best = ranks.iter().map(|(rank, _)| *rank).max();
    ranks.into_iter().map(|(rank, why)| Nearness { near: Some(rank) == best, why }).collect()
}

/// What two places have in common, and their NUMA nodes, the device's and the other one's.
fn words(shared: usize, nodes: (Option<u32>, Option<u32>)) -> String {
    let path = match shared {
        0 => "another PCI root complex".to_owned(),
        1 => "the same PCI root complex".to_owned(),
        steps => format!("{steps} steps of the PCI path in common"),
    };
    match nodes {
        (Some(own), Some(other)) if own == other => format!("{path}, the same NUMA node {own}"),
        (Some(own), Some(other)) => format!("{path}, NUMA node {own} and not {other}"),
        _ => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "0000:1b:00.0";

    /// Two sockets. Under the first one a switch with the GPU and a NIC, a NIC of two functions on another
    /// port of that root complex, and a root complex of its own for a third NIC; a fourth NIC on the other
    /// socket. And a software device.
    fn host() -> (tempfile::TempDir, HostRoot) {
        let switch = "pci0000:16/0000:16:01.0/0000:17:00.0";
        let places = [
            (GPU, format!("{switch}/0000:18:00.0/{GPU}"), "0\n", None),
            ("0000:1c:00.0", format!("{switch}/0000:18:01.0/0000:1c:00.0"), "0\n", Some("mlx5_0")),
            ("0000:2a:00.0", "pci0000:16/0000:16:05.0/0000:2a:00.0".into(), "0\n", Some("mlx5_1")),
            ("0000:2a:00.1", "pci0000:16/0000:16:05.0/0000:2a:00.1".into(), "0\n", Some("mlx5_2")),
            ("0000:50:00.0", "pci0000:4f/0000:4f:01.0/0000:50:00.0".into(), "0\n", Some("mlx5_3")),
            ("0000:9a:00.0", "pci0000:99/0000:99:01.0/0000:9a:00.0".into(), "1\n", Some("mlx5_4")),
        ];
        let (directory, root) =
            HostRoot::imitation(&[("sys/class/infiniband/rxe0/node_desc", "rxe")]);
        for (address, path, node, name) in places {
            root.write(&format!("sys/devices/{path}/numa_node"), node);
            let link = format!("sys/bus/pci/devices/{address}");
            root.link(&link, &format!("../../../devices/{path}"));
            if let Some(name) = name {
                let link = format!("sys/class/infiniband/{name}/device");
                root.link(&link, &format!("../../../devices/{path}"));
            }
        }
        (directory, root)
    }

    fn near<'a>(root: &HostRoot, names: &[&'a str]) -> Vec<&'a str> {
        let near = nearest(root, GPU, names);
        assert_eq!(near.len(), names.len());
        names.iter().zip(near).filter(|(_, it)| it.near).map(|(name, _)| *name).collect()
    }

    #[test]
    fn the_longest_common_path_wins_and_then_the_numa_node() {
        let (_directory, root) = host();
        let table: [(&[&str], &[&str]); 7] = [
            (&["mlx5_0", "mlx5_1", "mlx5_3", "mlx5_4"], &["mlx5_0"]),
            // Both functions of a card are equally near.
            (&["mlx5_1", "mlx5_2", "mlx5_3"], &["mlx5_1", "mlx5_2"]),
            // Under other root complexes: the one on the GPU's node.
            (&["mlx5_4", "mlx5_3"], &["mlx5_3"]),
            // Whatever is on the bus is nearer than what is not, if it has anything in common.
            (&["rxe0", "mlx5_0"], &["mlx5_0"]),
            (&["rxe0", "mlx5_4"], &["rxe0", "mlx5_4"]),
            (&["rxe0", "absent"], &["rxe0", "absent"]),
            (&[], &[]),
        ];
        for (names, want) in table {
            assert_eq!(near(&root, names), want, "{names:?}");
        }
    }

    #[test]
    fn a_gpu_that_sysfs_does_not_know_is_near_to_all() {
        let (_directory, root) = host();
        let all = nearest(&root, "0000:ff:00.0", &["mlx5_0", "mlx5_4"]);
        assert!(all.len() == 2 && all.iter().all(|it| it.near && it.why.contains("0000:ff:00.0")));
        let (_directory, empty) = HostRoot::imitation(&[]);
        assert!(nearest(&empty, GPU, &["mlx5_0"]).iter().all(|it| it.near));
    }

    #[test]
    fn how_near_each_one_is_stands_in_words() {
        let (_directory, root) = host();
        let names = ["mlx5_0", "mlx5_1", "mlx5_3", "mlx5_4", "rxe0"];
        let said: Vec<_> = nearest(&root, GPU, &names).into_iter().map(|it| it.why).collect();
        let want = [
            "3 steps of the PCI path in common, the same NUMA node 0",
            "the same PCI root complex, the same NUMA node 0",
            "another PCI root complex, the same NUMA node 0",
            "another PCI root complex, NUMA node 1 and not 0",
            "not on the PCI bus",
        ];
        assert_eq!(said, want);
    }

    #[test]
    fn what_two_places_share_is_counted_from_the_root_complex() {
        let (_directory, root) = host();
        let gpu = PciPlace::of_address(&root, GPU).unwrap();
        let shared = |name| gpu.shared(&PciPlace::of_rdma_device(&root, name).unwrap());
        assert_eq!((shared("mlx5_0"), shared("mlx5_1"), shared("mlx5_3")), (3, 1, 0));
        assert_eq!(gpu.shared(&gpu), 5);
        assert_eq!(PciPlace::of_rdma_device(&root, "rxe0"), None);
    }
}
