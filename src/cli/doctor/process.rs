//! What this process may do: lock memory, open files, place memory.

use super::{Finding, Host, Status, memory};
use crate::sys::confinement::{self, Capability, Container, Limit};
use crate::sys::host;

/// Locked memory below which no pool worth serving can be registered, bytes.
const MEMLOCK_LEAST: u64 = 64 << 20;

/// Open files that a node with a few hundred peers has: a descriptor for each stream of each
/// connection, a few for each local client.
const OPEN_FILES_LEAST: u64 = 4096;

/// The kernel's own default for mappings of one process.
const MAPPINGS_LEAST: u64 = 65_530;

/// How much memory may be registered with a device, and the capability that lifts the limit.
pub(super) fn locked_memory(host: &Host) -> Vec<Finding> {
    let capable = confinement::has(&host.root, Capability::IpcLock);
    let Some(limit) = confinement::memlock(&host.root) else {
        return vec![unreadable("memlock", "/proc/self/limits")];
    };
    let available = host::available_memory_of(&host.root, None).map(|(bytes, _bound)| bytes);
    let status = match limit.soft {
        _any if capable => Status::Ok,
        None => Status::Ok,
        Some(bytes) if available.is_some_and(|available| bytes >= available) => Status::Ok,
        Some(bytes) if bytes < MEMLOCK_LEAST => host.rdma_problem(),
        Some(_some) => Status::Warn,
    };
    vec![memlock(host, limit, status, capable), ipc_lock(host, status, capable)]
}

fn memlock(host: &Host, limit: Limit, status: Status, capable: bool) -> Finding {
    const CHECK: &str = "memlock";
    let Some(bytes) = limit.soft else {
        return Finding::ok(CHECK, "memory to register is unlimited");
    };
    let bytes = memory::human(bytes);
    if capable {
        return Finding::ok(CHECK, format!("{bytes}, which CAP_IPC_LOCK lifts"));
    }
    if status == Status::Ok {
        return Finding::ok(CHECK, format!("{bytes} may be registered, more than is available"));
    }
    let what = format!("at most {bytes} may be registered with a device: larger pools are refused");
    let remedy = match confinement::container(&host.root) {
        Some(Container::Kubernetes) => {
            "give the pod IPC_LOCK, or raise the container runtime's \
             limit (LimitMEMLOCK=infinity in its systemd unit)"
        }
        Some(Container::Other) => "start the container with --ulimit memlock=-1",
        None if limit.hard.is_none() => "ulimit -l unlimited",
        None => {
            "LimitMEMLOCK=infinity in the systemd unit, or `* - memlock unlimited` in \
             /etc/security/limits.conf and a new login"
        }
    };
    Finding::bad(CHECK, status, what, remedy)
}

fn ipc_lock(host: &Host, status: Status, capable: bool) -> Finding {
    const CHECK: &str = "capability";
    if capable {
        return Finding::ok(CHECK, "CAP_IPC_LOCK is there");
    }
    if status == Status::Ok {
        return Finding::ok(CHECK, "CAP_IPC_LOCK is not there and not needed: the limit is enough");
    }
    let remedy = match confinement::container(&host.root) {
        Some(Container::Kubernetes) => "securityContext.capabilities.add: [\"IPC_LOCK\"]",
        Some(Container::Other) => "start the container with --cap-add=IPC_LOCK",
        None => "AmbientCapabilities=CAP_IPC_LOCK in the systemd unit, or raise the limit above",
    };
    Finding::bad(CHECK, status, "CAP_IPC_LOCK is not there: the limit above holds", remedy)
}

/// What holds whatever the transport is.
pub(super) fn confinement(host: &Host) -> Vec<Finding> {
    vec![open_files(host), mappings(host), call_filter(host)]
}

fn open_files(host: &Host) -> Finding {
    const CHECK: &str = "open-files";
    let Some(limit) = confinement::open_files(&host.root) else {
        return unreadable(CHECK, "/proc/self/limits");
    };
    // A node raises the limit to the hard one when it starts.
    match limit.hard {
        None => Finding::ok(CHECK, "unlimited"),
        Some(most) if most >= OPEN_FILES_LEAST => Finding::ok(CHECK, format!("up to {most}")),
        Some(most) => Finding::bad(
            CHECK,
            Status::Warn,
            format!("up to {most}: a node needs one for each stream of each peer"),
            match confinement::container(&host.root) {
                Some(_container) => "start the container with --ulimit nofile=1048576",
                None => "LimitNOFILE=1048576 in the systemd unit, or ulimit -Hn 1048576 as root",
            },
        ),
    }
}

fn mappings(host: &Host) -> Finding {
    const CHECK: &str = "max_map_count";
    match host.root.value::<u64>("proc/sys/vm/max_map_count") {
        None => unreadable(CHECK, "/proc/sys/vm/max_map_count"),
        Some(most) if most >= MAPPINGS_LEAST => Finding::ok(CHECK, format!("{most}")),
        Some(most) => Finding::bad(
            CHECK,
            Status::Warn,
            format!("{most} mappings: registering splits mappings, and an engine has many"),
            "sysctl -w vm.max_map_count=262144",
        ),
    }
}

fn call_filter(host: &Host) -> Finding {
    const CHECK: &str = "seccomp";
    if !confinement::has_call_filter(&host.root) {
        return Finding::ok(CHECK, "no filter of system calls");
    }
    if confinement::has(&host.root, Capability::SysNice) {
        return Finding::ok(CHECK, "a filter of system calls; CAP_SYS_NICE is there");
    }
    Finding::bad(
        CHECK,
        Status::Warn,
        "a filter of system calls, and no CAP_SYS_NICE: pools with a NUMA node may be refused (mbind)",
        match confinement::container(&host.root) {
            Some(Container::Kubernetes) => "securityContext.capabilities.add: [\"SYS_NICE\"]",
            _other => "start the container with --cap-add=SYS_NICE",
        },
    )
}

fn unreadable(check: &'static str, file: &str) -> Finding {
    Finding::bad(check, Status::Warn, format!("{file} cannot be read"), "mount /proc")
}
