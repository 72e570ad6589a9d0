//! What holds this process back: limits, capabilities, system call filters, containers.

use super::root::HostRoot;

/// A resource limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// What holds now; `None` where unlimited.
    pub soft: Option<u64>,
    /// How far the process may raise it; `None` where unlimited.
    pub hard: Option<u64>,
}

/// A capability, by its number in the kernel's masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Capability {
    /// `CAP_IPC_LOCK`: to lock and register memory beyond the limit.
    IpcLock = 14,
    /// `CAP_SYS_NICE`: to place memory and threads.
    SysNice = 23,
}

/// What a container is made by, as far as it shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Container {
    /// Kubernetes.
    Kubernetes,
    /// Docker, Podman, systemd-nspawn or another one.
    Other,
}

/// Bytes that may be locked.
#[must_use]
pub fn memlock(root: &HostRoot) -> Option<Limit> {
    limit(root, "Max locked memory")
}

/// Descriptors that may be open.
#[must_use]
pub fn open_files(root: &HostRoot) -> Option<Limit> {
    limit(root, "Max open files")
}

fn limit(root: &HostRoot, name: &str) -> Option<Limit> {
    let text = root.text("proc/self/limits")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let mut values = line.split_whitespace().map(|value| match value {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    });
    Some(Limit { soft: values.next()??, hard: values.next()?? })
}

/// Whether this process has a capability that counts for the whole host: in a user namespace of its
/// own, a container's, it has them all and the kernel honours none of those asked for here.
#[must_use]
pub fn has(root: &HostRoot, capability: Capability) -> bool {
    let mask = status(root, "CapEff").and_then(|mask| u64::from_str_radix(&mask, 16).ok());
    mask.is_some_and(|mask| mask >> (capability as u32) & 1 == 1) && !in_user_namespace(root)
}

fn in_user_namespace(root: &HostRoot) -> bool {
    root.text("proc/self/uid_map")
        .is_some_and(|map| map.split_whitespace().collect::<Vec<_>>() != ["0", "0", "4294967295"])
}

/// Whether a filter decides which system calls this process may make.
#[must_use]
pub fn has_call_filter(root: &HostRoot) -> bool {
    status(root, "Seccomp").as_deref() == Some("2")
}

fn status(root: &HostRoot, name: &str) -> Option<String> {
    let text = root.text("proc/self/status")?;
    let (_, value) =
        text.lines().filter_map(|line| line.split_once(':')).find(|(label, _)| *label == name)?;
    Some(value.trim().to_owned())
}

/// The container that this process runs in.
#[must_use]
pub fn container(root: &HostRoot) -> Option<Container> {
    const MARKS: [&str; 3] = [".dockerenv", "run/.containerenv", "run/systemd/container"];
    if root.exists("var/run/secrets/kubernetes.io") {
        return Some(Container::Kubernetes);
    }
    MARKS.iter().any(|mark| root.exists(mark)).then_some(Container::Other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_kernel_writes_them() {
        let (_directory, root) = HostRoot::imitation(&[(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max open files            1024                 4096                 files     \n\
             Max locked memory         65536                unlimited            bytes     \n",
        )]);
        assert_eq!(memlock(&root), Some(Limit { soft: Some(65536), hard: None }));
        assert_eq!(open_files(&root), Some(Limit { soft: Some(1024), hard: Some(4096) }));
        assert_eq!(memlock(&HostRoot::at("/nonexistent")), None);
    }

    #[test]
    fn capabilities_count_in_the_first_user_namespace_only() {
        // Docker's default set, and the same with IPC_LOCK.
        let (plain, with) = ("CapEff:\t00000000a80425fb\n", "CapEff:\t00000000a80465fb\n");
        let initial = "         0          0 4294967295\n";
        let has_it = |status, map| {
            let files = [("proc/self/status", status), ("proc/self/uid_map", map)];
            let (_directory, root) = HostRoot::imitation(&files);
            has(&root, Capability::IpcLock)
        };
        assert!(!has_it(plain, initial));
        assert!(has_it(with, initial));
        assert!(!has_it(with, "0 100000 65536\n"));
    }

    #[test]
    fn this_process_has_limits() {
        let here = HostRoot::host();
        let soft = memlock(&here).unwrap().soft;
        assert_eq!(soft, crate::sys::limits::memlock());
        assert!(open_files(&here).is_some() && status(&here, "CapEff").is_some());
    }

    #[test]
    fn filters_and_containers_are_told() {
        let (_directory, root) = HostRoot::imitation(&[
            ("proc/self/status", "NoNewPrivs:\t0\nSeccomp:\t2\nSeccomp_filters:\t1\n"),
            (".dockerenv", ""),
        ]);
        assert!(has_call_filter(&root));
        assert_eq!(container(&root), Some(Container::Other));
        let (_directory, root) = HostRoot::imitation(&[
            ("proc/self/status", "Seccomp:\t0\n"),
            ("var/run/secrets/kubernetes.io/serviceaccount/token", "x"),
        ]);
        assert!(!has_call_filter(&root));
        assert_eq!(container(&root), Some(Container::Kubernetes));
        assert_eq!(container(&HostRoot::at("/nonexistent")), None);
    }
}
