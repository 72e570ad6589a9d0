//! What memory this host has left: ordinary, huge, per NUMA node, and within the process's control
//! group.
//!
//! A pool that does not fit must be refused before its pages are touched: afterwards the kernel's
//! answer is a signal. All of it is read from `/proc` and `/sys` once per question; a file that is
//! absent or says something unexpected bounds nothing.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::root::HostRoot;

/// What bounds the memory that can still be taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MemoryBound {
    /// The host's available memory (`MemAvailable` in `/proc/meminfo`).
    Host,
    /// The limit of a control group, that of a container for example.
    ControlGroup(PathBuf),
    /// The free and reclaimable memory of one NUMA node.
    Node(u32),
}

impl fmt::Display for MemoryBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("MemAvailable in /proc/meminfo"),
            Self::ControlGroup(group) => write!(f, "the memory limit of {}", group.display()),
            Self::Node(node) => write!(f, "the memory of NUMA node {node}"),
        }
    }
}

/// The bytes that can still be taken, by the tightest bound, and which bound that is. `None` where
/// the system says nothing.
#[must_use]
pub fn available_memory(node: Option<u32>) -> Option<(u64, MemoryBound)> {
    available_memory_of(&HostRoot::host(), node)
}

/// The same, of the host with this root.
#[must_use]
pub fn available_memory_of(root: &HostRoot, node: Option<u32>) -> Option<(u64, MemoryBound)> {
    let meminfo = root.text("proc/meminfo").unwrap_or_default();
    let host = meminfo_bytes(&meminfo, "MemAvailable").map(|b| (b, MemoryBound::Host));
    let node = node.and_then(|node| Some((node_available(root, node)?, MemoryBound::Node(node))));
    let bounds = host.into_iter().chain(node).chain(group_bounds(root));
    bounds.min_by_key(|(bytes, _bound)| *bytes)
}

/// The NUMA nodes of this host, as the kernel lists them (`0-1`, for example); `None` where it says
/// nothing.
#[must_use]
pub fn numa_nodes() -> Option<String> {
    numa_nodes_of(&HostRoot::host())
}

/// The same, of the host with this root.
#[must_use]
pub fn numa_nodes_of(root: &HostRoot) -> Option<String> {
    root.text("sys/devices/system/node/online")
}

/// Whether a list such as `0-1,4` names `node`.
#[must_use]
pub fn list_names(list: &str, node: u32) -> bool {
    list.trim().split(',').any(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        match (first.parse::<u32>(), last.parse::<u32>()) {
            (Ok(first), Ok(last)) => (first..=last).contains(&node),
            _unreadable => false,
        }
    })
}

/// The directory in which the kernel keeps its pool of huge pages of this size, on the whole host or
/// on one NUMA node.
#[must_use]
pub fn huge_page_directory(page_bytes: u64, node: Option<u32>) -> PathBuf {
    let base = match node {
        None => "/sys/kernel/mm".to_owned(),
        Some(node) => format!("/sys/devices/system/node/node{node}"),
    };
    PathBuf::from(format!("{base}/hugepages/hugepages-{}kB", page_bytes / 1024))
}

/// Huge pages that can still be taken from such a directory: free and not promised to a mapping.
/// `None` where this kernel has no pages of this size.
#[must_use]
pub fn free_huge_pages(directory: &Path) -> Option<u64> {
    let number = |name: &str| read(directory.join(name)).trim().parse::<u64>().ok();
    let free = number("free_hugepages")?;
    Some(free.saturating_sub(number("resv_hugepages").unwrap_or(0)))
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// The value of a line such as `MemFree:  123 kB`, in bytes. A node's file has a prefix before the
/// name.
fn meminfo_bytes(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (label, value) = line.split_once(':')?;
        if label.split_whitespace().next_back() != Some(name) {
            return None;
        }
        let kib = value.trim().strip_suffix("kB")?.trim().parse::<u64>();
        kib.ok()?.checked_mul(1024)
    })
}

fn node_available(root: &HostRoot, node: u32) -> Option<u64> {
    let text = root.text(format!("sys/devices/system/node/node{node}/meminfo"))?;
    let free = meminfo_bytes(&text, "MemFree")?;
    let reclaimable = ["Active(file)", "Inactive(file)", "SReclaimable"]
        .map(|name| meminfo_bytes(&text, name).unwrap_or(0));
    Some(reclaimable.iter().fold(free, |sum, part| sum.saturating_add(*part)))
}

/// What each control group from the process's own up to the root leaves.
fn group_bounds(root: &HostRoot) -> Vec<(u64, MemoryBound)> {
    let membership = root.text("proc/self/cgroup").unwrap_or_default();
    group_directories(&membership)
        .into_iter()
        .filter_map(|directory| {
            let bytes = group_available(&root.path(&directory))?;
            Some((bytes, MemoryBound::ControlGroup(directory)))
        })
        .collect()
}

/// The directories that may hold a limit: for each line of `/proc/self/cgroup` that concerns memory
/// (the unified hierarchy's, or version 1's memory controller), the group and all groups above it.
fn group_directories(membership: &str) -> Vec<PathBuf> {
    let mut directories = Vec::new();
    for line in membership.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let root = match fields.next() {
            Some("") => "/sys/fs/cgroup",
            Some(controllers) if controllers.split(',').any(|name| name == "memory") => {
                "/sys/fs/cgroup/memory"
            }
            _other => continue,
        };
        let group = Path::new(fields.next().unwrap_or("/"));
        let group = group.strip_prefix("/").unwrap_or(group);
        directories.extend(group.ancestors().map(|above| Path::new(root).join(above)));
    }
    directories
}

/// Limit minus usage, file pages that can be dropped not counted; `None` without a limit.
fn group_available(directory: &Path) -> Option<u64> {
    let number = |name: &str| read(directory.join(name)).trim().parse::<u64>().ok();
    let (limit, used) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?),
    };
    let stat = read(directory.join("memory.stat"));
    let droppable = stat.lines().find_map(|line| {
        let value = line.strip_prefix("inactive_file ")?;
        value.trim().parse::<u64>().ok()
    });
    Some(limit.saturating_sub(used.saturating_sub(droppable.unwrap_or(0))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_with_and_without_a_prefix() {
        let text = "MemTotal:       24684056 kB\nMemAvailable:   24234824 kB\nHugePages_Free: 3\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable"), Some(24_234_824 << 10));
        assert_eq!(meminfo_bytes(text, "HugePages_Free"), None, "no kB");
        assert_eq!(meminfo_bytes(text, "Available"), None);
        let node = "Node 0 MemFree:        1024 kB\nNode 0 Active(file):  2 kB\n";
        assert_eq!(meminfo_bytes(node, "MemFree"), Some(1 << 20));
        assert_eq!(meminfo_bytes(node, "Active(file)"), Some(2048));
    }

    #[test]
    fn node_lists_are_read() {
        assert!(list_names("0", 0));
        assert!(list_names("0-1,4\n", 4) && list_names("0-1,4", 1));
        assert!(!list_names("0-1,4", 3) && !list_names("", 0) && !list_names("x", 0));
    }

    #[test]
    fn groups_up_to_the_root_are_asked_in_both_hierarchies() {
        let of = |text| group_directories(text);
        assert_eq!(
            of("0::/a/b\n"),
            ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup/"].map(PathBuf::from)
        );
        assert_eq!(
            of("5:cpu,memory:/x\n4:pids:/y\n"),
            ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory/"].map(PathBuf::from)
        );
    }

    #[test]
    fn a_group_leaves_its_limit_minus_what_cannot_be_dropped() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        write("memory.max", "max\n");
        assert_eq!(group_available(directory.path()), None);
        write("memory.max", "1000\n");
        write("memory.current", "700\n");
        write("memory.stat", "anon 100\ninactive_file 50\n");
        assert_eq!(group_available(directory.path()), Some(350));
    }

    #[test]
    fn huge_pages_promised_to_a_mapping_are_not_free() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(free_huge_pages(directory.path()), None);
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        write("free_hugepages", "8\n");
        write("resv_hugepages", "3\n");
        assert_eq!(free_huge_pages(directory.path()), Some(5));
    }

    #[test]
    fn this_host_says_what_it_has() {
        let (bytes, _bound) = available_memory(None).expect("Linux says how much is available");
        assert!(bytes > 0);
    }
}
