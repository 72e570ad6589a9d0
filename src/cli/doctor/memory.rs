//! Memory for pools: ordinary and huge pages.

use super::{Finding, Host, Status, Wanted};
use crate::sys::host;

/// Memory below which there is no pool, and below which there is a small one, bytes.
const AVAILABLE_LEAST: u64 = 128 << 20;
const AVAILABLE_GOOD: u64 = 2 << 30;

const MIB: u64 = 1 << 20;
const PAGES: [(u64, &str); 2] = [(2 * MIB, "2MiB"), (1024 * MIB, "1GiB")];

/// What is left for pools.
pub(super) fn probe(host: &Host) -> Vec<Finding> {
    vec![available(host), huge_pages(host)]
}

fn available(host: &Host) -> Finding {
    const CHECK: &str = "memory";
    let Some((bytes, bound)) = host::available_memory_of(&host.root, None) else {
        let what = "the kernel does not say how much memory is available";
        return Finding::bad(CHECK, Status::Warn, what, "mount /proc");
    };
    let what = format!("{} available for pools, by {bound}", human(bytes));
    let status = match bytes {
        0..AVAILABLE_LEAST => Status::Fail,
        AVAILABLE_LEAST..AVAILABLE_GOOD => Status::Warn,
        _enough => return Finding::ok(CHECK, what),
    };
    let remedy = match bound {
        host::MemoryBound::ControlGroup(_group) => {
            "raise that limit: --memory of the container, resources.limits of the pod, MemoryMax= \
             of the unit"
        }
        _host => "stop what else runs here, or take a host with more memory",
    };
    Finding::bad(CHECK, status, what, remedy)
}

fn huge_pages(host: &Host) -> Finding {
    const CHECK: &str = "huge-pages";
    let free = |bytes: u64| {
        let directory = host.root.path(host::huge_page_directory(bytes, None));
        host::free_huge_pages(&directory)
    };
    let counts = PAGES.map(|(bytes, name)| (bytes, name, free(bytes)));
    let told: Vec<String> = counts
        .iter()
        .filter_map(|(_, name, free)| free.map(|free| format!("{free} of {name} free")))
        .collect();
    if told.is_empty() {
        let what = "this kernel has none: pools have ordinary pages";
        return Finding::ok(CHECK, what);
    }
    let some = counts.iter().any(|(_, _, free)| free.unwrap_or(0) > 0);
    let what = told.join(", ");
    if some || host.wanted == Wanted::Tcp || host.devices.is_empty() {
        return Finding::ok(CHECK, what);
    }
    // A device translates addresses by page: a thousandth of the entries stays in its cache.
    Finding::bad(
        CHECK,
        Status::Warn,
        format!("{what}: a device reads memory in huge pages faster, with --huge-pages"),
        "sysctl -w vm.nr_hugepages=COUNT, a count of 2MiB pages for all pools",
    )
}

/// Bytes as people write them.
pub(super) fn human(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}
